"""Texts that mean harm, pasted or in the address: a message, no script, and all goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.page.test_explore import CONFIG, SMALL, after, painted, paste, show, slider, step

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGE = "<img src=x onerror=alert(1)>"
CLOSED = "</script><script>alert(1)</script>"
NAMES = (
    *("_name_or_path", "architectures", "model_type", "hidden_act", "torch_dtype"),
    *("transformers_version", "rope_scaling", "auto_map", "attention_bias", IMAGE, CLOSED),
)
REFUSED = {
    "an array": (json.dumps([CONFIG]), "object"),
    "a text": (json.dumps(IMAGE), "object"),
    "sizes beyond all": (json.dumps(CONFIG | {"hidden_size": 10**30}), "hidden_size = 1000"),
    "layers beyond all": (json.dumps(CONFIG | {"num_hidden_layers": 10**9}), "at most 10,000"),
    "a negative vocabulary": (json.dumps(CONFIG | {"vocab_size": -5}), "vocab_size = -5"),
    "more digits than are read": (json.dumps(CONFIG).replace("1024", "9" * 5000), "JSON"),
    "an infinite size": (json.dumps(CONFIG).replace("32000", "Infinity"), "vocab_size = inf"),
    "deep nesting": (json.dumps(CONFIG)[:-1] + ',"x":' + "[" * 90_000 + "]" * 90_000 + "}", "JSON"),
}
ADDRESSES = {
    f"explore?model={quote(IMAGE)}": "unknown model",
    f"explore?model={quote(CLOSED)}&gpus=16": "unknown model",
    "explore?gpus=-5": "gpus=-5: give a whole number",
    "explore?gpus=99999999999999999999": "give a whole number",
    f"explore?{quote(IMAGE)}=1": "unknown key",
    "explore?__proto__=1": "unknown key",
    "explore?config=%7B%22model_type%22%3A%22%3Cscript%3E%22%7D": "is not known",
    "learn?panel=data&zero=9": "zero",
    f"learn?panel=tensor&tp={quote(IMAGE)}": "tp",
    f"learn?panel=context&{quote(IMAGE)}=2": "unknown",
}
# These name nothing that is there, and lead to something that is.
LEADING = {
    "learn?panel=../../x": "learn?chapter=one-gpu",
    "learn?panel=constructor": "learn?chapter=one-gpu",
    "learn?chapter=../../x": "learn?chapter=one-gpu",
    "learn?panel=data&frame=9999": "learn?chapter=zero",
    "learn?panel=data&frame=-7": "learn?chapter=zero",
    "learn?panel=data&frame=1.5": "learn?chapter=zero&frame=1",
    "run": "explore?",
    "constructor": "explore?",
    "main": "explore?",
    "x';touch%20hacked;'?a=b": "explore?",
    "%E0%A4%A": "explore?",
}


@pytest.fixture
def guarded(page: Page) -> Iterator[Page]:
    """A page on which no dialog may open."""
    opened: list[str] = []

    def note(dialog: object) -> None:
        opened.append(str(dialog))
        dialog.dismiss()  # type: ignore[attr-defined]

    page.on("dialog", note)
    yield page
    page.wait_for_timeout(100)
    assert opened == []
    assert page.locator("img, main script").count() == 0


def test_configs_that_are_refused(guarded: Page, site: str) -> None:
    show(guarded, site, SMALL)
    words, address = step(guarded), guarded.url
    for text, said in REFUSED.values():
        paste(guarded, text)
        problem = guarded.locator(".controls .problem")
        problem.filter(has_text=said).wait_for()
        assert problem.locator("*").count() == 0
        assert (step(guarded), guarded.url) == (words, address)
    number = painted(guarded)
    slider(guarded, "tp").press("ArrowRight")
    after(guarded, number)


@pytest.mark.parametrize("harm", [IMAGE, CLOSED])
def test_harm_in_every_text_of_a_config(guarded: Page, site: str, harm: str) -> None:
    show(guarded, site, SMALL)
    for name in NAMES:
        number = painted(guarded)
        paste(guarded, json.dumps(CONFIG | {name: harm}))
        guarded.wait_for_function(
            "number => document.documentElement.dataset.painted > number"
            " || document.querySelector('.controls .problem').textContent",
            arg=number,
        )
        guarded.evaluate("hash => { location.hash = hash; }", "explore?model=llama-7b&gpus=16&tp=2")
        guarded.wait_for_function("() => location.hash.includes('model=llama-7b&machine')")
    assert guarded.locator("#panel-numbers .tile").count() > 4


def test_addresses_that_are_refused(guarded: Page, site: str) -> None:
    for place, said in ADDRESSES.items():
        if place.startswith("explore"):
            guarded.goto("about:blank")  # another address alone would not load the page anew
        guarded.goto(f"{site}#{place}")
        where = ".controls" if place.startswith("explore") else f"#panel-{place[12:].split('&')[0]}"
        problem = guarded.locator(f"{where} .problem", has_text=said)
        problem.wait_for()
        assert problem.locator("*").count() == 0
        # Where the page begins is on show, and can be worked with.
        if place.startswith("explore"):
            guarded.wait_for_selector("html[data-painted]")
            assert guarded.locator("#panel-numbers .tile").count() > 4
            slider(guarded, "cp").press("ArrowRight")
            guarded.wait_for_function("() => location.hash.includes('cp=2')")
        else:
            guarded.locator("[aria-label='Step forward']").click()
            assert guarded.locator(".where").inner_text().startswith("2 of")


def test_addresses_that_name_nothing(guarded: Page, site: str) -> None:
    guarded.goto(f"{site}#learn")
    for place, reached in LEADING.items():
        guarded.evaluate("hash => { location.hash = hash; }", place)
        guarded.wait_for_function("text => location.hash.startsWith(`#${text}`)", arg=reached)
        tab = reached.partition("?")[0]
        guarded.wait_for_selector(f".tab-{tab} .panel")
        assert guarded.locator(f"[data-tab={tab}]").get_attribute("aria-selected") == "true"
    guarded.locator("#panel-numbers .tile").nth(4).wait_for()


def test_an_address_that_is_refused_later_leaves_what_was_there(guarded: Page, site: str) -> None:
    show(guarded, site, SMALL)
    address, words = guarded.url, step(guarded)
    guarded.evaluate("() => { location.hash = 'explore?gpus=-5'; }")
    guarded.locator(".controls .problem", has_text="gpus=-5").wait_for()
    assert (guarded.url, step(guarded)) == (address, words)
    assert guarded.locator("input[name=gpus]").input_value() == "16"

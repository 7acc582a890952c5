"""Every tab of the page: room, ink and colours in light and dark, the keyboard, the text twins."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fivefold_page.document import LESSONS
from tests.page.conftest import LONG_MS, serve
from tests.page.ink import ink

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

RUN = Path(__file__).parents[2] / "examples" / "runs" / "llama-3.2-1b-h200"
PICTURES = {"explore": 8, "run": 9}  # at the least; a lesson has one
SMALL = "explore?model=llama-7b&gpus=16&tp=2&pp=2&batch=64&schedule=1f1b&zero=1"
# Letters of charts have the colour of the page's, whatever the theme.
INKS = """() => {
  const ink = getComputedStyle(document.body).color;
  const letters = [...document.querySelectorAll(".chart .xtick text, .chart .ytick text")];
  return [ink, [...new Set(letters.map((one) => getComputedStyle(one).fill))]];
}"""
FOCUS = """() => {
  const node = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  return {
    tag: node.tagName,
    name: node.getAttribute("name") ?? node.textContent.slice(0, 30),
    shown: outlineStyle !== "none" && parseFloat(outlineWidth) > 0,
    inside: box.bottom > 0 && box.top < innerHeight && box.width > 0,
  };
}"""


@pytest.fixture(scope="module")
def run_site() -> Iterator[str]:
    """A live server of a run on a GPU."""
    process, address = serve(str(RUN))
    yield address
    process.terminate()
    assert process.wait(10) == 0


def opened(page: Page, site: str, place: str) -> None:
    """Go there, and wait until all is drawn."""
    page.goto(f"{site}#{place}")
    tab = place.partition("?")[0]
    if tab == "explore":
        page.wait_for_selector("html[data-painted]")
        page.locator("#panel-ranking .front-chart .point").first.wait_for(timeout=LONG_MS)
        page.locator("#panel-curves figure:nth-of-type(2) .scatterlayer").wait_for(timeout=LONG_MS)
    elif tab == "learn":
        page.wait_for_selector(".says:not(:empty)")
    else:
        page.wait_for_selector("#panel-step .timeline svg")


def looked_at(page: Page, reader: Page, at_least: int) -> None:
    """At two widths, in light and dark: no sideways scroll, no blank picture, letters to read."""
    inks: set[str] = set()
    for width, theme in product((1280, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=theme)
        page.wait_for_function("() => new Promise((done) => setTimeout(() => done(true), 150))")
        scroll, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert scroll <= inner == width, theme
        found = ink(page, reader)
        assert len(found) >= at_least
        assert not [one for one in found if one.is_blank], (width, theme)
        letters, fills = page.evaluate(INKS)
        assert set(fills) <= {letters}, (width, theme)
        inks.add(letters)
    assert len(inks) == 2


def test_explore(page: Page, reader: Page, site: str) -> None:
    opened(page, site, "explore")
    looked_at(page, reader, PICTURES["explore"])


def test_learn(page: Page, reader: Page, site: str) -> None:
    for name in LESSONS:
        opened(page, site, f"learn?panel={name}&frame=2")
        page.wait_for_selector(f"#panel-{name} .says:not(:empty)")
        looked_at(page, reader, 0 if name in ("compare", "trainers") else 1)  # tables


def test_run(page: Page, reader: Page, run_site: str) -> None:
    opened(page, run_site, "run")
    looked_at(page, reader, PICTURES["run"])


def test_a_blank_chart_is_found(page: Page, reader: Page, run_site: str) -> None:
    """The look at ink itself: without its marks a chart is blank, though its axes are there."""
    opened(page, run_site, "run")
    page.add_style_tag(content="#panel-loss .trace, #panel-loss .legend { opacity: 0 !important }")
    page.add_style_tag(content="#panel-step .timeline svg > * { opacity: 0 }")
    blank = {one.name.partition(":")[0] for one in ink(page, reader) if one.is_blank}
    assert blank == {"panel-loss", "panel-step"}


def test_tabs_by_arrow_keys(page: Page, run_site: str) -> None:
    opened(page, run_site, "run")
    page.locator("[data-tab=run]").focus()
    order = [("ArrowRight", "explore"), ("ArrowRight", "learn"), ("ArrowLeft", "explore")]
    for key, name in [*order, ("ArrowLeft", "run")]:
        page.keyboard.press(key)
        page.wait_for_selector(f".tab-{name}")
        tab = page.locator(f"[data-tab={name}]")
        assert tab.get_attribute("aria-selected") == "true"
        assert page.evaluate("document.activeElement.dataset.tab") == name
        assert page.evaluate(FOCUS)["shown"]
        assert page.locator("[role=tab][tabindex='0']").count() == 1
        assert page.url.partition("#")[2].startswith(name)
    # The state of a tab that was left is there again.
    page.wait_for_selector("#panel-step .timeline svg")


def test_a_tab_that_loads_slowly_does_not_push_itself_forward(page: Page, run_site: str) -> None:
    opened(page, run_site, "run")
    held: list[Route] = []
    page.route("**/static/learn.js", lambda route: held.append(route))
    with page.expect_request("**/static/learn.js"):
        page.locator("[data-tab=learn]").click()
    page.locator("[data-tab=run]").click()
    page.wait_for_function("() => location.hash === '#run'")
    with page.expect_response("**/static/learn.js"):
        held[0].continue_()
    page.wait_for_timeout(300)
    assert page.locator(".tab-run").is_visible()
    page.locator("[data-tab=learn]").click()
    page.wait_for_selector(".tab-learn .says:not(:empty)")


def test_the_skip_link_keeps_the_state(page: Page, site: str) -> None:
    opened(page, site, "learn?panel=expert&ep=8")
    address = page.url
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url == address


def test_the_way_back_leads_over_states_and_out(page: Page, site: str) -> None:
    page.goto("about:blank")
    page.goto(f"{site}#{SMALL}")
    page.wait_for_selector("html[data-painted]")
    page.wait_for_timeout(1100)  # who changes something sooner is still at the same
    page.locator(".slider input[name=tp]").press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('tp=4')")
    page.wait_for_timeout(1100)
    page.go_back()
    page.wait_for_function("() => location.hash.includes('tp=2')")
    degree = page.locator(".slider:has(input[name=tp]) .degree")
    degree.filter(has_text=re.compile("^2$")).wait_for()
    page.wait_for_timeout(1100)
    page.go_back()
    assert page.url == "about:blank"


def test_focus_is_seen_wherever_it_goes(page: Page, site: str) -> None:
    page.goto(f"{site}#{SMALL}")
    page.wait_for_selector("html[data-painted]")
    seen: list[dict[str, Any]] = []
    for _ in range(45):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUS))
    assert not [
        one for one in seen if one["tag"] != "BODY" and not (one["shown"] and one["inside"])
    ]
    names = {one["name"] for one in seen}
    assert {"model", "gpus", "dp", "tp", "pp", "cp", "machine", "schedule", "plan.toml"} <= names


def test_a_slider_and_the_theme_by_keyboard(page: Page, site: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(f"{site}#{SMALL}")
    page.wait_for_selector("html[data-painted]")
    page.locator(".slider input[name=tp]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('tp=4')")
    # Plotly draws the front of the ranking, whose letters do not follow the page by themselves.
    page.locator("#panel-ranking .front-chart .point").first.wait_for(timeout=LONG_MS)
    paper = "getComputedStyle(document.body).backgroundColor"
    page.locator("#theme").focus()
    papers = [page.evaluate(paper)]
    for _ in range(2):
        page.keyboard.press("Enter")
        papers.append(page.evaluate(paper))
        letters, fills = page.evaluate(INKS)
        assert fills and set(fills) <= {letters}
    assert papers[0] == papers[2] != papers[1]
    assert "tp=4" in page.url


def test_the_stepper_by_keyboard(page: Page, site: str) -> None:
    opened(page, site, "learn?panel=context")
    page.locator("[aria-label='Step forward']").focus()
    said = page.inner_text(".says")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".stepper .where").startswith("2 of")
    assert page.inner_text(".says") != said
    page.locator(".stepper input").focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".stepper .where").startswith("3 of")
    assert "frame=2" in page.url
    page.keyboard.press("Home")
    assert page.inner_text(".says") == said


def twin(page: Page, panel: str) -> str:
    """The command under a panel."""
    page.locator(f"#panel-{panel} .twin summary").click()
    page.wait_for_selector(f"#panel-{panel} .twin code:not(:empty)")
    return page.locator(f"#panel-{panel} .twin code").inner_text()


def printed(command: str) -> str:
    """What a command of the page prints."""
    words = shlex.split(command)
    assert words[:2] == ["fivefold", "observe"]
    words = [str(RUN) if word == "RUN" else word for word in words[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_text_twin_of_a_job_follows_it(page: Page, site: str) -> None:
    page.goto(f"{site}#{SMALL}")
    page.wait_for_selector("html[data-painted]")
    command = twin(page, "numbers")
    assert "tp=2" in command
    page.locator(".slider input[name=tp]").press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('tp=4')")
    code = page.locator("#panel-numbers .twin code")
    assert code.inner_text() == command.replace("tp=2", "tp=4")
    step = page.locator("#panel-numbers .tile b").nth(1).inner_text()
    assert step in printed(code.inner_text())


def test_the_text_twins_of_lessons_and_runs(page: Page, run_site: str) -> None:
    opened(page, run_site, "learn?panel=tensor&tp=4&frame=1")
    takeaway = page.locator(".takeaways li").first.inner_text()
    out = printed(twin(page, "tensor"))
    assert re.sub(r"\s+", "", takeaway) in re.sub(r"\s+", "", out)
    opened(page, run_site, "run")
    assert "2.936" in printed(twin(page, "loss"))


def test_every_panel_has_a_twin(page: Page, run_site: str) -> None:
    for place in (SMALL, "learn?panel=data", "run"):
        page.goto(f"{run_site}#{place}")
        page.wait_for_selector(f".tab-{place.partition('?')[0]} .panel")
        assert page.locator(".panel").count() == page.locator(".panel > .twin summary").count() > 0

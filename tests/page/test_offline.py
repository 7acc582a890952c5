"""The self-contained file in a browser without a network: it draws, and says what it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fivefold_page.learn.chapters import CHAPTERS
from tests.page.ink import ink

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RUN = Path(__file__).parents[2] / "examples" / "runs" / "llama-3.2-1b-h200"
INSIDE = ("file:", "data:", "blob:")
_MOST_BYTES = 20 * 2**20


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page as one file, without and with a run; each takes most of a minute of one core."""
    folder = tmp_path_factory.mktemp("files")
    command = [sys.executable, "-m", "fivefold", "observe"]
    working = {
        name: subprocess.Popen([*command, *words, "--html", str(folder / f"{name}.html")])
        for name, words in {"job": [], "run": [str(RUN)]}.items()
    }
    assert [process.wait(300) for process in working.values()] == [0, 0]
    return {name: folder / f"{name}.html" for name in working}


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    """A page without a network, which fails its test on an error or on a request."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_offline(True)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(INSIDE) else wrong.append(one.url))
    page.on("websocket", lambda one: wrong.append(one.url))
    yield page
    context.close()
    assert not wrong


def opened(page: Page, file: Path, place: str = "") -> None:
    page.goto("about:blank")  # or else another address of the same file would not load it anew
    page.goto(file.as_uri() + place)


def explored(page: Page, file: Path) -> None:
    opened(page, file)
    page.wait_for_selector("html[data-painted]")


def painted(page: Page) -> int:
    return int(page.locator("html").get_attribute("data-painted") or 0)


def after(page: Page, number: int) -> None:
    page.wait_for_function(
        "number => document.documentElement.dataset.painted > number", arg=number
    )


def problem(page: Page) -> str:
    return page.locator(".controls .problem").inner_text()


def blanks(page: Page, browser: Browser) -> list[str]:
    reader = browser.new_page()
    found = [one.name for one in ink(page, reader) if one.is_blank]
    reader.close()
    return found


def test_explore_is_drawn(offline: Page, browser: Browser, files: dict[str, Path]) -> None:
    assert files["job"].stat().st_size < _MOST_BYTES
    explored(offline, files["job"])
    assert "gpus=16384" in offline.url
    offline.locator("#panel-ranking .front-chart .point").first.wait_for()
    offline.locator("#panel-curves figure:nth-of-type(2) .scatterlayer").wait_for()
    assert offline.locator(".chart").count() >= 6
    assert blanks(offline, browser) == []
    for panel in offline.locator(".panel .problem").all():
        assert panel.inner_text() == ""


def test_every_slider_moves_a_step(offline: Page, files: dict[str, Path]) -> None:
    explored(offline, files["job"])
    start, moved = offline.evaluate("location.hash"), set[str]()
    for axis, key in product(("dp", "tp", "pp", "cp"), ("ArrowLeft", "ArrowRight")):
        number, slider = painted(offline), offline.locator(f".slider input[name={axis}]")
        before = slider.input_value()
        slider.press(key)
        if slider.input_value() == before:
            continue  # no value on that side is legal
        after(offline, number)
        assert offline.evaluate("location.hash") != start
        assert problem(offline) == ""
        moved.add(axis)
        number = painted(offline)
        offline.evaluate("hash => { location.hash = hash; }", start)
        after(offline, number)
    assert moved == {"dp", "tp", "pp", "cp"}


def test_what_the_file_lacks_is_said(offline: Page, files: dict[str, Path]) -> None:
    explored(offline, files["job"])
    offline.locator(".slider input[name=cp]").press("ArrowRight")
    after(offline, 1)
    address, degree = offline.url, offline.locator(".slider:has(input[name=tp]) .degree")
    offline.locator(".slider input[name=tp]").press("ArrowLeft")
    offline.locator(".controls .problem", has_text="not in this file").wait_for()
    assert "run: fivefold observe" in problem(offline)
    # What is on show is what the inputs say.
    assert degree.inner_text() == "8"
    assert offline.locator(".slider input[name=tp]").get_attribute("aria-valuetext") == "tp 8"
    assert offline.url == address
    offline.locator("input[name=gpus]").fill("8192")
    offline.locator("input[name=gpus]").press("Enter")
    offline.wait_for_function("document.querySelector('input[name=gpus]').value === '16384'")
    assert "not in this file" in problem(offline)
    offline.locator(".slider input[name=cp]").press("ArrowLeft")
    after(offline, 2)
    assert problem(offline) == ""


def test_a_layout_and_a_list_can_be_chosen(offline: Page, files: dict[str, Path]) -> None:
    explored(offline, files["job"])
    row = offline.locator("#panel-ranking tbody tr").nth(2)
    row.locator("button").click()
    offline.wait_for_selector("#panel-ranking tbody tr:nth-child(3)[data-here]")
    assert problem(offline) == ""
    explored(offline, files["job"])
    offline.locator("select[name=recompute]").select_option("full")
    after(offline, 1)
    assert "recompute=full" in offline.url
    with offline.expect_download() as plan:
        offline.get_by_role("button", name="plan.toml").click()
    assert 'recompute = "full"' in plan.value.path().read_text()


def test_every_lesson_is_drawn_and_can_be_changed(
    offline: Page, browser: Browser, files: dict[str, Path]
) -> None:
    opened(offline, files["job"], "#learn")
    for name, chapter in CHAPTERS.items():
        offline.locator(f".lessons [data-chapter={name}]").click()
        panel = offline.locator(f".chapter[data-chapter={name}] #panel-{chapter.panel}")
        panel.locator(".says:not(:empty)").wait_for()
        selects = panel.locator(".choices select")
        select = selects.nth(min(1, selects.count() - 1))
        key, value = select.get_attribute("name"), select.input_value()
        others = [one for one in select.locator("option").all_inner_texts() if one != value]
        select.select_option(others[0])
        offline.wait_for_function("text => location.hash.includes(text)", arg=f"{key}={others[0]}")
        assert panel.locator(".problem").inner_text() == ""
        panel.locator("[aria-label='Step forward']").click()
        assert panel.locator(".where").inner_text().startswith("2 of")
        assert blanks(offline, browser) == [], name


def test_a_lesson_says_what_the_file_lacks(offline: Page, files: dict[str, Path]) -> None:
    opened(offline, files["job"], "#learn?panel=landscape")
    panel = offline.locator("#panel-landscape")
    panel.locator(".says:not(:empty)").wait_for()
    for key, value in {"dp": "8", "tp": "4", "zero": "3"}.items():
        panel.locator(f"select[name={key}]").select_option(value)
    panel.locator(".problem", has_text="not in this file").wait_for()


def test_a_run_is_drawn(offline: Page, browser: Browser, files: dict[str, Path]) -> None:
    opened(offline, files["run"])
    offline.wait_for_selector("#panel-step .timeline svg")
    assert offline.url.endswith("#run")
    assert "done at step 60 of 60" in offline.inner_text("#panel-head")
    assert offline.locator(".chart").count() >= 8
    assert blanks(offline, browser) == []
    offline.fill("#panel-step input[type=number]", "58")
    offline.press("#panel-step input[type=number]", "Enter")
    offline.wait_for_function("location.hash.includes('step=58')")
    offline.fill("#panel-step input[type=number]", "3")
    offline.press("#panel-step input[type=number]", "Enter")
    offline.locator("#panel-step .problem", has_text="not in this file").wait_for()
    offline.locator("[data-tab=explore]").click()
    offline.wait_for_selector("html[data-painted]")
    assert problem(offline) == ""

"""Several runs side by side in a browser: the legend, what is chosen, and letters one can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests.page.conftest import serve
from tests.pure.fake_runs import PLANNED, FakeStep, add_sample, plan_of, records, usual, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("first", "second <b>bold<", "third")
LEAST_CONTRAST = 4.5
# Every text of the page, and its contrast to the nearest background that is not transparent.
CONTRASTS = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (one) => one.slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] > 0.5) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("main *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !node.getClientRects().length || node.closest(".timeline svg")) continue;
    const style = getComputedStyle(node);
    const ink = numbers(node.closest("svg") ? style.fill : style.color);
    const pair = [light(ink), light(paper(node))].sort((one, other) => other - one);
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), node.textContent.slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs: one is planned and has all that a run can have, one is of another batch."""
    where, step = tmp_path_factory.mktemp("runs"), FakeStep(plan_of(), usual)
    kept = records(40, planned=PLANNED, mfu=0.3, memory_gib=1.5, load=(1.5, 3.25))
    evals = {"web": {"loss": 4.2}, "code <i>": {"loss": 4.4}}
    kept[19] = replace(kept[19], eval_loss=4.2, evals=evals)
    first = write_run(
        where / NAMES[0], step.plan, kept, events=[step.lines(40)], ended=["failed", "done"]
    )
    add_sample(first, 20, "<script>alert(1)</script>", "wrote <img src=x onerror=alert(1)>")
    others = plan_of(microbatches=16)
    return [
        first,
        write_run(where / NAMES[1], others, [replace(one, loss=9.0) for one in records(20)]),
        write_run(where / NAMES[2], plan_of(), records(10)),
    ]


@pytest.fixture(scope="module")
def runs_site(folders: list[Path]) -> Iterator[str]:
    process, address = serve(*map(str, folders))
    yield address
    process.terminate()
    process.wait(10)


def opened(page: Page, address: str, place: str = "run") -> None:
    page.goto(f"{address}#{place}")
    page.wait_for_selector("#panel-runs .chart .main-svg")
    page.wait_for_selector("#panel-loss .main-svg")


LINES = "document.querySelector('#panel-runs .chart').data.map((one) => one.name)"


def test_runs_are_side_by_side_with_names_and_what_differs(page: Page, runs_site: str) -> None:
    opened(page, runs_site)
    assert page.locator("#panel-runs .run-legend b").all_inner_texts() == list(NAMES)
    assert page.evaluate(LINES) == ["first", "second ‹b›bold‹", "third"]
    dashes = "document.querySelector('#panel-runs .chart').data.map((one) => one.line.dash)"
    assert len({*page.evaluate(dashes)}) == 3
    rows = page.locator("#panel-runs .run-tables").inner_text()
    assert "microbatches" in rows and "9.0000" in rows and "bold<" in rows
    assert page.locator("#panel-runs .xtitle").all_text_contents()[:2] == ["step", "step"]


def test_runs_are_chosen_and_one_is_seen_in_detail(page: Page, runs_site: str) -> None:
    opened(page, runs_site)
    page.locator("#panel-runs input[type=checkbox]").nth(1).click()
    page.wait_for_function("() => location.hash.includes('runs=0%2C2')")
    page.wait_for_function(f"() => {LINES}.length === 2")
    assert page.evaluate(LINES) == ["first", "third"]
    page.locator("#panel-runs input[type=radio]").nth(2).click()
    page.wait_for_selector("#panel-head .run-facts dd:has-text('third')")
    assert "run=2" in page.evaluate("location.hash")
    # The third run has no events and no samples: no empty cards.
    assert page.locator("#panel-step").is_hidden() and page.locator("#panel-load").is_hidden()
    assert "events=true" in page.inner_text(".run-missing")
    opened(page, runs_site, "run?run=1&runs=1")
    page.wait_for_function(f"() => {LINES}.length === 1")
    assert "bold<" in page.inner_text("#panel-head .run-facts")


def test_sets_samples_and_failures_are_on_the_time_line(page: Page, runs_site: str) -> None:
    opened(page, runs_site)
    legend = page.text_content("#panel-loss .legend") or ""
    assert "evaluation web" in legend and "evaluation code ‹i›" in legend
    ticks = page.text_content("#panel-history .chart") or ""
    for lane in ("starts", "failures", "restarts", "evaluations", "samples"):
        assert lane in ticks
    assert "lost rank 3" in page.inner_text("#panel-history .run-events")
    said = page.inner_text("#panel-samples")
    assert "after step 20" in said and "<script>alert(1)</script>" in said


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_letter_of_the_run_tab_can_be_read(
    page: Page, runs_site: str, theme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=theme)
    opened(page, runs_site)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 100
    assert not [one for one in found if one[0] < LEAST_CONTRAST]


def test_runs_fit_on_a_phone(page: Page, runs_site: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, runs_site)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = page.locator("#panel-runs .run-choice label").all()
    assert all((one.bounding_box() or {"height": 0})["height"] >= 24 for one in boxes)

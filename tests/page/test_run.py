"""The Run tab in a browser: curves, one step over its plan, and a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fivefold.core.schedule.schedule import Step, actions_of
from tests.page.conftest import serve
from tests.pure.fake_runs import PLANNED, FakeStep, plan_of, records, usual, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

PANELS = ("head", "history", "loss", "rates", "memory", "load", "goodput", "step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps that goes on, with a restart, a skipped step and a stage that is slow."""

    def slow(rank: int, step: Step) -> float:
        return usual(rank, step) * (1.5 if actions_of(step)[0].stage == 2 else 1.0)

    step = FakeStep(plan_of(), slow)
    kept = records(60, planned=PLANNED, mfu=0.3, memory_gib=1.5, load=(1.5, 3.25))
    kept = [replace(one, seconds=step.length, restart=int(one.step > 30)) for one in kept]
    kept[9] = replace(kept[9], skipped="norm is not finite <script>alert(1)</script>")
    kept[59] = replace(kept[59], eval_loss=4.2)
    lost = [replace(one, restart=0) for one in kept[30:33]]
    events = [step.lines(59, 1), step.lines(60, 1)]
    where = tmp_path_factory.mktemp("runs") / "run"
    return write_run(where, step.plan, kept, lost=lost, events=events, ended=[None, None])


@pytest.fixture(scope="module")
def run_site(folder: Path) -> Iterator[str]:
    process, address = serve(str(folder))
    yield address
    process.terminate()
    process.wait(10)


def opened(page: Page, address: str) -> None:
    page.goto(f"{address}#run")
    page.wait_for_selector("#panel-step .timeline svg")


def test_every_panel_is_drawn(page: Page, run_site: str) -> None:
    opened(page, run_site)
    for name in PANELS:
        assert page.locator(f"#panel-{name}").is_visible()
    # What has no data is no empty card: one line says what would fill it.
    assert page.locator("#panel-samples").is_hidden()
    assert "sample_every" in page.inner_text(".run-missing")
    for name in ("history", "loss", "rates", "memory", "load", "goodput"):
        assert page.locator(f"#panel-{name} .chart .main-svg").count() >= 1
    assert "step 60 of 20" in page.inner_text("#panel-head .run-state")
    assert "<script>alert(1)</script>" in page.inner_text("#panel-history .run-events")
    assert "0.75 times the plan" in page.inner_text("#panel-rates")
    titles = page.locator("#panel-loss .xtitle, #panel-rates .xtitle").all_text_contents()
    assert len(titles) == 6 and set(titles) == {"step"}
    # A restart and a skipped step are marked on every curve.
    assert page.locator("#panel-loss .shapelayer path").count() >= 6


def test_the_largest_difference_is_named_and_a_step_can_be_chosen(
    page: Page, run_site: str
) -> None:
    opened(page, run_site)
    assert "stage 2's actions take" in page.inner_text("#panel-step .run-verdict")
    page.fill("#panel-step input[type=number]", "59")
    page.press("#panel-step input[type=number]", "Enter")
    page.wait_for_function("location.hash.includes('step=59')")
    page.select_option("#panel-step select", "1")
    page.wait_for_function("location.hash.includes('rank=1')")
    page.wait_for_selector("#panel-step .timeline svg text:has-text('rank 5 measured')")
    page.fill("#panel-step input[type=number]", "7")
    page.press("#panel-step input[type=number]", "Enter")
    page.wait_for_selector("#panel-step .run-verdict:has-text('has no events')")


def test_a_run_that_goes_on_is_asked_again(page: Page, run_site: str, folder: Path) -> None:
    opened(page, run_site)
    newest = replace(records(61)[-1], restart=1, loss=3.5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(newest.to_json()) + "\n")
    page.wait_for_selector("#panel-head .run-state:has-text('step 61')", timeout=8_000)
    assert page.locator("#panel-step .timeline svg").count() == 1


def test_a_run_that_goes_on_keeps_the_zoom_of_its_reader(
    page: Page, run_site: str, folder: Path
) -> None:
    opened(page, run_site)
    drawn = "document.querySelector('#panel-loss .chart')._fullLayout"
    box = page.locator("#panel-loss .chart .nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    page.mouse.up()
    page.wait_for_function(f"() => {drawn}.xaxis.range[1] < 40")
    zoomed = page.evaluate(f"{drawn}.xaxis.range")
    newest = replace(records(62)[-1], restart=1, loss=3.4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(newest.to_json()) + "\n")
    page.wait_for_selector("#panel-head .run-state:has-text('step 62')", timeout=8_000)
    newest_x = "document.querySelector('#panel-loss .chart').data[0].x.at(-1)"
    page.wait_for_function(f"() => {newest_x} === 62")
    assert page.evaluate(f"{drawn}.xaxis.range") == zoomed


def test_a_step_that_is_no_number_is_refused_and_the_rest_is_drawn(
    page: Page, run_site: str
) -> None:
    page.goto(f"{run_site}#run?step=many")
    page.wait_for_selector("#panel-loss .main-svg")
    assert "give a whole number" in page.inner_text("#panel-step .problem")


def test_nothing_is_wider_than_a_phone(page: Page, run_site: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, run_site)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390

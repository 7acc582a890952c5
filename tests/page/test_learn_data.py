"""The data and the tensor panel in a browser: what is drawn is what Python answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fivefold_page.learn import data, tensor
from fivefold_page.learn.lesson import size_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

CARDS = "#panel-data svg[aria-label^='Rank']"
RANKS = "#panel-tensor [role=group][aria-label^='rank']"


def opened(page: Page, site: str, panel: str, **params: str) -> None:
    query = "&".join(f"{name}={value}" for name, value in params.items())
    page.goto(f"{site}#learn?panel={panel}&{query}")
    page.locator(f"#panel-{panel} .says:not(:empty)").wait_for()


def says(page: Page, panel: str) -> str:
    return page.inner_text(f"#panel-{panel} .says")


def test_a_step_under_zero_3(page: Page, site: str) -> None:
    frames = data.view({})["frames"]
    opened(page, site, "data")
    assert page.locator(CARDS).count() == 4
    page.click("#panel-data [aria-label='Step forward']")
    for frame in frames[1:4]:
        assert says(page, "data") == frame["says"]
        label = page.locator(CARDS).first.get_attribute("aria-label") or ""
        assert size_text(frame["live"][0]) in label
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert says(page, "data") == frames[3]["says"]
    assert size_text(frames[3]["moves"][0]["bytes"]) in page.inner_text("#panel-data .moves")


def test_whole_weights_cover_their_unit_and_slices_a_part(page: Page, site: str) -> None:
    """Widths of what is drawn as held: of one unit all, of the others a slice for each rank."""
    place = 4  # forward of block 1: whole, the next one on its way
    frame = data.view({})["frames"][place]
    assert frame["weights"].count("whole") == 1 and frame["weights"].count("arriving") == 1
    opened(page, site, "data", frame=str(place))
    blue = page.locator(CARDS).nth(1).locator("path[fill='#0072b2']:not([stroke])")
    held = blue.get_attribute("d") or ""
    widths = [float(box.split("h")[1].split("v")[0]) for box in held.split("M")[1:]]
    assert len(widths) == 6
    # Blocks are alike: the whole one is four times as wide as the slice of another.
    assert widths[2] == pytest.approx(4 * widths[1], rel=1e-6)


def test_choices_of_data_change_the_picture(page: Page, site: str) -> None:
    opened(page, site, "data", frame="3")
    page.select_option("#panel-data select[name=zero]", "1")
    page.locator("#panel-data tr[aria-current]", has_text="ZeRO-1").wait_for()
    page.select_option("#panel-data select[name=dp]", "8")
    page.locator(CARDS).nth(7).wait_for()
    assert "zero=1" in page.url and "dp=8" in page.url
    view = data.view({"zero": "1", "dp": "8"})
    for sentence in view["sentences"]:
        assert sentence in page.inner_text("#panel-data .takeaways")
    page.locator("#panel-data .chart path.js-fill").nth(2).wait_for()


def test_a_product_over_four_ranks(page: Page, site: str) -> None:
    opened(page, site, "tensor", tp="4", part="attention")
    frames = tensor.view({"tp": "4", "part": "attention"})["frames"]
    for place, frame in enumerate(frames):
        assert says(page, "tensor") == frame["says"]
        assert page.locator(RANKS).count() == 4
        for rank, equations in enumerate(frame["ranks"]):
            last = "; ".join(" ".join(map(str, row)) for row in equations[0][-1]["values"])
            card = page.locator(RANKS).nth(rank)
            assert card.locator(f"svg[aria-label$=': {last}']").count() >= 1
        for move in frame["moves"]:
            assert size_text(move["sent"]) in page.inner_text("#panel-tensor .moves")
        if place + 1 < len(frames):
            page.click("#panel-tensor [aria-label='Step forward']")


def test_the_reduced_numbers_stand_beside_those_of_one_device(page: Page, site: str) -> None:
    frames = tensor.view({"sp": "off"})["frames"]
    place = next(at for at, frame in enumerate(frames) if frame["phase"] == "reduce")
    opened(page, site, "tensor", sp="off", frame=str(place))
    one = page.locator("#panel-tensor .truth svg").get_attribute("aria-label") or ""
    results = page.locator(f"{RANKS} svg").evaluate_all("all => all.map(one => one.ariaLabel)")
    assert [one.split(": ")[1]] * 2 == [each.split(": ")[1] for each in results[1::2]]


@pytest.mark.parametrize("panel", ["data", "tensor"])
def test_nothing_is_wider_than_a_phone(page: Page, site: str, panel: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, site, panel, **{"data": {"dp": "8"}, "tensor": {"tp": "8"}}[panel])
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

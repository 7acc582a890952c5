"""The planner's best and the curves, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from fivefold_page.explore import search as explore_search
from fivefold_page.explore.state import State
from tests.page.conftest import LONG_MS

if TYPE_CHECKING:
    from playwright.sync_api import Page

STATE = State(
    model="llama-3.1-8b", gpus=16, batch=64, tp=2, pp=2, schedule="1f1b", chunks=1, zero=1
)
ROWS = "#panel-ranking .ranking tbody tr"
_COUNT = """
window.asked = [];
const whole = window.fetch;
window.fetch = (place, how) => { window.asked.push(String(place)); return whole(place, how); };
"""


def opened(page: Page, site: str, state: State = STATE) -> None:
    page.add_init_script(_COUNT)
    page.goto(f"{site}#explore?{urlencode(state.params())}")
    page.locator("#panel-ranking").scroll_into_view_if_needed(timeout=LONG_MS)


def asked(page: Page, name: str) -> int:
    return page.evaluate("name => window.asked.filter((each) => each.endsWith(name)).length", name)


def in_address(page: Page) -> dict[str, str]:
    return dict(parse_qsl(page.evaluate("location.hash").partition("?")[2]))


def test_a_layout_is_chosen_by_keyboard_and_marked(page: Page, site: str) -> None:
    opened(page, site)
    page.wait_for_selector(ROWS, timeout=LONG_MS)
    assert page.locator(ROWS).count() == 10
    assert page.locator("#panel-ranking .waits").is_hidden()
    page.wait_for_selector("#panel-ranking .front-chart .point", timeout=LONG_MS)
    assert page.locator("#panel-ranking .front-chart .point").count() >= 12
    button = page.locator(f"{ROWS}:nth-child(1) button")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{ROWS}[data-here]:nth-child(1)", timeout=LONG_MS)
    assert button.get_attribute("aria-current") == "true"
    assert page.locator(f"{ROWS}[data-here]").count() == 1
    reached = State.parse(in_address(page))
    assert button.inner_text().startswith(f"dp={reached.dp}")
    assert reached.estimate().step < STATE.estimate().step
    # The job is the same: nothing was searched again.
    assert (asked(page, "/ask/ranking"), asked(page, "/ask/curves")) == (1, 1)


def test_a_point_can_be_clicked(page: Page, site: str) -> None:
    opened(page, site)
    page.wait_for_selector("#panel-ranking .front-chart .point", timeout=LONG_MS)
    page.locator("#panel-ranking .front-chart").scroll_into_view_if_needed()
    place = page.locator("#panel-ranking .front-chart .trace >> nth=0 >> .point >> nth=0")
    box = place.bounding_box()
    assert box is not None
    before = page.evaluate("location.hash")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function("hash => location.hash !== hash", arg=before, timeout=LONG_MS)
    assert State.parse(in_address(page)).estimate().total < STATE.estimate().total


def test_another_job_is_searched_anew_and_one_that_fits_nowhere_says_so(
    page: Page, site: str
) -> None:
    opened(page, site)
    page.wait_for_selector(ROWS, timeout=LONG_MS)
    other = {**STATE.params(), "model": "llama-3.1-405b", "tp": "8"}
    page.evaluate("hash => { location.hash = hash; }", f"explore?{urlencode(other)}")
    page.locator("#panel-ranking").scroll_into_view_if_needed()
    said = page.locator("#panel-ranking .hint", has_text="does not fit")
    said.wait_for(timeout=LONG_MS)
    assert "it takes" in said.inner_text()
    assert page.locator(ROWS).first.is_hidden()
    assert asked(page, "/ask/ranking") == 2


def test_curves_of_strategies_are_drawn(page: Page, site: str) -> None:
    opened(page, site)
    chart = "#panel-curves figure:nth-of-type(2) .curve-chart"
    page.locator("#panel-curves").scroll_into_view_if_needed()
    page.wait_for_selector(f"{chart} .scatterlayer .trace", timeout=LONG_MS)
    drawn: list[dict[str, Any]] = page.evaluate(
        """chart => document.querySelector(chart).data.map(
          ({ name, line, y, marker }) => ({ name, dash: line.dash, y, symbol: marker?.symbol }))""",
        chart,
    )
    lines = [one for one in drawn if one["symbol"]]
    assert len(lines) == 15
    assert {one["dash"] for one in lines} == {"solid", "dash", "dot"}
    assert len({one["symbol"] for one in lines}) == 5
    by_dash = {(one["name"], one["dash"]): one["y"] for one in lines}
    for name in {one["name"] for one in lines}:
        pairs = zip(by_dash[name, "dash"], by_dash[name, "dot"], strict=True)
        assert all(selective > full for selective, full in pairs)
    words = page.locator("#panel-curves figure:nth-of-type(2) li")
    assert words.count() == 5 and "longest that fits" in words.first.inner_text()


def test_curves_of_the_layout_itself(page: Page, site: str) -> None:
    opened(page, site)
    found: list[list[float]] = page.evaluate(
        """async ([part, state]) => {
          const { create } = await import("fivefold/curves.js");
          const body = document.body.appendChild(document.createElement("div"));
          create(body).update(part, { state });
          return body.querySelector(".curve-chart").data.map(({ y }) => y);
        }""",
        [explore_search.current(STATE), STATE.params()],
    )
    assert len(found) == 4
    assert found[-1][0] * 2**30 == STATE.estimate().total


def test_the_table_fits_its_box(page: Page, site: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    opened(page, site)
    page.wait_for_selector(ROWS, timeout=LONG_MS)
    wide = "() => { const box = document.querySelector('#panel-ranking .wide');"
    assert page.evaluate(f"{wide} return box.scrollWidth - box.clientWidth; }}") <= 0


def test_nothing_is_wider_than_a_telephone(page: Page, site: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, site)
    page.wait_for_selector(ROWS, timeout=LONG_MS)
    page.locator("#panel-curves").scroll_into_view_if_needed()
    page.wait_for_selector("#panel-curves .scatterlayer .trace", timeout=LONG_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

"""The race, the ring and the experts in a browser: stepped through, changed, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold_page.learn import context, expert, pipeline

if TYPE_CHECKING:
    from playwright.sync_api import Page


def show(page: Page, site: str, name: str, query: str = "") -> None:
    page.goto(f"{site}#learn?panel={name}{query}")
    page.wait_for_selector(f"#panel-{name} .picture svg")
    page.wait_for_function("document.querySelector('.says').textContent !== ''")


def says(page: Page) -> str:
    return page.inner_text(".says")


def step(page: Page) -> None:
    page.click("[aria-label='Step forward']")


def test_the_race_is_run_to_its_finish(page: Page, site: str) -> None:
    view = pipeline.view({})
    show(page, site, "pipeline")
    lanes = page.query_selector_all(".racer")
    assert [each.get_attribute("data-racer") for each in lanes] == [
        each["name"] for each in view["racers"]
    ]
    assert says(page) == view["frames"][0]["says"]
    cursor = "document.querySelector('.racer .timeline svg g > path:last-child').getAttribute('d')"
    before = page.evaluate(cursor)
    step(page)
    assert page.evaluate(cursor) != before
    first = page.query_selector(".racer .now")
    assert first is not None
    assert first.inner_text() == " ".join(view["frames"][1]["now"][0])
    page.focus("[aria-label='Play or stop']")
    for _ in view["frames"]:
        page.keyboard.press("ArrowRight")
    assert says(page) == view["frames"][-1]["says"]
    badges = [each.inner_text() for each in page.query_selector_all(".badge")]
    assert badges[0] == "finished 5th at 33"
    assert badges[3] == "finished 1st at 25.5"


def test_the_race_changes_with_its_choices(page: Page, site: str) -> None:
    show(page, site, "pipeline")
    page.select_option("select[name=schedules]", "bidirectional")
    page.wait_for_selector("[data-racer=dualpipe]")
    page.select_option("select[name=stages]", "3")
    page.wait_for_selector("text=dualpipe is not in this race")
    assert len(page.query_selector_all(".racer")) == 2
    assert "schedules=bidirectional" in page.url and "stages=3" in page.url


def test_the_ring_turns(page: Page, site: str) -> None:
    view = context.view({"kind": "zigzag"})
    show(page, site, "context")
    for place, frame in enumerate(view["frames"]):
        if place:
            step(page)
        assert says(page) == frame["says"]
        assert len(page.query_selector_all(".ring .move")) == len(frame["moves"])
        label = page.get_attribute(".ring svg", "aria-label") or ""
        for rank, held in enumerate(frame["holds"]):
            assert f"rank {rank} has the keys of {held[0]}" in label
        shown = page.query_selector_all(".triangle path[opacity='1']")
        assert len(shown) == sum(bool(runs) for runs in frame["runs"])
    turned = page.evaluate("document.querySelector('.ring [data-owner]').style.transform")
    assert turned == "rotate(270deg)"  # three hops of a ring of four


def test_every_kind_can_be_walked_through(page: Page, site: str) -> None:
    show(page, site, "context", "&cp=8&window=16")
    for kind in context.KINDS:
        view = context.view({"kind": kind, "cp": "8", "window": "16"})
        page.select_option("select[name=kind]", kind)
        page.wait_for_selector(f"tr[aria-current=true] th:text-is('{kind}')")
        for _ in view["frames"][1:]:
            step(page)
        assert says(page) == view["frames"][-1]["says"]


def test_experts_from_scores_to_sums(page: Page, site: str) -> None:
    params = {"skew": "heavy", "capacity": "capacity:1", "nodes": "2"}
    view = expert.view(params)
    show(page, site, "expert", "&" + "&".join(f"{k}={v}" for k, v in params.items()))
    for place, frame in enumerate(view["frames"]):
        if place:
            step(page)
        assert says(page) == frame["says"]
    cells = page.locator("#panel-expert table tbody tr").first.locator("td").all_inner_texts()
    assert [int(each) for each in cells[:-1]] == view["moves"]["near"][0]
    crossed = page.evaluate(
        "[...document.querySelectorAll('.choices-map .dropped')]"
        ".reduce((sum, each) => sum + (each.getAttribute('d').match(/M/g) ?? []).length / 2, 0)"
    )
    assert crossed == view["numbers"]["dropped"]


def test_nothing_is_wider_than_a_phone_and_no_chart_is_blank(page: Page, site: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for name in ("pipeline", "context", "expert"):
        show(page, site, name)
        step(page)
        page.wait_for_selector(f"#panel-{name} .chart .points path", state="attached", timeout=5000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390

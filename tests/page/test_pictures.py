"""The GPU map and the pipeline timeline in a browser: what they draw, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.clock import Timeline
from fivefold_page import timeline
from fivefold_page.document import STATIC
from fivefold_page.explore import panels as explore_panels
from tests.pure.timelines import timeline as played

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CREATE = """async ([module, view]) => {
  const { create } = await import(`fivefold/${module}.js`);
  const host = document.createElement("div");
  document.body.replaceChildren(host);
  window.shown = create(host);
  const start = performance.now();
  shown.update(view, {});
  return performance.now() - start;
}"""
GROUPS = """async ([view, asked]) => {
  const { groupOf } = await import("fivefold/gpu_map_grid.js");
  return asked.map(([axis, rank]) => groupOf(view, view.axes[axis], rank));
}"""
# Every rank is found where it lies; areas of consecutive ranks hold their middles and no others.
PLACES = """async ([view, width, runs]) => {
  const { areaOf, gridOf, placeOf, rankAt } = await import("fivefold/gpu_map_grid.js");
  const grid = gridOf(view, width, 480);
  const middle = (rank) => {
    const { x, y } = placeOf(grid, rank);
    return [x + grid.cell / 2, y + grid.cell / 2];
  };
  const ranks = Array.from({ length: view.world }, (_, rank) => rank);
  const lost = ranks.filter((rank) => rankAt(grid, ...middle(rank)) !== rank);
  const inside = ({ x, y, wide, high }, [a, b]) => a > x && a < x + wide && b > y && b < y + high;
  const covered = runs.map(([first, count]) => {
    const areas = areaOf(grid, first, count);
    return ranks.filter((rank) => areas.some((area) => inside(area, middle(rank))));
  });
  return { lost, covered, width: grid.width, height: grid.height };
}"""


def plan(layout: str, machine: str = "h100", model: str = "llama-3.1-8b") -> Plan:
    return resolve(PlanOptions(model=model, layout=layout, machine=machine, seq=4096))


LARGE = plan("tp=8 pp=16 dp=128", model="llama-3.1-405b")
SMALL = plan("tp=4 cp=2 dp=2 pp=2")
PLANS = {
    "large": LARGE,
    "small": SMALL,
    "experts": plan("dp=16 pp=2 ep=8 order=tp-cp-pp-dp", model="mixtral-8x7b"),
    "domains": plan("dp=18 tp=8 pp=2", "gb200"),
    "lonely": plan("dp=3", "laptop"),
}


@pytest.fixture
def blank(page: Page, site: str) -> Page:
    """A page with the modules of the site and nothing else, ready for a picture of its own."""
    names = {f"fivefold/{path.name}": f"/static/{path.name}" for path in STATIC.glob("*.js")}
    body = (
        '<!doctype html><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/static/page.css">'
        f'<script type="importmap">{json.dumps({"imports": names})}</script>'
    )
    page.route("**/blank", lambda route: route.fulfill(content_type="text/html", body=body))
    page.goto(f"{site.rstrip('/')}/blank")
    return page


def show(page: Page, module: str, view: dict[str, Any]) -> Locator:
    """Draw a view, and print how long its script took."""
    took = page.evaluate(CREATE, [module, view])
    print(f"{module}: {took:.1f} ms")
    return page.locator(".gpu-map" if module == "gpu_map" else ".timeline")


def point(box: Locator, across: float, down: float) -> None:
    """Move the pointer to a place, in pixels from the corner of the picture."""
    corner = box.locator("svg").first.bounding_box()
    assert corner is not None
    box.page.mouse.move(corner["x"] + across, corner["y"] + down)


# ---- the map


def test_the_browser_lists_the_groups_of_the_layout(blank: Page) -> None:
    draw = Random(7)
    for one in PLANS.values():
        view = explore_panels.map_view(one)
        axes = [axis["axis"] for axis in view["axes"]]
        asked = [(draw.randrange(len(axes)), draw.randrange(view["world"])) for _ in range(60)]
        for (axis, rank), group in zip(asked, blank.evaluate(GROUPS, [view, asked]), strict=True):
            assert tuple(group["ranks"]) == one.layout.group(axes[axis], rank)
            assert group["ranks"][group["coord"]] == rank


def test_every_gpu_is_found_where_it_lies(blank: Page) -> None:
    draw = Random(3)
    for one, width in product(PLANS.values(), (340, 1100)):
        view = explore_panels.map_view(one)
        world = view["world"]
        runs = [(first, draw.randint(1, world - first)) for first in _some(world, draw)]
        found = blank.evaluate(PLACES, [view, width, runs])
        assert found["lost"] == []
        for (first, count), ranks in zip(runs, found["covered"], strict=True):
            assert ranks == [*range(first, first + count)]
        assert found["width"] <= width + 1
        assert found["height"] <= 481


def _some(world: int, draw: Random) -> Iterator[int]:
    yield from (0, world - 1)
    yield from (draw.randrange(world) for _ in range(3))


def test_pointing_at_a_gpu_lights_up_its_groups(blank: Page) -> None:
    box = show(blank, "gpu_map", explore_panels.map_view(SMALL))
    assert box.get_attribute("data-rank") == "0"
    for rank in (5, 30):
        text = box.get_by_text(str(rank), exact=True)
        text.hover(force=True)
        assert box.get_attribute("data-rank") == str(rank)
        _require_groups(blank, SMALL, rank)
    blank.mouse.move(0, 0)
    assert box.get_attribute("data-rank") == "0"


def _require_groups(page: Page, one: Plan, rank: int) -> None:
    assert one.machine is not None
    layout: Layout = one.layout
    words = page.locator(".gpu-map-words").inner_text()
    stage = one.stages[layout.coord(rank).pp]
    assert words.startswith(f"rank {rank:,} · node {rank // 8:,}")
    assert f"layers {stage[0]}–{stage[-1]}" in words
    for axis in ("tp", "cp", "dp", "pp"):
        row, group = page.locator(f"[data-axis={axis}]").inner_text(), layout.group(axis, rank)
        if len(group) == 1:
            assert "1 rank" in row
            continue
        assert f"{len(group)} ranks" in row
        assert f"coord {group.index(rank)}" in row
        assert one.machine.tier_of(group).name in row
        assert f"{group[0]:,}" in row
        assert f"{group[-1]:,}" in row


def test_keys_and_clicks_walk_over_16384_gpus(blank: Page) -> None:
    box = show(blank, "gpu_map", explore_panels.map_view(LARGE))
    box.focus()
    for key, rank in (("End", 16_383), ("ArrowLeft", 16_382), ("Home", 0), ("ArrowRight", 1)):
        blank.keyboard.press(key)
        assert box.get_attribute("data-rank") == str(rank)
        _require_groups(blank, LARGE, rank)
    blank.keyboard.press("ArrowDown")  # the other row of its node
    assert box.get_attribute("data-rank") == "5"
    point(box, 400, 120)
    rank = int(str(box.get_attribute("data-rank")))
    blank.mouse.down()  # pins it
    blank.mouse.move(0, 0)
    assert rank != 5
    _require_groups(blank, LARGE, rank)
    assert blank.locator(".gpu-map *").count() < 250


def test_every_axis_has_its_own_mark_and_colour(blank: Page) -> None:
    show(blank, "gpu_map", explore_panels.map_view(PLANS["experts"]))
    marks = blank.locator(".gpu-map-groups svg path")
    looks = marks.evaluate_all(
        "all => all.map((one) => [one.getAttribute('d'), one.getAttribute('fill') === 'none'])"
    )
    assert len(looks) == len({tuple(look) for look in looks}) == 6
    colours = marks.evaluate_all(
        "all => all.map((one) => one.getAttribute('stroke') ?? one.getAttribute('fill'))"
    )
    assert len(set(colours)) == 6


# ---- the timeline


def shown_at(box: Locator, one: Timeline, time: float, rank: int) -> str:
    """What the line below says when the pointer is at a time of a rank."""
    rows = box.locator("svg > g > path").first.bounding_box()  # the ground of all rows
    assert rows is not None
    high = rows["height"] / len(one.starts)
    x = rows["x"] + rows["width"] * time / one.makespan
    box.page.mouse.move(x, rows["y"] + (rank + 0.4) * high)
    return box.page.locator(".timeline-words").inner_text()


def test_idle_slots_say_what_they_wait_for(blank: Page) -> None:
    one = played("1f1b", 4, 8, times=(1.0, 1.1, 0.7), transfer=0.05)
    box = show(blank, "timeline", timeline.view(one))
    wide = [wait for wait in one.waits() if wait.end - wait.start > one.makespan / 100]
    assert len(wide) > 8
    for wait in wide:
        words = shown_at(box, one, (wait.start + wait.end) / 2, wait.rank)
        assert words.startswith(f"rank {wait.rank} waits at {wait.step} for {wait.cause} ·")
    last = one.ends[3][-1]
    assert "rank 3 has finished" in shown_at(box, one, (last + one.makespan) / 2, 3)


def test_every_step_says_what_it_is(blank: Page) -> None:
    for name in ("interleaved", "dualpipe", "zb-v"):
        one = played(name, 4, 8)
        box = show(blank, "timeline", timeline.view(one, seconds=0.01))
        for rank, steps in enumerate(one.schedule.order):
            times = [*zip(steps, one.starts[rank], one.ends[rank], strict=True)]
            for step, start, end in times[::7]:
                words = shown_at(box, one, (start + end) / 2, rank)
                assert words.startswith(f"rank {rank}: {step}, ")
                assert " ms" in words


def test_keys_walk_through_the_steps_and_zoom(blank: Page) -> None:
    one = played("1f1b", 4, 8)
    box, words = show(blank, "timeline", timeline.view(one)), blank.locator(".timeline-words")
    box.focus()
    for key, expected in (
        ("ArrowRight", "rank 0: 0F0"),
        ("ArrowRight", "rank 0: 0F1"),
        ("ArrowDown", "rank 1: 1F0"),
        ("ArrowLeft", "rank 1 waits at 1F0 for 0F0"),
        ("ArrowUp", "rank 0: 0F0"),
    ):
        blank.keyboard.press(key)
        assert words.inner_text().startswith(expected)
    before = box.locator("svg").inner_html()
    blank.get_by_label("zoom in").click()
    assert box.locator("svg").inner_html() != before
    blank.get_by_label("show the whole step").click()
    ticks = box.locator("svg text").all_text_contents()
    assert "0" in ticks
    assert "30" in ticks


def test_many_steps_are_drawn_in_a_few_elements(blank: Page) -> None:
    for num_microbatches in (128, 1024):
        view = timeline.view(played("1f1b", 16, num_microbatches, transfer=0.05))
        assert (view["merged"] is None) == (num_microbatches == 128)
        box = show(blank, "timeline", view)
        assert box.locator("*").count() < 200
    assert "too many to tell apart" in blank.locator(".timeline-words").inner_text()


def test_several_timelines_share_one_axis(blank: Page) -> None:
    views = [timeline.view(played(name, 4, 8)) for name in ("gpipe", "zb-h1")]
    longest = max(view["makespan"] for view in views)
    widths = blank.evaluate(
        """async ([views, scale]) => {
          const { drawTimeline } = await import("fivefold/timeline.js");
          document.body.replaceChildren();
          return views.map((view) => {
            const host = document.createElement("div");
            document.body.append(host);
            drawTimeline(host, view, { scale, compact: true, label: "one" }).cursor(3);
            return host.querySelector("svg > g > path").getBBox().width;
          });
        }""",
        [views, longest],
    )
    shares = [view["makespan"] / longest for view in views]
    assert widths[1] / widths[0] == pytest.approx(shares[1] / shares[0], rel=1e-3)
    assert blank.locator("svg path[stroke='var(--ink)']").first.get_attribute("d")


# ---- both


def test_pictures_fit_the_screen_and_are_not_blank(blank: Page) -> None:
    views = {
        "gpu_map": explore_panels.map_view(LARGE),
        "timeline": timeline.view(played("interleaved", 8, 16), seconds=0.1),
    }
    for (module, view), width in product(views.items(), (390, 1280)):
        blank.set_viewport_size({"width": width, "height": 800})
        box = show(blank, module, view)
        assert blank.evaluate("document.documentElement.scrollWidth") <= width
        size = box.bounding_box()
        assert size is not None
        assert size["height"] > 100
        fills = box.locator("svg path[fill]:not([fill=none])")
        areas = fills.evaluate_all("all => all.map((one) => one.getBBox().width)")
        assert len([area for area in areas if area > 20]) >= 4
        assert len(json.dumps(view)) < 60_000

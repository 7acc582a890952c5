"""The terminal and the SVG draw what the timeline says."""

from __future__ import annotations

import itertools
import math
import re
import time
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import EVERY_FAMILY, UNEVEN, busy
from timelines import timeline as played

from fivefold.core.schedule import catalog
from fivefold.core.schedule import selection as choose
from fivefold.core.schedule.clock import Costs, play
from fivefold.render.pipeline import (
    KINDS,
    OVERLAPPED,
    cells,
    chunks_by_rank,
    render_timeline,
    shade,
    ticks,
    timeline_svg,
)
from tests.selection import within

SVG = "{http://www.w3.org/2000/svg}"


def rank_rows(text: str) -> list[str]:
    return re.findall(r"^rank \d+ +(.*)$", text, re.MULTILINE)


# The terminal


def test_1f1b_idles_exactly_where_the_timeline_says() -> None:
    # p=4, m=8: 33 units; a gutter of 7 and 66 columns give two whole columns a unit.
    rows = rank_rows(render_timeline(played("1f1b", 4, 8), 7 + 66, colour=False).plain)
    assert rows == [
        "F0F1F2F3············B0──F4B1──F5B2──F6B3──F7B4──··B5──··B6──··B7──",
        "··F0F1F2········B0──F3B1──F4B2──F5B3──F6B4──F7B5──··B6──··B7──····",
        "····F0F1····B0──F2B1──F3B2──F4B3──F5B4──F6B5──F7B6──··B7──········",
        "······F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──············",
    ]


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("colour", [False, True])
def test_whole_columns_show_every_idle_slot(name: str, colour: bool) -> None:
    timeline = played(name, 4, 8)
    columns = round(timeline.makespan * 2 * 3)  # chunks last half a unit: three columns each
    rows = rank_rows(render_timeline(timeline, 7 + columns, colour).plain)
    for rank, row in enumerate(rows):
        idle = {slot for slot, mark in enumerate(row) if mark == "·"}
        working = {
            column
            for start, end in zip(timeline.starts[rank], timeline.ends[rank], strict=True)
            for column in range(round(start * 6), round(end * 6))
        }
        assert idle == set(range(columns)) - working


def test_letters_tell_kinds_and_chunks_apart_without_colour() -> None:
    rows = rank_rows(render_timeline(played("dualpipe-v", 2, 4), 200, colour=False).plain)
    assert set("FfXxBbIiWw") <= set("".join(rows))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_colours_differ_by_kind_and_chunk() -> None:
    kinds = [*KINDS.values(), OVERLAPPED]
    shades = [[rgb(shade(kind.colour, chunk)) for chunk in range(2)] for kind in kinds]
    for one, other in itertools.combinations(shades, 2):
        assert min(math.dist(a, b) for a in one for b in other) > 70
    assert min(math.dist(*pair) for pair in shades) > 40
    text = render_timeline(played("zb-v", 4, 8), 120, colour=True)
    painted = {getattr(span.style, "bgcolor", None) for span in text.spans} - {None}
    assert len(painted) == 6  # F, I and W in two chunks


def test_a_column_shows_what_fills_most_of_it() -> None:
    # One rank, F lasts 1 and B 9: in each of the ten columns the backward fills nine tenths.
    schedule = catalog.make("1f1b", 1, 10)
    timeline = play(schedule, Costs.uniform(schedule.placement, (1.0, 4.0, 5.0)))
    text = render_timeline(timeline, 7 + 10, colour=False).plain
    assert rank_rows(text) == ["BBBBBBBBBB"]
    assert "number" not in text


def test_a_column_that_is_mostly_idle_shows_idle() -> None:
    # Rank 0: F 0–0.3, B 5.3–10. Rank 1: F 0.3–0.6, B 0.6–5.3. Ten columns of one unit.
    timeline = played("1f1b", 2, 1, times=(0.3, 2.7, 2.0))
    text = render_timeline(timeline, 7 + 10, colour=False).plain
    assert rank_rows(text) == ["·····B0───", "B0───·····"]


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("costs", [{}, UNEVEN])
@pytest.mark.parametrize("width", [60, 80, 133])
def test_no_line_is_wider_than_asked(name: str, costs: dict[str, Any], width: int) -> None:
    text = render_timeline(played(name, 4, 8, **costs), width, colour=False)
    assert max(map(len, text.plain.splitlines())) <= width


def test_ranks_beyond_32_are_counted_as_left_out() -> None:
    text = render_timeline(played("1f1b", 40, 40), 60, colour=False).plain
    assert "… 8 ranks left out …" in text
    shown = [int(rank) for rank in re.findall(r"^rank (\d+)", text, re.MULTILINE)]
    assert shown == [*range(16), *range(24, 40)]


def test_the_axis_puts_its_ticks_in_their_columns() -> None:
    axis = render_timeline(played("1f1b", 4, 8), 7 + 66, colour=False).plain.splitlines()[4]
    found = {int(match[1]): match.start() - 7 for match in re.finditer(r"\|(\d+)", axis)}
    assert found == {tick: 2 * tick for tick in (0, 5, 10, 15, 20, 25, 30)}


@given(st.floats(1e-4, 1e6), st.integers(1, 20))
def test_ticks_are_round_few_and_within(length: float, most: int) -> None:
    found = ticks(length, most)
    assert found[0] == 0 and found[-1] <= length * (1 + 1e-9) and len(found) <= most + 1
    assert len(found) == 1 or f"{found[1]:e}"[0] in "125"
    assert len(found) == 1 or found[-1] + found[1] > length * (1 - 1e-9)


def test_chunks_are_counted_on_their_rank() -> None:
    assert chunks_by_rank(catalog.make("zb-v", 2, 4).placement) == [{0: 0, 3: 1}, {1: 0, 2: 1}]
    assert chunks_by_rank(catalog.make("dualpipe", 2, 4).placement) == [{0: 0, 1: 1}, {1: 0, 0: 1}]


# The SVG


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("costs", [{}, UNEVEN])
def test_svg_has_one_rect_a_step_and_one_an_idle_slot(name: str, costs: dict[str, Any]) -> None:
    timeline = played(name, 4, 8, **costs)
    root = ElementTree.fromstring(timeline_svg(timeline))
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "steps"]
    assert [len(group.findall(f"{SVG}rect")) for group in groups] == [
        len(steps) for steps in timeline.schedule.order
    ]
    scale = 1000 / timeline.makespan
    for rank, group in enumerate(groups):
        widths = [float(rect.get("width", "nan")) for rect in group.findall(f"{SVG}rect")]
        assert sum(widths) == pytest.approx(busy(timeline, rank) * scale, abs=0.01 * len(widths))
    idle = [titles(rect) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "idle"]
    finished = sum(ends[-1] < timeline.makespan - 1e-6 for ends in timeline.ends)
    assert len([words for words in idle if words]) == len(list(timeline.waits())) + finished


def titles(root: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def test_svg_tooltips_name_the_step_the_wait_and_the_peak() -> None:
    found = titles(ElementTree.fromstring(timeline_svg(played("1f1b", 4, 8))))
    assert {
        "rank 3: 3F0, 3.0–4.0",
        "rank 0 waits at 0B0 for 1B0, 4.0–10.0",
        "rank 3 has finished, 27.0–33.0",
        "rank 0 holds at most 4 microbatches of a full stage",
        "rank 3 holds at most 1 microbatch of a full stage",
    } <= set(found)


def test_svg_escapes_hostile_text_and_loads_nothing() -> None:
    hostile = "</text><script>alert('1')</script>\" onload=\"x & \x00\x0b\ud800"
    svg = timeline_svg(played("1f1b", 2, 4), hostile)
    root = ElementTree.fromstring(svg)
    shown = "</text><script>alert('1')</script>\" onload=\"x & \ufffd\ufffd\ufffd"
    assert (root.findtext(f"{SVG}text") or "") == shown
    assert root.get("role") == "img" and (root.get("aria-label") or "").startswith(shown)
    assert "onload" not in root.attrib and not list(root.iter(f"{SVG}script"))
    assert not re.search(r"href|url\(|@import", svg)
    svg.encode()


def test_svg_of_a_hostile_schedule_name_parses() -> None:
    schedule = choose.parse_schedule("0F0 0B0", name="<a>&\x01")
    svg = timeline_svg(play(schedule, Costs.uniform(schedule.placement)))
    assert "<a>&\ufffd" in (ElementTree.fromstring(svg).get("aria-label") or "")


def test_svg_follows_light_and_dark_and_colours_every_step() -> None:
    root = ElementTree.fromstring(timeline_svg(played("dualpipe-v", 4, 8)))
    style = root.findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    assert ".paper{fill:#fff}" in light and ".paper{fill:#16181d}" in dark
    used = {rect.get("class") for rect in root.iter(f"{SVG}rect")}
    assert used <= set(re.findall(r"\.fivefold-pipeline \.(\w+)\{fill", light))
    # Inlined in a page, no rule may reach outside the picture.
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", light + dark)
    assert rules and all(rule.startswith(".fivefold-pipeline") for rule in rules)
    # Converters that know no media rules take a height of `auto` for none.
    assert "height" not in style.split("@media")[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_large_svg_stays_small_and_quick(name: str) -> None:
    timeline = played(name, 32, 256)
    with within(3, time.process_time):
        svg = timeline_svg(timeline)
    assert len(svg.encode()) < 6e6


def test_every_step_becomes_one_cell() -> None:
    timeline = played("dualpipe", 4, 8)
    assert [[cell.step for cell in row] for row in cells(timeline)] == [
        list(steps) for steps in timeline.schedule.order
    ]

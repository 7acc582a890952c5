"""The GPU map and the pipeline timeline of the page, held against layouts and timelines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.groups import RankOrder, rank_order
from fivefold.core.layout.layout import AXES, Extent, Layout, Order
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.clock import Timeline
from fivefold.core.schedule.schedule import Action, actions_of
from fivefold.render.pipeline import cells, shade
from fivefold_page import timeline
from fivefold_page.explore import panels as explore_panels
from tests.pure.timelines import EVERY_FAMILY, UNEVEN
from tests.pure.timelines import timeline as played

SMALL = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout whose experts fold, in either order; ep need not divide a row of ranks."""
    dense = {axis: draw(SMALL) for axis in ("replicate", "shard", "tp", "pp", "cp")}
    size = Layout(**dense).stage_size
    ep = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    rest = size // ep
    etp = draw(st.sampled_from([each for each in range(1, rest + 1) if rest % each == 0]))
    return Layout(**dense, ep=ep, etp=etp, order=draw(st.sampled_from(get_args(Order))))


def plan(layout: str, on: str | None = "h100", model: str = "llama-3.1-8b", **options: Any) -> Plan:
    return resolve(PlanOptions(model=model, layout=layout, machine=on, seq=4096, **options))


def laid(layout: str) -> Plan:
    """A plan with a layout that no rule of its model was asked about."""
    return replace(plan("dp=1"), layout=Layout.parse(layout))


# ---- groups as arithmetic


@settings(max_examples=60)
@given(layouts())
def test_the_line_lists_every_group_of_every_rank(layout: Layout) -> None:
    line = rank_order(layout)
    assert sorted(map(line.position, range(layout.world))) == [*range(layout.world)]
    for axis in AXES:
        along = layout.extent(axis)
        for rank in range(layout.world):
            assert line.group(along, rank) == layout.group(axis, rank)
            if axis in layout.coord(rank)._fields:
                assert line.coord(along, rank) == getattr(layout.coord(rank), axis)


def test_experts_across_a_row_are_listed_too() -> None:
    # Rows of 4 ranks, 6 to an ep group: no list of strides in rank numbers holds both groups.
    layout = Layout.parse("tp=4 dp=3 pp=2 ep=6 order=tp-cp-pp-dp")
    line, along = rank_order(layout), layout.extent("ep")
    assert line.group(along, 0) == (0, 1, 2, 3, 8, 9)
    assert line.group(along, 10) == (10, 11, 16, 17, 18, 19)


# ---- the map


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("degrees", ["tp=4 cp=2 dp=6 pp=2", "dp=2x4 tp=2 pp=4", "tp=3 dp=5 pp=3"])
def test_the_map_says_what_layout_and_machine_say(order: str, degrees: str) -> None:
    one = laid(f"{degrees} order={order}")
    layout, view = one.layout, explore_panels.map_view(one)
    assert one.machine is not None
    line = RankOrder(tuple(Extent(*digit) for digit in view["digits"]))
    for axis in view["axes"]:
        name, along = axis["axis"], Extent(axis["size"], axis["stride"])
        assert axis["size"] == len(layout.group(name, 0))
        slowest = layout.tier(name, one.machine).name if axis["size"] > 1 else None
        assert axis["tier"] == slowest
        for rank in range(layout.world):
            group = line.group(along, rank)
            assert group == layout.group(name, rank)
            (words,) = (
                each for each in explore_panels.map_text(view, rank) if each.startswith(f"{name} ")
            )
            if len(group) > 1:
                assert f" {one.machine.tier_of(group).name}" in words
                assert explore_panels.listed(group) in words
    stages = [rank // view["run"] % layout.pp for rank in range(layout.world)]
    assert stages == [layout.coord(rank).pp for rank in range(layout.world)]


def test_groups_of_experts_and_shards_are_shown_where_they_differ() -> None:
    def shown(layout: str, model: str = "llama-3.1-8b") -> list[str]:
        return [axis["axis"] for axis in explore_panels.map_view(plan(layout, model=model))["axes"]]

    five = ["tp", "cp", "dp", "pp", "ep"]
    assert shown("dp=4 tp=2") == five
    assert shown("dp=4 cp=2") == [*five, "fsdp"]
    assert shown("dp=2x2") == [*five, "fsdp"]
    assert shown("dp=4 ep=2", "mixtral-8x7b") == [*five, "edp"]
    assert shown("dp=4 tp=2 ep=2 etp=2", "mixtral-8x7b") == [*five, "etp", "edp"]


def test_stages_are_told_with_their_layers() -> None:
    one = plan("pp=2 dp=2", schedule="interleaved", chunks=2)
    held = explore_panels.map_view(one)["stages"]
    assert len(held) == 2
    for place, words in enumerate(held):
        first, second = (one.stages[number] for number in (place, place + 2))
        assert words == (
            f"stages {place} and {place + 2}: layers {first[0]}–{first[-1]} and "
            f"{second[0]}–{second[-1]}"
        )


def test_domains_are_shown_where_whole_nodes_share_them() -> None:
    assert explore_panels.map_view(plan("dp=16"))["domain"] == {"name": "nvlink", "size": 8}
    assert explore_panels.map_view(plan("dp=144", "gb200"))["domain"] == {
        "name": "nvlink",
        "size": 72,
    }
    assert explore_panels.map_view(plan("dp=2", "laptop"))["domain"] is None


def test_a_map_of_16384_gpus_is_as_small_as_one_of_16() -> None:
    large = explore_panels.map_view(plan("tp=8 pp=16 dp=128", model="llama-3.1-405b"))
    assert large["world"] == 16_384
    assert len(json.dumps(large)) < 2000
    lines = explore_panels.map_text(large, 1027)
    assert "dp   128 ranks    coord 0     network: 1027, 1035, 1043 … 2043" in lines
    assert max(map(len, lines)) <= 100


def test_a_small_map_marks_every_gpu() -> None:
    lines = explore_panels.map_text(explore_panels.map_view(plan("tp=4 cp=2 dp=2 pp=2")), 17)
    assert lines[-1] == "node 0 ·p······ ········ t@tt·c·· ·d······"
    assert lines[-2] == "@ rank 17 · t tp · c cp · d dp · p pp; by node:"


def test_a_map_needs_a_machine_and_a_rank_on_it() -> None:
    with pytest.raises(FivefoldError, match="name a machine"):
        explore_panels.map_view(plan("dp=2", None))
    view = explore_panels.map_view(plan("dp=2"))
    for rank in (-1, 2):
        with pytest.raises(FivefoldError, match="use 0 to 1"):
            explore_panels.map_text(view, rank)


def test_a_group_inside_a_node_says_that_others_leave_it() -> None:
    # Groups of 3 on nodes of 8: (0,1,2) stays inside, (6,7,8) does not.
    assert machine.load("h100").tier_of((6, 8)).name == "network"
    words = explore_panels.map_text(explore_panels.map_view(laid("tp=3 dp=3")))[2]
    assert words.endswith("nvlink (others over network): 0–2")


# ---- the timeline


def spans(view: timeline.View, row: int) -> list[tuple[float, float]]:
    """Start and end of every step of a row, added up as a browser does."""
    unit, now, found = view["makespan"] / view["ticks"], 0, list[tuple[float, float]]()
    drawn = view["rows"][row]
    for gap, length in zip(drawn["gaps"], drawn["lengths"], strict=True):
        found.append(((now + gap) * unit, (now + gap + length) * unit))
        now += gap + length
    return found


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_every_step_is_in_the_picture_at_its_time(name: str) -> None:
    one = played(name, 4, 8, **UNEVEN)
    view = timeline.view(one)
    assert view["merged"] is None
    for rank, row in enumerate(cells(one)):
        drawn = view["rows"][rank]
        assert drawn["kinds"] == "".join(cell.kind.letter for cell in row)
        for place, (cell, (start, end)) in enumerate(zip(row, spans(view, rank), strict=True)):
            assert start == pytest.approx(cell.start, abs=one.makespan / view["ticks"])
            assert end == pytest.approx(cell.end, abs=one.makespan / view["ticks"])
            first, *behind = actions_of(cell.step)
            stages = drawn["stages"]
            stage = stages[place] if len(stages) > 1 else stages[0]
            assert (stage, drawn["microbatches"][place]) == (first.stage, first.microbatch)
            assert drawn["chunks"][str(stage)] == cell.chunk
            pair = [each for other in behind for each in (other.stage, other.microbatch)]
            assert drawn["pairs"].get(str(place), []) == pair
            colours = view["marks"][cell.kind.letter]["colours"]
            assert colours[cell.chunk] == shade(cell.kind.colour, cell.chunk)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_idle_slots_carry_the_causes_of_the_clock(name: str) -> None:
    one = played(name, 4, 8, **UNEVEN)
    view = timeline.view(one)
    wide = [wait for wait in one.waits() if wait.end - wait.start > one.makespan / 2000]
    assert wide
    assert sum(len(row["waits"]) for row in view["rows"]) == len(wide)
    for wait in wide:
        place = one.schedule.order[wait.rank].index(wait.step)
        row = view["rows"][wait.rank]
        assert row["waits"][str(place)] == str(wait.cause)
        assert row["gaps"][place] * one.makespan / view["ticks"] == pytest.approx(
            wait.end - wait.start, abs=2 * one.makespan / view["ticks"]
        )


def test_whole_times_stay_whole() -> None:
    one = played("1f1b", 4, 8)  # makespan 33, which does not divide 100,000
    view = timeline.view(one)
    for rank, (starts, ends) in enumerate(zip(one.starts, one.ends, strict=True)):
        assert [start for start, _ in spans(view, rank)] == pytest.approx(starts)
        assert [end for _, end in spans(view, rank)] == pytest.approx(ends)


def test_seconds_scale_every_time_and_the_headline() -> None:
    one = played("1f1b", 4, 8)
    view = timeline.view(one, seconds=0.1)
    assert (view["unit"], view["makespan"]) == ("s", pytest.approx(3.3))
    assert "makespan 3.30 s" in view["headline"]
    assert view["bubble"] == one.bubble_makespan
    plain = timeline.view(one)
    assert (plain["unit"], plain["makespan"]) == ("", one.makespan)
    assert plain["rows"] == view["rows"]


def long() -> Timeline:
    return played("1f1b", 8, 600, times=(1.0, 1.1, 0.7), transfer=0.05)


def test_a_long_schedule_is_merged_and_says_so() -> None:
    one = long()
    view = timeline.view(one)
    steps = sum(map(len, one.schedule.order))
    assert "9,600 steps are too many" in view["merged"]
    assert steps == 9600
    assert sum(len(row["kinds"]) for row in view["rows"]) < 2400
    for rank, row in enumerate(view["rows"]):
        inside = [one["count"] for one in row["merged"].values()]
        assert sum(inside) + len(row["kinds"]) - len(inside) == len(one.schedule.order[rank])
        assert row["kinds"].count("M") == len(inside)


def test_the_bands_of_merged_steps_are_their_shares_of_the_time() -> None:
    one = long()
    for rank, row in enumerate(timeline.view(one)["rows"]):
        drawn: dict[str, float] = {}
        for place, length in enumerate(row["lengths"]):
            shares = {row["kinds"][place]: 1.0}
            for letter, share in (
                row["merged"].get(str(place), {"shares": shares})["shares"].items()
            ):
                drawn[letter] = drawn.get(letter, 0.0) + share * length
        steps = one.schedule.order[rank]
        for letter in "FB":
            of_kind = [each for each in steps if isinstance(each, Action) and each.kind == letter]
            busy = sum(map(one.costs.of, of_kind)) / one.makespan
            ticks = sum(row["gaps"]) + sum(row["lengths"])
            assert drawn[letter] / ticks * one.ends[rank][-1] / one.makespan == pytest.approx(
                busy, rel=1e-3
            )


def test_a_wide_gap_is_never_merged_away() -> None:
    one = long()
    column = one.makespan / 300
    wide = {(w.rank, str(w.cause)) for w in one.waits() if w.end - w.start > column}
    rows = timeline.view(one)["rows"]
    assert wide <= {
        (rank, cause) for rank, row in enumerate(rows) for cause in row["waits"].values()
    }


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_the_text_says_the_same(name: str) -> None:
    one = played(name, 4, 8, **UNEVEN)
    lines = timeline.text(timeline.view(one))
    assert max(map(len, lines)) <= 100
    assert lines[0] == timeline.view(one)["headline"]
    longest = max(one.waits(), key=lambda wait: round(wait.end - wait.start, 6))
    words = f"rank {longest.rank} waits at {longest.step} for {longest.cause}"
    assert any(line.startswith(words) for line in lines)


def test_the_text_is_the_one_of_the_schedule_verb() -> None:
    from fivefold.render.pipeline import render_timeline

    for name in EVERY_FAMILY:
        one = played(name, 4, 8)
        drawn = render_timeline(one, 100, colour=False).plain.split("\n")
        shown = timeline.text(timeline.view(one))
        assert [line.rstrip() for line in drawn] == shown[1 : 1 + len(drawn)]


def test_the_text_of_merged_steps_has_its_own_letter() -> None:
    lines = timeline.text(timeline.view(long()))
    assert any(line.startswith("M: many steps. 9,600 steps") for line in lines)
    assert "M──" in lines[1]


def test_measured_steps_make_the_same_picture() -> None:
    steps = (Action(0, "F", 0), Action(0, "B", 0))
    row = timeline.TimelineRow("rank 0", steps, (0.25, 1.0), (0.5, 2.0), {0: 0}, {steps[1]: "1B0"})
    view = timeline.picture([row], 2.0, headline="measured", seconds=1.0)
    (drawn,) = view["rows"]
    assert (drawn["kinds"], drawn["waits"], view["makespan"]) == ("FB", {"1": "1B0"}, 2.0)
    assert spans(view, 0) == [(0.25, 0.5), (1.0, 2.0)]
    assert view["bubble"] is None

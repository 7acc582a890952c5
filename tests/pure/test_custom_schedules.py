"""Schedules that users bring: what is read, and how mistakes and deadlocks are named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from fivefold.core.errors import BadFile, IllegalSchedule
from fivefold.core.schedule import catalog
from fivefold.core.schedule import selection as choose
from fivefold.core.schedule.clock import Costs, play
from fivefold.core.schedule.schedule import (
    Action,
    Overlap,
    Placement,
    Schedule,
    linear_placement,
    loop_placement,
    v_placement,
)
from fivefold.core.schedule.selection import require_legal

TWO_RANKS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def refusal(text: str) -> str:
    with pytest.raises(IllegalSchedule) as refused:
        choose.parse_schedule(text)
    return str(refused.value)


def test_commas_spaces_idle_cells_and_blank_lines_mean_the_same() -> None:
    expected = catalog.make("1f1b", 2, 2).order
    for text in (
        TWO_RANKS,
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
        "0F0, 0F1, , , 0B0, , 0B1\n\n, 1F0, 1B0, 1F1, 1B1, ,\n",
        "0F0\t0F1\t0B0\t0B1\r\n1F0\t1B0\t1F1\t1B1\r\n",
    ):
        assert choose.parse_schedule(text).order == expected


def test_transfers_and_gathers_of_lowered_files_are_passed_over() -> None:
    lowered = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
    )
    assert choose.parse_schedule(lowered).order == choose.parse_schedule(TWO_RANKS).order


def test_an_overlapped_pair_is_one_step() -> None:
    read = choose.parse_schedule("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1")
    assert read.order[0][2] == Overlap(Action(0, "F", 1), Action(1, "B", 0))
    spaced = "0F0 1F0 (0F1 ; 1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1"
    assert choose.parse_schedule(spaced).order == read.order
    costs = Costs((1.0,) * 2, (2.0,) * 2, (4.0,) * 2, (0.0,) * 2, overlap=0.5)
    assert play(read, costs).makespan == 1 + 1 + 3.5 + 6 + 1 + 6 + 6


@pytest.mark.parametrize(
    "text",
    [
        "0F0 (0F1;0B0)OVERLAP_F_B 0B1",
        "0F0 0F1 0B0 0B1\n1F0 (1F1;1B0)OVERLAP_F_B 1B1",
        "(0F0;0B0)OVERLAP_F_B",
        "0F0 1F1 (0F1;0B0)OVERLAP_F_B 1B1 0B1\n1F0 1B0",
    ],
)
def test_a_stage_is_not_overlapped_with_itself(text: str) -> None:
    """Its two lanes would share what says whether a backward runs."""
    message = refusal(text)
    stage, pair = ("1", "1F1 and 1B0") if "1F1;" in text else ("0", "0F")
    assert f"overlaps stage {stage} with itself in ({stage}F" in message
    assert f"or write {pair}" in message and "one after the other" in message


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        (TWO_RANKS, linear_placement(2)),
        ("1F0 1B0\n0F0 0B0", Placement((1, 0))),
        ("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", loop_placement(2, 2)),
        ("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", v_placement(2)),
        ("0F0 1F0 1B0 0B0", Placement((0, 0))),
        ("0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1", Placement((0, 1), mirrored=True)),
    ],
)
def test_the_placement_follows_from_where_stages_run(text: str, placement: Placement) -> None:
    assert choose.parse_schedule(text).placement == placement


def test_the_name_and_the_count_of_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TWO_RANKS, encoding="utf-8")
    schedule = choose.load_schedule(path)
    assert (schedule.name, schedule.num_microbatches, schedule.num_ranks) == ("mine", 2, 2)
    assert not schedule.asynchronous


@pytest.mark.parametrize(
    ("text", "stuck"),
    [
        # a rank that wants its own gradient before its own forward
        ("0B0 0F0", ["rank 0 waits at 0B0 for 0F0"]),
        # the same, while the next rank waits for that forward too
        ("0B0 0F0\n1F0 1B0", ["rank 0 waits at 0B0 for 0F0", "rank 1 waits at 1F0 for 0F0"]),
        (
            "0F0 0I0 0W0\n1F0 1W0 1I0",
            ["rank 0 waits at 0I0 for 1I0", "rank 1 waits at 1W0 for 1I0"],
        ),
        # two microbatches swapped on one rank
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            ["rank 0 waits at 0B0 for 1B0", "rank 1 waits at 1F1 for 0F1"],
        ),
        # a mixed schedule: what is waited for is named as it is written
        (
            "0F0 0B0 0F1 0I1 0W1\n1F1 1B1 1F0 1B0",
            ["rank 0 waits at 0B0 for 1B0", "rank 1 waits at 1F1 for 0F1"],
        ),
        (
            "0F0 0B0\n1F0 (2F0;1B0)OVERLAP_F_B 2B0",
            ["rank 0 waits at 0B0 for 1B0", "rank 1 waits at (2F0;1B0)OVERLAP_F_B for 2B0"],
        ),
    ],
)
def test_a_deadlock_names_who_waits_for_what(text: str, stuck: list[str]) -> None:
    message = refusal(text)
    assert "deadlock" in message
    for sentence in stuck:
        assert sentence in message
    assert message.count("waits at") == len(stuck)


def test_the_deadlock_of_the_documentation() -> None:
    """1F1B on four ranks, whose last rank runs its first backward before its first forward."""
    order = [list(steps) for steps in catalog.make("1f1b", 4, 4).order]
    order[3][:2] = reversed(order[3][:2])
    message = refusal("\n".join(" ".join(map(str, steps)) for steps in order))
    assert "rank 3 waits at 3B0 for 3F0" in message
    assert "rank 2 waits at 2B0 for 3B0" in message


@pytest.mark.parametrize(
    ("text", "problem", "way_out"),
    [
        ("0F0 0I0", "stage 0, microbatch 0: 0 B, 1 I and 0 W", "one 0B0, or one 0I0 and one 0W0"),
        (
            "0F0 0B0 0W0",
            "stage 0, microbatch 0: 1 B, 0 I and 1 W",
            "one 0B0, or one 0I0 and one 0W0",
        ),
        ("0F0 0F0 0B0", "stage 0, microbatch 0: 2 forwards", "one 0F0"),
        (
            "0F0\n1F0 1B0",
            "stage 0, microbatch 0: 0 B, 0 I and 0 W",
            "one 0B0, or one 0I0 and one 0W0",
        ),
        ("0F0 0B0 0F1 0B1\n1F0 1B0 0F1 1B1", "rank 1 runs 0F1", "move it to rank 0"),
        ("0F0 0B0\n2F0 2B0", "no rank runs stage 1", "number stages from 0, without gaps"),
        ("0F0 hello 0B0", "rank 0: 'hello' is no action", "2F0"),
        ("0F0 0B0\n1F0 1X0", "rank 1: '1X0' is no action", "2F0"),
        ("0F0 0B", "rank 0: '0B' is no action", "2F0"),
        ("0F0 -1B0", "rank 0: '-1B0' is no action", "2F0"),
        ("(0F0;0I0)OVERLAP_F_B", "a forward and a full backward", "(2F4;5B0)OVERLAP_F_B"),
        ("0F0 0B0\n1SEND_F0", "a rank without actions", "give each a line"),
        ("", "a rank without actions", "give each a line"),
        (" ,,\n\n", "a rank without actions", "give each a line"),
        ("\x00\x01\x02", "is no action", "2F0"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(text: str, problem: str, way_out: str) -> None:
    message = refusal(text)
    assert problem in message
    assert way_out in message


def test_all_problems_come_at_once_but_not_hundreds_of_them() -> None:
    message = refusal("0F0 0F1 0B0\n1F0 1B0 1F1 1B1 1B1")
    assert "stage 0, microbatch 1: 0 B, 0 I and 0 W" in message
    assert "stage 1, microbatch 1: 2 B, 0 I and 0 W" in message
    gap = refusal("0F99 0B99")
    assert "microbatch 0" in gap
    assert len(gap.splitlines()) < 20


@pytest.mark.parametrize("text", ["999999F0 999999B0", "0F99999 0B99999"])
def test_a_slip_of_the_finger_costs_no_memory(text: str) -> None:
    """With twelve digits instead of six, tables of that length would take the machine down."""
    tracemalloc.start()
    try:
        refusal(text)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_schedules_made_in_code_meet_the_same_check() -> None:
    steps = (Action(7, "F", 0), Action(0, "F", 0), Action(0, "B", 0))
    with pytest.raises(IllegalSchedule, match="rank 0 runs 7F0: there is no stage 7"):
        require_legal(Schedule("mine", linear_placement(1), 1, (steps,)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "model.csv"
    binary.write_bytes(bytes(range(128, 256)))
    for path in (binary, tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(BadFile) as refused:
            choose.load_schedule(path)
        assert str(path) in str(refused.value)
        assert "one rank a line" in str(refused.value)


def test_an_empty_file_says_which_file_and_what_belongs_there(tmp_path: Path) -> None:
    path = tmp_path / "nothing.csv"
    path.write_text("", encoding="utf-8")
    with pytest.raises(IllegalSchedule, match=r"'nothing' has a rank without actions; give each"):
        choose.load_schedule(path)


@pytest.mark.parametrize(
    ("argument", "is_file"),
    [("mine.csv", True), ("mine.txt", True), ("dir/mine", True), ("1f1b", False), ("zb-v", False)],
)
def test_a_file_is_told_from_a_name(argument: str, is_file: bool) -> None:
    assert choose.looks_like_file(argument) is is_file


@pytest.mark.parametrize("cell", ["0F" + "9" * 5000, "9" * 5000 + "F0", "٠F٠", "0F1234567890"])
def test_numbers_that_are_none_are_refused(cell: str) -> None:
    with pytest.raises(IllegalSchedule, match="is no action"):
        choose.parse_schedule(f"{cell} 0B0")


def test_a_file_with_stages_and_microbatches_far_apart_is_refused_at_once() -> None:
    stages = "\n".join(f"{stage}F0" for stage in range(700))
    with pytest.raises(IllegalSchedule, match="is too large"):
        choose.parse_schedule(stages + " " + " ".join(f"699F{each}" for each in range(1, 700)))

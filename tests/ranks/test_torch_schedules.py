"""torch's own pipelining as oracle: the files it writes load unchanged, and time the same.

Its schedules are made without process groups: they read no more of a stage than its numbers.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fivefold.cli import main
from fivefold.core.errors import IllegalSchedule
from fivefold.core.schedule import catalog
from fivefold.core.schedule import selection as choose
from fivefold.core.schedule.clock import Costs, peak_activations, play
from fivefold.core.schedule.schedule import Schedule
from fivefold.launch import processes

FORMATS = ("compute_only", "compute_comms")

# Our name, torch's class, chunks a rank, and whether the two agree step by step. Breadth-first
# runs backwards in the opposite order of microbatches, and DualPipeV does not overlap the first
# pair of the last rank; neither changes the makespan at equal times.
LOOPED = [
    ("bfs", "ScheduleLoopedBFS", 2, False),
    ("bfs", "ScheduleLoopedBFS", 3, False),
    ("interleaved", "ScheduleInterleaved1F1B", 2, True),
    ("interleaved", "ScheduleInterleaved1F1B", 4, True),
    ("zb-interleaved", "ScheduleInterleavedZeroBubble", 2, True),
    ("zb-interleaved", "ScheduleInterleavedZeroBubble", 3, True),
    ("zb-v", "ScheduleZBVZeroBubble", 2, True),
    ("dualpipe-v", "ScheduleDualPipeV", 2, False),
]
SHAPES = [(2, 4), (3, 6), (4, 8), (4, 12), (8, 16)]


def stages(num_ranks: int, num_chunks: int) -> list[Any]:
    """What a schedule of torch reads of the stages of rank 0."""
    return [
        SimpleNamespace(
            num_stages=num_ranks * num_chunks,
            group_size=num_ranks,
            group_rank=0,
            stage_index=chunk * num_ranks,
            is_first=chunk == 0,
            is_last=False,
            submod=None,
        )
        for chunk in range(num_chunks)
    ]


def dump(schedule: Any, path: Path) -> list[Schedule]:
    """Both of torch's file forms, read by us."""
    read: list[Schedule] = []
    for form in FORMATS:
        schedule._dump_csv(str(path / f"{form}.csv"), format=form)
        read.append(choose.load_schedule(path / f"{form}.csv"))
    return read


def makespan(schedule: Schedule) -> float:
    return play(schedule, Costs.uniform(schedule.placement)).makespan


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize(("name", "its_name", "v", "same_order"), LOOPED)
def test_files_of_torch_load_unchanged_and_time_the_same(
    name: str, its_name: str, v: int, same_order: bool, p: int, m: int, tmp_path: Path
) -> None:
    theirs = getattr(torch_schedules, its_name)(stages(p, v), m, loss_fn=max)
    ours = catalog.make(name, p, m, v)
    compute_only, compute_comms = dump(theirs, tmp_path)
    assert "SEND_F" in (tmp_path / "compute_comms.csv").read_text()
    assert compute_only.order == compute_comms.order
    assert compute_only.placement == ours.placement
    assert makespan(compute_only) == pytest.approx(makespan(ours))
    assert peak_activations(compute_only) == peak_activations(ours)
    if same_order:
        assert compute_only.order == ours.order


@pytest.mark.parametrize(
    ("name", "its_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")]
)
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_single_stage_schedules_lowered_by_torch_are_ours(
    name: str, its_name: str, p: int, m: int, tmp_path: Path
) -> None:
    theirs = getattr(torch_schedules, its_name)(stages(p, 1)[0], m, loss_fn=max)
    runtime = torch_schedules._PipelineScheduleRuntime(stages(p, 1), m, loss_fn=max)
    order = {rank: _computations(actions) for rank, actions in theirs.pipeline_order.items()}
    order[p - 1] = _numbered_from_zero(order[p - 1])
    runtime.pipeline_order = order
    runtime._prepare_schedule_with_comms(order)
    ours = catalog.make(name, p, m)
    for read in dump(runtime, tmp_path):
        assert read.order == ours.order
        assert read.placement == ours.placement


def _computations(actions: list[Any]) -> list[Any]:
    """Without the reductions that some versions list, which the lowering adds again."""
    return [action for action in actions if action is None or action.is_compute_op]


def _numbered_from_zero(actions: list[Any]) -> list[Any]:
    """torch prints the forwards of 1F1B's last rank numbered from 1; it does not run that list."""
    numbers = count()
    return [
        action._replace(microbatch_index=next(numbers))
        if action is not None and action.computation_type == torch_schedules.FORWARD
        else action
        for action in actions
    ]


def test_a_schedule_that_torch_misprints_is_refused(tmp_path: Path) -> None:
    """1F1B as it is printed where the last rank's forwards start at 1: microbatch 0 is missing."""
    path = tmp_path / "1f1b.csv"
    path.write_text("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F1,1B0,1F2,1B1,1REDUCE_GRAD\n")
    with pytest.raises(IllegalSchedule, match="stage 1, microbatch 0: 0 forwards"):
        choose.load_schedule(path)


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zb-interleaved", "zb-v", "dualpipe-v"])
def test_torch_reads_and_lowers_our_files(name: str, tmp_path: Path) -> None:
    """The way back: torch validates our order and adds its transfers without complaint."""
    ours = catalog.make(name, 4, 8, 2)
    path = tmp_path / "ours.csv"
    path.write_text(ours.to_csv())
    runtime = torch_schedules._PipelineScheduleRuntime(stages(4, 2), 8, loss_fn=max)
    runtime._load_csv(str(path))
    homes = [runtime.stage_index_to_group_rank[stage] for stage in range(ours.num_stages)]
    assert tuple(homes) == ours.placement.homes
    compute_only, compute_comms = dump(runtime, tmp_path)
    assert compute_only.order == compute_comms.order == ours.order


def verify(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["verify", "tiny", *words])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("its_name", "p", "m", "form"),
    [
        ("ScheduleInterleaved1F1B", 4, 4, "compute_only"),
        ("ScheduleLoopedBFS", 2, 4, "compute_comms"),
        ("ScheduleInterleavedZeroBubble", 2, 4, "compute_comms"),
        ("ScheduleZBVZeroBubble", 4, 8, "compute_comms"),
        ("ScheduleDualPipeV", 2, 4, "compute_only"),
    ],
)
def test_files_of_torch_run_unchanged(
    its_name: str,
    p: int,
    m: int,
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = getattr(torch_schedules, its_name)(stages(p, 2), m, loss_fn=max)
    path = tmp_path / "theirs.csv"
    theirs._dump_csv(str(path), format=form)
    words = ["--layout", f"pp={p}", "--schedule", str(path), "--steps", "1", "--json"]
    code, out, err = verify(words, capsys)
    assert code == 0, err
    table = json.loads(out)
    assert table["passed"] and table["traffic"]["match"]
    assert max(table[name] for name in table["tolerance"]) <= 1e-10
    sends = [each for each in table["traffic"]["observed"] if each["kind"] == "send"]
    assert sends and sends[0]["axis"] == "pp"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1"], "stage 1, microbatch 1: 0 B"),
        (["0F0,0F1,0B0,0B1,1F1", "1F0,1B0,1B1"], "rank 0 runs 1F1: move it to rank 1"),
        (
            ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"],
            "rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1",
        ),
        (["0F0,0F1,0B0,0B1", "1F0,1X0,1F1,1B1"], "rank 1: '1X0' is no action"),
    ],
    ids=["missing", "misplaced", "deadlock", "unknown"],
)
def test_an_illegal_file_is_refused_before_any_process_starts(
    rows: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forked(*_: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(processes, "Pool", forked)
    path = tmp_path / "illegal.csv"
    path.write_text("\n".join(rows))
    code, out, err = verify(["--layout", "pp=2", "--schedule", str(path)], capsys)
    assert code == 2 and not out and reason in err

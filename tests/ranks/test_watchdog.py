"""A rank that leaves out a call, sleeps or is stopped is named with the call that it did not join;
a rank that is asked to stop hears it."""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from test_pool import gone, wait_until_gone

from fivefold.core.errors import RankLost
from fivefold.launch.processes import Pool
from fivefold.launch.watch.device_calls import DeviceProgress, to_table
from fivefold.launch.watch.kv_messages import MemoryBoard
from fivefold.launch.watch.watchdog import (
    FlightRecorder,
    RankSurroundings,
    Watchdog,
    position_from,
    read_log,
    watched,
)
from fivefold.launch.worker import Worker
from tests.selection import within

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

WORLD, PATIENCE, SOON = (0, 1, 2, 3), 2.0, 30.0
NO_CALLS = DeviceProgress([], {})
TP = {rank: (rank - rank % 2, rank - rank % 2 + 1) for rank in WORLD}


class Steps:
    """The collectives of a small training of four ranks, tp=2: three sums each and one of all."""

    def __init__(self, worker: Worker, watchdog: Watchdog) -> None:
        self.rank, self.watchdog = worker.rank, watchdog
        groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))}
        self.group = groups[TP[self.rank]]

    def total(self, axis: str, size: int = 16) -> None:
        members = WORLD if axis == "world" else TP[self.rank]
        self.watchdog.note((axis, "all_reduce", 4 * size, len(members)), members)
        dist.all_reduce(torch.ones(size), group=None if axis == "world" else self.group)

    def step(self, number: int, skips: bool = False, sizes: tuple[int, ...] = (16, 16, 16)) -> None:
        self.watchdog.phase(f"step {number} 0F0")
        for place, size in enumerate(sizes):
            if not (skips and place == 1):
                self.total("tp", size)
        self.watchdog.phase(f"step {number} totals")
        self.total("world", 2)


def training(worker: Worker, fault: str) -> None:
    with worker.joined(4), watched(worker, 4, PATIENCE, 2 * PATIENCE) as watchdog:
        steps = Steps(worker, watchdog)
        guilty = worker.rank == 2
        sizes = (16, 16, 16) if fault != "skip another size" else (64, 32, 4)
        steps.step(1, sizes=sizes)
        steps.step(2, skips=guilty and fault.startswith("skip"), sizes=sizes)
        watchdog.phase("step 3 0B1")
        if guilty and fault == "sleep":
            time.sleep(600)
        if guilty and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "slow":  # twice as slow as the others would be too slow
            watchdog.phase("save 3", allowed=60.0, mark=True)
            time.sleep((3 if guilty else 2) * PATIENCE)
        if fault == "load":
            watchdog.phase("step 3 0B1, compiling", allowed=60.0, loads_kernels=True)
            time.sleep(PATIENCE)  # until the board has it
            if guilty:  # such a call holds Python's lock: not even the watchdog runs
                ctypes.PyDLL(None).sleep(math.ceil(4 * PATIENCE))
        steps.step(3)


@pytest.mark.parametrize(
    ("fault", "doing", "cause"),
    [
        (
            "skip",
            "step 2 totals",
            r"has not joined call 6 on tp \(ranks 2 and 3\), all_reduce of 64 bytes, which rank 3 "
            r"called at step 2 0F0; it went on to all_reduce on world",
        ),
        (
            "skip another size",
            "step 2 0F0",
            r"has not joined call 5 on tp \(ranks 2 and 3\), all_reduce of 128 bytes",
        ),
        (
            "sleep",
            "step 3 0B1",
            r"has not joined call 7 on tp \(ranks 2 and 3\), all_reduce of 64 bytes, where rank 3 "
            r"waits; ranks 0 and 1 wait in turn; it has not moved for \d s, in:\n.*: "
            r"time\.sleep\(600\)",
        ),
        (
            "stop",
            "step 3 0B1",
            r"has not joined call 7 on tp \(ranks 2 and 3\), all_reduce of 64 bytes, where rank 3 "
            r"waits; ranks 0 and 1 wait in turn; it does not answer",
        ),
    ],
)
def test_the_missing_rank_is_named_with_its_call(fault: str, doing: str, cause: str) -> None:
    with Pool(4, patience=SOON) as pool:
        pids = pool.pids
        with within(SOON), pytest.raises(RankLost) as caught:
            pool.run(training, fault)
    assert (caught.value.rank, caught.value.doing) == (2, doing), str(caught.value)
    assert re.search(cause, caught.value.cause, re.S), caught.value.cause
    wait_until_gone(pids)


def test_a_rank_that_takes_long_as_allowed_is_not_lost() -> None:
    with Pool(4, patience=SOON) as pool:
        pool.run(training, "slow")


def test_a_rank_that_cannot_answer_while_it_loads_a_kernel_is_not_lost() -> None:
    with Pool(4, patience=SOON) as pool:
        pool.run(training, "load")


def record_of(rank: int, group: str) -> Callable[..., bytes]:
    """torch's record of a rank after equal calls; rank 2 has not issued the last one of tp."""
    states = ["completed"] * 5 + ["scheduled"] * (rank != 2)
    entries: list[dict[str, Any]] = [
        {
            **{"record_id": number, "pg_id": 1, "process_group": (group, "tp"), "state": state},
            **{"profiling_name": "nccl:all_reduce", "collective_seq_id": number + 1},
            **{"retired": state == "completed"},
        }
        for number, state in enumerate(states)
    ]
    return lambda **_: pickle.dumps({"entries": entries})


def waiting_on_gpus(worker: Worker) -> None:
    with worker.joined(4), watched(worker, 4, PATIENCE, 2 * PATIENCE) as watchdog:
        steps = Steps(worker, watchdog)
        steps.step(1)
        read = record_of(worker.rank, steps.group.group_name)
        with mock.patch("fivefold.launch.watch.watchdog._reader", lambda: read):
            watchdog.phase("step 2 0F0")
            time.sleep(600)


def test_gpus_are_asked_where_all_hosts_have_issued_the_same() -> None:
    with Pool(4, patience=SOON) as pool, within(SOON), pytest.raises(RankLost) as caught:
        pool.run(waiting_on_gpus)
    assert (caught.value.rank, caught.value.doing) == (2, "step 2 0F0"), str(caught.value)
    cause = (
        r"has not joined call 6 on group \w+ \(ranks 2 and 3\), all_reduce, where rank 3 waits on"
    )
    assert re.match(cause, caught.value.cause), caught.value.cause


class LateRecord(RankSurroundings):
    """The clock of a judge, on which another rank answers the question for its device late."""

    def __init__(self, board: MemoryBoard, delay: float) -> None:
        self.board, self.delay, self.time, self.asked_at = board, delay, 100.0, math.inf

    def monotonic(self) -> float:
        return self.time

    def stack(self) -> tuple[list[str], bool]:
        return [], False

    def watch(self, task: Callable[[], None]) -> None:
        return None

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if (self.board.get("round-1") or "").startswith("devices of"):
            self.asked_at = min(self.asked_at, self.time)
        if self.time >= self.asked_at + self.delay:
            self.board.put("rank-1", f"1 {json.dumps({'device': to_table(NO_CALLS)})}")


@pytest.mark.parametrize("delay", [0.6, 1.9])  # times the patience
def test_a_record_is_awaited_for_as_long_as_its_process_may_read_it(delay: float) -> None:
    """A process ends itself only if it reads its record for twice the patience."""
    seen: list[Any] = []
    board = MemoryBoard()
    around = LateRecord(board, delay * PATIENCE)
    meeting = SimpleNamespace(folder=None, address=None, board=lambda _: board)
    worker = SimpleNamespace(rank=0, meeting=meeting)
    watchdog = Watchdog(worker, 2, PATIENCE, around)  # type: ignore[arg-type]
    with (
        mock.patch("fivefold.launch.watch.watchdog._reader", lambda: lambda **_: pickle.dumps({})),
        mock.patch("fivefold.launch.watch.watchdog._groups", dict),
        mock.patch(
            "fivefold.launch.watch.watchdog.on_device", lambda _, devices: seen.append(devices)
        ),
    ):
        watchdog._on_device({}, {1})
    assert seen == [{0: NO_CALLS, 1: NO_CALLS}]


def test_a_recorder_outlives_its_rank_and_forgets_the_oldest(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 3)
    for number in range(5000):
        recorder.note(("tp", "all_reduce", 64, 2), (2, 3))
        recorder.note(("ep", "all_to_all", number, 4), WORLD)
    recorder.note(("pp", "send", 8, 2), (3, 1))
    recorder.note(("ring", "send", 8, 2), (2, 3))
    table = read_log(tmp_path, 3)
    assert table == recorder.table() and table is not None
    found = position_from(table)
    assert {str(group): count for group, count in found.counts.items()} == {
        "tp (ranks 2 and 3)": 5000,
        "ep (ranks 0, 1, 2 and 3)": 5000,
        "pp from rank 3 to rank 1": 1,
        "ring (ranks 2 and 3)": 1,
    }
    assert [call.kind for call in found.trail[-4:]] == ["all_reduce", "all_to_all", "send", "send"]
    assert len(found.trail) == 4096 and read_log(tmp_path, 4) is None


@pytest.mark.nightly
def test_a_note_costs_about_a_microsecond() -> None:
    """Bounded far above, for a machine that does other things too."""
    recorder, record = FlightRecorder(None, 0), ("tp", "all_reduce", 64, 8)
    members, number = tuple(range(8)), 20_000
    best = min(_seconds(lambda: recorder.note(record, members), number) for _ in range(5))
    assert best / number < 5e-6


def _seconds(call: Callable[[], None], number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    return time.perf_counter() - began


def until_asked(worker: Worker, stubborn: bool) -> bool:
    worker.report("at work")
    until = time.monotonic() + 20
    while not worker.stopping and time.monotonic() < until:
        time.sleep(0.01)
    if stubborn:
        worker.report("asked")
        time.sleep(60)
    return worker.stopping


def asking(number: signal.Signals, words: str) -> Callable[[str], None]:
    """Sends this process the signal when all ranks have said one of the words."""
    heard: Counter[str] = Counter()

    def hear(word: str) -> None:
        heard[word] += 1
        if word in words and heard[word] == 2:
            os.kill(os.getpid(), number)

    return hear


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_are_asked_to_stop_and_come_to_their_end(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with Pool(2, forwards_stop=True) as pool:
        tasks = [(until_asked, (False,))] * 2
        assert pool.run_each(tasks, on_report=asking(number, "at work")) == [True, True]
    assert signal.getsignal(number) == former


def test_a_second_request_ends_them_at_once() -> None:
    with within(10), Pool(2, forwards_stop=True) as pool:
        pids, tasks = pool.pids, [(until_asked, (True,))] * 2
        with pytest.raises(SystemExit) as stopped:
            pool.run_each(tasks, on_report=asking(signal.SIGTERM, "at work, asked"))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in pids)

"""A pool of ranks: tasks one after another, and every way to lose a rank without leaving one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kept_pool import KeptPool

from fivefold.core.errors import RankLost
from fivefold.launch import processes
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker, stop_signals
from tests.selection import within

import torch  # isort: skip
import torch.distributed as dist  # isort: skip


def total(worker: Worker, world: int, value: float) -> float:
    with worker.joined(world):
        tensor = torch.tensor(value * (worker.rank + 1))
        if world > 1:
            dist.all_reduce(tensor)
        return tensor.item()


def fail(worker: Worker, rank: int, how: str) -> None:
    """One rank fails where the others wait for it."""
    with worker.joined(2):
        worker.phase("step 2 backward")
        worker.detail("all_reduce on tp")
        if worker.rank == rank and how == "raise":
            raise MemoryError("no room for 3 GiB")
        if worker.rank == rank and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if worker.rank == rank and how == "hang":
            time.sleep(600)
        worker.detail("all_reduce on dp")
        dist.all_reduce(torch.ones(1))


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet is over too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < until, "orphans remain"
        time.sleep(0.05)


def test_many_tasks_and_group_sizes_run_on_one_pool() -> None:
    with Pool(4) as pool:
        assert pool.run(total, 4, 1.0) == [10.0] * 4
        assert pool.run_each([(total, (2, 0.5))] * 2) == [1.5] * 2
        assert pool.run_each([(total, (1, 7.0))]) == [7.0]
        assert pool.run(total, 4, 2.0) == [20.0] * 4


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "raised MemoryError: no room for 3 GiB"),
        ("die", r"was killed by SIGKILL \(out of memory\?\)"),
        ("hang", "was silent for 2 s"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_named_with_what_it_did(how: str, cause: str, rank: int) -> None:
    with Pool(2, patience=2.0) as pool:
        pids = pool.pids
        with within(10), pytest.raises(RankLost, match=cause) as caught:
            pool.run(fail, rank, how)
        assert caught.value.rank == rank
        assert caught.value.doing == "step 2 backward, all_reduce on tp"
        assert all(gone(pid) for pid in pids)


def compute(worker: Worker, seconds: float) -> float:
    """Says nothing while it computes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))
    return seconds


def test_a_rank_that_computes_may_be_silent_for_longer() -> None:
    with Pool(2, patience=0.8) as pool:
        assert pool.run_each([(compute, (2.5,))]) == [2.5]
        began = time.monotonic()
        with pytest.raises(RankLost, match="was silent for 1 s"):
            pool.run(fail, 1, "hang")
        assert time.monotonic() - began < 2.0


def test_a_pool_that_is_kept_is_replaced_when_a_rank_is_lost() -> None:
    kept = KeptPool()
    try:
        first = kept.whole()
        assert kept.whole() is first
        os.kill(first.pids[-1], signal.SIGKILL)
        wait_until_gone(first.pids[-1:])
        second = kept.whole()
        assert second is not first
        assert second.run_each([(total, (2, 1.0))] * 2) == [3.0] * 2
        with pytest.raises(RankLost, match="no room for 3 GiB"):
            second.run_each([(fail, (0, "raise"))] * 2)
        assert kept.whole().run_each([(total, (1, 7.0))]) == [7.0]
    finally:
        kept.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(
        "import time\n"
        "from fivefold.launch.processes import Pool\n"
        "def sleep(worker): time.sleep(600)\n"
        "with Pool(3) as pool:\n"
        "    print(*pool.pids, flush=True)\n"
        "    pool.run(sleep)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell starts its background jobs with interrupts ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3 and not any(gone(pid) for pid in pids)
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(timeout=20) != 0
    process.stdout.close()
    wait_until_gone(pids)
    if number != signal.SIGKILL:  # which nobody can clean up after
        assert not list(tmp_path.glob("fivefold-*"))


def test_a_signal_right_after_the_fork_waits_for_the_handler_of_the_rank() -> None:
    """Until then a rank has the handlers of its parent, which would stop ranks that are not its."""
    serve = processes._serve

    def interrupted(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        serve(*given)

    with patch.object(processes, "_serve", interrupted), Pool(1, forwards_stop=True) as pool:
        assert pool.run(is_stopping) == [True]


def is_stopping(worker: Worker) -> bool:
    return worker.stopping


def test_a_hangup_asks_to_stop_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` leaves it
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_before_the_first_rank_is_passed_on() -> None:
    handle = Pool._handle_signals

    def interrupted(self: Pool) -> dict[signal.Signals, Any]:
        former = handle(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return former

    with patch.object(Pool, "_handle_signals", interrupted), Pool(1, forwards_stop=True) as pool:
        assert pool.stopping and pool.run(is_stopping) == [True]

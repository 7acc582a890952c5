"""A rank that is stopped or late, and a store that is silent, are named while they last, and the
run goes on; a rank that is gone ends it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any
from unittest.mock import patch

import pytest
from test_store_address import free_port

from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.watch.kv_messages import Probes, StoreBoard
from fivefold.launch.watch.watchdog import watched
from fivefold.launch.worker import joined_worker
from tests.commands import in_fork

import torch.distributed as dist  # isort: skip

HOST, WORLD, SOON = "127.0.0.1", 3, 60.0
# Seconds of patience, of a stall, of a store that is silent, and of one question to it.
SHORT, TRUE = (0.5, 2.5, 2.5, 0.6), (12.0, 45.0, 20.0, 10.0)
SPANS = [pytest.param(SHORT, id="short"), pytest.param(TRUE, id="45s", marks=pytest.mark.nightly)]
Spans = tuple[float, float, float, float]


def serve(port: int) -> None:
    """The store, in a process of its own as torchrun has it."""
    store = dist.TCPStore(HOST, port, None, True, timedelta(minutes=1), wait_for_workers=False)
    time.sleep(10 * SOON)
    del store


def steps(
    rank: int, port: int, log: Path, barrier: Any, seconds: float, late: float, spans: Spans
) -> None:
    """Steps of one collective each: a barrier, which the death of a rank does not break."""
    sys.stderr = log.open("w", encoding="utf-8", buffering=1)
    patience, _, _, limit = spans
    launched = LauncherEnvironment(rank, WORLD, rank, HOST, port, hosted=True, local_world=WORLD)
    members = tuple(range(WORLD))
    with patch("fivefold.launch.worker.StoreBoard", partial(StoreBoard, limit=limit)):
        worker = joined_worker(launched, lambda _: None)
        ends = suppress(BrokenBarrierError)  # all leave after the same step
        with ends, watched(worker, WORLD, patience, 20 * spans[1]) as watchdog:
            began, number = time.monotonic(), 0
            while (number := number + 1) and time.monotonic() - began < seconds:
                watchdog.phase(f"data of step {number}", mark=True)
                if rank == 1 and number == 10:
                    time.sleep(late)
                watchdog.phase(f"step {number}", mark=True, alike=False)
                watchdog.note(("world", "all_reduce", 8, WORLD), members)
                barrier.wait()
                time.sleep(0.02)
                if number == 10:
                    print("ten steps", file=sys.stderr)
            barrier.abort()


class Job:
    """The processes of a job that runs for some seconds."""

    def __init__(self, folder: Path, seconds: float, late: float, spans: Spans) -> None:
        context = multiprocessing.get_context("fork")
        port, barrier = free_port(), context.Barrier(WORLD)
        self.logs = [folder / f"rank-{rank}" for rank in range(WORLD)]
        self.store = context.Process(target=serve, args=(port,))
        self.ranks = [
            context.Process(target=steps, args=(rank, port, log, barrier, seconds, late, spans))
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    @property
    def processes(self) -> list[BaseProcess]:
        return [self.store, *self.ranks]

    @property
    def text(self) -> str:
        return "".join(log.read_text("utf-8") for log in self.logs if log.exists())

    def wait_for(self, words: str, limit: float = SOON) -> float:
        """Until a rank has said this; how long it took."""
        began = time.monotonic()
        while not re.search(words, self.text):
            assert time.monotonic() - began < limit, self.text
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def running(folder: Path, spans: Spans, late: float = 0.0) -> Iterator[Job]:
    job = Job(folder, 1.6 * spans[1], late, spans)
    try:
        yield job
    finally:
        for process in job.processes:
            process.kill()
            process.join()


def went_on(job: Job, spans: Spans) -> None:
    """All ranks come to their end, and none has been lost."""
    for process in job.ranks:
        process.join(4 * spans[1] + SOON)
    assert [process.exitcode for process in job.ranks] == [0] * WORLD, job.text


@pytest.mark.parametrize("spans", SPANS)
def test_a_rank_that_is_stopped_is_named_and_goes_on(spans: Spans, tmp_path: Path) -> None:
    with running(tmp_path, spans) as job:
        job.wait_for("ten steps")
        os.kill(job.ranks[1].pid or 0, signal.SIGSTOP)
        took = job.wait_for("rank 1 stands still at .*does not answer", spans[1])
        time.sleep(max(0.0, spans[1] - took))
        os.kill(job.ranks[1].pid or 0, signal.SIGCONT)
        went_on(job, spans)


@pytest.mark.parametrize("spans", SPANS)
def test_data_that_is_late_is_named_and_comes(spans: Spans, tmp_path: Path) -> None:
    with running(tmp_path, spans, late=spans[1]) as job:
        job.wait_for(r"rank 1 stands still at data of step 10; the run goes on, and ends after")
        assert "ten steps" not in job.text, "it is named while it lasts"
        job.wait_for("ten steps")
        went_on(job, spans)


@pytest.mark.parametrize("spans", SPANS)
def test_a_store_that_is_silent_is_named_and_answers_again(spans: Spans, tmp_path: Path) -> None:
    with running(tmp_path, spans) as job:
        job.wait_for("ten steps")
        os.kill(job.store.pid or 0, signal.SIGSTOP)
        took = job.wait_for("the store at .* has not answered rank 0", spans[2])
        time.sleep(max(0.0, spans[2] - took))
        os.kill(job.store.pid or 0, signal.SIGCONT)
        went_on(job, spans)


def test_a_rank_that_is_gone_ends_the_run_soon(tmp_path: Path) -> None:
    """No launcher sees its death here: the others find that nobody takes connections any more."""
    with running(tmp_path, SHORT) as job:
        job.wait_for("ten steps")
        job.ranks[1].kill()
        job.wait_for("lost rank 1 at .*it does not answer", 20 * SHORT[0])
        for process in (job.ranks[0], job.ranks[2]):
            process.join(SOON)
            assert process.exitcode == 1


def test_a_store_that_is_gone_ends_the_run_soon(tmp_path: Path) -> None:
    # Ranks are forked with it: nobody is to end their launcher, which is this process.
    with patch("subprocess.Popen"), running(tmp_path, SHORT) as job:
        job.wait_for("ten steps")
        job.store.kill()
        job.wait_for("the store is gone", 20 * SHORT[0])


def test_a_stopped_process_takes_connections_and_a_dead_one_does_not() -> None:
    port = free_port()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(port,))
    process.start()
    address, until, probe = f"{HOST}:{port}", time.monotonic() + SOON, Probes()
    while not probe(address):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGSTOP)
    # As often as a long stop is looked at: new connections would fill the queue of the process.
    assert all(probe(address) for _ in range(300))
    process.kill()
    process.join()
    assert probe(address) is False
    with patch("socket.create_connection", side_effect=TimeoutError):
        assert probe(address) is None, "its host cannot be reached"


@pytest.mark.parametrize(
    ("hang_after", "words"),
    [
        (
            "1e-6",
            r"hang_after = 1e-06 seconds, and a (step|save) is planned to take [0-9.e-]+: give",
        ),
        ("-1", r"hang_after = -1.0: seconds, or 0 for never"),
    ],
)
def test_a_limit_below_the_longest_planned_phase_is_refused(
    hang_after: str, words: str, tmp_path: Path
) -> None:
    options = ("--layout", "dp=1", "--machine", "laptop", "--steps", "1", "--out", "run")
    done = in_fork(["train", "tiny", *options, "--set", f"hang_after={hang_after}"], tmp_path)
    assert done.returncode == 2 and re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run").exists()

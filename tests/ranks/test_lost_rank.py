"""A rank that dies in the middle of a pipeline's step: all end soon, and one error names it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pipelines import MIXED, Case
from test_pool import gone, wait_until_gone

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from tests.selection import within

SOON = 30.0  # seconds within which all is over
TICKS = os.sysconf("SC_CLK_TCK")


def dying(
    worker: Worker, plan: Plan, settings: VerifySettings, rank: int, word: str
) -> VerifiedRank:
    """Run until this rank has said the word."""

    def send(kind: str, what: object) -> None:
        worker.send(kind, what)
        if worker.rank == rank and what == word:
            os.kill(os.getpid(), signal.SIGKILL)

    return run_rank(replace(worker, send=send), plan, settings)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "rank", "word", "doing"),
    [
        (Case("1f1b", "pp=4", 1), 1, "step 2 1B3", "step 2 1B3"),
        (Case("zb-v", "pp=4", 2), 3, "step 1 3W1", "step 1 3W1"),
        (Case("gpipe", "pp=4", 1), 0, "send on pp", "step 1 0F0, send on pp"),
        (Case("dualpipe", "pp=4", 1), 2, "step 1 reduce", "step 1 reduce"),
        (Case("zb-h1", MIXED, 1, zero=3), 5, "step 1 1F1", "step 1 1F1"),
        (Case("pipedream", "pp=4", 1), 3, "stream 3B1", "stream 3B1"),
    ],
    ids=str,
)
def test_all_end_and_one_error_names_the_rank(case: Case, rank: int, word: str, doing: str) -> None:
    plan, settings = case.plan, VerifySettings()
    ranks = [(dying, (plan, settings, rank, word))] * plan.layout.world
    with Pool(plan.layout.world + 1) as pool:
        pids = pool.pids
        with within(SOON), pytest.raises(RankLost, match="was killed by SIGKILL") as caught:
            pool.run_each([*ranks, (run_reference, (plan, settings))])
        assert (caught.value.rank, caught.value.doing) == (rank, doing)
        assert all(gone(pid) for pid in pids)


@contextmanager
def verifying(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which does not outlive the test."""
    command = [sys.executable, "-m", "fivefold", "verify", "tiny", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def children(parent: int) -> list[int]:
    """Its processes, in the order in which they were forked."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(map(int, found))


def seconds(pid: int) -> float:
    """How long a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@pytest.mark.sample(0.25)
def test_the_command_names_the_rank_and_leaves_no_process() -> None:
    words = ("--layout", "pp=4", "--steps", "500", "--set", "layers=4")
    with verifying(*words) as process:
        until = time.monotonic() + 60
        # Far more than it takes to build the model, and a small part of the steps.
        while len(ranks := children(process.pid)) < 5 or seconds(ranks[2]) < 1.5:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        os.kill(ranks[2], signal.SIGKILL)
        with within(SOON):
            out, err = process.communicate(timeout=4 * SOON)
    assert process.returncode == 1 and not out
    (line,) = err.splitlines()
    named = r"fivefold: lost rank 2 at step [0-9]+ (2[FB][0-9]+|reduce|optimizer)\b.*: it "
    assert re.match(named + r"was killed by SIGKILL", line), line
    wait_until_gone(ranks)

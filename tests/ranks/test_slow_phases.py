"""A rank that hangs in any phase of a training is named, also where it is alone or no folder has
room."""

from __future__ import annotations

import errno
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from test_survival import plan_of, settings_of

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.backend import RankDevice
from fivefold.launch.processes import Pool
from fivefold.launch.watch.kv_messages import FolderBoard
from fivefold.launch.watch.watchdog import RankSurroundings, watched
from fivefold.launch.worker import Worker
from fivefold.records.steps import StepRecord
from fivefold.render.training import step_line
from fivefold.train import build, loop
from fivefold.train.callbacks.watchdog import PhaseLimits, WatchdogCallback
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainedRank, TrainSettings
from tests.selection import within

PATIENCE, SOON, FOREVER = 2.0, 30.0, 600.0
PLACES: dict[str, tuple[Any, str]] = {
    "start": (RankDevice, "start"),
    "build": (build, "compose"),
    "load": (Checkpoints, "load"),
    "step": (loop, "step"),
    "save": (os, "fsync"),
}


@contextmanager
def impatient() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(loop, "watched", partial(watched, patience=PATIENCE)))
        stack.enter_context(patch("fivefold.launch.watch.watchdog.PATIENCE", PATIENCE))
        # A first step has a limit of its own, whoever waits in it.
        stack.enter_context(patch("fivefold.train.callbacks.watchdog._LEAST", PATIENCE))
        yield


def hanging(
    worker: Worker, plan: Plan, settings: TrainSettings, place: str, guilty: int, after: int
) -> TrainedRank:
    """Train; one rank sleeps when it comes to a place after so many times."""
    owner, name = PLACES[place]
    inner, times = getattr(owner, name), iter(range(1000))

    def call(*args: Any, **said: Any) -> Any:
        there = place != "save" or ".part" in str(Path(f"/proc/self/fd/{args[0]}").readlink())
        if worker.rank == guilty and there and next(times) >= after:
            time.sleep(FOREVER)
        return inner(*args, **said)

    with impatient(), patch.object(owner, name, call):
        return run_rank(worker, plan, settings)


@pytest.mark.sample(0.6)
@pytest.mark.parametrize(
    ("place", "after", "doing", "said"),
    [
        ("start", 0, "start", {}),
        ("build", 0, "build", {}),
        ("load", 0, "load", {"resume": True}),
        ("step", 0, "step 1", {}),
        ("step", 2, "step 3", {}),
        ("save", 0, "checkpoint 2", {"save_every": 1}),
        ("save", 0, "the last checkpoint", {}),
        ("save", 2, "checkpoint 1", {"save_every": 1, "offload": "nvme:"}),
    ],
)
def test_the_rank_that_hangs_is_named_in_every_phase(
    place: str, after: int, doing: str, said: dict[str, Any], tmp_path: Path
) -> None:
    if "offload" in said:  # a synchronous save
        said = {**said, "offload": f"nvme:{tmp_path / 'states'}"}
    said = {**said, "hang_after": 2 * PATIENCE}
    plan, settings = plan_of("dp=3", batch=3), settings_of(tmp_path / "run", **said)
    with Pool(3, patience=4 * SOON) as pool, within(SOON), pytest.raises(RankLost) as caught:
        pool.run_each([(hanging, (plan, settings, place, 1, after))] * 3)
    assert (caught.value.rank, caught.value.doing) == (1, doing), str(caught.value)
    assert "time.sleep(FOREVER)" in caught.value.cause, str(caught.value)


def stalling(worker: Worker, plan: Plan, settings: TrainSettings) -> TrainedRank:
    """Train; rank 1 is late once, for longer than the patience of the others."""
    inner, times = loop.step, iter(range(1000))

    def step(*args: Any, **said: Any) -> Any:
        if worker.rank == 1 and next(times) == 1:
            time.sleep(4 * PATIENCE)
        return inner(*args, **said)

    with impatient(), patch.object(loop, "step", step):
        return run_rank(worker, plan, settings)


def test_a_rank_that_stands_still_is_in_the_step_line_and_the_run_goes_on() -> None:
    said: list[Any] = []
    with Pool(2, patience=4 * SOON) as pool:
        pool.run_each([(stalling, (plan_of(), settings_of()))] * 2, on_report=said.append)
    records = [each for each in said if isinstance(each, StepRecord)]
    note, *_ = [each for each in said if isinstance(each, str) and "stands still" in each]
    assert said.index(note) < said.index(records[1]), "it is named while it lasts"
    assert note.startswith("rank 1 stands still at step 2; the run goes on, and ends after 600 s")
    (stall,) = [entry for record in records for entry in record.slow or []]
    assert (records[1].slow, stall["what"], stall["ranks"]) == ([stall], "stall", [1])
    assert re.search(
        r"rank 1 stood still for \d+ s at step 2: \d+% of the", step_line(records[1], 4)
    )


def test_limits_follow_from_the_plan() -> None:
    """While nothing is known: 24 s for what is small, and at most 10 minutes."""
    small, recipe = plan_of("dp=2"), Recipe()
    limits = PhaseLimits.of(small, recipe, "cpu")
    assert 24 < limits.files < 26 and 24 < limits.first_step < 26
    assert PhaseLimits.of(small, recipe, "cuda").first_step == 600, "it compiles"
    eager = PhaseLimits.of(small, replace(recipe, compile=False), "cuda")
    assert 84 < eager.first_step < 86
    large = resolve(PlanOptions("llama-3.1-8b", layout="tp=8", seq=8192, batch=8))
    assert PhaseLimits.of(large, recipe, "cpu") == PhaseLimits(600, 600)


@pytest.mark.sample(0.2)
def test_a_rank_alone_has_a_watchdog() -> None:
    plan, settings = plan_of("dp=1"), settings_of(hang_after=2 * PATIENCE)
    with Pool(1, patience=4 * SOON) as pool, within(SOON), pytest.raises(RankLost) as caught:
        pool.run_each([(hanging, (plan, settings, "step", 0, 2))])
    assert (caught.value.rank, caught.value.doing) == (0, "step 3")
    assert "has not moved for" in caught.value.cause
    assert "time.sleep(FOREVER)" in caught.value.cause


def without_room(worker: Worker, plan: Plan, settings: TrainSettings) -> TrainedRank:
    """The board of rank 0 cannot be written for a while; then rank 1 hangs."""
    inner, until = FolderBoard.put, time.monotonic() + 3 * PATIENCE

    def put(self: FolderBoard, name: str, text: str) -> None:
        if worker.rank == 0 and time.monotonic() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(self, name, text)

    with patch.object(FolderBoard, "put", put):
        return hanging(worker, plan, settings, "step", 1, 1)


@pytest.mark.sample(0.2)
def test_a_full_temporary_folder_is_said_and_tried_again() -> None:
    said: list[Any] = []
    with Pool(2, patience=4 * SOON) as pool, pytest.raises(RankLost) as caught:
        settings = settings_of(hang_after=2 * PATIENCE)
        pool.run_each([(without_room, (plan_of(), settings))] * 2, on_report=said.append)
    assert (caught.value.rank, caught.value.doing) == (1, "step 2"), str(caught.value)
    (words,) = [each for each in said if isinstance(each, str) and "stands still" not in each]
    assert "the watchdog of rank 0 cannot write to" in words and "No space left" in words


def test_a_rank_that_compiles_in_a_late_step_has_the_patience_of_a_first_one() -> None:
    phases: list[tuple[str, float]] = []

    class Heard:
        def phase(self, text: str, allowed: float = 0.0, **_: bool) -> None:
            phases.append((text, allowed))

    callback = WatchdogCallback(cast(Any, Heard()), PhaseLimits(24, 600, compiles=True))
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    callback.start(0)
    try:
        for number in (1, 2, 3):
            callback.before_step(number)
            doubled(torch.ones(2 if number < 3 else 3))  # a new size in step 3
    finally:
        callback.close()
    late = [("step 3", 0.0), ("step 3, compiling", 600.0), ("step 3", 0.0)]
    assert phases[-4:] == [("step 2", 0.0), *late]
    doubled(torch.ones(4))
    assert phases[-3:] == late


@pytest.mark.parametrize("broken", [2, 1000])
def test_a_frame_that_ends_while_it_is_read_ends_no_watchdog(broken: int) -> None:
    times, read = iter(range(2000)), traceback.extract_stack

    def extract_stack(frame: FrameType) -> traceback.StackSummary:
        if next(times) < broken:
            raise AttributeError("'dict' object has no attribute 'co_filename'")
        return read(frame)

    with patch("traceback.extract_stack", extract_stack):
        shown, waits = RankSurroundings().stack()
    assert bool(shown) == (broken == 2) and (waits or shown)

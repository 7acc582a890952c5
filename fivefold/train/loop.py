"""The training loop of one rank; a single process runs the same code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from fivefold.core.plan import Plan
from fivefold.launch.backend import RankDevice, forked_device
from fivefold.launch.watchdog import watched
from fivefold.launch.worker import Worker
from fivefold.model.batch import TokenBatch
from fivefold.optim.optimizer import LossScale
from fivefold.records import BUILD, LOAD, StepRecord, mfu
from fivefold.records.run_folder import RunFolder, TimeSpent
from fivefold.step import Guard, StepOutcome, step
from fivefold.train.build import BuiltRank, build_rank
from fivefold.train.callbacks import Callback
from fivefold.train.callbacks.checkpoints import CheckpointCallback
from fivefold.train.callbacks.evaluation import EvaluationCallback
from fivefold.train.callbacks.memory import MemoryCallback
from fivefold.train.callbacks.records import RecordCallback, SpanCallback
from fivefold.train.callbacks.stop import StopCallback
from fivefold.train.callbacks.watchdog import WatchdogCallback
from fivefold.train.state import Progress, TrainedRank, TrainSettings


def run_rank(
    worker: Worker,
    plan: Plan,
    settings: TrainSettings,
    reverse: bool = False,
    device: RankDevice | None = None,
) -> TrainedRank:
    """All steps of one rank, on `device` or on the next GPU of this machine.

    `reverse` takes the microbatches of each step from the last to the first: the same sums in
    another order.
    """
    recipe, world = settings.recipe, plan.layout.world
    mine = device or forked_device(settings.device, settings.backend, worker.rank, world)
    observed = watched(worker, world) if world > 1 else nullcontext()
    with worker.joined(world, mine), observed as watchdog:
        folder = None if settings.folder is None else RunFolder.open(settings.folder)
        progress, spent = Progress(LossScale.of(settings.dtype), settings.last_step), TimeSpent()
        phases = WatchdogCallback(worker, watchdog)
        spans = SpanCallback(folder if recipe.events else None, worker.rank, mine.device)

        phases.phase("build", long=True)
        with spent.on(BUILD):
            rank = build_rank(plan, settings, mine.device, phases, spans)
        checkpoints = CheckpointCallback(worker, settings, folder, rank, progress, spent, phases)
        phases.phase("load", long=True)
        with spent.on(LOAD):
            checkpoints.load()

        stop = StopCallback(worker, progress, recipe.skip_limit, checkpoints)
        callbacks = (
            spans,
            phases,
            EvaluationCallback(recipe, rank, spent),
            MemoryCallback(worker, recipe, folder, rank, progress),
            RecordCallback(worker, plan, settings, folder, progress, spent),
            stop,
            checkpoints,
        )
        result = TrainedRank(first_step=progress.step + 1)
        _Loop(rank, settings, progress, spent, stop, callbacks, result, reverse).run()
        rank.close()
        return result


@dataclass(frozen=True)
class _Loop:
    """Runs the steps of a rank that is built and loaded."""

    rank: BuiltRank
    settings: TrainSettings
    progress: Progress
    spent: TimeSpent
    stop: StopCallback
    callbacks: Sequence[Callback]
    result: TrainedRank
    reverse: bool

    def run(self) -> None:
        """From the first step of this start to its last, or until the run is stopped."""
        progress = self.progress
        steps_left = progress.last_step - progress.step
        try:
            for each in self.callbacks:
                each.start(progress.step)
            with self.rank.reader.ahead(progress.samples, steps_left) as take_batches:
                while not progress.done:
                    self._advance(take_batches)
            for each in reversed(self.callbacks):
                each.finish()
        except torch.OutOfMemoryError:
            for each in self.callbacks:
                each.out_of_memory()
            raise
        finally:
            for each in self.callbacks:
                each.close()

    def _advance(self, take_batches: Callable[[], list[TokenBatch]]) -> None:
        """One step, and everything that follows it."""
        progress, num_samples = self.progress, self.rank.job.plan.batch.sequences
        number, first = progress.step + 1, progress.samples
        for each in self.callbacks:
            each.before_data(number)
        outcome, seconds = self._step(number, take_batches())
        progress.advance(num_samples, outcome.skipped, bool(outcome.stops))
        loss, stopped = float(outcome.loss), progress.stopped
        self.result.add(loss, stopped, self.rank.job, self.settings.check)
        record = self._record(number, first, outcome, seconds)
        for each in self.callbacks:
            each.after_step(record)

    def _step(self, number: int, batches: list[TokenBatch]) -> tuple[StepOutcome, float]:
        """One optimizer step, and the seconds that it took."""
        job, updater, recipe = self.rank.job, self.rank.updater, self.settings.recipe
        for each in self.callbacks:
            each.before_step(number)
        updater.set_lr(recipe.lr_at(number))
        job.mesh.records.clear()
        guard = Guard(self.progress.scale.value, self.stop.requested)
        last = number == self.progress.last_step
        optimizer = _MeasuredUpdate(self.rank, self.result) if last else updater
        ordered = batches[::-1] if self.reverse else batches
        began = time.perf_counter()
        outcome = step(job, optimizer, ordered, recipe.clip, guard)
        return outcome, time.perf_counter() - began

    def _record(self, number: int, first: int, outcome: StepOutcome, seconds: float) -> StepRecord:
        """The record of a step, with the fields that the callbacks know."""
        measured: dict[str, Any] = {}
        for each in self.callbacks:
            measured |= each.measure(number)
        plan, scale, load = self.rank.job.plan, self.progress.scale, outcome.load
        fullest = None if load is None else load.imbalance.tolist()
        loss = float(outcome.loss)
        infinite = "norm" if isfinite(loss) else "loss"
        return StepRecord(
            step=number,
            loss=loss,
            norm=float(outcome.norm),
            lr=self.settings.recipe.lr_at(number),
            seconds=seconds,
            tokens=plan.batch.tokens,
            world=plan.layout.world,
            first_sample=first,
            num_samples=plan.batch.sequences,
            mfu=mfu(plan, plan.batch.tokens / seconds),
            planned=self.settings.planned,
            skipped=f"{infinite} is not finite" if outcome.skipped else None,
            scale=scale.value if scale.dynamic else None,
            fullest=None if fullest is None else sum(fullest) / len(fullest),
            load=None if fullest is None else tuple(round(each, 3) for each in fullest),
            spent=self.spent.take(),
            **measured,
        )


@dataclass(frozen=True)
class _MeasuredUpdate:
    """The last update of a start, after which the memory of the rank is measured."""

    rank: BuiltRank
    result: TrainedRank

    def step(self) -> None:
        self.rank.updater.step()
        self.result.measure_memory(self.rank.job, self.rank.updater)

"""The training loop of one rank; a single process runs the same code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import isfinite
from typing import Any, NamedTuple

import torch

from fivefold.core import FivefoldError
from fivefold.core.plan import Plan
from fivefold.launch import RankDevice, Worker, forked_device
from fivefold.launch.watch import watched
from fivefold.model import ReorderedSums, TokenBatch
from fivefold.optim import LossScale
from fivefold.records import BUILD, EVAL, LOAD, RunFolder, StepRecord, TimeSpent, mfu
from fivefold.step import Guard, StepOutcome, StepWatch, step
from fivefold.train.build import BuiltRank, RankRun, build_rank
from fivefold.train.callbacks import (
    Callback,
    CallbackRank,
    CheckpointCallback,
    CopyCallback,
    EvaluationCallback,
    MemoryCallback,
    PaceCallback,
    PhaseLimits,
    RecordCallback,
    SampleCallback,
    SpanCallback,
    StopCallback,
    WatchdogCallback,
    callback_classes,
)
from fivefold.train.clock import StepClock, StepMark
from fivefold.train.preference import PreferenceObjective, objective_of
from fivefold.train.recovery import (
    Bound,
    Integrity,
    LocalNumbers,
    ReplayCallback,
    RunningBound,
)
from fivefold.train.references import GradientSketches, ReplayedRoutes
from fivefold.train.state import Progress, Routes, TrainedRank, TrainSettings


def run_rank(
    worker: Worker,
    plan: Plan,
    settings: TrainSettings,
    reordered: bool = False,
    device: RankDevice | None = None,
    routes: Sequence[Routes] = (),
) -> TrainedRank:
    """Train all steps on one rank, on `device` or on the next GPU of this machine.

    `reordered` takes the microbatches of each step from the last to the first, and adds the terms
    of every sum in another order. `routes` are the experts that the tokens of each step go to.
    """
    recipe, world = settings.recipe, plan.layout.world
    local_device = device or forked_device(settings.device, settings.backend, worker.rank, world)
    # The watchdog begins before the ranks meet, and ends before they leave one another.
    joined = worker.joined(world, local_device, recipe.hang_after)
    with (
        watched(worker, world, hang_after=recipe.hang_after) as watchdog,
        joined,
        closing(watchdog),
    ):
        folder = None if settings.folder is None else RunFolder.open(settings.folder)
        clock = StepClock.of(local_device.device, folder)
        own = [*(make() for make in callback_classes(recipe)), *settings.options.callbacks]
        scale, spent = LossScale.of(settings.dtype), TimeSpent()
        progress = Progress(scale, settings.last_step, callbacks=own)
        phases = WatchdogCallback(watchdog, PhaseLimits.of(plan, recipe, local_device.device.type))
        events = folder if recipe.events else None
        spans = SpanCallback(events, worker.rank, local_device.device, worker.report)
        pace = PaceCallback(watchdog)

        phases.phase("build", long=True)
        with spent.on(BUILD):
            rank = build_rank(plan, settings, local_device.device, phases, spans, pace)
        modules = tuple(chunk.model for chunk in rank.job.chunks)
        for callback in own:
            callback.setup(CallbackRank(worker.rank, plan, settings.folder, modules, worker.report))
        run = RankRun(worker, settings, folder, rank, progress, spent, phases)
        checkpoints, copies = CheckpointCallback(run), CopyCallback(run)
        phases.phase("load", long=True)
        with spent.on(LOAD):
            checkpoints.load(copies.load)

        objective = None
        if recipe.dpo_beta:
            phases.unknown("reference")
            objective = _objective(rank, settings, progress, spent)
        stop = StopCallback(worker, progress, recipe.skip_limit, checkpoints)
        replays, integrity = _watches(worker, rank, settings, checkpoints, copies)
        callbacks = (
            spans,
            phases,
            pace,
            EvaluationCallback(run, objective),
            SampleCallback(run),
            MemoryCallback(run),
            RecordCallback(run),
            *own,
            replays,
            *([] if integrity is None else [integrity]),
            stop,
            checkpoints,
            copies,
            *([] if objective is None else [objective]),
        )
        result = TrainedRank(first_step=progress.step + 1)
        replayed = ReplayedRoutes(rank.job, routes) if routes else None
        _Loop(
            run=run,
            clock=clock,
            stop=stop,
            callbacks=callbacks,
            result=result,
            reordered=reordered,
            replayed=replayed,
            replays=replays,
            integrity=integrity,
            objective=objective,
        ).train()
        if replayed is not None:
            result.measure_ties(replayed.gap)
        rank.close()
        return result


def _objective(
    rank: BuiltRank, settings: TrainSettings, progress: Progress, spent: TimeSpent
) -> PreferenceObjective:
    with spent.on(EVAL):
        return objective_of(rank, settings, begun=progress.step > 0)


def _watches(
    worker: Worker,
    rank: BuiltRank,
    settings: TrainSettings,
    checkpoints: CheckpointCallback,
    copies: CopyCallback,
) -> tuple[ReplayCallback, Integrity | None]:
    """What looks for flipped bits: in steps that run again, and in memory."""
    mesh, recipe, every = rank.job.mesh, settings.recipe, settings.recipe.compare_every
    exact = settings.exact or mesh.device.type == "cpu"
    bound = RunningBound(recipe.spike_bound)
    local = LocalNumbers(mesh, bound)
    replays = ReplayCallback(worker, mesh, recipe.replay, every > 0, exact, bound, local)
    if not every:
        return replays, None
    return replays, Integrity(rank.job, rank.updater, every, checkpoints, copies)


@dataclass(frozen=True)
class _Loop:
    """Training loop of a rank that is built and loaded."""

    run: RankRun
    clock: StepClock
    stop: StopCallback
    callbacks: Sequence[Callback]
    result: TrainedRank
    reordered: bool
    replayed: ReplayedRoutes | None
    replays: ReplayCallback
    integrity: Integrity | None
    objective: PreferenceObjective | None
    pending: deque[_PendingRecord] = field(default_factory=deque["_PendingRecord"])

    def train(self) -> None:
        """From the first step of this start to its last, or until the run is stopped."""
        progress = self.run.progress
        steps_left = progress.last_step - progress.step
        try:
            for callback in self.callbacks:
                callback.start(progress.step)
            with self.run.rank.reader.ahead(progress.samples, steps_left) as take_batches:
                while not progress.done:
                    self._advance(take_batches)
            for callback in reversed(self.callbacks):
                callback.finish()
        except FivefoldError:
            self._complete_records(wait=True)  # the steps before the error have run
            raise
        except torch.OutOfMemoryError:
            for callback in self.callbacks:
                callback.out_of_memory()
            raise
        finally:
            for callback in self.callbacks:
                callback.close()

    def _advance(self, take_batches: Callable[[], list[TokenBatch]]) -> None:
        """One step, and everything that follows it."""
        progress, num_samples = self.run.progress, self.run.rank.job.plan.batch.sequences
        number, first = progress.step + 1, progress.samples
        for callback in self.callbacks:
            callback.before_data(number)
        self.clock.ask()
        batches = take_batches()
        self.clock.begin()
        for callback in self.callbacks:
            callback.before_step(number)
        self.run.rank.updater.set_lr(self.run.settings.recipe.lr_at(number))
        weights = self._weights(batches)  # its forward is no part of the step's traffic
        if self.integrity is not None:
            self.integrity.begin(number)
        attempt = partial(self._attempt, number, batches, weights, self.stop.requested)
        expected = progress.scale.explains_overflow
        outcome = self.replays.run(number, attempt, expected)
        if self.integrity is not None and outcome.flips is not None and outcome.flips.any():
            raise self.integrity.error()
        if self.objective is not None:
            outcome = replace(outcome, loss=torch.tensor(self.objective.loss, dtype=torch.float64))
        mark = self.clock.mark()
        progress.advance(num_samples, outcome.skipped, bool(outcome.stops))
        loss, stopped = float(outcome.loss), progress.stopped
        self.result.add(loss, stopped, self.run.rank.job, self.run.settings.options.check)
        self.pending.append(_PendingRecord(mark, self._fields(number, first, outcome)))
        self._complete_records(any(listener.needs_record(number) for listener in self.callbacks))
        for callback in self.callbacks:
            callback.after_step(number)

    def _attempt(
        self,
        number: int,
        batches: list[TokenBatch],
        weights: list[float] | None,
        stop: bool,
        bound: Bound | None,
    ) -> StepOutcome:
        """Run a step, which updates nothing above its bound."""
        job, updater, recipe = self.run.rank.job, self.run.rank.updater, self.run.settings.recipe
        uncount = partial(updater.resume_after, updater.count) if updater.skips else None
        scale, clip = self.run.progress.scale.value, recipe.clip
        spikes = self.replays.spikes(number)
        guard = Guard(scale, stop, self.clock.synchronised, uncount, bound, self.watch, spikes)
        last = number == self.run.progress.last_step
        optimizer = _MeasuredUpdate(self.run.rank, self.result) if last else updater
        eligible = recipe.offload == "none" and not recipe.optimizer_kind.full_matrices
        if self.replays.proves(number) and bound is None and eligible:
            optimizer = self.replays.proving(job, updater, optimizer)
        ordered = batches[::-1] if self.reordered else batches
        if self.replayed is not None:
            ordered = self.replayed.replay(number - self.result.first_step, ordered)
        job.balancing.routes.clear()
        with ReorderedSums() if self.reordered else nullcontext():
            if weights is None:
                return step(job, optimizer, ordered, clip, guard)
            turned = weights[::-1] if self.reordered else weights
            return step(job, optimizer, ordered, clip, guard, turned, per_token=False)

    @cached_property
    def watch(self) -> StepWatch | None:
        """What looks at the memory and the gradients of a step before its update."""
        if not self.run.settings.options.check:
            return self.integrity
        return GradientSketches(self.run.rank.job, self.run.progress, self.result, self.integrity)

    def _weights(self, batches: list[TokenBatch]) -> list[float] | None:
        """Of the losses of microbatches, in the order of these; None: all count alike."""
        if self.objective is None:
            return None
        return self.objective.weights(batches, self.run.progress.samples)

    def _fields(self, number: int, first: int, outcome: StepOutcome) -> dict[str, Any]:
        """The record of a step without its times, with the fields that the callbacks know."""
        measured: dict[str, Any] = {}
        for callback in self.callbacks:
            measured |= callback.measure(number)
        plan, scale, load = self.run.rank.job.plan, self.run.progress.scale, outcome.load
        fullest = None if load is None else load.imbalance.tolist()
        loss = float(outcome.loss)
        infinite = "norm" if isfinite(loss) else "loss"
        return dict(
            step=number,
            loss=loss,
            norm=float(outcome.norm),
            lr=self.run.settings.recipe.lr_at(number),
            tokens=plan.batch.tokens,
            world=plan.layout.world,
            first_sample=first,
            num_samples=plan.batch.sequences,
            restart=0 if self.run.folder is None else self.run.folder.restart,
            planned=self.run.settings.planned,
            skipped=f"{infinite} is not finite" if outcome.skipped else None,
            scale=scale.value if scale.dynamic else None,
            fullest=None if fullest is None else sum(fullest) / len(fullest),
            load=None if fullest is None else tuple(round(share, 3) for share in fullest),
            spent=self.run.spent.take(),
            **measured,
        )

    def _complete_records(self, wait: bool) -> None:
        """Complete the records of steps whose updates have run, or of all steps after a wait."""
        plan = self.run.rank.job.plan
        while self.pending and (wait or self.pending[0].mark.end.passed):
            mark, fields = self.pending.popleft()
            times = self.clock.times(mark)
            record = StepRecord(
                **fields,
                seconds=times.step,
                data=times.data,
                wall_s=times.wall,
                wall=times.since_start,
                mfu=None if times.wall is None else mfu(plan, plan.batch.tokens / times.wall),
            )
            for callback in self.callbacks:
                callback.on_record(record)


class _PendingRecord(NamedTuple):
    """A step whose update may still run: the mark of its clock, and its other fields."""

    mark: StepMark
    fields: dict[str, Any]


@dataclass(frozen=True)
class _MeasuredUpdate:
    """Measures memory after the last update of a start."""

    rank: BuiltRank
    result: TrainedRank

    def step(self) -> None:
        self.rank.updater.step()
        self.result.measure_memory(self.rank.job, self.rank.updater)

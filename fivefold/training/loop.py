"""The training loop of one rank; one process alone runs the same lines."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fivefold.core.plan import Plan
from fivefold.model.batch import TokenBatch
from fivefold.parallel.compose import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.run.optimizer import make_optimizer
from fivefold.run.ranks import Worker
from fivefold.run.samples import laid_out
from fivefold.run.tokens import Source, standard_library
from fivefold.step import step
from fivefold.training.held import Held, measure
from fivefold.training.routes import Routes, kept
from fivefold.training.settings import ADAM_EPS, MAX_NORM, WEIGHT_DECAY, Settings


class StepLine(NamedTuple):
    """What is said of a step while the training runs."""

    step: int  # from 1
    loss: float
    norm: float
    lr: float
    seconds: float
    fullest: float | None  # the fullest expert over the mean, on average over layers with experts


class Moved(NamedTuple):
    """Collectives of one axis: how many, and their bytes."""

    calls: int
    bytes: int


@dataclass
class RankRun:
    """What one rank has to show for its training."""

    losses: list[float] = field(default_factory=list)
    moved: list[dict[str, Moved]] = field(default_factory=list)  # by step, then by axis
    held: Held | None = None  # right behind the last update
    routes: list[Routes] = field(default_factory=list)  # by step, where they are to be compared


def run_rank(worker: Worker, plan: Plan, settings: Settings, reverse: bool = False) -> RankRun:
    """All steps of one rank.

    `reverse` takes the microbatches of each step from the last to the first: the same sums in
    another order.
    """
    with worker.joined(plan.layout.world):
        worker.phase("build")
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=settings.seed, dtype=getattr(torch, settings.dtype))
        source = source_of(plan, settings.seed)
        loop = _Loop(worker, job, settings)
        for number in range(1, settings.steps + 1):
            batches = batches_of(plan, source, number - 1, mesh.rank)
            loop.step(number, batches[::-1] if reverse else batches)
        for chunk in job.chunks:
            chunk.data.wait()
        mesh.groups.clear()  # they end with their last holder, and a weight's hook may be one
        mesh.channels.clear()
        return loop.run


def source_of(plan: Plan, seed: int) -> Source:
    """The text that the plan's model reads."""
    return Source.of(standard_library(plan.shape.vocab), plan.batch.seq, seed)


def batches_of(plan: Plan, source: Source, number: int, rank: int) -> list[TokenBatch]:
    """The microbatches of a rank in a step, from 0."""
    rows = source.step(number, plan.batch.sequences)
    begins = torch.from_numpy(rows.begins) if plan.packed else None
    drawn = laid_out(plan.batch, torch.from_numpy(rows.tokens), begins)
    return drawn.of(plan.layout.coord(rank).dp)


class _Loop:
    """Runs steps, says each when it is over, and keeps what there is to compare."""

    def __init__(self, worker: Worker, job: Job, settings: Settings) -> None:
        self.worker, self.job, self.settings = worker, job, settings
        owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
        self.optimizer = make_optimizer("adamw", owned, settings.lr, WEIGHT_DECAY)
        for group in self.optimizer.param_groups:
            group["eps"] = ADAM_EPS
        self.run = RankRun()
        if settings.check:
            job.balancing.watch()

    def step(self, number: int, batches: list[TokenBatch]) -> None:
        """One optimizer step."""
        job, lr = self.job, self.settings.lr_at(number)
        job.pipeline.before = lambda action: self.worker.phase(f"step {number} {action}")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if number == self.settings.steps:
            self.optimizer.register_step_post_hook(self._measure)
        job.mesh.records.clear()
        began = time.perf_counter()
        outcome = step(job, self.optimizer, batches, MAX_NORM)
        loss, norm = float(outcome.loss), float(outcome.norm)
        seconds = time.perf_counter() - began
        self.run.losses.append(loss)
        self.run.moved.append(by_axis(job.mesh.records))
        if self.settings.check:
            self.run.routes.append(kept(job.balancing.routes))
            job.balancing.routes.clear()
        if self.worker.rank == 0:
            fullest = None if outcome.load is None else float(outcome.load.imbalance.mean())
            self.worker.report(StepLine(number, loss, norm, lr, seconds, fullest))

    def _measure(self, *_: object) -> None:
        self.run.held = measure(self.job, self.optimizer)


def by_axis(calls: Counter[tuple[str, str, int, int]]) -> dict[str, Moved]:
    """Collectives and their bytes, axis by axis."""
    found: dict[str, Moved] = {}
    for (axis, _, size, _), count in calls.items():
        before = found.get(axis, Moved(0, 0))
        found[axis] = Moved(before.calls + count, before.bytes + size * count)
    return found

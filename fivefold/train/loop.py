"""The training loop of one rank; one process alone runs the same lines."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan
from fivefold.data.batches import laid_out
from fivefold.data.mixture import Source, open_source
from fivefold.data.rows import TokenRows
from fivefold.launch.watchdog import Watchdog, watched
from fivefold.launch.worker import Worker
from fivefold.model.batch import TokenBatch
from fivefold.model.blocks import compile_blocks
from fivefold.optim import make_updater
from fivefold.optim.optimizer import LossScale
from fivefold.parallel.compose import Job, compose
from fivefold.parallel.matrix_gather import WholeMatrices
from fivefold.parallel.mesh import Mesh
from fivefold.records import BUILD, EVAL, LOAD, SAVE, StepRecord, mfu
from fivefold.records.run_folder import Spent
from fivefold.step import Guard, StepOutcome, evaluate, step
from fivefold.train.keeper import Keeper, Progress
from fivefold.train.out_of_memory import Shortage, allocated, expected, fitting
from fivefold.train.result import HeldBytes, Routes, kept, measure
from fivefold.train.settings import TrainSettings
from fivefold.train.told import Busy, RankReporter, memory_gib

_COMPARED = 256  # steps whose traffic is held against the plan
_EVALUATED = 8  # global batches of held-out rows, at most


class AxisTraffic(NamedTuple):
    """Collectives of one axis: how many, and their bytes."""

    calls: int
    bytes: int


@dataclass
class TrainedRank:
    """What one rank has to show for its training."""

    first_step: int = 1
    losses: list[float] = field(default_factory=list)
    moved: list[dict[str, AxisTraffic]] = field(default_factory=list)  # of the first steps, by axis
    held: HeldBytes | None = None  # right behind the last update
    routes: list[Routes] = field(default_factory=list)  # by step, where they are to be compared
    stopped: bool = False  # before the last step, because somebody wished so


def run_rank(
    worker: Worker,
    plan: Plan,
    settings: TrainSettings,
    reverse: bool = False,
    device: torch.device | None = None,
) -> TrainedRank:
    """All steps of one rank, on a `device` or on the one whose turn it is.

    `reverse` takes the microbatches of each step from the last to the first: the same sums in
    another order.
    """
    device = device or _device(worker, settings)
    world = plan.layout.world
    with worker.joined(world, device), _watched(worker, world) as watchdog:
        loop = _Loop(worker, plan, settings, device, watchdog, reverse)
        try:
            loop.run()
        except torch.OutOfMemoryError:
            loop.run_out()
            raise
        finally:
            loop.told.close()
        for chunk in loop.job.chunks:
            chunk.data.wait()
        loop.mesh.groups.clear()  # they end with their last holder, and a weight's hook may be one
        loop.mesh.channels.clear()
        return loop.result


def _device(worker: Worker, settings: TrainSettings) -> torch.device:
    """Ranks of one machine take its GPUs in turn."""
    if settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", worker.rank % torch.cuda.device_count())


def _watched(worker: Worker, world: int) -> AbstractContextManager[Watchdog | None]:
    return watched(worker, world) if world > 1 else nullcontext()


def source_of(plan: Plan, settings: TrainSettings, verify: bool = False) -> Source:
    """The text that the plan's model reads."""
    recipe = settings.recipe
    return open_source(recipe.data, plan.shape.vocab, plan.batch.seq, recipe.seed, verify=verify)


def batches_of(plan: Plan, rows: TokenRows, rank: int) -> list[TokenBatch]:
    """What a rank has of a step's rows, by microbatch; rows that are missing have no loss."""
    missing = plan.batch.sequences - len(rows.tokens)
    tokens, begins = (torch.from_numpy(np.pad(each, ((0, missing), (0, 0)))) for each in rows)
    masked = None
    if missing:
        masked = torch.zeros(len(tokens), plan.batch.seq, dtype=torch.bool)
        masked[-missing:] = True
        masked = masked.view(plan.batch.microbatches, plan.batch.dp, -1, plan.batch.seq)
    drawn = laid_out(plan.batch, tokens, begins if plan.packed else None, masked)
    return drawn.of(plan.layout.coord(rank).dp)


class _Loop:
    """Builds the job, runs its steps, and keeps what there is to compare."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        settings: TrainSettings,
        device: torch.device,
        watchdog: Watchdog | None,
        reverse: bool,
    ) -> None:
        self.worker, self.plan, self.settings, self.reverse = worker, plan, settings, reverse
        self.busy = Busy(worker, watchdog)
        self.recipe, self.spent, self.result = settings.recipe, Spent(), TrainedRank()
        self.progress = Progress(LossScale.of(settings.dtype))
        self.busy.phase("build", long=True)
        with self.spent.on(BUILD):
            self.mesh = Mesh.of(plan, device)
            self.job = self._build()
            self.updater = make_updater(
                self.recipe,
                self.job.owned,
                self.mesh.device,
                master=settings.master,
                rank=self.mesh.rank,
                matrices=WholeMatrices(self.job) if self.recipe.optimizer == "muon" else None,
            )
            self.source = source_of(plan, settings)
        self.keeper = Keeper(settings, self.job, self.updater, self._warn)
        self.busy.phase("load", long=True)
        with self.spent.on(LOAD):
            self.keeper.load(self.progress)
        self.result.first_step = self.progress.step + 1
        self.told = RankReporter(worker, plan, settings, device, self.progress.step)
        self.told.watch(self.job, self.busy)
        if settings.resume and self.told.restart and not self.progress.step:
            self._warn("there is no checkpoint yet: the training begins with its first step")
        if settings.check:
            self.job.balancing.watch()

    def _build(self) -> Job:
        disk = None if self.recipe.disk is None else Path(self.recipe.disk)
        if disk is not None:
            disk.mkdir(parents=True, exist_ok=True)
        job = compose(
            self.plan,
            self.mesh,
            seed=self.recipe.seed,
            dtype=self.settings.weights,
            grad_dtype=torch.float32 if self.settings.master else None,
            offload=self.recipe.offload == "cpu",
            master=self.settings.master,
            disk=disk,
        )
        if self.recipe.compile:
            for chunk in job.chunks:
                compile_blocks(chunk.model)
        return job

    def run(self) -> None:
        """From where the training is to its last step, or until somebody wishes to stop."""
        while self.progress.step < self.settings.last_step and not self.result.stopped:
            number = self.progress.step + 1
            first = self.progress.samples
            outcome, seconds = self._step(number, first)
            self.progress.passed(self.plan.batch.sequences, outcome.skipped)
            self.result.stopped = bool(outcome.stops)
            self._keep_to_compare(outcome)
            record = self._record(number, first, outcome, seconds)
            self.told.step(record)
            self._give_up_where_nothing_is_finite()
            if (
                self.keeper.is_due(number)
                or self.result.stopped
                or number == self.settings.last_step
            ):
                self._save(number)
        self.busy.phase("the last checkpoint", long=True)
        with self.spent.on(SAVE):
            self.keeper.finish()
        self.told.end("stopped" if self.result.stopped else "done", self.spent.take())

    def _step(self, number: int, first: int) -> tuple[StepOutcome, float]:
        """One optimizer step, and the seconds that it took."""
        rows = self.source.samples(first, self.plan.batch.sequences)
        batches = batches_of(self.plan, rows, self.mesh.rank)
        batches = [batch.to(self.mesh.device) for batch in batches]
        self.told.begin(number)
        self.updater.set_lr(self.recipe.lr_at(number))
        self.mesh.records.clear()
        guard = Guard(self.progress.scale.value, self.worker.stopping)
        began = time.perf_counter()
        outcome = step(
            self.job,
            _Measuring(self) if number == self.settings.last_step else self.updater,
            batches[::-1] if self.reverse else batches,
            self.recipe.clip,
            guard,
        )
        return outcome, time.perf_counter() - began

    def _record(self, number: int, first: int, outcome: StepOutcome, seconds: float) -> StepRecord:
        batch, scale, load = self.plan.batch, self.progress.scale, outcome.load
        evaluated = self._evaluate(number)
        fullest = None if load is None else load.imbalance.tolist()
        return StepRecord(
            step=number,
            loss=float(outcome.loss),
            norm=float(outcome.norm),
            lr=self.recipe.lr_at(number),
            seconds=seconds,
            tokens=batch.tokens,
            world=self.plan.layout.world,
            first_sample=first,
            num_samples=batch.sequences,
            wall=self.told.wall,
            restart=self.told.restart,
            mfu=mfu(self.plan, batch.tokens / seconds),
            memory_gib=memory_gib(self.mesh.device),
            planned=self.settings.planned,
            skipped=_why(outcome) if outcome.skipped else None,
            scale=scale.value if scale.dynamic else None,
            fullest=None if fullest is None else sum(fullest) / len(fullest),
            load=None if fullest is None else tuple(round(each, 3) for each in fullest),
            eval_loss=evaluated,
            spent=self.spent.take(),
        )

    def _evaluate(self, number: int) -> float | None:
        """The mean loss over rows that are never trained on, where it is time for it."""
        every, size = self.recipe.eval_every, self.plan.batch.sequences
        if not every or not self.recipe.is_due(every, number):
            return None
        with self.spent.on(EVAL):
            rows = self.source.held_out(_EVALUATED * size)
            total = count = 0.0
            for first in range(0, len(rows.tokens), size):
                some = TokenRows(*(each[first : first + size] for each in rows))
                mine = batches_of(self.plan, some, self.mesh.rank)
                loss, num = evaluate(self.job, [each.to(self.mesh.device) for each in mine])
                total, count = total + float(loss), count + float(num)
        return total / count if count else None

    def _save(self, number: int) -> None:
        self.busy.phase(f"checkpoint {number}", long=True)
        with self.spent.on(SAVE):
            self.keeper.save(self.progress)

    def _give_up_where_nothing_is_finite(self) -> None:
        if self.progress.skipped_in_a_row > self.recipe.skip_limit:
            self.keeper.finish()
            raise FivefoldError(
                f"{self.progress.skipped_in_a_row} steps in a row had a loss or norm that is not "
                "finite, more than skip_limit allows: lower lr, look at the data of these steps, "
                "or continue from an older checkpoint"
            )

    def _warn(self, text: str) -> None:
        """Something is not as it should be, and the training goes on; said once."""
        if self.worker.rank == 0:
            self.worker.report(text)

    def run_out(self) -> None:
        """There is no memory left: say what was expected, what is there, and what would fit."""
        snapshot, outlook = self.told.out_of_memory(), expected(self.plan, self.recipe)
        self.worker.report(
            Shortage(
                self.worker.rank,
                f"step {self.progress.step + 1}",
                {} if outlook is None else dict(outlook.memory),
                allocated(self.job, self.updater),
                fitting(self.plan, self.recipe),
                None if snapshot is None else str(snapshot),
            )
        )

    def _keep_to_compare(self, outcome: StepOutcome) -> None:
        self.result.losses.append(float(outcome.loss))
        if len(self.result.moved) < _COMPARED:
            self.result.moved.append(by_axis(self.mesh.records))
        if self.settings.check:
            self.result.routes.append(kept(self.job.balancing.routes))
            self.job.balancing.routes.clear()


class _Measuring:
    """An updater behind whose step is measured what the rank holds."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop

    def step(self) -> None:
        self.loop.updater.step()
        self.loop.result.held = measure(self.loop.job, self.loop.updater)


def _why(outcome: StepOutcome) -> str:
    return f"{'norm' if torch.isfinite(outcome.loss) else 'loss'} is not finite"


def by_axis(calls: Counter[tuple[str, str, int, int]]) -> dict[str, AxisTraffic]:
    """Collectives and their bytes, axis by axis."""
    found: dict[str, AxisTraffic] = {}
    for (axis, _, size, _), count in calls.items():
        before = found.get(axis, AxisTraffic(0, 0))
        found[axis] = AxisTraffic(before.calls + count, before.bytes + size * count)
    return found

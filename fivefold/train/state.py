"""What a training run knows: its settings, how far it is, and the result of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core import Dtype
from fivefold.core.plan import Plan, Recipe
from fivefold.cost.memory import StaticMemory
from fivefold.launch import Backend, MemoryKeeper
from fivefold.optim import LossScale, Updater
from fivefold.parallel import positions_of
from fivefold.records import PlannedStep, RunTicket
from fivefold.train.callbacks import Callback, callback_states, load_callback_states
from fivefold.train.checkpoint import Facts
from fivefold.train.options import RunOptions

if TYPE_CHECKING:
    from fivefold.parallel import Job

_COMPARED = 256  # steps whose traffic is compared with the plan


@dataclass(frozen=True)
class TrainSettings:
    """What a start's options and plan mean on these ranks. Without a `folder` nothing is recorded
    or saved."""

    recipe: Recipe = Recipe()  # noqa: RUF009, it is frozen
    dtype: Dtype = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Backend = "gloo"
    options: RunOptions = RunOptions()  # noqa: RUF009, it is frozen
    folder: Path | None = None
    planned: PlannedStep | None = None
    ticket: RunTicket | None = None  # of the rank that publishes
    memory: MemoryKeeper | None = None  # of copies; it outlives the ranks
    copy_domain: int = 0  # ranks of a failure domain; 0: all copies are in that memory alone

    @property
    def exact(self) -> bool:
        """Whether kernels are deterministic: steps that run twice must be bitwise equal."""
        return self.options.deterministic or self.recipe.replay > 0

    @property
    def last_step(self) -> int:
        """Last step of this start."""
        return min(self.recipe.steps, self.options.until or self.recipe.steps)

    @property
    def weights(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return getattr(torch, self.dtype)

    @property
    def master(self) -> bool:
        """Whether there are master weights, and gradients are summed in float32."""
        return self.weights.itemsize < 4


@dataclass
class Progress:
    """Progress of a run: `step` steps are done, and have read the first `samples` rows.

    Samples are counted apart from steps: a run whose global batch changes reads on where it was.
    """

    scale: LossScale
    last_step: int
    step: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0  # without those that an overflow of the loss scale explains
    stopped: bool = False  # on request
    callbacks: Sequence[Callback] = ()  # of a user, whose states are saved
    evals: dict[str, float] = field(default_factory=dict)  # losses after this step, by set

    @property
    def done(self) -> bool:
        """Whether the last step of this start is done."""
        return self.stopped or self.step >= self.last_step

    def advance(self, num_samples: int, skipped: bool, stopped: bool) -> None:
        """Count a step."""
        self.step += 1
        self.evals = {}
        self.samples += num_samples
        self.skipped += skipped
        unexplained = skipped and not self.scale.explains_overflow
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if unexplained else 0
        self.stopped = stopped
        self.scale.update(skipped)

    def evaluated(self, losses: dict[str, float]) -> None:
        """Record the losses of evaluation sets."""
        self.evals = losses

    def facts(self, updates: int, seed: int, plan: str) -> Facts:
        """Facts for the manifest of a checkpoint; `plan` as in the run folder."""
        scaler = {
            # A scale of 1 may be that of float16 after many overflows, or of a run without one.
            "dynamic": float(self.scale.dynamic),
            "scale": self.scale.value,
            "good_steps": self.scale.good_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        counts = (self.step, updates, self.samples, self.skipped)
        return Facts(
            *counts,
            seed,
            scaler,
            plan,
            evals=self.evals,
            plan_in_run=True,
            callbacks=callback_states(self.callbacks),
        )

    def resume(self, facts: Facts) -> None:
        """Continue from a checkpoint; its loss scale applies only if this run has one."""
        load_callback_states(self.callbacks, facts.callbacks)
        self.step, self.samples, self.skipped = facts.step, facts.samples, facts.skipped
        self.skipped_in_a_row = int(facts.scaler.get("skipped_in_a_row", 0))
        value = facts.scaler.get("scale", 1.0)
        # Older checkpoints do not say whether their run had a scale.
        if self.scale.dynamic and facts.scaler.get("dynamic", value > 1.0):
            good_steps = int(facts.scaler["good_steps"])
            self.scale = replace(self.scale, value=value, good_steps=good_steps)


class AxisTraffic(NamedTuple):
    """Number and bytes of the collectives of one axis."""

    calls: int
    bytes: int


def traffic_by_axis(collectives: Counter[tuple[str, str, int, int]]) -> dict[str, AxisTraffic]:
    """Sum counts of (axis, kind, bytes, group size) by axis."""
    totals: dict[str, AxisTraffic] = {}
    for (axis, _, size, _), count in collectives.items():
        before = totals.get(axis, AxisTraffic(0, 0))
        totals[axis] = AxisTraffic(before.calls + count, before.bytes + size * count)
    return totals


Routes = dict[tuple[int, int], NDArray[np.uint16]]
"""The experts of one step by layer and microbatch, (rows, tokens, experts of a token), sorted."""
Sketch = NDArray[np.float64]
"""A few numbers that stand for a gradient, or a rank's share of them (`train/loop.py`)."""


@dataclass
class TrainedRank:
    """Result of training on one rank."""

    first_step: int = 1
    losses: list[float] = field(default_factory=list)
    traffic: list[dict[str, AxisTraffic]] = field(default_factory=list)  # of the first 256 steps
    memory: RankMemory | None = None  # right after the last update
    routes: list[Routes] = field(default_factory=list)  # by step, if they are to be compared
    stopped: bool = False  # on request, before the last step
    sketches: dict[int, dict[str, Sketch]] = field(default_factory=dict)  # by step and weight
    tie_gap: float = 0.0  # of `ReplayedRoutes`

    def add(self, loss: float, stopped: bool, job: Job, with_routes: bool) -> None:
        """Add a step, right after it."""
        self.losses.append(loss)
        self.stopped = stopped
        if len(self.traffic) < _COMPARED:
            self.traffic.append(traffic_by_axis(job.mesh.records))
        if with_routes:
            experts: Routes = {}  # sorted: the order of a token's experts does not matter
            for route in job.balancing.routes:
                sorted_experts = np.sort(route.experts.cpu().numpy(), -1).astype(np.uint16)
                experts[route.layer, route.microbatch] = sorted_experts
            self.routes.append(experts)
            job.balancing.routes.clear()

    def measure_memory(self, job: Job, updater: Updater) -> None:
        """Measure memory, right after the last update."""
        self.memory = RankMemory.measure(job, updater)

    def measure_ties(self, gap: Tensor) -> None:
        """Store the gap of replayed routes, after the last step."""
        self.tie_gap = float(gap)


def joined_routes(plan: Plan, ranks: Sequence[Sequence[Routes]]) -> list[Routes]:
    """The experts of every token by step, from routes by rank and step, as one process has them:
    its microbatches are those of all data ranks in turn."""
    joined: list[Routes] = [{} for _ in ranks[0]]
    for rank, steps in enumerate(ranks):
        coord = plan.layout.coord(rank)
        if not plan.layout.sp and coord.tp > 0:  # all tp ranks route the same tokens
            continue
        positions = np.array(positions_of(plan, rank))
        real = positions < plan.batch.seq  # the rest is padding
        for routes, step in zip(steps, joined, strict=True):
            for (layer, microbatch), experts in routes.items():
                rows, _, top_k = experts.shape
                key = layer, microbatch * plan.batch.dp + coord.dp
                if key not in step:
                    step[key] = np.zeros((rows, plan.batch.seq, top_k), experts.dtype)
                step[key][:, positions[real]] = experts[:, real]
    return joined


def count_flips(joined: Sequence[Routes], reference: Sequence[Routes]) -> tuple[list[int], int]:
    """Count tokens times layers with other experts than in one process, in each step, and all of
    them."""
    flips, total = [0] * len(reference), 0
    for number, (routes, expected) in enumerate(zip(joined, reference, strict=True)):
        for key, experts in routes.items():
            differs = (experts != expected[key]).any(-1)
            flips[number], total = flips[number] + int(differs.sum()), total + differs.size
    return flips, total


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its optimizer's update; `optimizer` includes the step counts and the
    master weights."""

    weights: int
    gradients: int
    optimizer: int
    padding: int

    @classmethod
    def planned(cls, estimate: StaticMemory) -> RankMemory:
        """Estimated static memory in these categories."""
        states = estimate.master + estimate.optimizer + estimate.scalars
        return cls(estimate.weights, estimate.gradients, states, estimate.padding)

    @classmethod
    def measure(cls, job: Job, updater: Updater) -> RankMemory:
        """Measure allocated memory; padding belongs to no weight, gradient or state."""
        units, states = list(job.units), updater.tensors()
        gradients = [shard.grad for shard in job.owned]
        weights: list[Tensor] = []
        for unit in units:
            if unit.sheds_weights:
                weights += [shard.tensor for shard in unit.owned]
            else:
                weights += unit.parameters.values()
        buffers = [
            tensor
            for unit in units
            for tensor in (
                *(unit.full, unit.shard, unit.gradients),
                *(unit.sent, unit.received, unit.gradient),
            )
            if tensor is not None
        ]
        sizes = [sum(t.nbytes for t in tensors) for tensors in (weights, gradients, states)]
        allocated = storage_bytes([*weights, *gradients, *states, *buffers])
        return cls(*sizes, padding=allocated - sum(sizes))

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.padding


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each storage counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

"""Optimizer steps on forked ranks, for tests that look at what a rank holds or sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.optim.optimizer import Updater
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.offload import GradientHome
from fivefold.step import step, updater_of

STEPS = 2  # the second one finds optimizer states, and whatever the first one left behind


@dataclass(frozen=True)
class Setup:
    """What a job is made of besides its plan."""

    dtype: torch.dtype = torch.float32
    optimizer: Literal["adamw", "sgd"] = "adamw"
    offload: bool = False
    offload_grads: str = "none"

    @property
    def grad_home(self) -> GradientHome | None:
        if self.offload_grads == "none":
            return None
        return GradientHome(None if self.offload_grads == "cpu" else Path(self.offload_grads))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def small_plan(layout: str, changes: dict[str, str] | None = None, **options: Any) -> Plan:
    """A plan for a model of three layers, unless `changes` says otherwise."""
    sizes = {"layers": "3", "width": "32", "heads": "4", "kv_heads": "4", "ffn": "48"}
    sizes |= {"vocab": "64", "max_seq": "64", **(changes or {})}
    return resolve(PlanOptions("tiny", layout=layout, seq=16, set=sizes, **options), small=True)


Watch = Callable[[Job, Updater], Callable[[], Any]]
"""Called with a job before its first step; what it returns is called after the last one."""


def run(pool: Pool, plan: Plan, setup: Setup, watch: Watch) -> list[Any]:
    """What `watch` saw on every rank, in the order of the ranks."""
    return pool.run_each([(_steps, (plan, setup, watch))] * plan.layout.world)


def _steps(worker: Worker, plan: Plan, setup: Setup, watch: Watch) -> Any:
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(
            plan,
            mesh,
            seed=0,
            dtype=setup.dtype,
            offload=setup.offload,
            grad_home=setup.grad_home,
        )
        offload = "cpu" if setup.offload else "none"
        recipe = Recipe(optimizer=setup.optimizer, lr=1e-2, offload=offload)
        optimizer = updater_of(job, recipe, master=setup.dtype.itemsize < 4)
        look = watch(job, optimizer)
        for number in range(STEPS):
            mesh.records.clear()
            step(job, optimizer, _batches(plan, mesh.rank, number), max_norm=1.0)
        for chunk in job.chunks:
            chunk.data.wait()
        return look()


def _batches(plan: Plan, rank: int, number: int) -> list[TokenBatch]:
    """Random tokens, a fifth without a loss, the same on every tp rank."""
    batch, place = plan.batch, plan.layout.coord(rank).dp
    generator = torch.Generator().manual_seed(1000 * number + place)
    sizes = (batch.microbatches, batch.microbatch_size, batch.seq + 1)
    ids = torch.randint(plan.shape.vocab, sizes, generator=generator)
    labels = ids[..., 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = NOT_COUNTED
    positions = torch.arange(batch.seq).expand(batch.microbatch_size, batch.seq)
    return [
        TokenBatch(tokens[:, :-1].contiguous(), wanted, positions)
        for tokens, wanted in zip(ids, labels, strict=True)
    ]

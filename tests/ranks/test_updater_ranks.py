"""Updaters over many ranks: the weights of one process, however they are cut and sliced."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step, updater_of
from fivefold.verify.compare import ComparedPart, Wanted, errors_by_name

STEPS = 2  # the second one finds momentum
MUON = Recipe(optimizer="muon", lr=1e-2)
NARROW = Recipe(states="bf16", lr=1e-2)
SIZES = {"layers": "2", "width": "32", "heads": "4", "kv_heads": "2", "ffn": "24", "vocab": "61"}


def plan_of(layout: str, tied: bool = False, **options: Any) -> Plan:
    sizes = {**SIZES, "tied": str(tied).lower()}
    said = {"seq": 16, "batch": 4, "set": sizes, **options}
    return resolve(PlanOptions("tiny-moe", layout=layout, **said), small=True)


def trained(worker: Worker, plan: Plan, recipe: Recipe) -> list[ComparedPart]:
    """What this rank owns after a few steps."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float64)
        updater = updater_of(job, recipe)
        for number in range(STEPS):
            drawn = samples(plan.batch, plan.shape.vocab, seed=0, step=number)
            step(job, updater, drawn.of(plan.layout.coord(mesh.rank).dp), max_norm=1.0)
        for chunk in job.chunks:
            chunk.data.wait()
        mesh.close_groups()
        return parts_of(job)


def parts_of(job: Job) -> list[ComparedPart]:
    return [
        ComparedPart(
            job.table[each.row.name].name,
            job.shards[each.row.name],
            each.start,
            each.tensor.detach().numpy().copy(),
        )
        for each in job.owned
    ]


@cache
def whole_weights(pool: Pool, recipe: Recipe, tied: bool) -> dict[str, Any]:
    """Those of one process, which owns every weight whole."""
    (parts,) = pool.run_each([(trained, (plan_of("dp=1", tied), recipe))])
    return {part.name: part.values for part in parts}


def largest_error(pool: Pool, recipe: Recipe, options: dict[str, Any]) -> float:
    """Of any weight on any rank, against one process."""
    plan = plan_of(**options)
    truth = whole_weights(pool, recipe, plan.shape.tied)
    found = pool.run_each([(trained, (plan, recipe))] * plan.layout.world)
    errors = errors_by_name(Wanted(truth, [part for parts in found for part in parts]))
    assert errors.keys() == truth.keys()
    return max(errors.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dp=2", "zero": 1},
        {"layout": "dp=4", "zero": 3},
        {"layout": "dp=2x2", "zero": 2},
        {"layout": "tp=2"},
        {"layout": "tp=4"},  # two ranks hold each KV head
        {"layout": "dp=2 tp=2 ep=2"},
        {"layout": "dp=2 tp=2 ep=2 etp=2", "zero": 1},
        {"layout": "dp=2 pp=2", "schedule": "zb-h1", "zero": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_muon_has_the_weights_of_one_process(pool: Pool, options: dict[str, Any]) -> None:
    assert largest_error(pool, MUON, options) < 1e-9


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dp=2", "zero": 0},
        {"layout": "dp=4", "zero": 3},
        {"layout": "dp=2 pp=2", "zero": 1, "tied": True},
        {"layout": "tp=4"},
        {"layout": "dp=2 tp=2 ep=2 etp=2", "zero": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_weight_is_rounded_alike_on_every_layout(pool: Pool, options: dict[str, Any]) -> None:
    """Random bits of a rank's own would let replicas, and the two ends of a tied model, part; bits
    by the place in a shard would make the result depend on tp and ep."""
    assert largest_error(pool, NARROW, options) < 1e-9

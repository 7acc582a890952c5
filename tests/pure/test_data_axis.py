"""The data axes are the same for one plan, unit by unit in integers, and for many, in arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import load
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.cost.grid import LayoutGrid, grid_of_plan
from fivefold.cost.layer.time import LayerTimer
from fivefold.cost.step.time import closing_collectives, data_job, flat_units, unit_groups
from fivefold.cost.traffic.collectives import chunks_of, owned_shards
from fivefold.cost.traffic.data_axis import (
    Collective,
    DataCollective,
    data_collectives,
    shared_gradients,
    step_collectives,
    unit_collectives,
)
from fivefold.planner.setting import estimate_setting
from tests.selection import all_cases, salt

NUM_PLANS = 125 if all_cases() else 6  # of each model and policy
SEQ, ITEMSIZE = 4096, 2
SETTING, _ = estimate_setting(load("h100"), "bf16", 0.0, "compiled", 1.0)
POLICIES = {
    "llama-3.2-1b": {"gather": "microbatch"},  # tied, small blocks
    "gpt2-xl": {"unit_size": 40.0, "gather": None},  # learned positions, biases
    "llama-3.1-70b": {"unit_size": 600.0, "grad_dtype": "bf16", "gather": "microbatch"},
    "qwen3-30b-a3b": {"gather": "microbatch"},
    "deepseek-v2-lite": {"gather": None},
    "deepseek-v3": {"gather": "microbatch"},  # multi-token prediction
    "mixtral-8x7b": {"unit_size": 100.0, "gather": "step"},
    "tiny-moe": {"gather": None},  # blocks that are joined
}
Totals = dict[tuple[str, str], tuple[float, float]]


def random_plans(model: str) -> list[Plan]:
    """Legal plans of one model, with what a stack has in common."""
    random, found = Random(f"{salt()} {model}"), list[Plan]()
    while len(found) < NUM_PLANS:
        degrees = {axis: random.choice((1, 2, 4, 8)) for axis in ("tp", "cp", "ep", "pp")}
        replicate, shard = random.choice((1, 1, 2)), random.choice((1, 2, 4, 16))
        degrees["etp"] = random.choice((1, 1, 2))
        layout = " ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        names = [each.name for each in FAMILIES if not each.asynchronous]
        try:
            found.append(
                resolve(
                    PlanOptions(
                        model,
                        layout=f"dp={replicate}x{shard} {layout}",
                        zero=random.choice((0, 1, 2, 3)),
                        sp=random.random() < 0.8,
                        schedule=random.choice(names) if degrees["pp"] > 1 else "1f1b",
                        microbatches=4 * degrees["pp"],
                        seq=1024 if model == "gpt2-xl" else SEQ,
                        **POLICIES[model],  # pyright: ignore
                    )
                )
            )
        except FivefoldError:
            continue
    return found


def in_integers(plan: Plan) -> Counter[Collective]:
    """What the first rank issues over the data axes, and once a step."""
    chunks = chunks_of(plan, 0, ITEMSIZE)
    parts = owned_shards(plan.layout, 0, [unit for chunk in chunks for unit in chunk.units])
    issued = shared_gradients(plan, 0, parts, ITEMSIZE) + step_collectives(plan)
    for chunk in chunks:
        issued += data_collectives(plan, chunk, ITEMSIZE)
    return issued


def by_kind(issued: Counter[Collective]) -> Totals:
    """Bytes and calls of each axis and kind."""
    found: Totals = {}
    for each, times in issued.items():
        size, calls = found.get(each[:2], (0.0, 0.0))
        found[each[:2]] = (size + each.bytes * times, calls + times)
    return found


def in_arrays(issued: Iterable[DataCollective], number: int, of: int) -> Totals:
    """The same of one layout among many."""
    found: Totals = {}
    for each in issued:
        size, calls = (float(np.broadcast_to(x, of)[number]) for x in (each.bytes, each.times))
        if calls:
            before = found.get((each.axis, each.kind), (0.0, 0.0))
            found[each.axis, each.kind] = (before[0] + size, before[1] + calls)
    return found


@pytest.mark.parametrize("model", POLICIES)
def test_flat_units_of_integers_are_arrays(model: str) -> None:
    """Bytes and calls of every axis. Sums over tp, replicas of KV heads and twins are of what a
    rank owns: the arrays have the average rank."""
    plans = random_plans(model)
    columns = zip(*(grid_of_plan(plan).columns() for plan in plans), strict=True)
    grid = LayoutGrid(*map(np.concatenate, columns))
    # A plan names its own way to gather; where none was asked for, the arrays know it by layout.
    options = replace(plans[0].options, gather=POLICIES[model]["gather"])  # pyright: ignore
    setting = SETTING.with_keys(options)
    work = LayerTimer(*setting.arguments(plans[0].shape, grid, plans[0].batch.seq))
    units = flat_units(work)
    assert units is not None
    job = data_job(work)
    issued = [*closing_collectives(work, units)]
    issued += [each for group in unit_groups(work, units) for each in unit_collectives(job, group)]
    for number, plan in enumerate(plans):
        one, many = by_kind(in_integers(plan)), in_arrays(issued, number, len(plans))
        uneven = [("all_reduce", axis) for axis in ("tp", "replica", "twin")]
        for axis, kind in one.keys() | many.keys():
            if (kind, axis) not in uneven:
                assert one.get((axis, kind)) == many.get((axis, kind)), f"{plan.layout} {axis}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", POLICIES)
def test_gradients_of_all_owners_are_those_of_the_arrays(model: str) -> None:
    """Sums over other axes: the ranks of a shard group together own what the arrays have on each of
    them in the mean."""
    for plan in random_plans(model)[:6]:
        setting = SETTING.with_keys(plan.options)
        job = setting.arguments(plan.shape, grid_of_plan(plan), plan.batch.seq)
        work = LayerTimer(*job)
        units = flat_units(work, plan.stages)
        assert units is not None
        chunks = chunks_of(plan, 0, ITEMSIZE)
        flat = [unit for chunk in chunks for unit in chunk.units]
        layout, found = plan.layout, Counter[str]()
        ranks = [rank for rank in range(layout.world) if layout.coord(rank).pp == 0]
        for rank in ranks:
            parts = owned_shards(layout, rank, flat)
            for each, times in shared_gradients(plan, rank, parts, ITEMSIZE).items():
                found[each.axis] += each.bytes * times
        for each in closing_collectives(work, units):
            if each.axis in ("tp", "replica", "twin"):
                priced = float(np.asarray(each.bytes).item()) * len(ranks)
                assert priced == pytest.approx(found[each.axis], rel=1e-4), f"{layout} {each.axis}"

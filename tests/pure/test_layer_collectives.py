"""The collectives of a layer are the same for one plan, in integers, and for many, in arrays."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import load
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.grid import LayoutGrid, grid_of_plan, layer_job
from fivefold.cost.traffic.layers import (
    CountedCollective,
    LayerJob,
    context_layer,
    expert_layer,
    tensor_ends,
    tensor_layer,
)
from tests.selection import all_cases, salt

SEQ, ITEMSIZE = 96, 2
NUM_PLANS = 250 if all_cases() else 25  # of each model
H100 = load("h100")
NODE = H100.tiers[0].size
CHOICES = {
    "zero": (0, 1, 2, 3),
    "sp": (True, False),
    "context": ("zigzag", "ring", "allgather", "ulysses", "hybrid"),
    "recompute": ("none", "selective", "full"),
    "microbatch_size": (1, 2, 3),
}


def random_plans(model: str) -> list[Plan]:
    """Legal plans of one model on nodes of 8 GPUs."""
    random, found = Random(f"{salt()} {model}"), list[Plan]()
    while len(found) < NUM_PLANS:
        degrees = {axis: random.choice((1, 2, 4, 8)) for axis in ("dp", "tp", "cp", "ep")}
        degrees["pp"], degrees["etp"] = random.choice((1, 2)), random.choice((1, 2))
        layout = " ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        fixed = {"machine": "h100", "seq": SEQ, "microbatches": 2}
        options = {key: random.choice(values) for key, values in CHOICES.items()}
        try:
            said = PlanOptions(model, layout=layout, **fixed, **options)  # pyright: ignore
            found.append(resolve(said))
        except FivefoldError:
            continue
    return found


def issued(job: LayerJob) -> Iterator[CountedCollective]:
    """Everything that layers and ends of this model issue."""
    for ends_segment in (0, 1):
        yield from tensor_layer(job, False, ends_segment)
        if job.shape.moe is not None:
            yield from tensor_layer(job, True, ends_segment)
            yield from expert_layer(job, job.shape.moe, ends_segment)
    yield from context_layer(job)
    yield from tensor_ends(job, 1, 2)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "deepseek-v3", "llama-3.1-70b"])
def test_integers_are_arrays(model: str) -> None:
    plans = random_plans(model)
    columns = zip(*(grid_of_plan(plan).columns() for plan in plans), strict=True)
    grid = LayoutGrid(*map(np.concatenate, columns))
    keys = {"keeps_shards": True, "tp_chunks": 1, "node": NODE}
    many = list(issued(layer_job(plans[0].shape, grid, SEQ, ITEMSIZE, **keys)))
    for number, plan in enumerate(plans):
        one = list(issued(LayerJob.of(plan, plan.recompute.usual, ITEMSIZE)))
        for mine, theirs in zip(one, many, strict=True):
            names = [(each.axis, each.kind, each.module) for each in (mine, theirs)]
            assert names[0] == names[1]
            values = [float(np.broadcast_to(each, len(plans))[number]) for each in theirs[2:-1]]
            if mine.times:
                assert values == [float(each) for each in mine[2:-1]], f"{plan.layout} {mine}"
            else:
                assert values[2:] == [0.0, 0.0, 0.0], f"{plan.layout} {mine}"


def test_the_bytes_of_both_kinds_are_of_whole_numbers() -> None:
    """JSON and tables have no place for an array."""
    plan = random_plans("tiny-moe")[0]
    for each in issued(LayerJob.of(plan, plan.recompute.usual, ITEMSIZE)):
        assert all(type(value) in (int, bool) for value in each[2:-1])

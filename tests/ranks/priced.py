"""What the planner prices of one rank: the arrays of a search, evaluated for one plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fivefold.core.plan.plan import Plan
from fivefold.core.schedule.schedule import FORWARD
from fivefold.cost.layer.time import LayerTimer
from fivefold.cost.step.time import closing_collectives, data_job, flat_units, unit_groups
from fivefold.cost.traffic.collectives import chunks_of, owned_shards, predict_traffic
from fivefold.cost.traffic.data_axis import (
    Collective,
    message_bytes,
    shared_gradients,
    unit_collectives,
)
from fivefold.cost.traffic.layers import (
    CountedCollective,
    context_layer,
    layer_maxima,
    tensor_ends,
    weight_maxima,
)
from fivefold.planner.estimate import rank_memory
from fivefold.planner.setting import EstimateSetting, plan_arguments

Key = tuple[str, str]  # axis and kind
Totals = dict[Key, tuple[float, float]]  # bytes and calls
# Sums of gradients over these axes depend on what a rank owns: `test_data_axis` compares them.
OWNED = ("tp", "replica", "twin")
ITEMSIZE = 2


def priced_traffic(plan: Plan, setting: EstimateSetting) -> Totals:
    """Every collective of the pipeline's first rank, as the arrays have it, without the sums of
    `OWNED`; a message is one of its size."""
    work = LayerTimer(*plan_arguments(plan, setting))
    units = flat_units(work, plan.stages)
    assert units is not None, "only our own stack has flat units"
    job, found = data_job(work), defaultdict[Key, list[float]](lambda: [0.0, 0.0])
    around = [each for each in closing_collectives(work, units) if each.axis not in OWNED]
    for group in unit_groups(work, units):
        around += unit_collectives(job, group)
    for each in around:
        _count(found, (each.axis, each.kind), _number(each.bytes), _number(each.times))
    for each, times in _inside(plan, work):
        calls = _number(each.times) * times
        _count(found, (each.axis, each.kind), _number(each.bytes) * calls, calls)
    if plan.layout.pp > 1:
        _count(found, ("pp", "message"), _number(work.message_bytes()), 1)
    return {key: (size, calls) for key, (size, calls) in found.items() if calls}


def listed_traffic(plan: Plan) -> Totals:
    """The same in the list that runs and rehearsals are held to."""
    found = defaultdict[Key, list[float]](lambda: [0.0, 0.0])
    units = [unit for chunk in chunks_of(plan, 0, ITEMSIZE) for unit in chunk.units]
    owned = shared_gradients(plan, 0, owned_shards(plan.layout, 0, units), ITEMSIZE)
    for each in predict_traffic(plan, 0, itemsize=ITEMSIZE):
        once = owned[Collective(each.axis, each.kind, each.bytes, each.group)]
        if each.axis != "pp":
            calls = each.count - once
            _count(found, (each.axis, each.kind), each.bytes * calls, calls)
    if plan.layout.pp > 1:
        _count(found, ("pp", "message"), message_bytes(plan, ITEMSIZE), 1)
    return {key: (size, calls) for key, (size, calls) in found.items() if calls}


def _inside(plan: Plan, work: LayerTimer) -> Iterator[tuple[CountedCollective, int]]:
    """The collectives of the layers and ends of the first rank, and how often they are issued."""
    shape = plan.shape
    actions = [each for each in plan.schedule.actions(0) if each.kind == FORWARD]
    for stage in plan.schedule.placement.stages_of(0):
        layers, timer = plan.stages[stage], work.under(plan.recompute.of(stage))
        times = sum(each.stage == stage for each in actions)
        ahead, maxima = shape.mtp if layers.stop == shape.layers else 0, [(0, 0)]
        for i in [*layers, *[shape.layers] * ahead]:
            moe = shape.moe if shape.is_moe_layer(i) else None
            rounded = plan.fp8 is not None and plan.fp8.rounds(i, shape.layers)
            used = timer if rounded or plan.fp8 is None else timer.unrounded
            for each in (*used.collectives(moe), *context_layer(used.job)):
                yield each, times
            if plan.fp8 is not None and rounded:
                maxima.append(layer_maxima(plan.fp8, shape, moe is not None, work.grid.ep))
        for each in weight_maxima(work.grid, *map(sum, zip(*maxima, strict=True))):
            yield each, 1
        losses = 1 + ahead if layers.stop == shape.layers else 0
        for each in tensor_ends(timer.job, (layers.start == 0) + ahead, losses):
            yield each, times


def _count(found: defaultdict[Key, list[float]], key: Key, size: float, calls: float) -> None:
    found[key][0] += size if calls else 0.0
    found[key][1] += calls


def _number(array: object) -> float:
    return float(np.asarray(array).item())


def planned_bytes(plan: Plan, setting: EstimateSetting, rank: int) -> float:
    """Bytes that tensors of a rank have at its peak."""
    memory = rank_memory(plan, setting, rank)
    return sum(size for name, size in memory.items() if name not in ("context", "nccl", "margin"))

"""The collectives of one optimizer step on one rank, known before anything runs.

The mesh records what a step really issues; both lists must be equal, so nothing is an estimate.
`axes.py` has a function for each dimension; here they are put together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.core.axes import (
    Call,
    Chunk,
    context,
    data,
    partial,
    pipeline,
    step,
    tensor,
    twin,
    wide_size,
)
from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.matrices import gathers
from fivefold.core.plan import Plan
from fivefold.core.routed import balance, expert
from fivefold.core.schedule.action import FORWARD
from fivefold.core.schedule.asynchronous import Delays
from fivefold.core.units import Part, Unit, pack, rows_of

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Entry:
    """Equal collectives of a step, and how many there are."""

    axis: str
    kind: str
    count: int
    bytes: int
    group: int

    @property
    def sent(self) -> float:
        """Bytes that this rank gives to its links in all of them."""
        return self.count * Call(self.axis, self.kind, self.bytes, self.group).sent


def predict(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    bucket: int | None = None,
    matrices: bool = False,
) -> tuple[Entry, ...]:
    """Every collective of one optimizer step on `rank`.

    `itemsize` is that of weights and activations, `grad_itemsize` that of the buffers in which data
    ranks sum gradients. Offload moves no byte between ranks. With `matrices` the optimizer makes
    them whole first, as Muon does.
    """
    _require_covered(plan)
    chunks = chunks_of(plan, rank, itemsize, bucket)
    units = [unit for chunk in chunks for unit in chunk.units]
    parts = owned_by(plan.layout, rank, units)
    calls = pipeline(plan, rank, itemsize) + twin(plan, rank, parts, itemsize)
    for chunk in chunks:
        calls += tensor(plan, chunk, itemsize) + context(plan, chunk, itemsize)
        calls += expert(plan, chunk, itemsize) + balance(plan, chunk, itemsize)
        calls += data(plan, chunk, itemsize, grad_itemsize)
    calls += partial(plan, parts, itemsize) + step(plan)
    if matrices:
        calls += gathers(plan, rank, units, itemsize)
    return entries(calls.items())


def predict_stream(
    plan: Plan,
    rank: int,
    steps: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    bucket: int | None = None,
) -> tuple[Entry, ...]:
    """Every collective of an asynchronous run of so many optimizer steps on `rank`.

    Messages and tensor collectives go with the microbatches, gradients and weights with the
    updates; tokens in front, losses and norms behind, are summed once for all of them.
    """
    schedule, layout = plan.schedule, plan.layout
    (chunk,) = chunks_of(plan, rank, itemsize, bucket)
    parts = owned_by(layout, rank, chunk.units)
    microbatches = pipeline(plan, rank, itemsize) + tensor(plan, chunk, itemsize)
    microbatches += context(plan, chunk, itemsize) + expert(plan, chunk, itemsize)
    updates = data(plan, chunk, itemsize, grad_itemsize) + partial(plan, parts, itemsize)
    count = steps * Delays.of(schedule).every
    calls: Counter[Call] = Counter()
    for call, each in microbatches.items():
        calls[call] += each * count // schedule.num_microbatches
    for call, each in updates.items():
        calls[call] += each * steps
    for call in step(plan):
        calls[call._replace(bytes=call.bytes * steps)] += 1
    return entries(calls.items())


def chunks_of(plan: Plan, rank: int, itemsize: int, bucket: int | None = None) -> tuple[Chunk, ...]:
    """The stages that a rank holds, each with its units and its share of the microbatches."""
    place = plan.layout.coord(rank).pp
    forwards = Counter(a.stage for a in plan.schedule.actions(place) if a.kind == FORWARD)
    return tuple(
        Chunk(plan.stages[stage], forwards[stage], units_of(plan, stage, itemsize, bucket))
        for stage in plan.schedule.placement.held(place)
    )


def entries(counted: Iterable[tuple[tuple[str, str, int, int], int]]) -> tuple[Entry, ...]:
    """Calls and their counts, predicted or recorded, as a sorted list."""
    return tuple(
        Entry(axis, kind, count, size, group)
        for (axis, kind, size, group), count in sorted(counted)
    )


def listed(plan: Plan) -> list[dict[str, Any]] | None:
    """The traffic of rank 0 as JSON, gradients summed in float32; None where the job goes beyond
    what is predicted."""
    itemsize = ITEMSIZE[plan.precision]
    try:
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=wide_size(itemsize))
    except FivefoldError:
        return None
    return [asdict(entry) for entry in found]


def units_of(plan: Plan, stage: int, itemsize: int, bucket: int | None = None) -> tuple[Unit, ...]:
    """The data units of a pipeline stage, sliced where the plan's ZeRO stage slices anything."""
    layout = plan.layout
    dense, experts = (layout.shard * layout.cp, layout.edp) if layout.zero else (1, 1)
    rows = rows_of(plan.shape, layout, plan.stages[stage])
    return pack(rows, dense, itemsize, bucket, experts)


def owned_by(layout: Layout, rank: int, units: Iterable[Unit]) -> list[Part]:
    """The parts of weights whose optimizer is on `rank`."""
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    return [
        part
        for unit in units
        for part in unit.owned(places[unit.shard_axis] if unit.num_slices > 1 else 0)
    ]


def _require_covered(plan: Plan) -> None:
    if plan.schedule.asynchronous:
        raise FivefoldError(
            "an asynchronous run has no steps of its own: see the traffic of another schedule than "
            f"{plan.schedule.name}, or verify it, which runs it whole"
        )

"""The collectives of one optimizer step on one rank, known before anything runs.

One function per axis says which collective, how many bytes, over which group, and when. The mesh
records what a step really issues; both lists must be equal, so nothing here is an estimate.

Legend of the docstrings: A = microbatch size · sequence · width · itemsize, the activations between
two layers; N = tokens of a microbatch; L layers; m microbatches; wide = float32 or wider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.shape import Shape
from fivefold.core.units import Row, Unit, pack, rows_of
from fivefold.core.weights import by_name, piece

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_SUMMED = 4  # bytes: the narrowest type that losses and partial gradients are summed in
_COUNT = 8  # bytes: the number of tokens, float64
_TOTALS = 16  # bytes: the loss and the squared norm, float64


class Call(NamedTuple):
    """One collective: `bytes` of this rank's input buffer, `group` the number of ranks in it."""

    axis: str
    kind: str
    bytes: int
    group: int


@dataclass(frozen=True)
class Entry:
    """Equal collectives of a step, and how many there are."""

    axis: str
    kind: str
    count: int
    bytes: int
    group: int


def predict(
    plan: Plan, rank: int, *, itemsize: int, grad_itemsize: int, bucket: int | None = None
) -> tuple[Entry, ...]:
    """Every collective of one optimizer step on `rank`.

    `itemsize` is that of weights and activations, `grad_itemsize` that of the buffers in which data
    ranks sum gradients. Offload moves no byte between ranks.
    """
    _require_covered(plan.layout)
    units = units_of(plan, itemsize, bucket)
    parts = [part for unit in units for part in unit.owned(slice_of(plan.layout, rank))]
    calls = tensor(plan, itemsize) + partial(plan, parts, itemsize)
    calls += data(plan, units, itemsize, grad_itemsize) + step(plan.layout)
    return entries(calls.items())


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
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=_wide(itemsize))
    except FivefoldError:
        return None
    return [asdict(entry) for entry in found]


def tensor(plan: Plan, itemsize: int) -> Counter[Call]:
    """The tp axis inside forward and backward, for each microbatch, over the tp group.

    With sequence parallelism: all-gathers of A/tp in front of attention, MLP and head (2L + 1) and
    reduce-scatters of A behind attention, MLP and embedding (2L + 1); backward has the mirror of
    each. Without it: all-reduces of A, 2L + 1 forward and 2L + 1 backward. Full recomputation
    repeats the forward of the blocks but stops at the last activation that backward needs, in front
    of the last sum of each segment; selective recomputation keeps the results of collectives.
    The loss is never repeated: an all-reduce of N maxima, and one of 2N sums, both wide.
    """
    layout, batch, layers = plan.layout, plan.batch, plan.shape.layers
    if layout.tp == 1:
        return Counter()
    tokens = batch.microbatch_size * batch.seq
    activations = tokens * plan.shape.width * itemsize
    gathers = sums = 2 * (2 * layers + 1)
    if plan.recompute.kind == "full":
        segments = -(-layers // plan.recompute.blocks)
        gathers, sums = gathers + 2 * layers, sums + 2 * layers - segments
    calls: Counter[Call] = Counter()
    if layout.sp:
        calls[Call("tp", "all_gather", activations // layout.tp, layout.tp)] += gathers
        calls[Call("tp", "reduce_scatter", activations, layout.tp)] += sums
    else:
        calls[Call("tp", "all_reduce", activations, layout.tp)] += sums
    for numbers in (tokens, 2 * tokens):
        calls[Call("tp", "all_reduce", numbers * _wide(itemsize), layout.tp)] += 1
    return Counter({call: count * batch.microbatches for call, count in calls.items()})


def partial(plan: Plan, parts: list[tuple[Row, int, int]], itemsize: int) -> Counter[Call]:
    """Gradients that are partial sums on each tp rank, once a step, after the data axis.

    One wide all-reduce over tp of what this rank owns of the weights that every tp rank holds whole
    but uses on its own tokens or heads; one over `replica`, the tp ranks that hold the same KV
    heads, of what it owns of those. A rank that owns none has no such call.
    """
    shape, layout = plan.shape, plan.layout
    table = by_name(shape)
    owned: Counter[str] = Counter()
    for row, start, stop in parts:
        held = piece(table[row.name], shape, layout.tp, layout.sp, coord=0)
        if held.partial:
            owned["tp" if held.dim is None else "replica"] += stop - start
    sizes = {"tp": layout.tp, "replica": max(1, layout.tp // shape.kv_heads)}
    return Counter(
        Call(axis, "all_reduce", numel * _wide(itemsize), sizes[axis])
        for axis, numel in owned.items()
    )


def data(plan: Plan, units: tuple[Unit, ...], itemsize: int, grad_itemsize: int) -> Counter[Call]:
    """The data axes, for each unit; whole or slice of its buffer, padding included.

    Not sliced (stage 0, or a shard group of one): an all-reduce of the whole gradients over dp-cp,
    once a step. Sliced: a reduce-scatter of the whole gradients over fsdp, once a step (stage 1) or
    for every microbatch (2, 3); an all-reduce of the slice over the replicas, once a step; an
    all-gather of the slice of the weights over fsdp, once a step after the optimizer (1, 2) or for
    every microbatch as `_gathers` says (3).
    """
    layout, microbatches = plan.layout, plan.batch.microbatches
    everyone, shards = layout.dp * layout.cp, layout.shard * layout.cp
    calls: Counter[Call] = Counter()
    for unit in units:
        whole, part = unit.size * grad_itemsize, unit.slice_size * grad_itemsize
        if unit.num_slices == 1:
            calls[Call("dp-cp", "all_reduce", whole, everyone)] += everyone > 1
            continue
        reductions = 1 if layout.zero == 1 else microbatches
        gathers = _gathers(unit, plan.shape) * microbatches if layout.zero == 3 else 1
        calls[Call("fsdp", "reduce_scatter", whole, shards)] += reductions
        calls[Call("fsdp", "all_gather", unit.slice_size * itemsize, shards)] += gathers
        calls[Call("replicate", "all_reduce", part, layout.replicate)] += layout.replicate > 1
    return +calls


def step(layout: Layout) -> Counter[Call]:
    """What a step sums once: in front the number of tokens (8 bytes) over dp-cp, behind the loss
    and the squared gradient norm (16 bytes) over the world."""
    everyone = layout.dp * layout.cp
    calls: Counter[Call] = Counter()
    calls[Call("dp-cp", "all_reduce", _COUNT, everyone)] += everyone > 1
    calls[Call("world", "all_reduce", _TOTALS, layout.world)] += layout.world > 1
    return +calls


def units_of(plan: Plan, itemsize: int, bucket: int | None = None) -> tuple[Unit, ...]:
    """The data units of a plan, sliced where its ZeRO stage slices anything."""
    layout = plan.layout
    num_slices = layout.shard * layout.cp if layout.zero else 1
    return pack(rows_of(plan.shape, layout), num_slices, itemsize, bucket)


def slice_of(layout: Layout, rank: int) -> int:
    """Which slice of every unit `rank` owns."""
    return layout.group("fsdp", rank).index(rank) if layout.zero else 0


def _gathers(unit: Unit, shape: Shape) -> int:
    """How often one microbatch of stage 3 gathers a unit: for forward, and again for backward.

    Not again where the head, with which backward begins, still has it from forward; nor where only
    the embedding uses it, whose backward reads no weight. Recomputation runs while the unit is here
    for backward, whatever the segments: it leaves only with the last of its gradients.
    """
    tied = shape.tied and any(entry.row.name == "embed.weight" for entry in unit.entries)
    kept = tied or "head" in unit.blocks
    return 1 if kept or unit.blocks == ("embed",) else 2


def _wide(itemsize: int) -> int:
    return max(itemsize, _SUMMED)


def _require_covered(layout: Layout) -> None:
    others = {axis: getattr(layout, axis) for axis in ("cp", "pp", "ep")}
    found = [f"{axis}={degree}" for axis, degree in others.items() if degree > 1]
    if found:
        raise FivefoldError(
            f"the traffic of {', '.join(found)} is not predicted: use dp and tp only to see a list"
        )

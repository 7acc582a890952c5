"""Each dimension alone on the same GPUs: what it does to the batch, to memory, and to a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.core.axes import wide_size
from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.outlook import Outlook, outlook
from fivefold.core.estimate.planner import Inquiry
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.core.rules import divisors, problems
from fivefold.core.traffic import ITEMSIZE, predict


class Moved(NamedTuple):
    """What one rank moves along an axis in a step."""

    axis: str
    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Strategy:
    """One dimension alone, as far as it goes; data ranks have the rest of the GPUs."""

    name: str
    layout: Layout
    least_batch: int  # sequences of a step, below which ranks have nothing to do
    outlook: Outlook | None
    moved: tuple[Moved, ...]
    refused: str = ""


def alone(asked: Inquiry) -> Iterator[Strategy]:
    """Every dimension alone for this model."""
    gpus = asked.question.gpus
    for zero in range(4):
        yield _strategy(asked, f"ZeRO-{zero}" if zero else "DP", Layout(shard=gpus, zero=zero))
    for name, sp in (("TP", False), ("TP+SP", True)):
        yield _largest(asked, name, "tp", Layout(sp=sp, zero=0))
    yield _largest(asked, "PP", "pp", Layout(zero=0))
    yield _largest(asked, "CP", "cp", Layout(zero=0))
    if asked.shape.moe is not None:
        yield _largest(asked, "EP", "ep", Layout(zero=0))


def _largest(asked: Inquiry, name: str, axis: str, base: Layout) -> Strategy:
    """The axis at the largest degree that the model and the GPUs allow."""
    gpus, seq = asked.question.gpus, asked.question.seq
    for degree in reversed(divisors(gpus)):
        rest = gpus if axis == "ep" else gpus // degree
        layout = replace(base, **{axis: degree}, shard=rest)
        if not problems(layout, asked.shape, seq=seq):
            return _strategy(asked, name, layout)
    raise AssertionError("a degree of 1 is always legal")


def _strategy(asked: Inquiry, name: str, layout: Layout) -> Strategy:
    least = layout.dp * layout.pp
    try:
        plan = resolve(_wishes(asked, layout))
    except FivefoldError as error:
        return Strategy(name, layout, least, None, (), _first_reason(error))
    return Strategy(name, layout, least, outlook(plan, asked.setting), _moved(plan))


def _wishes(asked: Inquiry, layout: Layout) -> Wishes:
    return replace(
        asked.wishes,
        layout=str(layout),
        zero=layout.zero,
        sp=layout.sp,
        schedule="1f1b",
        recompute="none",
        context="zigzag",
        chunks=None,
        microbatches=None,
        microbatch_size=1,
        batch=asked.question.batch,
        gpus=layout.world,
    )


def _first_reason(error: FivefoldError) -> str:
    reasons = getattr(error, "reasons", None)
    return reasons[0] if reasons else str(error)


def _moved(plan: Plan) -> tuple[Moved, ...]:
    """The collectives of rank 0, equal ones together."""
    itemsize = ITEMSIZE[plan.precision]
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for one in predict(plan, 0, itemsize=itemsize, grad_itemsize=wide_size(itemsize)):
        counts[one.axis, one.kind] += one.count
        sizes[one.axis, one.kind] += one.count * one.bytes
    found = [Moved(*key, counts[key], sizes[key]) for key in counts if sizes[key] >= 1 << 20]
    return tuple(sorted(found, key=lambda one: -one.bytes))

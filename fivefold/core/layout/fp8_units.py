"""Flat units whose weights are gathered as fp8 codes: which weights, and the bytes of a shard.

Every rank knows the scales of weights that have one for a tensor, or for an expert, before it
gathers any of a stage. So ZeRO-3 moves one byte for each weight of a routed expert and, tensorwise,
of a rounded linear, and everything else of a unit (norms, biases) as it is. A shard sends what is
not rounded first, then codes; all shards are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.splits import padded_length
from fivefold.core.layout.units import ALIGNMENT, Unit
from fivefold.core.layout.weight_table import by_name

if TYPE_CHECKING:
    from fivefold.core.model import Shape

# Elements of a segment that is rounded, at most: many small experts take one kernel, and of large
# weights not all values are widened at a time.
AT_ONCE = 1 << 24


class UnitSegment(NamedTuple):
    """Elements [start, stop) of a unit that belong to one weight, on one shard; of a stack, to a
    part of one expert or to several whole ones."""

    name: str
    start: int
    stop: int
    rounded: bool
    experts: range = range(1)  # of the stack, each with a scale; a linear has one


@lru_cache(maxsize=16)
def gathered_as_codes(shape: Shape, fp8: Fp8 | None) -> frozenset[str]:
    """The weights that ZeRO-3 gathers as codes."""
    if fp8 is None:
        return frozenset()
    linears, layers = fp8.scaling == "tensorwise", shape.layers
    return frozenset(
        name
        for name in by_name(shape)
        if (linears and fp8.rounds_weight(name, layers)) or fp8.rounds_expert_weight(name, layers)
    )


def segments(
    unit: Unit, shard: int, coded: frozenset[str], at_once: int = AT_ONCE
) -> list[UnitSegment]:
    """What a shard sends, in order; what is rounded is cut where another scale begins."""
    low, cut_segments = shard * unit.shard_size, list[UnitSegment]()
    begins = {entry.row.name: entry.start for entry in unit.entries}
    for row, start, stop in unit.owned(shard):
        if row.name not in coded:
            cut_segments.append(UnitSegment(row.name, low + start, low + stop, False))
            continue
        begin, scales = begins[row.name], row.shape[0] if row.expert else 1
        inside = (low + start - begin, low + stop - begin, row.numel // scales)
        cut_segments += [
            UnitSegment(row.name, begin + first, begin + end, True, experts)
            for first, end, experts in cut_experts(*inside, at_once)
        ]
    return sorted(cut_segments, key=lambda segment: segment.rounded)


def cut_experts(
    start: int, stop: int, size: int, at_once: int = AT_ONCE
) -> Iterator[tuple[int, int, range]]:
    """Elements [start, stop) of stacked experts of so many elements each, cut into whole experts
    and parts of one, none with more than `at_once`.

    >>> list(cut_experts(5, 42, 10))
    [(5, 10, range(0, 1)), (10, 40, range(1, 4)), (40, 42, range(4, 5))]
    """
    while start < stop:
        first, inside = divmod(start, size)
        num_experts = 0 if inside else min(at_once // size, stop // size - first)
        last = first + max(1, num_experts)
        end = min(stop, last * size, start + at_once)
        yield start, end, range(first, last)
        start = end


def is_coded(unit: Unit, coded: frozenset[str]) -> bool:
    """Whether a gather of this unit moves any codes."""
    return unit.num_shards > 1 and any(entry.row.name in coded for entry in unit.entries)


def coded_shard_bytes(unit: Unit, coded: frozenset[str], itemsize: int) -> int:
    """Bytes that every rank sends."""
    spans = [(entry.start, entry.stop, entry.row.name in coded) for entry in unit.entries]
    return longest_shard_bytes(spans, unit.num_shards, unit.shard_size, itemsize)


def longest_shard_bytes(
    spans: Iterable[tuple[int, int, bool]], num_shards: int, shard_size: int, itemsize: int
) -> int:
    """The same from the elements [start, stop) of every weight, and whether it is rounded.

    >>> longest_shard_bytes([(0, 100, True), (112, 132, False)], 2, 72, 2)
    80
    """
    lengths = [0] * num_shards
    for start, stop, rounded in spans:
        for shard in range(start // shard_size, -(-stop // shard_size)):
            low, high = shard * shard_size, (shard + 1) * shard_size
            lengths[shard] += (min(stop, high) - max(start, low)) * (1 if rounded else itemsize)
    return padded_length(max(lengths), ALIGNMENT)


def maxima_joined(layout: Any) -> Any:
    """Whether linears and experts of a layout, or of every layout of a grid, are sliced and cut
    over the same ranks: their maxima are then reduced together."""
    return (layout.ep == 1) & (layout.etp == layout.tp) & (layout.replicate == 1)

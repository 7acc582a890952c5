"""Flat units whose weights are gathered as fp8 codes: which weights, and the bytes of a shard.

Tensorwise every rank knows the scales of all weights of a stage before it gathers any. So ZeRO-3
moves one byte for each weight of a rounded linear, and everything else of a unit (norms, biases) as
it is. A shard sends what is not rounded first, then codes; all shards are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fivefold.core.fp8 import Fp8
from fivefold.core.splits import padded_length
from fivefold.core.units import ALIGNMENT, Unit
from fivefold.core.weights import by_name

if TYPE_CHECKING:
    from fivefold.core.shape import Shape


class UnitSegment(NamedTuple):
    """Elements [start, stop) of a unit that belong to one weight, on one shard."""

    name: str
    start: int
    stop: int
    rounded: bool


@lru_cache(maxsize=16)
def gathered_as_codes(shape: Shape, fp8: Fp8 | None) -> frozenset[str]:
    """The weights that ZeRO-3 gathers as codes."""
    if fp8 is None or fp8.scaling != "tensorwise":
        return frozenset()

    return frozenset(name for name in by_name(shape) if fp8.rounds_weight(name, shape.layers))


def segments(unit: Unit, place: int, coded: frozenset[str]) -> list[UnitSegment]:
    """What a shard sends, in order."""
    low = place * unit.shard_size
    found = [
        UnitSegment(row.name, low + start, low + stop, row.name in coded)
        for row, start, stop in unit.owned(place)
    ]
    return sorted(found, key=lambda each: each.rounded)


def is_coded(unit: Unit, coded: frozenset[str]) -> bool:
    """Whether a gather of this unit moves any codes."""
    return unit.num_shards > 1 and any(each.row.name in coded for each in unit.entries)


def coded_shard_bytes(unit: Unit, coded: frozenset[str], itemsize: int) -> int:
    """Bytes that every rank sends."""
    spans = [(each.start, each.stop, each.row.name in coded) for each in unit.entries]
    return longest_shard_bytes(spans, unit.num_shards, unit.shard_size, itemsize)


def longest_shard_bytes(
    spans: Iterable[tuple[int, int, bool]], num_shards: int, shard_size: int, itemsize: int
) -> int:
    """The same from the elements [start, stop) of every weight, and whether it is rounded.

    >>> longest_shard_bytes([(0, 100, True), (112, 132, False)], 2, 72, 2)
    80
    """
    found = [0] * num_shards
    for start, stop, rounded in spans:
        for place in range(start // shard_size, -(-stop // shard_size)):
            low, high = place * shard_size, (place + 1) * shard_size
            found[place] += (min(stop, high) - max(start, low)) * (1 if rounded else itemsize)
    return padded_length(max(found), ALIGNMENT)

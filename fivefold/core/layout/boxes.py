"""Boxes: the parts of a full weight that a rank owns, which is how checkpoints store it.

ZeRO cuts a flat buffer through rows, so a rank often owns only a run of a shard's elements in
row-major order. Such a run is a few boxes of the full weight. Boxes do not depend on the layout:
one layout writes its boxes, another reads the boxes that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.core.layout.weight_table import WeightShard


@dataclass(frozen=True)
class Box:
    """A box of a full tensor; its elements are the `numel` from `at` on of what a rank owns."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor.

    >>> whole_box((2, 3))
    Box(offsets=(0, 0), sizes=(2, 3), at=0)
    """
    return Box((0,) * len(shape), tuple(shape), 0)


def origin_of(shape: Sequence[int], shard: WeightShard) -> tuple[int, ...]:
    """Where the shard of a weight of this shape begins."""
    origin = [0] * len(shape)
    if shard.dim is not None:
        origin[shard.dim] = shard.start
    if shard.inner is not None:
        origin[shard.inner[0]] = shard.inner[1]
    return tuple(origin)


def boxes_of(
    shape: Sequence[int], shard: WeightShard, local: Sequence[int], start: int, stop: int
) -> tuple[Box, ...]:
    """The elements [start, stop) of a shard as boxes of a weight of this shape.

    `local` is the shape of the shard. There are at most 2·ndim − 1 boxes; `at` counts from `start`.
    Padding is outside the weight, and in no box.
    """
    assert 0 <= start <= stop <= math.prod(local), "a run lies inside its shard"
    origin = origin_of(shape, shard)
    boxes: list[Box] = []
    for box in _runs(tuple(local), start, stop):
        offsets = tuple(low + offset for low, offset in zip(origin, box.offsets, strict=True))
        capacity = [most - offset for most, offset in zip(shape, offsets, strict=True)]
        sizes = tuple(max(0, min(pair)) for pair in zip(box.sizes, capacity, strict=True))
        clipped = Box(offsets, sizes, box.at - start)
        assert sizes[1:] == box.sizes[1:] or not clipped.numel, "only rows can be padding"
        if clipped.numel:
            boxes.append(clipped)
    return tuple(boxes)


def _runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) in row-major order: end of a row, full rows, start of a row."""
    if start == stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the full rows
    if first > last:  # all inside one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (last - first, *shape[1:]), first * row)
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    """The same for elements that all lie in row `number`."""
    base = number * math.prod(shape[1:])
    for box in _runs(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes), base + box.at)

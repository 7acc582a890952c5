"""Which boxes of a whole weight a rank holds.

A rank holds a piece of a weight, and of the piece often only a run of its elements in row-major
order: where ZeRO cuts a flat buffer, it cuts through rows. Such a run is a few boxes of the whole
weight, and boxes are what layouts have in common: what one wrote as its boxes, another reads as
its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.core.weights import Piece


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, whose elements are `numel` in a row from `at` on of what is held."""

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


def boxes_of(
    shape: Sequence[int], held: Piece, local: Sequence[int], start: int, stop: int
) -> tuple[Box, ...]:
    """The elements [start, stop) of a piece as boxes of a weight of this shape.

    `local` is the shape of the piece. There are at most 2·ndim − 1 boxes; `at` counts from `start`.
    Padding lies outside of the weight, and in no box.
    """
    assert 0 <= start <= stop <= math.prod(local), "a run lies inside of its piece"
    origin = [0] * len(shape)
    if held.dim is not None:
        origin[held.dim] = held.start
    if held.inner is not None:
        origin[held.inner[0]] = held.inner[1]
    found: list[Box] = []
    for box in _runs(tuple(local), start, stop):
        offsets = tuple(low + offset for low, offset in zip(origin, box.offsets, strict=True))
        room = [most - offset for most, offset in zip(shape, offsets, strict=True)]
        sizes = tuple(max(0, min(pair)) for pair in zip(box.sizes, room, strict=True))
        clipped = Box(offsets, sizes, box.at - start)
        assert sizes[1:] == box.sizes[1:] or not clipped.numel, "only rows can be padding"
        if clipped.numel:
            found.append(clipped)
    return tuple(found)


def _runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) in row-major order: the rest of a row, whole rows, a part of a row."""
    if start == stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # all inside of one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row)
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    """The same of elements that all lie in row `number`."""
    base = number * math.prod(shape[1:])
    for box in _runs(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes), base + box.at)

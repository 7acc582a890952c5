"""Lineup: a layout as a few numbers, from which anybody can list the group of any rank.

All ranks stand in a line with tp fastest, then cp, dp and pp, whichever `order` places them on
the machine. There every axis is one `Extent`, and only the way from a rank to its place in the
line depends on the order. A picture needs no more to light up groups.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.core.layout import Extent, Layout


class Lineup(NamedTuple):
    """The digits of a place in the line, the fastest first, each with its stride in ranks."""

    digits: tuple[Extent, ...]

    def place(self, rank: int) -> int:
        """Where in the line a rank stands."""
        place, unit = 0, 1
        for size, stride in self.digits:
            place += rank // stride % size * unit
            unit *= size
        return place

    def rank(self, place: int) -> int:
        """Who stands at a place in the line."""
        rank = 0
        for size, stride in self.digits:
            place, digit = divmod(place, size)
            rank += digit * stride
        return rank

    def coord(self, extent: Extent, rank: int) -> int:
        """The coord of a rank on an axis of this extent."""
        return self.place(rank) // extent.stride % extent.size

    def group(self, extent: Extent, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets along an axis of this extent, by their coord on it."""
        first = self.place(rank) - self.coord(extent, rank) * extent.stride
        return tuple(self.rank(first + i * extent.stride) for i in range(extent.size))


def lineup(layout: Layout) -> Lineup:
    """The line in which the ranks of a layout stand."""
    if layout.order == "tp-cp-dp-pp":
        return Lineup((Extent(layout.world, 1),))
    row = layout.tp * layout.cp
    return Lineup((Extent(row, 1), Extent(layout.dp, row * layout.pp), Extent(layout.pp, row)))

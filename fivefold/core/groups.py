"""Lineup: a layout as a few numbers, from which anybody can list the group of any rank.

All ranks stand in a line with tp fastest, then cp, dp and pp, whichever `order` places them on
the machine. There every axis is one `Extent`, and only the way from a rank to its place in the
line depends on the order. A picture needs no more to light up groups.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.core.layout import Extent, Layout
from fivefold.core.machine import Machine, Tier
from fivefold.core.plan import Plan


class RankOrder(NamedTuple):
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


def rank_order(layout: Layout) -> RankOrder:
    """The line in which the ranks of a layout stand."""
    if layout.order == "tp-cp-dp-pp":
        return RankOrder((Extent(layout.world, 1),))
    row = layout.tp * layout.cp
    return RankOrder((Extent(row, 1), Extent(layout.dp, row * layout.pp), Extent(layout.pp, row)))


# The groups that collectives run over, by the names that records have: whom each serves, and
# where its ranks stand.
#
# Beside the axes of a layout there are parts of them: the places of a ring and the ranks that
# share a place (`ring`, `ulysses`), the ep ranks of a node and their like on other nodes (`ep-
# near`, `ep-far`), the tp ranks with the same KV heads (`replica`), both ends of a pipeline
# (`twin`), and all ranks (`world`).


# The dimension that a group serves; `world` serves all.
DIMENSIONS = {
    "tp": "tp",
    "replica": "tp",
    "cp": "cp",
    "ring": "cp",
    "ulysses": "cp",
    "row": "cp",
    "pp": "pp",
    "twin": "pp",
    "dp-cp": "dp",
    "fsdp": "dp",
    "replicate": "dp",
    "edp": "dp",
    "ep": "ep",
    "ep-near": "ep",
    "ep-far": "ep",
    "etp": "ep",
}


def extent(plan: Plan, group: str) -> Extent:
    """The groups of this name in the line of all ranks."""
    layout, split = plan.layout, plan.split
    near = layout.ep // plan.ep_nodes
    parts = {
        "replica": Extent(max(1, layout.tp // plan.shape.kv_heads), 1),
        "ulysses": Extent(split.inner, layout.tp),
        "ring": Extent(split.outer, layout.tp * split.inner),
        "ep-near": Extent(near, layout.etp),
        "ep-far": Extent(plan.ep_nodes, layout.etp * near),
        "twin": layout.extent("pp"),  # the first and the last of a pipeline are always one of them
        "world": Extent(layout.world, 1),
    }
    return parts[group] if group in parts else layout.extent(group)


def tier(plan: Plan, group: str, machine: Machine) -> Tier:
    """The slowest link tier that any group of this name spans on `machine`."""
    return plan.layout.tier_along(extent(plan, group), machine)

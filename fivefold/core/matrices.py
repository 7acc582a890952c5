"""What Muon moves: it updates whole matrices, of which a rank owns parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fivefold.core.axes import Call
from fivefold.core.plan import Plan
from fivefold.core.units import Row, Unit
from fivefold.core.weights import by_name, held_by


def takes(row: Row) -> bool:
    """Whether a weight is updated by Muon: a matrix, or stacked ones, between the two ends."""
    return len(row.shape) > 1 and row.block not in ("embed", "head")


def gathers(plan: Plan, rank: int, units: Iterable[Unit], itemsize: int) -> Counter[Call]:
    """The all-gathers of one update on `rank`: for each unit with matrices that is sliced, one of
    its slice; then one over tp, or etp, of the matrices that this rank owns some of and that are
    cut there."""
    layout, calls = plan.layout, Counter[Call]()
    table, coord = by_name(plan.shape), layout.coord(rank)
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    for unit in units:
        if not any(takes(entry.row) for entry in unit.entries):
            continue
        place = 0
        if unit.num_slices > 1:
            place, size = places[unit.shard_axis], unit.slice_size * itemsize
            calls[Call(unit.shard_axis, "all_gather", size, unit.num_slices)] += 1
        axis, degree = ("etp", layout.etp) if unit.expert else ("tp", layout.tp)
        cut = sum(
            row.numel
            for row, _, _ in unit.owned(place)
            if takes(row)
            and (unit.expert or held_by(table[row.name], plan.shape, layout, coord).dim is not None)
        )
        if cut and degree > 1:
            calls[Call(axis, "all_gather", cut * itemsize, degree)] += 1
    return calls

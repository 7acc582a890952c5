"""Data units: which weights travel together, and which part of them each rank owns.

The weights of a unit lie in one flat buffer, each from a 16-byte boundary; the buffer is cut into
one equal slice for every rank of the shard group. A gather then needs no copy before or after it,
and the only padding is what aligns the weights and evens the slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from fivefold.core.layout import Layout
from fivefold.core.shape import Shape
from fivefold.core.weights import by_name, held_by, local_shape

ALIGNMENT = 16  # bytes: what vectorised kernels want of the start of a weight
SMALL = 25_000_000  # bytes up to which neighbouring blocks are joined


@dataclass(frozen=True)
class UnitRow:
    """A weight as one rank holds it: its name, the block that uses it, its local shape.

    `alone`: in a unit of its own, so that another stage which holds it too slices it alike.
    `expert`: held by the ranks of one ep and etp coord, and summed over edp.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    alone: bool = False
    expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitEntry:
    """A weight inside its unit, and where it starts, in elements."""

    row: UnitRow
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.row.numel


Part: TypeAlias = tuple[UnitRow, int, int]
"""The elements [start, stop) of a slice that belong to one weight."""


@dataclass(frozen=True)
class Unit:
    """Neighbouring blocks whose weights are gathered and reduced together."""

    blocks: tuple[str, ...]
    entries: tuple[UnitEntry, ...]
    num_slices: int
    size: int  # elements of the whole buffer, padding included

    @property
    def expert(self) -> bool:
        """Whether it holds weights of experts, or the weights that all ranks of a stage share."""
        return self.entries[0].row.expert

    @property
    def shard_axis(self) -> str:
        """Over whose ranks it is sliced."""
        return "edp" if self.expert else "fsdp"

    @property
    def sum_axis(self) -> str:
        """Over whose ranks its gradients are summed."""
        return "edp" if self.expert else "dp-cp"

    @property
    def slice_size(self) -> int:
        """Elements that each rank owns."""
        return self.size // self.num_slices

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no weight."""
        return self.size - sum(entry.row.numel for entry in self.entries)

    def owned(self, index: int) -> list[Part]:
        """The parts of weights inside slice `index`, as ranges of that slice."""
        low = index * self.slice_size
        high = low + self.slice_size
        parts = [(each.row, max(each.start, low), min(each.stop, high)) for each in self.entries]
        return [(row, start - low, stop - low) for row, start, stop in parts if start < stop]


def rows_of(shape: Shape, layout: Layout, layers: range) -> list[UnitRow]:
    """The weights of one stage as a tp rank holds them; all tp ranks hold the same shapes.

    The stage of the first layer has the embedding, that of the last the head and the MTP layers.
    Where a model whose last stage uses the embedding's weight too is cut between them, the last
    has it once more: as `head.weight` if it is tied, else as `mtp.embed.weight`.
    """
    held = {f"blocks.{i}" for i in layers}
    held |= {"embed"} if layers.start == 0 else set[str]()
    ends = {"head", *(f"mtp.{j}" for j in range(shape.mtp))}
    held |= ends if layers.stop == shape.layers else set[str]()
    tied_apart = shape.ends_share and len(layers) < shape.layers
    rows: list[UnitRow] = []
    for name, weight in by_name(shape).items():
        is_copy = name != weight.name
        block = "head" if is_copy else weight.block
        if block in held and (tied_apart or not is_copy):
            here = held_by(weight, shape, layout, layout.coord(0))
            alone = tied_apart and weight.name == "embed.weight"
            expert = weight.expert_dim is not None
            rows.append(UnitRow(name, block, local_shape(weight, here), alone, expert))
    return rows


def pack(
    rows: list[UnitRow],
    num_slices: int,
    itemsize: int,
    bucket: int | None = None,
    expert_slices: int = 1,
) -> tuple[Unit, ...]:
    """The units of these weights, in the order in which they are first used.

    Experts have units of their own, in `expert_slices`. `bucket` is the size in bytes towards which
    blocks are joined or split; by default a block is a unit, and blocks below 25 MB are joined up
    to that.
    """
    units: list[Unit] = []
    for expert, slices in ((False, num_slices), (True, expert_slices)):
        same = (row for row in rows if row.expert == expert)
        by_block = (list(group) for _, group in groupby(same, lambda row: (row.block, row.alone)))
        parts = [part for group in by_block for part in _split(group, bucket, itemsize)]
        joined = _join(parts, SMALL if bucket is None else bucket, itemsize)
        units += [_unit(part, slices, itemsize) for part in joined]
    return tuple(sorted(units, key=lambda unit: rows.index(unit.entries[0].row)))


def _bytes(rows: list[UnitRow], itemsize: int) -> int:
    return itemsize * sum(row.numel for row in rows)


def _split(rows: list[UnitRow], bucket: int | None, itemsize: int) -> list[list[UnitRow]]:
    """A block whose weights exceed the bucket, cut between weights; whole by default."""
    if bucket is None:
        return [rows]
    parts: list[list[UnitRow]] = [[]]
    for row in rows:
        if parts[-1] and _bytes([*parts[-1], row], itemsize) > bucket:
            parts.append([])
        parts[-1].append(row)
    return parts


def _join(parts: list[list[UnitRow]], most: int, itemsize: int) -> list[list[UnitRow]]:
    joined: list[list[UnitRow]] = []
    for part in parts:
        apart = not joined or joined[-1][-1].alone or part[0].alone
        if not apart and _bytes([*joined[-1], *part], itemsize) <= most:
            joined[-1] = [*joined[-1], *part]
        else:
            joined.append(part)
    return joined


def _unit(rows: list[UnitRow], num_slices: int, itemsize: int) -> Unit:
    step = max(1, ALIGNMENT // itemsize)
    entries: list[UnitEntry] = []
    end = 0
    for row in rows:
        entries.append(UnitEntry(row, -(-end // step) * step))
        end = entries[-1].stop
    even = num_slices * step
    blocks = tuple(dict.fromkeys(row.block for row in rows))
    return Unit(blocks, tuple(entries), num_slices, -(-end // even) * even)

"""Flat units: which weights are gathered and reduced together, and which shard each rank owns.

The weights of a unit lie in one flat buffer, each aligned to 16 bytes. The buffer is cut into equal
shards, one for every rank of the shard group. A gather then needs no copy before or after it, and
the only padding is what aligns the weights and makes the shards equal.

Flat units whose weights are gathered as fp8 codes: which weights, and the bytes of a shard.

Every rank knows the scales of weights that have one for a tensor, or for an expert, before it
gathers any of a stage. So ZeRO-3 moves one byte for each weight of a routed expert and, tensorwise,
of a rounded linear, and everything else of a unit (norms, biases) as it is. A shard sends what is
not rounded first, then codes; all shards are padded to the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, get_args

from fivefold.core import FORMATS, Dtype, FivefoldError, GradDtype, gradient_format
from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.splits import padded_length, stage_kind
from fivefold.core.layout.weight_table import Role, by_name, local_shape, shard_of
from fivefold.core.model import Shape

if TYPE_CHECKING:
    from fivefold.core.model import Shape


ALIGNMENT = 16  # bytes, for vectorised kernels
SMALL = 25_000_000  # bytes up to which neighbouring blocks are joined


@dataclass(frozen=True)
class UnitPolicy:
    """How flat units are made, gathered and reduced, as the keys of a plan say.

    `size` is the target in bytes of weights; None: a block is a unit, and small ones are joined.
    `prefetch`: how many blocks ZeRO-3 gathers ahead of the one that runs, each with all its units.
    """

    grad_dtype: GradDtype = "fp32"
    size: int | None = None
    prefetch: int = 1

    @classmethod
    def of(cls, grad_dtype: str, unit_size: float | None, prefetch: int) -> UnitPolicy:
        """From the keys of a plan, `unit_size` in MB; refuses what cannot be.

        Torch's names of the dtypes are understood too.
        """
        grad_dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(grad_dtype, grad_dtype)
        if grad_dtype not in get_args(GradDtype):
            raise FivefoldError(
                f"grad_dtype {grad_dtype}: gradients are summed in fp32 (wider where the weights "
                "are) or in bf16, which has the same range; fp16 would overflow: choose fp32 or "
                "bf16"
            )
        if unit_size is not None and not 0 < unit_size < 1e9:
            raise FivefoldError(
                f"unit_size {unit_size:g}: the MB of weights in a flat unit are above 0 and below "
                "1e9; leave it out for one unit per block"
            )
        if prefetch < 0:
            raise FivefoldError(f"prefetch {prefetch}: the number of blocks is 0 or more")
        size = None if unit_size is None else max(1, round(unit_size * 1e6))
        return cls(cast(GradDtype, grad_dtype), size, prefetch)

    def grad_format(self, itemsize: int) -> Dtype:
        """The dtype of the gradients of weights of so many bytes."""
        return gradient_format(self.grad_dtype, itemsize)

    def grad_itemsize(self, itemsize: int) -> int:
        """Bytes of a gradient of a weight of so many bytes."""
        return FORMATS[self.grad_format(itemsize)].itemsize


@dataclass(frozen=True)
class LocalWeight:
    """A weight as one tp or ep rank has it: its name, the block that uses it, its local shape.

    `alone`: in a unit of its own, so that another stage which also has it shards it in the same
    way. `expert`: on the ranks of one ep and etp coord, and summed over edp. `frozen`: never
    updated.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    alone: bool = False
    expert: bool = False
    frozen: bool = False
    role: Role = "matrix"

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitWeight:
    """A weight and where it starts in its unit, in elements."""

    row: LocalWeight
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.row.numel


OwnedRange: TypeAlias = tuple[LocalWeight, int, int]
"""The elements [start, stop) of a shard that belong to one weight."""


@dataclass(frozen=True)
class Unit:
    """Neighbouring blocks whose weights are gathered and reduced together."""

    blocks: tuple[str, ...]
    entries: tuple[UnitWeight, ...]
    num_shards: int
    size: int  # elements of the full buffer, with padding

    @property
    def name(self) -> str:
        """Its weight, or the first and the last of them."""
        first, last = self.entries[0].row.name, self.entries[-1].row.name
        return first if first == last else f"{first} … {last}"

    @property
    def expert(self) -> bool:
        """Whether its weights are those of experts; else all ranks of a stage share them."""
        return self.entries[0].row.expert

    @property
    def frozen(self) -> bool:
        """Whether its weights are never updated: it has no gradient."""
        return self.entries[0].row.frozen

    @property
    def shard_axis(self) -> str:
        """The axis over which it is sharded."""
        return "edp" if self.expert else "fsdp"

    @property
    def sum_axis(self) -> str:
        """The axis over which its gradients are summed."""
        return "edp" if self.expert else "dp-cp"

    @property
    def shard_size(self) -> int:
        """Elements that each rank owns."""
        return self.size // self.num_shards

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no weight."""
        return self.size - sum(entry.row.numel for entry in self.entries)

    def owned(self, index: int) -> list[OwnedRange]:
        """The weights inside shard `index`, as ranges of that shard."""
        low = index * self.shard_size
        high = low + self.shard_size
        parts = [
            (entry.row, max(entry.start, low), min(entry.stop, high)) for entry in self.entries
        ]
        return [(row, start - low, stop - low) for row, start, stop in parts if start < stop]


def local_weights(shape: Shape, layout: Layout, layers: range) -> list[LocalWeight]:
    """The weights of one stage as a tp rank has them; all tp ranks have the same shapes.

    The first stage has the embedding, the last the head and the MTP layers. If the last stage needs
    the embedding too and is not the first, it has a copy: `head.weight` if the head is tied, else
    `mtp.embed.weight`.
    """
    kind = stage_kind(shape, layers)
    blocks = {f"blocks.{i}" for i in layers}
    blocks |= {"embed"} if kind.embedding else set[str]()
    blocks |= {"head", *(f"mtp.{j}" for j in range(shape.mtp))} if kind.head else set[str]()
    tied_apart = shape.ends_share and len(layers) < shape.layers
    rows: list[LocalWeight] = []
    for row, is_copy, is_shared in _all_local(shape, layout.tp, layout.ep, layout.etp):
        if row.block in blocks and (tied_apart or not is_copy):
            rows.append(replace(row, alone=True) if tied_apart and is_shared else row)
    return rows


@lru_cache(maxsize=64)  # many plans of a search have these degrees
def _all_local(
    shape: Shape, tp: int, ep: int, etp: int
) -> tuple[tuple[LocalWeight, bool, bool], ...]:
    """All weights of a model as a rank has them; which are copies on the last stage, and which are
    on both ends."""
    layout = Layout(shard=ep * etp, tp=tp, ep=ep, etp=etp)
    coord = layout.coord(0)
    local_weights: list[tuple[LocalWeight, bool, bool]] = []
    for name, weight in by_name(shape).items():
        size = local_shape(weight, shard_of(weight, shape, layout, coord))
        is_copy, expert = name != weight.name, weight.expert
        block = "head" if is_copy else weight.block
        row = LocalWeight(name, block, size, expert=expert, frozen=weight.frozen, role=weight.role)
        local_weights.append((row, is_copy, weight.name == "embed.weight"))
    return tuple(local_weights)


class UnitPart(NamedTuple):
    """Neighbouring weights of one block that are never split, and their bytes."""

    rows: tuple[LocalWeight, ...]
    nbytes: int

    @property
    def alone(self) -> bool:
        return self.rows[0].alone


def pack(
    rows: list[LocalWeight],
    num_shards: int,
    itemsize: int,
    bucket: int | None = None,
    expert_shards: int = 1,
    cuts_frozen: bool = True,
) -> tuple[Unit, ...]:
    """The units of these weights, in the order in which they are first used.

    Experts have units of their own, with `expert_shards` shards, and so have frozen weights, which
    ZeRO-3 alone shards (`cuts_frozen`): below it only gradients and states are sharded, and they
    have none. `bucket` is the target size in bytes, to which blocks are joined or split; by default
    a block is a unit, and smaller blocks are joined up to 25 MB.
    """
    units: list[Unit] = []
    kinds = product(((False, num_shards), (True, expert_shards)), (False, True))
    for (expert, shards), frozen in kinds:
        alike = [row for row in rows if (row.expert, row.frozen) == (expert, frozen)]
        ways = 1 if frozen and not cuts_frozen else shards
        joined = join_parts(unit_parts(alike, itemsize, bucket), bucket)
        units += [_unit(part, ways, itemsize) for part in joined]
    places = {row.name: index for index, row in enumerate(rows)}
    return tuple(sorted(units, key=lambda unit: places[unit.entries[0].row.name]))


def unit_parts(rows: list[LocalWeight], itemsize: int, bucket: int | None) -> list[UnitPart]:
    """The parts of these weights: blocks, split between weights if larger than the bucket."""
    parts: list[UnitPart] = []
    for _, block in groupby(rows, lambda row: (row.block, row.alone)):
        part = UnitPart((), 0)
        for row in block:
            nbytes = itemsize * row.numel
            if part.rows and bucket is not None and part.nbytes + nbytes > bucket:
                parts.append(part)
                part = UnitPart((), 0)
            part = UnitPart((*part.rows, row), part.nbytes + nbytes)
        parts.append(part)
    return parts


def join_parts(parts: Iterable[UnitPart], bucket: int | None) -> list[list[UnitPart]]:
    """Neighbouring parts that are a unit together."""
    joined: list[list[UnitPart]] = []
    most, num_bytes = SMALL if bucket is None else bucket, 0
    for part in parts:
        apart = not joined or joined[-1][-1].alone or part.alone
        if not apart and num_bytes + part.nbytes <= most:
            joined[-1].append(part)
            num_bytes += part.nbytes
        else:
            joined.append([part])
            num_bytes = part.nbytes
    return joined


def aligned(numel: int, itemsize: int) -> int:
    """Elements that a weight takes in a unit before the next weight begins."""
    step = max(1, ALIGNMENT // itemsize)
    return -(-numel // step) * step


def padded(size: Any, num_shards: Any, itemsize: int) -> Any:
    """Elements of a unit whose aligned weights have so many, in equal shards: integers or arrays.

    >>> padded(100, 8, 2)
    128
    """
    even = num_shards * max(1, ALIGNMENT // itemsize)
    return -(-size // even) * even


def prefetched(
    units: Sequence[Unit], order: Sequence[str], block: str, step: int, depth: int = 1
) -> list[int]:
    """Units that are gathered while a block runs, in a forward (step 1) or a backward (−1) over the
    blocks in `order`: all that begin with the next block, dense and expert, so that no part of it
    is waited for; with a `depth`, with the next so many blocks that any unit begins with.
    """
    begins = 0 if step > 0 else -1  # a backward comes to the last block of a unit first
    places = {name: index for index, name in enumerate(order)}
    ahead = [step * (places[unit.blocks[begins]] - places[block]) for unit in units]
    near = sorted({distance_ahead for distance_ahead in ahead if distance_ahead > 0})[:depth]
    return [
        index
        for distance in near
        for index in [position for position, lead in enumerate(ahead) if lead == distance][::step]
    ]


def _unit(parts: Sequence[UnitPart], num_shards: int, itemsize: int) -> Unit:
    rows = [row for part in parts for row in part.rows]
    entries: list[UnitWeight] = []
    end = 0
    for row in rows:
        entries.append(UnitWeight(row, end))
        end += aligned(row.numel, itemsize)
    blocks = tuple(dict.fromkeys(row.block for row in rows))
    return Unit(blocks, tuple(entries), num_shards, padded(end, num_shards, itemsize))


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

"""The flat units of a pipeline's first rank in many layouts: how many, and their elements.

The first rank ends last: its backward is the last of a step, so its gradients are what a step waits
for. Which weights are a unit is decided by the same rules as in a run (`core.units`), once for each
tensor degree and each number of stages; shards and microbatches are arrays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from fivefold.core.layout import (
    Fp8,
    LocalWeight,
    UnitPart,
    Weight,
    aligned,
    gathered_as_codes,
    join_parts,
    local_shape,
    longest_shard_bytes,
    padded,
    planned_weights,
    tp_shard,
    unit_parts,
)
from fivefold.core.model import LayerKind, Shape
from fivefold.cost import Array, Flags, LayoutGrid
from fivefold.cost.stages import folded, mirrored, pipeline_timer
from fivefold.cost.traffic.data_axis import SharedGradients, UnitGroup, gathers_per_microbatch

Spans = tuple[range, ...]


class UnitKind(NamedTuple):
    """Flat units that are alike."""

    size: int  # elements, with aligned weights, but not yet in equal shards
    gathers: int  # of one microbatch of ZeRO-3, if its weights do not stay gathered
    stays: bool  # gathered over the step, whatever the plan says
    weights: tuple[tuple[int, bool], ...] = ()  # elements, and whether it comes as codes, if any is


class OwnedElements(NamedTuple):
    """Elements of a rank's dense weights, before ZeRO cuts them: all; of those that learn the ones
    that every tp rank has (`replicated`), and of these the ones that it uses on its own heads
    (`spread`); those of shared KV heads; and the embedding that both ends of a pipeline have."""

    all: int
    replicated: int
    spread: int
    kv: int
    embedding: int


@dataclass(frozen=True)
class UnitRules:
    """How the weights of a model are put together."""

    shape: Shape
    itemsize: int
    bucket: int | None  # target bytes of a unit; None: as large as blocks
    fp8: Fp8 | None = None  # how weights are rounded

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a key of many caches, and a model has many fields
        return hash((self.shape, self.itemsize, self.bucket, self.fp8))


@dataclass(frozen=True)
class FirstRank:
    """The chunks of a pipeline's first rank, and how its layout cuts weights."""

    spans: Spans
    pipeline: bool
    dense: int  # tp
    experts: int  # ep · etp

    def ways(self, expert: bool) -> int:
        return self.experts if expert else self.dense


class RankUnits:
    """The flat units of the first rank of every layout of a grid."""

    def __init__(
        self, rules: UnitRules, grid: LayoutGrid, seq: int, stages: Spans | None = None
    ) -> None:
        self.rules, self.grid = rules, grid
        columns = np.broadcast_arrays(
            *(grid.pp, grid.chunks, folded(grid), mirrored(grid), grid.tp, grid.ep * grid.etp)
        )
        self.shape_of_grid = columns[0].shape
        rows = np.stack([column.ravel() for column in columns]).astype(np.int64)
        codes = np.ravel_multi_index(tuple(rows), tuple(rows.max(axis=1) + 1))  # sorted faster
        _, first, self.back = np.unique(codes, return_index=True, return_inverse=True)
        self.ranks = [
            _first_rank(rules.shape, seq, stages, *degrees) for degrees in rows[:, first].T.tolist()
        ]

    def groups(self, stays: Flags) -> Iterator[UnitGroup]:
        """Dense units and those of experts; `stays`: where ZeRO-3 keeps weights gathered."""
        grid, itemsize = self.grid, self.rules.itemsize
        # Each direction of a mirrored pipeline takes half of the microbatches.
        microbatches = grid.microbatches / np.where(mirrored(grid), 2.0, 1.0)
        for expert in (False, True) if self.rules.shape.moe is not None else (False,):
            shards = grid.edp if expert else grid.shard * grid.cp
            shards = np.where(grid.zero > 0, shards, 1.0)
            number, size, gathers, gathered, sent = (np.zeros(1) for _ in range(5))
            for kind_index, (count, sizes, of_one, stay_flags) in enumerate(self._kinds(expert)):
                unit_size = padded(sizes, shards, itemsize)
                times = np.where(stays | (stay_flags > 0), 1.0, of_one * microbatches)
                number, size = number + count, size + count * unit_size
                gathers, gathered = gathers + count * times, gathered + count * times * unit_size
                codes = self._code_bytes(expert, kind_index, shards)
                sent = sent + count * times * np.where(
                    codes > 0, codes, unit_size * itemsize // shards
                )
            coded = sent if gathered_as_codes(self.rules.shape, self.rules.fp8) else None
            yield UnitGroup(expert, number, size, microbatches, gathers, gathered, coded)

    def _code_bytes(self, expert: bool, kind_index: int, shards: Array) -> Array:
        """Bytes that a rank sends of a unit of a kind that comes as codes; 0 of others."""
        if self.rules.fp8 is None:
            return np.zeros(1)
        units_by_rank = [_units_of(self.rules, first_rank, expert) for first_rank in self.ranks]
        weights = [
            units[kind_index][0].weights if kind_index < len(units) else ()
            for units in units_by_rank
        ]
        if not any(weights):
            return np.zeros(1)
        index = self.back.reshape(self.shape_of_grid)
        numbers = np.stack([array.ravel() for array in np.broadcast_arrays(index, shards)])
        distinct, back = np.unique(numbers.astype(np.int64), axis=1, return_inverse=True)
        pairs: list[list[int]] = distinct.T.tolist()
        sizes = [
            _coded_bytes(weights[rank], ways, self.rules.itemsize) if weights[rank] else 0
            for rank, ways in pairs
        ]
        return np.array(sizes, float)[back.ravel()].reshape(np.broadcast(index, shards).shape)

    @cached_property
    def owned(self) -> Array:
        """Elements of all weights whose optimizer is on one rank."""
        grid, dense = self.grid, self._elements[0]
        owned = dense / np.where(grid.zero > 0, grid.shard * grid.cp, 1.0)
        if self.rules.shape.moe is None:
            return owned
        rows = [
            (sum(kind.size * count for kind, count in _units_of(self.rules, rank, True)),)
            for rank in self.ranks
        ]
        return owned + self._spread_out(rows)[0] / np.where(grid.zero > 0, grid.edp, 1.0)

    def shared(self) -> SharedGradients:
        """Gradients that ranks of other axes have too, on the average rank of a shard group."""
        grid, shape = self.grid, self.rules.shape
        _, uncut, spread, kv, embedding = self._elements
        shards = np.where(grid.zero > 0, grid.shard * grid.cp, 1.0)
        split = grid.tp > 1
        partial = np.where(split, np.where(grid.sp, uncut, spread), 0.0)
        twice = mirrored(grid)
        ends = np.where((grid.pp > 1) & ~folded(grid) & shape.ends_share, embedding / shards, 0.0)
        return SharedGradients(
            partial=partial / shards,
            kv=np.where(grid.tp > shape.kv_heads, kv, 0.0) / shards,
            twin=np.where(twice, self.owned, ends),
        )

    @cached_property
    def _elements(self) -> Sequence[Array]:
        """The numbers of `OwnedElements`, as arrays."""
        return self._spread_out([_elements_of(self.rules, rank) for rank in self.ranks])

    def _spread_out(self, rows: Sequence[Sequence[float]]) -> Sequence[Array]:
        """A column for each number of the rows, one row for each distinct rank."""
        columns = np.array(rows, float)[self.back]
        return [*np.moveaxis(columns.reshape(*self.shape_of_grid, columns.shape[-1]), -1, 0)]

    def _kinds(self, expert: bool) -> Iterator[Sequence[Array]]:
        """Count, size, gathers and whether they stay gathered, of each kind of unit, as arrays."""
        units_by_rank = [_units_of(self.rules, rank, expert) for rank in self.ranks]
        for kind_index in range(max(map(len, units_by_rank))):
            rows = [
                (units[kind_index][1], *units[kind_index][0][:3])
                if kind_index < len(units)
                else (0, 0, 0, 0)
                for units in units_by_rank
            ]
            yield self._spread_out(rows)


def _first_rank(
    shape: Shape,
    seq: int,
    stages: Spans | None,
    pp: int,
    chunks: int,
    fold: int,
    mirror: int,
    tp: int,
    inner: int,
) -> FirstRank:
    spans = _chunks_of_first(shape, seq, stages, pp, chunks, bool(fold), bool(mirror))
    return FirstRank(spans, pp > 1, tp, inner)


@cache
def _chunks_of_first(
    shape: Shape, seq: int, stages: Spans | None, pp: int, chunks: int, fold: bool, mirror: bool
) -> Spans:
    """The layers of each stage of the first rank."""
    number = min(pp * chunks, shape.layers)
    spans = stages or pipeline_timer(shape, seq).spans(number, fold and number == pp * chunks)
    if mirror:
        return (spans[0], spans[-1])
    turns = range(0, number, pp)
    places = [turn + (pp - 1 if fold and turn // pp % 2 else 0) for turn in turns]
    return tuple(spans[stage] for stage in places if stage < number)


@cache
def _elements_of(rules: UnitRules, rank: FirstRank) -> OwnedElements:
    """What the first rank has of dense weights, by how tp cuts them."""
    blocks = Counter(block for layers in rank.spans for block in _blocks(rules, layers))
    block_elements = [
        (times, _elements_of_block(rules, block, rank.dense)) for block, times in blocks.items()
    ]
    columns = zip(
        *([times * number for number in elements] for times, elements in block_elements),
        strict=True,
    )
    return OwnedElements(*map(sum, columns))


@cache
def _elements_of_block(rules: UnitRules, block: tuple[str, bool], tp: int) -> OwnedElements:
    cuts = {weight.name: weight for weight in planned_weights(rules.shape)}
    rows = [row for part in _parts(rules, block, tp, False) for row in part.rows]
    known = [
        (row.numel, row.alone, cuts["embed.weight" if row.alone else row.name]) for row in rows
    ]
    learned = [entry for entry in known if not entry[2].frozen]
    return OwnedElements(
        all=sum(numel for numel, _, _ in known),
        replicated=sum(numel for numel, _, weight in learned if weight.cut == "whole"),
        spread=sum(numel for numel, _, weight in learned if weight.spread),
        kv=sum(numel for numel, _, weight in learned if weight.cut == "kv"),
        embedding=sum(numel for numel, alone, _ in learned if alone),
    )


@cache
def _units_of(rules: UnitRules, rank: FirstRank, expert: bool) -> tuple[tuple[UnitKind, int], ...]:
    """The kinds of units of a rank, each with its number."""
    counts: Counter[UnitKind] = Counter()
    for layers in rank.spans:
        last = layers.stop == rules.shape.layers
        blocks = list(_blocks(rules, layers))
        known = {block: _parts(rules, block, rank.ways(expert), expert) for block in {*blocks}}
        parts = [part for block in blocks for part in known[block]]
        # Layers of one kind share their parts: units of the same parts are alike.
        alike = defaultdict[tuple[int, ...], list[list[UnitPart]]](list)
        for unit in join_parts(parts, rules.bucket):
            alike[tuple(map(id, unit))].append(unit)
        for units in alike.values():
            kind = _kind(rules, tuple(units[0]), rank.pipeline, last and rules.shape.mtp > 0)
            counts[kind] += len(units)
    return tuple(counts.items())


@cache
def _kind(rules: UnitRules, unit: tuple[UnitPart, ...], pipeline: bool, stays: bool) -> UnitKind:
    rows = [row for part in unit for row in part.rows]
    tied = rules.shape.tied and any(row.name == "embed.weight" for row in rows)
    size = sum(aligned(row.numel, rules.itemsize) for row in rows)
    gathers = gathers_per_microbatch((row.block for row in rows), tied, pipeline)
    coded = gathered_as_codes(rules.shape, rules.fp8)
    weights = tuple((row.numel, row.name in coded) for row in rows)
    return UnitKind(size, gathers, stays, weights if any(is_code for _, is_code in weights) else ())


@cache
def _coded_bytes(weights: tuple[tuple[int, bool], ...], shards: int, itemsize: int) -> int:
    """Bytes that a rank sends of a unit of these weights."""
    start, spans = 0, list[tuple[int, int, bool]]()
    for numel, rounded in weights:
        spans.append((start, start + numel, rounded))
        start += aligned(numel, itemsize)
    return longest_shard_bytes(spans, shards, padded(start, shards, itemsize) // shards, itemsize)


def _blocks(rules: UnitRules, layers: range) -> Iterator[tuple[str, bool]]:
    """The blocks of a stage in their order, layers of one kind under the name of their first, and
    whether its embedding is a unit of its own."""
    shape = rules.shape
    alone = shape.ends_share and len(layers) < shape.layers
    if layers.start == 0:
        yield "embed", alone
    yield from _layer_blocks(shape, rules.fp8)[layers.start : layers.stop]
    if layers.stop == shape.layers:
        yield "head", False
        yield from ((f"mtp.{j}", False) for j in range(shape.mtp))
        if alone:
            yield "copy", True


@cache
def _layer_blocks(shape: Shape, fp8: Fp8 | None) -> tuple[tuple[str, bool], ...]:
    first: dict[tuple[LayerKind, bool], int] = {}
    kinds = [
        (shape.layer_kind(i), fp8 is not None and fp8.rounds(i, shape.layers))
        for i in range(shape.layers)
    ]
    for i, kind in enumerate(kinds):
        first.setdefault(kind, i)
    return tuple((f"blocks.{first[kind]}", False) for kind in kinds)


@cache
def _parts(
    rules: UnitRules, block: tuple[str, bool], ways: int, expert: bool
) -> tuple[UnitPart, ...]:
    """The parts of a block on one rank."""
    name, alone = block
    shape = rules.shape
    block_name = "embed" if name == "copy" else name
    rows: list[LocalWeight] = []
    for weight in planned_weights(shape):
        if weight.block != block_name or weight.expert != expert:
            continue
        own_unit = alone and weight.name == "embed.weight"
        if name == "copy" and not own_unit:
            continue
        where = "head" if name == "copy" else name
        called = f"{name}.weight" if name == "copy" else weight.name
        local = _local(weight, shape, ways)
        rows.append(LocalWeight(called, where, local, own_unit, expert, role=weight.role))
    return tuple(unit_parts(rows, rules.itemsize, rules.bucket))


def _local(weight: Weight, shape: Shape, ways: int) -> tuple[int, ...]:
    """The shape of a weight on one rank of a tp group, or of ep and etp together."""
    if weight.expert:
        return (weight.numel // ways,)
    return local_shape(weight, tp_shard(weight, shape, ways, True, 0))

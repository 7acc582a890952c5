"""Weights from a running training job into a generator on the same ranks, without a file.

Splits   what a rank of the job owns, and what a rank of the generator has, are both boxes of the
         full weights (`core/layout/weight_table.py`), as in a checkpoint. Which element goes where
         follows.
Moves    every element of a generator's shard once, from one rank that owns it: from the rank
         itself where it can, else from one of the owners, in turn. All-to-alls of a few weights at
         a time, in the generator's type.
Costs    the bytes of the generator's shards on each rank, and a bucket of memory.

Ranks tell one another their boxes once; every later refit only moves values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import WORLD, boxes_of, buffers, local_shape, origin_of, whole_box
from fivefold.parallel import ForwardStage, Job, Mesh, transport

BUCKET = 1 << 26  # elements that move together, over all ranks

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box of a full weight."""
Spans = Mapping[str, Sequence[Span]]
"""The boxes of each weight that one rank has."""


class WeightMove(NamedTuple):
    """A box of a weight that is copied between ranks, and the box of the source that contains
    it."""

    name: str
    source: int
    target: int
    source_span: Span
    moved: Span

    @property
    def numel(self) -> int:
        return whole_box(self.moved[1]).numel


@dataclass(frozen=True)
class _Shard:
    """A generator's shard of a weight, at `origin` of the full one."""

    tensor: Tensor
    origin: tuple[int, ...]
    span: Span


class Refit:
    """Fixed schedule of copies from a training job to a generator."""

    def __init__(self, job: Job, stage: ForwardStage, mesh: Mesh) -> None:
        """All ranks call this together."""
        theirs, ours = job.mesh.layout.world, mesh.layout.world
        if theirs != ours:
            raise FivefoldError(
                f"the job has {theirs} ranks and the generator {ours}: weights move between "
                "layouts of the same ranks; give both layouts as many"
            )
        self.job, self.mesh = job, mesh
        self.dtype = stage.model.dtype
        self.owned = dict(_owned(job))
        self.shards = list(_shards(stage))
        known = {weight.name for weight in (*job.table.values(), *buffers(job.plan.shape))}
        if lost := [name for name, _ in self.shards if name not in known]:
            raise FivefoldError(
                f"the job has no {lost[0]}, which the generator has: give both the same model, and "
                "drafts by multi-token prediction no more layers than the job trains"
            )
        owned_spans = _listed(self.owned)
        shard_spans = _listed((name, shard.span) for name, shard in self.shards)
        everyone: list[tuple[Spans, Spans]] = [(owned_spans, shard_spans)] * ours
        if ours > 1:
            dist.all_gather_object(  # pyright: ignore[reportUnknownMemberType]
                everyone, (owned_spans, shard_spans), group=mesh.groups[WORLD]
            )
        weights = dict.fromkeys(weight.name for weight in job.table.values())
        biases = [bias.name for bias in buffers(job.plan.shape)]
        self.weights, self.biases = (
            list(_buckets(moves_of(names, everyone))) for names in (weights, biases)
        )

    @torch.no_grad()
    def run(self) -> None:
        """Copy the current values of all weights."""
        for bucket in self.weights:
            self._move(bucket, self.dtype)
        for bucket in self.biases:
            self._move(bucket, torch.float32)

    def _move(self, moves: Sequence[WeightMove], dtype: torch.dtype) -> None:
        """All of them by one exchange; between any two ranks in the order of the list."""
        rank, world = self.mesh.rank, self.mesh.layout.world
        leaving = sorted(
            (weight_move for weight_move in moves if weight_move.source == rank), key=_by_target
        )
        coming = sorted(
            (weight_move for weight_move in moves if weight_move.target == rank), key=_by_source
        )
        rows = torch.empty(0, dtype=dtype, device=self.mesh.device)
        rows = torch.cat([rows, *(self._cut(weight_move).to(rows) for weight_move in leaving)])
        if world > 1:
            leave, arrive = [0] * world, [0] * world
            for transfer in leaving:
                leave[transfer.target] += transfer.numel
            for transfer in coming:
                arrive[transfer.source] += transfer.numel
            rows = self._exchanged(rows, arrive, leave)
        values = torch.split(rows, [weight_move.numel for weight_move in coming])
        for move, value in zip(coming, values, strict=True):
            self._put(move, value)

    def _exchanged(self, rows: Tensor, arrive: list[int], leave: list[int]) -> Tensor:
        def start(group: dist.ProcessGroup) -> transport.Pending:
            return transport.exchange(rows, arrive, leave, group)

        return self.mesh.issue(WORLD, "all_to_all", rows, start).wait()

    def _cut(self, move: WeightMove) -> Tensor:
        """The values of a move, flat, out of what this rank owns."""
        values = self.owned[move.name, move.source_span].view(move.source_span[1])
        return _inside(values, move.source_span[0], move.moved).flatten()

    def _put(self, move: WeightMove, values: Tensor) -> None:
        """Write into every shard of this rank that has them: a tied weight may be there twice."""
        for name, shard in self.shards:
            if name == move.name:
                _inside(shard.tensor, shard.origin, move.moved).copy_(values.view(move.moved[1]))


def _by_target(move: WeightMove) -> int:
    return move.target


def _by_source(move: WeightMove) -> int:
    return move.source


def _inside(tensor: Tensor, origin: tuple[int, ...], span: Span) -> Tensor:
    """The elements of a box, of a tensor that begins at `origin` of the full weight."""
    for dim, (start, offset, size) in enumerate(zip(origin, *span, strict=True)):
        tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def _owned(job: Job) -> Iterator[tuple[tuple[str, Span], Tensor]]:
    """The boxes that this rank of a job owns, and their values; a tied weight once."""
    for part in job.local_shards:
        name, weight = part.row.name, job.table[part.row.name]
        if weight.name != name:
            continue
        stop = part.start + part.tensor.numel()
        for box in boxes_of(weight.shape, job.shards[name], part.row.shape, part.start, stop):
            values = part.tensor.detach().view(-1)[box.at : box.at + box.numel]
            yield (name, (box.offsets, box.sizes)), values
    for chunk in job.chunks:
        for name, buffer in chunk.model.named_buffers():
            box = whole_box(buffer.shape)
            yield (name, (box.offsets, box.sizes)), buffer.flatten()


def _shards(stage: ForwardStage) -> Iterator[tuple[str, _Shard]]:
    """The shards of a generator's rank by the names of full weights, without padding."""
    for name, tensor in (*stage.model.named_parameters(), *stage.model.named_buffers()):
        weight, shard = stage.table[name], stage.shards[name]
        size = local_shape(weight, shard)
        for box in boxes_of(weight.shape, shard, size, 0, tensor.numel()):
            origin = origin_of(weight.shape, shard)
            yield weight.name, _Shard(tensor, origin, (box.offsets, box.sizes))


def _listed(pairs: Iterable[tuple[str, Span]]) -> Spans:
    named_spans: dict[str, list[Span]] = {}
    for name, span in pairs:
        spans = named_spans.setdefault(name, [])
        if span not in spans:
            spans.append(span)
    return named_spans


def moves_of(
    names: Iterable[str], ranks: Sequence[tuple[Spans, Spans]]
) -> Iterator[list[WeightMove]]:
    """Copies of each weight, from what ranks own and need; equal on all ranks."""
    for name in names:
        owners: dict[Span, list[int]] = {}
        for rank, (has, _) in enumerate(ranks):
            for span in has.get(name, ()):
                owners.setdefault(span, []).append(rank)
        moves: list[WeightMove] = []
        for target, (_, wants) in enumerate(ranks):
            for target_span in wants.get(name, ()):
                moves += _covering(name, owners, target, target_span)
        yield moves


def _covering(
    name: str, owners: Mapping[Span, list[int]], target: int, target_span: Span
) -> list[WeightMove]:
    """From whom a rank gets each element of a box."""
    moves: list[WeightMove] = []
    for span, ranks in owners.items():
        common = _common(span, target_span)
        if common is not None:
            source = target if target in ranks else ranks[target % len(ranks)]
            moves.append(WeightMove(name, source, target, span, common))
    numel = whole_box(target_span[1]).numel
    assert sum(move.numel for move in moves) == numel, f"{name} has holes"
    return moves


def _common(span: Span, other: Span) -> Span | None:
    """The box in both."""
    starts = tuple(map(max, span[0], other[0]))
    ends = (
        min(low + size, begin + length)
        for low, size, begin, length in zip(*span, *other, strict=True)
    )
    sizes = tuple(end - start for end, start in zip(ends, starts, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _buckets(by_weight: Iterable[list[WeightMove]]) -> Iterator[list[WeightMove]]:
    """Moves of a few weights at a time."""
    bucket: list[WeightMove] = []
    for moves in by_weight:
        if bucket and sum(move.numel for move in (*bucket, *moves)) > BUCKET:
            yield bucket
            bucket = []
        bucket += moves
    if bucket:
        yield bucket

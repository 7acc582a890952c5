"""Copies of a run in host memory: written every few steps, read by the restart after a loss.

Saving. A rank copies its boxes into a segment of its host's keeper. A thread completes it, sends it
to the rank's partner, which keeps it in the memory of another host, and receives the copy of the
rank's own ward. The next copy goes to the other slot, so that a loss in the middle of one leaves
the one before. No rank begins a copy before all have completed the last: every rank waits for its
thread before it takes part in the step of the next copy, and all ranks meet in that step.

Loading. Every rank reads the boxes that it needs, whatever layout wrote them, from memory of its
own host. What only other hosts keep is sent by ranks there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import SLOTS, Box, CopyOf, CopySet, Partners, newest_set, next_slot
from fivefold.launch import KeptSegment, MemoryKeeper
from fivefold.launch.watch import SAVE_THREAD
from fivefold.train.checkpoint import CheckpointRanks, CheckpointTensor, Facts, in_box

_ALIGNMENT = 64
_PIECE = 1 << 30  # bytes that are sent at a time
Region = tuple[slice, ...]


class CopiedBox(NamedTuple):
    """A box in a segment: its tensor, its place in it, and its offset in the data."""

    key: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * _dtype(self.dtype).itemsize

    def view(self, data: memoryview) -> Tensor:
        """View of its values in the data of a segment."""
        count = torch.Size(self.sizes).numel()
        if not count:
            return torch.empty(self.sizes, dtype=_dtype(self.dtype))
        flat = torch.frombuffer(data, dtype=_dtype(self.dtype), count=count, offset=self.at)
        return flat.view(self.sizes)


class CopyTable(NamedTuple):
    """Table of a copy: its boxes and facts."""

    boxes: list[CopiedBox]
    facts: dict[str, Any]


class BoxRead(NamedTuple):
    """A part of a stored box to send to a rank: source, copy and destination."""

    keeper: int
    copy: CopyOf
    box: CopiedBox
    source: tuple[tuple[int, int], ...]  # of the stored box, by dimension
    tensor: int  # number in the list of tensors
    target: Box
    goes: tuple[tuple[int, int], ...]  # of the target box

    @property
    def num_bytes(self) -> int:
        sizes = torch.Size([stop - start for start, stop in self.source])
        return sizes.numel() * _dtype(self.box.dtype).itemsize


class MemoryCopies:
    """In-memory checkpoints of a run, on all ranks together."""

    def __init__(
        self, keeper: MemoryKeeper, partners: Partners, start: int, group: dist.ProcessGroup | None
    ) -> None:
        """`group` has all ranks, moves tensors of the host and serves nothing else; None: there is
        one rank. `start` counts the starts of the run."""
        self.keeper, self.partners, self.start = keeper, partners, start
        self._ranks = CheckpointRanks(group)
        self._slot = 0
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._sizes: list[int] = []  # of the segments, by rank
        self._segments = dict[tuple[int, int], KeptSegment]()
        self.taken = 0  # copies since the start

    def save(self, tensors: Sequence[CheckpointTensor], facts: Facts) -> None:
        """Copy all values, and send the copy to the partner in the background."""
        self.wait()
        segment, boxes = self._segment(self._ranks.rank, self._slot), list(_stored(tensors))
        size = boxes[-1].at + boxes[-1].num_bytes if boxes else 0
        copy = CopyOf(facts.step, self.start, self._ranks.size, self._slot, self._ranks.rank)
        table = {"facts": asdict(facts), "boxes": [list(stored_box) for stored_box in boxes]}
        data = segment.begin(copy, table, size)
        # A step that runs already would change what is copied later.
        for box, value in zip(boxes, _values(tensors), strict=True):
            box.view(data).copy_(value)
        self._thread = Thread(
            target=self._complete, args=(segment, self._slot), name=SAVE_THREAD, daemon=True
        )
        self._thread.start()
        self._slot = (self._slot + 1) % SLOTS
        self.taken += 1

    def wait(self) -> None:
        """Wait for the last copy; raises if the partner did not receive it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise FivefoldError(f"the copy in memory was not completed: {error}") from error

    def load(self, tensors: Sequence[CheckpointTensor], after: int) -> Facts | None:
        """Load the newest copies of all ranks; None if one is lost, or they are older than step
        `after`.

        If one keeper has the memory of all ranks, each finds the same by itself: nobody writes now.
        """
        copies = self._kept()
        copies_by_rank = {self._ranks.rank: copies}
        if self.keeper.share is not None:
            copies_by_rank = dict(enumerate(self._ranks.on_all(lambda: copies)))
        copy_set = newest_set(copies_by_rank)
        self._slot = next_slot(copy_set)
        if copy_set is None or copy_set.step < after:
            return None
        facts, reads = self._planned(copy_set, tensors)
        if not all(self._ranks.on_all(lambda: self._verified(copy_set, reads))):
            return None
        values = [target.state.read().detach() for target in tensors]
        self._exchange(reads or [], values)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.state.write(value)
        return facts

    def _planned(
        self, copy_set: CopySet, tensors: Sequence[CheckpointTensor]
    ) -> tuple[Facts, list[BoxRead] | None]:
        """Where the run stood, and what this rank reads."""
        me, same = self._me, copy_set.world == self._ranks.size
        if same and self.keeper.share is None:  # in the same layout a rank reads its own copy alone
            table = self._table(me, copy_set.slot)
            if table.boxes == list(_stored(tensors)):
                alone = CopySet(*copy_set[:4], keepers=((me,),) * copy_set.world)
                tables = [
                    table if rank == me else CopyTable([], {}) for rank in range(copy_set.world)
                ]
                return Facts(**table.facts), _reads(tensors, _catalog(alone, tables, me))
        tables = self._tables(copy_set)
        return Facts(**tables[0].facts), _reads(tensors, _catalog(copy_set, tables, me))

    def _segment(self, rank: int, slot: int) -> KeptSegment:
        if (rank, slot) not in self._segments:
            self._segments[rank, slot] = KeptSegment(self.keeper.open(rank, slot))
        return self._segments[rank, slot]

    def _kept(self) -> list[CopyOf]:
        """The whole copies in the memory of this host."""
        places = [(rank, slot) for rank in self.keeper.ranks() for slot in range(SLOTS)]
        segments = [self._segment(*position) for position in places]
        return [segment.copy for segment in segments if segment.complete]

    def _tables(self, copy_set: CopySet) -> list[CopyTable]:
        """What is in each copy of a set; ranks tell one another what only they can see."""
        me, local_tables = self._ranks.rank, dict[int, CopyTable]()
        for rank, keepers in enumerate(copy_set.keepers):
            if me in keepers:
                local_tables[rank] = self._table(rank, copy_set.slot)
        if self.keeper.share is None:
            return [local_tables[rank] for rank in range(copy_set.world)]
        tables_by_rank = self._ranks.on_all(lambda: local_tables)
        return [
            local_tables.get(rank) or tables_by_rank[copy_set.keepers[rank][0]][rank]
            for rank in range(copy_set.world)
        ]

    def _table(self, rank: int, slot: int) -> CopyTable:
        table = self._segment(rank, slot).table()
        return CopyTable([_box(box) for box in table["boxes"]], table["facts"])

    def _verified(self, copy_set: CopySet, reads: list[BoxRead] | None) -> bool:
        """Whether all that this rank needs is there, and its share of the copies in this memory is
        what was written: those who see the same memory verify it together."""
        if reads is None:
            return False
        index, among = self.keeper.share or (self._me, self._ranks.size)
        copy_ranks = [rank for rank, keepers in enumerate(copy_set.keepers) if self._me in keepers]
        own_ranks = [rank for rank in copy_ranks if rank % among == index]
        return all(self._segment(rank, copy_set.slot).verified() for rank in own_ranks)

    @property
    def _me(self) -> int:
        return self._ranks.rank

    def _complete(self, segment: KeptSegment, slot: int) -> None:
        """The thread of a copy."""
        try:
            segment.commit()
            self._pass_on(segment, slot)
        except Exception as error:
            self._error = error

    def _pass_on(self, segment: KeptSegment, slot: int) -> None:
        """Send the copy to the partner, and keep that of the ward."""
        rank, group = self._ranks.rank, self._ranks.group
        partner, ward = self.partners.partner_of(rank), self.partners.ward_of(rank)
        if partner is None or ward is None or group is None:
            return
        if not self._sizes:
            self._sizes = self._ranks.on_all(lambda: segment.size)
        theirs = self._segment(ward, slot)
        theirs.reserve(self._sizes[ward])
        arrived = torch.empty(self._sizes[ward], dtype=torch.uint8)
        sent = torch.frombuffer(segment.memory, dtype=torch.uint8)
        work = [
            *(dist.isend(piece, group_dst=partner, group=group) for piece in sent.split(_PIECE)),
            *(dist.irecv(piece, group_src=ward, group=group) for piece in arrived.split(_PIECE)),
        ]
        for request in work:
            if request is not None:
                request.wait()
        theirs.fill(memoryview(arrived.numpy()))

    def _exchange(self, reads: list[BoxRead], values: list[Tensor]) -> None:
        """Copy what is in this host's memory; send and receive the rest."""
        me, group = self._ranks.rank, self._ranks.group
        local = [box_read for box_read in reads if box_read.keeper == me]
        for read in local:
            _place(read, self._source(read), values)
        if self.keeper.share is None:
            return
        remote = [box_read for box_read in reads if box_read.keeper != me]
        reads_by_rank = self._ranks.on_all(lambda: remote)
        if group is None or not any(reads_by_rank):
            return  # nobody waits for a message
        work: list[dist.Work | None] = []
        sent: list[Tensor] = []
        for client, theirs in enumerate(reads_by_rank):
            for read in (box_read for box_read in theirs if box_read.keeper == me):
                sent.append(self._source(read).contiguous().view(-1).view(torch.uint8))
                work.append(dist.isend(sent[-1], group_dst=client, group=group))
        arrived = [torch.empty(box_read.num_bytes, dtype=torch.uint8) for box_read in remote]
        for read, buffer in zip(remote, arrived, strict=True):
            work.append(dist.irecv(buffer, group_src=read.keeper, group=group))
        for request in work:
            if request is not None:
                request.wait()
        for read, buffer in zip(remote, arrived, strict=True):
            sizes = [stop - start for start, stop in read.source]
            _place(read, buffer.view(_dtype(read.box.dtype)).view(sizes), values)

    def _source(self, read: BoxRead) -> Tensor:
        segment = self._segment(read.copy.rank, read.copy.slot)
        return read.box.view(segment.data())[_region(read.source)]


def _place(read: BoxRead, source: Tensor, values: list[Tensor]) -> None:
    in_box(values[read.tensor], read.target)[_region(read.goes)].copy_(source)


def _region(ranges: Iterable[tuple[int, int]]) -> Region:
    return tuple(slice(start, stop) for start, stop in ranges)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _box(row: Sequence[Any]) -> CopiedBox:
    key, dtype, offsets, sizes, at = row
    return CopiedBox(key, dtype, tuple(offsets), tuple(sizes), at)


def _unique(tensors: Sequence[CheckpointTensor]) -> Iterator[tuple[CheckpointTensor, Box]]:
    """Every box once: a rank may have a tied weight twice."""
    seen = set[tuple[str, tuple[int, ...], tuple[int, ...]]]()
    for tensor in tensors:
        for box in tensor.boxes:
            if (key := (tensor.key, tuple(box.offsets), tuple(box.sizes))) not in seen:
                seen.add(key)
                yield tensor, box


def _stored(tensors: Sequence[CheckpointTensor]) -> Iterator[CopiedBox]:
    """The boxes of a rank, one after another in its segment."""
    at = 0
    for tensor, box in _unique(tensors):
        name = str(tensor.dtype).removeprefix("torch.")
        record = CopiedBox(tensor.key, name, tuple(box.offsets), tuple(box.sizes), at)
        yield record
        at += -(-record.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _values(tensors: Sequence[CheckpointTensor]) -> Iterator[Tensor]:
    for tensor, box in _unique(tensors):
        yield in_box(tensor.state.read().detach(), box)


Catalog = Mapping[str, Sequence[tuple[int, CopyOf, CopiedBox]]]
"""By tensor: who keeps a box of it, in which copy."""


def _catalog(copy_set: CopySet, tables: Sequence[CopyTable], me: int) -> Catalog:
    """Every stored box once: from this rank's own copy where it can be, else from its host."""
    catalog: dict[str, dict[tuple[Any, ...], tuple[int, CopyOf, CopiedBox]]] = {}
    for rank in sorted(
        range(copy_set.world), key=lambda rank: (rank == me, me in copy_set.keepers[rank])
    ):
        keepers = copy_set.keepers[rank]
        keeper = me if me in keepers else keepers[me % len(keepers)]
        copy = CopyOf(copy_set.step, copy_set.start, copy_set.world, copy_set.slot, rank)
        for box in tables[rank].boxes:
            catalog.setdefault(box.key, {})[box.offsets, box.sizes] = (keeper, copy, box)
    return {key: list(boxes.values()) for key, boxes in catalog.items()}


def _reads(tensors: Sequence[CheckpointTensor], catalog: Catalog) -> list[BoxRead] | None:
    """What a rank has to read; None if something is missing or has another dtype."""
    reads: list[BoxRead] = []
    for number, tensor in enumerate(tensors):
        for target in tensor.boxes:
            box_reads = [
                BoxRead(keeper, copy, box, source, number, target, goes)
                for keeper, copy, box in catalog.get(tensor.key, ())
                if (overlap := _overlap(box, target)) is not None
                for source, goes in (overlap,)
            ]
            if any(_dtype(box_read.box.dtype) != tensor.dtype for box_read in box_reads):
                return None
            size = sum(box_read.num_bytes for box_read in box_reads)
            if size != target.numel * tensor.dtype.itemsize and not _covered(target, box_reads):
                return None
            reads += box_reads
    return reads


def _covered(target: Box, reads: Sequence[BoxRead]) -> bool:
    """Whether boxes that overlap one another fill a box."""
    mask = torch.zeros(target.sizes, dtype=torch.bool)
    for read in reads:
        mask[_region(read.goes)] = True
    return bool(mask.all())


def _overlap(
    box: CopiedBox, target: Box
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] | None:
    """What a stored and a wanted box share, counted in each of them."""
    source: list[tuple[int, int]] = []
    goes: list[tuple[int, int]] = []
    dims = zip(box.offsets, box.sizes, target.offsets, target.sizes, strict=True)
    for stored, stored_size, target_start, wanted_size in dims:
        first = max(stored, target_start)
        last = min(stored + stored_size, target_start + wanted_size)
        if last <= first:
            return None
        source.append((first - stored, last - stored))
        goes.append((first - target_start, last - target_start))
    return tuple(source), tuple(goes)

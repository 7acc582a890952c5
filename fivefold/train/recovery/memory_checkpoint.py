"""Copies of a run in host memory: written every few steps, read by the restart after a loss.

Saving. A rank copies its boxes into a segment of its host's keeper. A thread completes it, sends it
to the rank's partner, which keeps it in the memory of another host, and receives the copy of the
rank's own ward. The next copy goes to the other slot, so that a loss in the middle of one leaves
the one before. No rank begins a copy before all have completed the last: every rank waits for its
thread before it takes part in the step of the next copy, and all ranks meet in that step.

Loading. The first rank of each host tells the first of all what its host keeps, and learns of which
step all copies are kept. In the same layout every rank reads its own copy, which it can describe by
itself. Of other layouts, and where a host was lost, it reads the boxes that it needs from memory of
its own host, asks who keeps the others, and asks those alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from threading import Thread
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import SLOTS, Box, CopyOf, Partners, newest_set, next_slot
from fivefold.launch import KeptSegment, MemoryKeeper
from fivefold.launch.watch import SAVE_THREAD
from fivefold.train.checkpoint import (
    CheckpointRanks,
    CheckpointTensor,
    Facts,
    in_box,
    joined,
    rows_of,
    united_rows,
)

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
        newest = self._newest()
        self._slot = next_slot(newest and newest.slot)
        if newest is None or newest.step < after:
            return None
        tables = self._tables(newest, tensors)
        catalog, servers, clients = _catalog(newest, tables, self._me), list[int](), list[int]()
        reads = _reads(tensors, catalog)
        facts = next((Facts(**table.facts) for table in tables.values()), None)
        if self.keeper.share is not None:
            state = (reads is None, facts)
            lacks, facts = self._ranks.exchange(lambda: state, _any, lambda pair: pair)
            if lacks:
                question = partial(self._question, newest, tensors)
                servers, clients = self._ranks.ask(question, _matched)
                catalog = self._asked(newest, tensors, servers, clients, catalog)
                reads = _reads(tensors, catalog)
        complete = reads is not None and facts is not None
        if not self._ranks.exchange(lambda: complete and self._verified(newest), all, bool):
            return None
        values = [target.state.read().detach() for target in tensors]
        self._exchange(reads or [], values, servers, clients)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.state.write(value)
        return facts

    def _newest(self) -> CopiesOfStep | None:
        """The newest step of which all copies are kept."""
        if self.keeper.share is None:
            newest = newest_set({self._me: self._kept()})
            return newest and CopiesOfStep(*newest[:4])
        index, among = self.keeper.share

        def copies() -> list[HostCopies]:
            return [] if index else [(self._me, among, self._kept())]

        return self._ranks.exchange(copies, joined, _newest_of)

    def _tables(
        self, newest: CopiesOfStep, tensors: Sequence[CheckpointTensor]
    ) -> dict[int, CopyTable]:
        """What is in the copies of a set in this memory; of its own copy alone, if this rank needs
        exactly that."""
        ranks = [copy.rank for copy in self._kept() if copy[:4] == newest[:4]]
        if self._me in ranks and newest.world == self._ranks.size:
            table = self._table(self._me, newest.slot)
            if table.boxes == list(_stored(tensors)):
                return {self._me: table}
        return {rank: self._table(rank, newest.slot) for rank in ranks}

    def _question(self, newest: CopiesOfStep, tensors: Sequence[CheckpointTensor]) -> Question:
        """What this rank needs of other hosts, and what its own host, if this is its first rank,
        answers for: its own ranks, and those whose host was lost."""
        index, among = self.keeper.share or (0, 1)
        local = self._tables(newest, ())
        catalog = _catalog(newest, local, self._me)
        needs = [box for box in _stored(tensors) if not _has(catalog, box)]
        own = {*range(self._me, self._me + among), *newest.orphans}
        boxes = [box for rank in local if rank in own for box in local[rank].boxes if not index]
        return Question(_rows(needs), _sets(boxes), among)

    def _asked(
        self,
        newest: CopiesOfStep,
        tensors: Sequence[CheckpointTensor],
        servers: Sequence[int],
        clients: Sequence[int],
        catalog: Catalog,
    ) -> Catalog:
        """The catalog with boxes of the servers; answers the clients."""
        needs = [box for box in _stored(tensors) if not _has(catalog, box)] if servers else []
        requests = self._ranks.deliver(dict.fromkeys(servers, needs), clients)
        local = _catalog(newest, self._tables(newest, ()), self._me) if clients else {}
        answers = {
            client: [
                (copy, stored)
                for box in boxes
                for _, copy, stored in local.get(box.key, ())
                if _overlap(stored, Box(box.offsets, box.sizes, 0)) is not None
            ]
            for client, boxes in requests.items()
        }
        united = [entry for entries in catalog.values() for entry in entries]
        for server, entries in self._ranks.deliver(answers, servers).items():
            united += [(server, copy, stored) for copy, stored in entries]
        return _by_tensor(united)

    def _segment(self, rank: int, slot: int) -> KeptSegment:
        if (rank, slot) not in self._segments:
            self._segments[rank, slot] = KeptSegment(self.keeper.open(rank, slot))
        return self._segments[rank, slot]

    def _kept(self) -> list[CopyOf]:
        """The whole copies in the memory of this host."""
        places = [(rank, slot) for rank in self.keeper.ranks() for slot in range(SLOTS)]
        segments = [self._segment(*position) for position in places]
        return [segment.copy for segment in segments if segment.complete]

    def _table(self, rank: int, slot: int) -> CopyTable:
        table = self._segment(rank, slot).table()
        return CopyTable([_box(box) for box in table["boxes"]], table["facts"])

    def _verified(self, newest: CopiesOfStep) -> bool:
        """Whether this rank's share of the copies in this memory is what was written: those who see
        the same memory verify it together."""
        index, among = self.keeper.share or (self._me, self._ranks.size)
        ranks = [copy.rank for copy in self._kept() if copy[:4] == newest[:4]]
        own_ranks = [rank for rank in ranks if rank % among == index]
        return all(self._segment(rank, newest.slot).verified() for rank in own_ranks)

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
        partner, ward = self.partners.partner_of(self._me), self.partners.ward_of(self._me)
        if partner is None or ward is None or self._ranks.size == 1:
            return
        sizes = self._ranks.deliver({partner: segment.size}, [ward])
        theirs = self._segment(ward, slot)
        theirs.reserve(sizes[ward])
        arrived = torch.empty(sizes[ward], dtype=torch.uint8)
        sent = torch.frombuffer(segment.memory, dtype=torch.uint8)
        waits = [self._ranks.post(piece, partner) for piece in sent.split(_PIECE)]
        for piece in arrived.split(_PIECE):
            self._ranks.fill(piece, ward)
        for wait in waits:
            wait()
        theirs.fill(memoryview(arrived.numpy()))

    def _exchange(
        self,
        reads: list[BoxRead],
        values: list[Tensor],
        servers: Sequence[int],
        clients: Sequence[int],
    ) -> None:
        """Copy what is in this host's memory; receive from servers, and send to clients."""
        me = self._me
        for read in (box_read for box_read in reads if box_read.keeper == me):
            _place(read, self._source(read), values)
        remote = [box_read for box_read in reads if box_read.keeper != me]
        by_server = {
            server: [read for read in remote if read.keeper == server] for server in servers
        }
        reads_by_client = self._ranks.deliver(by_server, clients)
        waits = [
            self._ranks.post(self._source(read).contiguous().view(-1).view(torch.uint8), client)
            for client, reads_there in reads_by_client.items()
            for read in reads_there
        ]
        for read in remote:
            buffer = self._ranks.fill(torch.empty(read.num_bytes, dtype=torch.uint8), read.keeper)
            sizes = [stop - start for start, stop in read.source]
            _place(read, buffer.view(_dtype(read.box.dtype)).view(sizes), values)
        for wait in waits:
            wait()

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


class CopiesOfStep(NamedTuple):
    """The copies of all ranks of one start after one step; the `orphans` are not in the memory of
    the host that has a rank of this number now."""

    step: int
    start: int
    world: int
    slot: int
    orphans: tuple[int, ...] = ()


HostCopies = tuple[int, int, list[CopyOf]]
"""The first rank of a host, how many it has, and the copies in its memory."""


def _newest_of(hosts: list[HostCopies]) -> CopiesOfStep | None:
    """The newest set that all hosts together have."""
    newest = newest_set({first: copies for first, _, copies in hosts})
    if newest is None:
        return None
    among = {first: first + among for first, among, _ in hosts}
    orphans = [
        rank
        for rank, keepers in enumerate(newest.keepers)
        if not any(first <= rank < among[first] for first in keepers)
    ]
    return CopiesOfStep(*newest[:4], tuple(orphans))


Rows = list[tuple[int, int]]
"""Ranges in the first dimension of a tensor."""


class Question(NamedTuple):
    """Rows that a rank needs of other hosts; those that its own host has, by tensor and with a
    checksum that says which boxes; and how many ranks the host has."""

    needs: dict[str, Rows]
    copies: dict[str, tuple[int, Rows]]
    ranks: int


def _rows(boxes: Iterable[CopiedBox]) -> dict[str, Rows]:
    rows: dict[str, Rows] = {}
    for box in boxes:
        rows.setdefault(box.key, []).append(rows_of(box.offsets, box.sizes))
    return {key: united_rows(ranges) for key, ranges in rows.items()}


def _sets(boxes: Sequence[CopiedBox]) -> dict[str, tuple[int, Rows]]:
    """A checksum of the boxes of each tensor, which replicas share, and their rows."""
    sets: dict[str, set[tuple[Any, ...]]] = {}
    for box in boxes:
        sets.setdefault(box.key, set()).add((tuple(box.offsets), tuple(box.sizes)))
    return {
        key: (crc32(repr(sorted(sets[key])).encode()), rows) for key, rows in _rows(boxes).items()
    }


def _matched(questions: list[Question]) -> list[tuple[list[int], list[int]]]:
    """For each rank: whom it asks, and who asks it. Hosts with the same boxes, and the ranks of a
    host, take turns. What its own host has, a rank reads there."""
    home: list[int] = []  # the first rank of each rank's host
    while len(home) < len(questions):
        home += [len(home)] * questions[len(home)].ranks
    replicas: dict[tuple[str, int], list[int]] = {}
    by_key: dict[str, list[tuple[int, int, int]]] = {}  # rows, and the checksum of their boxes
    for first, question in enumerate(questions):
        for key, (checksum, rows) in question.copies.items():
            if (key, checksum) not in replicas:
                by_key.setdefault(key, []).extend((*pair, checksum) for pair in rows)
            replicas.setdefault((key, checksum), []).append(first)
    for ranges in by_key.values():
        ranges.sort()
    peaks = {key: [*accumulate((row[1] for row in rows), max)] for key, rows in by_key.items()}
    servers = [set[int]() for _ in questions]
    clients = [set[int]() for _ in questions]
    for rank, question in enumerate(questions):
        for key, needs in question.needs.items():
            for start, stop in needs if key in by_key else ():
                # Rows from here back, until all that come before end too early.
                number = bisect_left(by_key[key], (stop,)) - 1
                while number >= 0 and peaks[key][number] > start:
                    _, high, checksum = by_key[key][number]
                    number -= 1
                    if high > start:
                        firsts = replicas[key, checksum]
                        if home[rank] in firsts:
                            continue
                        first = firsts[rank % len(firsts)]
                        server = first + rank % questions[first].ranks
                        servers[rank].add(server)
                        clients[server].add(rank)
    return [(sorted(a), sorted(b)) for a, b in zip(servers, clients, strict=True)]


def _any(values: list[tuple[bool, Facts | None]]) -> tuple[bool, Facts | None]:
    """Whether any rank lacks something, and what the first that knows it says of the run."""
    facts = next((facts for _, facts in values if facts is not None), None)
    return any(lacks for lacks, _ in values), facts


def _catalog(newest: CopiesOfStep, tables: Mapping[int, CopyTable], me: int) -> Catalog:
    """Every box of this memory, from this rank's own copy where it can be."""
    ranks = sorted(tables, key=lambda rank: rank != me)
    return _by_tensor(
        (me, CopyOf(*newest[:4], rank), box) for rank in ranks for box in tables[rank].boxes
    )


def _by_tensor(entries: Iterable[tuple[int, CopyOf, CopiedBox]]) -> Catalog:
    """The first entry of every box."""
    catalog: dict[str, dict[tuple[Any, ...], tuple[int, CopyOf, CopiedBox]]] = {}
    for entry in entries:
        box = entry[2]
        catalog.setdefault(box.key, {}).setdefault((box.offsets, box.sizes), entry)
    return {key: list(boxes.values()) for key, boxes in catalog.items()}


def _reads(tensors: Sequence[CheckpointTensor], catalog: Catalog) -> list[BoxRead] | None:
    """What a rank has to read; None if something is missing or has another dtype."""
    reads: list[BoxRead] = []
    for number, tensor in enumerate(tensors):
        for target in tensor.boxes:
            box_reads = _reads_of(number, tensor.key, target, catalog)
            if any(_dtype(box_read.box.dtype) != tensor.dtype for box_read in box_reads):
                return None
            if not _covered(target, box_reads):
                return None
            reads += box_reads
    return reads


def _reads_of(number: int, key: str, target: Box, catalog: Catalog) -> list[BoxRead]:
    """What a catalog has of a box."""
    return [
        BoxRead(keeper, copy, box, source, number, target, goes)
        for keeper, copy, box in catalog.get(key, ())
        if (overlap := _overlap(box, target)) is not None
        for source, goes in (overlap,)
    ]


def _has(catalog: Catalog, box: CopiedBox) -> bool:
    target = Box(box.offsets, box.sizes, 0)
    return _covered(target, _reads_of(0, box.key, target, catalog))


def _covered(target: Box, reads: Sequence[BoxRead]) -> bool:
    """Whether boxes, which may overlap one another, fill a box."""
    if len(reads) == 1 and reads[0].num_bytes == target.numel * _dtype(reads[0].box.dtype).itemsize:
        return True  # without memory for a mask, of the usual case
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

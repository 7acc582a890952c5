"""Caches on their way between engines: each rank sends to the ranks that go on with its sequences.

Pieces travel over sockets of this machine, straight from rank to rank, in threads beside the loop
of steps. A rank that goes on has a socket for each of its starts: what was meant for an engine that
has died never reaches the one that was started in its place. A cache is complete on a rank when all
its pieces are there; when it is complete on all ranks of a replica, the leader adds the request.

Every sequence that the dispatcher announces is taken in or forgotten, so nothing stays.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fivefold.core.model import BLOCK, blocks_of
from fivefold.core.plan import KvRoute, Plan, kv_routes, moved_bytes
from fivefold.generate import KvPiece, RankPages, SequenceState
from fivefold.serve.links import (
    AddCommand,
    DropCommand,
    EngineCommand,
    ForgetCommand,
    KvTarget,
    RankLink,
)

_HEAD = struct.Struct("<IQ")  # bytes of the header, and of the tensors


def kv_socket(folder: Path, engine: int, start: int, rank: int) -> Path:
    """Socket of a rank that receives caches."""
    return folder / f"kv-{engine}-{start}-{rank}"


class KvOutbox(threading.Thread):
    """Sends pieces in order. Pieces for a dead rank are dropped: the dispatcher learns of its
    death."""

    def __init__(self, folder: Path, source: str) -> None:
        super().__init__(name="kv-out", daemon=True)
        self.folder, self.source = folder, source
        self._queue: queue.SimpleQueue[tuple[Path, KvPiece, int] | None] = queue.SimpleQueue()
        self._streams: dict[Path, socket.socket | None] = {}  # None: it has died

    def put(self, target: KvTarget, rank: int, piece: KvPiece, total: int) -> None:
        """Send a piece to a rank, which receives `total` of this sequence."""
        path = kv_socket(self.folder, target.engine, target.start, rank)
        self._queue.put((path, piece, total))

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            path, piece, total = item
            try:
                if path not in self._streams:
                    self._streams[path] = stream = socket.socket(socket.AF_UNIX)
                    stream.connect(str(path))
                stream = self._streams[path]
                if stream is not None:
                    _send(stream, self.source, piece, total)
            except OSError:
                self._streams[path] = None
        for stream in self._streams.values():
            if stream is not None:
                stream.close()

    def finish(self) -> None:
        """Send what is queued, and end."""
        self._queue.put(None)
        self.join()


def _send(stream: socket.socket, source: str, piece: KvPiece, total: int) -> None:
    tensors = [tensor.contiguous() for tensor in piece.tensors]
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    # Their bytes follow as they are: a pickle would copy them.
    data = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors]
    header = pickle.dumps(
        (source, total, piece.id, piece.layer, piece.heads, piece.blocks, kinds), protocol=5
    )
    stream.sendall(_HEAD.pack(len(header), sum(map(len, data))) + header)
    for buffer in data:
        stream.sendall(buffer)


@dataclass
class _Arrival:
    """Received pieces of one sequence; unwanted ones are only counted."""

    source: str
    count: int = 0
    is_wanted: bool = True
    complete: bool = False
    pieces: list[KvPiece] = field(default_factory=list[KvPiece])


class KvInbox:
    """Receives pieces, in a thread for each sender. Senders may connect at once, and are read from
    `start` on."""

    def __init__(self, path: Path) -> None:
        self.on_complete: Callable[[str], None] = lambda id: None
        self._arrivals: dict[str, _Arrival] = {}
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener.bind(str(path))
        self._listener.listen(128)

    def start(self, on_complete: Callable[[str], None]) -> None:
        """Start to receive; `on_complete` is called in threads with a sequence whose pieces have
        all arrived, or were discarded."""
        self.on_complete = on_complete
        threading.Thread(target=self._accept, name="kv-in", daemon=True).start()

    def take(self, id: str) -> list[KvPiece]:
        """Return the pieces of a complete sequence, once."""
        with self._lock:
            return self._arrivals.pop(id).pieces

    def discard(self, id: str) -> None:
        """Drop a complete sequence, if it was not taken."""
        with self._lock:
            self._arrivals.pop(id, None)

    def forget(self, id: str) -> None:
        """Drop a sequence, with pieces that still arrive."""
        with self._lock:
            arrival = self._arrivals.setdefault(id, _Arrival("", is_wanted=False))
            arrival.is_wanted = False
            arrival.pieces.clear()
            if arrival.complete:
                del self._arrivals[id]

    @property
    def num_open(self) -> int:
        """Number of sequences with received pieces."""
        return len(self._arrivals)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._hear, args=(stream,), daemon=True).start()

    def _hear(self, stream: socket.socket) -> None:
        source = ""
        with stream, contextlib.suppress(OSError, EOFError):
            while True:
                size, num_bytes = _HEAD.unpack(_read(stream, _HEAD.size))
                source, total, id, layer, heads, blocks, kinds = pickle.loads(_read(stream, size))
                data = _read(stream, num_bytes)
                self._arrived(
                    source, total, KvPiece(id, layer, heads, blocks, _tensors(data, kinds))
                )
        with self._lock:  # it has died, or will send no more: what is not complete never will be
            lost = [
                id
                for id, arrival in self._arrivals.items()
                if arrival.source == source and not arrival.complete
            ]
            for id in lost:
                del self._arrivals[id]

    def _arrived(self, source: str, total: int, piece: KvPiece) -> None:
        with self._lock:
            arrival = self._arrivals.setdefault(piece.id, _Arrival(source))
            arrival.source = source
            arrival.count += 1
            if arrival.is_wanted:
                arrival.pieces.append(piece)
            arrival.complete = arrival.count == total
            if arrival.complete and not arrival.is_wanted:
                del self._arrivals[piece.id]
        if arrival.complete:
            self.on_complete(piece.id)


def _read(stream: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = stream.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def _tensors(data: bytearray, kinds: Iterable[tuple[tuple[int, ...], Any]]) -> Any:
    tensors, start = list[torch.Tensor](), 0
    for shape, dtype in kinds:
        count = torch.Size(shape).numel()
        if not count:  # this rank of cp owns no block of it
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        tensors.append(torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape))
        start += count * dtype.itemsize
    return tuple(tensors)


class RankTravel:
    """Sends the caches of a rank's sequences to another layout, or receives them."""

    def __init__(self, pages: RankPages, other: Plan) -> None:
        self.pages, self.other = pages, other
        self.targets: dict[str, KvTarget] = {}  # of requests that go on elsewhere
        self.outbox: KvOutbox | None = None
        self.inbox: KvInbox | None = None
        self._routes: dict[int, list[KvRoute]] = {}  # by the data rank that goes on
        self.home = pages.plan.layout.coord(pages.rank).dp

    @classmethod
    def sending(cls, pages: RankPages, other: Plan, outbox: KvOutbox) -> RankTravel:
        """For a prefill rank."""
        travel = cls(pages, other)
        travel.outbox = outbox
        return travel

    @classmethod
    def receiving(cls, pages: RankPages, other: Plan, inbox: KvInbox) -> RankTravel:
        """For a decode rank."""
        travel = cls(pages, other)
        travel.inbox = inbox
        return travel

    def start(self, leader: RankLink) -> None:
        """Start to send, or to receive and to report complete sequences to the leader."""
        if self.outbox is not None:
            self.outbox.start()
        if self.inbox is not None:
            self.inbox.start(leader.send_from_thread)

    def leave(self, sequence: SequenceState) -> None:
        target = self.targets.get(sequence.request.id)
        if target is None or self.outbox is None:
            return
        if target.home not in self._routes:
            new_routes = kv_routes(self.pages.plan, self.other, self.home, target.home)
            self._routes[target.home] = new_routes
        routes, totals = self._routes[target.home], Counter[int]()
        for route in routes:
            totals[route.target] += len(route.layers)
        for route, piece in self.pages.pieces(sequence, routes):
            self.outbox.put(target, route.target, piece, totals[route.target])

    def land(self, sequence: SequenceState) -> None:
        assert self.inbox is not None, "prompts are computed here"
        self.pages.put(sequence, self.inbox.take(sequence.request.id))

    def bytes_of(self, prompt: int) -> int:
        """Bytes sent for a prompt, in full blocks."""
        itemsize = next(iter(self.pages.pages.values())).keys.element_size()
        return moved_bytes(self.other, blocks_of(prompt) * BLOCK, itemsize)


class Adoptions:
    """Requests that wait for their cache, in the leader of a decode engine."""

    def __init__(self, ranks: int) -> None:
        """`ranks` of a replica, each of which tells when a cache is complete."""
        self.ranks = ranks
        self._waiting: dict[str, AddCommand] = {}
        self._complete: Counter[str] = Counter()
        self._forgotten: set[str] = set()

    def due(
        self, commands: Sequence[EngineCommand], complete: Iterable[str]
    ) -> list[EngineCommand]:
        """Commands for all ranks, once caches they need are complete."""
        due_commands: list[EngineCommand] = []
        self._complete.update(complete)
        for command in commands:
            if isinstance(command, AddCommand) and command.drawn:
                self._waiting[command.request.id] = command
            elif isinstance(command, DropCommand) and command.id in self._waiting:
                due_commands.append(
                    self._forget(command.id, self._waiting.pop(command.id).home or 0)
                )
            elif isinstance(command, ForgetCommand):
                due_commands.append(self._forget(command.id, command.home))
            else:
                due_commands.append(command)
        for id in [id for id, count in self._complete.items() if count == self.ranks]:
            if id in self._forgotten:
                self._forgotten.remove(id)
                del self._complete[id]
            elif id in self._waiting:
                due_commands.append(self._waiting.pop(id))
                del self._complete[id]
        return due_commands

    def _forget(self, id: str, home: int) -> ForgetCommand:
        self._forgotten.add(id)
        return ForgetCommand(id, home)

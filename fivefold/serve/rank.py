"""One rank of a replica: it gets commands, runs steps and sends what was drawn.

All ranks of a layout have to add the same requests before the same step. So rank 0 alone receives
commands and broadcasts them before every step, over a local socket and not by a collective, which
would time out while nothing comes. Tokens are not broadcast: every rank sees those drawn.

An engine that only computes prompts sends the cache of each to another one, from rank to rank.
There the leader waits until all ranks have theirs, and adds the request then.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fivefold.core import FivefoldError
from fivefold.core.model import BLOCK, blocks_of
from fivefold.core.plan import KvRoute, Plan, kv_routes, moved_bytes
from fivefold.generate import (
    DecoderForward,
    DrawnToken,
    KvPiece,
    LayoutEngine,
    RankPages,
    RefusedTask,
    Request,
    ScheduleLimits,
    SequenceChunk,
    SequenceState,
    StepBatch,
    TextTask,
    engine_of_rank,
)
from fivefold.launch import Worker, forked_device
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DrawnRow,
    DropCommand,
    EngineCommand,
    EngineRole,
    ForgetCommand,
    KvTarget,
    RankLink,
    ReplicaHello,
    StepNews,
)

# Caches on their way between engines: each rank sends to the ranks that go on with its sequences.
#
# Pieces travel over sockets of this machine, straight from rank to rank, in threads beside the loop
# of steps. A rank that goes on has a socket for each of its starts: what was meant for an engine
# that has died never reaches the one that was started in its place. A cache is complete on a rank
# when all its pieces are there; when it is complete on all ranks of a replica, the leader adds the
# request.
#
# Every sequence that the API process announces is taken in or forgotten, so nothing stays.

_HEAD = struct.Struct("<IQ")  # bytes of the header, and of the tensors


def kv_socket(folder: Path, engine: int, start: int, rank: int) -> Path:
    """Socket of a rank that receives caches."""
    return folder / f"kv-{engine}-{start}-{rank}"


class KvOutbox(threading.Thread):
    """Sends pieces in order. Pieces for a dead rank are dropped: the API process learns of its
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


API_SOCKET = "api"  # the name of its socket
_BEAT_S = 1.0  # between two signs of life, or a step if that is longer
_SILENT_STEPS = 5.0  # after which a rank is lost: of its slowest
_LEAST_SILENCE_S = {"cpu": 10.0, "cuda": 30.0}  # or so long: kernels of new sizes are made
_LONGEST_SILENCE_S = 600.0  # of what is done once: compilation, the end
_WARM_TOKENS = 3
_WARM_PROMPTS = (9, 2050)
_WARM_KEYS = 8192


@dataclass(frozen=True)
class EngineUp:
    """All ranks of an engine are ready."""


@dataclass(frozen=True)
class RankBeat:
    """Heartbeat of a rank, which is lost if none follows within so many seconds."""

    rank: int
    patience: float


@dataclass(frozen=True)
class ServeTask:
    """Task of every rank of a replica. `text` has the model, and no requests."""

    text: TextTask
    folder: Path  # of sockets
    replica: int
    sequences: int  # that run at a time in each data rank
    tokens: int | None  # of a forward; None: what suits the device
    cache_gb: float | None
    first_place: int = 0  # of its ranks among those of all engines
    places: int = 1
    role: EngineRole = "both"
    other: Plan | None = None  # of the engines that sequences come from, or go on in
    start: int = 0  # how often it was started before

    @property
    def leader(self) -> Path:
        """Socket of rank 0 for the other ranks."""
        return self.folder / f"replica-{self.replica}-{self.start}"


def serve_rank(worker: Worker, task: ServeTask) -> None:
    """Serve until the API process ends it."""
    text = task.text
    world = text.plan.layout.world
    device_index = task.first_place + worker.rank
    device = forked_device(text.device, text.backend, device_index, task.places)
    try:
        with worker.joined(world, device):
            most = task.sequences * blocks_of(text.plan.shape.max_seq)
            cache_bytes = None if task.cache_gb is None else 1e9 * task.cache_gb
            if cache_bytes is None and device.device.type == "cpu":
                cache_bytes = 1e9
            limits = ScheduleLimits.of(device.device.type, task.tokens, task.sequences)
            engine = engine_of_rank(worker, text, device.device, cache_bytes, most, limits)
            _warm_up(engine)
            # Before any rank is ready: others may connect from then on.
            loop = EngineLoop(engine, _travel(task, worker.rank, engine))
            if worker.rank == 0:
                _lead(worker, task, loop)
            else:
                # Another rank: do what rank 0 does.
                leader = RankLink.to(task.leader)
                loop.start(leader)
                beat = _Beat(worker, task.text.device)
                while not loop.over:
                    heard = leader.receive(_BEAT_S)
                    beat.tick(0.0)
                    for commands in heard:
                        began = time.monotonic()
                        loop.turn(commands)
                        beat.tick(time.monotonic() - began)
                beat.silent()
            if loop.travel is not None and loop.travel.outbox is not None:
                loop.travel.outbox.finish()
            engine.renew()  # waits for steps that nobody reads
            engine.close()
            engine.mesh.close_groups()
    except FivefoldError as error:
        worker.report(RefusedTask(str(error)))
        raise


def _warm_up(engine: LayoutEngine) -> None:
    """Compile and load what the first request would wait for."""
    limits, pool = engine.schedulers[0].limits, engine.schedulers[0].pool
    longest = min(engine.shape.max_seq, pool.count * BLOCK)
    prompts = (1,)
    if engine.mesh.device.type == "cuda":  # few and many tokens have kernels of their own
        prompts = (1, *(num_tokens for num_tokens in _WARM_PROMPTS if num_tokens <= limits.tokens))
    for length in prompts:
        if longest >= length + _WARM_TOKENS:
            engine.run([Request(f"warm-up {length}", (0,) * length, _WARM_TOKENS)])
    engine.renew()  # shares nothing of it
    alone = engine.plan.layout.world == 1
    if alone and engine.mesh.device.type == "cuda" and isinstance(engine.forward, DecoderForward):
        _capture_steps(engine.forward, limits.sequences, longest)
        # Capture steps with prompts, where steps are replayed.
        from fivefold.generate import GraphedForward  # Triton is there only with CUDA

        if isinstance(engine.forward, GraphedForward):
            engine.forward.capture_prompts(limits.tokens)


def _capture_steps(forward: DecoderForward, most: int, longest: int) -> None:
    """Run decode steps of all sizes on a block that nobody reads: each is captured where steps are
    replayed. Sequences beyond the longest here are captured when there are some."""
    for keys in (1 << i for i in range(10, _WARM_KEYS.bit_length())):
        stop = min(keys, longest)
        table = (forward.padding,) * blocks_of(stop)
        chunk = SequenceChunk("", (0,), stop - 1, table, samples=True, fills=True)
        for count in (1 << i for i in range((most - 1).bit_length() + 1)):
            forward(StepBatch((chunk,) * count))
        if stop == longest:
            break


@dataclass
class EngineLoop:
    """Loop of an engine: commands in, results out."""

    engine: LayoutEngine
    travel: RankTravel | None = None
    open: set[str] = field(default_factory=set[str])
    closing: bool = False
    lengths: dict[str, int] = field(default_factory=dict[str, int])  # of prompts that will leave

    def start(self, leader: RankLink) -> None:
        """Connect to the engines that receive or send caches."""
        if self.travel is not None:
            self.engine.connect(self.travel)
            self.travel.start(leader)

    @property
    def over(self) -> bool:
        return self.closing and not self.open

    def turn(self, commands: Sequence[EngineCommand]) -> StepNews:
        """Apply commands, and run a step if there is work."""
        refused = [refusal for command in commands for refusal in self._obey(command)]
        drawn = self.engine.step() if self.engine.busy else []
        rows, moved, num_bytes = list[DrawnRow](), list[tuple[str, KvTarget]](), 0
        for result in drawn:
            target, length = None, 0
            if result.reason is not None:
                self.engine.collect(result.id)
                target, length = self._close(result.id)
            if target is not None and result.reason == "length":
                assert self.travel is not None
                moved.append((result.id, target))
                num_bytes += self.travel.bytes_of(length)
                result = replace(result, reason=None)
            rows.append(_row(result))
        free = sum(scheduler.pool.num_free for scheduler in self.engine.schedulers)
        return StepNews(rows, refused, free, self.engine.num_preempted, moved, num_bytes)

    def _close(self, id: str) -> tuple[KvTarget | None, int]:
        """A request is not open any more; returns where it goes on, if it does, and its length."""
        self.open.discard(id)
        if self.travel is None:
            return None, 0
        if self.travel.inbox is not None:
            self.travel.inbox.discard(id)
        return self.travel.targets.pop(id, None), self.lengths.pop(id, 0)

    def _obey(self, command: EngineCommand) -> list[tuple[str, str]]:
        travel = self.travel
        if isinstance(command, AddCommand):
            request = command.request
            try:
                self.engine.add(request, command.home, command.drawn)
            except FivefoldError as error:  # on all ranks alike
                self._close(request.id)
                return [(request.id, str(error))]
            self.open.add(request.id)
            if command.target is not None and travel is not None:
                travel.targets[request.id] = command.target
                self.lengths[request.id] = len(request.prompt)
        elif isinstance(command, DropCommand):
            if command.id in self.open:  # else it has ended meanwhile
                self.engine.end(command.id, "cancelled")
                self.engine.collect(command.id)
                self._close(command.id)
        elif isinstance(command, ForgetCommand):
            if travel is not None and travel.inbox is not None and travel.home == command.home:
                travel.inbox.forget(command.id)
        else:
            self.closing = True
        return []


def _row(drawn: DrawnToken) -> DrawnRow:
    return drawn.id, drawn.token, drawn.logprob, drawn.reason, drawn.alternatives


class _Beat:
    """Sends a heartbeat after steps, at most one in `_BEAT_S`."""

    def __init__(self, worker: Worker, device: str) -> None:
        self.worker, self.last, self.slowest = worker, 0.0, 0.0
        self.least = _LEAST_SILENCE_S[device]
        worker.phase("serve")
        self.tick(0.0)
        if device == "cuda":  # a step of a new size may compile, silently and for long
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self.silent)

    def tick(self, seconds: float) -> None:
        """A step took so long."""
        self.slowest = max(seconds, 0.99 * self.slowest)
        if time.monotonic() - self.last >= _BEAT_S:
            patience = max(self.least, _SILENT_STEPS * self.slowest)
            self.worker.report(RankBeat(self.worker.rank, patience))
            self.last = time.monotonic()

    def silent(self, *_: object) -> None:
        """Nobody knows how long the next sign of life takes."""
        self.worker.report(RankBeat(self.worker.rank, _LONGEST_SILENCE_S))
        self.last = 0.0


def _lead(worker: Worker, task: ServeTask, loop: EngineLoop) -> None:
    """Rank 0: receive commands, broadcast them, send results."""
    layout = task.text.plan.layout
    followers = _followers(task, layout.world - 1)
    ours, own = (RankLink(stream) for stream in socket.socketpair())
    loop.start(own)
    notices = [ours, *followers] if task.role == "decode" else []
    adoptions = Adoptions(layout.world // layout.dp)
    api = RankLink.to(task.folder / API_SOCKET)
    pools = [scheduler.pool.count for scheduler in loop.engine.schedulers]
    worker.report(EngineUp())
    beat, began = _Beat(worker, task.text.device), time.monotonic()
    hello = ReplicaHello(task.replica, sum(pools), pools[0], task.role, task.start, layout.dp)
    api.send(hello)
    while not loop.over:
        beat.tick(time.monotonic() - began)
        if not loop.engine.busy:
            RankLink.wait([api, *notices], _BEAT_S)
        began = time.monotonic()
        complete = [id for link in notices for id in link.receive(0.0)]
        try:
            commands = adoptions.due(api.receive(0.0), complete)
        except EOFError:  # the API process has ended
            commands = [CloseCommand(), *map(DropCommand, loop.open)]
        if not commands and not loop.engine.busy:
            continue
        for follower in followers:
            follower.send(commands)
        news = loop.turn(commands)
        if commands or news.rows or news.refused:
            api.send(news)
    beat.silent()


def _travel(task: ServeTask, rank: int, engine: LayoutEngine) -> RankTravel | None:
    """What carries sequences to other engines, or takes them in."""
    if task.other is None:
        return None
    pages, source = RankPages(engine), f"{task.replica}-{task.start}"
    if task.role == "prefill":
        return RankTravel.sending(pages, task.other, KvOutbox(task.folder, source))
    path = kv_socket(task.folder, task.replica, task.start, rank)
    return RankTravel.receiving(pages, task.other, KvInbox(path))


def _followers(task: ServeTask, count: int) -> list[RankLink]:
    """Links to the other ranks."""
    if not count:
        return []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(task.leader))
        listener.listen(count)
        return [RankLink(listener.accept()[0]) for _ in range(count)]

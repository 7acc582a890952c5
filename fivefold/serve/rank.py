"""One rank of a replica: it gets commands, runs steps and sends what was drawn.

All ranks of a layout have to add the same requests before the same step. So rank 0 alone receives
commands and broadcasts them before every step, over a local socket and not by a collective, which
would time out while nothing comes. Tokens are not broadcast: every rank sees those drawn.

An engine that only computes prompts sends the cache of each to another one, from rank to rank
(`kv_links.py`). There the leader waits until all ranks have theirs, and adds the request then.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fivefold.core import FivefoldError
from fivefold.core.model import BLOCK, blocks_of
from fivefold.core.plan import Plan
from fivefold.generate import (
    DecoderForward,
    DraftOptions,
    DrawnToken,
    LayoutEngine,
    RankPages,
    RefusedTask,
    Request,
    ScheduleLimits,
    SequenceChunk,
    StepBatch,
    TextTask,
    engine_of_rank,
)
from fivefold.launch import Worker, forked_device
from fivefold.serve.kv_links import Adoptions, KvInbox, KvOutbox, RankTravel, kv_socket
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DrawnRow,
    DropCommand,
    EngineCommand,
    EngineRole,
    ForgetCommand,
    KvTarget,
    PromptRow,
    RankLink,
    ReplicaHello,
    StepNews,
)

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
    """Serve until the dispatcher ends it."""
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
            _warm_up(engine, text.drafts)
            # Before any rank is ready: others may connect from then on.
            loop = EngineLoop(engine, _travel(task, worker.rank, engine))
            if worker.rank == 0:
                _lead(worker, task, loop)
            else:
                _follow(worker, task, loop)
            if loop.travel is not None and loop.travel.outbox is not None:
                loop.travel.outbox.finish()
            engine.renew()  # waits for steps that nobody reads
            engine.close()
            engine.mesh.close_groups()
    except FivefoldError as error:
        worker.report(RefusedTask(str(error)))
        raise


def _warm_up(engine: LayoutEngine, drafts: DraftOptions | None) -> None:
    """Compile and load what the first request would wait for."""
    limits, pool = engine.schedulers[0].limits, engine.schedulers[0].pool
    if engine.grammars is not None and engine.ranks.draws:
        engine.grammars.load()
    longest = min(engine.shape.max_seq, pool.count * BLOCK)
    prompts = (1,)
    if engine.mesh.device.type == "cuda":  # few and many tokens have kernels of their own
        prompts = (1, *(num_tokens for num_tokens in _WARM_PROMPTS if num_tokens <= limits.tokens))
    for length in prompts:
        if longest >= length + _WARM_TOKENS:
            engine.run([Request(f"warm-up {length}", (0,) * length, _WARM_TOKENS)])
    engine.renew()  # shares nothing of it
    layout, forward = engine.plan.layout, engine.forward
    if engine.mesh.device.type == "cuda" and isinstance(forward, DecoderForward):
        if most := engine.decode_steps.most_captured:
            rows = limits.sequences * (1 + (0 if drafts is None else drafts.count))
            _capture_steps(forward, min(rows, most), longest)
        if layout.world == 1:
            _capture_prompts(forward, limits.tokens)


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


def _capture_prompts(forward: DecoderForward, tokens: int) -> None:
    """Capture steps with prompts, where steps are replayed."""
    from fivefold.generate import GraphedForward  # Triton is there only with CUDA

    if isinstance(forward, GraphedForward):
        forward.capture_prompts(tokens)


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
        prompt_rows: list[PromptRow] = []
        for result in drawn:
            if result.index < 0 and result.reason is None:
                prompt_rows.append(_prompt_row(result))
                continue
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
        return StepNews(
            rows,
            refused,
            free,
            self.engine.num_preempted,
            moved,
            num_bytes,
            prompt_rows,
            drafted=self.engine.num_drafted,
            accepted=self.engine.num_accepted,
        )

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


def _prompt_row(drawn: DrawnToken) -> PromptRow:
    return drawn.id, drawn.token, drawn.logprob, drawn.rank, drawn.alternatives


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
        except EOFError:  # the dispatcher has ended
            commands = [CloseCommand(), *map(DropCommand, loop.open)]
        if not commands and not loop.engine.busy:
            continue
        for follower in followers:
            follower.send(commands)
        news = loop.turn(commands)
        if commands or news.rows or news.refused or news.prompt_rows:
            api.send(news)
    beat.silent()


def _follow(worker: Worker, task: ServeTask, loop: EngineLoop) -> None:
    """Another rank: do what rank 0 does."""
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

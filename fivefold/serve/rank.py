"""One rank of a replica: it gets commands, runs steps and sends what was drawn.

All ranks of a layout have to add the same requests before the same step. So rank 0 alone hears the
door: before every step it passes on what it has heard to the others, over a socket of this machine
and not by a collective, which would time out in a quiet night. Nothing is said of tokens: every
rank sees those that are drawn.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.core.errors import FivefoldError
from fivefold.generate.blocks import BLOCK, blocks_of
from fivefold.generate.engine import DecoderForward
from fivefold.generate.layout import LayoutEngine
from fivefold.generate.requests import DrawnToken, Request, SequenceChunk, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text_ranks import RefusedTask, TextTask, engine_of_rank
from fivefold.launch.backend import forked_device
from fivefold.launch.worker import Worker
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DrawnRow,
    DropCommand,
    EngineCommand,
    RankLink,
    ReplicaHello,
    StepNews,
)

DOOR = "door"  # the name of its socket
_BEAT_S = 5.0  # between two signs of life
_WARM_TOKENS = 3
_WARM_PROMPTS = (9, 17, 130)
_WARM_KEYS = 8192


@dataclass(frozen=True)
class ServeTask:
    """What every rank of a replica does. `text` has the model, and no requests."""

    text: TextTask
    folder: Path  # of sockets
    replica: int
    replicas: int
    sequences: int  # that run at a time in each data rank
    tokens: int  # of a forward
    cache_gb: float | None

    @property
    def limits(self) -> ScheduleLimits:
        return ScheduleLimits(self.tokens, self.sequences)

    @property
    def leader(self) -> Path:
        """The socket of rank 0, which the others follow."""
        return self.folder / f"replica-{self.replica}"


def serve_rank(worker: Worker, task: ServeTask) -> None:
    """Serve until the door says that it is over."""
    text = task.text
    world = text.plan.layout.world
    place, places = task.replica * world + worker.rank, task.replicas * world
    device = forked_device(text.device, text.backend, place, places)
    try:
        with worker.joined(world, device):
            most = task.sequences * blocks_of(text.plan.shape.max_seq)
            cache_bytes = None if task.cache_gb is None else 1e9 * task.cache_gb
            if cache_bytes is None and device.device.type == "cpu":
                cache_bytes = 1e9
            engine = engine_of_rank(worker, text, device.device, cache_bytes, most, task.limits)
            _warm_up(engine)
            loop = EngineLoop(engine)
            if worker.rank == 0:
                _lead(worker, task, loop)
            else:
                _follow(worker, task, loop)
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
    if engine.mesh.device.type == "cuda":  # chunks of several sizes compile kernels for any
        prompts = (1, *(each for each in _WARM_PROMPTS if each <= limits.tokens))
    for length in prompts:
        if longest >= length + _WARM_TOKENS:
            engine.run([Request(f"warm-up {length}", (0,) * length, _WARM_TOKENS)])
    engine.renew()  # shares nothing of it
    alone = engine.plan.layout.world == 1
    if alone and engine.mesh.device.type == "cuda" and isinstance(engine.forward, DecoderForward):
        _capture_steps(engine.forward, limits.sequences, longest)


def _capture_steps(forward: DecoderForward, most: int, longest: int) -> None:
    """Run decode steps of all sizes on a block that nobody reads: each is captured where steps are
    replayed. Sequences beyond the longest here are captured when there are some."""
    for keys in (1 << i for i in range(10, _WARM_KEYS.bit_length())):
        stop = min(keys, longest)
        table = (forward.padding,) * blocks_of(stop)
        one = SequenceChunk("", (0,), stop - 1, table, samples=True, fills=True)
        for count in (1 << i for i in range(most.bit_length())):
            forward(StepBatch((one,) * count))
        if stop == longest:
            break


@dataclass
class EngineLoop:
    """An engine, and what it is told."""

    engine: LayoutEngine
    open: set[str] = field(default_factory=set[str])
    closing: bool = False

    @property
    def over(self) -> bool:
        return self.closing and not self.open

    def turn(self, commands: Sequence[EngineCommand]) -> StepNews:
        """Do as told, and run a step if there is anything to run."""
        refused = [each for command in commands for each in self._obey(command)]
        drawn = self.engine.step() if self.engine.busy else []
        for each in drawn:
            if each.reason is not None:
                self.engine.collect(each.id)
                self.open.discard(each.id)
        rows = list(map(_row, drawn))
        schedulers = self.engine.schedulers
        free = sum(each.pool.num_free for each in schedulers)
        return StepNews(rows, refused, free, self.engine.num_preempted, len(self.open))

    def _obey(self, command: EngineCommand) -> list[tuple[str, str]]:
        if isinstance(command, AddCommand):
            id = command.request.id
            try:
                self.engine.add(command.request)
            except FivefoldError as error:  # on all ranks alike
                return [(id, str(error))]
            self.open.add(id)
        elif isinstance(command, DropCommand):
            if command.id in self.open:  # else it has ended meanwhile
                self.open.discard(command.id)
                self.engine.end(command.id, "cancelled")
                self.engine.collect(command.id)
        else:
            self.closing = True
        return []


def _row(drawn: DrawnToken) -> DrawnRow:
    return drawn.id, drawn.token, drawn.logprob, drawn.reason, drawn.alternatives


class _Beat:
    """Signs of life, now and then."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.last = worker, time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self.last >= _BEAT_S:
            self.worker.phase("serve")
            self.last = time.monotonic()


def _lead(worker: Worker, task: ServeTask, loop: EngineLoop) -> None:
    """Rank 0: hear the door, tell the others, answer."""
    followers = _followers(task, task.text.plan.layout.world - 1)
    door, beat = RankLink.to(task.folder / DOOR), _Beat(worker)
    pools = [each.pool.count for each in loop.engine.schedulers]
    worker.phase("serve")
    door.send(ReplicaHello(task.replica, sum(pools), pools[0]))
    while not loop.over:
        beat.tick()
        try:
            commands = door.receive(0.0 if loop.engine.busy else _BEAT_S)
        except EOFError:  # the door has gone
            commands = [CloseCommand(), *map(DropCommand, loop.open)]
        if not commands and not loop.engine.busy:
            continue
        for each in followers:
            each.send(commands)
        news = loop.turn(commands)
        if commands or news.rows or news.refused:
            door.send(news)


def _follow(worker: Worker, task: ServeTask, loop: EngineLoop) -> None:
    """Another rank: do what rank 0 does."""
    leader, beat = RankLink.to(task.leader), _Beat(worker)
    worker.phase("serve")
    while not loop.over:
        beat.tick()
        for commands in leader.receive(_BEAT_S):
            loop.turn(commands)


def _followers(task: ServeTask, count: int) -> list[RankLink]:
    """Links to the other ranks."""
    if not count:
        return []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(task.leader))
        listener.listen(count)
        return [RankLink(listener.accept()[0]) for _ in range(count)]

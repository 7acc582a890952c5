"""The ranks of a job under virtual time: each has the real `Watchdog`, with a clock that the
simulation moves, and its real log of collectives; they meet on one board.

A program of collectives (tp, cp, dp and messages of pp) runs until it can go no further. What
follows is decided by the code that runs in production: who judges, who is named, who leaves.
`control_scripts.py` has the faults and the rules.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from fivefold.core.layout import Layout
from fivefold.launch.boards import MemoryBoard
from fivefold.launch.rank_surroundings import RankSurroundings
from fivefold.launch.watchdog import PATIENCE, Watchdog
from fivefold.launch.worker import Worker

LAYOUT = "dp=8 tp=8 pp=4 cp=4"
WORLD, PER_HOST = 1024, 8
KINDS = ("death", "hang", "slow", "partition", "late", "two", "build", "save")
STEPS = 2  # of the program from the step of the fault on
END = 60.0  # virtual seconds after the fault
_TICK = PATIENCE / 10
_NO_ANSWER = 10.0 + PATIENCE / 4  # seconds until a rank without its store gives up


class Collective(NamedTuple):
    """One collective or message of a rank's program."""

    axis: str
    kind: str
    members: tuple[int, ...]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.axis, self.members


@cache
def programs() -> list[list[Collective]]:
    """A step of every rank: forward through the stages and back, then gradients and weights."""
    layout, found = Layout.parse(LAYOUT), list[list[Collective]]()
    groups: dict[tuple[str, int], tuple[int, ...]] = {}
    for rank in range(WORLD):
        for axis in ("tp", "cp", "dp", "pp"):
            groups[axis, rank] = tuple(layout.group(axis, rank))
    for rank in range(WORLD):
        line = groups["pp", rank]
        at = line.index(rank)
        before, after = line[at - 1] if at else None, line[at + 1] if at + 1 < len(line) else None
        work = [Collective("tp", kind, groups["tp", rank]) for kind in ("gather", "scatter")]
        work.append(Collective("cp", "all_gather", groups["cp", rank]))
        step: list[Collective] = []
        for first, last in ((before, after), (after, before)):
            if first is not None:
                step.append(Collective("pp", "recv", (first, rank)))
            step += work
            if last is not None:
                step.append(Collective("pp", "send", (rank, last)))
        step += [Collective("dp", kind, groups["dp", rank]) for kind in ("scatter", "gather")]
        found.append(step)
    return found


@dataclass
class Script:
    """A random fault: what happens to which ranks, where in the program, and for how long."""

    seed: int
    kind: str = ""
    ranks: set[int] = field(default_factory=set[int])
    step: int = 0  # steps before that of the fault
    stops: dict[int, int] = field(default_factory=dict[int, int])  # and collectives in it
    silent: set[int] = field(default_factory=set[int])  # their watchdogs do not answer
    cut: set[int] = field(default_factory=set[int])  # ranks on the other side of a partition
    back: float = float("inf")  # seconds after the fault at which they go on
    in_waiting_call: bool = False  # the stack of a rank that hangs looks like one that waits

    @classmethod
    def of(cls, seed: int) -> Script:
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        found = cls(seed, kind, in_waiting_call=kind == "hang" and draw.random() < 0.3)
        ranks = draw.sample(range(WORLD), 2 if kind == "two" else 1)
        if kind == "partition":
            host = draw.randrange(1, WORLD // PER_HOST)
            last = min(host + draw.choice((1, 1, 2, 16)), WORLD // PER_HOST)
            ranks = list(range(host * PER_HOST, last * PER_HOST))
            found.cut = set(ranks)
        found.ranks = set(ranks)
        length = min(map(len, programs()))
        found.step = 0 if kind in ("build", "save") else draw.randrange(1, 3)
        start = 0 if found.step == 0 else draw.randrange(length)
        found.stops = {rank: start + draw.randrange(3) * (kind == "two") for rank in ranks}
        if kind in ("death", "late") or (kind in ("two", "build", "save") and draw.random() < 0.5):
            found.silent = set(draw.sample(ranks, draw.randint(1, len(ranks))))
        if kind == "slow":
            found.back = draw.uniform(2.0, 40.0)
        if kind == "late":
            found.back = draw.uniform(5.0, 50.0)
        return found


class _Left(Exception):
    """A rank ends its process."""


class SimulatedRank(RankSurroundings):
    """A rank: its program, its watchdog, and what the watchdog sees of it."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.alive, self.stopped, self.waits = True, False, False
        self.issued, self.waiting_for = 0, None
        self.watchdog = Watchdog(Worker(rank, self, self.send), WORLD, PATIENCE, self)

    # What a watchdog reads of its process.
    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.judging = True
        self.world.run_until(self.world.now + seconds)
        self.world.judging = False

    def stack(self) -> tuple[list[str], bool]:
        return [], self.waits

    def watch(self, task: Callable[[], None]) -> None:
        return None

    # The meeting of its worker.
    folder = None

    def join(self, rank: int, world: int, device: Any) -> None:
        raise AssertionError("no process group here")

    def board(self) -> SimulatedBoard:
        return SimulatedBoard(self)

    def leave(self) -> None:
        raise _Left

    def send(self, kind: str, value: Any) -> None:
        if kind == "lost":
            self.world.verdicts.append((self.rank, value[0]))
            raise _Left

    def look(self) -> None:
        """What the thread of the watchdog does, once; then again after a tick."""
        if not self.alive or self.stopped or self.world.finished:
            return
        try:
            self.watchdog.look()
        except _Left:
            self.alive = False
            return
        except dist.DistError as error:
            self.world.later(_NO_ANSWER, partial(self.give_up, error))
            return
        self.world.later(_TICK, self.look)

    def give_up(self, error: dist.DistError) -> None:
        try:
            self.watchdog.lose_store(error)
        except _Left:
            self.alive = False


class SimulatedBoard(MemoryBoard):
    """The board as one rank reaches it."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank, self.texts = rank, rank.world.texts

    def _reach(self) -> None:
        world = self.rank.world
        if world.parted and self.rank.rank in world.script.cut:
            raise dist.DistNetworkError("no answer for 10 s")

    def put(self, name: str, text: str) -> None:
        self._reach()
        super().put(name, text)

    def get(self, name: str) -> str | None:
        self._reach()
        return super().get(name)

    def claim(self, name: str, text: str) -> bool:
        """One judge at a time: the first of two that overlap would only go on after the second."""
        self._reach()
        return not self.rank.world.judging and super().claim(name, text)


class World:
    """All ranks of a script, and the events to come."""

    def __init__(self, script: Script) -> None:
        self.script, self.now, self.parted = script, 0.0, False
        self.finished, self.judging = False, False
        self.texts: dict[str, str] = {}
        self.verdicts: list[tuple[int, int]] = []  # who said it, and who is lost
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._come: Counter[tuple[Any, int]] = Counter()
        self._waiting: dict[tuple[Any, int], list[SimulatedRank]] = {}
        self._counts: Counter[tuple[int, Any]] = Counter()
        self.ranks = [SimulatedRank(rank, self) for rank in range(WORLD)]

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), action))

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, end)

    def play(self) -> None:
        """Up to the fault, and on from there until nothing can happen any more."""
        script, draw = self.script, random.Random(self.script.seed + 1)
        phase = {"build": "build", "save": "checkpoint 10"}.get(script.kind)
        for each in self.ranks:
            if phase is not None:
                each.watchdog.phase(phase, allowed=600.0, mark=True)
            self.done_steps(each)
        self.now = draw.uniform(0.5, 10.0) * (script.kind == "build")  # that it takes
        for each in self.ranks:
            self.go_on(each, script.stops)
        if script.kind == "save":  # a save waits for all ranks beside the collectives of steps
            for each in self.ranks:
                each.waits = each.rank not in script.ranks
        self.now, self.parted = 10.0, bool(script.cut)
        began = self.now
        for each in self.ranks:
            each.stopped = each.rank in script.silent
            each.waits = each.waits or (each.rank in script.ranks and script.in_waiting_call)
            offset = draw.uniform(0, _TICK)
            # Two looks see the last progress and that it waits; then nothing happens for a while.
            for seconds in (offset, offset + _TICK):
                self.later(seconds, partial_look(each))
            self.later(offset + PATIENCE - _TICK, each.look)
        if script.back < END:
            self.later(script.back, self.go_back)
        self.run_until(began + END)

    def go_back(self) -> None:
        """Ranks that were slow or stopped go on, if they still may."""
        for rank in sorted(self.script.ranks):
            each = self.ranks[rank]
            each.stopped = False
            if each.alive:
                each.look()  # what is on the board is read before anything else, or soon after
            if each.alive:
                self.go_on(each, {})
        if not self.unfinished():
            self.finished = True  # the run has ended well, and its watchdogs with it

    def unfinished(self) -> list[int]:
        """Ranks that have not come to the end of the program."""
        lengths = [STEPS * len(each) for each in programs()]
        return [each.rank for each in self.ranks if each.issued < lengths[each.rank]]

    def done_steps(self, rank: SimulatedRank) -> None:
        """The steps before the fault, in which nothing waits."""
        for number in range(self.script.step):
            self.step(rank, number)
            for call in programs()[rank.rank]:
                rank.watchdog.note((call.axis, call.kind, 8, len(call.members)), call.members)

    def step(self, rank: SimulatedRank, number: int) -> None:
        rank.watchdog.phase(f"step {number + 1}", mark=True, alike=False)

    def go_on(self, first: SimulatedRank, stops: dict[int, int]) -> None:
        """Issue collectives until every rank waits, stops at its fault, or has done its steps."""
        ready = [first]
        while ready:
            rank = ready.pop()
            program = programs()[rank.rank]
            if not rank.alive or rank.issued >= stops.get(rank.rank, STEPS * len(program)):
                continue
            if self.script.kind == "save":
                continue
            call = program[rank.issued % len(program)]
            if rank.issued % len(program) == 0:
                self.step(rank, self.script.step + rank.issued // len(program))
            rank.watchdog.note((call.axis, call.kind, 8, len(call.members)), call.members)
            rank.issued, rank.waits = rank.issued + 1, True
            self._counts[rank.rank, call.key] += 1
            turn = call.key, self._counts[rank.rank, call.key]
            self._come[turn] += 1
            self._waiting.setdefault(turn, []).append(rank)
            crosses = self.parted and not self.script.cut.isdisjoint(call.members)
            if self._come[turn] == len(call.members) and not crosses:
                for each in self._waiting.pop(turn):
                    each.waits = False
                    ready.append(each)


def partial_look(rank: SimulatedRank) -> Callable[[], None]:
    """A look that is not repeated."""

    def look() -> None:
        if rank.alive and not rank.stopped:
            try:
                rank.watchdog.look()
            except dist.DistError as error:
                rank.world.later(_NO_ANSWER, partial(rank.give_up, error))
                rank.stopped = True

    return look

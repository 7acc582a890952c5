"""The ranks of a job under virtual time: each has the real `Watchdog`, with a clock that the
simulation moves, and its real log of collectives; they meet on one board.

A program of collectives (tp, cp, dp and messages of pp) runs until it can go no further. What
follows is decided by the code that runs in production: who judges, who is named, who leaves.
`control_scripts.py` has the faults and the rules. Judges may overlap: while one waits for answers
or decides, all else goes on (`virtual_time.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import floor, inf
from typing import Any, NamedTuple

import torch.distributed as dist

from fivefold.core.layout.layout import Layout
from fivefold.launch.watch.kv_messages import MemoryBoard
from fivefold.launch.watch.watchdog import PATIENCE, RankSurroundings, Record, Watchdog
from fivefold.launch.worker import Worker
from tests.virtual_time import VirtualTime

LAYOUT = "dp=8 tp=8 pp=4 cp=4"
WORLD, PER_HOST = 1024, 8
KINDS = ("death", "hang", "slow", "partition", "late", "two", "build", "save", "judge")
STEPS = 2  # of the program from the step of the fault on
END = 90.0  # virtual seconds after the fault
HANG_AFTER = 24.0  # of most scripts; none of them has the usual one, which nothing here outlasts
_TICK = PATIENCE / 10
_NO_ANSWER = 30.0 + PATIENCE / 4  # seconds until a rank without its store gives up


class Collective(NamedTuple):
    """One collective or message of a rank's program."""

    record: Record
    members: tuple[int, ...]

    @classmethod
    def of(cls, axis: str, kind: str, members: tuple[int, ...]) -> Collective:
        return cls((axis, kind, 8, len(members)), members)


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
        work = [Collective.of("tp", kind, groups["tp", rank]) for kind in ("gather", "scatter")]
        work.append(Collective.of("cp", "all_gather", groups["cp", rank]))
        step: list[Collective] = []
        for first, last in ((before, after), (after, before)):
            if first is not None:
                step.append(Collective.of("pp", "recv", (first, rank)))
            step += work
            if last is not None:
                step.append(Collective.of("pp", "send", (rank, last)))
        step += [Collective.of("dp", kind, groups["dp", rank]) for kind in ("scatter", "gather")]
        found.append(step)
    return found


@cache
def turns() -> tuple[list[list[int]], int]:
    """For every rank and collective of its steps a number: the same for all ranks that meet in it;
    and how many there are."""
    numbers: dict[Any, int] = {}
    found = list[list[int]]()
    for program in programs():
        counts: Counter[Any] = Counter()
        found.append([])
        for call in STEPS * program:
            group = call.record[0], call.members
            counts[group] += 1
            found[-1].append(numbers.setdefault((group, counts[group]), len(numbers)))
    return found, len(numbers)


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
    back: float = inf  # seconds after the fault at which they go on
    in_waiting_call: bool = False  # the stack of a rank that hangs looks like one that waits
    decides: float = 0.0  # seconds that a judge takes once the positions are there
    judge_stops: float = inf  # seconds after which the judge of the first round is stopped
    judge_back: float = inf  # and for how long
    hang_after: float = HANG_AFTER

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
        if draw.random() < 0.5:  # of full logs; and a judge has less than a core
            found.decides = draw.uniform(0.0, 20.0)
        if kind == "judge":
            found.judge_stops = draw.uniform(0.0, _TICK)
            found.judge_back = draw.choice((inf, draw.uniform(2.0, 40.0)))
        return found


class _Left(Exception):
    """A rank ends its process."""


class SimulatedWatchdog(Watchdog):
    """A watchdog that says when it need not look, and whose decisions take time."""

    def idle_until(self) -> float:
        """Looks before this time do nothing, unless the rank or the board changes."""
        if self._block and self._summed < self._round:
            return 0.0
        if self._published != self._seen or self._progress != self._seen:
            return 0.0
        return max(self._moved_at + self.patience, self._quiet_until)

    def _answers(self, wanted: set[int], limit: float) -> dict[int, dict[str, Any]]:
        found = super()._answers(wanted, limit)
        assert isinstance(self._around, SimulatedRank)
        if (seconds := self._around.world.script.decides) > 0:
            self._around.sleep(seconds)
        return found


class SimulatedRank(RankSurroundings):
    """A rank: its program, its watchdog, and what the watchdog sees of it."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.alive, self.stopped, self.waits = True, False, False
        self.looks, self.alone = False, False  # in this moment; without the board
        self.looked_at = 0.0
        self.issued = 0
        self.address, self.store = str(rank), ""
        self.watchdog = SimulatedWatchdog(
            Worker(rank, self, self.send), world.size, PATIENCE, self, world.script.hang_after
        )

    # What a watchdog reads of its process.
    def monotonic(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds)
        while self.stopped:
            self.world.sleep(_TICK)

    def stack(self) -> tuple[list[str], bool]:
        return [], self.waits

    def watch(self, task: Callable[[], None]) -> None:
        return None

    def probe(self, address: str) -> bool | None:
        """A rank whose watchdog never answers again is dead; one that comes back is stopped."""
        other = self.world.ranks[int(address)]
        cut = self.world.script.cut
        if self.world.parted and (self.rank in cut) != (other.rank in cut):
            return None
        return other.alive and not (other.stopped and self.world.never_back(other.rank))

    # The meeting of its worker.
    folder = None

    def join(self, rank: int, world: int, device: Any, timeout: Any = None) -> None:
        raise AssertionError("no process group here")

    def board(self, on_silence: Any) -> SimulatedBoard:
        return SimulatedBoard(self)

    def leave(self) -> None:
        raise _Left

    def send(self, kind: str, value: Any) -> None:
        if kind == "note":
            self.world.notes.append((self.rank, value))
        if kind == "lost":
            self.world.verdicts.append((self.rank, value[0]))
            raise _Left

    def look(self) -> bool:
        """What the thread of the watchdog does, once; whether it goes on."""
        if not self.alive or self.stopped or self.looks or self.alone or self.world.finished:
            return False
        self.looks = True
        try:
            self.watchdog.look()
        except _Left:
            self.alive = False
        except dist.DistError as error:
            self.alone = True
            self.world.later(_NO_ANSWER, partial(self.give_up, error))
        self.looks = False
        return self.alive and not self.alone

    def keep_looking(self) -> None:
        """A look after every tick, without those that do nothing."""
        if not self.look():
            return
        self.looked_at = self.world.now
        if (idle := self.watchdog.idle_until()) - self.looked_at > _TICK:
            self.world.parked[self.rank] = self
            self.world.later(self.next_look(idle), self.wake)
        else:
            self.world.later(_TICK, self.keep_looking)

    def next_look(self, time: float) -> float:
        """Seconds from now until the first look after a time."""
        looks = floor((time - self.looked_at) / _TICK) + 1
        return self.looked_at + looks * _TICK - self.world.now

    def wake(self) -> None:
        if self.world.parked.pop(self.rank, None):
            self.keep_looking()

    def stop(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        """Go on after a stop."""
        if self.stopped:
            self.stopped = False
            if self.rank not in self.world.parked:
                self.keep_looking()

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
        if self.rank.world.parted:
            self._reach()
        return self.texts.get(name)

    def claim(self, name: str, text: str) -> bool:
        self._reach()
        first = super().claim(name, text)
        if first:
            self.rank.world.changed()
            if name == "round-1":
                self.rank.world.judge_stops(self.rank)
        return first


class World(VirtualTime):
    """All ranks of a script, and the events to come."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script, self.parted, self.finished = script, False, False
        self.texts: dict[str, str] = {}
        self.verdicts: list[tuple[int, int]] = []  # who said it, and who is lost
        self.notes: list[tuple[int, str]] = []
        self.size = WORLD
        self.parked: dict[int, SimulatedRank] = {}  # that have no look before something changes
        self._waiting: list[list[SimulatedRank]] = [[] for _ in range(turns()[1])]
        self.ranks = [SimulatedRank(rank, self) for rank in range(WORLD)]

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
                self.later(seconds, each.look)
            self.later(offset + PATIENCE - _TICK, each.keep_looking)
        if script.back < END:
            self.later(script.back, self.go_back)
        self.run_until(began + END)

    def go_back(self) -> None:
        """Ranks that were slow or stopped go on, if they still may."""
        self.changed()
        for rank in sorted(self.script.ranks):
            each = self.ranks[rank]
            each.resume()
            each.look()  # what is on the board is read before anything else, or soon after
            if each.alive:
                self.go_on(each, {})
        if not self.unfinished():
            self.finished = True  # the run has ended well, and its watchdogs with it

    def changed(self) -> None:
        """All ranks look again: something has changed for them."""
        for each in self.parked.values():
            self.later(each.next_look(self.now), each.wake)

    def named(self) -> list[int]:
        """The ranks of which a note says that they stand still, in order."""
        return [int(text.split()[1]) for _, text in self.notes if text.startswith("rank ")]

    def never_back(self, rank: int) -> bool:
        """Whether a rank that is stopped stays so."""
        if rank in self.script.silent:
            return self.script.back > END
        return self.script.judge_back == inf

    def judge_stops(self, judge: SimulatedRank) -> None:
        """The judge of the first round is stopped in it, if the script says so."""
        if self.script.judge_stops < inf:
            self.script.ranks.add(judge.rank)
            self.later(self.script.judge_stops, judge.stop)
        if self.script.judge_back < inf:
            self.later(self.script.judge_stops + self.script.judge_back, judge.resume)

    def unfinished(self) -> list[int]:
        """Ranks that have not come to the end of the program."""
        lengths = [STEPS * len(each) for each in programs()]
        return [each.rank for each in self.ranks if each.issued < lengths[each.rank]]

    def done_steps(self, rank: SimulatedRank) -> None:
        """The steps before the fault, in which nothing waits."""
        for number in range(self.script.step):
            self.step(rank, number)
            for call in programs()[rank.rank]:
                rank.watchdog.note(call.record, call.members)

    def step(self, rank: SimulatedRank, number: int) -> None:
        rank.watchdog.phase(f"step {number + 1}", mark=True, alike=False)

    def go_on(self, first: SimulatedRank, stops: dict[int, int]) -> None:
        """Issue collectives until every rank waits, stops at its fault, or has done its steps."""
        if self.script.kind == "save":
            return
        ready, numbers = [first], turns()[0]
        while ready:
            rank = ready.pop()
            program, issued = programs()[rank.rank], rank.issued
            if not rank.alive or issued >= stops.get(rank.rank, STEPS * len(program)):
                continue
            call = program[issued % len(program)]
            if issued % len(program) == 0:
                self.step(rank, self.script.step + issued // len(program))
            rank.watchdog.note(call.record, call.members)
            rank.issued, rank.waits = issued + 1, True
            waiting = self._waiting[numbers[rank.rank][issued]]
            waiting.append(rank)
            if len(waiting) < len(call.members):
                continue
            if not self.parted or self.script.cut.isdisjoint(call.members):
                for each in waiting:
                    each.waits = False
                ready += waiting

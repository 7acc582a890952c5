"""What the control plane of a job costs, as a function of its ranks: docs/scale.md.

    python -m tests.scale > docs/scale.md

runs each activity with real processes and with simulated ones, and counts on each rank, and on the
busiest process, calls of the store (on the busiest: of all ranks), bytes to and from it, processor
seconds, open files and files written. An activity is a function of `ACTIVITIES` that takes the
number of ranks and returns its `Cost`. `test_scale.py` holds them to their budgets: no more than
O(log N) on a rank and O(N) on the busiest process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.watch.kv_messages import FAN, MemoryBoard, PaceRows, StoreBoard
from fivefold.launch.watch.watchdog import PATIENCE, RankSurroundings, Watchdog
from fivefold.launch.worker import LaunchedMeeting, Worker, agreement, look_seconds
from fivefold.records.stragglers import RankPace, slow_ones
from fivefold.train.callbacks.pace import exchange_steps

REAL, SIMULATED = (8, 16, 64, 128), (64, 1024, 16_384)
OPEN = Path("/proc/self/fd")
_SOON = 120.0  # seconds in which real processes are done
_LATE = 10.0  # seconds after which the last rank comes to the meeting
_SLACK = 1.5  # of a budget, for logarithms of small numbers and a clock


@dataclass
class Usage:
    """What one process uses."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0  # of a processor
    open_files: int = 0
    files: int = 0

    def count(self, *texts: str) -> None:
        """One call with these keys and values."""
        self.calls += 1
        self.bytes += sum(map(len, texts))


class Cost(NamedTuple):
    """An activity at a size: the most of any rank but the busiest ones, and these as one process.
    `says` is what the table adds."""

    rank: Usage
    busiest: Usage
    says: str = ""

    @classmethod
    def of(cls, usages: Sequence[Usage], busiest: Collection[int], says: str = "") -> Cost:
        """From all ranks; of the busiest ones, one hosts the store, and serves the calls of all."""
        others = [usage for rank, usage in enumerate(usages) if rank not in busiest]
        served = Usage(
            seconds=max(usages[rank].seconds for rank in busiest),
            open_files=max(usages[rank].open_files for rank in busiest),
            files=max(usages[rank].files for rank in busiest),
            calls=sum(usage.calls for usage in usages),
            bytes=sum(usage.bytes for usage in usages),
        )
        most = Usage(
            *(max(getattr(usage, name) for usage in others) for name in Usage.__annotations__)
        )
        return cls(most, served, says)


class CountedBoard(MemoryBoard):
    """A board of simulated ranks: calls as `StoreBoard` makes them."""

    def __init__(self, texts: dict[str, str], usage: Usage) -> None:
        self.texts, self.usage = texts, usage

    def put(self, name: str, text: str) -> None:
        self.usage.count(name, text)
        self.texts[name] = text

    def get(self, name: str) -> str | None:
        self.usage.count(name)
        if (text := self.texts.get(name)) is not None:
            self.usage.count(name, text)
        return text

    def claim(self, name: str, text: str) -> bool:
        self.usage.count(name, text)
        return self.texts.setdefault(name, text) is text


class CountedStore:
    """torch's store as ranks agree by it."""

    def __init__(self, usage: Usage, texts: dict[str, str]) -> None:
        self.usage, self.texts = usage, texts

    def set(self, name: str, text: str) -> None:
        self.usage.count(name, text)
        self.texts[name] = text

    def get(self, name: str) -> bytes:
        self.usage.count(name, self.texts[name])
        return self.texts[name].encode()

    def check(self, names: list[str]) -> bool:
        self.usage.count(*names)
        return all(name in self.texts for name in names)


# Meeting.


def meeting(world: int) -> Cost:
    """All ranks agree on the start; the last one comes late."""
    texts, usages = dict[str, str](), [Usage() for _ in range(world)]
    pause, clock = look_seconds(world), [0.0]
    agreeing = {
        rank: agreement(CountedStore(usage, texts), rank, world, lambda: clock[0])  # type: ignore[arg-type]
        for rank, usage in enumerate(usages)
    }
    prefixes = set[str]()
    while agreeing:
        for rank in list(agreeing):
            if rank == world - 1 and clock[0] < _LATE:
                continue
            began = time.process_time()
            try:
                next(agreeing[rank])
            except StopIteration as agreed:
                prefixes.add(agreed.value)
                del agreeing[rank]
            usages[rank].seconds += time.process_time() - began
        clock[0] += pause
    assert len(prefixes) == 1
    rate = sum(usage.calls for usage in usages) / clock[0]
    return Cost.of(
        usages, [0], f"{clock[0] - _LATE:.1f} s after the last rank; {rate:,.0f} calls/s"
    )


# The watch: ranks with real watchdogs and logs on one board.


@cache
def _groups(world: int) -> Callable[[int], list[tuple[str, tuple[int, ...]]]]:
    """The groups of a rank, in a grid of tp, dp and pp."""
    tp, pp = 8, max(1, min(16, world // 64))
    dp = world // (tp * pp)
    every = tuple(range(world))

    @cache
    def group(axis: str, first: int) -> tuple[int, ...]:
        step, count = {"tp": (1, tp), "dp": (tp, dp), "pp": (tp * dp, pp)}[axis]
        return tuple(range(first, first + step * count, step))

    def groups(rank: int) -> list[tuple[str, tuple[int, ...]]]:
        stage, inner = rank - rank % (tp * dp), rank % (tp * dp)
        return [
            ("tp", group("tp", rank - rank % tp)),
            ("dp", group("dp", stage + rank % tp)),
            ("pp", group("pp", inner)),
            ("world", every),
        ]

    return groups


class ScaledRank(RankSurroundings):
    """A rank of a simulated job, whose main thread waits."""

    folder, address, store = None, None, ""

    def __init__(self, rank: int, job: ScaledJob) -> None:
        self.rank, self.job, self.usage = rank, job, Usage()
        self.looks = False
        worker = Worker(rank, self, self.send)  # type: ignore[arg-type]
        self.watchdog = Watchdog(worker, job.world, PATIENCE, self)

    def monotonic(self) -> float:
        return self.job.now

    def sleep(self, seconds: float) -> None:
        self.job.tick(seconds)

    def stack(self) -> tuple[list[str], bool]:
        return ["  loop.py:7 train: wait()"], self.rank != self.job.guilty

    def watch(self, task: Callable[[], None]) -> None:
        return None

    def board(self, on_silence: Any) -> CountedBoard:
        return CountedBoard(self.job.texts, self.usage)

    def send(self, kind: str, value: Any) -> None:
        if kind == "note":
            self.job.notes.append(value)

    def look(self) -> None:
        """A look of the watchdog, without those of other ranks that it lets happen."""
        if not self.looks:
            self.looks = True
            began, before = time.process_time(), self.job.seconds
            self.watchdog.look()
            used = time.process_time() - began - (self.job.seconds - before)
            self.usage.seconds += used
            self.job.seconds += used
            self.looks = False


@dataclass
class ScaledJob:
    """All ranks of a simulated job."""

    world: int
    guilty: int = -1
    now: float = 100.0
    seconds: float = 0.0
    texts: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    ranks: list[ScaledRank] = field(default_factory=list[ScaledRank])

    @classmethod
    def of(cls, world: int) -> ScaledJob:
        job = cls(world, world // 3)
        job.ranks = [ScaledRank(rank, job) for rank in range(world)]
        return job

    def step(self, number: int, behind: bool = False) -> None:
        """A step of all ranks; the guilty one does not come to its last collective."""
        groups = _groups(self.world)
        for each in self.ranks:
            each.watchdog.phase(f"step {number}", mark=True, alike=False)
            for axis, members in groups(each.rank):
                if not (behind and axis == "world" and each.rank == self.guilty):
                    each.watchdog.note((axis, "all_reduce", 64, len(members)), members)

    def tick(self, seconds: float) -> None:
        """Time passes, and every rank looks once."""
        self.now += seconds
        for each in self.ranks:
            each.look()

    def take(self, *busiest: int, says: str = "") -> Cost:
        """What all ranks have used since the last call."""
        cost = Cost.of([each.usage for each in self.ranks], busiest, says)
        for each in self.ranks:
            each.usage.__init__()
        return cost


@cache
def watched(world: int) -> tuple[ScaledJob, Cost]:
    """A job after twelve seconds in which all is well, and what these have cost."""
    job = ScaledJob.of(world)
    gc.freeze()  # no process has the objects of all ranks
    job.take(0)
    for number in range(10):
        job.step(number + 1)
        job.tick(PATIENCE / 10)
    assert not job.notes
    return job, job.take(0, says="12 s of steps")


def watch(world: int) -> Cost:
    """The watchdogs while all is well."""
    return watched(world)[1]


def watch_round(world: int) -> Cost:
    """One rank stands still; one other asks all, and names it."""
    job, _ = watched(world)
    job.step(11, behind=True)
    job.tick(PATIENCE / 10)
    job.tick(PATIENCE / 10)
    job.take(0)
    job.now += PATIENCE
    began = job.now
    while "done-1" not in job.texts:
        job.tick(PATIENCE / 10)
    (note,) = job.notes
    assert note.startswith(f"rank {job.guilty} stands still at step 11"), note
    judge = int(job.texts["round-1"].split()[-1])
    return job.take(0, judge, says=f"named {job.now - began:.1f} s after it was missed")


def pace(world: int) -> Cost:
    """The rows of all ranks on their pace, and who is slow; every six steps."""
    groups, texts = _groups(world), dict[str, str]()
    usages = [Usage() for _ in range(world)]
    roles: dict[str, set[tuple[int, ...]]] = {"tp": set(), "dp": set()}
    for rank in range(world):
        for axis, members in groups(rank)[:2]:
            roles[axis].add(members)
    stage = len(groups(0)[0][1]) * len(groups(0)[1][1])
    rows = list[PaceRows]()
    for rank, usage in enumerate(usages):
        began = time.process_time()
        slow = 1.3 if rank == world // 3 else 1.0
        before = (rank - stage, rank)
        messages = [(0.01 * number, 0.01 * number + 0.004) for number in range(64)]
        local = RankPace(
            f"node-{rank // 8:04}",
            rank // stage,
            4.0 * slow * (1 + rank % 7 / 200),
            5.0,
            {role: [0.1 + rank % 5 / 1000] * 6 for role in ("tp", "dp", "pp", "world")},
            {("tp", "all_gather"): (1e-4, 512), ("tp", "reduce_scatter"): (1e-4, 512)},
            {(rank, rank + stage): [begun for begun, _ in messages]},
            {} if rank < stage else {before: messages},
            last=6,
        )
        last = min(rank + FAN, world)
        block = range(rank, last) if rank % FAN == 0 and world > FAN else range(0)
        row = PaceRows(CountedBoard(texts, usage), rank, range(world), block)
        row.share(local.to_row())
        rows.append(row)
        usage.seconds += time.process_time() - began
    gc.freeze()  # no process has the objects of all ranks
    for _ in range(3):
        for row, usage in zip(rows, usages, strict=True):
            began = time.process_time()
            row.look()
            usage.seconds += time.process_time() - began
    began = time.process_time()
    taken = rows[0].take()
    assert taken is not None
    paces = [RankPace.from_row(row) for row in taken]
    (found,) = slow_ones(paces, {role: sorted(each) for role, each in roles.items()}, {})
    usages[0].seconds += time.process_time() - began
    assert found.ranks == (world // 3,)
    steps = exchange_steps(world)
    share = usages[0].seconds / (5.0 * steps)
    return Cost.of(usages, [0], f"{share:.2%} of {steps} steps of 5 s")


# Real processes: ranks that meet over torch's store, watch one another, and name one that stops.


def _real_rank(rank: int, world: int, port: int, pipe: Any) -> None:
    usage, notes = Usage(), list[str]()
    launched = LauncherEnvironment(rank, world, rank, "127.0.0.1", port, local_world=world)

    def send(kind: str, value: Any) -> None:
        if kind == "note":
            notes.append(value)

    began, inherited = time.process_time(), len(list(OPEN.iterdir()))
    worker = Worker(rank, LaunchedMeeting(launched), send)
    inner = StoreBoard._answer

    def answer(self: StoreBoard, question: Any) -> Any:
        usage.calls += 1
        value = inner(self, question)
        usage.bytes += len(value) if isinstance(value, str) else 0
        return value

    StoreBoard._answer = answer  # type: ignore[method-assign]
    watchdog = Watchdog(worker, world, max(2.0, world / 16))  # of cores that all share
    watchdog.phase("step 1", mark=True, alike=False)
    members = tuple(range(world))
    if rank != world // 3:
        watchdog.note(("world", "all_reduce", 64, world), members)
    until, number = time.monotonic() + _SOON, 1
    while not (stall := watchdog.board.get(f"done-{number}")) and time.monotonic() < until:
        number += stall is not None  # the judge of this round has named nobody yet
        time.sleep(0.5)
    usage.seconds = time.process_time() - began
    usage.open_files = len(list(OPEN.iterdir())) - inherited
    pipe.send((usage, notes))
    pipe.recv()  # rank 0 hosts the store until all have told
    os._exit(0)


def real(world: int) -> Cost:
    """Real processes that meet, watch, and name the one that stands still."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = list[Any](), list[Any]()
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_real_rank, args=(rank, world, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = list[tuple[Usage, list[str]]]()
    for pipe in pipes:
        assert pipe.poll(_SOON), "a rank does not answer"
        answers.append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    judges = [rank for rank, (_, notes) in enumerate(answers) if notes]
    note = answers[judges[0]][1][0]
    assert note.startswith(f"rank {world // 3} stands still"), note
    return Cost.of([usage for usage, _ in answers], [0, *judges])


ACTIVITIES: dict[str, tuple[Callable[[int], Cost], tuple[int, ...]]] = {
    "meeting": (meeting, SIMULATED),
    "watch": (watch, SIMULATED),
    "round of positions": (watch_round, SIMULATED),
    "pace": (pace, SIMULATED),
    "real: meet and name": (real, REAL),
}
"""By name: what to run, and with how many ranks."""


def over_budget(name: str, costs: dict[int, Cost]) -> list[str]:
    """What grows faster than the logarithm on a rank, or than the ranks on the busiest process,
    from each size to the next; seconds below 50 ms are noise. Up to `FAN` ranks there is no
    tree."""
    problems: list[str] = []
    for small, large in pairwise(costs):
        if small <= FAN < large:
            continue
        for who, growth in (("rank", log2(large) / log2(small)), ("busiest", large / small)):
            before, after = getattr(costs[small], who), getattr(costs[large], who)
            for what in Usage.__annotations__:
                least = 0.05 if what == "seconds" else 16
                limit = _SLACK * growth * max(getattr(before, what), least)
                if getattr(after, what) > limit:
                    problems.append(
                        f"{name}, {who}: {getattr(after, what):g} {what} at {large} ranks, "
                        f"{getattr(before, what):g} at {small}, at most {limit:g}"
                    )
    return problems


def _row(name: str, world: int, cost: Cost) -> str:
    cells = [
        f"{usage.calls:,} | {usage.bytes / 1e3:,.1f} | {usage.seconds:.3f}"
        for usage in (cost.rank, cost.busiest)
    ]
    files = f"{cost.rank.open_files}, {cost.busiest.open_files} | {cost.busiest.files}"
    return f"| {name} | {world:,} | {' | '.join(cells)} | {files} | {cost.says} |"


def main() -> int:
    """Print the page."""
    print(Path(__file__).with_name("data").joinpath("scale.md").read_text("utf-8"))
    head = "calls | kB | CPU s"
    print(f"| activity | ranks | a rank: {head} | busiest: {head} | open files | written | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|")
    problems: list[str] = []
    for name, (activity, sizes) in ACTIVITIES.items():
        costs: dict[int, Cost] = {}
        for world in sizes:
            costs[world] = activity(world)
            print(_row(name, world, costs[world]), flush=True)
        problems += over_budget(name, costs)
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

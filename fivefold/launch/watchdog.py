"""What a rank has called so far, in memory that can outlive it.

A ring of the last calls and a count for each line, both of plain numbers in a mapped file: writing
costs well under a microsecond, and what a rank had called can be read when it has been killed. What
the numbers stand for is written to a second file whenever there is something new, which is rare.
Without a folder all of it stays in the process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.launch.hang import HangVerdict, IssuedCall, Line, Position, verdict
from fivefold.launch.worker import Board, Worker

_MOST_LINES = 1024  # groups and pairs of one rank
_REMEMBERED = 4096  # calls
_NUMBERS = 1 + _MOST_LINES + _REMEMBERED  # how many calls, how many of each line, the last of them
_UNEVEN = "all_to_all"  # each has its own size, and would be something new every time
_SAID = ("phase", "idle", "allowed", "waits", "stack")
_MESSAGES = ("pp", ("send", "recv"))

Record = tuple[str, str, int, int]
"""Axis, kind, bytes, size of the group."""


class Diary:
    """This rank's calls; `note` is what a mesh tells of them."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._names = None
        if folder is None:
            memory = mmap.mmap(-1, 8 * _NUMBERS)
        else:
            path = folder / f"calls-{rank}"
            path.write_bytes(bytes(8 * _NUMBERS))
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 8 * _NUMBERS)
            self._names = path.with_suffix(".names").open("w", encoding="utf-8")
        self._numbers = memoryview(memory).cast("Q")
        self._known: dict[tuple[Record, tuple[int, ...] | None], tuple[int, int]] = {}
        self._lines: dict[Line, int] = {}
        self._calls: list[IssuedCall] = []

    @property
    def num_calls(self) -> int:
        """All so far."""
        return self._numbers[0]

    def note(self, record: Record, members: tuple[int, ...]) -> None:
        """A collective or a message is about to be issued."""
        if record[1] == _UNEVEN:
            record = (*record[:2], 0, record[3])
        # Only pairs need their ranks to be told apart, and a large group is slow to hash.
        key = (record, members if len(members) == 2 else None)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._new(record, members)
        call, line = known
        numbers = self._numbers
        total = numbers[0]
        numbers[1 + _MOST_LINES + total % _REMEMBERED] = call
        numbers[1 + line] += 1
        numbers[0] = total + 1

    def written(self) -> dict[str, Any]:
        """All of it as a table."""
        return _table(self._numbers, [_row(call) for call in self._calls])

    def close(self) -> None:
        """Nothing is written any more."""
        if self._names is not None:
            self._names.close()

    def _new(self, record: Record, members: tuple[int, ...]) -> tuple[int, int]:
        axis, kind, size, _ = record
        line = Line(axis, members, axis == _MESSAGES[0] and kind in _MESSAGES[1])
        self._calls.append(call := IssuedCall(line, kind, size))
        at = self._lines.setdefault(line, len(self._lines))
        assert at < _MOST_LINES, "more groups than a diary has room for"
        if self._names is not None:
            self._names.write(json.dumps(_row(call)) + "\n")
            self._names.flush()
        return len(self._calls) - 1, at


def read(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank of this machine had written, dead or alive; None if it has not begun."""
    path = folder / f"calls-{rank}"
    try:
        numbers = memoryview(path.read_bytes()).cast("Q")
        names = path.with_suffix(".names").read_text("utf-8")
    except FileNotFoundError:
        return None
    return _table(numbers, [json.loads(line) for line in names.splitlines()])


def read_all(folder: Path, phases: Sequence[str]) -> dict[int, Position]:
    """Where the ranks of this machine stood that have called anything, given their phases."""
    tables = {rank: read(folder, rank) for rank in range(len(phases))}
    return {
        rank: position({**table, "phase": phases[rank]})
        for rank, table in tables.items()
        if table is not None
    }


def position(table: dict[str, Any]) -> Position:
    """A table, and what a rank has said beside it, as a value."""
    calls = [
        IssuedCall(Line(axis, tuple(members), messages), kind, size)
        for axis, members, messages, kind, size in table["calls"]
    ]
    lines = list(dict.fromkeys(call.line for call in calls))
    counts = dict(zip(lines, table["counts"], strict=True))
    trail = [calls[number] for number in table["trail"]]
    return Position(counts, trail, **{name: table[name] for name in _SAID if name in table})


def _row(call: IssuedCall) -> list[Any]:
    return [call.line.axis, list(call.line.members), call.line.messages, call.kind, call.size]


def _table(numbers: memoryview[int], calls: list[list[Any]]) -> dict[str, Any]:
    total = numbers[0]
    ring = numbers[1 + _MOST_LINES :]
    num_lines = len({(axis, tuple(members), messages) for axis, members, messages, _, _ in calls})
    return {
        "calls": calls,
        "counts": numbers[1 : 1 + num_lines].tolist(),
        "trail": [
            ring[number % _REMEMBERED] for number in range(max(0, total - _REMEMBERED), total)
        ],
    }


# Who hangs: a thread in every rank that watches whether the rank moves.
#
# A rank moves when it issues a collective or says what it does. One that has not moved for
# `patience` seconds calls all others to say where they stand: what they have called, what they
# are doing, and where their program is. The caller reads the answers and works out who keeps the
# others waiting (`core/hang.py`); then the run is over. A rank that does not answer is stopped or
# dead. One that answers, and that waits for nobody, may only be slow: it has twice the patience,
# or as long as it was allowed for something that is known to take long. With 12 seconds of
# patience all is over after 24 to 29.
#
# The thread needs nothing of the main thread, so that it answers while that waits in a collective
# or for a kernel; only a call that holds Python's lock makes a rank seem dead.


PATIENCE = 12.0  # seconds
_MEETING = 600.0  # seconds that ranks may take to come together
_LAST = 1 << 62  # the round of those who have come to their end
_FRAMES = 5  # innermost ones of a stack that are shown
# What the innermost lines of a rank have in them that waits for others, or may do so.
_WAITING = (
    "wait",
    "synchronize",
    ".item()",
    "float(",
    "barrier",
    "run_backward",
    "destroy_process",
)


class Watchdog:
    """Watches its own rank, and answers for it."""

    def __init__(self, worker: Worker, world: int, patience: float) -> None:
        self.worker, self.world, self.patience = worker, world, patience
        self.folder: Path | None = worker.meeting.folder
        self.board: Board = worker.meeting.board()
        self.diary = Diary(self.folder, worker.rank)
        self._tick = patience / 10
        self._phase, self._num_phases = "start", 0
        self._seen, self._moved_at = (0, 0), time.monotonic()
        self._allowed_until = time.monotonic() + _MEETING
        self._round, self._quiet_until = 0, 0.0
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def note(self, record: Record, members: tuple[int, ...]) -> None:
        """A collective is issued; what `Mesh.heard` calls."""
        self.diary.note(record, members)

    def phase(self, text: str, allowed: float = 0.0) -> None:
        """Say what comes now, and how many seconds it may take without a collective: more than the
        usual for what is known to take long, such as a compilation or a file."""
        self._phase = text
        self._allowed_until = time.monotonic() + allowed
        self._num_phases += 1
        self.worker.phase(text)

    def close(self) -> None:
        """Watch no more. Where this rank stands is left behind for those who still wait."""
        self._stop.set()
        self._thread.join(timeout=self.patience)
        self._phase = f"the end, after {self._phase}"
        # Whoever keeps the store may have ended first, and a disk may be full.
        with contextlib.suppress(dist.DistError, OSError):
            self._answer(_LAST)
        self.diary.close()

    @property
    def _moves(self) -> tuple[int, int]:
        return self.diary.num_calls, self._num_phases

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._tick):
                self._look()
        except OSError:
            return  # no room to leave word in: the run goes on without
        except dist.DistError as error:
            if not self._stop.wait(self.patience / 4):  # else it has ended, as this rank has
                cause = f"keeps the store, or its launcher does, and that is gone ({error})"
                self.worker.lose(HangVerdict(0, "an unknown place", cause))

    def _look(self) -> None:
        now = time.monotonic()
        if self._moves != self._seen:
            self._seen, self._moved_at = self._moves, now
            self.board.put(f"phase-{self.worker.rank}", self._phase)
        if self.board.get("verdict") is not None:
            self._stop.set()
            self.worker.meeting.leave()
            return
        name = f"round-{self._round + 1}"
        called = self.board.get(name) is not None
        stands = now - max(self._moved_at, self._allowed_until) >= self.patience
        judges = (
            not called
            and stands
            and now >= self._quiet_until
            and self.board.claim(name, str(self.worker.rank))
        )
        if called or judges:
            self._round += 1
            self._quiet_until = now + 0.6 * self.patience
            self._answer(self._round)
        if judges:
            self._judge()

    def _answer(self, number: int) -> None:
        """Say where this rank stands."""
        now = time.monotonic()
        stack, waits = _stack(self._main)
        table = {
            "round": number,
            "phase": self._phase,
            "idle": inf if number == _LAST else now - self._moved_at,
            "allowed": self._allowed_until - now,
            "waits": waits,
            "stack": stack,
            **self.diary.written(),
        }
        self.board.put(f"rank-{self.worker.rank}", json.dumps(table))

    def _judge(self) -> None:
        """Read the answers, and end the run where somebody is to blame."""
        positions = self._answers()
        silent = set(range(self.world)) - set(positions)
        if self.folder is not None:  # what ranks of this machine have called is known without them
            tables = {rank: read(self.folder, rank) for rank in silent}
            positions |= {rank: position(table) for rank, table in tables.items() if table}
        found = verdict(positions, silent, 2 * self.patience)
        if found is not None and found.rank in silent:
            last = self.board.get(f"phase-{found.rank}")
            found = replace(found, doing=f"{last}, or soon after" if last else found.doing)
        # Who moves meanwhile was waiting for somebody slow.
        stands = self._moves == self._seen and not self._stop.is_set()
        if found is not None and stands and self.board.claim("verdict", str(found)):
            self.worker.lose(found)

    def _answers(self) -> dict[int, Position]:
        """Where ranks stand that answer in time."""
        until, found = time.monotonic() + self.patience / 2, dict[int, Position]()
        while len(found) < self.world and time.monotonic() < until:
            for rank in set(range(self.world)) - set(found):
                table = json.loads(self.board.get(f"rank-{rank}") or "{}")
                if table.get("round", 0) >= self._round:
                    found[rank] = position(table)
            time.sleep(self._tick / 10)
        return found


@contextmanager
def watched(worker: Worker, world: int, patience: float = PATIENCE) -> Iterator[Watchdog]:
    """A watchdog for as long as ranks work together."""
    watchdog = Watchdog(worker, world, patience)
    try:
        yield watchdog
    finally:
        watchdog.close()


def _stack(thread: int) -> tuple[list[str], bool]:
    """The innermost places of a thread's program, outermost first and without torch's own, and
    whether it waits for others there, or may do so."""
    frame = sys._current_frames().get(thread)
    places = [] if frame is None else traceback.extract_stack(frame)
    inner = [each.line or "" for each in places[-_FRAMES:]]
    ours = [each for each in places if f"{os.sep}torch{os.sep}" not in each.filename]
    shown = [f"  {each.filename}:{each.lineno} {each.name}: {each.line}" for each in ours]
    return shown[-_FRAMES:], any(word in line for line in inner for word in _WAITING)

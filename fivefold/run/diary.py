"""What a rank has called so far, in memory that can outlive it.

A ring of the last calls and a count for each line, both of plain numbers in a mapped file: writing
costs well under a microsecond, and what a rank had called can be read when it has been killed. What
the numbers stand for is written to a second file whenever there is something new, which is rare.
Without a folder all of it stays in the process.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.core.hang import Call, Line, Position

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
        self._calls: list[Call] = []

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
        self._calls.append(call := Call(line, kind, size))
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
        Call(Line(axis, tuple(members), messages), kind, size)
        for axis, members, messages, kind, size in table["calls"]
    ]
    lines = list(dict.fromkeys(call.line for call in calls))
    counts = dict(zip(lines, table["counts"], strict=True))
    trail = [calls[number] for number in table["trail"]]
    return Position(counts, trail, **{name: table[name] for name in _SAID if name in table})


def _row(call: Call) -> list[Any]:
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

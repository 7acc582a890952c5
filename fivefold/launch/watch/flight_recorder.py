"""A log of the collectives of a rank, as plain numbers in a memory-mapped file.

It is a ring buffer of the last ones and a count for each group. A log entry takes well under a
microsecond, and the log of a killed rank can still be read. A second file says what the numbers
mean; it grows only when a new kind of collective appears. Without a folder the log stays in the
process.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.launch.watch.positions import CommGroup, LoggedCollective, Position

_MOST_GROUPS = 1024  # groups and pairs of one rank
_RING = 4096  # the last collectives
_NUMBERS = 1 + _MOST_GROUPS + _RING  # total, count of each group, ring buffer
_UNEVEN = "all_to_all"  # its size changes every time, so the log leaves it out
_MESSAGES = ("pp", ("send", "recv"))
_STATE = (
    "phase",
    "idle",
    "allowed",
    "waits",
    "stack",
    "mark",
    "within",
    "worked",
    "took",
    "usual",
    "alike",
)

Record = tuple[str, str, int, int]
"""Axis, kind, bytes, size of the group."""


class FlightRecorder:
    """Log of the collectives that this rank issues."""

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
        self._groups: dict[CommGroup, int] = {}
        self._kinds: list[LoggedCollective] = []

    @property
    def num_calls(self) -> int:
        """Number of logged collectives."""
        return self._numbers[0]

    def note(self, record: Record, members: tuple[int, ...]) -> None:
        """Log a collective, send or receive before it is issued."""
        if record[1] == _UNEVEN:
            record = (*record[:2], 0, record[3])
        # Only pairs differ by their ranks, and a large group is slow to hash.
        key = (record, members if len(members) == 2 else None)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._new(record, members)
        kind, group = known
        numbers = self._numbers
        total = numbers[0]
        numbers[1 + _MOST_GROUPS + total % _RING] = kind
        numbers[1 + group] += 1
        numbers[0] = total + 1

    def table(self) -> dict[str, Any]:
        """Convert the log to JSON."""
        return _table(self._numbers, [_row(kind) for kind in self._kinds])

    def close(self) -> None:
        """Close the file of names, and stop logging."""
        if self._names is not None:
            self._names.close()

    def _new(self, record: Record, members: tuple[int, ...]) -> tuple[int, int]:
        axis, kind, size, _ = record
        group = CommGroup(axis, members, axis == _MESSAGES[0] and kind in _MESSAGES[1])
        self._kinds.append(call := LoggedCollective(group, kind, size))
        at = self._groups.setdefault(group, len(self._groups))
        assert at < _MOST_GROUPS, "more groups than the log has room for"
        if self._names is not None:
            try:
                self._names.write(json.dumps(_row(call)) + "\n")
                self._names.flush()
            except OSError:  # a full disk: the log of this rank can only be read while it lives
                self._names = None
        return len(self._kinds) - 1, at


def read_log(folder: Path, rank: int) -> dict[str, Any] | None:
    """Read the log of a rank on this machine, alive or not; None if there is none."""
    path = folder / f"calls-{rank}"
    try:
        numbers = memoryview(path.read_bytes()).cast("Q")
        names = path.with_suffix(".names").read_text("utf-8")
    except FileNotFoundError:
        return None
    return _table(numbers, [json.loads(line) for line in names.splitlines()])


def read_positions(folder: Path, phases: Sequence[str]) -> dict[int, Position]:
    """Read the positions of local ranks with a log, given their phases."""
    tables = {rank: read_log(folder, rank) for rank in range(len(phases))}
    return {
        rank: position_from({**table, "phase": phases[rank]})
        for rank, table in tables.items()
        if table is not None
    }


def position_from(table: dict[str, Any]) -> Position:
    """Position of a rank, from the tables of its log and state."""
    kinds = [
        LoggedCollective(CommGroup(axis, tuple(members), is_pair), kind, size)
        for axis, members, is_pair, kind, size in table["calls"]
    ]
    groups = list(dict.fromkeys(call.group for call in kinds))
    counts = dict(zip(groups, table["counts"], strict=True))
    trail = [kinds[number] for number in table["trail"]]
    return Position(counts, trail, **{name: table[name] for name in _STATE if name in table})


def _row(call: LoggedCollective) -> list[Any]:
    return [call.group.axis, list(call.group.members), call.group.is_pair, call.kind, call.size]


def _table(numbers: memoryview[int], calls: list[list[Any]]) -> dict[str, Any]:
    total = numbers[0]
    ring = numbers[1 + _MOST_GROUPS :]
    num_groups = len({(axis, tuple(members), is_pair) for axis, members, is_pair, _, _ in calls})
    return {
        "calls": calls,
        "counts": numbers[1 : 1 + num_groups].tolist(),
        "trail": [ring[number % _RING] for number in range(max(0, total - _RING), total)],
    }

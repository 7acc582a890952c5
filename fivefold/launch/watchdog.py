"""Notice that ranks hang, and find out which rank is to blame.

`FlightRecorder` logs the collectives of a rank: a ring buffer of the last ones and a count for each
group, as plain numbers in a memory-mapped file. A log entry takes well under a microsecond, and the
log of a killed rank can still be read. A second file says what the numbers mean; it grows only when
a new kind of collective appears. Without a folder the log stays in the process.

`Watchdog` is a thread in every rank. A rank makes progress when it issues a collective or begins a
phase. A rank without progress for `patience` seconds starts a round: every rank writes its position
to the board, that is its log, its phase and its stack. The rank that started the round reads the
positions and decides which rank keeps the others waiting (`hang.py`). Then the run is over. A rank
that does not answer is stopped or dead. A rank that answers and waits for no other may be slow: it
has twice the patience, or the limit of its phase. With 12 seconds of patience a hang is reported
after 24 to 29 seconds.

The thread needs nothing from the main thread, so it answers while the main thread waits in a
collective or for a kernel. Only a call that holds Python's lock makes a rank look dead.

Over NCCL the hosts issue ahead of their GPUs. Where ranks have waited long enough and the hosts do
not tell who is to blame, a second round asks for torch's record of NCCL's calls
(`device_calls.py`). Reading it can block a process whose CUDA driver is blocked. So all other ranks
read theirs first, and a process that does not return from it ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.launch.device_calls import (
    DeviceProgress,
    from_table,
    on_device,
    progress_from,
    role_of,
    to_table,
)
from fivefold.launch.hang import CommGroup, HangVerdict, LoggedCollective, Position, verdict
from fivefold.launch.worker import Board, Worker

PATIENCE = 12.0  # seconds
_MOST_GROUPS = 1024  # groups and pairs of one rank
_RING = 4096  # the last collectives
_NUMBERS = 1 + _MOST_GROUPS + _RING  # total, count of each group, ring buffer
_UNEVEN = "all_to_all"  # its size changes every time, so the log leaves it out
_STATE = ("phase", "idle", "allowed", "waits", "stack")
_MESSAGES = ("pp", ("send", "recv"))
_MEETING = 600.0  # seconds in which the ranks must meet
_LAST = 1 << 62  # the round of ranks that have ended
_OF_HOSTS, _OF_DEVICES = "hosts of", "devices of"  # what a round asks for, and whose it is
_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer name first
_NUM_RECORDS = 10_000  # more than the calls that a host issues ahead
_FRAMES = 5  # innermost frames of a stack that are shown
# If one of these is in the innermost frames, the rank waits, or may wait, for other ranks.
_WAITING = (
    "wait",
    "synchronize",
    ".item()",
    "float(",
    "barrier",
    "run_backward",
    "destroy_process",
)

Record = tuple[str, str, int, int]
"""Axis, kind, bytes, size of the group."""


class FlightRecorder:
    """A log of the collectives that this rank issues."""

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
        """Collectives so far."""
        return self._numbers[0]

    def note(self, record: Record, members: tuple[int, ...]) -> None:
        """Log a collective, send or receive that is about to be issued."""
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
        """The log as a JSON table."""
        return _table(self._numbers, [_row(kind) for kind in self._kinds])

    def close(self) -> None:
        """Close the file of names; nothing is logged after this."""
        if self._names is not None:
            self._names.close()

    def _new(self, record: Record, members: tuple[int, ...]) -> tuple[int, int]:
        axis, kind, size, _ = record
        group = CommGroup(axis, members, axis == _MESSAGES[0] and kind in _MESSAGES[1])
        self._kinds.append(call := LoggedCollective(group, kind, size))
        at = self._groups.setdefault(group, len(self._groups))
        assert at < _MOST_GROUPS, "more groups than the log has room for"
        if self._names is not None:
            self._names.write(json.dumps(_row(call)) + "\n")
            self._names.flush()
        return len(self._kinds) - 1, at


def read_log(folder: Path, rank: int) -> dict[str, Any] | None:
    """The log of a rank on this machine, dead or alive; None if it has none yet."""
    path = folder / f"calls-{rank}"
    try:
        numbers = memoryview(path.read_bytes()).cast("Q")
        names = path.with_suffix(".names").read_text("utf-8")
    except FileNotFoundError:
        return None
    return _table(numbers, [json.loads(line) for line in names.splitlines()])


def read_positions(folder: Path, phases: Sequence[str]) -> dict[int, Position]:
    """The positions of the ranks on this machine that have a log, given their phases."""
    tables = {rank: read_log(folder, rank) for rank in range(len(phases))}
    return {
        rank: position_from({**table, "phase": phases[rank]})
        for rank, table in tables.items()
        if table is not None
    }


def position_from(table: dict[str, Any]) -> Position:
    """The position of a rank, from the table of its log and of its state."""
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


class Watchdog:
    """Watches its own rank, and answers for it in a round."""

    def __init__(self, worker: Worker, world: int, patience: float) -> None:
        self.worker, self.world, self.patience = worker, world, patience
        self.folder: Path | None = worker.meeting.folder
        self.board: Board = worker.meeting.board()
        self.recorder = FlightRecorder(self.folder, worker.rank)
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
        """Log a collective that this rank is about to issue."""
        self.recorder.note(record, members)

    def phase(self, text: str, allowed: float = 0.0) -> None:
        """Begin a phase. `allowed` are the seconds it may take without a collective, for phases
        that are known to be slow, such as compilation or a checkpoint."""
        self._phase = text
        self._allowed_until = time.monotonic() + allowed
        self._num_phases += 1
        self.worker.phase(text)

    def step_took(self, seconds: float) -> None:
        """Set the patience to at least two steps of this length."""
        self.patience = max(PATIENCE, 2 * seconds)

    def close(self) -> None:
        """Stop watching, and leave the last position for ranks that still wait."""
        self._stop.set()
        self._thread.join(timeout=self.patience)
        self._phase = f"the end, after {self._phase}"
        # The host of the store may have ended first, and a disk may be full.
        with contextlib.suppress(dist.DistError, OSError):
            self._answer(_LAST)
        self.recorder.close()

    @property
    def _progress(self) -> tuple[int, int]:
        return self.recorder.num_calls, self._num_phases

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._tick):
                self._look()
        except OSError:
            return  # the board cannot be written: the run goes on without a watchdog
        except dist.DistError as error:
            if not self._stop.wait(self.patience / 4):  # else this rank has ended too
                cause = f"hosts the store, or its launcher does, and the store is gone ({error})"
                self.worker.lose(HangVerdict(0, "an unknown place", cause))

    def _look(self) -> None:
        now = time.monotonic()
        if self._progress != self._seen:
            self._seen, self._moved_at = self._progress, now
            self.board.put(f"phase-{self.worker.rank}", self._phase)
        if self.board.get("verdict") is not None:
            self._stop.set()
            self.worker.meeting.leave()
            return
        name = f"round-{self._round + 1}"
        asked = self.board.get(name)
        stuck = now - max(self._moved_at, self._allowed_until) >= self.patience
        due = asked is None and stuck and now >= self._quiet_until
        judges = due and self.board.claim(name, f"{_OF_HOSTS} {self.worker.rank}")
        if asked is not None or judges:
            self._round += 1
            self._quiet_until = now + 0.6 * self.patience
            of_device = asked is not None and asked.startswith(_OF_DEVICES)
            self._answer(self._round, self._device() if of_device else None)
        if judges:
            self._judge()

    def _answer(self, number: int, device: DeviceProgress | None = None) -> None:
        """Write the position of this rank to the board."""
        now = time.monotonic()
        stack, waits = _stack(self._main)
        table = {
            "round": number,
            "phase": self._phase,
            "idle": inf if number == _LAST else now - self._moved_at,
            "allowed": self._allowed_until - now,
            "waits": waits,
            "stack": stack,
            "device": to_table(device),
            **self.recorder.table(),
        }
        self.board.put(f"rank-{self.worker.rank}", json.dumps(table))

    def _judge(self) -> None:
        """Read the positions, and end the run if a rank is to blame."""
        answers = self._answers(set(range(self.world)))
        positions = {rank: position_from(table) for rank, table in answers.items()}
        silent = set(range(self.world)) - set(positions)
        if self.folder is not None:  # logs on this machine can be read without their ranks
            tables = {rank: read_log(self.folder, rank) for rank in silent}
            positions |= {rank: position_from(table) for rank, table in tables.items() if table}
        by_device = partial(self._on_device, positions, set(answers) - {self.worker.rank})
        found = verdict(positions, silent, 2 * self.patience, by_device)
        if found is not None and found.rank in silent:
            last = self.board.get(f"phase-{found.rank}")
            found = replace(found, doing=f"{last}, or soon after" if last else found.doing)
        # Progress in the meantime means that a rank was only slow.
        stuck = self._progress == self._seen and not self._stop.is_set()
        if found is not None and stuck and self.board.claim("verdict", str(found)):
            self.worker.lose(found)

    def _on_device(self, positions: dict[int, Position], others: set[int]) -> HangVerdict | None:
        """Ask for torch's records of NCCL's calls, and decide by them which rank is to blame."""
        name, text = f"round-{self._round + 1}", f"{_OF_DEVICES} {self.worker.rank}"
        if _reader() is None or not self.board.claim(name, text):
            return None
        self._round += 1
        tables = {rank: table["device"] for rank, table in self._answers(others).items()}
        devices = {rank: from_table(tables.get(rank)) for rank in range(self.world)}
        return on_device(positions, devices | {self.worker.rank: self._device()})

    def _device(self) -> DeviceProgress | None:
        """The progress of the GPU of this rank, or None if it cannot be read."""
        trace = _device_trace(2 * self.patience)
        return None if trace is None else progress_from(trace, _groups())

    def _answers(self, wanted: set[int]) -> dict[int, dict[str, Any]]:
        """The tables of the ranks that answer in time."""
        until, found = time.monotonic() + self.patience / 2, dict[int, dict[str, Any]]()
        while len(found) < len(wanted) and time.monotonic() < until:
            for rank in wanted - set(found):
                table = json.loads(self.board.get(f"rank-{rank}") or "{}")
                if table.get("round", 0) >= self._round:
                    found[rank] = table
            time.sleep(self._tick / 10)
        return found


@contextmanager
def _watching(worker: Worker, world: int, patience: float) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(worker, world, patience)) as watchdog:
        yield watchdog


def watched(
    worker: Worker, world: int, patience: float = PATIENCE
) -> AbstractContextManager[Watchdog]:
    """A watchdog while ranks work together. If this is called before they join, torch's record of
    NCCL's calls is long enough, unless the user has set its length."""
    if not any(name in os.environ for name in _RECORDS):
        os.environ[_RECORDS[0]] = str(_NUM_RECORDS)
    return _watching(worker, world, patience)


def _reader() -> Callable[..., bytes] | None:
    """torch's function that dumps its record of NCCL's calls, where ranks use NCCL."""
    if not dist.is_initialized() or dist.get_backend() != dist.Backend.NCCL:
        return None
    return getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)


def _device_trace(limit: float) -> bytes | None:
    """torch's record of this rank. It asks CUDA for the state of events and holds Python's lock
    meanwhile: after `limit` seconds the stacks are printed and this process ends."""
    reader = _reader()
    if reader is None:
        return None
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    try:
        return reader(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    except RuntimeError:
        return None
    finally:
        faulthandler.cancel_dump_traceback_later()


def _groups() -> dict[str, CommGroup]:
    """The groups of this rank by torch's names."""
    return {
        group.group_name: CommGroup(
            role_of(group.group_name, group.group_desc),
            tuple(dist.get_process_group_ranks(group)),
        )
        for group in list(dist.distributed_c10d._world.pg_names)
    }


def _stack(thread: int) -> tuple[list[str], bool]:
    """The innermost frames of a thread, without those of torch, outermost first; and whether the
    thread waits, or may wait, for other ranks."""
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else traceback.extract_stack(frame)
    inner = [each.line or "" for each in frames[-_FRAMES:]]
    ours = [each for each in frames if f"{os.sep}torch{os.sep}" not in each.filename]
    shown = [f"  {each.filename}:{each.lineno} {each.name}: {each.line}" for each in ours]
    return shown[-_FRAMES:], any(word in line for line in inner for word in _WAITING)

"""Notice that ranks hang, say soon which rank is to blame, and end the run late.

`Watchdog` is a thread in every rank, from before the ranks meet. A rank makes progress when it
issues a collective or begins a phase. A rank without progress for `patience` seconds starts a
round: every rank writes its position to the board, that is the newest of its collectives
(`FlightRecorder`), its phase and its stack. Of every `FAN` ranks the first sums up the positions,
and the rank that started the round reads these sums and decides which rank keeps the others waiting
(`hang.py`, `phases.py`). That rank is named at once, in a note and in the records.

The run ends where waiting cannot help: a rank's process or host is gone, or ranks have issued
different collectives. Else it goes on until the rank has stood still for `hang_after` seconds, and
for as long as its phase may take: data, a disk or a store that is late, and a process that was
stopped, come back. A rank that does not answer is gone if its host refuses a connection, or cannot
be reached: the kernel of a stopped process still takes connections. A rank that is alone judges
itself. A judge does not answer while it decides, so the next round is asked once it is done, or
after twice the patience.

The thread needs nothing from the main thread, so it answers while the main thread waits in a
collective or for a kernel. Only a call that holds Python's lock makes a rank look stopped. A kernel
that is loaded is such a call: the driver may wait for everything on the GPU, also for a message of
another rank that compiles. So a rank may be silent for `patience` seconds before it is named, and
in a phase that loads kernels for as long as the phase may take. If the board cannot be written,
because the temporary folder is full, the thread says so once and tries again.

Over NCCL the hosts issue ahead of their GPUs. Where the hosts do not tell who is to blame, a round
before the end asks for torch's record of NCCL's calls (`device_calls.py`). Reading it can block a
process whose CUDA driver is blocked. So all other ranks read theirs first, and a process that does
not return from it ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
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
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.launch import CUT_OFF, Worker
from fivefold.launch.watch.device_calls import (
    DeviceProgress,
    from_table,
    on_device,
    progress_from,
    role_of,
    to_table,
)
from fivefold.launch.watch.hang import verdict
from fivefold.launch.watch.kv_messages import (
    FAN,
    Board,
    MemoryBoard,
    PaceRows,
    Probes,
    joined_rows,
)
from fivefold.launch.watch.phases import START
from fivefold.launch.watch.positions import (
    SAVE_THREAD,
    CommGroup,
    HangVerdict,
    LoggedCollective,
    Position,
    group_text,
    parse_group,
)

# What a watchdog reads of its process: the clock, and where the main thread stands.

_FRAMES = 5  # innermost frames of a stack that are shown
_INNERMOST = 2  # of a thread that saves, whose outer ones wait for what it does
_READINGS = 5  # of a stack, until one is whole
# If one of these is in the innermost frames, the rank waits, or may wait, for other ranks.
_WAITING = (
    "wait",
    "synchronize",
    ".item()",
    "float(",
    "barrier",
    "run_backward",
    "destroy_process",
    "ProcessGroup",
    "process_group",
    "rendezvous",
)
_JOINS = "thread.join("  # the main thread waits for threads that save


class RankSurroundings:
    """Clock, stack and thread of a rank. Tests replace them by a simulated clock, and call `look`
    instead of the thread."""

    def __init__(self) -> None:
        self._main, self._probes = threading.get_ident(), Probes()

    def monotonic(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep while other ranks answer."""
        time.sleep(seconds)

    def stack(self) -> tuple[list[str], bool]:
        """Frames of the main thread, and whether it waits for other ranks."""
        return _stack(self._main)

    def probe(self, address: str) -> bool | None:
        """Whether a process is there; None if its host cannot be reached."""
        return self._probes(address)

    def watch(self, task: Callable[[], None]) -> threading.Thread | None:
        """Start the watchdog's thread."""
        thread = threading.Thread(target=task, name="watchdog", daemon=True)
        thread.start()
        return thread


def _stack(thread: int) -> tuple[list[str], bool]:
    """The innermost frames of a thread, without those of torch, outermost first; and whether the
    thread waits, or may wait, for other ranks. If it waits for threads that save, theirs count.

    The thread goes on while its frames are read, and one that has ended in between has no code any
    more. That must not end the thread that watches: it reads them again.
    """
    for _ in range(_READINGS):
        with contextlib.suppress(AttributeError):
            return _read_stack(thread)
    return [], True


def _read_stack(thread: int) -> tuple[list[str], bool]:
    frames = sys._current_frames()
    shown, waits, joins = _frames(frames.get(thread))
    if joins:
        saving = [
            save_thread.ident
            for save_thread in threading.enumerate()
            if save_thread.name == SAVE_THREAD
        ]
        for frame in (frames[ident] for ident in saving if ident in frames):
            lines, theirs, joins = _frames(frame, _INNERMOST)
            if not theirs and not joins:
                return lines, False
    return shown, waits


def _frames(frame: FrameType | None, num_read: int = _FRAMES) -> tuple[list[str], bool, bool]:
    """The innermost frames, whether they wait, and whether they wait for threads."""
    frames = [] if frame is None else traceback.extract_stack(frame)
    inner = [inner_frame.line or "" for inner_frame in frames[-num_read:]]
    ours = [own_frame for own_frame in frames if f"{os.sep}torch{os.sep}" not in own_frame.filename]
    shown = [
        f"  {own_frame.filename}:{own_frame.lineno} {own_frame.name}: {own_frame.line}"
        for own_frame in ours
    ]
    waits = any(word in line for line in inner for word in _WAITING)
    return shown[-_FRAMES:], waits, any(_JOINS in line for line in inner)


# A log of the collectives of a rank, as plain numbers in a memory-mapped file.
#
# It is a ring buffer of the last ones and a count for each group. A log entry takes well under a
# microsecond, and the log of a killed rank can still be read. A second file says what the numbers
# mean; it grows only when a new kind of collective appears. Without a folder the log stays in the
# process.

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

_Row = tuple[str, str, int]
"""A group as text, kind, bytes: what a number of the log means."""


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
        self._rows: list[_Row] = []

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

    def table(self, length: int = _RING) -> dict[str, Any]:
        """Convert the counts and the newest collectives to JSON."""
        return _table(self._numbers, self._rows, length)

    def close(self) -> None:
        """Close the file of names, and stop logging."""
        if self._names is not None:
            self._names.close()

    def _new(self, record: Record, members: tuple[int, ...]) -> tuple[int, int]:
        axis, kind, size, _ = record
        group = CommGroup(axis, members, axis == _MESSAGES[0] and kind in _MESSAGES[1])
        self._rows.append(row := (group_text(group), kind, size))
        at = self._groups.setdefault(group, len(self._groups))
        assert at < _MOST_GROUPS, "more groups than the log has room for"
        if self._names is not None:
            try:
                self._names.write(json.dumps(row) + "\n")
                self._names.flush()
            except OSError:  # a full disk: the log of this rank can only be read while it lives
                self._names = None
        return len(self._rows) - 1, at


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
    groups = [parse_group(text) for text in table["groups"]]
    counts = dict(zip(groups, table["counts"], strict=True))
    kinds = [LoggedCollective(groups[at], kind, size) for at, kind, size in table["kinds"]]
    trail = [kinds[number] for number in table["trail"]]
    return Position(counts, trail, **{name: table[name] for name in _STATE if name in table})


def _table(numbers: memoryview[int], rows: Sequence[_Row], length: int = _RING) -> dict[str, Any]:
    total, ring = numbers[0], numbers[1 + _MOST_GROUPS :]
    groups = list(dict.fromkeys(group for group, _, _ in rows))
    first = max(0, total - min(length, _RING))
    trail = [ring[number % _RING] for number in range(first, total)]
    kinds = {number: at for at, number in enumerate(dict.fromkeys(trail))}
    number_of = {group: at for at, group in enumerate(groups)}
    return {
        "groups": groups,
        "counts": numbers[1 : 1 + len(groups)].tolist(),
        "kinds": [[number_of[rows[number][0]], *rows[number][1:]] for number in kinds],
        "trail": [kinds[number] for number in trail],
    }


PATIENCE = 12.0  # seconds without progress before all ranks are asked
HANG_AFTER = 600.0  # seconds without progress before the run is ended: NCCL's own limit
_NUM_CALLS = 1 << 18  # of all ranks together that a judge reads
_LEAST_CALLS = 32  # of each
_LOOKS = 4  # ticks from one look at the board to the next, while a rank makes progress
_MOST_PAUSE = 30.0  # seconds between rounds
_UNREACHABLE = 30.0  # seconds after which a store or a rank that the network has lost is gone
_PROBED = 8  # silent ranks, of which one may be gone
_MEETING = 600.0  # seconds in which the ranks must meet
_LAST = 1 << 62  # the round of ranks that have ended
_OF_HOSTS, _OF_DEVICES = "hosts of", "devices of"  # what a round asks for, and whose it is
_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer name first
_NUM_RECORDS = 10_000  # more than the calls that a host issues ahead
_MARKS = 4  # the last ones whose times are told


class Watchdog:
    """Watches its own rank, and takes part in rounds of all ranks."""

    def __init__(
        self,
        worker: Worker,
        world: int,
        patience: float,
        surroundings: RankSurroundings | None = None,
        hang_after: float = HANG_AFTER,
    ) -> None:
        self.worker, self.patience, self.hang_after = worker, patience, hang_after or inf
        self._around = surroundings or RankSurroundings()
        # A process that is compared with the ranks has a number of its own.
        self.members = range(world) if world > 1 else range(worker.rank, worker.rank + 1)
        self.folder: Path | None = worker.meeting.folder
        self._stop = threading.Event()
        self._unreached: dict[int, float] = {}  # since when a silent rank cannot be reached
        self._said, self._store_said = False, False
        self.board: Board = worker.meeting.board(self._store_silent) if world > 1 else MemoryBoard()
        self.recorder = FlightRecorder(self.folder if world > 1 else None, worker.rank)
        first = worker.rank - worker.rank % FAN
        block = self.members[first : first + FAN]
        # The ranks whose rows this one sums up; in a small job all rows are read one by one.
        self._block = block if world > FAN and worker.rank == first else range(0)
        self._summed, self._looks, self._published = 0, 0, (0, 0)
        self._tick = patience / 10
        self._phase, self._num_phases = START, 0
        self._mark, self._mark_at, self._took = 0, self._around.monotonic(), dict[str, float]()
        self._kind, self._usual = START, dict[str, float]()
        self._worked: float | None = None
        self._alike = True
        self._seen, self._moved_at = (0, 0), self._around.monotonic()
        self._allowed_until = self._around.monotonic() + min(_MEETING, self.hang_after)
        self._loads = False
        self._round, self._quiet_until, self._open_until = 0, 0.0, 0.0
        self._round_began = dict[int, float]()
        self._heard, self._stalls = 0, dict[int, tuple[str, float]]()
        self.pace = PaceRows(self.board, worker.rank, self.members, self._block)
        if worker.meeting.address is not None and world > 1:
            self.board.put(f"address-{worker.rank}", worker.meeting.address)
        self._thread = self._around.watch(self._watch)

    def note(self, record: Record, members: tuple[int, ...]) -> None:
        """Log a collective before it is issued."""
        self.recorder.note(record, members)

    def phase(
        self,
        text: str,
        allowed: float = 0.0,
        mark: bool = False,
        alike: bool = True,
        loads_kernels: bool = False,
    ) -> None:
        """Begin a phase. `allowed`: seconds it may take without a collective, for phases known to
        be slow, such as compilation or a checkpoint, unless more is known of it. All ranks reach a
        `mark` in the same order, and do the same there if it is `alike`. A phase that
        `loads_kernels` may be as long without an answer of its rank."""
        time_now = self._around.monotonic()
        self._phase, self._loads = text, loads_kernels
        self._allowed_until = time_now + allowed
        if mark:
            self._took[str(self._mark)] = took = time_now - self._mark_at
            self._took.pop(str(self._mark - _MARKS), None)
            self._usual[self._kind] = max(took, self._usual.get(self._kind, 0.0))
            self._mark, self._mark_at, self._worked = self._mark + 1, time_now, None
            self._kind, self._alike = _kind(text), alike
        elif allowed:  # what others took since the mark tells nothing of it
            self._alike = False
        self._num_phases += 1
        self.worker.phase(text)

    def stalls(self) -> list[tuple[int, str, float]]:
        """Ranks that stood still since the last call, what they did, and for how many seconds; the
        first rank knows."""
        time_now, stalls, self._stalls = self._around.monotonic(), self._stalls, {}
        return [(rank, doing, time_now - since) for rank, (doing, since) in stalls.items()]

    def step_took(self, seconds: float) -> None:
        """Raise the patience to at least two steps of this length."""
        self.patience = max(PATIENCE, 2 * seconds)

    def close(self) -> None:
        """Stop watching, and publish the last position for ranks that still wait."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
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
                try:
                    self.look()
                except OSError as error:
                    self._say(error)
        except dist.DistError as error:
            if not self._stop.wait(self.patience / 4):  # else this rank has ended too
                self.lose_store(error)

    def _store_silent(self, seconds: float) -> None:
        """Wait on for a store that is silent; raises if it is gone, or silent for too long."""
        # One of these two ranks is not the host of the store. More would only fill its queue: they
        # are told by an error where its process has ended, and by the end of these ranks.
        probes = self.worker.rank in (self.members[0], self.members[-1])
        reached = not probes or self._around.probe(self.worker.meeting.store)
        limit = self.hang_after if reached else _UNREACHABLE if reached is None else 0.0
        if self._stop.is_set() or seconds >= limit:
            raise dist.DistNetworkError(f"no answer for {seconds:.0f} s")
        if probes and not self._store_said:
            self._store_said = True
            self.worker.note(
                f"the store at {self.worker.meeting.store} has not answered rank "
                f"{self.worker.rank} for {seconds:.0f} s; {self._outlook}"
            )

    @property
    def _outlook(self) -> str:
        if self.hang_after == inf:
            return "the run goes on (hang_after = 0)"
        return f"the run goes on, and ends after {self.hang_after:.0f} s (hang_after)"

    def lose_store(self, error: dist.DistError) -> None:
        """End the run after the store was lost."""
        cause = f"hosts the store, or its launcher does, and the store is gone ({error})"
        self.worker.send(CUT_OFF, None)
        self.worker.lose(HangVerdict(0, "an unknown place", cause))

    def _say(self, error: OSError) -> None:
        """Say once that the board cannot be written; it is tried again."""
        if not self._said:
            self._said, reason = True, error.strerror or str(error)
            self.worker.report(
                f"the watchdog of rank {self.worker.rank} cannot write to {self.folder} "
                f"({reason}): make room there, or set TMPDIR; until then it names no rank that "
                "hangs"
            )

    def look(self) -> None:
        """Check this rank and the board, periodically."""
        time_now, silence = self._around.monotonic(), 0.0
        moved = self._progress != self._seen
        if moved:
            self._seen, self._moved_at, self._worked = self._progress, time_now, None
            silence = max(0.0, self._allowed_until - time_now) if self._loads else 0.0
        elif not self._around.stack()[1]:
            self._worked = None
        elif self._worked is None:
            self._worked = time_now - self._mark_at
        # Thousands of ranks that are well leave the store alone.
        self._looks += 1
        if moved and not silence and self._looks % _LOOKS != 1:
            return
        if self._published != self._seen:
            self._published = self._seen
            self.board.put(f"phase-{self.worker.rank}", f"{silence:.0f} {self._phase}")
        if self.board.get("verdict") is not None:
            self._stop.set()
            self.worker.meeting.leave()
            return
        self._hear()
        name = f"round-{self._round + 1}"
        request = self.board.get(name)
        stuck = time_now - self._moved_at >= self.patience
        due = request is None and stuck and time_now >= self._quiet_until and self._closed(time_now)
        judges = due and self.board.claim(name, f"{_OF_HOSTS} {self.worker.rank}")
        if request is not None or judges:
            self._begin_round(time_now)
            self._quiet_until = next_round(time_now, self._moved_at, self.patience, self.hang_after)
            self._open_until = time_now + 2 * self.patience
            of_device = request is not None and request.startswith(_OF_DEVICES)
            self._answer(self._round, self._device() if of_device else None)
        if judges:
            stall = self._judge()
            self.board.put(f"done-{self._round}", stall)
        elif self._block and self._summed < self._round:
            self._sum_up()
        if not stuck:
            self.pace.look()

    def _sum_up(self) -> None:
        """Put the rows of this rank's block together, once they are there or late."""
        rows = {rank: row for rank in self._block if (row := self._answer_of(rank)) is not None}
        began = self._round_began[self._round]
        if len(rows) == len(self._block) or self._around.monotonic() - began > self.patience / 4:
            self._summed = self._round
            self.board.put(f"rows-{self._block[0] // FAN}", f"{self._round} {joined_rows(rows)}")

    def _hear(self) -> None:
        """Let the first rank know what the judge of the last round has named, for the records."""
        if self.worker.rank != self.members[0] or self._heard == self._round:
            return
        if (text := self.board.get(f"done-{self._round}")) is not None:
            self._heard = self._round
            if text:
                stall = json.loads(text)
                since = self._around.monotonic() - stall["waited"]
                before = self._stalls.get(stall["rank"], ("", since))[1]
                self._stalls[stall["rank"]] = (stall["doing"], min(since, before))

    def _begin_round(self, time_now: float) -> None:
        self._round += 1
        self._round_began[self._round] = time_now

    def _closed(self, time_now: float) -> bool:
        """Whether the judge of the last round is done, or has had as long as any rank."""
        return time_now >= self._open_until or self.board.get(f"done-{self._round}") is not None

    def _answer(self, number: int, device: DeviceProgress | None = None) -> None:
        """Write the position of this rank to the board."""
        time_now = self._around.monotonic()
        stack, waits = self._around.stack()
        ended = number == _LAST
        table = {
            "phase": self._phase,
            "mark": self._mark,
            "within": time_now - self._mark_at,
            "worked": None if ended else self._worked,
            "took": self._took,
            "alike": self._alike,
            "usual": self._usual.get(self._kind, 0.0),
            "idle": inf if ended else time_now - self._moved_at,
            "allowed": self._allowed_until - time_now,
            "waits": waits,
            "stack": stack[-1:] if waits and len(self.members) > FAN else stack,
            "device": to_table(device),
            **self.recorder.table(max(_LEAST_CALLS, _NUM_CALLS // len(self.members))),
        }
        # The round comes first: of many ranks, answers to earlier rounds are not parsed.
        self.board.put(f"rank-{self.worker.rank}", f"{number} {json.dumps(table)}")

    def _judge(self) -> str:
        """Read the positions; end the run if a rank is to blame and waiting does not help. Returns
        the rank that stands still otherwise, as JSON."""
        answers = self._answers(set(self.members), self.patience / 2)
        positions = {rank: position_from(table) for rank, table in answers.items()}
        silent = set(self.members) - set(positions)
        if self.folder is not None:  # logs on this machine can be read without their ranks
            tables = {rank: read_log(self.folder, rank) for rank in silent}
            positions |= {rank: position_from(table) for rank, table in tables.items() if table}
        gone = next((rank for rank in self._probed(sorted(silent)) if self._is_gone(rank)), None)
        excused = {rank for rank in silent if self._may_be_silent(rank)}
        if gone is not None:
            excused = silent - {gone}
        over = self._around.monotonic() - self._moved_at >= self.hang_after
        by_device = partial(self._on_device, positions, set(answers) - {self.worker.rank})
        hang = verdict(
            positions, silent, self.patience, by_device if over else lambda: None, excused
        )
        if hang is None:
            return ""
        if hang.rank in silent:
            if self._answer_of(hang.rank) is not None:
                return ""  # it is back: the next round tells more
            last = self._last_phase(hang.rank)[1]
            hang = replace(hang, doing=f"{last}, or soon after" if last else hang.doing)
        # Progress in the meantime means that a rank was only slow.
        if self._progress != self._seen or self._stop.is_set():
            return ""
        position = None if hang.rank in silent else positions.get(hang.rank)
        if not (hang.final or hang.rank == gone or self._is_over(hang.rank, position)):
            return self._name(hang)
        if self.board.claim("verdict", str(hang)):
            self.worker.lose(hang)
        return ""

    def _probed(self, silent: Sequence[int]) -> Sequence[int]:
        """The silent ranks that are probed in this round: others than in the last one."""
        first = self._round * _PROBED % max(1, len(silent))
        return [*silent[first:], *silent[:first]][:_PROBED]

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of a silent rank has ended, or the network has lost its host for so
        long that no message was merely dropped."""
        address = self.board.get(f"address-{rank}")
        reached = address is None or self._around.probe(address)
        if reached is not None:
            self._unreached.pop(rank, None)
            return not reached
        time_now = self._around.monotonic()
        return time_now - self._unreached.setdefault(rank, time_now) >= _UNREACHABLE

    def _is_over(self, rank: int, position: Position | None) -> bool:
        """Whether a rank has stood still for too long; without a position it does not answer."""
        if position is not None:
            return position.allowed <= 0 and position.idle >= self.hang_after
        time_now = self._around.monotonic()
        # This rank may have been stopped itself.
        silence = time_now - self._missed_at(rank) + self.patience
        return min(silence, time_now - self._moved_at) >= self.hang_after

    def _name(self, hang: HangVerdict) -> str:
        """Say which rank stands still: at first, and each time that it takes twice as long."""
        before = json.loads(self.board.get(f"done-{self._round - 1}") or "{}")
        waited = self._around.monotonic() - self._moved_at
        noted = before.get("noted", inf) if before.get("rank") == hang.rank else inf
        if not noted <= waited < 2 * noted:
            noted = waited
            self.worker.note(
                f"rank {hang.rank} stands still at {hang.doing}; {self._outlook}. It {hang.cause}"
            )
        stall = {"rank": hang.rank, "doing": hang.doing, "waited": waited, "noted": noted}
        return json.dumps(stall)

    def _on_device(self, positions: dict[int, Position], targets: set[int]) -> HangVerdict | None:
        """Ask for torch's records of NCCL's calls, and decide by them which rank is to blame."""
        name, text = f"round-{self._round + 1}", f"{_OF_DEVICES} {self.worker.rank}"
        if _reader() is None or not self.board.claim(name, text):
            return None
        self._begin_round(self._around.monotonic())
        # A process that has not read its record by then ends itself: until then it is only slow.
        answers = self._answers(targets, 2 * self.patience)
        tables = {rank: table["device"] for rank, table in answers.items()}
        devices = {rank: from_table(tables.get(rank)) for rank in self.members}
        return on_device(positions, devices | {self.worker.rank: self._device()})

    def _device(self) -> DeviceProgress | None:
        """The progress of the GPU of this rank, or None if it cannot be read."""
        trace = _device_trace(2 * self.patience)
        return None if trace is None else progress_from(trace, _groups())

    def _answers(self, targets: set[int], limit: float) -> dict[int, dict[str, Any]]:
        """The tables of the ranks that answer within a limit of seconds. Those that no other rank
        has summed up are read after that: this rank may have been stopped itself."""
        until, answers = self._around.monotonic() + limit, dict[int, dict[str, Any]]()
        single, pause = len(self.members) <= FAN, self._tick / 10
        while True:
            last = self._around.monotonic() >= until
            missing = targets - answers.keys()
            for block in () if single else sorted({rank // FAN for rank in missing}):
                number, _, rows = (self.board.get(f"rows-{block}") or "0").partition(" ")
                if int(number) >= self._round:
                    answers |= {int(rank): table for rank, table in json.loads(rows).items()}
            # Nobody sums up the block of a judge.
            for rank in missing if single or last else missing & set(self._block):
                if rank not in answers and (table := self._answer_of(rank)) is not None:
                    answers[rank] = json.loads(table)
            if last or answers.keys() >= targets:
                return {rank: table for rank, table in answers.items() if rank in targets}
            self._around.sleep(pause)
            pause = min(2 * pause, self._tick / 2)

    def _answer_of(self, rank: int) -> str | None:
        """What a rank has answered in this round, or None."""
        number, table = self._last_answer(rank)
        return table if number >= self._round else None

    def _last_answer(self, rank: int) -> tuple[int, str]:
        """The last round that a rank has answered, and what."""
        number, _, table = (self.board.get(f"rank-{rank}") or "0").partition(" ")
        return int(number), table

    def _last_phase(self, rank: int) -> tuple[float, str]:
        """The seconds that a rank may be silent in its last known phase, and that phase."""
        silence, _, phase = (self.board.get(f"phase-{rank}") or "0 ").partition(" ")
        return float(silence), phase

    def _missed_at(self, rank: int) -> float:
        """On the clock of this rank: when it heard of the first round that another has missed."""
        missed = self._last_answer(rank)[0] + 1
        return self._round_began.get(missed, self._around.monotonic())

    def _may_be_silent(self, rank: int) -> bool:
        """Whether a rank that does not answer has been silent for no longer than it may."""
        silence = self._around.monotonic() - self._missed_at(rank)
        return silence < max(self.patience, self._last_phase(rank)[0])


@contextmanager
def _watching(worker: Worker, world: int, patience: float, hang_after: float) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(worker, world, patience, hang_after=hang_after)) as watchdog:
        yield watchdog


def watched(
    worker: Worker, world: int, patience: float = PATIENCE, hang_after: float = HANG_AFTER
) -> AbstractContextManager[Watchdog]:
    """Context with a watchdog, which ends the run after `hang_after` seconds; 0: never.

    If entered before ranks join, torch's NCCL record is long enough, unless the user has set its
    length.
    """
    if not any(name in os.environ for name in _RECORDS):
        os.environ[_RECORDS[0]] = str(_NUM_RECORDS)
    return _watching(worker, world, patience, hang_after)


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


def next_round(time_now: float, moved_at: float, patience: float, hang_after: float) -> float:
    """When a rank may start another round: less often the longer it waits, and when the run may
    end, so that the verdict is not much delayed."""
    waited, end = time_now - moved_at, moved_at + hang_after
    usual = time_now + min(max(0.6 * patience, waited / 4), _MOST_PAUSE)
    if time_now >= end:  # a rank that moved a little later is not over yet
        return min(usual, time_now + 0.6 * patience)
    return min(usual, max(end, time_now + 0.2 * patience))


def _kind(text: str) -> str:
    """A phase without its numbers: the same is done again and again."""
    return re.sub(r"\d+", "", text)

"""Notice that ranks hang, and find out which rank is to blame.

`Watchdog` is a thread in every rank, from before the ranks meet. A rank makes progress when it
issues a collective or begins a phase. A rank without progress for `patience` seconds starts a
round: every rank writes its position to the board, that is the log of its collectives
(`flight_recorder.py`), its phase and its stack. The rank that started the round reads the positions
and decides which rank keeps the others waiting (`hang.py`, `phases.py`). Then the run is over. A
rank that does not answer is stopped or dead. A rank that answers and waits for no other may be
slow: it has twice the patience, or twice the usual time of its phase. With 12 seconds of patience a
hang is reported after 24 to 29 seconds. A rank that is alone judges itself. A judge does not answer
while it decides, so the next round is asked once it is done, or after twice the patience.

The thread needs nothing from the main thread, so it answers while the main thread waits in a
collective or for a kernel. Only a call that holds Python's lock makes a rank look dead. A kernel
that is loaded is such a call: the driver may wait for everything on the GPU, also for a message of
another rank that compiles. So a rank may be silent for `patience` seconds, and in a phase that
loads kernels for as long as the phase may take. If the board cannot be written, because the
temporary folder is full, the thread says so once and tries again.

Over NCCL the hosts issue ahead of their GPUs. Where ranks have waited long enough and the hosts do
not tell who is to blame, a second round asks for torch's record of NCCL's calls
(`device_calls.py`). Reading it can block a process whose CUDA driver is blocked. So all other ranks
read theirs first, and a process that does not return from it ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
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
from fivefold.launch.watch.flight_recorder import FlightRecorder, Record, position_from, read_log
from fivefold.launch.watch.hang import verdict
from fivefold.launch.watch.kv_messages import Board, MemoryBoard
from fivefold.launch.watch.phases import START
from fivefold.launch.watch.positions import CommGroup, HangVerdict, Position
from fivefold.launch.watch.rank_surroundings import RankSurroundings

PATIENCE = 12.0  # seconds
_MEETING = 600.0  # seconds in which the ranks must meet
_LAST = 1 << 62  # the round of ranks that have ended
_OF_HOSTS, _OF_DEVICES = "hosts of", "devices of"  # what a round asks for, and whose it is
_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer name first
_NUM_RECORDS = 10_000  # more than the calls that a host issues ahead
_MARKS = 16  # the last ones whose times are told


class Watchdog:
    """Watches its own rank, and takes part in rounds of all ranks."""

    def __init__(
        self,
        worker: Worker,
        world: int,
        patience: float,
        surroundings: RankSurroundings | None = None,
    ) -> None:
        self.worker, self.patience = worker, patience
        self._around = surroundings or RankSurroundings()
        # A process that is compared with the ranks has a number of its own.
        self.members = range(world) if world > 1 else range(worker.rank, worker.rank + 1)
        self.folder: Path | None = worker.meeting.folder
        self.board: Board = worker.meeting.board() if world > 1 else MemoryBoard()
        self.recorder = FlightRecorder(self.folder if world > 1 else None, worker.rank)
        self._tick = patience / 10
        self._phase, self._num_phases = START, 0
        self._mark, self._mark_at, self._took = 0, self._around.monotonic(), dict[str, float]()
        self._kind, self._usual = START, dict[str, float]()
        self._worked: float | None = None
        self._alike = True
        self._seen, self._moved_at = (0, 0), self._around.monotonic()
        self._allowed_until = self._around.monotonic() + _MEETING
        self._said = False
        self._loads = False
        self._round, self._quiet_until, self._open_until = 0, 0.0, 0.0
        self._round_began = dict[int, float]()
        self._stop = threading.Event()
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
        time_now = self._around.monotonic()
        if self._progress != self._seen:
            self._seen, self._moved_at, self._worked = self._progress, time_now, None
            silence = max(0.0, self._allowed_until - time_now) if self._loads else 0.0
            self.board.put(f"phase-{self.worker.rank}", f"{silence:.0f} {self._phase}")
        elif not self._around.stack()[1]:
            self._worked = None
        elif self._worked is None:
            self._worked = time_now - self._mark_at
        if self.board.get("verdict") is not None:
            self._stop.set()
            self.worker.meeting.leave()
            return
        name = f"round-{self._round + 1}"
        request = self.board.get(name)
        stuck = time_now - self._moved_at >= self.patience
        due = request is None and stuck and time_now >= self._quiet_until and self._closed(time_now)
        judges = due and self.board.claim(name, f"{_OF_HOSTS} {self.worker.rank}")
        if request is not None or judges:
            self._begin_round(time_now)
            self._quiet_until = next_round(time_now, self._moved_at, self.patience)
            self._open_until = time_now + 2 * self.patience
            of_device = request is not None and request.startswith(_OF_DEVICES)
            self._answer(self._round, self._device() if of_device else None)
        if judges:
            self._judge()
            self.board.put(f"done-{self._round}", str(self.worker.rank))

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
            "stack": stack,
            "device": to_table(device),
            **self.recorder.table(),
        }
        # The round comes first: of many ranks, answers to earlier rounds are not parsed.
        self.board.put(f"rank-{self.worker.rank}", f"{number} {json.dumps(table)}")

    def _judge(self) -> None:
        """Read the positions, and end the run if a rank is to blame."""
        answers = self._answers(set(self.members), self.patience / 2)
        positions = {rank: position_from(table) for rank, table in answers.items()}
        silent = set(self.members) - set(positions)
        if self.folder is not None:  # logs on this machine can be read without their ranks
            tables = {rank: read_log(self.folder, rank) for rank in silent}
            positions |= {rank: position_from(table) for rank, table in tables.items() if table}
        by_device = partial(self._on_device, positions, set(answers) - {self.worker.rank})
        excused = {rank for rank in silent if self._may_be_silent(rank)}
        hang = verdict(positions, silent, 2 * self.patience, by_device, excused)
        if hang is not None and hang.rank in silent:
            if self._answer_of(hang.rank) is not None:
                return  # it is back: the next round tells more
            last = self._last_phase(hang.rank)[1]
            hang = replace(hang, doing=f"{last}, or soon after" if last else hang.doing)
        # Progress in the meantime means that a rank was only slow.
        stuck = self._progress == self._seen and not self._stop.is_set()
        if hang is not None and stuck and self.board.claim("verdict", str(hang)):
            self.worker.lose(hang)

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
        """The tables of the ranks that answer within a limit of seconds. They are read once more
        after that: this rank may have been stopped itself."""
        until, answers = self._around.monotonic() + limit, dict[int, dict[str, Any]]()
        while True:
            last = self._around.monotonic() >= until
            for rank in targets - set(answers):
                if (table := self._answer_of(rank)) is not None:
                    answers[rank] = json.loads(table)
            if last or len(answers) == len(targets):
                return answers
            self._around.sleep(self._tick / 10)

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

    def _may_be_silent(self, rank: int) -> bool:
        """Whether a rank that does not answer has been silent for no longer than it may."""
        time_now = self._around.monotonic()
        # On the clock of this rank: when it heard of the first round that the other has missed.
        since = self._round_began.get(self._last_answer(rank)[0] + 1, time_now)
        return time_now - since < max(self.patience, self._last_phase(rank)[0])


@contextmanager
def _watching(worker: Worker, world: int, patience: float) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(worker, world, patience)) as watchdog:
        yield watchdog


def watched(
    worker: Worker, world: int, patience: float = PATIENCE
) -> AbstractContextManager[Watchdog]:
    """Context with a watchdog. If entered before ranks join, torch's NCCL record is long enough,
    unless the user has set its length."""
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


def next_round(time_now: float, moved_at: float, patience: float) -> float:
    """When a rank may start another round. A slow rank gets twice the patience, and then more
    frequent rounds, so that the verdict is not much delayed."""
    usual, deadline = time_now + 0.6 * patience, moved_at + 2 * patience
    return (
        min(usual, max(deadline, time_now + 0.2 * patience))
        if time_now < 1.5 * patience + deadline
        else usual
    )


def _kind(text: str) -> str:
    """A phase without its numbers: the same is done again and again."""
    return re.sub(r"\d+", "", text)

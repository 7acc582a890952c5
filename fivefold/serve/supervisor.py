"""The keeper of an engine: a process that forks its ranks, and others if one of them dies.

It is forked before the server opens anything and handles signals, and does nothing else. So ranks
that are forked later inherit no socket of a client, no thread and no signal of it either. It
ends with the server, and its ranks end with it.

Every rank says that it lives after each step, and how long its next silence may be. An engine that
is silent for longer is lost: a stopped rank keeps all others waiting.

An engine that was up and has lost a rank is started again, after a pause that doubles, at most so
many times; after an hour of service the count begins anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from fivefold.core import RankLost
from fivefold.generate import RefusedTask, TaskWarning
from fivefold.launch import Pool, die_with
from fivefold.serve.rank import EngineUp, RankBeat, ServeTask, serve_rank

_PATIENCE_S = 600.0  # of a step, or of reading weights
_MISSED_BEATS = 20  # of each other rank: about as many seconds
_PAUSE_S = 0.5  # before the first new start
_LONG_S = 3600.0


@dataclass(frozen=True)
class RanksForked:
    """Process ids of an engine."""

    pids: list[int]


@dataclass(frozen=True)
class EngineEnd:
    """An engine has ended: the reason if it was unexpected, whether a rank refused the task, and
    the number of its next start, 0 if none."""

    reason: str | None = None
    refused: bool = False
    again: int = 0


class EngineKeeper:
    """The supervisor of an engine, as the server sees it."""

    def __init__(self, task: ServeTask, restarts: int, peers: list[EngineKeeper]) -> None:
        """Forks it; `others` were forked before, and their pipes are not for this one."""
        self.task, self.pids = task, list[int]()
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        inherited = [self.pipe, *(peer.pipe for peer in peers)]
        self.process = context.Process(
            target=_keep, args=(task, restarts, theirs, inherited, os.getpid())
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.process.start()
        theirs.close()

    def hear(self, on_end: Callable[[EngineEnd], None], on_warning: Callable[[str], None]) -> bool:
        """Handle a message; returns whether more may follow."""
        try:
            while self.pipe.poll():
                value = self.pipe.recv()
                if isinstance(value, RanksForked):
                    self.pids = value.pids
                elif isinstance(value, TaskWarning):
                    on_warning(value.reason)
                else:
                    on_end(value)
                    if not value.again:
                        return False
        except (EOFError, OSError):
            on_end(EngineEnd("its keeper was killed"))
            return False
        return True

    def no_more(self) -> None:
        """Do not restart it."""
        with contextlib.suppress(OSError):
            self.pipe.send("no more")

    def kill(self) -> None:
        """Kill it and its ranks."""
        for pid in (*self.pids, self.process.pid or 0):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)


def _keep(
    task: ServeTask, restarts: int, pipe: Connection, inherited: list[Connection], parent: int
) -> None:
    die_with(parent)
    for connection in inherited:
        connection.close()
    used, was_up = 0, False
    while True:
        _ignore_signals()
        began = time.monotonic()
        attempt = _OneStart(pipe)
        end = attempt.run(replace(task, start=task.start + used))
        was_up |= attempt.was_up
        if time.monotonic() - began > _LONG_S:
            task, used = replace(task, start=task.start + used), 0
        starts = end.reason is not None and was_up and used < restarts
        pipe.send(replace(end, again=used + 1 if starts else 0))
        # A message of the server, or its end, means that it wants no more.
        if not starts or pipe.poll(_PAUSE_S * 2**used):
            return
        used += 1


def _ignore_signals() -> None:
    """A signal to all processes is for the server, which drains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class _OneStart:
    """Ranks of an engine between a start and its end."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.was_up = pipe, False
        self._refused: list[str] = []
        self._patience: dict[int, float] = {}  # by rank
        self._missed: Counter[int] = Counter()  # signs of life of others since the last of a rank
        self._pool: Pool | None = None
        self._computing = _PATIENCE_S  # that ranks may be silent while they compute

    def run(self, task: ServeTask) -> EngineEnd:
        world, reason = task.text.plan.layout.world, None
        try:
            # With `forwards_stop` ranks live through a signal to all processes.
            with Pool(world, _PATIENCE_S, forwards_stop=True) as pool:
                _ignore_signals()
                self._pool = pool
                # A CPU's step may be much longer than any before; a GPU's ranks spin as they wait.
                self._computing = _PATIENCE_S if task.text.device == "cpu" else 0.0
                self.pipe.send(RanksForked(pool.pids))
                pool.run_each([(serve_rank, (task,))] * world, on_report=self._on_report)
        except RankLost as lost:
            reason = lost.reason
        except Exception as error:  # whatever it is, the server has to know
            reason = f"{type(error).__name__}: {error}"
        refused = bool(self._refused)
        return EngineEnd(self._refused[0] if refused else reason, refused)

    def _on_report(self, value: Any) -> None:
        if isinstance(value, RefusedTask):
            self._refused.append(value.reason)
        elif isinstance(value, TaskWarning):
            self.pipe.send(value)
        elif isinstance(value, EngineUp):
            self.was_up = True
        elif isinstance(value, RankBeat) and self._pool is not None:
            self._on_beat(value, self._pool)

    def _on_beat(self, beat: RankBeat, pool: Pool) -> None:
        """Set how long all ranks may be silent; raises `RankLost` where one is and the others are
        not, as in an engine that has nothing to do."""
        self._patience[beat.rank] = beat.patience
        known = len(self._patience) == pool.size
        silence = max(self._patience.values()) if known else _PATIENCE_S
        pool.allow_silence(silence, self._computing)
        # Counted, not timed: all of them are silent while one compiles.
        self._missed.update(self._patience.keys() - {beat.rank})
        self._missed[beat.rank] = 0
        ((rank, missed),) = self._missed.most_common(1)
        if missed > _MISSED_BEATS * (pool.size - 1):
            raise RankLost(rank, "serve", "was silent while the other ranks were not")

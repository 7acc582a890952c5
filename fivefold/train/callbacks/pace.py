"""Who is slow, and who stood still: every six steps each rank says how long it computed and waited.

Its row goes to rank 0 by way of the watchdogs' board, so that no step waits for it and no rank but
the first reads those of others. Rank 0 compares the newest rows of all.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from statistics import median
from typing import Any

from fivefold.core.layout import PIPELINE, ROLES, WORLD, all_groups
from fivefold.launch.watch import Watchdog
from fivefold.parallel import CollectiveRecord, Mesh, RoleKind, TimedStep, WaitTimer
from fivefold.records import Pair, RankPace, Slow, slow_ones
from fivefold.train.callbacks.callback import Callback

EVERY = 6  # steps of a row, up to so many ranks; in a larger job more, so that rank 0 has time
_RANKS = 4096
_ON_GPU = 3  # of so many steps one is timed, where that takes events of the device


class PaceCallback(Callback):
    """Times the steps of a rank, and reports stragglers and ranks that stood still in the records.

    As an observer of the mesh it notes when messages of the pipeline leave and come.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.mesh: Mesh | None = None
        self.unread: deque[TimedStep] = deque()
        self.own: list[float] = []
        self.steps: list[float] = []
        self.waited: list[dict[RoleKind, list[float]]] = []
        self.best: dict[object, float] = {}
        self.before: set[tuple[str, tuple[int, ...]]] = set()
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        self.step_began = time.monotonic()

    def watch(self, mesh: Mesh) -> None:
        """Attach to the mesh."""
        self.mesh = mesh

    @property
    def timer(self) -> WaitTimer | None:
        """Timer of the mesh; None for a single rank."""
        return None if self.mesh is None or self.mesh.size(WORLD) == 1 else self.mesh.timer

    def before_step(self, number: int) -> None:
        timer = self.timer
        if timer is not None and not (timer.on_gpu and number % _ON_GPU):
            timer.start()

    def measure(self, number: int) -> dict[str, Any]:
        findings = [*self._stalls(), *self._paces(number)]
        return {"slow": [finding.to_json() for finding in findings] or None}

    def _stalls(self) -> list[Slow]:
        """The ranks for which this step has waited, on the first rank."""
        time_now, began = time.monotonic(), self.step_began
        self.step_began = time_now
        return [
            Slow(
                "stall",
                (rank,),
                min(1.0, seconds / max(seconds, time_now - began)),
                f"rank {rank} stood still for {seconds:.0f} s at {doing}",
            )
            for rank, doing, seconds in self.watchdog.stalls()
        ]

    def _paces(self, number: int) -> list[Slow]:
        """What is slow in the rows of all ranks, if there are new ones, and was in those before."""
        timer = self.timer
        if timer is None or self.mesh is None:
            return []
        if timer.running:
            self.unread.append(timer.stop())
        while self.unread and self.unread[0].passed:  # on a GPU a few steps later
            seconds, waited = self.unread.popleft().read()
            self.steps.append(seconds)
            self.own.append(seconds - sum(map(sum, waited.values())))
            self.waited.append(waited)
        if number % exchange_steps(self.mesh.size(WORLD)) == 0:
            if self.steps:
                self.watchdog.pace.share(self._pace(self.mesh, timer, number).to_row())
            self.own, self.steps, self.waited = [], [], []
            timer.clear()
        rows = self.watchdog.pace.take()
        if rows is None:
            return []
        slow = self._slow(self.mesh, [RankPace.from_row(row) for row in rows])
        findings = [finding for finding in slow if (finding.what, finding.ranks) in self.before]
        self.before = {(finding.what, finding.ranks) for finding in slow}
        return findings

    def begin(
        self, record: CollectiveRecord, members: tuple[int, ...]
    ) -> tuple[Pair, float] | None:
        """Record the start of a message; other collectives are timed by the mesh."""
        timer = self.timer
        if timer is None or not timer.running or record.axis != PIPELINE:
            return None
        pair = (members[0], members[-1])
        if record.kind == "send":
            timer.sent(pair)
            return None
        return (pair, time.time()) if record.kind == "recv" else None

    def end(self, token: tuple[Pair, float]) -> None:
        """Record the arrival of a message."""
        if self.timer is not None:
            self.timer.received(*token)

    def _pace(self, mesh: Mesh, timer: WaitTimer, number: int) -> RankPace:
        kinds = {what for waits in self.waited for what in waits}
        return RankPace(
            socket.gethostname(),
            mesh.coord(PIPELINE),
            min(self.own),
            median(self.steps),
            {role: [_sum(waits, role) for waits in self.waited] for role, _ in kinds},
            {what: self._least(what) for what in kinds if ROLES[what[0]].urgent},
            timer.sends,
            timer.receives,
            last=number,
        )

    def _least(self, what: RoleKind) -> tuple[float, int]:
        """The shortest wait for a collective, and how many a step has."""
        series = [waits.get(what, []) for waits in self.waited]
        return min(seconds for times in series for seconds in times), max(map(len, series))

    def _slow(self, mesh: Mesh, paces: list[RankPace]) -> list[Slow]:
        roles = {
            role for pace in paces for role in (*pace.waited, *(what for what, _ in pace.least))
        }
        known = roles & ROLES.keys() - {PIPELINE, WORLD}
        for role in known - self.groups.keys():
            self.groups[role] = list(all_groups(mesh.topology, role))
        groups = {role: self.groups[role] for role in sorted(known)}
        return slow_ones(paces, groups, self.best)


def exchange_steps(world: int) -> int:
    """Steps from one row of a rank to the next."""
    return EVERY * (1 + world // _RANKS)


def _sum(waited: dict[RoleKind, list[float]], role: str) -> float:
    return sum(sum(times) for (wait_role, _), times in waited.items() if wait_role == role)

"""How long a rank waits in its collectives, by role, and when the messages of its pipeline moved.

On a CPU the host waits. On a GPU its stream does: an event before a wait is reached when the work
before it is done, and one after it when the collective is. Messages are timed on a CPU only, where
the host that waits is the one that computes.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

RoleKind = tuple[str, str]
_MOST_MESSAGES = 64  # of one direction that are kept


class WaitTimer:
    """Times of the waits of one step, while it is `running`, and of pipeline messages."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.running = False
        self.clear()

    def clear(self) -> None:
        """Clear the recorded messages."""
        self.waits: list[tuple[RoleKind, Any, Any]] = []
        self.sends: dict[tuple[int, int], list[float]] = {}
        self.receives: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def start(self) -> None:
        """Start to time a step."""
        self.waits = []
        self.running, self.begun = True, self.timestamp()

    def timestamp(self) -> Any:
        """Current time of the host, or an event on its stream."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def waited(self, what: RoleKind, since: Any) -> None:
        """Record a wait that began at `since`."""
        self.waits.append((what, since, self.timestamp()))

    def sent(self, pair: tuple[int, int]) -> None:
        """Record a sent message."""
        times = self.sends.setdefault(pair, [])
        if not self.on_gpu and len(times) < _MOST_MESSAGES:
            times.append(time.time())

    def received(self, pair: tuple[int, int], posted: float) -> None:
        """Record a message that was posted at `posted` and has arrived."""
        intervals = self.receives.setdefault(pair, [])
        if not self.on_gpu and len(intervals) < _MOST_MESSAGES:
            intervals.append((posted, time.time()))

    def stop(self) -> TimedStep:
        """End the timing of a step, which is issued."""
        self.running = False
        return TimedStep(self.begun, self.timestamp(), self.waits, self.on_gpu)


class TimedStep(NamedTuple):
    """A step and its waits, as times of the host or events of its stream."""

    begun: Any
    end: Any
    waits: list[tuple[RoleKind, Any, Any]]
    on_gpu: bool

    @property
    def passed(self) -> bool:
        """Whether its events have completed."""
        return not self.on_gpu or self.end.query()

    def read(self) -> tuple[float, dict[RoleKind, list[float]]]:
        """Seconds of the step, and of its waits by role and kind."""
        waited: dict[RoleKind, list[float]] = {}
        for what, since, until in self.waits:
            waited.setdefault(what, []).append(self._seconds(since, until))
        return self._seconds(self.begun, self.end), waited

    def _seconds(self, since: Any, until: Any) -> float:
        return 1e-3 * since.elapsed_time(until) if self.on_gpu else until - since

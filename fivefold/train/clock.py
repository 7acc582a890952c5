"""How long the steps of a rank take, to the end of their updates on its device.

A GPU runs an update after the host has issued it, and a host may be late: while it compiles the
kernels of an update, the device has long passed the event that the host waits for next. So the
host's clock measures no step. Events of the device do: one when the rank asks for its rows, one
after the update. They are read without another wait once the host has waited for the next step.

Only the beginning of a run is a time of the host. `ClockOffset` maps the device's clock to it.
A CPU has no events, and its clock is the host's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fivefold.records import RunFolder

_DRIFT = 1e-4  # seconds a second by which two clocks drift apart: crystals are off by less


class StepTimes(NamedTuple):
    """Seconds of a step, and `since_start`, those from the first start of the run to its end.

    `data`: the rank waited for its rows. `step`: from the moment when it asked for them, or when
    the device had run all that was issued before if that was later, to the end of the update.
    `wall`: from the end of the update before, or from this start of the run, to the end of this
    update. None: the clock gave a time that cannot be, or that of the update before.
    """

    data: float
    step: float | None
    wall: float | None
    since_start: float | None


@dataclass(frozen=True)
class ClockOffset:
    """Offset between a device's clock and the host's.

    A host that knows that an event has passed can only be late: its time minus that of the device
    is the offset or more. So the smallest one counts, until drift can have exceeded it.
    """

    offset: float = math.inf
    device: float = 0.0  # when it was seen

    def passed(self, device: float, host: float) -> ClockOffset:
        """Narrow the offset: the host saw at `host` that an event had passed."""
        drifted = self.offset + _DRIFT * (device - self.device)
        return ClockOffset(host - device, device) if host - device <= drifted else self

    def host(self, device: float) -> float:
        """Convert a device time to host time."""
        return device + self.offset


@dataclass(frozen=True)
class TimedEvent:
    """A host time and an event of the device; a CPU has none."""

    host: float
    event: torch.cuda.Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> TimedEvent:
        """Record an event in the current stream, with the host time before it."""
        if device.type != "cuda":
            return cls(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        host = time.perf_counter()
        event.record(torch.cuda.current_stream(device))
        return cls(host, event)

    @property
    def passed(self) -> bool:
        """Whether the event has completed."""
        return self.event is None or self.event.query()

    def wait(self) -> TimedEvent:
        """Wait for the event; returns one with the host time after it."""
        if self.event is not None:
            self.event.synchronize()
        return TimedEvent(time.perf_counter(), self.event)

    def until(self, later: TimedEvent) -> float:
        """Device seconds to a later event; both have completed."""
        if self.event is None or later.event is None:
            return later.host - self.host
        return 1e-3 * self.event.elapsed_time(later.event)


class StepClock:
    """Clock of a rank; both starts of its run, the first and this one, are times of
    `time.perf_counter`."""

    def __init__(self, device: torch.device, first_start: float, this_start: float) -> None:
        self.device, self.first_start, self.this_start = device, first_start, this_start
        self._asked: TimedEvent | None = None
        self._seen: list[TimedEvent] = []  # what the host has waited for in this step
        self._waiting_since, self._data = this_start, 0.0
        self._offset = ClockOffset()
        # The last update whose time was read: its end, and that on the device's clock, which
        # begins with the first request for rows.
        self._end: TimedEvent | None = None
        self._device_end = 0.0
        self._end_known = True  # of the update before

    @classmethod
    def of(cls, device: torch.device, folder: RunFolder | None) -> StepClock:
        """Clock of a run folder; without one the run starts now."""
        time_now = time.perf_counter()
        if folder is None:
            return cls(device, time_now, time_now)
        shift = time.time() - time_now
        return cls(device, folder.began - shift, folder.started - shift)

    def ask(self) -> None:
        """Mark the request for the rows of a step."""
        first, self._asked = self._asked is None, TimedEvent.of(self.device)
        # The host may be late in the first step, so it waits once before it, where nothing runs.
        self._seen = [self._asked.wait()] if first else []
        self._waiting_since = time.perf_counter()

    def begin(self) -> None:
        """Mark the arrival of the rows."""
        self._data = time.perf_counter() - self._waiting_since

    def synchronised(self, event: torch.cuda.Event | None) -> None:
        """Record an event that the host waits for."""
        self._seen.append(TimedEvent(time.perf_counter(), event))

    def mark(self) -> StepMark:
        """Mark the end of a step, whose update is issued."""
        assert self._asked is not None
        end = TimedEvent.of(self.device)
        return StepMark(self._asked, self._data, tuple(self._seen), end)

    def times(self, mark: StepMark) -> StepTimes:
        """Times of a step, called in the order of steps; waits for its update."""
        mark.end.wait()
        step = mark.start.until(mark.end)
        # Events are compared with recent ones only: milliseconds between them are a float32, which
        # over hours is no longer exact to one.
        query_time = self._device_end + (0.0 if self._end is None else self._end.until(mark.start))
        offset = self._offset
        for event in mark.seen:
            offset = offset.passed(query_time + mark.start.until(event), event.host)
        end = offset.host(query_time + step)
        wall = end - self.this_start if self._end is None else self._end.until(mark.end)
        since_start = end - self.first_start
        if not all(map(_is_length, (step, wall, since_start))):
            self._end_known = False
            return StepTimes(mark.data, None, None, None)
        known, self._end_known = self._end_known, True
        self._end, self._device_end, self._offset = mark.end, query_time + step, offset
        return StepTimes(mark.data, step, wall if known else None, since_start)


def _is_length(seconds: float) -> bool:
    """Whether something can have taken so long."""
    return math.isfinite(seconds) and seconds > 0


class StepMark(NamedTuple):
    """A step that is issued: its start, which requests rows, the wait for them, the events that the
    host has waited for, and the end of its update."""

    start: TimedEvent
    data: float
    seen: tuple[TimedEvent, ...]
    end: TimedEvent

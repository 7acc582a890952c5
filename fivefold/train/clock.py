"""How long the steps of a rank take, to the end of their updates on its device.

A GPU runs an update after the host has issued it. The host waits for the device once in a step,
for loss and norm. It then reads its own clock and puts an event into the stream, and a second event
follows the update. The end of the update is the host's time plus what lies between the two events.
It is known without another wait as soon as the host has waited for the next step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fivefold.records.run_folder import RunFolder


class StepTimes(NamedTuple):
    """Seconds of a step, and `since_start`, those from the first start of the run to its end.

    `data`: the rank waited for its rows. `step`: from the moment when it asked for them, or when
    the update before had run if that was later, to the end of the update. `wall`: from the end of
    the update before, or from this start of the run, to the end of this update.
    """

    data: float
    step: float
    wall: float
    since_start: float


@dataclass(frozen=True)
class StepEnd:
    """The end of an update: `after` on the host's clock, and the events from there to the end.

    Without events, on a CPU, `after` is the end.
    """

    after: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @property
    def passed(self) -> bool:
        """Whether the update has run."""
        return self.events is None or self.events[1].query()

    def read(self) -> float:
        """The time of the end; waits for it."""
        if self.events is None:
            return self.after
        first, last = self.events
        last.synchronize()
        return self.after + 1e-3 * first.elapsed_time(last)


class StepClock:
    """The clock of a rank; both starts of its run, the first and this one, are times of
    `time.perf_counter`."""

    def __init__(self, device: torch.device, first_start: float, this_start: float) -> None:
        self.device, self.first_start = device, first_start
        self._asked = self._waited_until = self._last_end = this_start
        self._both = self._moment()

    @classmethod
    def of(cls, device: torch.device, folder: RunFolder | None) -> StepClock:
        """For the run of a folder; without one the run starts now."""
        now = time.perf_counter()
        if folder is None:
            return cls(device, now, now)
        shift = time.time() - now
        return cls(device, folder.began - shift, folder.started - shift)

    def ask(self) -> None:
        """The rank asks for the rows of a step."""
        self._asked = time.perf_counter()

    def begin(self) -> None:
        """The rows are there."""
        self._waited_until = time.perf_counter()

    def synchronised(self, event: torch.cuda.Event | None) -> None:
        """The host has just waited for this event of the device: it is now on both clocks."""
        self._both = time.perf_counter(), event

    def mark(self) -> StepMark:
        """The update is issued."""
        host, begun = self._both
        now, event = self._moment()
        end = StepEnd(now) if begun is None or event is None else StepEnd(host, (begun, event))
        return StepMark(self._asked, self._waited_until - self._asked, end)

    def times(self, mark: StepMark) -> StepTimes:
        """The times of a step, in the order of the steps; waits until its update has run."""
        end, before = mark.end.read(), self._last_end
        self._last_end = end
        step, since_start = end - max(mark.asked, before), end - self.first_start
        return StepTimes(mark.data, step, end - before, since_start)

    def _moment(self) -> tuple[float, torch.cuda.Event | None]:
        """Now, on the host and in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter(), None
        event = torch.cuda.Event(enable_timing=True)
        now = time.perf_counter()
        event.record(torch.cuda.current_stream(self.device))
        return now, event


class StepMark(NamedTuple):
    """A step that is issued: when its rows were asked for, the wait for them, and its end."""

    asked: float
    data: float
    end: StepEnd

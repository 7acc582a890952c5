"""What a rank is doing now, for the process that started it and for the watchdog."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core.schedule import Step
from fivefold.launch.watchdog import Watchdog
from fivefold.launch.worker import Worker
from fivefold.parallel.mesh import CollectiveRecord
from fivefold.records import StepRecord
from fivefold.train.callbacks import Callback

_LONG = 600.0  # seconds for what is done once: a build, a file, the first kernels


class WatchdogCallback(Callback):
    """Reports phases, and observes the collectives of the mesh once the first step begins.

    A rank alone has no watchdog: only the process that started it learns the phases.
    """

    def __init__(self, worker: Worker, watchdog: Watchdog | None) -> None:
        self.worker, self.watchdog = worker, watchdog
        self.actions = ActionPhases(self._step_action)
        self.evaluation = ActionPhases(lambda action: self.phase(f"evaluation {action}"))
        self._started, self._first, self._number = False, 0, 0

    def phase(self, text: str, long: bool = False) -> None:
        """Say what comes now, and whether it may take long without a collective."""
        if self.watchdog is None:
            self.worker.phase(text)
        else:
            self.watchdog.phase(text, _LONG if long else 0.0)

    def start(self, after: int) -> None:
        self._started, self._first = True, after + 1

    def before_data(self, number: int) -> None:
        self.phase(f"data of step {number}", long=number == self._first)

    def before_step(self, number: int) -> None:
        """A step begins with a collective: the patience of a checkpoint must not hold for it."""
        self._number = number
        self.phase(f"step {number}", long=number == self._first)

    def on_record(self, record: StepRecord) -> None:
        """A step that hangs is known only when it takes much longer than this one."""
        if self.watchdog is not None:
            self.watchdog.step_took(record.seconds)

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
        """A collective is about to be issued."""
        if self._started and self.watchdog is not None:
            self.watchdog.note(record, members)

    def end(self, token: None) -> None:
        """The watchdog counts what was issued; the end of a collective is not needed."""

    def _step_action(self, action: Step) -> None:
        self.phase(f"step {self._number} {action}", long=self._number == self._first)


class ActionPhases:
    """An observer of the pipeline for which every action is a phase."""

    def __init__(self, phase: Callable[[Step], None]) -> None:
        self._phase = phase

    def begin(self, action: Step) -> None:
        self._phase(action)

    def end(self, token: None) -> None:
        """The next action or phase ends this one."""

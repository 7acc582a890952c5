"""What a rank tells while it trains: records, spans, snapshots, and where it is."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from fivefold.core.plan import Plan
from fivefold.core.progress import GIB, StepRecord
from fivefold.core.schedule.action import Step
from fivefold.parallel.compose import Job
from fivefold.run.events import Recorder, Silent, Token, recorder
from fivefold.run.records import Metrics, RunFolder
from fivefold.run.snapshot import Snapshots
from fivefold.run.trackers import MEMORY, Tracker, logs, trackers
from fivefold.run.watchdog import PATIENCE, Watchdog
from fivefold.run.worker import Worker
from fivefold.training.settings import Settings

_LONG = 600.0  # seconds for what is done once: a build, a file, the first kernels


def memory_gib(device: torch.device) -> float:
    """The most that this rank has had: of its GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Busy:
    """What a rank is at, for whoever started it and for its watchdog."""

    def __init__(self, worker: Worker, watchdog: Watchdog | None) -> None:
        self.worker, self.watchdog = worker, watchdog

    def phase(self, text: str, long: bool = False) -> None:
        """Say what comes now, and whether it may take long without a collective."""
        if self.watchdog is None:
            self.worker.phase(text)
        else:
            self.watchdog.phase(text, _LONG if long else 0.0)

    def stepped(self, seconds: float) -> None:
        """A step took so long; one that hangs is known only when it takes much longer."""
        if self.watchdog is not None:
            self.watchdog.patience = max(PATIENCE, 2 * seconds)


class Told:
    """One rank's voice. Without a folder, rank 0 still reports its steps to whoever listens."""

    def __init__(
        self, worker: Worker, plan: Plan, settings: Settings, device: torch.device, after: int
    ) -> None:
        """`after` is the step that the training goes on behind."""
        self.worker, self.after, self.number = worker, after, after
        self._began = time.monotonic()
        self.events: Recorder = Silent()
        self.folder: RunFolder | None = None
        self.metrics: Metrics | None = None
        self.snapshots: Snapshots | None = None
        self.trackers: list[Tracker] = []
        self._span: Token | None = None
        self.busy = Busy(worker, None)
        if settings.folder is None:
            return
        recipe = settings.recipe
        self.folder = folder = RunFolder.open(settings.folder)
        self.events = recorder(folder.path, worker.rank, folder.restart, device, recipe.events)
        asked = MEMORY in logs(recipe.log)
        self.snapshots = Snapshots(folder.path, worker.rank, device, asked)
        if worker.rank == 0:
            said = {"layout": str(plan.layout), "model": plan.shape.name, **asdict(recipe)}
            self.metrics = Metrics(folder.path, after)
            self.trackers = trackers(recipe.log, folder.path, folder.identity, said, after)

    @property
    def restart(self) -> int:
        return 0 if self.folder is None else self.folder.restart

    @property
    def wall(self) -> float:
        """Seconds since the run was first started."""
        return time.monotonic() - self._began if self.folder is None else self.folder.wall

    def watch(self, job: Job, busy: Busy) -> None:
        """From now on know what the job does."""
        self.busy = busy
        if busy.watchdog is not None:
            job.mesh.heard = busy.watchdog.note
        if not isinstance(self.events, Silent):
            job.mesh.spans = self.events
        job.pipeline.before, job.pipeline.after = self._before, self._after
        job.forwards.before = lambda action: busy.phase(f"evaluation {action}")

    def begin(self, number: int) -> None:
        """A step begins."""
        self.number = number

    def step(self, record: StepRecord) -> None:
        """A step is over. Its line is written before its checkpoint."""
        self.events.step(record.step)
        self.busy.stepped(record.seconds)
        if self.snapshots is not None:
            self.snapshots.step(record.step)
        if self.worker.rank > 0:
            return
        if self.metrics is not None:
            self.metrics.append(record)
        for tracker in self.trackers:
            tracker.log(record.step, record.scalars())
        self.worker.report(record)

    def out_of_memory(self) -> Path | None:
        """Keep what the memory looks like; the file."""
        return None if self.snapshots is None else self.snapshots.out_of_memory()

    def end(self, why: str, spent: Mapping[str, float]) -> None:
        """The training came to an orderly end."""
        if self.folder is not None and self.worker.rank == 0:
            self.folder.end(why, spent)

    def close(self) -> None:
        """However it ended."""
        self.events.close()
        if self.metrics is not None:
            self.metrics.close()
        for tracker in self.trackers:
            tracker.close()

    def _before(self, action: Step) -> None:
        first = self.number == self.after + 1  # in which kernels are made
        self.busy.phase(f"step {self.number} {action}", long=first)
        self._span = self.events.begin(action)

    def _after(self, action: Step) -> None:
        self.events.end(self._span)

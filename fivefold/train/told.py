"""Where curves are drawn while a run goes on: TensorBoard and Weights & Biases, both optional."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from fivefold.core.errors import FivefoldError, UnknownName
from fivefold.core.plan import Plan
from fivefold.core.schedule import Step
from fivefold.launch.watchdog import PATIENCE, Watchdog
from fivefold.launch.worker import Worker
from fivefold.parallel.compose import Job
from fivefold.records import GIB, StepRecord
from fivefold.records.run_folder import Metrics, RunFolder
from fivefold.train.settings import TrainSettings
from fivefold.train.span_recorder import SilentRecorder, Snapshots, SpanRecorder, Token, recorder

TENSORBOARD, WANDB, MEMORY = "tensorboard", "wandb", "memory"
_PROJECT = "fivefold"


class Tracker(Protocol):
    """Something that draws numbers over steps."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def logs(text: str) -> frozenset[str]:
    """The words of the `log` key, joined with `+`.

    >>> sorted(logs("wandb+memory")), sorted(logs(""))
    (['memory', 'wandb'], [])
    """
    words = frozenset(word.strip() for word in text.split("+") if word.strip())
    known = (TENSORBOARD, WANDB, MEMORY)
    for word in sorted(words):
        if word not in known:
            raise UnknownName("log", word, known)
    return words


def trackers(
    text: str, folder: Path, identity: str, settings: Mapping[str, Any], after: int
) -> list[Tracker]:
    """The trackers that the `log` key asks for, which go on behind step `after`.

    `identity` tells this run from others, `settings` are shown with it.
    """
    words, found = logs(text), list[Tracker]()
    if TENSORBOARD in words:
        found.append(TensorBoard(folder / TENSORBOARD, after))
    if WANDB in words:
        found.append(WeightsAndBiases(folder, identity, settings))
    return found


class TensorBoard:
    """Files that TensorBoard reads; points behind the step that a run resumes from are purged."""

    def __init__(self, folder: Path, after: int) -> None:
        module = _needed("torch.utils.tensorboard", TENSORBOARD)
        self.writer = module.SummaryWriter(log_dir=str(folder), purge_step=after + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; all starts of a run are one there."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]) -> None:
        module = _needed(WANDB, WANDB)
        self.run = module.init(
            project=_PROJECT,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        # Its own count of steps cannot go back, as a resumed run does.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def close(self) -> None:
        self.run.finish()


def _needed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise FivefoldError(
            f"log = {package} needs the package {package}, which is not installed: pip install "
            f"{package}, or leave it out of log"
        ) from error


# What a rank tells while it trains: records, spans, snapshots, and where it is.


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


class RankReporter:
    """One rank's voice. Without a folder, rank 0 still reports its steps to whoever listens."""

    def __init__(
        self, worker: Worker, plan: Plan, settings: TrainSettings, device: torch.device, after: int
    ) -> None:
        """`after` is the step that the training goes on behind."""
        self.worker, self.after, self.number = worker, after, after
        self._began = time.monotonic()
        self.events: SpanRecorder = SilentRecorder()
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
        if not isinstance(self.events, SilentRecorder):
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

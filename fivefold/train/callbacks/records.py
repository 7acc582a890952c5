"""What a run writes while it trains: a record of every step, curves, and the spans of its ranks.

Rank 0 appends each record to `metrics.jsonl`, and draws it in TensorBoard or Weights & Biases where
the `log` key asks for them.

Every rank writes `events/rank-00000.jsonl`: a span for every action of the schedule and every
collective. A span costs two readings of the clock and a tuple; a thread turns it into text after
the step. The file has two kinds of lines. An anchor, `{"step", "restart", "rank", "wall_ns",
"clock_ns"}`, gives the wall clock and the rank's own clock at one moment at the end of a step. The
spans of that step follow it: `{"name", "kind", "begin", "end"}`, in nanoseconds of the rank's own
clock, and for collectives also `bytes` and `group`. So `wall_ns + begin - clock_ns` is when a span
began on the wall clock. An action is named as in its schedule (`2F0`), a collective by axis and
kind (`tp/all_gather`).

On a GPU the span of an action is when the device ran it. The span of a collective is always the
host's: from its issue until a computation that waited for it went on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from fivefold.core import FivefoldError, UnknownName
from fivefold.core.schedule import Step
from fivefold.parallel import ActionObserver, CollectiveRecord
from fivefold.records import (
    EVENTS,
    Metrics,
    RunFolder,
    StepRecord,
    cut_torn_line,
    naming_file,
)
from fivefold.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from fivefold.train import RankRun

TENSORBOARD, WANDB, MEMORY = "tensorboard", "wandb", "memory"
ACTION, COLLECTIVE = "action", "collective"
_PROJECT = "fivefold"
_UNTIMED = "step {} has no time: its clock gave none that can be; times that are unknown are null"
_ANCHOR_NS = 10_000_000_000  # after this time the GPU's clock is read in steps above 1 us


@dataclass
class RecordCallback(Callback):
    """Writes step records on rank 0, if there is a run folder, and reports them to the parent
    process."""

    run: RankRun
    metrics: Metrics | None = None
    trackers: list[Tracker] = field(default_factory=list)
    timed: bool = True  # all steps so far

    def start(self, after: int) -> None:
        if self.run.folder is not None and self.run.worker.rank == 0:
            plan, recipe = self.run.rank.job.plan, self.run.settings.recipe
            path, identity = self.run.folder.path, self.run.folder.identity
            shown = {"layout": str(plan.layout), "model": plan.shape.name, **asdict(recipe)}
            self.metrics = Metrics(path, after)
            _warn(self.run.worker.report, self.metrics.damage)
            report = self.run.worker.report
            self.trackers = open_trackers(recipe.log, path, identity, shown, after, report)

    def on_record(self, record: StepRecord) -> None:
        if self.run.worker.rank > 0:
            return
        if record.elapsed is None and self.timed:
            self.timed = False
            self.run.worker.report(_UNTIMED.format(record.step))
        if self.metrics is not None:
            _warn(self.run.worker.report, self.metrics.append(record))
        self._track(lambda tracker: tracker.log(record.step, record.scalars()))
        self.run.worker.report(record)

    def _track(self, use: Callable[[Tracker], None]) -> None:
        """Use every tracker, and none again that fails: no curve is worth a training."""
        for tracker in list(self.trackers):
            try:
                use(tracker)
            except Exception as error:
                self.trackers.remove(tracker)
                self.run.worker.report(_untracked(type(tracker).__name__, error))

    def finish(self) -> None:
        if self.run.folder is not None and self.run.worker.rank == 0:
            why = "stopped" if self.run.progress.stopped else "done"
            _warn(self.run.worker.report, self.run.folder.end(why, self.run.spent.take()))

    def close(self) -> None:
        if self.metrics is not None:
            _warn(self.run.worker.report, self.metrics.close())
        self._track(lambda tracker: tracker.close())


def _untracked(name: str, error: Exception) -> str:
    return f"{name} failed ({type(error).__name__}: {error}): the training goes on without it"


def _warn(say: Callable[[str], None], problem: str | None) -> None:
    if problem is not None:
        say(problem)


# Curves.


class Tracker(Protocol):
    """Logger of scalars by step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def log_targets(text: str) -> frozenset[str]:
    """Parse the `log` key, names joined with `+`; `none` is empty.

    >>> sorted(log_targets("wandb+memory")), sorted(log_targets("none"))
    (['memory', 'wandb'], [])
    """
    targets = frozenset(word.strip() for word in text.split("+") if word.strip()) - {"none"}
    known = (TENSORBOARD, WANDB, MEMORY)
    for word in sorted(targets):
        if word not in known:
            raise UnknownName("log", word, known)
    return targets


def require_trackers(text: str) -> None:
    """Refuse a tracker whose package is missing, before anything is written."""
    for word in sorted(log_targets(text) & {TENSORBOARD, WANDB}):
        if find_spec(word) is None:
            raise _missing_package(word)


def open_trackers(
    text: str,
    folder: Path,
    identity: str,
    settings: Mapping[str, Any],
    after: int,
    warn: Callable[[str], None] = lambda message: None,
) -> list[Tracker]:
    """Open the trackers of the `log` key, which continue after step `after`.

    `identity` distinguishes this run from others, `settings` are shown with it. One that cannot be
    opened is left out with a warning.
    """
    targets, trackers = log_targets(text), list[Tracker]()
    makers: dict[str, Callable[[], Tracker]] = {
        TENSORBOARD: lambda: TensorBoard(folder / TENSORBOARD, after),
        WANDB: lambda: WeightsAndBiases(folder, identity, settings),
    }
    for word in (word for word in makers if word in targets):
        try:
            trackers.append(makers[word]())
        except FivefoldError:
            raise
        except Exception as error:
            warn(_untracked(word, error))
    return trackers


class TensorBoard:
    """TensorBoard event files; points after the resumed step are purged."""

    def __init__(self, folder: Path, after: int) -> None:
        module = _import("torch.utils.tensorboard", TENSORBOARD)
        self.writer = module.SummaryWriter(log_dir=str(folder), purge_step=after + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which restarts continue."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]) -> None:
        module = _import(WANDB, WANDB)
        self.run = module.init(
            project=_PROJECT,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        # Its own step count cannot go back, but a resumed run does.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def close(self) -> None:
        self.run.finish()


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing_package(package) from error


def _missing_package(package: str) -> FivefoldError:
    return FivefoldError(
        f"log = {package} needs the package {package}, which is not installed: pip install "
        f"{package}, or train without it, with --set log=none"
    )


# Spans.


class SpanCallback(Callback):
    """Records the spans of a rank: observer of collectives, and by `actions` of actions.

    Nothing is recorded before the first step, nor without a run folder.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        rank: int,
        device: torch.device,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.folder, self.rank, self.device, self.warn = folder, rank, device, warn
        self.log: SpanLog | None = None
        self.actions = ActionSpans(self)

    def start(self, after: int) -> None:
        if self.folder is not None:
            self.log = SpanLog(self.folder.path, self.rank, self.folder.restart, self.device)

    def after_step(self, number: int) -> None:
        if self.log is not None:
            self.log.step(number)
            _warn(self.warn, self.log.writer.problem())

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
            _warn(self.warn, self.log.writer.problem())

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> Span | None:
        return None if self.log is None else self.log.begin(record, record.bytes, record.group)

    def end(self, token: Span | None) -> None:
        if self.log is not None and token is not None:
            self.log.end(token)


class ActionSpans(ActionObserver):
    """Observer of the actions of a step."""

    def __init__(self, spans: SpanCallback) -> None:
        self.spans = spans

    def begin(self, action: Step) -> Span | None:
        return None if self.spans.log is None else self.spans.log.begin(action)

    def end(self, token: Span | None) -> None:
        self.spans.end(token)


class Span(NamedTuple):
    """An open span; `mark`: an event of the GPU, if any."""

    name: object  # becomes text only when it is written
    begin_ns: int
    bytes: int
    group: int  # ranks of a collective; 0 for an action
    mark: Any


_EndedSpan = tuple[Span, int, Any]


class SpanLog:
    """Spans of one rank, appended to a file that restarts continue."""

    def __init__(self, folder: Path, rank: int, restart: int, device: torch.device) -> None:
        self.path = folder / EVENTS / f"rank-{rank:05d}.jsonl"
        self.rank, self.restart = rank, restart
        self.spans: list[_EndedSpan] = []
        self.clock = _DeviceClock(device) if device.type == "cuda" else None
        with naming_file(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        self.writer = _SpanWriter(self.path)

    def begin(self, name: object, bytes: int = 0, group: int = 0) -> Span:
        """Begin the span of an action, or of a collective of `group` ranks."""
        mark = self.clock.mark() if self.clock is not None and not group else None
        return Span(name, time.perf_counter_ns(), bytes, group, mark)

    def end(self, span: Span) -> None:
        """End a span; from any thread."""
        mark = None if self.clock is None or span.mark is None else self.clock.mark()
        self.spans.append((span, time.perf_counter_ns(), mark))

    def step(self, number: int) -> None:
        """End the step of these spans."""
        spans, self.spans = self.spans, []
        wall, clock = time.time_ns(), time.perf_counter_ns()
        anchor = (
            f'{{"step": {number}, "restart": {self.restart}, "rank": {self.rank}, '
            f'"wall_ns": {wall}, "clock_ns": {clock}}}\n'
        )
        timed = spans if self.clock is None else self.clock.timed(spans)
        self.writer.write(lambda: anchor + "".join(map(_line, timed)))

    def close(self) -> None:
        """Write the remaining spans."""
        self.writer.close()


def _line(ended: _EndedSpan) -> str:
    span, end, _ = ended
    kind = COLLECTIVE if span.group else ACTION
    suffix = f', "bytes": {span.bytes}, "group": {span.group}' if span.group else ""
    return (
        f'{{"name": {quoted(str(span.name))}, "kind": "{kind}", "begin": {span.begin_ns}, '
        f'"end": {end}{suffix}}}\n'
    )


class _DeviceClock:
    """Maps GPU times to the host's clock, by reading both from time to time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: list[torch.cuda.Event] = []
        self._anchor()

    def mark(self) -> torch.cuda.Event:
        """The moment when the current stream of this thread reaches this point."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def timed(self, spans: list[_EndedSpan]) -> list[_EndedSpan]:
        """The spans with the times of the device, if it has marked them; waits for their ends."""
        ended_spans: list[_EndedSpan] = []
        for span, end, mark in spans:
            if mark is None:
                ended_spans.append((span, end, None))
                continue
            mark.synchronize()
            ended_spans.append((span._replace(begin_ns=self._ns(span.mark)), self._ns(mark), None))
            self.free += (span.mark, mark)
        if time.perf_counter_ns() - self.anchor_ns > _ANCHOR_NS:
            self._anchor()
        return ended_spans

    def _ns(self, mark: torch.cuda.Event) -> int:
        return self.anchor_ns + round(self.anchor.elapsed_time(mark) * 1e6)

    def _anchor(self) -> None:
        self.anchor = torch.cuda.Event(enable_timing=True)
        self.anchor.record(torch.cuda.current_stream(self.device))
        self.anchor.synchronize()
        self.anchor_ns = time.perf_counter_ns()


class _SpanWriter:
    """Thread that formats and appends spans, until a write fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self.error: OSError | None = None
        self.thread = threading.Thread(target=self._run, name="fivefold-events", daemon=True)
        self.thread.start()

    def write(self, text: Callable[[], str]) -> None:
        """Append this text soon."""
        if self.thread.is_alive():
            self.jobs.put(text)

    def close(self) -> None:
        """Wait until all is written."""
        self.jobs.put(None)
        self.thread.join()

    def problem(self) -> str | None:
        """What went wrong, returned once."""
        error, self.error = self.error, None
        consequence = "the training goes on without the events of this rank"
        return error and f"cannot write {self.path}: {error.strerror or error}; {consequence}"

    def _run(self) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                while (job := self.jobs.get()) is not None:
                    file.write(job())
                    file.flush()
        except OSError as error:
            self.error = error

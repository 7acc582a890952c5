"""Snapshots of a GPU's memory, for the viewer at pytorch.org/memory_viz.

On request the first steps of a start are recorded, each allocation with the lines that asked for
it; when memory runs out, what is allocated is written whether it was recorded or not. torch names
these functions with an underscore but documents them: where one is missing nothing is written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fivefold.core.errors import FivefoldError
from fivefold.records.run_folder import EVENTS, cut_torn_line, said_of

FOLDER = "memory"
STEPS = 3  # recorded on request: the first finds its memory, the others show the rhythm
_MOST_EVENTS = 1_000_000
_NO_GPU = "no memory snapshot: it shows the memory of a GPU, and this run has none"
_NO_FUNCTION = "no memory snapshot: this torch cannot write one"


class Snapshots:
    """The snapshots of one rank. `note` says why there are none, where they were asked for."""

    def __init__(self, folder: Path, rank: int, device: torch.device, asked: bool) -> None:
        self.folder, self.rank = folder / FOLDER, rank
        self.memory: Any = torch.cuda.memory if device.type == "cuda" else None
        self.steps_left = 0
        self.note: str | None = None
        if asked:
            self.note = self._record()

    def step(self, number: int) -> Path | None:
        """A step is over; the file that was written behind the last one recorded."""
        if not self.steps_left:
            return None
        self.steps_left -= 1
        if self.steps_left:
            return None
        path = self._dump(f"step-{number:08d}")
        self.memory._record_memory_history(enabled=None)  # it costs time
        return path

    def out_of_memory(self) -> Path | None:
        """The memory as it is now; None where there is no GPU to ask."""
        return self._dump("out-of-memory")

    def _record(self) -> str | None:
        """Begin to record; what is in the way of it."""
        if self.memory is None:
            return _NO_GPU
        if not hasattr(self.memory, "_record_memory_history"):
            return _NO_FUNCTION
        self.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self.steps_left = STEPS
        return None

    def _dump(self, name: str) -> Path | None:
        if not hasattr(self.memory, "_dump_snapshot"):
            return None
        path = self.folder / f"rank-{self.rank:05d}-{name}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.memory._dump_snapshot(str(path))
        except OSError:  # no room for it: no reason to end a run, nor to hide why one ends
            return None
        return path


# What a rank did when: a span for every action of the schedule and every collective.
#
# A span costs two looks at the clock and a tuple; text is made of it behind the step, by a
# thread. Where events are off, `Silent` stands in their place, which does nothing.
#
# `events/rank-00000.jsonl` has two kinds of lines. An anchor, `{"step", "restart", "rank",
# "wall_ns", "clock_ns"}`, gives the wall clock and the rank's own clock at one moment at the end
# of a step; the spans of that step follow it: `{"name", "kind", "begin", "end"}`, in nanoseconds
# of the rank's own clock, and for collectives also `bytes` and `group`. So `wall_ns + begin -
# clock_ns` is when a span began for everybody. An action is named as in its schedule (`2F0`), a
# collective by axis and kind (`tp/all_gather`).
#
# On a GPU an action's span is when the device ran it. A collective's is always the host's: from
# its issue to when somebody who needed it went on.


ACTION, COLLECTIVE = "action", "collective"
_ANCHOR_NS = 10_000_000_000  # older than this, the GPU's clock is read in steps above 1 us


class Token(NamedTuple):
    """A span that is under way; `mark` is the device's where there is one."""

    name: object
    begin_ns: int
    bytes: int
    group: int
    mark: Any


class SpanRecorder(Protocol):
    """Who is told of spans."""

    def begin(self, name: object, bytes: int = 0, group: int = 0) -> Token | None:
        """A span begins: a collective where `group` says of how many ranks, else an action.

        The name becomes text only when it is written.
        """
        ...

    def end(self, token: Token | None) -> None:
        """It is over; any thread may say so."""
        ...

    def step(self, number: int) -> None:
        """The step is over whose spans these were."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class SilentRecorder:
    """Events that are off."""

    def begin(self, name: object, bytes: int = 0, group: int = 0) -> Token | None:
        return None

    def end(self, token: Token | None) -> None: ...

    def step(self, number: int) -> None: ...

    def close(self) -> None: ...


class Events:
    """Events of one rank, appended to its file; a restart goes on in the same one."""

    def __init__(self, folder: Path, rank: int, restart: int, device: torch.device) -> None:
        self.path = folder / EVENTS / f"rank-{rank:05d}.jsonl"
        self.rank, self.restart = rank, restart
        self.spans: list[_Span] = []
        self.device = _DeviceClock() if device.type == "cuda" else None
        with said_of(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        self.writer = _SpanFile(self.path)

    def begin(self, name: object, bytes: int = 0, group: int = 0) -> Token | None:
        mark = self.device.mark() if self.device is not None and not group else None
        return Token(name, time.perf_counter_ns(), bytes, group, mark)

    def end(self, token: Token | None) -> None:
        if token is None:
            return
        mark = None if self.device is None or token.mark is None else self.device.mark()
        self.spans.append((token, time.perf_counter_ns(), mark))

    def step(self, number: int) -> None:
        spans, self.spans = self.spans, []
        wall, clock = time.time_ns(), time.perf_counter_ns()
        anchor = (
            f'{{"step": {number}, "restart": {self.restart}, "rank": {self.rank}, '
            f'"wall_ns": {wall}, "clock_ns": {clock}}}\n'
        )
        timed = spans if self.device is None else self.device.timed(spans)
        self.writer.give(lambda: anchor + "".join(map(_line, timed)))

    def close(self) -> None:
        self.writer.close()


def recorder(folder: Path, rank: int, restart: int, device: torch.device, on: bool) -> SpanRecorder:
    """Events, or none."""
    return Events(folder, rank, restart, device) if on else SilentRecorder()


_Span = tuple[Token, int, Any]


def _line(span: _Span) -> str:
    token, end, _ = span
    if token.group:
        return (
            f'{{"name": {quoted(str(token.name))}, "kind": "{COLLECTIVE}", "begin": '
            f'{token.begin_ns}, "end": {end}, "bytes": {token.bytes}, "group": {token.group}}}\n'
        )
    return (
        f'{{"name": {quoted(str(token.name))}, "kind": "{ACTION}", "begin": {token.begin_ns}, '
        f'"end": {end}}}\n'
    )


class _DeviceClock:
    """Times of the GPU, told in the host's clock: both are read together now and then."""

    def __init__(self) -> None:
        self.free: list[torch.cuda.Event] = []
        self._anchor()

    def mark(self) -> torch.cuda.Event:
        """The moment when the current stream comes to here."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, spans: list[_Span]) -> list[_Span]:
        """The spans with the device's times in place of the host's; it waits for their ends."""
        found: list[_Span] = []
        for token, end, mark in spans:
            if mark is None:
                found.append((token, end, None))
                continue
            mark.synchronize()
            found.append((token._replace(begin_ns=self._ns(token.mark)), self._ns(mark), None))
            self.free += (token.mark, mark)
        if time.perf_counter_ns() - self.anchor_ns > _ANCHOR_NS:
            self._anchor()
        return found

    def _ns(self, mark: torch.cuda.Event) -> int:
        return self.anchor_ns + round(self.anchor.elapsed_time(mark) * 1e6)

    def _anchor(self) -> None:
        self.anchor = torch.cuda.Event(enable_timing=True)
        self.anchor.record()
        self.anchor.synchronize()
        self.anchor_ns = time.perf_counter_ns()


class _SpanFile:
    """A thread that makes text and appends it; what went wrong there is raised by the next give."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self.error: OSError | None = None
        self.thread = threading.Thread(target=self._run, name="fivefold-events", daemon=True)
        self.thread.start()

    def give(self, text: Callable[[], str]) -> None:
        """Append this text soon."""
        self._check()
        self.jobs.put(text)

    def close(self) -> None:
        """Until all is written."""
        self.jobs.put(None)
        self.thread.join()
        self._check()

    def _run(self) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                while (job := self.jobs.get()) is not None:
                    file.write(job())
                    file.flush()
        except OSError as error:
            self.error = error

    def _check(self) -> None:
        if self.error is not None:
            raise FivefoldError(
                f"cannot write {self.path}: {self.error.strerror or self.error}; make room, or go "
                "on without events with --set events=false"
            ) from self.error

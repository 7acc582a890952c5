"""Ranks on this machine: processes that are forked once and then run one task after another.

A fork costs nothing where importing torch costs seconds, so the parent imports everything first.
A rank says what it is doing through its pipe. When one dies, raises or falls silent, the parent
knows which and what it was at, ends all the others, and raises `RankLost`. No rank outlives its
parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.launch.hang import parted
from fivefold.launch.watchdog import read_all
from fivefold.launch.worker import FolderBoard, StopRequest, Worker

PATIENCE = 22.0  # seconds without a word from any rank
_GRACE = 0.5  # seconds in which a death may explain an error that came first
_PR_SET_PDEATHSIG = 1

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a `Worker` and more, and these arguments."""


def num_gpus() -> int:
    """How many GPUs this machine has, as the driver's library counts them.

    CUDA would count them too, but no fork of a process that has asked it can use a GPU.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whatever of torch asks after us
    return torch.cuda.device_count()


class RankLost(RuntimeError):
    """A rank that died, raised or hangs: which one, what it was doing, and how it ended."""

    def __init__(self, rank: int, doing: str, cause: str) -> None:
        self.rank, self.doing, self.cause = rank, doing, cause
        super().__init__(f"rank {rank}, at {doing}: {cause}")


@dataclass(frozen=True)
class ForkedMeeting:
    """Ranks that a pool has forked meet in a folder, and over the loopback device only."""

    folder: Path

    def join(self, rank: int, world: int, device: torch.device) -> None:
        """NCCL where every rank has a GPU of its own, gloo elsewhere."""
        own = device.type == "cuda" and world <= num_gpus()
        dist.init_process_group(
            "nccl" if own else "gloo",
            init_method=(self.folder / "store").as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=5),
            device_id=device if own else None,
        )

    def board(self) -> FolderBoard:
        return FolderBoard(self.folder)

    def leave(self) -> None:
        """The pool ends every rank."""


@dataclass
class _Line:
    """The parent's end: a process, its pipe, and the last it said."""

    process: BaseProcess
    pipe: Connection
    phase: str = "start"
    detail: str = ""
    num_words: int = 0
    busy: bool = False

    @property
    def doing(self) -> str:
        return ", ".join(filter(None, (self.phase, self.detail)))


class Pool:
    """So many forked processes. Use it with `with`; after a `RankLost` it is gone.

    A signal to end (SIGTERM, SIGINT) ends them all at once, or where the pool `forwards_stop`, only
    asks them to come to an end, and a second one ends them.
    """

    def __init__(self, size: int, patience: float = PATIENCE, forwards_stop: bool = False) -> None:
        torch.set_num_threads(1)  # before the fork: threads do not survive it
        import_module("torch._dynamo")  # optimizers load it: once here, not once a rank
        self.patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="fivefold-")
        self._runs = 0
        self._meeting: ForkedMeeting | None = None
        self._lines: list[_Line] = []
        self._forwards_stop, self._stops = forwards_stop, 0
        self._former = self._listen()
        try:
            for rank in range(size):
                self._fork(rank)
        except OSError as error:
            self.close()
            raise RankLost(rank, "start", f"cannot be forked ({error.strerror})") from error

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        return len(self._lines)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [line.process.pid or 0 for line in self._lines]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on every rank; results in the order of the ranks."""
        return self.run_each([(function, args)] * self.size)

    def run_each(
        self,
        tasks: Sequence[Task],
        on_phase: Callable[[], None] | None = None,
        on_report: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Give each of the first ranks its task. Results must not hold tensors.

        `on_phase` is called whenever a rank begins something, `on_report` with what ranks report.
        """
        assert len(tasks) <= self.size, f"{len(tasks)} tasks for {self.size} ranks"
        self._runs += 1
        self._meeting = meeting = ForkedMeeting(Path(self._folder.name) / str(self._runs))
        meeting.folder.mkdir()
        lines = self._lines[: len(tasks)]
        for line, (function, args) in zip(lines, tasks, strict=True):
            line.phase, line.detail, line.num_words, line.busy = "start", "", 0, True
            with contextlib.suppress(BrokenPipeError):  # it has died, as the answer will show
                line.pipe.send_bytes(pickle.dumps((function, args, meeting)))
        try:
            return self._answers(
                lines, on_phase or (lambda: None), on_report or (lambda value: None)
            )
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(meeting.folder, ignore_errors=True)

    def close(self) -> None:
        """End every process now."""
        for line in self._lines:
            line.process.kill()
        for line in self._lines:
            line.process.join()
            line.pipe.close()
        self._lines.clear()
        self._folder.cleanup()
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()

    def _listen(self) -> dict[signal.Signals, Any]:
        """Hear signals to end, in the main thread, where they are heard; what heard them before.

        SIGTERM would not unwind the parent, so that it cleans up; SIGINT does so by itself.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}
        heard = [signal.SIGTERM, *([signal.SIGINT] if self._forwards_stop else [])]
        return {number: signal.signal(number, self._hear) for number in heard}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        if self._stops > 1 or not self._forwards_stop:
            sys.exit(128 + number)
        for line in self._lines:
            line.process.terminate()

    def _fork(self, rank: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [ours, *(line.pipe for line in self._lines)]
        process = context.Process(
            target=_serve,
            args=(rank, theirs, inherited, os.getpid(), self._forwards_stop),
            daemon=True,
        )
        with warnings.catch_warnings():
            # Python warns of forks beside threads; the ranks use none of the parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._lines.append(_Line(process, ours))

    def _answers(
        self, lines: list[_Line], on_phase: Callable[[], None], on_report: Callable[[Any], None]
    ) -> list[Any]:
        results: list[Any] = [None] * len(lines)
        raised: list[RankLost] = []
        until = time.monotonic() + self.patience
        while any(line.busy for line in lines):
            heard = wait([line.pipe for line in lines if line.busy], until - time.monotonic())
            if not heard:
                raise raised[0] if raised else self._silent(lines)
            for rank, line in enumerate(lines):
                if line.pipe not in heard:
                    continue
                kind, what = self._word(rank, line)
                if kind == "done":
                    results[rank] = what
                elif kind == "raised":
                    raised.append(RankLost(rank, line.doing, f"raised {what}"))
                elif kind == "lost":
                    lost, _, cause = what
                    raise RankLost(lost, lines[lost].doing, cause)
                elif kind == "phase":
                    on_phase()
                elif kind == "report":
                    on_report(what)
            until = time.monotonic() + (_GRACE if raised else self.patience)
        if raised:
            raise raised[0]
        return results

    def _word(self, rank: int, line: _Line) -> tuple[str, Any]:
        """The next thing a rank says; the end of its pipe is its death."""
        try:
            kind, what = pickle.loads(line.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death(rank, line) from None
        line.num_words += kind != "report"  # not every rank has something to report
        if kind == "phase":
            line.phase, line.detail = what, ""
        elif kind == "detail":
            line.detail = what
        elif kind in ("done", "raised"):
            line.busy = False
        return kind, what

    def _death(self, rank: int, line: _Line) -> RankLost:
        """Gloo aborts where messages do not fit: then ranks may have called different things, and
        it need not be the one that died which left out something."""
        line.process.join(timeout=5)
        if line.process.exitcode == -signal.SIGABRT and self._meeting is not None:
            positions = read_all(self._meeting.folder, [each.doing for each in self._lines])
            left = parted(positions, sorted(positions))
            if left is not None:
                return RankLost(left.rank, left.doing, left.cause)
        return RankLost(rank, line.doing, _how_it_ended(line.process))

    def _silent(self, lines: list[_Line]) -> RankLost:
        """Of ranks that all wait, the one that got least far keeps the others waiting."""
        busy = [(line.num_words, rank) for rank, line in enumerate(lines) if line.busy]
        _, rank = min(busy)
        return RankLost(rank, lines[rank].doing, f"was silent for {self.patience:.0f} s")


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _serve(
    rank: int, pipe: Connection, inherited: list[Connection], parent: int, hears_stop: bool
) -> None:
    """The life of a rank: tasks until the pipe closes."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a rank that aborts says where
    stop = StopRequest()
    if hears_stop:
        stop.listen()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    for other in inherited:
        other.close()
    _die_with(parent)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()

    one_at_a_time = threading.Lock()  # a rank's watchdog speaks for itself

    def tell(kind: str, what: object) -> None:
        with one_at_a_time:
            pipe.send_bytes(pickle.dumps((kind, what), protocol=5))

    while True:
        try:
            function, args, meeting = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("done", function(Worker(rank, meeting, tell, stop), *args))
        except Exception as error:
            answer = ("raised", _told(error))
        gc.collect()  # modules with hooks are cycles, and hold process groups with their threads
        tell(*answer)


def _told(error: Exception) -> str:
    """What was raised, and the last places it came through."""
    first, *rest = traceback.format_exception(error, limit=-4)
    return f"{type(error).__name__}: {error}\n" + "".join([first, *rest]).rstrip()


def _die_with(parent: int) -> None:
    """Where the kernel offers it, be killed when the parent ends; elsewhere the pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])

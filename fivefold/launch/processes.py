"""Ranks on this machine: processes that are forked once and then run one task after another.

A fork is cheap and importing torch takes seconds, so the parent imports everything first. A rank
reports its phase through a pipe. If a rank dies, raises or sends nothing for too long, the parent
ends all ranks and raises `RankLost` with the rank and its last phase. No rank outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fivefold.core import FivefoldError, RankLost
from fivefold.launch.backend import RankDevice, require_forkable
from fivefold.launch.backend import num_gpus as num_gpus  # whoever forks GPU ranks counts them
from fivefold.launch.watch import FolderBoard, diverged, read_positions
from fivefold.launch.worker import StopRequest, Worker, stop_signals

# Temporary folders: in one forked ranks meet, in another a server has its sockets. Those that a
# killed process left are removed by the next one: the operating system takes the lock on its
# owner's file away with the process.

_RANKS = "fivefold-ranks-"
_OWNER = "owner"


class TemporaryFolder:
    """A temporary folder, removed with the process."""

    def __init__(self, prefix: str = _RANKS) -> None:
        sweep(Path(tempfile.gettempdir()), prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-")
        self.path = Path(self._folder.name)
        # A lock of the process, which forked ranks do not have: it goes with the launcher alone.
        self._owner = (self.path / _OWNER).open("w")
        fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        self._folder.cleanup()
        self._owner.close()


def sweep(parent: Path, prefix: str = _RANKS) -> None:
    """Remove temporary folders of processes that have ended."""
    ours = re.compile(rf"{prefix}(\d+)-\w+")
    for folder in parent.glob(f"{prefix}*"):
        match = ours.fullmatch(folder.name)
        # To open our own file would give the lock away when it is closed.
        if match is None or int(match[1]) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it is locked, just being made, or of another user
            with (folder / _OWNER).open("r+") as owner:
                fcntl.lockf(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


# What a rank says to the process that forked it, without ever waiting for that process.
#
# Messages go into the socket at once as long as it has room. If the other process does not read,
# the rest waits here, and a thread sends it when there is room again. Beyond a limit the oldest
# messages that only inform are dropped and counted; results are never.

_MOST_BYTES = 16 << 20  # that wait
_DROPPED = ("phase", "detail", "report", "note")
_LARGEST = 0x7FFFFFFF  # bytes of a message whose header is short


class RankPipe:
    """Sending end of the pipe from a rank to its parent."""

    def __init__(self, pipe: Connection, most_bytes: int = _MOST_BYTES) -> None:
        # A second descriptor of the same socket: the first one still receives.
        self._socket = socket.socket(fileno=socket.dup(pipe.fileno()))
        self._lock = threading.Lock()  # the watchdog thread sends too
        self._waiting: deque[tuple[str, memoryview]] = deque()
        self._begun = False  # the first message is sent in part
        self._size, self._most = 0, most_bytes
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def send(self, kind: str, value: object) -> None:
        """Queue a message; never blocks."""
        message = _framed(pickle.dumps((kind, value), protocol=5))
        with self._lock:
            self._waiting.append((kind, message))
            self._size += len(message)
            self._push()
            self._shrink()
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fivefold-say", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all messages are sent."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Close this end's descriptor; the pipe stays open."""
        self._socket.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while self._thread is not None:
            poller.poll()
            with self._lock, contextlib.suppress(OSError):  # the other process is gone
                self._push()
            with self._lock:
                if not self._waiting:
                    self._thread = None

    def _push(self) -> None:
        """Send what the socket takes without waiting; raises if the other process is gone."""
        while self._waiting:
            kind, payload = self._waiting[0]
            try:
                sent = self._socket.send(payload, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._waiting.clear()
                raise
            self._size -= sent
            self._begun = sent < len(payload)
            if self._begun:
                self._waiting[0] = (kind, payload[sent:])
            else:
                self._waiting.popleft()

    def _shrink(self) -> None:
        """Drop the oldest messages that only inform, until the rest is small enough."""
        first = int(self._begun)
        while self._size > self._most and first < len(self._waiting):
            kind, message = self._waiting[first]
            if kind not in _DROPPED:
                first += 1
                continue
            del self._waiting[first]
            self._size -= len(message)
            self.num_dropped += 1


def _framed(data: bytes) -> memoryview:
    """A message as `Connection.recv_bytes` reads it."""
    if len(data) > _LARGEST:
        return memoryview(struct.pack("!iQ", -1, len(data)) + data)
    return memoryview(struct.pack("!i", len(data)) + data)


PATIENCE = 22.0  # seconds without a message from any rank
_GRACE = 0.5  # seconds after an error in which the death of another rank may explain it
_AT_WORK = 0.1  # of a core, all ranks together: those that wait for a message use less
_LONGEST = 220.0  # seconds that ranks may be silent while they compute, if their patience is less
_PR_SET_PDEATHSIG = 1
_REFUSED = "refused"  # by a rule that every start breaks
_ERRORS = ("raised", _REFUSED)

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function whose first argument is a `Worker`, and its other arguments."""


@dataclass(frozen=True)
class ForkedMeeting:
    """Rendezvous of forked ranks: a folder, and connections over loopback."""

    folder: Path
    address: str | None = None  # the parent sees who dies
    store: str = ""

    def join(
        self, rank: int, world: int, device: RankDevice, timeout: timedelta | None = None
    ) -> None:
        store = (self.folder / "store").as_uri()
        device.join(rank, world, timeout or timedelta(minutes=5), init_method=store)

    def board(self, on_silence: Callable[[float], None]) -> FolderBoard:
        return FolderBoard(self.folder)

    def leave(self) -> None:
        """Do nothing: the pool ends every rank."""


@dataclass
class _Child:
    """State of a rank in the parent: its process, pipe and last messages."""

    process: BaseProcess
    pipe: Connection
    phase: str = "start"
    detail: str = ""
    num_messages: int = 0
    busy: bool = False

    @property
    def doing(self) -> str:
        return ", ".join(filter(None, (self.phase, self.detail)))


class _Silence:
    """Timeout of messages from all ranks. With more ranks than cores, ranks that compute may be
    silent longer than ranks that wait."""

    def __init__(self, children: Sequence[_Child], patience: float, longest: float) -> None:
        self.children, self.longest, self.seconds = children, longest, patience / 2
        self.began, self.used = time.monotonic(), float("inf")

    @property
    def length(self) -> float:
        return time.monotonic() - self.began

    def goes_on(self) -> bool:
        """Whether to wait for so many seconds more: at first, and while ranks compute."""
        used, before = sum(_cpu_seconds(child.process.pid) for child in self.children), self.used
        self.used = used
        if before == float("inf"):
            return True
        if any(_is_stopped(child.process.pid) for child in self.children):
            return False  # others may spin while they wait for it
        computes = used - before > _AT_WORK * self.seconds
        return computes and self.length < self.longest


def _stat(pid: int | None) -> list[str]:
    """The state of a process and what follows it; nothing where nobody says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int | None) -> float:
    """What a process has used of all cores; 0 where nobody says."""
    return sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def _is_stopped(pid: int | None) -> bool:
    """Whether a signal or a debugger has stopped it."""
    return _stat(pid)[:1] in (["T"], ["t"])


class Pool:
    """Pool of forked ranks, a context manager; closed after a `RankLost`.

    SIGTERM, SIGINT and SIGHUP end all ranks. With `forwards_stop` the first signal is passed on to
    the ranks, which stop by themselves, and the second one ends them.
    """

    def __init__(self, size: int, patience: float = PATIENCE, forwards_stop: bool = False) -> None:
        require_forkable()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # before the fork: threads do not survive it
        import_module("torch._dynamo")  # optimizers load it: here once, not in every rank
        self.patience, self.longest = patience, _LONGEST
        self._folder = TemporaryFolder()
        self._runs = 0
        self._meeting: ForkedMeeting | None = None
        self._children: list[_Child] = []
        self._forwards_stop, self._stops = forwards_stop, 0
        self._former_handlers = self._handle_signals()
        try:
            for rank in range(size):
                with self._forking(rank) as process:
                    process.start()
            if self._stops:  # before there was a rank to pass it on to
                self._stop_ranks()
        except OSError as error:
            self.close()
            raise RankLost(rank, "start", f"cannot be forked ({error.strerror})") from error

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [child.process.pid or 0 for child in self._children]

    def allow_silence(self, seconds: float, computing: float) -> None:
        """Set the seconds without a message after which ranks are lost, `computing` if they
        compute."""
        self.patience, self.longest = seconds, computing

    @property
    def stopping(self) -> bool:
        """Whether a stop signal was received."""
        return self._stops > 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on every rank; returns results by rank."""
        return self.run_each([(function, args)] * self.size)

    def run_each(
        self,
        tasks: Sequence[Task],
        on_phase: Callable[[], None] | None = None,
        on_report: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Run one task on each of the first ranks. Results must not contain tensors.

        `on_phase` is called when a rank begins a phase, `on_report` with every reported value.
        """
        assert len(tasks) <= self.size, f"{len(tasks)} tasks for {self.size} ranks"
        self._runs += 1
        self._meeting = meeting = ForkedMeeting(self._folder.path / str(self._runs))
        meeting.folder.mkdir()
        children = self._children[: len(tasks)]
        for child, (function, args) in zip(children, tasks, strict=True):
            child.phase, child.detail, child.num_messages, child.busy = "start", "", 0, True
            with contextlib.suppress(BrokenPipeError):  # it has died; the pipe will show it
                child.pipe.send_bytes(pickle.dumps((function, args, meeting)))
        try:
            return self._answers(
                children, on_phase or (lambda: None), on_report or (lambda value: None)
            )
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(meeting.folder, ignore_errors=True)

    def renew(self) -> None:
        """End all processes, and fork new ones.

        torch 2.11 crashes where a process splits a group over NCCL that has had another group of
        all ranks before.
        """
        size = self.size
        self._end()
        for rank in range(size):
            with self._forking(rank) as process:
                process.start()

    def close(self) -> None:
        """End all processes."""
        self._end()
        torch.set_num_threads(self._threads)
        self._folder.remove()
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._former_handlers.clear()

    def _end(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join()
            child.pipe.close()
        self._children.clear()

    def _handle_signals(self) -> dict[signal.Signals, Any]:
        """Install signal handlers, which only the main thread can do; returns the former ones.

        Without a handler SIGTERM would end the parent without a clean-up. SIGINT raises by itself.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}
        skipped = () if self._forwards_stop else (signal.SIGINT,)
        handled = [number for number in stop_signals() if number not in skipped]
        return {number: signal.signal(number, self._on_signal) for number in handled}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        if self._stops > 1 or not self._forwards_stop:
            sys.exit(128 + number)
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        for child in self._children:
            child.process.terminate()

    @contextmanager
    def _forking(self, rank: int) -> Generator[BaseProcess]:
        """The process of a rank, to be started in the block: who starts it is in its stack, which
        so stays short."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [ours, *(child.pipe for child in self._children)]
        # Signals wait until the rank has handlers of its own: this process's would run in it.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        process = context.Process(
            target=_serve,
            args=(rank, theirs, inherited, os.getpid(), self._forwards_stop, former),
            daemon=True,
        )
        try:
            with warnings.catch_warnings():
                # Python warns about forks of threaded processes; ranks use no thread of the parent.
                warnings.simplefilter("ignore", DeprecationWarning)
                yield process
            theirs.close()
            self._children.append(_Child(process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _answers(
        self, children: list[_Child], on_phase: Callable[[], None], on_report: Callable[[Any], None]
    ) -> list[Any]:
        results: list[Any] = [None] * len(children)
        raised: list[RankLost] = []
        silence = _Silence(children, self.patience, self.longest)
        while any(child.busy for child in children):
            pipes = [child.pipe for child in children if child.busy]
            ready = wait(pipes, _GRACE if raised else silence.seconds)
            if not ready and not raised and silence.goes_on():
                continue
            if not ready:
                raise raised[0] if raised else self._silent(children, silence.length)
            for rank, child in enumerate(children):
                if child.pipe not in ready:
                    continue
                kind, value = self._receive(rank, child)
                if kind == "done":
                    results[rank] = value
                elif kind in _ERRORS:
                    final = kind == _REFUSED
                    raised.append(RankLost(rank, child.doing, f"raised {value}", final=final))
                elif kind == "lost":
                    lost, _, cause = value
                    raise RankLost(lost, children[lost].doing, cause)
                elif kind == "phase":
                    on_phase()
                elif kind in ("report", "note"):
                    on_report(value)
            silence = _Silence(children, self.patience, self.longest)
        if raised:
            raise raised[0]
        return results

    def _receive(self, rank: int, child: _Child) -> tuple[str, Any]:
        """The next message of a rank. The end of its pipe means that it died."""
        try:
            kind, value = pickle.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death(rank, child) from None
        child.num_messages += kind not in ("report", "note")  # not every rank reports
        if kind == "phase":
            child.phase, child.detail = value, ""
        elif kind == "detail":
            child.detail = value
        elif kind in ("done", *_ERRORS):
            child.busy = False
        return kind, value

    def _death(self, rank: int, child: _Child) -> RankLost:
        """The rank to blame for a death.

        Gloo aborts if the messages of two ranks do not match. Then the rank that called another
        collective is to blame, which need not be the one that died.
        """
        child.process.join(timeout=5)
        if child.process.exitcode == -signal.SIGABRT and self._meeting is not None:
            phases = [peer.doing for peer in self._children]
            positions = read_positions(self._meeting.folder, phases)
            divergence = diverged(positions, sorted(positions))
            if divergence is not None:
                return RankLost(divergence.rank, divergence.doing, divergence.cause)
        return RankLost(rank, child.doing, _how_it_ended(child.process))

    def _silent(self, children: list[_Child], seconds: float) -> RankLost:
        """If all ranks wait, one that was stopped or the one with the fewest messages keeps the
        others waiting."""
        _, _, rank = min(
            (not _is_stopped(child.process.pid), child.num_messages, i)
            for i, child in enumerate(children)
            if child.busy
        )
        return RankLost(rank, children[rank].doing, f"was silent for {seconds:.0f} s")


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _serve(
    rank: int,
    pipe: Connection,
    inherited: list[Connection],
    parent: int,
    handles_stop: bool,
    signal_mask: set[signal.Signals],
) -> None:
    """Run tasks in a forked rank until the pipe closes; signals wait until it can handle them."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # print the stack of a rank that aborts
    stop = StopRequest()
    if handles_stop:
        stop.listen()
    else:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this rank
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    for other in inherited:
        other.close()
    die_with(parent)
    gc.freeze()  # what the parent has made stays: only a rank's own objects are looked through
    torch.set_num_threads(1)
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), names[0])
    os.environ["GLOO_SOCKET_IFNAME"] = loopback

    says = RankPipe(pipe)
    while True:
        try:
            function, args, meeting = pickle.loads(pipe.recv_bytes())
        except EOFError:
            says.close()
            return
        try:
            answer = ("done", function(Worker(rank, meeting, says.send, stop), *args))
        except Exception as error:
            frames = "".join(traceback.format_exception(error, limit=-4)).rstrip()  # the innermost
            summary = f"{type(error).__name__}: {error}"
            answer = ("raised", f"{summary}\n{frames}")
            if isinstance(error, FivefoldError):  # what a user did wrong needs no frames
                answer = (_REFUSED, summary)
        gc.collect()  # modules with hooks are in cycles and keep process groups and threads alive
        says.send(*answer)
        says.flush()


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere the closed pipe ends the
    rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

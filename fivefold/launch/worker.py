"""One rank as its task sees it: how it meets the other ranks, and how it reports.

A `Meeting` brings ranks together: forked ranks (`processes.py`) or ranks that torchrun, srun or a
Kubernetes PyTorchJob started (`LaunchedMeeting`). Both run the same task with the same `Worker`.
A `Board` (`boards.py`) carries short texts between ranks beside their collectives. A forked rank
reports to the parent process; of launched ranks, rank 0 prints. A launched rank that loses the run
ends with exit code 1, and the launcher then restarts or ends all ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from fivefold.core import FivefoldError
from fivefold.launch.backend import RankDevice
from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.watch import Board, HangVerdict, StoreBoard, ranks, watch_launcher

ON_CPU = RankDevice()
CUT_OFF = "cut off"  # a message: this rank cannot reach the store
_MEETING_TIMEOUT = timedelta(minutes=10)
_POLL_SECONDS = 0.2  # between two looks for the name of this start
_BACKLOG = 2048  # connections that wait to be taken
_CONNECT_SECONDS = 2.0  # of one attempt
_NAMED_SECONDS = 24.0  # after which rank 0 names the ranks that it waits for
_LINGER_SECONDS = 2.0  # in which other ranks read the verdict before rank 0 ends with the store


class Meeting(Protocol):
    """Rendezvous of ranks."""

    @property
    def folder(self) -> Path | None:
        """Folder shared by ranks on one machine; None on several."""

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        """Create the process group of all ranks."""

    def board(self) -> Board:
        """Board of these ranks."""

    def leave(self) -> None:
        """Leave a lost run, after the verdict is published."""


class NoMeeting:
    """Rendezvous of a single rank."""

    folder = None

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        raise AssertionError("a rank that is alone joins no group")

    def board(self) -> Board:
        raise AssertionError("a rank that is alone needs no board")

    def leave(self) -> None:
        """Do nothing."""


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP of a terminal that is closed unless `nohup` has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


class StopRequest:
    """Stop signals of this rank."""

    def __init__(self) -> None:
        self.pending = False
        self._number = signal.SIGTERM

    def listen(self) -> None:
        """Install signal handlers. Launchers send signals twice, which changes nothing."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pending, self._number = True, signal.Signals(number)

    def heed(self) -> None:
        """Exit if a stop signal was received, where there is nothing to save yet."""
        if self.pending:
            sys.exit(128 + self._number)


@dataclass(frozen=True)
class Worker:
    """One rank. `send` passes a message (kind, value) to the parent process."""

    rank: int
    meeting: Meeting
    send: Callable[[str, object], None]
    stop: StopRequest = field(default_factory=StopRequest)

    @classmethod
    def alone(cls, send: Callable[[str, object], None]) -> Worker:
        """A single rank in this process."""
        return cls(0, NoMeeting(), send)

    @property
    def stopping(self) -> bool:
        """Whether a stop signal was received."""
        return self.stop.pending

    def phase(self, text: str) -> None:
        """Report the phase of this rank."""
        self.send("phase", text)

    def detail(self, text: str) -> None:
        """Report progress within the phase."""
        self.send("detail", text)

    def report(self, value: object) -> None:
        """Report a value before the task ends."""
        self.send("report", value)

    def lose(self, verdict: HangVerdict) -> None:
        """End the run, and report the lost rank."""
        self.send("lost", (verdict.rank, verdict.doing, verdict.cause))

    @contextlib.contextmanager
    def joined(self, world: int, device: RankDevice = ON_CPU) -> Iterator[None]:
        """Context with a process group of the first `world` ranks, on the current device of this
        thread.

        After an error the group stays up. The other ranks then wait where they are, instead of
        reporting a broken connection before the cause is known.
        """
        device.start()
        if world == 1:
            yield
            return
        self.meeting.join(self.rank, world, device)
        yield
        dist.barrier()
        dist.destroy_process_group()


# Ranks that a launcher started.


class LaunchedMeeting:
    """Rendezvous of ranks of a launcher, over a TCP store."""

    folder = None

    def __init__(self, launched: LauncherEnvironment, stop: StopRequest | None = None) -> None:
        self.launched, self.stop = launched, stop or StopRequest()

    @cached_property
    def _store(self) -> tuple[dist.Store, str]:
        """The connection to the store, and the prefix of all keys of this start."""
        store = self._connect(hosts=self.launched.rank == 0 and not self.launched.hosted)
        rank, world = self.launched.rank, self.launched.world
        return store, agree_on_prefix(store, rank, world, self.stop)

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        assert world == self.launched.world, "all launched ranks join, or none"
        store, prefix = self._store
        group = dist.PrefixStore(f"{prefix}/group", store)
        device.join(rank, world, _MEETING_TIMEOUT, store=group)

    def board(self) -> StoreBoard:
        """A board with a connection of its own: a connection that waits for a key is blocked."""
        _, prefix = self._store  # after this, the store of rank 0 is up
        return StoreBoard(dist.PrefixStore(prefix, self._connect(hosts=False)))

    def leave(self) -> NoReturn:
        """End this process. Rank 0 may host the store, so it waits until others have read the
        verdict."""
        if self.launched.rank == 0:
            time.sleep(_LINGER_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the main thread may hang

    def _connect(self, hosts: bool) -> dist.Store:
        """Try until the store is there, or this process is asked to stop."""
        host, port = self.launched.host, self.launched.port
        until = time.monotonic() + _MEETING_TIMEOUT.total_seconds()
        while True:
            try:
                store = dist.TCPStore(
                    *(host, port, self.launched.world, hosts),
                    timeout=timedelta(seconds=_CONNECT_SECONDS),
                    wait_for_workers=False,
                    master_listen_fd=_listening(host, port) if hosts else None,
                )
                store.set_timeout(_MEETING_TIMEOUT)
                return store
            except (dist.DistError, OSError) as error:
                self.stop.heed()
                if not hosts and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise FivefoldError(
                    f"rank {self.launched.rank} cannot reach the meeting point {host}:{port}: set "
                    "MASTER_ADDR and MASTER_PORT to a host and a free port that all hosts can "
                    f"reach ({error})"
                ) from error


def _listening(host: str, port: int) -> int | None:
    """A socket for the store on the loopback device, if the hosts meet there: torch would listen on
    all devices, and whoever reaches the port could write into the run. None: torch makes it.

    A name of this host may mean loopback here and not elsewhere, so that only loopback itself does.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return None
    if not loopback:
        return None
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, number) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener.detach()  # the store closes it


def agree_on_prefix(store: dist.Store, rank: int, world: int, stop: StopRequest) -> str:
    """Choose a key prefix that is common to all ranks of this start, and new."""
    agreeing = agreement(store, rank, world, time.monotonic)
    while True:
        stop.heed()
        try:
            next(agreeing)
        except StopIteration as agreed:
            return agreed.value
        time.sleep(_POLL_SECONDS)


def agreement(
    store: dist.Store, rank: int, world: int, clock: Callable[[], float]
) -> Generator[None, None, str]:
    """Agree on a prefix; yields where it would wait.

    torchrun reuses its store when it restarts the ranks, and each host counts restarts by itself.
    So rank 0 offers a new prefix. Every other rank answers under it with a unique key, and rank 0
    confirms at that key. Offers of earlier starts are never confirmed. Nobody waits inside of the
    store, where a signal would not be heard.
    """
    unique = uuid.uuid4().hex
    if rank == 0:
        store.set("fivefold/offer", unique)
        yield from _confirm(store, unique, set(range(1, world)), clock)
        return unique
    began, answered = clock(), ""
    while clock() - began < _MEETING_TIMEOUT.total_seconds():
        offer = store.get("fivefold/offer").decode() if store.check(["fivefold/offer"]) else ""
        if offer != answered:
            store.set(f"fivefold/{offer}/{rank}", unique)
            answered = offer
        if store.check([f"fivefold/{unique}"]):
            return store.get(f"fivefold/{unique}").decode()
        yield
    raise FivefoldError(
        f"rank {rank} has waited {_MEETING_TIMEOUT} for all {world} ranks: look at those that did "
        "not start"
    )


def _confirm(
    store: dist.Store, unique: str, missing: set[int], clock: Callable[[], float]
) -> Iterator[None]:
    """Rank 0 waits for all others, and says after a while who has not come."""
    began, notice = clock(), False
    while missing:
        for other in sorted(missing):
            if store.check([key := f"fivefold/{unique}/{other}"]):
                store.set(f"fivefold/{store.get(key).decode()}", unique)
                missing.discard(other)
        waited = clock() - began
        if not missing:
            break
        if waited > _MEETING_TIMEOUT.total_seconds():
            raise FivefoldError(
                f"{ranks(missing)} did not come within {_MEETING_TIMEOUT}: look at their logs"
            )
        if waited > _NAMED_SECONDS and not notice:
            notice = True
            text = f"{ranks(missing)} did not come within {waited:.0f} s; rank 0 waits on"
            print(f"fivefold: {text}", file=sys.stderr, flush=True)
        yield


def joined_worker(launched: LauncherEnvironment, on_report: Callable[[Any], None]) -> Worker:
    """A worker of this process that handles stop signals. Rank 0 calls `on_report`."""
    stop, launcher = StopRequest(), os.getppid()
    meeting = LaunchedMeeting(launched, stop)
    stop.listen()

    def send(kind: str, value: Any) -> None:
        if kind == "report" and launched.rank == 0:
            on_report(value)
        elif kind == CUT_OFF and launched.hosted:  # by torchrun
            watch_launcher(launcher, launched.host, launched.port)
        elif kind == "lost":
            print(f"fivefold: {HangVerdict(*value)}", file=sys.stderr, flush=True)
            meeting.leave()

    return Worker(launched.rank, meeting, send, stop)

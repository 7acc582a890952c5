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
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from fivefold.core import FivefoldError
from fivefold.launch.backend import RankDevice
from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.watch import FAN, Board, HangVerdict, StoreBoard, ranks, watch_launcher

ON_CPU = RankDevice()
CUT_OFF = "cut off"  # a message: this rank cannot reach the store
_MEETING_TIMEOUT = timedelta(minutes=10)
_MARGIN = 120.0  # seconds for verdicts
_NEVER = 1e6  # seconds: eleven days
_POLL_SECONDS = 0.2  # between two looks for the name of this start
_POLLS = 8192  # looks of all ranks together in a second
_OFFER_LOOKS = 4  # of which one is for an offer that is newer than the one that was answered
_BACKLOG = 2048  # connections that wait to be taken
_CONNECT_SECONDS = 2.0  # of one attempt
_NAMED_SECONDS = 24.0  # after which rank 0 names the ranks that it waits for
_LINGER_SECONDS = 2.0  # in which other ranks read the verdict before rank 0 ends with the store


class Meeting(Protocol):
    """Rendezvous of ranks."""

    @property
    def folder(self) -> Path | None:
        """Folder shared by ranks on one machine; None on several."""

    @property
    def address(self) -> str | None:
        """Where this process takes connections, from which others see that it is there; None if
        its parent sees that."""

    @property
    def store(self) -> str:
        """Where the store takes connections, if the board is one."""

    def join(
        self, rank: int, world: int, device: RankDevice, timeout: timedelta | None = None
    ) -> None:
        """Create the process group of all ranks."""

    def board(self, on_silence: Callable[[float], None]) -> Board:
        """Board of these ranks, which calls `on_silence` with the seconds that it has not
        answered; it raises if there is no use in waiting."""

    def leave(self) -> None:
        """Leave a lost run, after the verdict is published."""


class NoMeeting:
    """Rendezvous of a single rank."""

    folder, address, store = None, None, ""

    def join(
        self, rank: int, world: int, device: RankDevice, timeout: timedelta | None = None
    ) -> None:
        raise AssertionError("a rank that is alone joins no group")

    def board(self, on_silence: Callable[[float], None]) -> Board:
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

    def note(self, text: str) -> None:
        """Say what others should know now, from any rank."""
        self.send("note", text)

    def lose(self, verdict: HangVerdict) -> None:
        """End the run, and report the lost rank."""
        self.send("lost", (verdict.rank, verdict.doing, verdict.cause))

    @contextlib.contextmanager
    def joined(
        self, world: int, device: RankDevice = ON_CPU, hang_after: float | None = None
    ) -> Iterator[None]:
        """Context with a process group of the first `world` ranks, on the current device of this
        thread. With a watchdog that ends it after `hang_after` seconds (0: never), torch's own
        limit is a later one.

        After an error the group stays up. The other ranks then wait where they are, instead of
        reporting a broken connection before the cause is known.
        """
        device.start()
        if world == 1:
            yield
            return
        timeout = None if hang_after is None else timedelta(seconds=torch_limit(hang_after))
        self.meeting.join(self.rank, world, device, timeout)
        yield
        dist.barrier()
        dist.destroy_process_group()


def torch_limit(hang_after: float) -> float:
    """Seconds that torch, and who started the ranks, wait for what a watchdog ends before that."""
    return max(_MEETING_TIMEOUT.total_seconds(), hang_after + _MARGIN) if hang_after else _NEVER


# Ranks that a launcher started.


class LaunchedMeeting:
    """Rendezvous of ranks of a launcher, over a TCP store."""

    folder = None

    def __init__(self, launched: LauncherEnvironment, stop: StopRequest | None = None) -> None:
        self.launched, self.stop = launched, stop or StopRequest()

    @property
    def store(self) -> str:
        return f"{self.launched.host}:{self.launched.port}"

    @cached_property
    def address(self) -> str | None:
        """A socket on the device that reaches the store. Its thread only takes connections. None
        where that device is loopback and other hosts may take part: they could not reach it."""
        family, *_, target = socket.getaddrinfo(
            self.launched.host, self.launched.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(target)
            host = route.getsockname()[0]
        one_host = self.launched.local_world == self.launched.world
        if ipaddress.ip_address(host).is_loopback and not one_host:
            return None
        listener = socket.create_server((host, 0), family=family)
        links: list[socket.socket] = []  # of those who look whether this process is there

        def take() -> None:
            while True:
                links.append(listener.accept()[0])

        Thread(target=take, name="fivefold-alive", daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}"

    @cached_property
    def _store(self) -> tuple[dist.Store, str]:
        """The connection to the store, and the prefix of all keys of this start."""
        store = self._connect(hosts=self.launched.rank == 0 and not self.launched.hosted)
        rank, world = self.launched.rank, self.launched.world
        return store, agree_on_prefix(store, rank, world, self.stop)

    def join(
        self, rank: int, world: int, device: RankDevice, timeout: timedelta | None = None
    ) -> None:
        assert world == self.launched.world, "all launched ranks join, or none"
        store, prefix = self._store
        group = dist.PrefixStore(f"{prefix}/group", store)
        device.join(rank, world, timeout or _MEETING_TIMEOUT, store=group)

    def board(self, on_silence: Callable[[float], None]) -> StoreBoard:
        """A board with a connection of its own: a connection that waits for a key is blocked."""
        _, prefix = self._store  # after this, the store of rank 0 is up
        store = self._connect(hosts=False)
        store.set_timeout(timedelta(seconds=_NEVER))  # `on_silence` decides
        return StoreBoard(dist.PrefixStore(prefix, store), on_silence)

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
        time.sleep(look_seconds(world))


def look_seconds(world: int) -> float:
    """Seconds between two looks of a rank: the store serves all ranks of the job."""
    return max(_POLL_SECONDS, world / _POLLS)


def agreement(
    store: dist.Store, rank: int, world: int, clock: Callable[[], float]
) -> Generator[None, None, str]:
    """Agree on a prefix; yields where it would wait.

    torchrun reuses its store when it restarts the ranks, and each host counts restarts by itself.
    So rank 0 offers a new prefix. Every other rank answers under it with a unique key, and is
    confirmed at that key. Offers of earlier starts are never confirmed. The first rank of each
    block answers for its block once all of it is there, is confirmed by rank 0, and confirms the
    others. Nobody waits inside of the store, where a signal would not be heard.
    """
    unique = uuid.uuid4().hex
    if rank == 0:
        store.set("fivefold/offer", unique)
        yield from _confirm(store, unique, world, clock)
        return unique
    block = range(rank + 1, min(rank + FAN, world)) if rank % FAN == 0 else range(0)
    began, offer, looks, uniques = clock(), "", 0, list[str]()
    while clock() - began < _MEETING_TIMEOUT.total_seconds():
        if looks % _OFFER_LOOKS == 0 or not offer:
            newest = store.get("fivefold/offer").decode() if store.check(["fivefold/offer"]) else ""
            if newest != offer:
                offer, uniques = newest, []
                if rank % FAN:
                    store.set(f"fivefold/{offer}/{rank}", unique)
        looks += 1
        if offer and rank % FAN == 0 and not uniques:
            answers = _answers(store, [f"fivefold/{offer}/{other}" for other in block])
            if answers is not None:
                uniques = [unique, *answers]
                store.set(f"fivefold/{offer}/{rank}", unique)
        if store.check([f"fivefold/{unique}"]):
            prefix = store.get(f"fivefold/{unique}").decode()
            for other in uniques[1:]:
                store.set(f"fivefold/{other}", prefix)
            return prefix
        yield
    raise FivefoldError(
        f"rank {rank} has waited {_MEETING_TIMEOUT} for all {world} ranks: look at those that did "
        "not start"
    )


def _answers(store: dist.Store, keys: list[str]) -> list[str] | None:
    """The values of all keys; None while one is not there. One call asks for all of them."""
    if keys and not store.check(keys):
        return None
    return [store.get(key).decode() for key in keys]


def _confirm(
    store: dist.Store, unique: str, world: int, clock: Callable[[], float]
) -> Iterator[None]:
    """Rank 0 waits for its block and for the first ranks of all blocks, and says after a while who
    has not come."""
    began, notice = clock(), False
    first = [*range(1, min(FAN, world)), *range(FAN, world, FAN)]
    while (answers := _answers(store, [f"fivefold/{unique}/{rank}" for rank in first])) is None:
        waited = clock() - began
        if waited > _MEETING_TIMEOUT.total_seconds():
            raise FivefoldError(
                f"{ranks(_missing(store, unique, world))} did not come within {_MEETING_TIMEOUT}: "
                "look at their logs"
            )
        if waited > _NAMED_SECONDS and not notice:
            notice = True
            names = ranks(_missing(store, unique, world))
            text = f"{names} did not come within {waited:.0f} s; rank 0 waits on"
            print(f"fivefold: {text}", file=sys.stderr, flush=True)
        yield
    for answer in answers:
        store.set(f"fivefold/{answer}", unique)


def _missing(store: dist.Store, unique: str, world: int) -> list[int]:
    """The ranks that have not answered an offer; of a block without its first rank, perhaps that
    one alone."""
    absent = [rank for rank in range(1, world) if not store.check([f"fivefold/{unique}/{rank}"])]
    # The first rank of a block answers when all others of it have.
    waits = {rank - rank % FAN for rank in absent if rank % FAN}
    return [rank for rank in absent if rank not in waits]


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
        elif kind == "note":
            print(f"fivefold: {value}", file=sys.stderr, flush=True)
        elif kind == "lost":
            print(f"fivefold: {HangVerdict(*value)}", file=sys.stderr, flush=True)
            meeting.leave()

    return Worker(launched.rank, meeting, send, stop)

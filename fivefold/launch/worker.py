"""One rank as its task sees it: how it meets the other ranks, and how it reports.

A `Meeting` brings ranks together: forked ranks (`processes.py`) or ranks that torchrun, srun or a
Kubernetes PyTorchJob started (`LaunchedMeeting`). Both run the same task with the same `Worker`.
A `Board` carries short texts between ranks beside their collectives. A forked rank reports to the
parent process; of launched ranks, rank 0 prints. A launched rank that loses the run ends with exit
code 1, and the launcher then restarts or ends all ranks.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from fivefold.core.errors import FivefoldError
from fivefold.launch.backend import RankDevice
from fivefold.launch.hang import HangVerdict
from fivefold.launch.launcher import LauncherEnvironment

ON_CPU = RankDevice()
_MEETING_TIMEOUT = timedelta(minutes=10)
_POLL_SECONDS = 0.2  # between two looks for the name of this start
_BACKLOG = 2048  # connections that wait to be taken
_LINGER_SECONDS = 2.0  # in which other ranks read the verdict before rank 0 ends with the store


class Board(Protocol):
    """Short texts by name that all ranks see. No method waits for another rank."""

    def put(self, name: str, text: str) -> None:
        """Write a text, or replace it."""

    def get(self, name: str) -> str | None:
        """The text, or None if there is none yet."""

    def claim(self, name: str, text: str) -> bool:
        """Write a text if there is none yet; whether this rank was the first."""


class FolderBoard:
    """For ranks on one machine: one file per name.

    torch's `FileStore` does not serve: a reader hangs if a writer was killed in a write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.{os.getpid()}"
        written.write_text(text, "utf-8")
        written.replace(self.folder / name)  # a reader sees the full text or none

    def get(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text("utf-8")
        except FileNotFoundError:
            return None

    def claim(self, name: str, text: str) -> bool:
        try:
            with (self.folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True


class StoreBoard:
    """For ranks on several machines: torch's store."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("board", store)

    def put(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str | None:
        return self.store.get(name).decode() if self.store.check([name]) else None

    def claim(self, name: str, text: str) -> bool:
        return self.store.compare_set(name, "", text).decode() == text


class Meeting(Protocol):
    """How ranks come together."""

    @property
    def folder(self) -> Path | None:
        """A folder that ranks on one machine share; None for ranks on several."""

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        """Create the process group of all ranks."""

    def board(self) -> Board:
        """The board of these ranks."""

    def leave(self) -> None:
        """Leave a lost run, after the verdict is on the board."""


class NoMeeting:
    """Of a rank that is alone."""

    folder = None

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        raise AssertionError("a rank that is alone joins no group")

    def board(self) -> Board:
        raise AssertionError("a rank that is alone needs no board")

    def leave(self) -> None:
        """There is nobody to tell."""


class StopRequest:
    """Whether SIGTERM or SIGINT has asked this rank to stop."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Handle both signals from now on. Launchers send them twice, which changes nothing."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(frozen=True)
class Worker:
    """One rank. `send` passes a message (kind, value) to the process that started the ranks."""

    rank: int
    meeting: Meeting
    send: Callable[[str, object], None]
    stop: StopRequest = field(default_factory=StopRequest)

    @classmethod
    def alone(cls, send: Callable[[str, object], None]) -> Worker:
        """The only rank, which runs in this process and meets nobody."""
        return cls(0, NoMeeting(), send)

    @property
    def stopping(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.stop.asked

    def phase(self, text: str) -> None:
        """Say what this rank does now."""
        self.send("phase", text)

    def detail(self, text: str) -> None:
        """Say where in the phase this rank is."""
        self.send("detail", text)

    def report(self, value: object) -> None:
        """Report a value before the task has ended."""
        self.send("report", value)

    def lose(self, verdict: HangVerdict) -> None:
        """End the run: say which rank, this one or another, is lost."""
        self.send("lost", (verdict.rank, verdict.doing, verdict.cause))

    @contextlib.contextmanager
    def joined(self, world: int, device: RankDevice = ON_CPU) -> Iterator[None]:
        """A process group of the first `world` ranks; the device is the current one of this thread.

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
    """Ranks that a launcher started meet over a TCP store."""

    folder = None

    def __init__(self, launched: LauncherEnvironment) -> None:
        self.launched = launched

    @cached_property
    def _store(self) -> tuple[dist.Store, str]:
        """The connection to the store, and the prefix of all keys of this start."""
        store = self._connect(hosts=self.launched.rank == 0 and not self.launched.hosted)
        return store, agree_on_prefix(store, self.launched.rank, self.launched.world)

    def join(self, rank: int, world: int, device: RankDevice) -> None:
        assert world == self.launched.world, "all launched ranks join, or none"
        store, prefix = self._store
        group = dist.PrefixStore(f"{prefix}/group", store)
        device.join(rank, world, _MEETING_TIMEOUT, store=group)

    def board(self) -> StoreBoard:
        """A board with its own connection, because a connection that waits for a key is blocked."""
        _, prefix = self._store  # after this, the store of rank 0 is up
        return StoreBoard(dist.PrefixStore(prefix, self._connect(hosts=False)))

    def leave(self) -> NoReturn:
        """End this process. Rank 0 may host the store, so it first lets others read the verdict."""
        if self.launched.rank == 0:
            time.sleep(_LINGER_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the main thread may hang

    def _connect(self, hosts: bool) -> dist.Store:
        host, port = self.launched.host, self.launched.port
        try:
            return dist.TCPStore(
                *(host, port, self.launched.world, hosts, _MEETING_TIMEOUT),
                wait_for_workers=False,
                master_listen_fd=_listening(host, port) if hosts else None,
            )
        except (dist.DistError, OSError) as error:
            raise FivefoldError(
                f"rank {self.launched.rank} cannot reach the meeting point {host}:{port}: set "
                "MASTER_ADDR and MASTER_PORT to a host and a free port that all hosts can reach "
                f"({error})"
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
    with socket.socket(family, kind, number) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        return made.detach()  # the store closes it


def agree_on_prefix(store: dist.Store, rank: int, world: int) -> str:
    """A prefix that all ranks of this start know, and that no earlier start has used.

    torchrun reuses its store when it restarts the ranks, and each host counts restarts by itself.
    So rank 0 offers a new prefix. Every other rank answers under it with a unique key, and rank 0
    confirms at that key. Offers of earlier starts are never confirmed.
    """
    unique = uuid.uuid4().hex
    if rank == 0:
        store.set("fivefold/offer", unique)
        for other in range(1, world):
            store.set(f"fivefold/{store.get(f'fivefold/{unique}/{other}').decode()}", unique)
        return unique
    until, answered = time.monotonic() + _MEETING_TIMEOUT.total_seconds(), ""
    while time.monotonic() < until:
        offer = store.get("fivefold/offer").decode()
        if offer != answered:
            store.set(f"fivefold/{offer}/{rank}", unique)
            answered = offer
        if store.check([f"fivefold/{unique}"]):
            return store.get(f"fivefold/{unique}").decode()
        time.sleep(_POLL_SECONDS)
    raise FivefoldError(
        f"rank {rank} has waited {_MEETING_TIMEOUT} for all {world} ranks: look at those that did "
        "not start"
    )


def joined_worker(launched: LauncherEnvironment, on_report: Callable[[Any], None]) -> Worker:
    """This process as a worker that handles stop signals. Rank 0 calls `on_report`."""
    meeting, stop = LaunchedMeeting(launched), StopRequest()
    stop.listen()

    def send(kind: str, value: Any) -> None:
        if kind == "report" and launched.rank == 0:
            on_report(value)
        elif kind == "lost":
            print(f"fivefold: {HangVerdict(*value)}", file=sys.stderr, flush=True)
            meeting.leave()

    return Worker(launched.rank, meeting, send, stop)

"""Where ranks leave word for one another beside their collectives: a folder, or torch's store."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from fivefold.launch.hang import HangVerdict


class Board(Protocol):
    """Short texts by name, seen by all ranks."""

    def put(self, name: str, text: str) -> None: ...
    def get(self, name: str) -> str | None: ...

    def claim(self, name: str, text: str) -> bool:
        """Put it if nobody has; whether this rank was the first."""
        ...


class FolderBoard:
    """For ranks of one machine: a file for each name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.{os.getpid()}"
        written.write_text(text, "utf-8")
        written.replace(self.folder / name)  # a reader sees all of it or nothing

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
    """For ranks of many machines."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("board", store)

    def put(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str | None:
        return self.store.get(name).decode() if self.store.check([name]) else None

    def claim(self, name: str, text: str) -> bool:
        return self.store.compare_set(name, "", text).decode() == text


# One rank as its task sees it, whoever started it: a pool on this machine, or a launcher.


CPU = torch.device("cpu")


class Meeting(Protocol):
    """How ranks come together."""

    @property
    def folder(self) -> Path | None:
        """Where ranks of one machine can leave files for one another."""
        ...

    def join(self, rank: int, world: int, device: torch.device) -> None:
        """Make the process group of all of them."""
        ...

    def board(self) -> Board:
        """Where they leave word beside it."""
        ...

    def leave(self) -> None:
        """The run is lost, and its end has been said: let whoever started this rank end it."""
        ...


class StopRequest:
    """Whether somebody has asked this rank to come to an end, by SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From now on. Asking twice is no more than asking once: launchers do so."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(frozen=True)
class Worker:
    """One rank as its task sees it."""

    rank: int
    meeting: Meeting
    tell: Callable[[str, object], None]
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def stopping(self) -> bool:
        """Whether this rank was asked to come to an end."""
        return self.stop.asked

    def phase(self, text: str) -> None:
        """Say what comes now."""
        self.tell("phase", text)

    def detail(self, text: str) -> None:
        """Say where in the phase this rank is."""
        self.tell("detail", text)

    def report(self, value: object) -> None:
        """Say a value now, before the task has ended."""
        self.tell("report", value)

    def lose(self, verdict: HangVerdict) -> None:
        """Say which rank is lost, be it this or another: the run is over."""
        self.tell("lost", (verdict.rank, verdict.doing, verdict.cause))

    @contextlib.contextmanager
    def joined(self, world: int, device: torch.device = CPU) -> Iterator[None]:
        """A process group of the first `world` ranks.

        After an error the group stays up: the others then wait where they are, instead of
        reporting a broken connection before the cause is known.
        """
        if world == 1:
            yield
            return
        self.meeting.join(self.rank, world, device)
        yield
        dist.barrier()
        dist.destroy_process_group()

"""One rank as its task sees it, whoever started it: a pool on this machine, or a launcher."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from fivefold.core.hang import Verdict
from fivefold.run.board import Board

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

    def lose(self, verdict: Verdict) -> None:
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

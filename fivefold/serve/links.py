"""Messages between the processes of a server: pickled values, each after its length.

The sockets are files in a folder that only this user can enter. What travels is plain: commands to
an engine, and the tokens that it has drawn.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fivefold.generate import Drawn, Reason, Request

_HEAD = struct.Struct("<I")
_READ = 1 << 16
_RETRY_S = 0.02


EngineRole = Literal["both", "prefill", "decode"]
"""What an engine does of a request: all of it, its prompt and first token, or the others."""


@dataclass(frozen=True)
class KvTarget:
    """Decode engine of a sequence: replica, start number and data rank."""

    engine: int
    start: int
    home: int


@dataclass(frozen=True)
class AddCommand:
    """Add a request. With a `target`, its cache is sent there after the first token; with drawn
    tokens, its cache is received from another engine, on the data rank `home`."""

    request: Request
    target: KvTarget | None = None
    home: int | None = None
    drawn: Drawn = ()


@dataclass(frozen=True)
class DropCommand:
    """Abort a request."""

    id: str


@dataclass(frozen=True)
class CloseCommand:
    """End after all open requests."""


@dataclass(frozen=True)
class ForgetCommand:
    """Drop a cache that has arrived, or will."""

    id: str
    home: int


EngineCommand = AddCommand | DropCommand | CloseCommand | ForgetCommand
DrawnRow = tuple[str, int, float, Reason | None, tuple[tuple[int, float], ...]]
"""Request, token, log-probability, why it is the last one, and the likeliest tokens."""

PromptRow = tuple[str, int, float, int, Drawn]
"""Request, the next token of its prompt, log-probability, rank, and the likeliest tokens."""


@dataclass(frozen=True)
class ReplicaHello:
    """A replica is ready; `blocks` counts those of all data ranks, `blocks_of_one` limits a
    request."""

    replica: int
    blocks: int
    blocks_of_one: int
    role: EngineRole = "both"
    start: int = 0  # how often it was started before
    data_ranks: int = 1


@dataclass(frozen=True)
class StepNews:
    """Result of a step: tokens, refused requests, state of the engine, and sequences sent to
    another engine, with their bytes."""

    rows: list[DrawnRow]
    refused: list[tuple[str, str]]
    free_blocks: int
    preempted: int
    moved: list[tuple[str, KvTarget]] = field(default_factory=list[tuple[str, KvTarget]])
    moved_bytes: int = 0
    prompt_rows: list[PromptRow] = field(default_factory=list[PromptRow])  # before `rows`
    drafted: int = 0  # tokens that the engine has proposed so far
    accepted: int = 0  # those of them that were drawn


def packed_message(value: Any) -> bytes:
    """Serialize a value."""
    data = pickle.dumps(value, protocol=5)
    return _HEAD.pack(len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read the next value; raises `IncompleteReadError` at the end."""
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return pickle.loads(await reader.readexactly(size))


class RankLink:
    """A rank's end of a socket, which blocks only when there is nothing to compute."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._buffer = bytearray()
        self._turn = threading.Lock()

    @classmethod
    def to(cls, path: Path, patience: float = 60.0) -> RankLink:
        """Connect to a socket, with retries until it exists."""
        until = time.monotonic() + patience
        while True:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                stream.connect(str(path))
                return cls(stream)
            except OSError:
                stream.close()
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)

    def send(self, value: Any) -> None:
        """Send a value; blocks while the buffer is full."""
        self.stream.sendall(packed_message(value))

    def send_from_thread(self, value: Any) -> None:
        """Send from a thread beside a main thread that only receives."""
        with self._turn:
            self.send(value)

    def receive(self, seconds: float) -> list[Any]:
        """Receive all available values; waits up to `seconds` for the first. Raises `EOFError` at
        the end."""
        messages = self._complete()
        while not messages:
            if not select.select([self.stream], [], [], seconds)[0]:
                return messages
            self._read()
            messages = self._complete()
        while select.select([self.stream], [], [], 0)[0]:
            self._read()
            messages += self._complete()
        return messages

    @staticmethod
    def wait(links: Iterable[RankLink], seconds: float) -> None:
        """Wait for a value on any of several links."""
        select.select([link.stream for link in links], [], [], seconds)

    def close(self) -> None:
        """Close the link."""
        self.stream.close()

    def _read(self) -> None:
        data = self.stream.recv(_READ)
        if not data:
            raise EOFError("the other end has closed the link")
        self._buffer += data

    def _complete(self) -> list[Any]:
        messages: list[Any] = []
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if len(self._buffer) < _HEAD.size + size:
                break
            messages.append(pickle.loads(self._buffer[_HEAD.size : _HEAD.size + size]))
            del self._buffer[: _HEAD.size + size]
        return messages

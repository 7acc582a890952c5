"""Messages between the processes of a server: pickled values, each after its length.

The sockets are files in a folder that only this user can enter. What travels is plain: commands to
an engine, and the tokens that it has drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fivefold.generate import Drawn, Reason, Request

_HEAD = struct.Struct("<I")
_READ = 1 << 16
_RETRY_S = 0.02
BEAT_S = 1.0


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


@dataclass(frozen=True)
class DoorHello:
    """A door is ready to accept connections."""

    door: int
    pid: int


@dataclass(frozen=True)
class DoorBeat:
    """A door lives; it says so every `BEAT_S` seconds."""


@dataclass(frozen=True)
class BeginCall:
    """Queue the requests of a call."""

    id: str
    client: str
    stream: bool
    prompt_tokens: int
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class EndRequest:
    """Abort a request: its text has ended."""

    call: str
    id: str


@dataclass(frozen=True)
class EndCall:
    """Abort what is left of a call; `seconds` that it took, if it was completed."""

    id: str
    seconds: float | None


@dataclass(frozen=True)
class AnsweredRequest:
    """An HTTP request has ended: its line of the log, and seconds to the first and last token and
    between two."""

    path: str
    status: int
    line: str
    times: tuple[float, float, float | None] | None


@dataclass(frozen=True)
class AskMetrics:
    """Ask for the text of /metrics."""

    number: int


@dataclass(frozen=True)
class MetricsText:
    """The text of /metrics, for the question of this number."""

    number: int
    text: str


@dataclass(frozen=True)
class ServerState:
    """What all doors know of the engines, and whether doors accept connections."""

    serves: bool = False  # an engine of every kind is up
    longest: int = 0  # tokens of a prompt with its completion
    accepts: bool = False


@dataclass(frozen=True)
class CallRows:
    """What steps have drawn for the calls of a door."""

    rows: list[DrawnRow]
    prompt_rows: list[PromptRow]


@dataclass(frozen=True)
class RestartedRequest:
    """A request begins again under another id, since results of the first may still arrive."""

    id: str
    new_id: str


@dataclass(frozen=True)
class FailedCall:
    """A call has failed, with the fields of an `ApiError`."""

    id: str
    error: tuple[Any, ...]


@dataclass(frozen=True)
class Drain:
    """Finish open calls and end; fail those that take longer."""

    seconds: float


def packed_message(value: Any) -> bytes:
    """Serialize a value."""
    data = pickle.dumps(value, protocol=5)
    return _HEAD.pack(len(data)) + data


class MessageBuffer:
    """Bytes of a link, of which the last message may be incomplete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes; returns the values that are complete."""
        self._data += data
        values, start, size = list[Any](), 0, len(self._data)
        with memoryview(self._data) as view:
            while size - start >= _HEAD.size:
                stop = start + _HEAD.size + _HEAD.unpack_from(view, start)[0]
                if stop > size:
                    break
                values.append(pickle.loads(view[start + _HEAD.size : stop]))
                start = stop
        del self._data[:start]
        return values


async def read_messages(reader: asyncio.StreamReader) -> AsyncIterator[list[Any]]:
    """Yield all values that have come so far, until the other end closes."""
    buffer = MessageBuffer()
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ):
            if values := buffer.feed(data):
                yield values


class RankLink:
    """A rank's end of a socket, which blocks only when there is nothing to compute."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._buffer = MessageBuffer()
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
        messages: list[Any] = []
        while not messages:
            if not select.select([self.stream], [], [], seconds)[0]:
                return messages
            messages = self._read()
        while select.select([self.stream], [], [], 0)[0]:
            messages += self._read()
        return messages

    @staticmethod
    def wait(links: Iterable[RankLink], seconds: float) -> None:
        """Wait for a value on any of several links."""
        select.select([link.stream for link in links], [], [], seconds)

    def close(self) -> None:
        """Close the link."""
        self.stream.close()

    def _read(self) -> list[Any]:
        data = self.stream.recv(_READ)
        if not data:
            raise EOFError("the other end has closed the link")
        return self._buffer.feed(data)

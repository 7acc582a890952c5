"""Memory that outlives the ranks that write it, and nobody else.

It is anonymous (`memfd`): it has no name in a file system, so that nothing is left behind. It is
gone when the last process that has it open is gone. Forked ranks inherit it from their launcher,
which keeps it open over restarts. The ranks of another launcher get it from a keeper process of
their host (`keeper.py`).

A segment is one copy of what one rank has: a head, a table in JSON, and the data. The head says
that the copy is whole, and is written last: a rank that dies while it writes leaves a segment that
nobody reads. What is read is verified by a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fivefold.core import FivefoldError
from fivefold.core.layout import SLOTS, CopyOf

_HEAD = struct.Struct("<8sQQQ5Q")  # whole or not, bytes of table and data, checksum, whose copy
_WHOLE, _BROKEN = b"fivefold", bytes(8)
_ALIGNMENT = 4096
_BLOCK = 64 << 20  # bytes that are hashed at a time


class MemoryKeeper(Protocol):
    """Interface of the process that holds this host's memory segments."""

    def open(self, rank: int, slot: int) -> int:
        """Open a segment, which is empty at first."""
        ...

    def ranks(self) -> list[int]:
        """Ranks that may have segments here."""
        ...

    @property
    def share(self) -> tuple[int, int] | None:
        """Index of this rank on its host and number of ranks there; None: one keeper serves all
        ranks of the run."""
        ...


def require_memory() -> None:
    """Refuse memory checkpoints on systems without anonymous memory files."""
    if not hasattr(os, "memfd_create"):
        raise FivefoldError(
            f"copy_every: copies are kept in anonymous memory, which {sys.platform} has not; use "
            "Linux, or leave it out and give save_every"
        )


@dataclass(frozen=True)
class InheritedMemory:
    """Segments created before a fork; ranks inherit the descriptors."""

    descriptors: tuple[tuple[int, ...], ...]  # by rank and slot

    @classmethod
    def create(cls, num_ranks: int) -> InheritedMemory:
        """Create empty segments, before ranks are forked."""
        require_memory()
        return cls(
            tuple(
                tuple(os.memfd_create(f"fivefold-{rank}-{slot}") for slot in range(SLOTS))
                for rank in range(num_ranks)
            )
        )

    def open(self, rank: int, slot: int) -> int:
        return self.descriptors[rank][slot]

    def ranks(self) -> list[int]:
        return list(range(len(self.descriptors)))

    @property
    def share(self) -> None:
        return None

    def close(self) -> None:
        """Free the memory."""
        for descriptors in self.descriptors:
            for descriptor in descriptors:
                os.close(descriptor)


class KeptSegment:
    """A memory segment, mapped in this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    @property
    def complete(self) -> bool:
        """Whether it has a copy that was written completely."""
        return self.size > _HEAD.size and self._head()[0] == _WHOLE

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    @property
    def memory(self) -> mmap.mmap:
        """The mapped bytes."""
        if self._map is None or len(self._map) != self.size:
            self._map = mmap.mmap(self._descriptor, self.size)
        return self._map

    @property
    def copy(self) -> CopyOf:
        """Identity of its copy."""
        return CopyOf(*self._head()[4:])

    def begin(self, copy: CopyOf, table: Mapping[str, Any], num_bytes: int) -> memoryview:
        """Begin a copy: write its table, and return the buffer of its data. Invalid until
        `commit`."""
        text = json.dumps(table).encode()
        first = _aligned(_HEAD.size + len(text))
        self.reserve(first + num_bytes)
        memory = self.memory
        memory[: _HEAD.size] = _HEAD.pack(_BROKEN, len(text), num_bytes, 0, *copy)
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        return memoryview(memory)[first : first + num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Resize the segment; its contents are lost."""
        if self.size != num_bytes:
            self._map = None
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, num_bytes)
        else:
            self.break_off()

    def break_off(self) -> None:
        """Mark the copy invalid."""
        if self.size > _HEAD.size:
            self.memory[: len(_BROKEN)] = _BROKEN

    def commit(self) -> None:
        """Mark the copy complete."""
        _, length, num_bytes, _, *copy = self._head()
        checksum = _checksum(self.memory, length, num_bytes)
        self.memory[: _HEAD.size] = _HEAD.pack(_WHOLE, length, num_bytes, checksum, *copy)

    def fill(self, copy: memoryview) -> None:
        """Store a complete copy of another rank; its header is written last."""
        self.reserve(len(copy))
        self.memory[_HEAD.size :] = copy[_HEAD.size :]
        self.memory[: _HEAD.size] = copy[: _HEAD.size]

    def table(self) -> dict[str, Any]:
        """Table of a complete copy."""
        length = self._head()[1]
        return json.loads(self.memory[_HEAD.size : _HEAD.size + length])

    def data(self) -> memoryview:
        """Data of a complete copy."""
        _, length, num_bytes, *_ = self._head()
        first = _aligned(_HEAD.size + length)
        return memoryview(self.memory)[first : first + num_bytes]

    def verified(self) -> bool:
        """Whether its checksum matches."""
        word, length, num_bytes, checksum, *_ = self._head()
        return word == _WHOLE and _checksum(self.memory, length, num_bytes) == checksum

    def _head(self) -> tuple[Any, ...]:
        return _HEAD.unpack(self.memory[: _HEAD.size])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _checksum(memory: mmap.mmap, length: int, num_bytes: int) -> int:
    """Of the table and the data, block by block: other threads of the process run meanwhile."""
    checksum = 0
    with memoryview(memory) as view:
        end = _aligned(_HEAD.size + length) + num_bytes
        for first in range(_HEAD.size, end, _BLOCK):
            checksum = zlib.crc32(view[first : min(first + _BLOCK, end)], checksum)
    return checksum


# A process on each host that keeps the copies of ranks which a launcher started.
#
# The ranks die together when one is lost, and the launcher's own process is not ours. So the first
# rank that needs memory starts a keeper: a small process without torch, in a session of its own. It
# makes anonymous memory on request and passes the descriptor to whoever asks, through a socket that
# has no name in a file system. It answers processes of its own user alone.
#
# It ends when the launcher of its host ends, when a run has ended well, or when no rank has been
# connected for ten minutes. Then its memory is gone: there is nothing to clean up.
#
# python -m fivefold.launch.shared_memory NAME LAUNCHER

_ALONE_SECONDS = 600.0  # without any rank, after which nobody will come back
_START_SECONDS = 30.0  # in which a keeper answers
_POLL_SECONDS = 0.05
_LINE = 4096  # bytes of a request


class HostKeeper:
    """Connection of a rank to the memory keeper of its host."""

    def __init__(self, folder: Path, launcher: int, share: tuple[int, int] | None) -> None:
        """`folder` is that of the run, and `launcher` the process that starts its ranks here.
        `share`: the number of this rank among those of its host, and how many these are; None if
        all ranks are here."""
        require_memory()
        run = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        self.name, self.share = f"fivefold-keeper-{os.getuid()}-{launcher}-{run}", share
        self._socket = _connected(self.name, launcher)
        self._descriptors: dict[tuple[int, int], int] = {}

    def open(self, rank: int, slot: int) -> int:
        """Open a segment, which is empty at first."""
        if (rank, slot) not in self._descriptors:
            _, descriptors = self._asked({"rank": rank, "slot": slot})
            self._descriptors[rank, slot] = descriptors[0]
        return self._descriptors[rank, slot]

    def ranks(self) -> list[int]:
        """Ranks whose segments the keeper has."""
        return list(self._asked({})[0]["ranks"])

    def end(self) -> None:
        """End the keeper, which frees its memory."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"end": True}).encode() + b"\n")

    def _asked(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            reply, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 20, 1)
            return json.loads(reply), list(descriptors)
        except (OSError, ValueError) as error:
            raise FivefoldError(
                f"the keeper of copies on this host does not answer ({error}): start the run again"
            ) from error


def _connected(name: str, launcher: int) -> socket.socket:
    """A connection to a keeper; it is started if there is none."""
    until, started = time.monotonic() + _START_SECONDS, False
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect("\0" + name)
            if _user(connection) != os.getuid():
                raise FivefoldError(f"another user answers as {name}: start the run again")
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > until:
                raise FivefoldError(
                    f"no keeper of copies starts on this host ({error}): leave copy_every out"
                ) from error
        if not started:
            started = True
            command = [sys.executable, "-m", "fivefold.launch.shared_memory", name, str(launcher)]
            subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
        time.sleep(_POLL_SECONDS)


def _user(peer: socket.socket) -> int:
    """Who is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user


class Keeper:
    """Process that holds the memory segments of a host."""

    def __init__(self, listener: socket.socket, launcher: int) -> None:
        self.listener, self.launcher = listener, os.pidfd_open(launcher)
        self.clients: list[socket.socket] = []
        self.segments: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        """Serve until the launcher or the run ends, or no client connects for long."""
        alone_since = time.monotonic()
        while True:
            ready, _, _ = select.select([self.listener, self.launcher, *self.clients], [], [], 10.0)
            if self.launcher in ready:
                return
            if self.clients:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > _ALONE_SECONDS:
                return
            for client in ready:
                if client is self.listener:
                    self._admit(self.listener.accept()[0])
                elif not self._answered(client):
                    return

    def _admit(self, client: socket.socket) -> None:
        if _user(client) == os.getuid():
            client.settimeout(1.0)
            self.clients.append(client)
        else:
            client.close()

    def _answered(self, client: socket.socket) -> bool:
        """Answer a client's request; false if the run has ended."""
        try:
            line = client.recv(_LINE)
            request = json.loads(line) if line else None
            if request is None:
                raise OSError("it has gone")
            if request.get("end"):
                return False
            if "rank" in request:
                descriptor = self._segment(int(request["rank"]), int(request["slot"]))
                socket.send_fds(client, [b"{}"], [descriptor])
            else:
                ranks = sorted({rank for rank, _ in self.segments})
                client.sendall(json.dumps({"ranks": ranks}).encode())
        except (OSError, ValueError, TypeError, KeyError):
            self.clients.remove(client)
            client.close()
        return True

    def _segment(self, rank: int, slot: int) -> int:
        if (rank, slot) not in self.segments:
            self.segments[rank, slot] = os.memfd_create(f"fivefold-{rank}-{slot}")
        return self.segments[rank, slot]


def main(name: str, launcher: int) -> None:
    """Run a keeper, unless one of this name runs already."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind("\0" + name)
            listener.listen(256)
            keeper = Keeper(listener, launcher)
        except (OSError, ProcessLookupError):  # another one was first, or the launcher is gone
            return
        keeper.run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

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

import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
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

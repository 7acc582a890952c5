"""Optimizer states in a file, for machines with too little memory for them.

The file has one region for each block, with all states of the block's elements. While a block is
updated, one thread reads the next one and another thread writes the one before. This takes three
buffers, for a file of any size. The file is allocated in full when it is made, so that a full disk
is an error at the start and not in the middle of a step. It is unlinked once it is open: it
disappears with its process, however that ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.optim.blockwise import Block, BlockStates, blocks_of
from fivefold.optim.optimizer import StoredState

BLOCK_BYTES = 32_000_000  # three of them are in memory at once
_NUM_BUFFERS = 3
_ALIGNMENT = 64  # bytes, of every tensor in a region


@dataclass(frozen=True)
class FileShard:
    """One state of a range of elements of an owned tensor, and its offset in the file."""

    key: str
    index: int
    start: int
    size: int
    dtype: torch.dtype
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class DiskRegion:
    """States of one block: bytes [start, stop) of the file."""

    block: Block
    start: int
    stop: int
    shards: tuple[FileShard, ...]


class DiskStore:
    """Optimizer states of a rank in a file."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        sizes: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        pinned: bool,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        per_element = sum(dtype.itemsize for dtype in dtypes.values())
        self.regions = _regions(blocks_of(sizes, block_bytes // per_element), dtypes)
        self.num_bytes = self.regions[-1].stop if self.regions else 0
        self.sizes = sizes
        self.file = _StateFile(folder, rank, self.num_bytes)
        largest = max((region.stop - region.start for region in self.regions), default=0)
        self.buffers = [
            torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(min(_NUM_BUFFERS, len(self.regions)))
        ]

    def walk(self) -> Iterator[tuple[Block, BlockStates]]:
        writes: list[Future[None]] = []
        with ThreadPoolExecutor(2) as threads:
            next_reads = [threads.submit(self._read, 0)] if self.regions else []
            for number, region in enumerate(self.regions):
                states = next_reads.pop().result()
                if number + 1 < len(self.regions):
                    if number + 1 >= _NUM_BUFFERS:  # an earlier block is in its buffer
                        writes[number + 1 - _NUM_BUFFERS].result()
                    next_reads.append(threads.submit(self._read, number + 1))
                yield region.block, states
                writes.append(threads.submit(self._write, number))
            for write in writes:
                write.result()

    def states(self, key: str) -> list[StoredState | None]:
        by_weight: list[list[FileShard]] = [[] for _ in self.sizes]
        for shard in (
            shard for region in self.regions for shard in region.shards if shard.key == key
        ):
            by_weight[shard.index].append(shard)
        return [StateOnDisk(self.file, shards) for shards in by_weight]

    def tensors(self) -> list[Tensor]:
        return self.buffers

    def _buffer(self, number: int) -> Tensor:
        region = self.regions[number]
        return self.buffers[number % _NUM_BUFFERS][: region.stop - region.start]

    def _read(self, number: int) -> BlockStates:
        region, buffer = self.regions[number], self._buffer(number)
        self.file.read(buffer, region.start)
        states: dict[str, list[Tensor]] = {}
        for shard in region.shards:
            begin = shard.offset - region.start
            tensor = buffer[begin : begin + shard.num_bytes].view(shard.dtype)
            states.setdefault(shard.key, []).append(tensor)
        return states

    def _write(self, number: int) -> None:
        self.file.write(self._buffer(number), self.regions[number].start)


class StateOnDisk:
    """One state in the file, in a shard for each block with elements of it."""

    def __init__(self, file: _StateFile, shards: Sequence[FileShard]) -> None:
        self.file, self.shards = file, shards

    def read(self) -> Tensor:
        size = sum(shard.size for shard in self.shards)
        values = torch.empty(size, dtype=self.shards[0].dtype)
        for shard in self.shards:
            part = values[shard.start : shard.start + shard.size]
            self.file.read(part.view(torch.uint8), shard.offset)
        return values

    def write(self, value: Tensor) -> None:
        values = value.detach().reshape(-1).to("cpu", self.shards[0].dtype).contiguous()
        for shard in self.shards:
            part = values[shard.start : shard.start + shard.size]
            self.file.write(part.view(torch.uint8), shard.offset)


class _StateFile:
    """An unlinked file, fully allocated and filled with zeros."""

    def __init__(self, folder: Path, rank: int, num_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor, name = tempfile.mkstemp(prefix=f"states-{rank:05d}-", dir=folder)
        except OSError as error:
            raise FivefoldError(
                f"cannot make a file in {folder} ({error.strerror}): give a folder that can be "
                "written, as offload = nvme:FOLDER"
            ) from error
        self.path = Path(name)
        weakref.finalize(self, os.close, self.descriptor)
        self.path.unlink()
        free = shutil.disk_usage(folder).free
        try:
            if free < num_bytes:  # posix_fallocate may fill the disk before it fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if num_bytes:
                os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            raise FivefoldError(
                f"{self.path} needs {num_bytes / 2**30:.3f} GiB for optimizer states, and the disk "
                f"has {free / 2**30:.3f} GiB free ({error.strerror}): free some space, or give "
                "another folder, as offload = nvme:FOLDER"
            ) from error

    def read(self, buffer: Tensor, offset: int) -> None:
        self._transfer(os.preadv, buffer, offset)

    def write(self, buffer: Tensor, offset: int) -> None:
        self._transfer(os.pwritev, buffer, offset)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], buffer: Tensor, offset: int
    ) -> None:
        """Read or write the full buffer; one call transfers at most 2 GiB."""
        view, done = buffer.numpy().data, 0
        while done < len(view):
            try:
                moved = call(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not moved:
                raise FivefoldError(
                    f"{self.path} ends at byte {offset + done}: its disk has lost data"
                )
            done += moved


def _regions(blocks: Sequence[Block], dtypes: Mapping[str, torch.dtype]) -> list[DiskRegion]:
    regions: list[DiskRegion] = []
    end = 0
    for block in blocks:
        start, shards = end, list[FileShard]()
        for key, dtype in dtypes.items():
            for part in block:
                shards.append(FileShard(key, part.index, part.start, part.size, dtype, end))
                end += -(-shards[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        regions.append(DiskRegion(block, start, end, tuple(shards)))
    return regions

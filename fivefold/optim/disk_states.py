"""States in a file, for machines whose memory is too small for them.

The file has one region for each block, with all states of the block's elements in it. While a block
is updated, one thread reads the next one and another writes the one before: three buffers, however
large the file is. All of the file's room is taken when it is made, so that a full disk is met then
and not in the middle of a step. The file has no name any more once it is open: it goes away with
its process, however that ends.
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

from fivefold.core.errors import FivefoldError
from fivefold.optim.blockwise import Block, Held, blocks_of
from fivefold.optim.optimizer import Kept

BLOCK_BYTES = 32_000_000  # three of them are in memory at once
_NUM_BUFFERS = 3
_ALIGNMENT = 64  # bytes, of every tensor in a region


@dataclass(frozen=True)
class FileShard:
    """One state of one span: where in the file it is, and which elements of which tensor."""

    key: str
    place: int
    start: int
    size: int
    dtype: torch.dtype
    at: int  # bytes from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Region:
    """A block in the file: bytes [start, stop)."""

    block: Block
    start: int
    stop: int
    pieces: tuple[FileShard, ...]


class DiskStore:
    """States in a file of this rank."""

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
        self.regions = _laid_out(blocks_of(sizes, block_bytes // per_element), dtypes)
        self.num_bytes = self.regions[-1].stop if self.regions else 0
        self.sizes = sizes
        self.file = _File(folder, rank, self.num_bytes)
        largest = max((one.stop - one.start for one in self.regions), default=0)
        self.buffers = [
            torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(min(_NUM_BUFFERS, len(self.regions)))
        ]

    def walk(self) -> Iterator[tuple[Block, Held]]:
        writes: list[Future[None]] = []
        with ThreadPoolExecutor(2) as threads:
            following = [threads.submit(self._read, 0)] if self.regions else []
            for number, region in enumerate(self.regions):
                held = following.pop().result()
                if number + 1 < len(self.regions):
                    if number + 1 >= _NUM_BUFFERS:  # its buffer is still that of an earlier block
                        writes[number + 1 - _NUM_BUFFERS].result()
                    following.append(threads.submit(self._read, number + 1))
                yield region.block, held
                writes.append(threads.submit(self._write, number))
            for write in writes:
                write.result()

    def kept(self, key: str) -> list[Kept | None]:
        found: list[list[FileShard]] = [[] for _ in self.sizes]
        for piece in (one for region in self.regions for one in region.pieces if one.key == key):
            found[piece.place].append(piece)
        return [OnDisk(self.file, pieces) for pieces in found]

    def tensors(self) -> list[Tensor]:
        return self.buffers

    def _buffer(self, number: int) -> Tensor:
        region = self.regions[number]
        return self.buffers[number % _NUM_BUFFERS][: region.stop - region.start]

    def _read(self, number: int) -> Held:
        region, buffer = self.regions[number], self._buffer(number)
        self.file.read(buffer, region.start)
        held: dict[str, list[Tensor]] = {}
        for piece in region.pieces:
            begin = piece.at - region.start
            tensor = buffer[begin : begin + piece.num_bytes].view(piece.dtype)
            held.setdefault(piece.key, []).append(tensor)
        return held

    def _write(self, number: int) -> None:
        self.file.write(self._buffer(number), self.regions[number].start)


class OnDisk:
    """One state in the file, in as many pieces as blocks have cut it into."""

    def __init__(self, file: _File, pieces: Sequence[FileShard]) -> None:
        self.file, self.pieces = file, pieces

    def read(self) -> Tensor:
        size = sum(piece.size for piece in self.pieces)
        whole = torch.empty(size, dtype=self.pieces[0].dtype)
        for piece in self.pieces:
            part = whole[piece.start : piece.start + piece.size]
            self.file.read(part.view(torch.uint8), piece.at)
        return whole

    def write(self, value: Tensor) -> None:
        whole = value.detach().reshape(-1).to("cpu", self.pieces[0].dtype).contiguous()
        for piece in self.pieces:
            part = whole[piece.start : piece.start + piece.size]
            self.file.write(part.view(torch.uint8), piece.at)


class _File:
    """An open file without a name, all of its room taken, filled with zeros."""

    def __init__(self, folder: Path, rank: int, num_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor, name = tempfile.mkstemp(prefix=f"states-{rank:05d}-", dir=folder)
        except OSError as error:
            raise FivefoldError(
                f"no file can be made in {folder} ({error.strerror}): give a folder that can be "
                "written, as offload = nvme:FOLDER"
            ) from error
        self.path = Path(name)
        weakref.finalize(self, os.close, self.descriptor)
        self.path.unlink()
        free = shutil.disk_usage(folder).free
        try:
            if free < num_bytes:  # else it would be filled to its end first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if num_bytes:
                os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            raise FivefoldError(
                f"{self.path} needs {num_bytes / 2**30:.3f} GiB for optimizer states, and the disk "
                f"has {free / 2**30:.3f} GiB free ({error.strerror}): free some, or give another "
                "folder, as offload = nvme:FOLDER"
            ) from error

    def read(self, buffer: Tensor, at: int) -> None:
        self._move(os.preadv, buffer, at)

    def write(self, buffer: Tensor, at: int) -> None:
        self._move(os.pwritev, buffer, at)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], buffer: Tensor, at: int
    ) -> None:
        """One call moves at most 2 GiB."""
        view, done = buffer.numpy().data, 0
        while done < len(view):
            try:
                moved = call(self.descriptor, [view[done:]], at + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not moved:
                raise FivefoldError(f"{self.path} ends at byte {at + done}: its disk has lost data")
            done += moved


def _laid_out(blocks: Sequence[Block], dtypes: Mapping[str, torch.dtype]) -> list[Region]:
    regions: list[Region] = []
    at = 0
    for block in blocks:
        first, pieces = at, list[FileShard]()
        for key, dtype in dtypes.items():
            for span in block:
                pieces.append(FileShard(key, span.place, span.start, span.size, dtype, at))
                at += -(-pieces[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        regions.append(Region(block, first, at, tuple(pieces)))
    return regions

"""Tensors that are not on the device: in pinned host memory, or in memory-mapped files, which a
thread reads before their use."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core import FivefoldError


@dataclass(frozen=True)
class GradientHome:
    """Storage of reduced gradient shards: host memory, or files in a folder."""

    folder: Path | None = None

    def allocate(self, size: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        """Allocate a gradient shard."""
        if self.folder is None:
            return torch.empty(size, dtype=dtype, pin_memory=pinned)
        return on_disk(self.folder, size, dtype)


def on_disk(folder: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in an unlinked file in this folder.

    Its blocks are reserved first: a disk that fills up later would kill the process silently.
    """
    num_bytes = max(1, size * dtype.itemsize)
    try:
        number, name = tempfile.mkstemp(prefix="shard-", dir=folder)
    except OSError as error:
        raise FivefoldError(f"offload to {folder}: {error.strerror}; give another folder") from None
    try:
        os.posix_fallocate(number, 0, num_bytes)
        return torch.from_file(name, shared=True, size=size, dtype=dtype)
    except OSError as error:
        raise FivefoldError(
            f"offload to {folder}: {error.strerror}, and {num_bytes:,} more bytes are needed; give "
            "a folder with more room"
        ) from error
    finally:
        os.close(number)
        Path(name).unlink()


@cache
def _reader(process: int) -> ThreadPoolExecutor:
    """Reads a block from the disk before its use, while another one computes; a forked process
    needs its own, because threads do not survive the fork."""
    return ThreadPoolExecutor(1, thread_name_prefix="fivefold-read")


class FileReading:
    """A read from a file that runs in another thread."""

    def __init__(self, copied: Future[Tensor]) -> None:
        self.copied = copied

    def wait(self) -> Tensor:
        return self.copied.result()


def reading(target: Tensor, source: Tensor) -> FileReading:
    """Start to read a tensor from a file, in order with the caller's stream."""
    stream = torch.cuda.current_stream(target.device) if target.is_cuda else None
    return FileReading(_reader(os.getpid()).submit(_copied, target, source, stream))


def _copied(target: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    """In the reader's thread, which begins on device 0 and its default stream."""
    if stream is None:
        return target.copy_(source)
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        return target.copy_(source)

"""Weights in files: mapped into memory, so that the system keeps of them what there is room for."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError


def on_disk(folder: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is a file in this folder, which nobody else sees or has to remove.

    Its blocks are reserved first: a disk that is full later would end the process without a word.
    """
    num_bytes = max(1, size * dtype.itemsize)
    try:
        number, name = tempfile.mkstemp(prefix="weights-", dir=folder)
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
def _reader() -> ThreadPoolExecutor:
    """Reads while others compute: one block ahead of its use."""
    return ThreadPoolExecutor(1, thread_name_prefix="fivefold-read")


class _Reading:
    """A copy that is under way in another thread."""

    def __init__(self, copied: Future[Tensor]) -> None:
        self.copied = copied

    def wait(self) -> Tensor:
        return self.copied.result()


def reading(target: Tensor, source: Tensor) -> _Reading:
    """Begin to copy what lies in a file."""
    return _Reading(_reader().submit(target.copy_, source))

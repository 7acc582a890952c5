"""Many tensors as one launch of a kernel: where each of them is, and which program works on which.

A launch for each tensor leaves the GPU partly idle at the end of each one, and a model has hundreds
of small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ALIGNED = 16  # bytes of a load, and a divisor of the elements, where tensors allow it


class Programs(NamedTuple):
    """A launch over tensors of given sizes, whose programs take `span` elements each."""

    count: int
    tensor: Tensor  # of each program
    first: Tensor  # the first program of each tensor
    numel: Tensor  # of each tensor


@lru_cache(maxsize=16)
def programs_of(numels: tuple[int, ...], span: int, device: torch.device) -> Programs:
    """Programs of tensors of these sizes, cached: they are the same for every step."""
    counts = torch.tensor([-(-numel // span) for numel in numels])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    first = counts.cumsum(0) - counts
    tables = (tensor.int(), first.int(), torch.tensor(numels))
    return Programs(len(tensor), *(table.to(device) for table in tables))


def addresses_of(rows: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Copy tensor addresses to the device, without synchronization."""
    addresses = torch.tensor(
        [[tensor.data_ptr() for tensor in row] for row in rows], pin_memory=True
    )
    return addresses.to(device, non_blocking=True)


def is_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels may access the tensors by 16 bytes."""
    return not any(tensor.data_ptr() % ALIGNED or tensor.numel() % ALIGNED for tensor in tensors)

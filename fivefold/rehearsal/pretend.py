"""One rank of any job, alone: process groups without others, and tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.parallel.context import token_index
from fivefold.parallel.mesh import PRETENDED


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """Be one of so many ranks: collectives return at once, with whatever is in their buffers."""
    if world == 1:
        yield
        return
    dist.init_process_group(PRETENDED, rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_values(device: torch.device) -> Iterator[None]:
    """On the CPU, tensors have sizes and no memory; on a GPU they are what they are."""
    if device.type == "cuda":
        yield
        return
    token_index.cache_clear()  # what is kept there is counted once in every run
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        token_index.cache_clear()  # and is of no use to those with values

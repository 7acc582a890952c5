"""Collectives of few bytes over symmetric memory: ranks of one host read each other's buffers.

NCCL has a stream of its own, which a captured step forks to and joins again at every call. These
are kernels of the current stream, and take about half of the time.

Sums      in one shot up to 256 KiB: every rank adds what all have. In two shots up to 8 MiB: each
          adds its share, and reads those of the others. Both add in rank order, so that all ranks
          have the same bits. Terms in float64 are gathered, and added in rank order as well.
Gathers   every rank copies its tensor into its buffer, and then reads those of the others.
Order     nobody reads a buffer after the call that filled it: the kernels of torch, and a gather
          here, end with a barrier of the ranks. All ranks make all calls in one order, on streams
          that wait for one another.
Refuses   ranks of several hosts, GPUs without NVLink, since atomics end at the bus, and ranks that
          share a GPU, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1: without MPS they would
          wait for a time slice at every barrier.

torch calls `torch.distributed._symmetric_memory` private: nobody else here knows it. What it does
not have, or has under another name, is found by the first calls, on all ranks alike.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ONE_SHOT_BYTES = 256 * 1024  # as in torch's `intra_node_comm.cu`, which was measured over NVLink
_MOST_BYTES = 8 * 1024 * 1024
_ALIGNMENT = 16  # bytes that a thread reads at once
_TRIALS = ((torch.bfloat16, 4096), (torch.float32, 2 * _ONE_SHOT_BYTES), (torch.float64, 4096))
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # read by torch: ranks may share a GPU


class Computed:
    """A collective that the current stream computes: who waits has it already."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        """The result."""
        return self.result

    @property
    def done(self) -> bool:
        """Whether it has completed, which is unknown: the stream orders what follows."""
        return False


class SymmetricBuffer:
    """A buffer that all ranks of a group read: one a rank, of one size."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.size = group, device, group.size()
        self.buffer, self.handle = torch.empty(0), None

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, device: torch.device
    ) -> tuple[SymmetricBuffer | None, str]:
        """The buffer of a group, or none, and what went wrong, if anything did. All ranks call this
        together, and get one or none."""
        shared = cls(group, device)
        gpus = shared._from_all((socket.gethostname(), device.index))
        shares = len(set(gpus)) < len(gpus)
        if len({host for host, _ in gpus}) > 1 or (shares and os.environ.get(SHARING) != "1"):
            return None, ""
        # One rank may fail where others do not: all go on from one step to the next, or none.
        steps = (partial(_require_links, {gpu for _, gpu in gpus}), shared._meet, shared._try)
        for step in steps:
            reason = ""
            try:
                step()
            except Exception as error:  # whatever torch raises: NCCL remains
                reason = str(error).strip().split("\n")[0] or type(error).__name__
            reasons = [text for text in shared._from_all(reason) if text]
            if reasons:
                return None, reasons[0]
        return shared, ""

    def _from_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _meet(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        name = self.group.group_name
        # Not `symmetric.empty`, whose pool may put a tensor at an offset of its allocation.
        allocate: Callable[..., Tensor] = symmetric._SymmetricMemory.empty_strided_p2p
        self.buffer = allocate((_MOST_BYTES,), [1], torch.uint8, self.device, name)
        self.handle = symmetric.rendezvous(self.buffer, name)

    def _try(self) -> None:
        """Call everything once: what this torch does not have is an error on all ranks."""
        results: list[Tensor] = []
        for dtype, num_bytes in _TRIALS:
            term = torch.full((num_bytes // dtype.itemsize,), 1.0, dtype=dtype, device=self.device)
            results.append(self.total(term, torch.empty_like(term)).wait())
            results.append(self.gather(term, 0).wait() * self.size)
        if not all(bool((result == self.size).all()) for result in results):
            raise RuntimeError("sums over symmetric memory are wrong")

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is small enough, and laid out for it."""
        fits = 0 < x.nbytes <= _MOST_BYTES and x.nbytes % _ALIGNMENT == 0
        return fits and x.is_cuda and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0

    def sums(self, x: Tensor) -> bool:
        """Whether it adds tensors like this one."""
        if x.dtype == torch.float64:
            return x.nbytes * self.size <= _ONE_SHOT_BYTES and self.takes(x)
        return x.dtype in (torch.float32, torch.bfloat16) and self.takes(x)

    def total(self, x: Tensor, into: Tensor) -> Computed:
        """Sum over ranks, which may replace the tensor itself."""
        name, ops = self.group.group_name, torch.ops.symm_mem
        if x.dtype == torch.float64:
            return Computed(torch.sum(self.gather(x[None], 0).wait(), 0, out=into))
        if x.nbytes <= _ONE_SHOT_BYTES:
            ops.one_shot_all_reduce_copy_out(self._like(x), x, "sum", name, into)
        else:
            ops.two_shot_all_reduce_out(self._like(x).copy_(x), "sum", name, into)
        return Computed(into)

    def gather(self, x: Tensor, dim: int) -> Computed:
        """The tensors of all ranks, side by side along a dim."""
        self._like(x).copy_(x)
        handle: Any = self.handle
        handle.barrier()
        terms = [handle.get_buffer(rank, x.shape, x.dtype) for rank in range(self.size)]
        result = torch.cat(terms, dim)
        handle.barrier()
        return Computed(result)

    def _like(self, x: Tensor) -> Tensor:
        return self.buffer[: x.nbytes].view(x.dtype).view(x.shape)


def _require_links(gpus: set[int]) -> None:
    """Raise unless NVLink joins these GPUs."""
    if len(gpus) == 1:
        return
    from torch._C import _autograd, _distributed_c10d

    detect: Callable[..., Any] = _distributed_c10d._detect_dma_connectivity
    links = detect(_autograd.DeviceType.CUDA, "nvlink").matrix
    for first, second in combinations(sorted(gpus), 2):
        if not links[first][second]:
            raise RuntimeError(f"no NVLink joins the GPUs {first} and {second}")

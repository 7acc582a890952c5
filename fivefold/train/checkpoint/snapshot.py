"""Copies of a rank's boxes in host memory: of the moment of the save, whatever the next steps do.

The boxes are copied in slabs, in the order in which they are written, and a slab is written as soon
as it is copied. All saves of a run use the same memory. It can be made before the first of them:
the pages of 20 GiB take seconds, and a host with too little memory says so at once.

Where states are on a disk, memory is scarce and every save waits: nothing is copied, and all boxes
are read as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold.core.layout import Box
from fivefold.train.checkpoint.ranks import RankFailure
from fivefold.train.checkpoint.storage import BoxReads, CheckpointTensor, in_box
from fivefold.train.checkpoint.threads import NUM_STREAMS, in_threads

SLAB_BYTES = 1 << 30
_ALIGNMENT = 64  # bytes, of every copy in a slab


@dataclass(frozen=True)
class BoxSource:
    """A box that this rank writes, and its tensor."""

    index: MetadataIndex
    tensor: CheckpointTensor
    box: Box

    @property
    def num_bytes(self) -> int:
        """Bytes of its copy in a slab."""
        return -(-self.box.numel * self.tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def read(self) -> Tensor:
        return in_box(self.tensor.state.read().detach(), self.box)


class HostCopies:
    """Host memory of the copies, reused by all saves of a run."""

    def __init__(self) -> None:
        self._copies: dict[MetadataIndex, Tensor] = {}

    def reserve(self, sources: Sequence[BoxSource], pinned: bool) -> None:
        """Allocate memory for copies; `pinned` for tensors on a GPU."""
        for slab in slabs_of(sources):
            self._copies.update(_allocated(slab, pinned))

    def snapshot(self, sources: Sequence[BoxSource]) -> Snapshot:
        """A snapshot to be taken. The sources are in the order of writing."""
        return Snapshot(sources, self._copies)


class Snapshot:
    """Values of one save: `take` copies them, while other threads read.

    A read waits until its box is copied; without copies, until kernels that write it have ended.
    """

    def __init__(self, sources: Sequence[BoxSource], copies: dict[MetadataIndex, Tensor]) -> None:
        self._copies = copies
        self._slabs = [(slab, Future[None]()) for slab in slabs_of(sources)]
        self._in_place = [] if self._slabs else sources
        self._settled = Future[None]()  # what is read in place
        reads: dict[MetadataIndex, Callable[[], Tensor]] = {
            source.index: partial(self._read_in_place, source) for source in self._in_place
        }
        for slab, copied in self._slabs:
            reads |= {source.index: partial(self._read, source.index, copied) for source in slab}
        self.reads: BoxReads = reads

    def take(self) -> None:
        """Copy all boxes. If that fails, so does every waiting read."""
        try:
            _synchronise(source.read() for source in self._in_place if not source.tensor.on_disk)
            self._settled.set_result(None)
            for slab, copied in self._slabs:
                self._copy(slab)
                copied.set_result(None)
        except BaseException as error:
            reason = error if isinstance(error, Exception) else RankFailure("it was interrupted")
            for waited in (self._settled, *(copied for _, copied in self._slabs)):
                if not waited.done():
                    waited.set_exception(reason)
            raise

    def _copy(self, slab: Sequence[BoxSource]) -> None:
        values = {source.index: source.read() for source in slab}
        if slab[0].index not in self._copies:
            pinned = any(value.is_cuda for value in values.values())
            self._copies.update(_allocated(slab, pinned))
        for index, value in values.items():
            self._copies[index].copy_(value, non_blocking=True)
        _synchronise(values.values())  # threads read the copies that may be under way

    def _read(self, index: MetadataIndex, copied: Future[None]) -> Tensor:
        copied.result()
        return self._copies[index]

    def _read_in_place(self, source: BoxSource) -> Tensor:
        self._settled.result()
        return source.read()


def _synchronise(values: Iterable[Tensor]) -> None:
    """Wait for the GPUs of these values."""
    for device in {value.device for value in values if value.is_cuda}:
        torch.cuda.synchronize(device)


def slabs_of(sources: Sequence[BoxSource]) -> list[list[BoxSource]]:
    """Group boxes whose copies fit into a slab; a larger box has a slab of its own.

    None where states are on a disk: nothing changes before such a save ends.
    """
    slabs: list[list[BoxSource]] = []
    if any(candidate.tensor.on_disk for candidate in sources):
        return slabs
    space = 0
    for source in sources:
        if not slabs or source.num_bytes > space:
            slabs.append([])
            space = SLAB_BYTES
        slabs[-1].append(source)
        space -= source.num_bytes
    return slabs


def _allocated(slab: Sequence[BoxSource], pinned: bool) -> Mapping[MetadataIndex, Tensor]:
    """Memory for the copies of a slab; each has its own storage, since torch writes storages."""
    memory = _memory(sum(entry.num_bytes for entry in slab), pinned)
    copies: dict[MetadataIndex, Tensor] = {}
    offset = 0
    for source in slab:
        copy = torch.frombuffer(
            memory, dtype=source.tensor.dtype, count=source.box.numel, offset=offset
        )
        copies[source.index] = copy.view(source.box.sizes)
        offset += source.num_bytes
    return copies


def _memory(num_bytes: int, pinned: bool) -> NDArray[np.uint8]:
    """New host memory; `pinned` for fast copies from a GPU.

    Torch's own pinned memory takes 0.4 to 0.6 s a GiB, because one thread makes its pages. Here
    several threads make them, and pinning takes what is left: 0.1 s a GiB on the host of an H200.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if pinned:
        in_threads(Tensor.zero_, memory.chunk(NUM_STREAMS), NUM_STREAMS)
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        )
    array: NDArray[np.uint8] = memory.numpy()
    if pinned:
        unpin = finalize(array, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
        unpin.atexit = False  # CUDA may be gone by then
    return array

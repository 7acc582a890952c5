"""Checkpoints: any layout writes them, any other loads them, and nothing is read unverified.

`Checkpoints` saves and loads those of a run on all ranks: a save goes on in the background while
the next steps run, a load puts the tensors into whatever layout runs now. `Reader` and
`write_checkpoint` do it in one process, one full tensor at a time: export and import use them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold.core import BadFile, FivefoldError, UnknownName, bullets
from fivefold.core.layout import Box, whole_box, written_by
from fivefold.core.model import ADAPTER
from fivefold.launch.watch import SAVE_THREAD
from fivefold.records import SUSPECT, TAKEN_OVER
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint.folders import (
    Damaged,
    Facts,
    KeptCheckpoints,
    damage_of,
    latest,
    published,
    verified_manifest,
)
from fivefold.train.checkpoint.ranks import (
    CannotSave,
    CheckpointRanks,
    Part,
    RankFailure,
    RanksFailed,
    Result,
    RunTakenOver,
    joined,
    reason_of,
)
from fivefold.train.checkpoint.storage import (
    MODEL,
    OPTIM,
    PART_RANKS,
    BoxReads,
    CheckpointTensor,
    CheckpointWriter,
    Fence,
    StoredTensors,
    in_box,
    write_item,
)
from fivefold.train.checkpoint.threads import NUM_STREAMS, in_threads

# Copies of a rank's boxes in host memory: of the moment of the save, whatever the next steps do.
#
# The boxes are copied in slabs, in the order in which they are written, and a slab is written as
# soon as it is copied. All saves of a run use the same memory. It can be made before the first of
# them: the pages of 20 GiB take seconds, and a host with too little memory says so at once.
#
# Where states are on a disk, memory is scarce and every save waits: nothing is copied, and all
# boxes are read as they are written.

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
                values = {source.index: source.read() for source in slab}
                if slab[0].index not in self._copies:
                    pinned = any(value.is_cuda for value in values.values())
                    self._copies.update(_allocated(slab, pinned))
                for index, value in values.items():
                    self._copies[index].copy_(value, non_blocking=True)
                _synchronise(values.values())  # threads read the copies that may be under way
                copied.set_result(None)
        except BaseException as error:
            reason = error if isinstance(error, Exception) else RankFailure("it was interrupted")
            for waited in (self._settled, *(copied for _, copied in self._slabs)):
                if not waited.done():
                    waited.set_exception(reason)
            raise

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


__all__ = [
    "CannotSave",
    "CheckpointTensor",
    "Checkpoints",
    "Facts",
    "FullTensor",
    "Reader",
    "RunTakenOver",
    "latest",
    "published",
    "require_same_tensors",
    "require_seed",
    "write_checkpoint",
]

_SHOWN = 5  # differences that an error names


class Checkpoints:
    """Saves and loads the checkpoints in one folder, on all ranks together."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        judged_by: str = "",
        fence: Fence = nullcontext,
        part_ranks: int = PART_RANKS,
    ) -> None:
        """`group` has all ranks, moves tensors of the host and serves nothing else. Its timeout
        must be as long as a rank may take to write. None: there is one rank. `device` is the one of
        this rank. `judged_by` names the evaluation set whose best checkpoint stays. Checkpoints are
        published and removed inside of the `fence` only. `part_ranks` write a part together.
        """
        assert keep >= 1, "the newest one always stays"
        self.folder, self._ranks, self._fence = folder, CheckpointRanks(group), fence
        self.retention = KeptCheckpoints(keep, judged_by)
        self.device = device or torch.device("cpu")
        self._writer: CheckpointWriter | None = None
        self._part_ranks = part_ranks
        self._memory = HostCopies()
        self._thread: Thread | None = None
        self._failure: str | None = None
        self._newest: int | None = None  # the step that was saved or loaded last

    def reserve(self, tensors: Sequence[CheckpointTensor]) -> None:
        """Allocate host memory for copies, so that the first save is as fast as later ones.

        Not while steps run: to pin memory may wait for a kernel of NCCL that waits for another
        rank.
        """
        self._memory.reserve(self._sources(tensors), pinned=self.device.type == "cuda")

    def save(self, tensors: Sequence[CheckpointTensor], facts: Facts, wait: bool = False) -> None:
        """Copy all values, and write them in the background; `wait` for the write.

        Waits for the save before it first, and raises `CannotSave` if that one failed. With states
        on a disk nothing is copied: such a save always waits. A step that is saved already is not
        saved again.
        """
        self.wait()
        if facts.step == self._newest:
            return
        snapshot = self._memory.snapshot(self._sources(tensors))
        self._thread = Thread(
            target=self._write, args=(facts, snapshot.reads), name=SAVE_THREAD, daemon=True
        )
        self._thread.start()
        with suppress(Exception):  # the thread fails with it, on all ranks
            snapshot.take()
        if wait or any(tensor.on_disk for tensor in tensors):
            self.wait()

    def meet(self) -> None:
        """Barrier of all ranks."""
        self._ranks.on_all(lambda: None)

    def agree(self, local_part: Part, decide: Callable[[list[Part]], Result]) -> Result:
        """Decide on the first rank from values of all ranks, while nothing is written."""
        assert self._thread is None, "the thread that writes uses the same group"
        return self._ranks.gather(lambda: local_part, decide)

    def wait(self) -> None:
        """Wait for the write in flight; raises `CannotSave` if it failed, or `RunTakenOver` if
        every later one would."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (failure := self.failure()) is not None:
            raise (RunTakenOver if TAKEN_OVER in failure else CannotSave)(failure)

    def failure(self) -> str | None:
        """Reason why the last save failed, returned once; None while it is written or if it
        succeeded.

        Ranks may learn of it at different steps; after `wait` all know it.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        failure, self._failure = self._failure, None
        return failure

    def load(
        self, tensors: Sequence[CheckpointTensor], on_damage: Callable[[str], None]
    ) -> Facts | None:
        """Load the newest valid checkpoint; None if there is no checkpoint.

        Every file is verified before any is interpreted. The first rank calls `on_damage` with the
        name of each checkpoint that is skipped, and why.
        """
        self.wait()
        paths, newer = self._ranks.on_first(self._find)
        if newer is not None:  # to go on from an older one would repeat, and then replace, its step
            raise FivefoldError(newer)
        damaged: list[str] = []
        for folder in reversed(paths):
            try:
                facts = self._load_from(folder, tensors)
            except RanksFailed as failed:
                what = "suspect" if (folder / SUSPECT).exists() else "damaged"
                damaged.append(f"{folder.name} is {what}: {failed}")
                if self._ranks.rank == 0:
                    on_damage(damaged[-1])
            else:
                self._newest = facts.step
                return facts
        if damaged:
            raise FivefoldError(
                bullets(f"no checkpoint in {self.folder} can be used:", damaged)
                + "\nrestore one of them from a copy, or move that folder away to start again"
            )
        return None

    def _find(self) -> tuple[list[Path], str | None]:
        """The checkpoints, and what is said of one that a newer program wrote."""
        paths = folders.published(self.folder)
        newer = [reason for path in paths if (reason := folders.newer_format(path)) is not None]
        if not newer:
            folders.sweep(self.folder)
        return paths, newer[-1] if newer else None

    def _sources(self, tensors: Sequence[CheckpointTensor]) -> list[BoxSource]:
        """The boxes that this rank writes, in the order of writing."""
        # A rank may have a tied weight twice, and writes it once.
        boxes = {
            MetadataIndex(tensor.key, box.offsets): (tensor, box)
            for tensor in tensors
            for box in tensor.boxes
        }
        if self._writer is None:
            items = written_by(
                (
                    write_item(tensor.key, tensor.shape, tensor.dtype, box),
                    tensor.holders,
                    box.numel * tensor.dtype.itemsize,
                    (tensor.key, box.offsets),
                )
                for tensor, box in boxes.values()
            )
            on_disk = any(tensor.on_disk for tensor in tensors)
            self._writer = CheckpointWriter(
                self._ranks, items, file_per_box=on_disk, part_ranks=self._part_ranks
            )
        return [BoxSource(index, *boxes[index]) for index in self._writer.indices]

    def _write(self, facts: Facts, reads: BoxReads) -> None:
        """The thread of a save; `wait` raises its error later."""
        assert self._writer is not None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on device 0
        try:
            self._writer.write(self.folder, facts, reads, self.retention, self._fence)
            self._newest = facts.step
        except Exception as error:
            self._failure = self._explain(facts.step, reason_of(error))
            if self._ranks.rank == 0 and TAKEN_OVER not in self._failure:
                # The incomplete checkpoint may be what fills the disk.
                part = self.folder / (folders.name_of(facts.step) + folders.PART)
                shutil.rmtree(part, ignore_errors=True)

    def _explain(self, step: int, reason: str) -> str:
        paths = folders.published(self.folder)
        last = f"{paths[-1].name} stays the newest" if paths else "there is none before it"
        if TAKEN_OVER in reason:
            return f"the checkpoint of step {step} was not written: {reason}"
        return (
            f"the checkpoint of step {step} was not written: {reason}; {last}. "
            "Make room on that disk, or see to it"
        )

    def _load_from(self, folder: Path, tensors: Sequence[CheckpointTensor]) -> Facts:
        """Verify one checkpoint, and only then open and read it."""
        manifest = self._ranks.on_first(lambda: verified_manifest(folder))
        rank, size = self._ranks.rank, self._ranks.size
        problems = self._ranks.exchange(
            lambda: damage_of(folder, manifest, rank, size), joined, lambda problems: problems
        )
        if problems:
            raise RanksFailed(problems)
        opened: list[StoredTensors] = []

        def open_it() -> tuple[set[str], set[str]]:
            opened.append(StoredTensors.of(folder, manifest))
            keys = {tensor.key for tensor in tensors}
            return set(opened[0].missing(_needed(opened[0], tensors))), keys

        differences = self._ranks.exchange(
            open_it, _united, lambda union: _differences(opened[0], *union)
        )
        if differences:
            raise FivefoldError(_other_model(folder, differences))
        self._ranks.on_all(lambda: opened[0].load(_needed(opened[0], tensors)))
        has_states = any(tensor.key.startswith(OPTIM) for tensor in _needed(opened[0], tensors))
        return replace(manifest.facts, has_states=has_states)


def _united(pairs: list[tuple[set[str], set[str]]]) -> tuple[set[str], set[str]]:
    """What any rank lacks, and what any needs."""
    return set[str]().union(*(a for a, _ in pairs)), set[str]().union(*(b for _, b in pairs))


def _needed(stored: StoredTensors, tensors: Sequence[CheckpointTensor]) -> list[CheckpointTensor]:
    """All tensors, except a kind that is not stored at all: imported weights have no states, and
    where adapters are new they begin as they are."""
    needed = {_kind(key) for key in (MODEL, *stored.tensors)}
    return [tensor for tensor in tensors if _kind(tensor.key) in needed]


def _kind(key: str) -> tuple[str, bool]:
    return key.partition("/")[0], ADAPTER in key


def _differences(stored: StoredTensors, missing: set[str], needed: set[str]) -> list[str]:
    """What the ranks need and is not stored, and the stored weights that no rank needs."""
    unknown = {key for key in stored.tensors if key.startswith(MODEL)} - needed
    lacks = sorted(f"it has no {tensor_key}" for tensor_key in missing)
    return [*lacks, *sorted(f"this run has no {key}" for key in unknown)]


def require_same_tensors(
    folder: Path, stored: StoredTensors, tensors: Sequence[CheckpointTensor]
) -> None:
    """Refuse a checkpoint of another model or optimizer, by the tensors of the full run."""
    keys = {tensor.key for tensor in tensors}
    lacks = set(stored.missing(_needed(stored, tensors)))
    if differences := _differences(stored, lacks, keys):
        raise FivefoldError(_other_model(folder, differences))


def require_seed(facts: Facts, seed: int) -> None:
    """Refuse a seed other than that of earlier steps."""
    if facts.seed != seed and facts.has_states:
        raise FivefoldError(
            f"the run has seed {facts.seed}, not {seed}: another seed would read the text in "
            "another order; resume with the same"
        )


def _other_model(folder: Path, differences: list[str]) -> str:
    shown, remainder = differences[:_SHOWN], len(differences) - _SHOWN
    tail = [f"and {remainder} more"] if remainder > 0 else []
    return (
        bullets(f"checkpoint {folder} is of another model or optimizer:", [*shown, *tail])
        + "\nresume with the model and optimizer it was saved with, or begin in another folder"
    )


# In one process, one full tensor at a time.


FullTensor = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""The key of a tensor, its shape and dtype, and a function that returns it."""


class Reader:
    """Reader of one checkpoint, which is verified first."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the checkpoint itself, as `published` and `latest` return it."""
        self.folder = folder
        try:
            manifest = verified_manifest(folder)
            if problems := damage_of(folder, manifest):
                raise BadFile(str(folder), problems)
            self._stored = StoredTensors.of(folder, manifest)
        except Damaged as damaged:
            raise BadFile(str(folder), [str(damaged)]) from damaged
        self.facts = manifest.facts
        self.tensors = {
            key: (tuple(tensor.size), tensor.properties.dtype)
            for key, tensor in self._stored.tensors.items()
        }

    def read(self, key: str) -> Tensor:
        """Read a full tensor to host memory."""
        if key not in self.tensors:
            raise UnknownName("tensor of a checkpoint", key, self.tensors)
        try:
            return self._stored.read(key)
        except Exception as error:  # its checksum is right, and yet torch cannot read it
            rule = f"{key} cannot be read ({reason_of(error)}): restore it from a copy"
            raise BadFile(str(self.folder), [rule]) from error


def write_checkpoint(folder: Path, tensors: Iterable[FullTensor], facts: Facts) -> Path:
    """Write and publish a checkpoint of full tensors in a folder of checkpoints.

    Each tensor is made when it is written, and freed before the next. An error for the user while
    one is made is raised as it is.
    """
    tensors, failures = list(tensors), list[FivefoldError]()

    def guarded(get: Callable[[], Tensor]) -> Tensor:
        try:
            return get()
        except FivefoldError as error:
            failures.append(error)
            raise

    items = [write_item(key, shape, dtype, whole_box(shape)) for key, shape, dtype, _ in tensors]
    reads = {
        MetadataIndex(key, whole_box(shape).offsets): partial(guarded, get)
        for key, shape, _, get in tensors
    }
    retention = KeptCheckpoints(len(folders.published(folder)) + 1)
    try:
        writer = CheckpointWriter(CheckpointRanks(None), items, file_per_box=True)
        writer.write(folder, facts, reads, retention)
    except RanksFailed as failed:
        part = folder / (folders.name_of(facts.step) + folders.PART)
        shutil.rmtree(part, ignore_errors=True)
        if failures:
            raise failures[0] from failed
        raise CannotSave(f"{failed}: make room on that disk, or choose another folder") from failed
    return folder / folders.name_of(facts.step)

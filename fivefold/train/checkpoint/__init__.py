"""Checkpoints: any layout writes them, any other reads them, and nothing is read unverified."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold.core.errors import BadFile, FivefoldError, UnknownName, bullets
from fivefold.core.weights import Box, whole_box
from fivefold.optim.optimizer import InMemory
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint.folders import (
    Damaged,
    Facts,
    latest,
    problems_of,
    published,
    verified_manifest,
)
from fivefold.train.checkpoint.ranks import CannotSave, CheckpointRanks, Failed, reason_of
from fivefold.train.checkpoint.slots import MODEL, OPTIM, CheckpointTensor, slots_of, spread
from fivefold.train.checkpoint.storage import Reads, Stored, Writing, in_box, item_of

__all__ = [
    "CannotSave",
    "CheckpointTensor",
    "Checkpoints",
    "Facts",
    "Reader",
    "latest",
    "published",
    "slots_of",
    "spread",
    "write_whole",
]

# The checkpoints of a run: saved behind the steps, loaded into whatever layout runs now.


_SHOWN = 5  # missing tensors that an error names


class Checkpoints:
    """Saves and loads the checkpoints in one folder, on all ranks together."""

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None) -> None:
        """`group` has all ranks, carries tensors of the host and is used for nothing else; it must
        be patient for as long as a rank may write. None: there is one rank.
        """
        assert keep >= 1, "the newest is always kept"
        self.folder, self.keep, self._crew = folder, keep, CheckpointRanks(group)
        self._writing: Writing | None = None
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: str | None = None
        self._newest: int | None = None  # the step that was saved or loaded last

    def save(self, slots: Sequence[CheckpointTensor], facts: Facts, wait: bool = False) -> None:
        """Copy all values, and write them in the background; `wait` until that is over.

        Waits for the save before it, and raises `CannotSave` if that one failed and nobody has
        asked. What lives on a disk is not copied: such a save is always waited for. A step that
        is already saved is not saved again.
        """
        self.wait()
        if facts.step == self._newest:
            return
        on_disk = any(slot.on_disk for slot in slots)
        reads = self._snapshot(slots)
        self._thread = Thread(target=self._write, args=(facts, reads), daemon=True)
        self._thread.start()
        if wait or on_disk:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written; raises `CannotSave` if the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (failure := self.failure()) is not None:
            raise CannotSave(failure)

    def failure(self) -> str | None:
        """Why the last save failed, told once; None while it is being written, or if it is well.

        Ranks may learn of it at different steps; all know it behind `wait`.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        failure, self._failure = self._failure, None
        return failure

    def load(
        self, slots: Sequence[CheckpointTensor], on_bad: Callable[[str], None]
    ) -> Facts | None:
        """Read the newest good checkpoint; None where there is none at all.

        Every file is verified before any is interpreted. `on_bad` is told, on the first rank, of
        each checkpoint that is passed over, and why.
        """
        self.wait()
        found = self._crew.first(self._found)
        bad: list[str] = []
        for folder in reversed(found):
            try:
                facts = self._load_from(folder, slots)
            except Failed as failed:
                bad.append(f"{folder.name} is damaged: {failed}")
                if self._crew.rank == 0:
                    on_bad(bad[-1])
            else:
                self._newest = facts.step
                return facts
        if bad:
            raise FivefoldError(
                bullets(f"no checkpoint in {self.folder} can be used:", bad)
                + "\nrestore one of them from a copy, or move that folder away to begin anew"
            )
        return None

    def _found(self) -> list[Path]:
        folders.sweep(self.folder)
        return folders.published(self.folder)

    def _snapshot(self, slots: Sequence[CheckpointTensor]) -> Reads:
        """Copies in host memory of what this rank writes; of what is on a disk, how to read it."""
        held = {
            (item := item_of(slot.key, slot.shape, slot.dtype, box)).index: (item, slot, box)
            for slot in slots
            for box in slot.boxes
        }
        if self._writing is None:
            items = [item for item, _, _ in held.values()]
            file_each = any(slot.on_disk for slot in slots)
            self._writing = Writing(self._crew, items, file_each=file_each)
        reads: dict[MetadataIndex, Callable[[], Tensor]] = {}
        values: dict[str, Tensor] = {}
        for index in self._writing.indices:
            _, slot, box = held[index]
            if slot.on_disk:
                reads[index] = partial(_read, slot, box)
                continue
            if slot.key not in values:
                values[slot.key] = slot.kept.read().detach()
            self._copy(index, in_box(values[slot.key], box))
            reads[index] = partial(self._copies.__getitem__, index)
        if any(value.is_cuda for value in values.values()):
            torch.cuda.synchronize()  # a thread will read what is still on its way
        return reads

    def _copy(self, index: MetadataIndex, value: Tensor) -> None:
        """Into memory that is made once: a save comes back to the sizes of the one before."""
        if index not in self._copies:
            self._copies[index] = torch.empty(
                value.shape, dtype=value.dtype, pin_memory=value.is_cuda
            )
        self._copies[index].copy_(value, non_blocking=True)

    def _write(self, facts: Facts, reads: Reads) -> None:
        """The thread of a save; what it cannot do is told later."""
        assert self._writing is not None
        try:
            self._writing.write(self.folder, facts, reads, self.keep)
            self._newest = facts.step
        except Exception as error:
            self._failure = self._told(facts.step, reason_of(error))
            if self._crew.rank == 0:  # what was written of it may be what fills the disk
                part = self.folder / (folders.name_of(facts.step) + folders.PART)
                shutil.rmtree(part, ignore_errors=True)

    def _told(self, step: int, reason: str) -> str:
        there = folders.published(self.folder)
        last = f"{there[-1].name} stays the newest" if there else "there is none before it"
        return (
            f"the checkpoint of step {step} was not written: {reason}; {last}. "
            "Make room on that disk, or see to it: the next save tries again"
        )

    def _load_from(self, folder: Path, slots: Sequence[CheckpointTensor]) -> Facts:
        """Verify one checkpoint, and only then open and read it."""
        manifest = self._crew.first(lambda: verified_manifest(folder))
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
        mine = by_size[self._crew.rank :: self._crew.size]
        problems = self._crew.everyone(lambda: problems_of(folder, manifest, mine))
        if any(problems):
            raise Failed([each for some in problems for each in some])
        stored: list[Stored] = []

        def open_it() -> tuple[list[str], set[str]]:
            stored.append(Stored(folder))
            here = {slot.key for slot in slots}
            return stored[0].missing(_wanted(stored[0], slots)), here

        differences = self._crew.together(
            open_it, lambda parts: [_differences(stored[0], parts)] * self._crew.size
        )
        if differences:
            raise FivefoldError(_other_model(folder, differences))
        self._crew.everyone(lambda: stored[0].fill(_wanted(stored[0], slots)))
        has_states = any(key.startswith(OPTIM) for key in stored[0].tensors)
        return replace(manifest.facts, has_states=has_states)


def _read(slot: CheckpointTensor, box: Box) -> Tensor:
    return in_box(slot.kept.read().detach(), box)


def _wanted(stored: Stored, slots: Sequence[CheckpointTensor]) -> list[CheckpointTensor]:
    """All slots, but for a kind of which there is none: imported weights have no states."""
    kinds = {key.partition("/")[0] for key in stored.tensors}
    needed = kinds | {MODEL.rstrip("/")}
    return [slot for slot in slots if slot.key.partition("/")[0] in needed]


def _differences(stored: Stored, parts: list[tuple[list[str], set[str]]]) -> list[str]:
    """What the ranks want and is not there, and the weights that are there and no rank wants."""
    wanted = set[str]().union(*(keys for _, keys in parts))
    unknown = {key for key in stored.tensors if key.startswith(MODEL)} - wanted
    lacks = {f"it has no {each}" for missing, _ in parts for each in missing}
    return [*sorted(lacks), *sorted(f"this run has no {key}" for key in unknown)]


def _other_model(folder: Path, differences: list[str]) -> str:
    shown, rest = differences[:_SHOWN], len(differences) - _SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    return (
        bullets(f"checkpoint {folder} is of another model or optimizer:", [*shown, *more])
        + "\nresume with the model and optimizer it was saved with, or begin in another folder"
    )


# Checkpoints in one process, one tensor at a time: what exports and imports read and write.


Entry = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""The key of a tensor, its shape and type, and how to come by it."""


class Reader:
    """One checkpoint, verified when it is opened."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the checkpoint itself, as `published` and `latest` give it."""
        try:
            manifest = verified_manifest(folder)
        except Damaged as damaged:
            raise BadFile(str(folder), [str(damaged)]) from damaged
        problems = problems_of(folder, manifest, manifest.files)
        if problems:
            raise BadFile(str(folder), problems)
        self.facts = manifest.facts
        self._stored = Stored(folder)
        self.tensors = {
            key: (tuple(each.size), each.properties.dtype)
            for key, each in self._stored.tensors.items()
        }

    def read(self, key: str) -> Tensor:
        """One whole tensor, in host memory."""
        if key not in self.tensors:
            raise UnknownName("tensor of a checkpoint", key, self.tensors)
        shape, dtype = self.tensors[key]
        value = torch.empty(shape, dtype=dtype)
        self._stored.fill(
            [CheckpointTensor(key, shape, dtype, (whole_box(shape),), InMemory(value))]
        )
        return value


def write_whole(folder: Path, entries: Iterable[Entry], facts: Facts) -> Path:
    """Write and publish a checkpoint of whole tensors in a folder of checkpoints.

    Each tensor is asked for when it is written, and let go before the next.
    """
    entries = list(entries)
    items = [item_of(key, shape, dtype, whole_box(shape)) for key, shape, dtype, _ in entries]
    reads = {MetadataIndex(key, whole_box(shape).offsets): get for key, shape, _, get in entries}
    num_there = len(folders.published(folder))
    try:
        Writing(CheckpointRanks(None), items, file_each=True).write(
            folder, facts, reads, keep=num_there + 1
        )
    except Failed as failed:
        raise CannotSave(f"{failed}: make room on that disk, or choose another folder") from failed
    return folder / folders.name_of(facts.step)

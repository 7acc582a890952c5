"""Checkpoints in one process, one tensor at a time: what exports and imports read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold.core.boxes import whole_box
from fivefold.core.errors import BadFile, UnknownName
from fivefold.run.optimizer import InMemory
from fivefold.training.checkpoint import folders
from fivefold.training.checkpoint.crew import CannotSave, Crew, Failed
from fivefold.training.checkpoint.manifest import Damaged, Facts, problems_of, verified_manifest
from fivefold.training.checkpoint.reading import Stored
from fivefold.training.checkpoint.slots import Slot
from fivefold.training.checkpoint.writing import Writing, item_of

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
        self._stored.fill([Slot(key, shape, dtype, (whole_box(shape),), InMemory(value))])
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
        Writing(Crew(None), items, file_each=True).write(folder, facts, reads, keep=num_there + 1)
    except Failed as failed:
        raise CannotSave(f"{failed}: make room on that disk, or choose another folder") from failed
    return folder / folders.name_of(facts.step)

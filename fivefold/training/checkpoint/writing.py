"""Checkpoints onto the disk, through the planner and the writer of torch.distributed.checkpoint.

Which rank writes which box is agreed on once: what several hold is written by one of them, and the
work is dealt evenly. Then every checkpoint takes two meetings: one before anything is written, and
one when every rank has its files on the disk and has hashed them. Only after the second does the
first rank write the manifest and give the checkpoint its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from fivefold.core.boxes import Box
from fivefold.training.checkpoint import folders
from fivefold.training.checkpoint.crew import Crew, Told, reason_of
from fivefold.training.checkpoint.manifest import (
    FILE,
    METADATA,
    Facts,
    Manifest,
    Stamp,
    stamp,
)

Reads = Mapping[MetadataIndex, Callable[[], Tensor]]
"""How to come by the values of each box."""


class _Written(NamedTuple):
    """What one rank has on the disk."""

    results: list[WriteResult]
    files: dict[str, Stamp]


def item_of(key: str, shape: Sequence[int], dtype: torch.dtype, box: Box) -> WriteItem:
    """One box of one tensor, in torch's words."""
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
    """Torch's own planner, but for where values come from."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.reads = reads

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.reads[write_item.index]()


class Writing:
    """The share of one rank in every checkpoint of a run."""

    def __init__(self, crew: Crew, items: Sequence[WriteItem], *, file_each: bool) -> None:
        """All ranks agree on who writes what.

        The writer holds on to all values of a file until it is done: with `file_each`, a file for
        each box, it holds no more than one.
        """
        self.crew = crew
        self._writer = FileSystemWriter(
            Path(),
            single_file_per_rank=not file_each,
            per_thread_copy_ahead=0,  # else it looks for a GPU, from a thread that has chosen none
        )
        # A rank may hold a tied weight twice: it writes the one.
        plan = SavePlan(list({item.index: item for item in items}.values()))
        self.plan, self._metadata = crew.together(lambda: plan, self._deal)

    @property
    def indices(self) -> set[MetadataIndex]:
        """The boxes that this rank writes."""
        return {item.index for item in self.plan.items}

    def write(self, folder: Path, facts: Facts, reads: Reads, keep: int) -> None:
        """Write a checkpoint, publish it, and let older ones go."""
        part = self.crew.first(lambda: folders.begin(folder, facts.step))
        self._writer.reset(part)

        def finish(parts: list[_Written]) -> list[None]:
            self._finish(part, facts, parts)
            folders.publish(part)
            folders.retire(folder, facts.step, keep)
            return [None] * self.crew.size

        self.crew.together(lambda: self._write_own(part, reads), finish)

    def _deal(self, plans: list[SavePlan]) -> list[tuple[SavePlan, Metadata | None]]:
        """On the first rank: what several ranks hold goes to the one with the least to write."""
        dealt, metadata = _Planner({}).create_global_plan(plans)
        prepared = self._writer.prepare_global_plan(dealt)
        return [(plan, None if place else metadata) for place, plan in enumerate(prepared)]

    def _write_own(self, part: Path, reads: Reads) -> _Written:
        mine = f"__{self.crew.rank}_*"
        try:
            written = self._writer.write_data(self.plan, _Planner(reads))
            written.wait()
            files = {path.name: stamp(path) for path in part.glob(mine)}
        except Exception as error:
            reason = reason_of(error)
            at = max(part.glob(mine), key=lambda path: path.stat().st_mtime_ns, default=part)
            raise Told(reason if str(part) in reason else f"{at}: {reason}") from error
        return _Written(written.value(), files)

    def _finish(self, part: Path, facts: Facts, parts: list[_Written]) -> None:
        assert self._metadata is not None, "the first rank finishes"
        self._writer.finish(self._metadata, [each.results for each in parts])
        files = {name: each for one in parts for name, each in one.files.items()}
        files[METADATA] = stamp(part / METADATA)
        manifest = Manifest(facts, dict(sorted(files.items())))
        folders.write_synced(part / FILE, manifest.text())

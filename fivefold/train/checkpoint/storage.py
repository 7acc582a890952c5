"""Checkpoints from the disk: every rank reads the boxes that it holds, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from fivefold.core.weights import Box
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint.folders import FILE, METADATA, Facts, Manifest, Stamp, stamp
from fivefold.train.checkpoint.ranks import CheckpointRanks, RankFailure, reason_of
from fivefold.train.checkpoint.slots import CheckpointTensor


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's own planner, but for where values go: into boxes of flat tensors."""

    def __init__(
        self, slots: Sequence[CheckpointTensor], tensors: dict[str, TensorStorageMetadata]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.slots, self.tensors = slots, tensors
        self.values = {slot.key: slot.kept.read().detach() for slot in slots}
        self.rooms = {
            (slot.key, torch.Size(box.offsets)): in_box(self.values[slot.key], box)
            for slot in slots
            for box in slot.boxes
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for slot in self.slots:
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in slot.boxes
            ]
            found = create_read_items_for_chunk_list(slot.key, self.tensors[slot.key], chunks)
            held = sum(box.numel for box in slot.boxes)
            assert sum(item.lengths.numel() for item in found) == held, f"{slot.key} has holes"
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        where, offset = read_item.dest_index, read_item.dest_index.offset
        assert offset is not None
        room = self.rooms[where.fqn, offset]
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(spans):
            room = room.narrow(dim, start, length)
        return room


def in_box(value: Tensor, box: Box) -> Tensor:
    """The elements of a box, where a rank keeps them."""
    return value.view(-1)[box.at : box.at + box.numel].view(box.sizes)


class Stored:
    """The tensors of one checkpoint. To open it is to unpickle its metadata: verify it before."""

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors = {
            key: each
            for key, each in self._metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def missing(self, slots: Iterable[CheckpointTensor]) -> list[str]:
        """What slots want and the checkpoint has not, or not in that shape."""
        found: list[str] = []
        for slot in slots:
            there = self.tensors.get(slot.key)
            if there is None:
                found.append(slot.key)
            elif tuple(there.size) != slot.shape:
                found.append(f"{slot.key} {slot.shape}, which is {tuple(there.size)} there")
        return found

    def fill(self, slots: Iterable[CheckpointTensor]) -> None:
        """Read all slots; one that lives on a disk alone, so that no two are in memory."""
        at_once: list[CheckpointTensor] = []
        for slot in slots:
            if slot.on_disk:
                self._fill([slot])
            else:
                at_once.append(slot)
        self._fill(at_once)

    def _fill(self, slots: list[CheckpointTensor]) -> None:
        firsts = {slot.key: slot for slot in reversed(slots)}
        planner = _LoadPlanner(list(firsts.values()), self.tensors)
        planner.set_up_planner({}, self._metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        for slot in slots:
            # A rank may hold a tied weight twice; both are cut alike.
            assert slot.boxes == firsts[slot.key].boxes, f"{slot.key} is cut in two ways"
            slot.kept.write(planner.values[slot.key])


# Checkpoints onto the disk, through the planner and the writer of torch.distributed.checkpoint.
#
# Which rank writes which box is agreed on once: what several hold is written by one of them, and
# the work is dealt evenly. Then every checkpoint takes two meetings: one before anything is
# written, and one when every rank has its files on the disk and has hashed them. Only after the
# second does the first rank write the manifest and give the checkpoint its name.


Reads = Mapping[MetadataIndex, Callable[[], Tensor]]
"""How to come by the values of each box."""


class _WrittenFiles(NamedTuple):
    """What one rank has on the disk."""

    results: list[WriteResult]
    files: dict[str, Stamp]


def item_of(key: str, shape: Sequence[int], dtype: torch.dtype, box: Box) -> WriteItem:
    """One box of one tensor, in torch's words."""
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


class _SavePlanner(DefaultSavePlanner):
    """Torch's own planner, but for where values come from."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.reads = reads

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.reads[write_item.index]()


class Writing:
    """The share of one rank in every checkpoint of a run."""

    def __init__(
        self, crew: CheckpointRanks, items: Sequence[WriteItem], *, file_each: bool
    ) -> None:
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

        def finish(parts: list[_WrittenFiles]) -> list[None]:
            self._finish(part, facts, parts)
            folders.publish(part)
            folders.retire(folder, facts.step, keep)
            return [None] * self.crew.size

        self.crew.together(lambda: self._write_own(part, reads), finish)

    def _deal(self, plans: list[SavePlan]) -> list[tuple[SavePlan, Metadata | None]]:
        """On the first rank: what several ranks hold goes to the one with the least to write."""
        dealt, metadata = _SavePlanner({}).create_global_plan(plans)
        prepared = self._writer.prepare_global_plan(dealt)
        return [(plan, None if place else metadata) for place, plan in enumerate(prepared)]

    def _write_own(self, part: Path, reads: Reads) -> _WrittenFiles:
        mine = f"__{self.crew.rank}_*"
        try:
            written = self._writer.write_data(self.plan, _SavePlanner(reads))
            written.wait()
            files = {path.name: stamp(path) for path in part.glob(mine)}
        except Exception as error:
            reason = reason_of(error)
            at = max(part.glob(mine), key=lambda path: path.stat().st_mtime_ns, default=part)
            raise RankFailure(reason if str(part) in reason else f"{at}: {reason}") from error
        return _WrittenFiles(written.value(), files)

    def _finish(self, part: Path, facts: Facts, parts: list[_WrittenFiles]) -> None:
        assert self._metadata is not None, "the first rank finishes"
        self._writer.finish(self._metadata, [each.results for each in parts])
        files = {name: each for one in parts for name, each in one.files.items()}
        files[METADATA] = stamp(part / METADATA)
        manifest = Manifest(facts, dict(sorted(files.items())))
        folders.write_synced(part / FILE, manifest.text())

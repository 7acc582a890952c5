"""Checkpoints from the disk: every rank reads the boxes that it holds, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fivefold.core.boxes import Box
from fivefold.training.checkpoint.slots import Slot


class _Planner(DefaultLoadPlanner):
    """Torch's own planner, but for where values go: into boxes of flat tensors."""

    def __init__(self, slots: Sequence[Slot], tensors: dict[str, TensorStorageMetadata]) -> None:
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

    def missing(self, slots: Iterable[Slot]) -> list[str]:
        """What slots want and the checkpoint has not, or not in that shape."""
        found: list[str] = []
        for slot in slots:
            there = self.tensors.get(slot.key)
            if there is None:
                found.append(slot.key)
            elif tuple(there.size) != slot.shape:
                found.append(f"{slot.key} {slot.shape}, which is {tuple(there.size)} there")
        return found

    def fill(self, slots: Iterable[Slot]) -> None:
        """Read all slots; one that lives on a disk alone, so that no two are in memory."""
        at_once: list[Slot] = []
        for slot in slots:
            if slot.on_disk:
                self._fill([slot])
            else:
                at_once.append(slot)
        self._fill(at_once)

    def _fill(self, slots: list[Slot]) -> None:
        firsts = {slot.key: slot for slot in reversed(slots)}
        planner = _Planner(list(firsts.values()), self.tensors)
        planner.set_up_planner({}, self._metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        for slot in slots:
            # A rank may hold a tied weight twice; both are cut alike.
            assert slot.boxes == firsts[slot.key].boxes, f"{slot.key} is cut in two ways"
            slot.kept.write(planner.values[slot.key])

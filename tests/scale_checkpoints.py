"""Checkpoints of jobs that no machine here has: what start-up, a save, a load and a recovery cost a
rank and the first rank, as functions of the number of ranks.

The boxes of a rank follow from the plan and its number alone, so that ranks are simulated: the code
of the run plans files, lists what a part has, writes metadata, manifests and the directory, opens
them again and matches a lost host with those who keep its copies. Only tensors are not written.

python -m tests.scale_checkpoints [RANKS …]
"""

from __future__ import annotations

import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from fivefold.core.layout.boxes import boxes_of
from fivefold.core.layout.groups import TWIN, Topology, group_of
from fivefold.core.layout.partners import CopyOf, Partners
from fivefold.core.layout.replicas import Holders, copy_roles, written_by
from fivefold.core.layout.units import Unit, local_weights, pack
from fivefold.core.layout.weight_table import by_name, shard_of
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.optim.optimizer import StateInMemory
from fivefold.train.checkpoint.checkpoints import _differences, _united
from fivefold.train.checkpoint.folders import (
    Facts,
    FileChecksum,
    name_of_part,
    verified_manifest,
)
from fivefold.train.checkpoint.ranks import CheckpointRanks
from fivefold.train.checkpoint.storage import (
    PART_RANKS,
    CheckpointTensor,
    CheckpointWriter,
    StoredTensors,
    _LoadPlanner,
    _num_bytes,
    _WrittenFiles,
    _WrittenPart,
    write_item,
)
from fivefold.train.recovery.memory_checkpoint import (
    Question,
    _matched,
    _newest_of,
    _rows,
    _sets,
    _stored,
)

GLOO_FILES = 4  # of a gloo group without a connection, as counted in a process
HOST = 8
STATES = ("model/", "optim/exp_avg/", "optim/exp_avg_sq/")
NOTHING = StateInMemory(torch.empty(0))
Result = TypeVar("Result")


@dataclass
class Activity:
    """What one activity costs a rank, and the first rank or the busiest."""

    name: str
    ranks: int
    rank: dict[str, float] = field(default_factory=dict[str, float])
    root: dict[str, float] = field(default_factory=dict[str, float])


class SimulatedRanks(CheckpointRanks):
    """One rank of a job whose others do not run."""

    def __init__(self, rank: int, size: int, first: int = 0) -> None:
        super().__init__(None, first, size)
        self.rank = rank

    def neighbours(self, size: int) -> CheckpointRanks:
        first = self.rank // size * size
        return SimulatedRanks(self.rank - first, min(size, self.size - first), first)


@cache
def plan_of(ranks: int, model: str = "llama-3.1-405b") -> Plan:
    """A plan with tp = 8 and pp = 8, whose optimizer states are sharded over all data ranks."""
    layout = f"dp={ranks // 64} tp=8 pp=8"
    return resolve(PlanOptions(model, layout=layout, zero=1, seq=8192, batch=ranks // 8))


@cache
def units_of(ranks: int, stage: int, shards: int) -> tuple[Unit, ...]:
    plan = plan_of(ranks)
    return pack(local_weights(plan.shape, plan.layout, plan.stages[stage]), shards, 2)


def tensors_of(plan: Plan, rank: int) -> Iterator[CheckpointTensor]:
    """The tensors of a rank as `checkpoint_tensors` names them, from values alone."""
    layout, topology, table = plan.layout, Topology.of(plan), by_name(plan.shape)
    at, line = layout.coord(rank), group_of(topology, "fsdp", rank)
    coord, placement = line.index(rank), plan.schedule.placement
    known: dict[tuple[str, ...], Holders] = {}
    for stage, home in enumerate(placement.homes):
        if home != at.pp:
            continue
        for unit in units_of(layout.world, stage, len(line)):
            low = coord * unit.shard_size
            starts = {entry.row.name: max(0, low - entry.start) for entry in unit.entries}
            for row, start, stop in unit.owned(coord if unit.num_shards > 1 else 0):
                weight = table[row.name]
                shard = shard_of(weight, plan.shape, layout, at)
                first = starts[row.name]
                boxes = boxes_of(weight.shape, shard, row.shape, first, first + stop - start)
                roles = copy_roles(shard, row.expert, unit.num_shards > 1)
                if placement.mirrored or (plan.shape.ends_share and weight.name == "embed.weight"):
                    roles = (*roles, TWIN)
                if roles not in known:
                    groups = {role: group_of(topology, role, rank) for role in roles}
                    known[roles] = Holders.along(
                        {role: (group.index(rank), len(group)) for role, group in groups.items()}
                    )
                for prefix in STATES:
                    key = prefix + weight.name
                    yield CheckpointTensor(
                        key, weight.shape, torch.float32, boxes, NOTHING, known[roles]
                    )


def writer_of(plan: Plan, rank: int) -> CheckpointWriter:
    """The files of a rank."""
    items = written_by(
        (
            write_item(tensor.key, tensor.shape, tensor.dtype, box),
            tensor.holders,
            box.numel * tensor.dtype.itemsize,
            (tensor.key, box.offsets),
        )
        for tensor in tensors_of(plan, rank)
        for box in tensor.boxes
    )
    ranks = SimulatedRanks(rank, plan.layout.world)
    return CheckpointWriter(ranks, items, file_per_box=False)


def written_files(writer: CheckpointWriter) -> _WrittenFiles:
    """What a rank says of files that it would have written."""
    results, files = list[WriteResult](), dict[str, FileChecksum]()
    for plan in writer._files:
        name, offset = f"{plan.storage_data.prefix}0.distcp", 0
        for item in plan.items:
            length = _num_bytes(item)
            place = _StorageInfo(name, offset, length)
            results.append(WriteResult(item.index, length, place))
            offset += length
        files[name] = FileChecksum(offset, "0" * 64)
    items = [item for plan in writer._files for item in plan.items]
    return _WrittenFiles(type(writer._files[0])(items), results, files)


def seconds(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def peers(rank: int, ranks: int) -> int:
    """Ranks that a rank has messages with: its children and its parent."""
    neighbours = SimulatedRanks(rank, ranks)
    return len(neighbours.children) + (1 if rank else 0)


def started(ranks: int) -> Activity:
    """Start-up: which files a rank will write, and the group of checkpoints."""
    plan = plan_of(ranks)
    _, took = seconds(lambda: writer_of(plan, ranks // 2 + 1))
    busiest = max(peers(rank, ranks) for rank in range(0, ranks, HOST))
    leaf = {
        "processor seconds": took,
        "messages": 0,
        # One key says where it is; each of two that connect reads the other's.
        "store calls": 1 + peers(ranks // 2 + 1, ranks),
        "open files": GLOO_FILES + peers(ranks // 2 + 1, ranks),
    }
    root = leaf | {"store calls": 1 + busiest, "open files": GLOO_FILES + busiest}
    return Activity("start-up of checkpoints", ranks, leaf, root)


def saved(ranks: int, folder: Path) -> Activity:
    """A save without its tensors: every rank's part, and what the first rank writes.

    In a large job one stage of the pipeline stands for the others, which are as large.
    """
    plan, facts, parts = plan_of(ranks), Facts(1), list[_WrittenPart]()
    num_files, leader, up = 0, list[float](), list[int]()
    per_stage = ranks // 8 // PART_RANKS
    numbers = range(4 * per_stage, 5 * per_stage)
    for number in numbers or range(math.ceil(ranks / PART_RANKS)):
        first = number * PART_RANKS
        writers = [writer_of(plan, rank) for rank in range(first, min(ranks, first + PART_RANKS))]
        written = [written_files(writer) for writer in writers]
        up.append(max(len(pickle.dumps(files)) for files in written))
        part = folder / name_of_part(number) if ranks > PART_RANKS else folder
        part.mkdir(parents=True, exist_ok=True)
        writers[0]._writer.begin(part)
        record, took = seconds(partial(writers[0]._write_part, part, number, facts, written))
        parts.append(record)
        leader.append(took)
        num_files += sum(len(files.files) for files in written) + 2  # metadata and manifest
    for other in (stage for stage in range(8) if per_stage and stage != 4):
        part_of = zip(range(other * per_stage, (other + 1) * per_stage), parts, strict=False)
        for number, part in list(part_of):
            alike = {f"{key} {other}": tensor for key, tensor in part.tensors.items()}
            parts.append(part._replace(number=number, tensors=alike))
    num_files *= 8 if per_stage else 1
    first_writer = writer_of(plan, 0)
    _, took = seconds(lambda: first_writer._write_manifest(folder, facts, parts))
    own = [path for path in folder.iterdir() if path.is_file()]
    records = sum(len(pickle.dumps(part)) for part in parts)
    return Activity(
        "a save",
        ranks,
        {
            "processor seconds": max(leader),  # of the first of 64; the others list nothing
            "bytes sent": max(up),
            "messages": 2 * 3,
            "metadata bytes": max(
                (path / ".metadata").stat().st_size
                for path in (folder.glob("part-*") if ranks > PART_RANKS else [folder])
            ),
        },
        {
            "processor seconds": took,
            "bytes received": records,
            "messages": 2 * 3 * peers(0, ranks),
            "metadata bytes": sum(path.stat().st_size for path in own),
            "files": num_files + len(own),
        },
    )


def loaded(ranks: int, folder: Path) -> Activity:
    """A load of the same layout without its tensors: what a rank reads and computes before."""
    plan, rank = plan_of(ranks), ranks // 2 + 1
    final = folder.rename(folder.with_name("step-00000001"))
    manifest, root = seconds(lambda: verified_manifest(final))
    tensors = list(tensors_of(plan, rank))
    union = {tensor.key for tensor in tensors}
    stored, took = seconds(lambda: StoredTensors.of(final, manifest))

    def planned() -> int:
        stored._open(tensors)
        differences = _differences(stored, *_united([(set(stored.missing(tensors)), union)]))
        assert not any("it has no" in text for text in differences)
        firsts = {tensor.key: tensor for tensor in reversed(tensors)}
        planner = _LoadPlanner.__new__(_LoadPlanner)
        planner.tensors, planner.stored = list(firsts.values()), stored.tensors
        return len(planner.create_local_plan().items)

    reads, more = seconds(planned)
    assert reads >= sum(len(tensor.boxes) for tensor in tensors)
    read = sum(
        (final / name_of_part(number) / name).stat().st_size
        for number in stored._opened
        for name in ("manifest.json", ".metadata")
    )
    assert len(stored._opened) <= 2 or not manifest.parts
    sent = len(pickle.dumps(manifest))
    return Activity(
        "a load",
        ranks,
        {
            "processor seconds": took + more,
            "parts": len(stored._opened),
            "bytes read": read,
            "bytes sent": sent,
            "messages": 2 * 5,
        },
        {"processor seconds": root, "messages": 2 * 5 * peers(0, ranks)},
    )


def recovered(ranks: int) -> Activity:
    """One host of eight ranks is lost: who finds out what is kept, and who sends it."""
    plan, partners = plan_of(ranks), Partners(ranks, HOST)
    lost = range(ranks // 2, ranks // 2 + HOST)
    kept: dict[int, list[CopyOf]] = {}
    for host in range(0, ranks, HOST):
        if host in lost:
            kept[host] = []
            continue
        own = range(host, host + HOST)
        wards = [partners.ward_of(rank) for rank in own]
        kept[host] = [
            CopyOf(step, 0, ranks, step % 2, rank)
            for rank in [*own, *wards]
            for step in (4, 5)
            if rank is not None
        ]
    hosts = [(first, HOST, copies) for first, copies in kept.items()]
    found, newest = seconds(lambda: _newest_of(hosts))
    assert found is not None and found.step == 5 and found.orphans == tuple(lost)
    boxes = {rank: list(_stored(list(tensors_of(plan, rank)))) for rank in lost}
    keeper = (lost[0] + HOST) % ranks
    kept_rows = _sets([box for rank in lost for box in boxes[rank]])
    questions = [
        Question(
            _rows(boxes[rank]) if rank in boxes else {}, kept_rows if rank == keeper else {}, HOST
        )
        for rank in range(ranks)
    ]
    pairs, matched = seconds(lambda: _matched(questions))
    asked = max(len(servers) for servers, _ in pairs)
    assert sum(len(servers) for servers, _ in pairs) == HOST and asked == 1
    needs = max(len(pickle.dumps(question)) for question in questions)
    copies = len(pickle.dumps(hosts))
    return Activity(
        "a lost host",
        ranks,
        {"bytes sent": needs, "ranks asked": asked, "messages": 2 * 4 + 3},
        {
            "processor seconds": newest + matched,
            "bytes received": copies + len(pickle.dumps(questions)),
            "messages": 2 * 4 * peers(0, ranks),
        },
    )


def activities(ranks: int) -> list[Activity]:
    """All of them at this number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "step-00000001.part"
        part.mkdir()
        return [started(ranks), saved(ranks, part), loaded(ranks, part), recovered(ranks)]


def main(numbers: list[int]) -> None:
    for ranks in numbers:
        for activity in activities(ranks):
            print(asdict(activity))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1024, 4096, 16384])

"""The tensors of a checkpoint on disk, through the planners, the reader and the writer of
`torch.distributed.checkpoint`.

Each rank stores and loads boxes: parts of a full tensor with an offset and a size for every
dimension. So a rank can read the boxes of its shards from files that any other layout wrote.

Writing. Each rank computes which boxes it writes: a box that several have is written by one of
them, and the bytes are spread evenly, over the ranks and over the files of each. A thread for each
file writes and hashes it block by block. Every checkpoint takes three exchanges: one before
anything is written, one of 64 neighbours whose first rank lists what they wrote, and one after all
files are on the disk. Only then the first rank writes the manifest and gives the checkpoint its
name.

Keys, the names of tensors:

    model/NAME            a weight in the best precision there is: its master if it has one
    model/NAME            the bias of a router that is balanced without a loss
    optim/STATE/NAME      a state of the optimizer, with the shape of its weight
    balance/load/LAYER    the load of a layer's experts in the last step

NAME is the name in the full model: a tied weight is stored once, whichever stages have it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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

from fivefold.core.layout import Box, Holders, whole_box
from fivefold.optim import StateInMemory, StateOnDisk, StoredState
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint.folders import (
    DIRECTORY,
    DIRECTORY_ROW,
    METADATA,
    Damaged,
    Facts,
    FileChecksum,
    HashedFile,
    KeptCheckpoints,
    ListedTensor,
    Manifest,
    checksum_of,
    manifest_of_part,
)
from fivefold.train.checkpoint.ranks import CheckpointRanks, RankFailure, joined, reason_of
from fivefold.train.checkpoint.threads import NUM_STREAMS, in_threads, num_streams

# Read `.metadata` of a checkpoint, a pickle, without running anything that is in it.
#
# Whoever writes a pickle chooses what is called when it is opened, and a checksum can be computed
# again by anybody. So no name in it is ever looked up: the few that torch writes become stand-ins,
# which do nothing but hold what they are given, and any other name is refused. Torch's objects are
# then made here, from values whose types were checked.

_TORCH = "torch.distributed.checkpoint."
_BYTES = "BytesStorageMetadata"  # what is no tensor
_NAMES = {
    **{
        f"{_TORCH}metadata.{name}": name
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
            _BYTES,
        )
    },
    f"{_TORCH}filesystem._StorageInfo": "_StorageInfo",
    "torch.Size": "Size",
    "torch.serialization._get_layout": "_get_layout",
    "pathlib.PosixPath": "Path",
    "pathlib._local.PosixPath": "Path",
    "pathlib.WindowsPath": "Path",
    "pathlib._local.WindowsPath": "Path",
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class StoredBox:
    """File location of a box, in the interface of torch's reader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(path: Path, files: Collection[str]) -> Metadata:
    """Read the metadata of a checkpoint with these files; raises `Damaged` for anything else."""
    try:
        with path.open("rb") as file:
            return _metadata(_Unpickler(file).load(), files)
    except Damaged as damaged:
        raise Damaged(f"{path}: {damaged}") from None
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # a pickle can fail in any way
        raise Damaged(f"{path}: is no metadata of a checkpoint") from error


class _StandIn:
    """Placeholder of a class: arguments of its call, and its state."""

    kind = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        stand_in = super().__new__(cls)
        stand_in.args, stand_in.state = args, None
        return stand_in

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to `_NAMES` and torch's dtypes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        full = f"{module_name}.{global_name}"
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        if full not in _NAMES:
            raise Damaged(
                f"names {full}, which no checkpoint needs and which could run any program; it was "
                "not opened"
            )
        # A new class each time: whatever the pickle does to it, nobody else has it.
        return type(_NAMES[full], (_StandIn,), {"kind": _NAMES[full]})


def _state(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a stand-in of this kind."""
    return _typed(_given(value, kind).state, dict)


def _given(value: Any, kind: str) -> _StandIn:
    if _typed(value, _StandIn).kind != kind:
        raise TypeError(f"{value.kind} is no {kind}")
    return value


def _typed(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{type(value).__name__} is no {kind.__name__}")
    return value


def _number(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value} is negative")
    return value


def _size(value: Any) -> torch.Size:
    (sizes,) = _given(value, "Size").args
    return torch.Size([_number(size) for size in _typed(sizes, tuple)])


def _metadata(value: Any, files: Collection[str]) -> Metadata:
    table = _state(value, "Metadata")
    tensors: dict[str, TensorStorageMetadata] = {
        _typed(key, str): _tensor(tensor)
        for key, tensor in _typed(table["state_dict_metadata"], dict).items()
        if _typed(tensor, _StandIn).kind != _BYTES  # other objects of other programs: never read
    }
    stored = _typed(table["storage_data"], dict)
    places = {_index(key): _place(location, files) for key, location in stored.items()}
    version = table.get("version")
    if version is not None:
        _typed(version, str)
    return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta(), version=version)


def _tensor(value: Any) -> TensorStorageMetadata:
    table = _state(value, "TensorStorageMetadata")
    dtype = _typed(_given(table["properties"], "TensorProperties").state, tuple)[0]
    chunks = [_chunk(chunk) for chunk in _typed(table["chunks"], list)]
    properties = TensorProperties(_typed(dtype, torch.dtype))
    return TensorStorageMetadata(properties, _size(table["size"]), chunks)


def _chunk(value: Any) -> ChunkStorageMetadata:
    table = _state(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(table["offsets"]), _size(table["sizes"]))


def _index(value: Any) -> MetadataIndex:
    table = _state(value, "MetadataIndex")
    index = table.get("index")
    number = None if index is None else _number(index)
    offset = table.get("offset")  # other objects than tensors have none
    return MetadataIndex(
        _typed(table["fqn"], str), None if offset is None else _size(offset), number
    )


def _place(value: Any, files: Collection[str]) -> StoredBox:
    table = _state(value, "_StorageInfo")
    name = _typed(table["relative_path"], str)
    if name not in files:
        raise Damaged(f"names the file {name}, which is none of its files")
    if table.get("transform_descriptors"):
        raise Damaged("has values that are coded in some other way")
    return StoredBox(name, _number(table["offset"]), _number(table["length"]))


MODEL, OPTIM, BALANCE = "model/", "optim/", "balance/"  # what a key begins with
_ALONE = Holders()


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint, and this rank's boxes of it."""

    key: str
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # `at` counts elements of the state
    state: StoredState
    holders: Holders = _ALONE  # of the same boxes

    @property
    def on_disk(self) -> bool:
        """Whether reading it allocates memory to be freed at once."""
        state = self.state.master if isinstance(self.state, MasterWeight) else self.state
        return isinstance(state, StateOnDisk)


class MasterWeight:
    """A master weight, and the narrower weight rounded from it."""

    def __init__(self, master: StoredState, weight: Tensor) -> None:
        self.master, self.weight = master, weight

    def read(self) -> Tensor:
        return self.master.read()

    def write(self, value: Tensor) -> None:
        self.master.write(value)
        self.weight.copy_(value.view(self.weight.shape))


def in_box(value: Tensor, box: Box) -> Tensor:
    """View of the elements of a box in a rank's state."""
    return value.view(-1)[box.at : box.at + box.numel].view(box.sizes)


# Reading.


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, except that it reads into boxes of flat tensors."""

    def __init__(
        self, tensors: Sequence[CheckpointTensor], stored: dict[str, TensorStorageMetadata]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.stored = tensors, stored
        self.values = {tensor.key: tensor.state.read().detach() for tensor in tensors}
        self.targets = {
            (tensor.key, torch.Size(box.offsets)): in_box(self.values[tensor.key], box)
            for tensor in tensors
            for box in tensor.boxes
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for tensor in self.tensors:
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in tensor.boxes
            ]
            reads = create_read_items_for_chunk_list(tensor.key, self.stored[tensor.key], chunks)
            numel = sum(box.numel for box in tensor.boxes)
            assert sum(item.lengths.numel() for item in reads) == numel, f"{tensor.key} has holes"
            items += reads
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        where, offset = read_item.dest_index, read_item.dest_index.offset
        assert offset is not None
        target = self.targets[where.fqn, offset]
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(ranges):
            target = target.narrow(dim, start, length)
        return target


class StoredTensors:
    """Tensors of one checkpoint; raises `Damaged` for other metadata."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, True)
        self.tensors = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._manifest: Manifest | None = None  # of a checkpoint with parts, opened when needed
        self._opened = set[int]()

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> StoredTensors:
        """Tensors of a checkpoint of this program."""
        if not manifest.parts:
            return cls(folder, read_metadata(folder / METADATA, manifest.files))
        tensors = {
            key: TensorStorageMetadata(
                TensorProperties(_DTYPES[listed.dtype]), torch.Size(listed.shape), []
            )
            for key, listed in manifest.tensors.items()
        }
        stored = cls(folder, Metadata(dict(tensors), storage_data={}))
        stored._manifest = manifest
        return stored

    def _open(self, tensors: Iterable[CheckpointTensor]) -> None:
        """Read the metadata of those parts that have any rows of this rank's boxes."""
        manifest = self._manifest
        if manifest is None:
            return
        try:
            directory = np.load(self.folder / DIRECTORY, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise Damaged(f"{self.folder / DIRECTORY}: {reason_of(error)}") from error
        parts = set[int]()
        for tensor in tensors:
            listed = manifest.tensors[tensor.key]
            rows = directory[listed.first : listed.stop]
            for box in tensor.boxes:
                start, stop = rows_of(box.offsets, box.sizes)
                parts.update(rows["part"][(rows["start"] < stop) & (rows["stop"] > start)].tolist())
        for number in sorted(parts - self._opened):
            self._open_part(manifest, number)

    def _open_part(self, manifest: Manifest, number: int) -> None:
        files = manifest_of_part(self.folder, manifest, number).files
        name = folders.name_of_part(number)
        part = read_metadata(self.folder / name / METADATA, files)
        for key, tensor in part.state_dict_metadata.items():
            stored = self.tensors.get(key)
            if stored is None or not isinstance(tensor, TensorStorageMetadata):
                raise Damaged(f"{self.folder / name / METADATA}: has {key}, which is not listed")
            if (tensor.size, tensor.properties) != (stored.size, stored.properties):
                raise Damaged(f"{self.folder / name / METADATA}: has {key} in another shape")
            stored.chunks.extend(tensor.chunks)
        for index, location in part.storage_data.items():
            path = f"{name}/{location.relative_path}"
            self.metadata.storage_data[index] = replace(location, relative_path=path)
        self._opened.add(number)

    @property
    def state_names(self) -> set[str]:
        """Names of the optimizer's states."""
        return {key.split("/")[1] for key in self.tensors if key.startswith(OPTIM)}

    def missing(self, tensors: Iterable[CheckpointTensor]) -> list[str]:
        """Requested tensors that the checkpoint lacks, or has in another shape."""
        missing_keys: list[str] = []
        for tensor in tensors:
            stored = self.tensors.get(tensor.key)
            if stored is None:
                missing_keys.append(tensor.key)
            elif tuple(stored.size) != tensor.shape:
                missing_keys.append(
                    f"{tensor.key} {tensor.shape}, which is {tuple(stored.size)} there"
                )
        return missing_keys

    def read(self, key: str) -> Tensor:
        """Read a full tensor to host memory."""
        shape, dtype = tuple(self.tensors[key].size), self.tensors[key].properties.dtype
        state = StateInMemory(torch.empty(shape, dtype=dtype))
        self.load([CheckpointTensor(key, shape, dtype, (whole_box(shape),), state)])
        return state.tensor

    def load(self, requests: Iterable[CheckpointTensor]) -> None:
        """Load tensors; those kept on disk one by one, to have one in memory."""
        tensors = list(requests)
        for disk_tensor in (tensor for tensor in tensors if tensor.on_disk):
            self._load([disk_tensor])
        self._load([tensor for tensor in tensors if not tensor.on_disk])

    def _load(self, tensors: list[CheckpointTensor]) -> None:
        firsts = {first.key: first for first in reversed(tensors)}
        self._open(firsts.values())
        planner = _LoadPlanner(list(firsts.values()), self.tensors)
        planner.set_up_planner({}, self.metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.finish_plan(plan).items:
            stored = self.metadata.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, []).append(item)
        streams = num_streams(sum(target.nbytes for target in planner.targets.values()))
        most = -(-len(plan.items) // streams)  # of a file that is read by several threads
        in_threads(
            lambda items: self._reader.read_data(LoadPlan(items), planner).wait(),
            [
                items[first : first + most]
                for items in by_file.values()
                for first in range(0, len(items), most)
            ],
            streams,
        )
        for tensor in tensors:
            # A rank may have a tied weight twice; both have the same shard of it.
            assert tensor.boxes == firsts[tensor.key].boxes, f"{tensor.key} is sharded in two ways"
            tensor.state.write(planner.values[tensor.key])


# Writing.


BoxReads = Mapping[MetadataIndex, Callable[[], Tensor]]
"""For each box, a function that returns its values."""


Fence = Callable[[], AbstractContextManager[None]]
"""A block in which the folder is surely that of this run; raises if it is another's."""


class _WrittenFiles(NamedTuple):
    """Files that one rank has written, and what is in them."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, FileChecksum]


class _WrittenTensor(NamedTuple):
    """What a part has of a tensor: the rows of its boxes, and how many elements these have."""

    dtype: str
    shape: tuple[int, ...]
    rows: list[tuple[int, int]]
    numel: int


class _WrittenPart(NamedTuple):
    """A part and its tensors; the files if it is the folder itself."""

    number: int
    tensors: dict[str, _WrittenTensor]
    files: dict[str, FileChecksum]


class _FilePrefix(NamedTuple):
    """What torch's writer looks for in a plan."""

    prefix: str


def rows_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Range of a box in the first dimension; a scalar is one row."""
    return (offsets[0], offsets[0] + sizes[0]) if offsets else (0, 1)


def write_item(key: str, shape: Sequence[int], dtype: torch.dtype, box: Box) -> WriteItem:
    """Torch's write item for one box of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


class _SavePlanner(DefaultSavePlanner):
    """Torch's planner, except that it takes the values from `reads`."""

    def __init__(self, reads: BoxReads) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.reads = reads

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.reads[write_item.index]()


class _HashedFiles(FileSystem):
    """Files that are hashed while torch writes them; an error names its file."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        path = Path(path)
        try:
            with HashedFile(path) as file:
                yield cast(io.IOBase, file)
        except Exception as error:
            reason = reason_of(error)
            raise RankFailure(reason if str(path) in reason else f"{path}: {reason}") from error
        self.checksums[path.name] = file.checksum()


class _HashingWriter(FileSystemWriter):
    """Torch's writer of one file for each plan."""

    def __init__(self) -> None:
        # With a copy ahead it looks for a GPU, from a thread that has chosen none.
        super().__init__(Path(), per_thread_copy_ahead=0)
        # Torch's own checksum takes longer than the disk, and nothing reads it.
        torch.serialization.set_crc32_options(False)
        self.fs = _HashedFiles()

    def begin(self, part: Path) -> None:
        """Write into another folder from now on."""
        self.reset(part)
        self.fs = _HashedFiles()

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Of the files that were written since `begin`."""
        return self.fs.checksums


def united_rows(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of rows as few disjoint ones: tp cuts most weights into several.

    >>> united_rows([(6, 8), (0, 2), (2, 3), (7, 9)])
    [(0, 3), (6, 9)]
    """
    united: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], stop)
        else:
            united.append((start, stop))
    return united


PART_RANKS = 64  # that write one part; up to so many, the folder is the only one


class CheckpointWriter:
    """Writes this rank's boxes of every checkpoint."""

    def __init__(
        self,
        ranks: CheckpointRanks,
        items: Sequence[WriteItem],
        *,
        file_per_box: bool,
        part_ranks: int = PART_RANKS,
    ) -> None:
        """The items are boxes that no other rank writes.

        Torch's writer keeps all values of a file in memory until the file is written: with a
        `file_per_box`, which are written one by one, it keeps one box.
        """
        self.ranks, self._file_per_box, self._part_ranks = ranks, file_per_box, part_ranks
        self._writer = _HashingWriter()
        # Eight ranks, which usually share a host, share its streams.
        self._most_files = max(1, NUM_STREAMS // ranks.size)
        # Named after the rank: the ranks need not count their files together.
        self._files = [
            replace(file, storage_data=_FilePrefix(f"__{ranks.rank + ranks.size * number}_"))
            for number, file in enumerate(self._files_of(SavePlan(list(items))))
        ]

    @property
    def indices(self) -> list[MetadataIndex]:
        """Boxes that this rank writes, in the order of its threads."""
        rounds = zip_longest(*(file.items for file in self._files))
        return [item.index for row in rounds for item in row if item is not None]

    def write(
        self,
        folder: Path,
        facts: Facts,
        reads: BoxReads,
        retention: KeptCheckpoints,
        fence: Fence = nullcontext,
    ) -> None:
        """Write and publish a checkpoint, and remove older ones, inside of the fence."""

        def begin() -> Path:
            with fence():
                return folders.begin(folder, facts.step)

        written = self.ranks.on_first(begin)
        neighbours, alone = self.ranks.neighbours(self._part_ranks), self._is_alone
        number = self.ranks.rank // self._part_ranks
        part, parts = written if alone else written / folders.name_of_part(number), []

        def write() -> _WrittenFiles:
            part.mkdir(exist_ok=True)
            self._writer.begin(part)
            return self._write_boxes(reads)

        def write_part() -> list[_WrittenPart]:
            neighbours.gather(
                write, lambda ranks: parts.append(self._write_part(part, number, facts, ranks))
            )
            return parts

        def finish(parts: list[_WrittenPart]) -> None:
            self._write_manifest(written, facts, parts)
            with fence():
                folders.publish(written)
                folders.remove_old(folder, facts.step, retention)

        self.ranks.exchange(write_part, joined, finish)

    @property
    def _is_alone(self) -> bool:
        """Whether the folder is the only part."""
        return self.ranks.size <= self._part_ranks

    def _files_of(self, plan: SavePlan) -> list[SavePlan]:
        """The files of one rank, of about the same size."""
        if self._file_per_box:
            return [replace(plan, items=[item]) for item in plan.items]
        sizes = [0] * min(self._most_files, num_streams(sum(map(_num_bytes, plan.items))))
        files: list[list[WriteItem]] = [[] for _ in sizes]
        for item in sorted(plan.items, key=_num_bytes, reverse=True):
            smallest = sizes.index(min(sizes))
            files[smallest].append(item)
            sizes[smallest] += _num_bytes(item)
        return [replace(plan, items=items) for items in files if items]

    def _write_boxes(self, reads: BoxReads) -> _WrittenFiles:
        planner = _SavePlanner(reads)

        def write(file: SavePlan) -> list[WriteResult]:
            return self._writer.write_data(file, planner).wait()

        files = in_threads(write, self._files, 1 if self._file_per_box else len(self._files))
        plan = SavePlan([item for file in self._files for item in file.items])
        results = [result for file in files for result in file]
        return _WrittenFiles(plan, results, self._writer.checksums)

    def _write_part(
        self, part: Path, number: int, facts: Facts, ranks: list[_WrittenFiles]
    ) -> _WrittenPart:
        """On the first of its ranks: list what they wrote, in a manifest if it is not the only
        part."""
        files = {name: checksum for written in ranks for name, checksum in written.files.items()}
        _, metadata = create_default_global_save_plan([written.plan for written in ranks])
        self._writer.finish(metadata, [written.results for written in ranks])
        files[METADATA] = checksum_of(part / METADATA)
        files = dict(sorted(files.items()))
        if not self._is_alone:
            text = Manifest(Facts(facts.step), files).text()
            folders.write_synced(part / folders.MANIFEST, text)
            folders.sync(part)
        tensors = {
            key: _written_tensor(tensor)
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        return _WrittenPart(number, tensors, files if self._is_alone else {})

    def _write_manifest(self, folder: Path, facts: Facts, parts: list[_WrittenPart]) -> None:
        by_key: dict[str, list[tuple[_WrittenTensor, int]]] = {}
        for part in parts:
            for key, tensor in part.tensors.items():
                by_key.setdefault(key, []).append((tensor, part.number))
        for key, tensors in by_key.items():
            numel = sum(tensor.numel for tensor, _ in tensors)
            if numel != math.prod(tensors[0][0].shape):
                raise RankFailure(f"{key} has {tensors[0][0].shape}, and {numel:,} were written")
        if self._is_alone:
            manifest = Manifest(facts, parts[0].files)
        else:
            manifest = _write_directory(folder, facts, len(parts), by_key)
        folders.write_synced(folder / folders.MANIFEST, manifest.text())


def _written_tensor(tensor: TensorStorageMetadata) -> _WrittenTensor:
    rows = united_rows(rows_of(chunk.offsets, chunk.sizes) for chunk in tensor.chunks)
    return _WrittenTensor(
        str(tensor.properties.dtype).removeprefix("torch."),
        tuple(tensor.size),
        rows,
        sum(chunk.sizes.numel() for chunk in tensor.chunks),
    )


def _write_directory(
    folder: Path,
    facts: Facts,
    num_parts: int,
    tensors: Mapping[str, list[tuple[_WrittenTensor, int]]],
) -> Manifest:
    """Which parts have which rows of a tensor."""
    rows, listed = list[tuple[int, int, int]](), dict[str, ListedTensor]()
    for key, in_parts in sorted(tensors.items()):
        first, (tensor, _) = len(rows), in_parts[0]
        rows += ((*pair, number) for tensor, number in in_parts for pair in tensor.rows)
        listed[key] = ListedTensor(tensor.dtype, tensor.shape, first, len(rows))
    with HashedFile(folder / DIRECTORY) as file:
        np.save(file, np.array(rows, DIRECTORY_ROW))  # type: ignore[arg-type]
        os.fsync(file.fileno())
    return Manifest(facts, {DIRECTORY: file.checksum()}, num_parts, listed)


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize

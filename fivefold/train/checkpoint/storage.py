"""The tensors of a checkpoint on disk, through the planners, the reader and the writer of
`torch.distributed.checkpoint`.

Each rank stores and loads boxes: parts of a full tensor with an offset and a size for every
dimension. So a rank can read the boxes of its shards from files that any other layout wrote.

Writing. The ranks agree once which of them writes which box: a box that several have is written by
one of them, and the bytes are spread evenly, over the ranks and over the files of each. A thread
for each file writes and hashes it block by block. Every checkpoint takes two exchanges: one before
anything is written, and one after every rank has its files on the disk. Only after the second one
the first rank writes the manifest and gives the checkpoint its name.

Keys, the names of tensors:

    model/NAME            a weight in the best precision there is: its master if it has one
    model/NAME            the bias of a router that is balanced without a loss
    optim/STATE/NAME      a state of the optimizer, with the shape of its weight
    balance/load/LAYER    the load of a layer's experts in the last step

NAME is the name in the full model: a tied weight is stored once, whichever stages have it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
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

from fivefold.core.layout import Box, whole_box
from fivefold.optim import StateInMemory, StateOnDisk, StoredState
from fivefold.train.checkpoint import folders
from fivefold.train.checkpoint.folders import (
    METADATA,
    Damaged,
    Facts,
    FileChecksum,
    HashedFile,
    KeptCheckpoints,
    Manifest,
    checksum_of,
)
from fivefold.train.checkpoint.ranks import CheckpointRanks, RankFailure, reason_of
from fivefold.train.checkpoint.threads import in_threads, num_streams

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


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint, and this rank's boxes of it."""

    key: str
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # `at` counts elements of the state
    state: StoredState

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
    """Tensors of one checkpoint with these files; raises `Damaged` for other metadata."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self._reader = FileSystemReader(folder)
        self.metadata = read_metadata(folder / METADATA, files)
        self._reader.set_up_storage_reader(self.metadata, True)
        self.tensors = {
            key: tensor
            for key, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

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
        planner = _LoadPlanner(list(firsts.values()), self.tensors)
        planner.set_up_planner({}, self.metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.finish_plan(plan).items:
            stored = self.metadata.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, []).append(item)
        in_threads(
            lambda items: self._reader.read_data(LoadPlan(items), planner).wait(),
            by_file.values(),
            num_streams(sum(target.nbytes for target in planner.targets.values())),
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
    """Files that one rank has written."""

    results: list[WriteResult]
    files: dict[str, FileChecksum]


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


class CheckpointWriter:
    """Writes this rank's boxes of every checkpoint."""

    def __init__(
        self, ranks: CheckpointRanks, items: Sequence[WriteItem], *, file_per_box: bool
    ) -> None:
        """All ranks agree which of them writes which box.

        Torch's writer keeps all values of a file in memory until the file is written: with a
        `file_per_box`, which are written one by one, it keeps one box.
        """
        self.ranks, self._file_per_box = ranks, file_per_box
        self._writer = _HashingWriter()
        # A rank may have a tied weight twice, and writes it once.
        plan = SavePlan(list({item.index: item for item in items}.values()))
        self._files, self._metadata = ranks.exchange(lambda: plan, self._assign_boxes)

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

        part = self.ranks.on_first(begin)
        self._writer.begin(part)

        def finish(written: list[_WrittenFiles]) -> list[None]:
            self._write_manifest(part, facts, written)
            with fence():
                folders.publish(part)
                folders.remove_old(folder, facts.step, retention)
            return [None] * self.ranks.size

        self.ranks.exchange(lambda: self._write_boxes(reads), finish)

    def _assign_boxes(self, plans: list[SavePlan]) -> list[tuple[list[SavePlan], Metadata | None]]:
        """On the first rank: a box that several ranks have goes to the one with least to write.

        Torch numbers plans and names their files by it, so each file is a plan.
        """
        assigned, metadata = _SavePlanner({}).create_global_plan(plans)
        files = [self._files_of(plan) for plan in assigned]
        numbered = iter(self._writer.prepare_global_plan([box for file in files for box in file]))
        return [
            ([next(numbered) for _ in file], None if rank else metadata)
            for rank, file in enumerate(files)
        ]

    def _files_of(self, plan: SavePlan) -> list[SavePlan]:
        """The files of one rank, of about the same size."""
        if self._file_per_box:
            return [replace(plan, items=[item]) for item in plan.items]
        sizes = [0] * num_streams(sum(map(_num_bytes, plan.items)))
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
        return _WrittenFiles([result for file in files for result in file], self._writer.checksums)

    def _write_manifest(self, part: Path, facts: Facts, written: list[_WrittenFiles]) -> None:
        assert self._metadata is not None, "only the first rank has it"
        files = {
            name: checksum for rank_files in written for name, checksum in rank_files.files.items()
        }
        self._writer.finish(self._metadata, [rank_files.results for rank_files in written])
        files[METADATA] = checksum_of(part / METADATA)
        manifest = Manifest(facts, dict(sorted(files.items())))
        folders.write_synced(part / folders.MANIFEST, manifest.text())


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize

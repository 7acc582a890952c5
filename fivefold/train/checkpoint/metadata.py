"""Read `.metadata` of a checkpoint, a pickle, without running anything that is in it.

Whoever writes a pickle chooses what is called when it is opened, and a checksum can be computed
again by anybody. So no name in it is ever looked up: the few that torch writes become stand-ins,
which do nothing but hold what they are given, and any other name is refused. Torch's objects are
then made here, from values whose types were checked.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fivefold.train.checkpoint.folders import Damaged

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

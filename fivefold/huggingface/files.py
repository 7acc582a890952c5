"""Read and write Hugging Face model folders without the full model in memory.

`HfFolder` reads the headers of all files first, so that every problem of a folder is known before
the first weight is read. It then reads one tensor at a time. Pickles are never opened.
`write_model` holds one file of weights in memory at a time.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight
from fivefold.core.model import Shape
from fivefold.huggingface.names import (
    HfTensor,
    empty_tensors,
    hf_tensors,
    mismatches,
    names_in_files,
    optional_copies,
    published_copies,
    tensor_to_hf,
    weight_from_hf,
)

CONFIG, INDEX, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F32", "BF16", "F16")
BLOCKS = "F8_E4M3"  # DeepSeek-V3: a second tensor has one scale for each block of the matrix
SCALE = "_scale_inv"
BLOCK = (128, 128)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_PROBLEMS = 20
_MARK = ".fivefold-export"  # in a folder that is being written


@dataclass(frozen=True)
class FoundTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    sizes: tuple[int, ...]
    kind: str


class HfFolder:
    """The weights of a downloaded model. A bad folder is refused with all its problems at once."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._shape = shape
        self._opened: tuple[Path, Any] | None = None
        index = _index(folder)
        bad, tensors = _headers([folder / name for name in _file_names(folder, index)])
        self._given = names_in_files(shape, tensors)
        self._found = {name: tensors[hf_name] for name, hf_name in self._given.items()}
        config = read_json(folder / CONFIG)
        self._block = _block_size(config)
        unread = {name for name, file in index.items() if file in bad}
        if bad and not index:
            unread = set(hf_tensors(shape))
        problems = [f"{file} {rule}" for file, rule in bad.items()]
        problems += _other_quantization(config)
        problems += self._problems(names_in_files(shape, unread))
        problems = problems or list(self._unequal_copies())
        if problems:
            raise BadFile(str(folder), _shortened(problems))

    @property
    def is_narrow(self) -> bool:
        """Whether bfloat16 can hold every weight: exactly, or nearly so if it is quantized."""
        names = hf_tensors(self._shape)
        kinds = {self._found[name].kind for name, tensor in names.items() if not tensor.buffer}
        return kinds <= {"BF16", BLOCKS}

    def weight(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """One of our weights, as `dtype`."""
        _collect_cycles()
        return weight_from_hf(self._shape, weight, self._read, dtype).contiguous()

    def _unequal_copies(self) -> Iterator[str]:
        """Weights that the model has once and the files have twice, with different values."""
        for second, first in optional_copies(self._shape):
            if second in self._found and not torch.equal(self._read(second), self._read(first)):
                yield (
                    f"{second} differs from {first}, and the model has one weight for both: if the "
                    "config ties them, set tie_word_embeddings to false in it"
                )

    def _problems(self, unread: Mapping[str, str]) -> Iterator[str]:
        scales = {name + SCALE for name, tensor in self._found.items() if tensor.kind == BLOCKS}
        sizes = {name: tensor.sizes for name, tensor in self._found.items() if name not in scales}
        yield from mismatches(self._shape, sizes, unread)
        for name in (*hf_tensors(self._shape), *dict(optional_copies(self._shape))):
            if name in sizes:
                yield from self._unreadable(name)

    def _unreadable(self, name: str) -> Iterator[str]:
        """Why the values of a tensor cannot be read."""
        tensor, scale = self._found[name], self._found.get(name + SCALE)
        if tensor.kind in FLOATS:
            return
        if tensor.kind != BLOCKS:
            known = ", ".join(FLOATS)
            yield f"{name} has type {tensor.kind}: save the model in one of {known}"
            return
        pairs = zip(tensor.sizes, self._block, strict=False)
        expected = tuple(math.ceil(size / block) for size, block in pairs)
        if scale is None:
            yield f"{name} has type {BLOCKS} and no {name}{SCALE}: give all files of the model"
        elif scale.sizes != expected or len(tensor.sizes) != 2:
            yield (
                f"{name}{SCALE} has shape {scale.sizes}, and blocks of {self._block} ask for "
                f"{expected}: give the config of these weights"
            )

    def _read(self, name: str) -> Tensor:
        values = self._stored(name)
        if self._found[name].kind != BLOCKS:
            return values
        return dequantized(values, self._stored(name + SCALE), self._block)

    def _stored(self, name: str) -> Tensor:
        """A view of the memory-mapped file. Only one file is open at a time."""
        file = self._found[name].file
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # close the previous file first
            self._opened = (file, safe_open(file, framework="pt"))
        return self._opened[1].get_tensor(self._given[name])


def dequantized(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """fp8 values as float32: each block of the matrix times its scale."""
    wide = values.float()
    for i, scale in enumerate(scales.float()):
        rows = slice(i * block[0], (i + 1) * block[0])
        wide[rows] *= scale.repeat_interleave(block[1])[: wide.shape[1]]
    return wide


def write_model(
    folder: Path,
    shape: Shape,
    config: Mapping[str, Any],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    most_bytes: int,
    beside: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write a model folder and return its files of weights; `beside` are other files of it.

    `read` returns one of our weights in full. No file is larger than `most_bytes`, unless a single
    tensor is. The folder is written under another name and then renamed, so it is never partial.
    """
    refuse_existing(folder)
    # Tensors in order, as many in each shard as fit.
    tensors = _outgoing(shape, dtype)
    shards: list[list[Outgoing]] = []
    space = 0
    for tensor in tensors:
        if tensor.num_bytes > space or not shards:
            shards.append([])
            space = most_bytes
        shards[-1].append(tensor)
        space -= tensor.num_bytes
    names = _shard_names(len(shards))
    with new_folder(folder) as part:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(part / name, shard, _cached_last(read))
        if len(names) > 1:
            write_json(part / INDEX, _index_of(names, shards))
        write_json(part / CONFIG, config)
        for name, data in (beside or {}).items():
            (part / name).write_bytes(data)
    return [folder / name for name in names]


def refuse_existing(folder: Path) -> None:
    """Refuse to write into a folder that has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FivefoldError(f"{folder} is there already: give a folder that is new or empty")


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A folder to write into, which gets the name `folder` when everything is in it.

    It is `NAME.part` until then, with a mark, so that what a killed writer left is known from a
    folder of somebody else, which stays.
    """
    part = folder.with_name(folder.name + ".part")
    if part.is_dir() and ((part / _MARK).is_file() or not any(part.iterdir())):
        shutil.rmtree(part, ignore_errors=True)
    if part.exists():
        raise FivefoldError(
            f"{part} is there, and no export has left it: move it away, or give another folder"
        )
    try:
        part.mkdir(parents=True)
        (part / _MARK).touch()
        yield part
        (part / _MARK).unlink()
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        reason, file = str(error), part
        if isinstance(error, OSError):
            reason, file = error.strerror, error.filename or part
        raise BadFile(str(file), [f"{reason}; free some room, or give another folder"]) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written."""

    name: str
    tensor: HfTensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.tensor.sizes) * self.dtype.itemsize


def _outgoing(shape: Shape, dtype: torch.dtype) -> Iterator[Outgoing]:
    tensors = hf_tensors(shape)
    for name, tensor in (tensors | empty_tensors(shape)).items():
        yield Outgoing(name, tensor, torch.float32 if tensor.buffer else dtype)
    for copy, name in published_copies(shape):
        yield Outgoing(copy, tensors[name], dtype)


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [ONE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _index_of(names: list[str], shards: list[list[Outgoing]]) -> dict[str, Any]:
    pairs = zip(names, shards, strict=True)
    return {
        "metadata": {"total_size": sum(tensor.num_bytes for shard in shards for tensor in shard)},
        "weight_map": {tensor.name: file for file, shard in pairs for tensor in shard},
    }


def _write_shard(file: Path, shard: list[Outgoing], read: Callable[[str], Tensor]) -> None:
    """Write all tensors of one file, which are in memory together."""
    tensors: dict[str, Tensor] = {}
    for entry in shard:
        # A copy: a view would keep its full weight in memory.
        values = tensor_to_hf(entry.tensor, read).to(entry.dtype, copy=True).contiguous()
        assert tuple(values.shape) == entry.tensor.sizes, f"{entry.name}: {tuple(values.shape)}"
        tensors[entry.name] = values
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, {"format": "pt"})
    file.chmod(mode)  # safetensors makes a file that only its owner can read
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _cached_last(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """`read` with a cache of the last weight: experts of one stack are written one by one."""
    cache: dict[str, Tensor] = {}

    def read_cached(name: str) -> Tensor:
        if name not in cache:
            cache.clear()
            _collect_cycles()
            cache[name] = read(name)
        return cache[name]

    return read_cached


def _collect_cycles() -> None:
    """Free the previous tensor: torch.save and torch.load leave it in reference cycles."""
    gc.collect(1)


def _headers(files: list[Path]) -> tuple[dict[str, str], dict[str, FoundTensor]]:
    """The problem of each bad file, and the tensors of the good files by name."""
    bad: dict[str, str] = {}
    tensors: dict[str, FoundTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                slices = [opened.get_slice(name) for name in names]
                described = {
                    name: FoundTensor(
                        file, tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
                    )
                    for name, tensor_slice in zip(names, slices, strict=True)
                }
        except FileNotFoundError:
            bad[file.name] = f"is not there, and {INDEX} names it: download it too"
        except (SafetensorError, OSError) as error:
            bad[file.name] = f"is no whole safetensors file ({error}): download it again"
        else:
            if twice := tensors.keys() & described.keys():
                other = tensors[min(twice)].file.name
                bad[file.name] = f"has {min(twice)}, as {other} has: keep the files of one model"
            tensors |= described
    return bad, tensors


def _file_names(folder: Path, index: Mapping[str, str]) -> list[str]:
    if index:
        return sorted(set(index.values()))
    if names := sorted(path.name for path in folder.glob("*.safetensors")):
        return names
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        rule = f"{pickles[0]} is a pickle, which can run any program when it is read"
        remedy = "load it where you trust it and save it as safetensors"
        call = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) of transformers"
        raise BadFile(str(folder), [f"{rule}: {remedy}, with {call}"])
    raise BadFile(str(folder), ["has no *.safetensors: give the folder of a downloaded model"])


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty if there is no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(str(path), ["has no table weight_map: download it again"])
    if wrong := [file for file in weight_map.values() if not _is_plain(file)]:
        raise BadFile(str(path), [f"{wrong[0]!r} is no file of this folder: download it again"])
    return weight_map


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file


def _other_quantization(config: Mapping[str, Any]) -> Iterator[str]:
    table = config.get("quantization_config")
    method = table.get("quant_method") if isinstance(table, dict) else None
    if table is not None and method != "fp8":
        yield (
            f"{CONFIG} has quantization_config.quant_method = {method!r}: give weights in bf16, "
            "fp16, fp32, or fp8 with a scale for each block"
        )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that has one scale."""
    table = config.get("quantization_config")
    match table.get("weight_block_size") if isinstance(table, dict) else None:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return (rows, columns)
    return BLOCK


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a `BadFile` that says what is wrong."""
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(str(path), [f"not valid JSON: {error}; download it again"]) from error
    if not isinstance(table, dict):
        raise BadFile(str(path), ["must hold one JSON object; download it again"])
    return table


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """A table as a file."""
    path.write_text(json.dumps(table, indent=2) + "\n", "utf-8")


def _shortened(problems: list[str]) -> list[str]:
    num_hidden = len(problems) - _MOST_PROBLEMS
    tail = [f"and {num_hidden:,} more: mend these first"] if num_hidden > 0 else []
    return [*problems[:_MOST_PROBLEMS], *tail]

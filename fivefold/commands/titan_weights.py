"""Folders of TorchTitan: read as a model, written from a run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridges import (
    VERSIONS,
    TitanNames,
    TitanTensor,
    differences,
    keys_of,
    notes_on,
    titan_tensors,
)
from fivefold.core import BadFile
from fivefold.core.layout import Weight
from fivefold.core.model import (
    Shape,
)
from fivefold.huggingface import (
    new_folder,
    refuse_existing,
)
from fivefold.train.checkpoint import MANIFEST, Facts, ForeignFolder, FullTensor, write_checkpoint

_SHOWN = 20


class TitanFolder:
    """The weights of a model in a folder that TorchTitan has saved; problems are raised at once."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        if (folder / MANIFEST).exists():
            rule = "is a checkpoint of fivefold: train, generate and export take its run"
            raise BadFile(str(folder), [rule])
        self._stored = ForeignFolder(folder)
        sizes = self._stored.sizes
        keys = keys_of(folder, sizes)
        self._tensors = titan_tensors(shape, keys.names)
        self._keys = {name: f"{keys.prefix}{name}" for name in self._tensors}
        problems = list(differences(shape, keys, sizes))
        stored_keys = [key for key in self._keys.values() if key in sizes]
        problems = problems or [*self._stored.problems(stored_keys), *self._not_floats(stored_keys)]
        problems = problems or list(self._unequal_head(keys.names, shape))
        if problems:
            extra = len(problems) - _SHOWN
            tail = [f"and {extra:,} more: mend these first"] if extra > 0 else []
            raise BadFile(str(folder), [*problems[:_SHOWN], *tail])
        self._dtypes = {self._stored.dtype(key) for key in stored_keys}
        # Reversed: of a tied weight its first name, for its second may be missing.
        self._ours = {tensor.weight.name: name for name, tensor in reversed(self._tensors.items())}

    @property
    def is_narrow(self) -> bool:
        """Whether bfloat16 can hold every weight."""
        return self._dtypes == {torch.bfloat16}

    def weight(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """One of our weights, as `dtype`."""
        gc.collect(1)  # torch.load leaves the previous tensor in reference cycles
        name = self._ours[weight.name]
        return _from_titan(self._stored.read(self._keys[name]), self._tensors[name]).to(dtype)

    def _not_floats(self, keys: list[str]) -> Iterator[str]:
        for key in keys:
            if not (dtype := self._stored.dtype(key)).is_floating_point or dtype.itemsize < 2:
                yield f"{key} has type {dtype}: save the model in float32, bfloat16 or float16"

    def _unequal_head(self, names: TitanNames, shape: Shape) -> Iterator[str]:
        """A head that has learned on its own, where the model has one weight for both."""
        embedding, head = (self._keys[name] for name in ("tok_embeddings.weight", names.head))
        if not shape.tied or head not in self._stored.sizes:
            return
        if not torch.equal(self._stored.read(embedding), self._stored.read(head)):
            yield (
                f"{names.head} differs from tok_embeddings.weight, and {shape.name} has one weight "
                "for both: give a config.json with tie_word_embeddings false, with --model"
            )


def write_titan(
    folder: Path,
    shape: Shape,
    version: str,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> list[Path]:
    """Write the weights as TorchTitan loads them, each into a file; the folder is never partial."""
    refuse_existing(folder)
    tensors: list[FullTensor] = [
        (name, tensor.weight.shape, dtype, partial(_to_titan, tensor, read, dtype))
        for name, tensor in titan_tensors(shape, VERSIONS[version]).items()
    ]
    with new_folder(folder) as part:
        written = write_checkpoint(part, tensors, Facts(step=0, has_states=False))
        (written / MANIFEST).unlink()  # says where a run stood, which this is not
        for path in written.iterdir():
            path.rename(part / path.name)
        written.rmdir()
    return sorted(folder.glob("*.distcp"))


def how_to_load(folder: Path, shape: Shape, version: str) -> list[str]:
    """What to set in TorchTitan."""
    names = VERSIONS[version]
    load = f'{names.title} loads it with checkpoint.initial_load_path = "{folder.resolve()}"'
    return [load, *notes_on(shape, names)]


def _from_titan(values: Tensor, tensor: TitanTensor) -> Tensor:
    """Rows of each head: first of all pairs, then second of all pairs."""
    if not tensor.heads:
        return values
    pairs = values.view(tensor.heads, -1, 2, values.shape[-1])
    return pairs.transpose(1, 2).reshape(values.shape)


def _to_titan(tensor: TitanTensor, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of each head: pair by pair."""
    gc.collect(1)
    values = read(tensor.weight.name).to(dtype)
    if not tensor.heads:
        return values
    halves = values.view(tensor.heads, 2, -1, values.shape[-1])
    return halves.transpose(1, 2).reshape(values.shape)

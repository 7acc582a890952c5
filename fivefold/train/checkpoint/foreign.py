"""Folders of `torch.distributed.checkpoint` that another program has written.

They have no manifest, so nothing says what their bytes were. What can be known is checked before a
value is read: that `.metadata` is what torch writes, and for each tensor that its boxes cover it
and lie inside of files that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from fivefold.core import BadFile
from fivefold.train.checkpoint.folders import METADATA, Damaged
from fivefold.train.checkpoint.ranks import reason_of
from fivefold.train.checkpoint.storage import StoredTensors, read_metadata


class ForeignFolder:
    """A `torch.distributed.checkpoint` folder of another program, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bytes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
        if not (folder / METADATA).exists():
            rule = f"has no {METADATA}: its save was not finished, or not all of it was copied"
            raise BadFile(str(folder), [f"{rule}; give another step"])
        try:
            self._stored = StoredTensors(folder, read_metadata(folder / METADATA, self._bytes))
        except Damaged as damaged:
            raise BadFile(str(folder), [f"{damaged}: copy the folder again"]) from damaged
        tensors = self._stored.tensors
        self.sizes = {key: tuple(tensor.size) for key, tensor in tensors.items()}

    def dtype(self, key: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return self._stored.tensors[key].properties.dtype

    def problems(self, keys: Iterable[str]) -> Iterator[str]:
        """Reasons why tensors cannot be read."""
        for key in keys:
            chunks = self._stored.tensors[key].chunks
            covered = sum(math.prod(part.sizes) for part in chunks)
            if covered != math.prod(self.sizes[key]):
                yield f"{key} is not complete: {METADATA} lacks what some ranks have saved"
            for chunk in chunks:
                if (problem := self._problem(key, chunk)) is not None:
                    yield problem
                    break

    def _problem(self, key: str, chunk: ChunkStorageMetadata) -> str | None:
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        if len(ends) != len(self.sizes[key]) or any(
            end > size for end, size in zip(ends, self.sizes[key], strict=True)
        ):
            return f"{key} has values outside of its shape {self.sizes[key]}"
        record = self._stored.metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if record is None:
            return f"{key} is in no file: {METADATA} does not say where its values are"
        end, size = record.offset + record.length, self._bytes[record.relative_path]
        if end > size:
            file = record.relative_path
            return f"{file} has {size:,} bytes, and {key} ends at {end:,}: copy this file again"
        return None

    def read(self, key: str) -> Tensor:
        """Read a full tensor."""
        try:
            return self._stored.read(key)
        except Exception as error:  # a file of torch can be damaged in any way
            rule = f"{key} cannot be read ({reason_of(error)}): copy the folder again"
            raise BadFile(str(self.folder), [rule]) from error

"""Files to a folder of token shards: read, encode in several processes, filter, write in order.

The folder does not depend on the number of processes. A run that was killed goes on where its last
shard ended, if its files and its options are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError
from fivefold.data.documents import DIGEST, EMPTY, KEPT, LONG, SHORT, EncodedBlock
from fivefold.data.shard_writer import (
    FolderJob,
    JoinedDocuments,
    Place,
    WrittenShards,
    write_folder,
)
from fivefold.data.shards import Index, TokenFormat
from fivefold.data.sources import BLOCK, RowBlock, Sources, read_blocks
from fivefold.data.workers import in_processes

_COUNTED = {EMPTY: "empty", SHORT: "short", LONG: "long"}
DUPLICATE = "duplicate"


class Encode(Protocol):
    """Encodes a block; has the columns to read, and the format of its tokens."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def meaning(self) -> TokenFormat: ...

    @property
    def files(self) -> dict[str, bytes]: ...

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that its tokens depend on."""
        ...

    def __call__(self, block: RowBlock) -> EncodedBlock: ...


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of tokenization, apart from the encoder."""

    shard_tokens: int
    workers: int
    dedup: bool = False
    replace: bool = False


@dataclass
class Tokenized:
    """Result of tokenization."""

    index: Index
    left_out: dict[str, int]
    resumed: int  # documents that an earlier start had done


def tokenize(
    sources: Sources,
    folder: Path,
    encode: Encode,
    options: TokenizeOptions,
    tick: Callable[[float], None],
) -> Tokenized:
    """Tokenize files to a folder; `tick` is called with the bytes read from disk."""
    job = FolderJob(
        folder,
        encode.meaning,
        options.shard_tokens,
        encode.files,
        _identity(sources, encode, options),
        options.replace,
    )
    reader = _Reader(sources, encode, options, tick)
    index, start = write_folder(job, reader.documents)
    left_out = {key: count for key, count in reader.counts.items() if count}
    return Tokenized(index, left_out, start.num_documents)


def _identity(sources: Sources, encode: Encode, options: TokenizeOptions) -> str | None:
    """Equal for runs that write the same tokens; None if a file can be read only once."""
    files: list[tuple[str, int, int]] = []
    for source in sources.files:
        if not source.path.is_file():
            return None
        file_stat = source.path.stat()
        files.append((str(source.path.resolve()), file_stat.st_size, file_stat.st_mtime_ns))
    table = {
        "files": files,
        "encode": encode.identity,
        "meaning": asdict(encode.meaning),
        "dedup": options.dedup,
        "shard_tokens": options.shard_tokens,
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


@dataclass
class _Reader:
    """Reads and encodes documents from a position on, and counts those left out."""

    sources: Sources
    encode: Encode
    options: TokenizeOptions
    tick: Callable[[float], None]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    seen: set[bytes] = field(default_factory=set[bytes])

    def documents(self, start: WrittenShards, seen: bytes) -> Generator[JoinedDocuments]:
        """The documents after those of an earlier start, each block in one piece."""
        self.counts = dict.fromkeys((*_COUNTED.values(), DUPLICATE), 0) | start.position.left_out
        self.seen = {seen[at : at + DIGEST] for at in range(0, len(seen), DIGEST)}
        begin, num_full = (start.position.file, start.position.row), start.num_documents
        self.tick(sum(file.path.stat().st_size for file in self.sources.files[: begin[0]]))
        blocks = read_blocks(self.sources, self.encode.columns, begin)
        with in_processes(self.encode, self._num_workers()) as mapped:
            for done in mapped(blocks):
                new_documents = self._kept(done)
                num_full += len(new_documents.lengths)
                if len(new_documents.lengths):
                    yield new_documents
                self.counts = _added(self.counts, done, len(done.fates), len(new_documents.lengths))
                self.tick(done.block.num_bytes)
        if not num_full:
            raise FivefoldError(
                f"no text in the input, only {sum(self.counts.values()):,} documents that are "
                f"left out ({_listed(self.counts)}): give files with text, or other limits"
            )

    def _num_workers(self) -> int:
        """No more processes than there are blocks."""
        return max(1, min(self.options.workers, self.sources.num_bytes // BLOCK))

    def _kept(self, done: EncodedBlock) -> JoinedDocuments:
        """The documents of a block that are no duplicates."""
        rows = np.flatnonzero(done.fates == KEPT)
        lengths, sizes, tokens = done.lengths, done.sizes, done.tokens
        masks, new = done.masks, done.digests
        if self.options.dedup:
            raw = [bytes(digest) for digest in new]
            first = np.array([self._is_new(digest) for digest in raw], np.bool_)
            if not first.all():
                part = np.repeat(first, lengths)
                lengths, sizes, tokens = lengths[first], sizes[first], tokens[part]
                rows, new = rows[first], new[first]
                masks = None if masks is None else masks[part]
        position = self._places(done, rows)
        return JoinedDocuments(tokens, lengths, sizes, masks, new.tobytes(), position)

    def _is_new(self, digest: bytes) -> bool:
        if digest in self.seen:
            return False
        self.seen.add(digest)
        return True

    def _places(self, done: EncodedBlock, rows: NDArray[np.int64]) -> Callable[[int], Place]:
        """Where to go on after the first documents of a block."""
        counts = self.counts

        def position(number: int) -> Place:
            end = int(rows[number - 1]) + 1
            left_out = _added(counts, done, end, number)
            return Place(done.block.file, done.block.first + end, left_out)

        return position


def _added(
    counts: dict[str, int], done: EncodedBlock, num_rows: int, num_kept: int
) -> dict[str, int]:
    """Counts with the first rows of a block, of which so many documents were kept."""
    fates = done.fates[:num_rows]
    totals = {word: counts[word] + int((fates == fate).sum()) for fate, word in _COUNTED.items()}
    duplicates = counts[DUPLICATE] + int((fates == KEPT).sum()) - num_kept
    return {**counts, **totals, DUPLICATE: duplicates}


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {word}" for word, number in counts.items())


def usual_workers() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

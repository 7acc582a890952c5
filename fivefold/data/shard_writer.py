"""Write a folder of token shards (`data/shards.py`), under a temporary name next to it.

One rename gives the folder its name once it is complete. A list of finished shards is kept until
then, so that a run that was killed goes on after the last of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError, tables
from fivefold.core.model import TOKENIZER_FILES
from fivefold.data.shards import (
    BEGINS,
    DTYPES,
    INDEX,
    MASK,
    VERSION,
    Index,
    StoredFile,
    StoredShard,
    TokenFormat,
    read_index,
)

_TOKEN_FILES = re.compile(r"index\.json|[0-9]{5,}\.(tokens|begins|mask)")
_PROGRESS, _SEEN, _LOCK = "progress.json", "seen", "lock"  # in the temporary folder alone


class _Different(Exception):
    """The written shards differ from the existing folder."""


@dataclass(frozen=True)
class Place:
    """Position in the input, and documents left out before it, by reason."""

    file: int = 0
    row: int = 0
    left_out: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class WrittenShards:
    """Finished shards of a folder in progress."""

    identity: str
    position: Place = field(default_factory=Place)
    vocab: int = 0
    num_seen: int = 0  # bytes of digests
    shards: tuple[StoredShard, ...] = ()

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


class JoinedDocuments(NamedTuple):
    """Consecutive documents with their end tokens, joined."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]  # bytes of their texts
    masks: NDArray[np.uint8] | None = None  # 1: the token has a loss
    digests: bytes = b""  # of their texts, which a run that goes on needs
    position: Callable[[int], Place] = lambda number: Place()
    """Where the input goes on after so many of them."""


@dataclass(frozen=True)
class FolderJob:
    """A folder to write. Without an identity it is never resumed."""

    folder: Path
    meaning: TokenFormat
    shard_tokens: int
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])  # of the tokenizer
    identity: str | None = None
    replace: bool = False


def write_folder(
    job: FolderJob, read: Callable[[WrittenShards, bytes], Generator[JoinedDocuments]]
) -> tuple[Index, WrittenShards]:
    """Write documents to a new folder; returns its index, and the progress from which this start
    resumed.

    A folder that exists with the same tokens is left as it is. One with other tokens is refused as
    soon as a difference is found, or replaced on demand. `read` gives the documents after those of
    a progress, and is told the digests of the earlier ones.
    """
    old_index = _existing_index(job)
    target = job.folder.resolve()
    temporary = target.with_name(f".{target.name}.partial")
    with _write_errors(temporary):
        temporary.mkdir(parents=True, exist_ok=True)
        lock = _locked(temporary)
    try:
        start, seen = _continued(temporary, job.identity or secrets.token_hex(8))
        writer = _ShardWriter(temporary, job, start, old_index)
        try:
            with contextlib.closing(read(start, seen)) as batches:
                for documents in batches:
                    writer.add(documents)
            index = writer.close()
        finally:
            writer.abandon()
        if old_index is None:
            _publish(temporary, job)
        shutil.rmtree(temporary, ignore_errors=True)
    except Exception as error:  # not a signal: what is there is for the next start
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, _Different):
            raise _refused(job.folder) from error
        raise
    finally:
        lock.close()
    return index, start


def _locked(temporary: Path) -> IO[bytes]:
    """A lock on the temporary folder, which ends with this process."""
    stream = (temporary / _LOCK).open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        raise FivefoldError(
            f"another process writes {temporary} now: wait for it, or give another folder"
        ) from error
    return stream


def _continued(temporary: Path, identity: str) -> tuple[WrittenShards, bytes]:
    """The progress of an earlier start of this job, and the digests of its documents."""
    start, seen = WrittenShards(identity), b""
    with contextlib.suppress(OSError, ValueError):
        table = json.loads((temporary / _PROGRESS).read_bytes())
        progress = tables.build(WrittenShards, table, _PROGRESS)
        files = [file for shard in progress.shards for file in shard.files]
        is_complete = all(
            (temporary / stored_file.name).stat().st_size == stored_file.bytes
            for stored_file in files
        )
        known = (temporary / _SEEN).read_bytes()[: progress.num_seen]
        if progress.identity == identity and is_complete and len(known) == progress.num_seen:
            start, seen = progress, known
    known_names = {file.name for shard in start.shards for file in shard.files}
    with _write_errors(temporary):
        for path in temporary.iterdir():
            if path.name not in {*known_names, _LOCK}:
                path.unlink()
        (temporary / _SEEN).write_bytes(seen)
    return start, seen


def _existing_index(job: FolderJob) -> Index | None:
    """The index of the folder that exists, if it may have the same tokens."""
    folder = job.folder
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FivefoldError(f"{folder}: {error.strerror}; give another folder") from error
    ours = [name for name in names if name in TOKENIZER_FILES or _TOKEN_FILES.fullmatch(name)]
    if other := [name for name in names if name not in ours]:
        raise FivefoldError(
            f"{folder} has the file {other[0]}, which is not a token file: give a new folder"
        )
    if job.replace or not names:
        return None
    try:
        index = read_index(folder)
    except FivefoldError as error:
        raise _refused(folder) from error
    if index.meaning != job.meaning:
        raise _refused(folder)
    return index


def _refused(folder: Path) -> FivefoldError:
    return FivefoldError(
        f"{folder} exists with other tokens: give another folder, or --force to replace it"
    )


def _publish(temporary: Path, job: FolderJob) -> None:
    """One rename, or two where a folder is replaced."""
    target = job.folder.resolve()
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    with _write_errors(job.folder):
        for name in (_PROGRESS, _SEEN, _LOCK):
            (temporary / name).unlink(missing_ok=True)
        for name, data in job.files.items():
            _write_synced(temporary / name, data)
        _sync_folder(temporary)
        replaces = job.replace and target.exists()
        if replaces:
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if replaces:
                old.rename(target)
            raise
        _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    """A file that is on the disk when this returns, complete or not at all."""
    beside = path.with_name(f"{path.name}.new")
    with _write_errors(path):
        with beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _ChecksummedFile:
    """A file in progress, with its size and checksum so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        with _write_errors(path):
            self.stream = path.open("xb")

    def write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self.digest.update(data)
        self.size += len(data)
        with _write_errors(self.path):
            self.stream.write(data)

    def close(self) -> StoredFile:
        with _write_errors(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
        return StoredFile(self.path.name, self.size, self.digest.hexdigest())

    def abandon(self) -> None:
        """Close a file that will be deleted; a full disk may raise an error once more."""
        with contextlib.suppress(OSError):
            self.stream.close()


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; no files remain; free some "
            "space or give a folder elsewhere, and run it again"
        ) from error


class _ShardWriter:
    """Writes documents to the shards of a folder, in order.

    A shard is full once it has `shard_tokens`; no document is split. With `expected`, each full
    shard must be equal to that of this index, so that a difference is found early.
    """

    def __init__(
        self, folder: Path, job: FolderJob, start: WrittenShards, expected: Index | None = None
    ) -> None:
        self.folder, self.meaning, self.shard_tokens = folder, job.meaning, job.shard_tokens
        self.expected, self.identity = expected, start.identity
        self.shards, self.vocab, self.num_seen = list(start.shards), start.vocab, start.num_seen
        self.files: list[_ChecksummedFile] = []
        self.num_tokens = self.num_documents = self.text_bytes = 0

    def add(self, documents: JoinedDocuments) -> None:
        """Write documents: as many as fill a shard, then the next."""
        ends = np.cumsum(documents.lengths)
        done, seen = 0, memoryview(documents.digests)
        size = len(seen) // len(ends)  # of a digest
        while done < len(ends):
            before = int(ends[done - 1]) if done else 0
            capacity = self.shard_tokens - self.num_tokens
            last = min(len(ends), int(np.searchsorted(ends, before + capacity)) + 1)
            part = slice(before, int(ends[last - 1]))
            starts = ends[done:last] - documents.lengths[done:last] - before + self.num_tokens
            masks = documents.masks
            self._write(documents.tokens[part], starts, None if masks is None else masks[part])
            self.text_bytes += int(documents.sizes[done:last].sum())
            self._note(bytes(seen[done * size : last * size]))
            done = last
            if self.num_tokens >= self.shard_tokens:
                self._finish(documents.position(last))

    def _write(
        self, tokens: NDArray[Any], starts: NDArray[np.int64], masks: NDArray[np.uint8] | None
    ) -> None:
        assert (masks is not None) == self.meaning.masked
        if not self.files:
            kinds = ("tokens", "begins", *(("mask",) if self.meaning.masked else ()))
            stem = f"{len(self.shards):05}"
            self.files = [_ChecksummedFile(self.folder / f"{stem}.{kind}") for kind in kinds]
        arrays = [tokens.astype(DTYPES[self.meaning.dtype], copy=False), starts.astype(BEGINS)]
        arrays += [] if masks is None else [masks.astype(MASK, copy=False)]
        for file, array in zip(self.files, arrays, strict=True):
            file.write(array)
        self.num_tokens += len(tokens)
        self.num_documents += len(starts)
        self.vocab = max(self.vocab, int(tokens.max()) + 1)

    def _note(self, digests: bytes) -> None:
        """Append to the digests of all documents."""
        if digests:
            path = self.folder / _SEEN
            with _write_errors(path), path.open("ab") as stream:
                stream.write(digests)
            self.num_seen += len(digests)

    def close(self) -> Index:
        """Finish the last shard, and write the index."""
        self._finish(None)
        index = Index(VERSION, self.meaning, self.vocab, tuple(self.shards))
        if self.expected not in (None, index):
            raise _Different
        _write_synced(self.folder / INDEX, index.text().encode())
        return index

    def abandon(self) -> None:
        """Close files that are not finished."""
        for file in self.files:
            file.abandon()

    def _finish(self, position: Place | None) -> None:
        """Close a shard; `position` is where the input goes on after it."""
        if not self.files:
            return
        tokens, begins, *mask = [file.close() for file in self.files]
        counts = (self.num_tokens, self.num_documents, self.text_bytes)
        shard = StoredShard(*counts, tokens, begins, mask[0] if mask else None)
        number = len(self.shards)
        if self.expected is not None and self.expected.shards[number : number + 1] != (shard,):
            raise _Different
        self.shards.append(shard)
        self.files = []
        self.num_tokens = self.num_documents = self.text_bytes = 0
        if position is not None:
            done = WrittenShards(
                self.identity, position, self.vocab, self.num_seen, tuple(self.shards)
            )
            _write_synced(self.folder / _PROGRESS, json.dumps(asdict(done)).encode())

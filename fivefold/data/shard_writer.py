"""Write a folder of token shards (`data/shards.py`), under a temporary name next to it.

One rename gives the folder its name once it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import FivefoldError
from fivefold.data.shards import (
    BEGINS,
    DTYPES,
    INDEX,
    VERSION,
    Index,
    StoredFile,
    StoredShard,
    TokenFormat,
    read_index,
)

_TOKEN_FILES = re.compile(r"index\.json|[0-9]{5,}\.(tokens|begins)")


class _Different(Exception):
    """What is written differs from the folder that exists."""


def write_folder(
    folder: Path,
    meaning: TokenFormat,
    documents: Iterable[NDArray[Any]],
    shard_tokens: int,
    *,
    replace: bool = False,
) -> Index:
    """Write documents, each with its end token, to a new folder.

    A folder that exists with the same tokens is left as it is. One with other tokens is refused as
    soon as a difference is found, or replaced with `replace`.
    """
    wanted = _existing_index(folder, meaning, replace)
    temporary = _temporary_path(folder, "partial")
    with _write_errors(temporary):
        temporary.mkdir(parents=True)
    writer = _ShardWriter(temporary, meaning, shard_tokens, wanted)
    try:
        for document in documents:
            writer.add(document)
        index = writer.close()
        if wanted is None:
            _publish(temporary, folder, replace)
    except _Different as error:
        raise _refused(folder) from error
    finally:
        writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)
    return index


def _existing_index(folder: Path, meaning: TokenFormat, replace: bool) -> Index | None:
    """The index of the folder that exists, if it may have the same tokens."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FivefoldError(f"{folder}: {error.strerror}; give another folder") from error
    if other := [name for name in names if not _TOKEN_FILES.fullmatch(name)]:
        raise FivefoldError(
            f"{folder} has the file {other[0]}, which is not a token file: give a new folder"
        )
    if replace or not names:
        return None
    try:
        index = read_index(folder)
    except FivefoldError as error:
        raise _refused(folder) from error
    if index.meaning != meaning:
        raise _refused(folder)
    return index


def _refused(folder: Path) -> FivefoldError:
    return FivefoldError(
        f"{folder} exists with other tokens: give another folder, or --force to replace it"
    )


def _temporary_path(folder: Path, word: str) -> Path:
    """An unused hidden name on the same disk."""
    target = folder.resolve()
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{word}")


def _publish(temporary: Path, folder: Path, replace: bool) -> None:
    """One rename, or two where a folder is replaced."""
    target, old = folder.resolve(), _temporary_path(folder, "old")
    with _write_errors(folder):
        _sync_folder(temporary)
        replaces = replace and target.exists()
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


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _ChecksummedFile:
    """A file that is being written, with its size and checksum so far."""

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
    """Writes documents to the shards of a folder, in their order.

    A shard is full once it has `shard_tokens`; no document is split. With `wanted`, each full shard
    must be equal to that of this index, so that a difference is found early.
    """

    def __init__(
        self, folder: Path, meaning: TokenFormat, shard_tokens: int, wanted: Index | None = None
    ) -> None:
        self.folder, self.meaning, self.shard_tokens = folder, meaning, shard_tokens
        self.wanted, self.shards, self.vocab = wanted, list[StoredShard](), 0
        self.tokens: _ChecksummedFile | None = None
        self.begins: _ChecksummedFile | None = None
        self.num_tokens = self.num_documents = 0

    def add(self, document: NDArray[Any]) -> None:
        """Write one document with its end token."""
        if self.tokens is None or self.begins is None:
            stem = f"{len(self.shards):05}"
            self.tokens = _ChecksummedFile(self.folder / f"{stem}.tokens")
            self.begins = _ChecksummedFile(self.folder / f"{stem}.begins")
        self.tokens.write(document.astype(DTYPES[self.meaning.dtype], copy=False))
        self.begins.write(np.array([self.num_tokens], BEGINS))
        self.num_tokens += len(document)
        self.num_documents += 1
        self.vocab = max(self.vocab, int(document.max()) + 1)
        if self.num_tokens >= self.shard_tokens:
            self._finish()

    def close(self) -> Index:
        """Finish the last shard, and write the index."""
        self._finish()
        index = Index(VERSION, self.meaning, self.vocab, tuple(self.shards))
        if self.wanted not in (None, index):
            raise _Different
        text = json.dumps(asdict(index), indent=1) + "\n"
        path = self.folder / INDEX
        with _write_errors(path), path.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        return index

    def abandon(self) -> None:
        """Close files that will be deleted."""
        for file in (self.tokens, self.begins):
            if file is not None:
                file.abandon()

    def _finish(self) -> None:
        if self.tokens is None or self.begins is None:
            return
        files = self.tokens.close(), self.begins.close()
        shard = StoredShard(self.num_tokens, self.num_documents, *files)
        number = len(self.shards)
        if self.wanted is not None and self.wanted.shards[number : number + 1] != (shard,):
            raise _Different
        self.shards.append(shard)
        self.tokens = self.begins = None
        self.num_tokens = self.num_documents = 0

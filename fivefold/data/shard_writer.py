"""Writes a folder of tokens beside its final place, and puts it there when it is whole."""

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
    DTYPES,
    INDEX,
    PLACES,
    VERSION,
    Index,
    Meaning,
    StoredFile,
    StoredShard,
    read_index,
)

_OURS = re.compile(r"index\.json|[0-9]{5,}\.(tokens|begins)")


class _Different(Exception):
    """What is being written is not what is there."""


def write_folder(
    folder: Path,
    meaning: Meaning,
    documents: Iterable[NDArray[Any]],
    shard_tokens: int,
    *,
    replace: bool = False,
) -> Index:
    """Write documents, each with its end, to a folder that does not exist yet.

    One that exists stays where it is identical, and is refused where it is not, as soon as that is
    known; `replace` takes its place.
    """
    wanted = _there(folder, meaning, replace)
    beside = _beside(folder, "partial")
    with _named(beside):
        beside.mkdir(parents=True)
    writer = _ShardFile(beside, meaning, shard_tokens, wanted)
    try:
        for document in documents:
            writer.add(document)
        index = writer.close()
        if wanted is None:
            _publish(beside, folder, replace)
    except _Different as error:
        raise _refused(folder) from error
    finally:
        writer.abandon()
        shutil.rmtree(beside, ignore_errors=True)
    return index


def _there(folder: Path, meaning: Meaning, replace: bool) -> Index | None:
    """The index of the folder that is there, if it may be what would be written."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FivefoldError(f"{folder}: {error.strerror}; give another folder") from error
    if foreign := [name for name in names if not _OURS.fullmatch(name)]:
        raise FivefoldError(
            f"{folder} holds {foreign[0]}, which is no file of tokens: give a new folder"
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
        f"{folder} exists and holds other tokens: give another folder, or --force to replace it"
    )


def _beside(folder: Path, word: str) -> Path:
    """A hidden name on the same disk that nobody else has."""
    place = folder.resolve()
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{word}")


def _publish(beside: Path, folder: Path, replace: bool) -> None:
    """One rename, or two where the folder that is there has to leave first."""
    place, old = folder.resolve(), _beside(folder, "old")
    with _named(folder):
        _settle(beside)
        leaves = replace and place.exists()
        if leaves:
            place.rename(old)
        try:
            beside.rename(place)
        except OSError:
            if leaves:
                old.rename(place)
            raise
        _settle(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _settle(folder: Path) -> None:
    """The names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _WrittenShard:
    """A file that is being written, and its checksum."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        with _named(path):
            self.stream = path.open("xb")

    def write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self.digest.update(data)
        self.size += len(data)
        with _named(self.path):
            self.stream.write(data)

    def close(self) -> StoredFile:
        with _named(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
        return StoredFile(self.path.name, self.size, self.digest.hexdigest())

    def abandon(self) -> None:
        """Let go of a file that will be deleted; a full disk may complain once more."""
        with contextlib.suppress(OSError):
            self.stream.close()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; nothing is left behind, so make room "
            "or give a folder elsewhere, and run it again"
        ) from error


class _ShardFile:
    """Documents to shards in a folder, in the order in which they come.

    A shard is full once it has `shard_tokens`; no document lies in two. With `wanted`, each full
    shard must be the one of this index, so that a difference is known before the end.
    """

    def __init__(
        self, folder: Path, meaning: Meaning, shard_tokens: int, wanted: Index | None = None
    ) -> None:
        self.folder, self.meaning, self.shard_tokens = folder, meaning, shard_tokens
        self.wanted, self.shards, self.vocab = wanted, list[StoredShard](), 0
        self.tokens: _WrittenShard | None = None
        self.begins: _WrittenShard | None = None
        self.num_tokens = self.num_documents = 0

    def add(self, document: NDArray[Any]) -> None:
        """One document with its end."""
        if self.tokens is None or self.begins is None:
            stem = f"{len(self.shards):05}"
            self.tokens = _WrittenShard(self.folder / f"{stem}.tokens")
            self.begins = _WrittenShard(self.folder / f"{stem}.begins")
        self.tokens.write(document.astype(DTYPES[self.meaning.dtype], copy=False))
        self.begins.write(np.array([self.num_tokens], PLACES))
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
        with _named(path), path.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        return index

    def abandon(self) -> None:
        """Let go of files that will be deleted."""
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

"""A folder of tokens: shards in memory-mapped files, an index, and a checksum of each file.

    index.json      what the tokens are, and of each shard its counts, files, bytes and checksums
    00000.tokens    the tokens of whole documents, one behind the other, uint16 or uint32
    00000.begins    the places of the documents' first tokens in this shard, int64

Numbers are little-endian. The folder is written beside its final place and appears there by one
rename, with its index, when it is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core import tables
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.data.rows import Corpus, Shard

VERSION = 1
INDEX = "index.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PLACES = np.dtype("<i8")


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredShard:
    """What the index says of a shard."""

    num_tokens: int
    num_documents: int
    tokens: StoredFile
    begins: StoredFile

    @property
    def files(self) -> tuple[StoredFile, StoredFile]:
        return self.tokens, self.begins


@dataclass(frozen=True)
class Meaning:
    """What the tokens of a folder are."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: str  # "bytes", or the name of the tokenizer's file
    sha256: str | None = None  # of the tokenizer's file
    end: int | None = None  # the token behind each document


@dataclass(frozen=True)
class Index:
    """The index of a folder of tokens."""

    version: int
    meaning: Meaning
    vocab: int  # the largest token, and one
    shards: tuple[StoredShard, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for shard in self.shards for file in shard.files)


def read_index(folder: Path) -> Index:
    """The index of a folder; refuses what does not fit together."""
    path = folder / INDEX
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise FivefoldError(
            f"{folder} is no folder of tokens, for it has no {INDEX}: write one with `fivefold "
            f"tokens TEXT -o {folder}`"
        ) from error
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(str(path), [f"not valid JSON: {error}; write the folder again"]) from error
    version = table.get("version") if isinstance(table, dict) else None
    if version != VERSION:
        rule = f"its version is {version}, and this fivefold reads {VERSION}; write it again"
        raise BadFile(str(path), [rule])
    index = tables.build(Index, table, str(path))
    if problems := [*_contradictions(index)]:
        raise BadFile(str(path), [f"{each}; write the folder again" for each in problems])
    return index


def _contradictions(index: Index) -> Iterator[str]:
    if not index.shards:
        yield "it has no shards"
    size = DTYPES[index.meaning.dtype].itemsize
    for number, shard in enumerate(index.shards):
        wanted = (f"{number:05}.tokens", f"{number:05}.begins")
        if tuple(file.name for file in shard.files) != wanted:
            yield f"shard {number} should have the files {' and '.join(wanted)}"
        if not 0 < shard.num_documents <= shard.num_tokens:
            yield f"shard {number} should have documents, and a token in each"
        counted = (shard.num_tokens * size, shard.num_documents * PLACES.itemsize)
        if tuple(file.bytes for file in shard.files) != counted:
            yield f"shard {number} has other bytes than its tokens and documents take"


def open_corpus(folder: Path, vocab: int, *, verify: bool = False) -> Corpus:
    """A folder of tokens as a corpus for a model with this vocabulary.

    The size of each file is always held against the index, its checksum where asked to `verify`.
    """
    index = read_index(folder)
    refuse_damaged(folder, index, checksums=verify)
    if index.vocab > vocab:
        raise FivefoldError(
            f"{folder} has tokens up to {index.vocab - 1:,}, and the model knows {vocab:,}: use a "
            f"vocabulary of at least {index.vocab:,}, as in --set vocab={index.vocab}"
        )
    meaning = index.meaning
    shards = (
        Shard(
            _mapped(folder / shard.tokens.name, DTYPES[meaning.dtype]),
            _mapped(folder / shard.begins.name, PLACES),
        )
        for shard in index.shards
    )
    digest = meaning.sha256 or meaning.tokenizer
    return Corpus(str(folder), tuple(shards), meaning.end, meaning.tokenizer, digest)


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The file as a plain array, whose slices cost less than those of a memmap."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


def refuse_damaged(
    folder: Path,
    index: Index,
    *,
    checksums: bool,
    tick: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Name every file that is not what was written; `tick` is told of the bytes behind us."""
    files = [file for shard in index.shards for file in shard.files]
    problems = [problem for file in files if (problem := _wrong_size(folder, file))]
    if checksums and not problems:
        with ThreadPoolExecutor() as pool:
            found = pool.map(partial(_wrong_sum, folder), files)
            for file, problem in zip(files, found, strict=True):
                tick(file.bytes)
                problems += [problem] if problem else []
    if problems:
        raise BadFile(str(folder), problems)


def _wrong_size(folder: Path, file: StoredFile) -> str | None:
    try:
        found = (folder / file.name).stat().st_size
    except OSError as error:
        return f"{file.name}: {error.strerror}; copy or write the folder again"
    if found == file.bytes:
        return None
    word = "truncated" if found < file.bytes else "too long"
    return (
        f"{file.name} is {word}: {found:,} bytes instead of {file.bytes:,}; copy or write the "
        "folder again"
    )


def _wrong_sum(folder: Path, file: StoredFile) -> str | None:
    try:
        with (folder / file.name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name}: {error.strerror}; check the disk"
    if found == file.sha256:
        return None
    return (
        f"{file.name} is corrupted: its SHA-256 begins with {found[:12]} instead of "
        f"{file.sha256[:12]}; copy or write the folder again"
    )

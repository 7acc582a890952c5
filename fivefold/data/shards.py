"""Read a folder of token shards: memory-mapped files, and an index with their checksums.

    index.json      the format of the tokens; for each shard its counts, files, bytes and checksums
    00000.tokens    the tokens of consecutive documents, uint16 or uint32
    00000.begins    the index of each document's first token in this shard, int64
    00000.mask      of conversations: 1 for each token that has a loss, else 0, uint8; of preference
                    pairs 2 more for each token of the rejected text

Numbers are little-endian. `data/tokenizing.py` writes such folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile, FivefoldError, tables
from fivefold.data.rows import Corpus, Shard

VERSION = 2  # 1 had no fingerprint of the tokenizer
INDEX = "index.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BEGINS, MASK = np.dtype("<i8"), np.dtype("u1")


@dataclass(frozen=True)
class StoredFile:
    """Name, size and checksum of a file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredShard:
    """One shard in the index."""

    num_tokens: int
    num_documents: int
    text_bytes: int
    tokens: StoredFile
    begins: StoredFile
    mask: StoredFile | None = None

    @property
    def files(self) -> tuple[StoredFile, ...]:
        mask = () if self.mask is None else (self.mask,)
        return self.tokens, self.begins, *mask


@dataclass(frozen=True)
class TokenFormat:
    """The format of the tokens of a folder."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: str  # "bytes", or the name of the tokenizer's file
    fingerprint: str  # of the tokenizer, by `core/model/tokenizer.py`
    end: int | None = None  # the token after each document
    masked: bool = False  # conversations: a mask says which tokens have a loss
    paired: bool = False  # preference pairs: a document is a chosen text and a rejected one


@dataclass(frozen=True)
class Index:
    """The index of a folder of tokens."""

    version: int
    meaning: TokenFormat
    vocab: int  # the largest token plus one
    shards: tuple[StoredShard, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for shard in self.shards for file in shard.files)

    def text(self) -> str:
        """Format `index.json`, with a checksum of its content."""
        table = asdict(self)
        return json.dumps(table | {"sha256": _checksum_of(table)}, indent=1) + "\n"


def _checksum_of(table: dict[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_index(folder: Path) -> Index:
    """Read the index of a folder; refuses one that contradicts itself."""
    path = folder / INDEX
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise FivefoldError(
            f"{folder} is not a folder of tokens: it has no {INDEX}. Write one with `fivefold "
            f"tokens TEXT -o {folder}`"
        ) from error
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(str(path), [f"not valid JSON: {error}; write the folder again"]) from error
    version = table.get("version") if isinstance(table, dict) else None
    written = table.pop("sha256", None) if isinstance(table, dict) else None  # older ones lack it
    if version != VERSION:
        rule = f"its version is {version}, but this fivefold reads {VERSION}; write it again"
        raise BadFile(str(path), [rule])
    if written not in (None, _checksum_of(table)):
        rule = "it was changed after it was written; copy or write the folder again"
        raise BadFile(str(path), [rule])
    index = tables.build(Index, table, str(path))
    if problems := [*_contradictions(index)]:
        raise BadFile(str(path), [f"{problem}; write the folder again" for problem in problems])
    return index


def _contradictions(index: Index) -> Iterator[str]:
    if not index.shards:
        yield "it has no shards"
    size = DTYPES[index.meaning.dtype].itemsize
    for number, shard in enumerate(index.shards):
        kinds = ("tokens", "begins", *(("mask",) if index.meaning.masked else ()))
        names = tuple(f"{number:05}.{kind}" for kind in kinds)
        if tuple(file.name for file in shard.files) != names:
            yield f"shard {number} should have the files {' and '.join(names)}"
        if not 0 < shard.num_documents <= shard.num_tokens:
            yield f"shard {number} should have documents, each with a token"
        counted = (shard.num_tokens * size, shard.num_documents * BEGINS.itemsize)
        counted += () if shard.mask is None else (shard.num_tokens * MASK.itemsize,)
        if tuple(file.bytes for file in shard.files) != counted:
            yield f"the file sizes of shard {number} do not match its tokens and documents"


def open_corpus(folder: Path, vocab: int, *, verify: bool = False) -> Corpus:
    """Open a folder of tokens for a model with this vocabulary.

    File sizes are always compared with the index; with `verify` checksums too, and tokens with the
    vocabulary.
    """
    index = read_index(folder)
    refuse_damaged(folder, index, checksums=verify)
    if index.vocab > vocab:
        raise FivefoldError(
            f"{folder} has tokens up to {index.vocab - 1:,}, but the model knows {vocab:,}: use a "
            f"vocabulary of at least {index.vocab:,}, as in --set vocab={index.vocab}"
        )
    meaning = index.meaning
    shards = (
        Shard(
            _mapped(folder / shard.tokens.name, DTYPES[meaning.dtype]),
            _mapped(folder / shard.begins.name, BEGINS),
            None if shard.mask is None else _mapped(folder / shard.mask.name, MASK),
        )
        for shard in index.shards
    )
    name = (meaning.tokenizer, meaning.fingerprint)
    size = index.text_bytes
    return Corpus(
        str(folder), tuple(shards), meaning.end, *name, text_bytes=size, paired=meaning.paired
    )


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The memory-mapped file as a plain array, which is faster to slice than a memmap."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


def refuse_damaged(
    folder: Path,
    index: Index,
    *,
    checksums: bool,
    tick: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Raise an error that names every damaged file; `tick` is called with the bytes read."""
    files = [file for shard in index.shards for file in shard.files]
    problems = [problem for file in files if (problem := _size_problem(folder, file))]
    if checksums and not problems:
        with ThreadPoolExecutor() as pool:
            results = pool.map(partial(_checksum_problem, folder), files)
            for file, problem in zip(files, results, strict=True):
                tick(file.bytes)
                problems += [problem] if problem else []
            if not problems:
                shards = pool.map(partial(_vocabulary_problem, folder, index), index.shards)
                problems = [problem for problem in shards if problem]
    if problems:
        raise BadFile(str(folder), problems)


def _vocabulary_problem(folder: Path, index: Index, shard: StoredShard) -> str | None:
    """No checksum tells that the index speaks of these tokens."""
    dtype = DTYPES[index.meaning.dtype]
    most = int(np.memmap(folder / shard.tokens.name, dtype, mode="r").max())
    if most < index.vocab:
        return None
    return (
        f"{shard.tokens.name} has the token {most:,}, and {INDEX} says that all are below "
        f"{index.vocab:,}; copy or write the folder again"
    )


def _size_problem(folder: Path, file: StoredFile) -> str | None:
    try:
        num_bytes = (folder / file.name).stat().st_size
    except OSError as error:
        return f"{file.name}: {error.strerror}; copy or write the folder again"
    if num_bytes == file.bytes:
        return None
    word = "truncated" if num_bytes < file.bytes else "too long"
    return (
        f"{file.name} is {word}: {num_bytes:,} bytes instead of {file.bytes:,}; copy or write the "
        "folder again"
    )


def _checksum_problem(folder: Path, file: StoredFile) -> str | None:
    try:
        with (folder / file.name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name}: {error.strerror}; check the disk"
    if digest == file.sha256:
        return None
    return (
        f"{file.name} is corrupted: its SHA-256 begins with {digest[:12]} instead of "
        f"{file.sha256[:12]}; copy or write the folder again"
    )

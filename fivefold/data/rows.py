"""Text as rows of tokens, in an order that no layout changes. No rank is known here.

A corpus is documents of tokens, one behind the other. It is cut into rows of seq + 1 tokens: the
last token of a row is the first of the next, so that in one epoch every token is read once and
predicted once, but for a rest that fills no row. Which row is a sample is a pure function of the
seed and the sample's number, and the number is step · global batch + row of the step: the same
text in the same order on every layout, from any step on.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import FivefoldError

NUM_BYTES = 256  # the tokens that bytes are; the next one ends a document where there is room
MOST_BYTES = 16 << 20
BYTES = "bytes"  # the tokenizer that is none
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_ROUNDS = 4  # of a Feistel network: enough for an order that looks like none
_DRAWN_ROWS = 1 << 40  # more than any training reads


class TokenRows(NamedTuple):
    """Rows of seq + 1 tokens; each token should be predicted by those in front of it."""

    tokens: NDArray[np.int64]  # (rows, seq + 1)
    begins: NDArray[np.bool_]  # (rows, seq + 1): whether a document begins here


class Shard(NamedTuple):
    """Whole documents, one behind the other; both arrays may be memory-mapped files."""

    tokens: NDArray[Any]  # uint16 or uint32
    begins: NDArray[np.int64]  # places of the documents' first tokens, in rising order


@dataclass(frozen=True, eq=False)
class Corpus:
    """Shards, read as if they were one."""

    name: str
    shards: tuple[Shard, ...]
    end: int | None  # the token behind each document; None where there is none
    tokenizer: str = BYTES
    digest: str = BYTES  # equal where tokens mean the same

    def __str__(self) -> str:
        each = "one a byte" if self.tokenizer == BYTES else f"by {self.tokenizer}"
        end = (
            "no end-of-document token" if self.end is None else f"end-of-document token {self.end}"
        )
        documents = sum(len(shard.begins) for shard in self.shards)
        return f"{self.name}: {self.starts[-1]:,} tokens in {documents:,} documents, {each}, {end}"

    @cached_property
    def starts(self) -> list[int]:
        """The place of each shard's first token in the corpus, and behind them its length."""
        return list(accumulate((len(shard.tokens) for shard in self.shards), initial=0))

    def num_rows(self, seq: int) -> int:
        """Rows of one epoch."""
        return (self.starts[-1] - 1) // seq

    def read(self, row: int, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """Fill one row; `begins` comes with nothing set.

        Slices rather than one gather of all places, whose list would be larger than the tokens.
        """
        place = row * (len(tokens) - 1)
        number, done = bisect_right(self.starts, place) - 1, 0
        while done < len(tokens):
            shard, first = self.shards[number], place + done - self.starts[number]
            piece = shard.tokens[first : first + len(tokens) - done]
            tokens[done : done + len(piece)] = piece
            low, high = np.searchsorted(shard.begins, (first, first + len(piece)))
            begins[shard.begins[low:high] - first + done] = True
            number, done = number + 1, done + len(piece)


@dataclass(frozen=True)
class Synthetic:
    """Random tokens that no file holds, for benchmarks: a function of seed, row and place."""

    seed: int
    vocab: int
    name: str = "synthetic"

    def __str__(self) -> str:
        return f"random tokens below {self.vocab:,}, each row one document"

    def num_rows(self, seq: int) -> int:
        """As many as anyone will read."""
        return _DRAWN_ROWS

    def read(self, row: int, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """Fill one row. Raw bits, since only they are the same in every version of numpy."""
        bits = np.random.Philox(key=np.array([self.seed % 2**64, row], np.uint64))
        drawn = bits.random_raw(len(tokens) // 2 + 1).astype("<u8", copy=False).view("<u4")
        wide = tokens.view(np.uint64)
        np.multiply(drawn[: len(tokens)], np.uint64(self.vocab), out=wide, dtype=np.uint64)
        np.right_shift(wide, np.uint64(32), out=wide)


def read_rows(places: Sequence[tuple[Corpus | Synthetic, int]], seq: int) -> TokenRows:
    """Rows by their corpora and their numbers in them."""
    rows = TokenRows(
        np.empty((len(places), seq + 1), np.int64), np.zeros((len(places), seq + 1), np.bool_)
    )
    for number, (corpus, row) in enumerate(places):
        corpus.read(row, rows.tokens[number], rows.begins[number])
    return rows


@dataclass(frozen=True)
class Order:
    """Which row of its epoch a sample is: every row once an epoch, each epoch in another order.

    Computed for one sample alone, without a list of the others.
    """

    seed: int
    num_rows: int

    def row(self, sample: int) -> int:
        """The row of a sample, by the sample's number from the start of the training."""
        epoch, place = divmod(sample, self.num_rows)
        half = max(1, ((self.num_rows - 1).bit_length() + 1) // 2)
        while True:
            place = self._shuffled(place, half, epoch)
            if place < self.num_rows:  # else it walks on, and comes back inside in the end
                return place

    def _shuffled(self, place: int, half: int, epoch: int) -> int:
        """A permutation of the numbers of 2 · half bits."""
        left, right = place >> half, place & ((1 << half) - 1)
        for number in range(_ROUNDS):
            text = f"{self.seed} {epoch} {number} {right}".encode()
            drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            left, right = right, left ^ (drawn & ((1 << half) - 1))
        return left << half | right


def from_bytes(name: str, documents: list[bytes], vocab: int) -> Corpus:
    """A corpus whose tokens are the bytes of its documents."""
    if vocab < NUM_BYTES:
        raise FivefoldError(
            f"bytes are {NUM_BYTES} tokens, and the model knows {vocab}: use a vocabulary of at "
            f"least {NUM_BYTES}, as in --set vocab={NUM_BYTES}"
        )
    end = NUM_BYTES if vocab > NUM_BYTES else None
    arrays = [byte_tokens(text, end) for text in documents if text]
    begins = np.cumsum([0, *(len(each) for each in arrays[:-1])], dtype=np.int64)
    return Corpus(name, (Shard(np.concatenate(arrays), begins),), end)


def byte_tokens(text: bytes, end: int | None) -> NDArray[np.uint16]:
    """The bytes of a document, and behind them the token that ends it."""
    behind = [] if end is None else [np.array([end], np.uint16)]
    return np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), *behind])


@cache
def standard_library(vocab: int) -> Corpus:
    """The source of this Python's own standard library, which every machine has.

    Kept, so that ranks that are forked afterwards have it too.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    documents = read_sources(folder)
    if not documents:
        raise FivefoldError(
            f"no source files in {folder}: use a Python that came with its standard library"
        )
    return from_bytes("Python's standard library", documents, vocab)


def read_sources(folder: Path, most_bytes: int = MOST_BYTES) -> list[bytes]:
    """The Python files of a folder in the order of their names, without packages that were
    installed into it and without tests, as far as they fit into `most_bytes`."""
    documents: list[bytes] = []
    for name in sorted(_names(folder)):
        documents.append((folder / name).read_bytes())
        most_bytes -= len(documents[-1])
        if most_bytes < 0:
            return documents[:-1]
    return documents


def _names(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if each not in _FOREIGN]
        inside = Path(root).relative_to(folder)
        yield from ((inside / each).as_posix() for each in files if each.endswith(".py"))

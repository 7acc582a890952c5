"""A corpus as rows of tokens, in an order that is the same on every layout. No rank is known here.

A corpus is a sequence of tokenized documents, cut into rows of seq + 1 tokens. The last token of a
row is the first of the next row, so that in one epoch every token is read once and predicted once,
except for a rest that fills no row. The row of a sample is a pure function of the seed and the
sample's number, which is step · global batch + row of the step: the same text in the same order on
every layout, from any step on.
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

from fivefold.core import FivefoldError
from fivefold.core.model import BYTES, NUM_BYTES
from fivefold.core.plan import LossOn

MOST_BYTES = 16 << 20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
REJECTED = 2  # in a mask: the token is of the rejected text of a pair
SIDES = 2  # rows of a pair: chosen and rejected, one after the other
_ROUNDS = 4  # of a Feistel network: enough for an order that looks random
_DRAWN_ROWS = 1 << 40  # more than any training reads


class TokenRows(NamedTuple):
    """Rows of seq + 1 tokens: each is predicted from those before it."""

    tokens: NDArray[np.int64]  # (rows, seq + 1)
    begins: NDArray[np.bool_]  # (rows, seq + 1): whether a document begins here
    silent: NDArray[np.bool_]  # (rows, seq + 1): whether a token has no loss


class Shard(NamedTuple):
    """Consecutive documents; both arrays may be memory-mapped files."""

    tokens: NDArray[Any]  # uint16 or uint32
    begins: NDArray[np.int64]  # indices of the documents' first tokens, in rising order
    mask: NDArray[np.uint8] | None = None  # of conversations: 1 for each token with a loss


@dataclass(frozen=True, eq=False)
class Corpus:
    """Several shards as one sequence of tokens."""

    name: str
    shards: tuple[Shard, ...]
    end: int | None  # the token after each document, if any
    tokenizer: str = BYTES
    digest: str = BYTES  # equal for corpora whose tokens mean the same
    loss: LossOn = "assistant"  # of conversations
    text_bytes: int | None = None  # of all documents, where somebody has counted
    paired: bool = False  # preference pairs: a row is one text of a pair

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, with end tokens; None if not known.

        Of conversations they are not: nobody has counted the bytes of those that have a loss.
        """
        if self.text_bytes is None or self.masked:
            return None
        return self.text_bytes / self.starts[-1]

    def __str__(self) -> str:
        coding = "one a byte" if self.tokenizer == BYTES else f"by {self.tokenizer}"
        token = "end-of-document token"
        end = f"no {token}" if self.end is None else f"{token} {self.end}"
        documents = sum(len(shard.begins) for shard in self.shards)
        word = "preference pairs" if self.paired else "documents"
        return f"{self.name}: {self.starts[-1]:,} tokens in {documents:,} {word}, {coding}, {end}"

    @cached_property
    def starts(self) -> list[int]:
        """Index of each shard's first token in the corpus; the last entry is its length."""
        return list(accumulate((len(shard.tokens) for shard in self.shards), initial=0))

    @property
    def masked(self) -> bool:
        """Whether it has conversations, with a mask of the tokens that have a loss."""
        return self.shards[0].mask is not None

    def num_rows(self, seq: int) -> int:
        """Number of rows of one epoch."""
        if self.paired:
            return len(_pair_rows(self))
        return len(_whole_rows(self, seq)) if self.masked else (self.starts[-1] - 1) // seq

    @property
    def longest(self) -> int:
        """Tokens of the longest text of a pair."""
        first, end = _pair_rows(self).T
        return int((end - first).max())

    def read(self, row: int, into: TokenRows) -> None:
        """Fill one row of flags that are all False before.

        It copies slices: the index list of one gather would be larger than the tokens.
        """
        size = into.tokens.size
        start, stop = row * (size - 1), row * (size - 1) + size
        if self.paired:
            start, stop = _pair_rows(self)[row].tolist()
            stop, into.begins[0] = min(stop, start + size), True
        elif self.masked:
            start, stop = _whole_rows(self, size - 1)[row].tolist()
        number, done = bisect_right(self.starts, start) - 1, 0
        while done < stop - start:
            shard, first = self.shards[number], start + done - self.starts[number]
            part = slice(first, first + stop - start - done)
            tokens = shard.tokens[part]
            span = slice(done, done + len(tokens))
            into.tokens[span] = tokens
            low, high = np.searchsorted(shard.begins, (first, first + len(tokens)))
            into.begins[shard.begins[low:high] - first + done] = True
            if shard.mask is not None and self.loss == "assistant":
                into.silent[span] = shard.mask[part] & 1 == 0
            number, done = number + 1, done + len(tokens)
        if done < size:  # filled up with a document of its own that has no loss
            into.tokens[done:], into.begins[done], into.silent[done:] = 0, True, True


@cache
def _pair_rows(corpus: Corpus) -> NDArray[np.int64]:
    """First token and end of each text of the pairs: chosen, rejected, chosen, rejected, …"""
    spans: list[NDArray[np.int64]] = []
    for shard, start in zip(corpus.shards, corpus.starts, strict=False):
        assert shard.mask is not None
        sizes = np.add.reduceat((shard.mask < REJECTED).astype(np.int64), shard.begins)
        ends = np.append(shard.begins[1:], len(shard.tokens))
        middles = shard.begins + sizes
        bounds = np.stack([shard.begins, middles, middles, ends], 1) + start
        spans.append(bounds.reshape(-1, 2))
    return np.concatenate(spans)


@cache
def _whole_rows(corpus: Corpus, seq: int) -> NDArray[np.int64]:
    """First token and end of each row of conversations: as many as fit, none of them cut.

    One that is longer than a row is a row of its own, and loses its end.
    """
    shards = zip(corpus.shards, corpus.starts, strict=False)
    firsts = np.concatenate([shard.begins + start for shard, start in shards])
    ends = np.append(firsts[1:], corpus.starts[-1])
    rows, at = list[tuple[int, int]](), 0
    while at < len(firsts):
        most = int(firsts[at]) + seq + 1
        after = max(at + 1, int(np.searchsorted(ends, most, side="right")))
        rows.append((int(firsts[at]), min(most, int(ends[after - 1]))))
        at = after
    return np.array(rows, np.int64)


@dataclass(frozen=True)
class Synthetic:
    """Random tokens for benchmarks: a function of seed, row and position."""

    seed: int
    vocab: int
    name: str = "synthetic"

    def __str__(self) -> str:
        return f"random tokens below {self.vocab:,}, each row one document"

    def num_rows(self, seq: int) -> int:
        """A number of rows beyond any training."""
        return _DRAWN_ROWS

    def read(self, row: int, into: TokenRows) -> None:
        """Fill one row, from raw random bits: only these are the same in every version of numpy."""
        tokens = into.tokens
        bits = np.random.Philox(key=np.array([self.seed % 2**64, row], np.uint64))
        drawn = bits.random_raw(len(tokens) // 2 + 1).astype("<u8", copy=False).view("<u4")
        wide = tokens.view(np.uint64)
        np.multiply(drawn[: len(tokens)], np.uint64(self.vocab), out=wide, dtype=np.uint64)
        np.right_shift(wide, np.uint64(32), out=wide)


def is_paired(corpus: Corpus | Synthetic) -> bool:
    """Whether the corpus has preference pairs."""
    return isinstance(corpus, Corpus) and corpus.paired


RowPlace = tuple[Corpus | Synthetic, int]
"""A corpus, and the number of a row there."""


def read_rows(places: Sequence[RowPlace], seq: int) -> TokenRows:
    """Read rows by corpus and number."""
    sizes = (len(places), seq + 1)
    rows = TokenRows(np.empty(sizes, np.int64), *(np.zeros(sizes, np.bool_) for _ in range(2)))
    for number, (corpus, row) in enumerate(places):
        corpus.read(row, TokenRows(*(array[number] for array in rows)))
    return rows


@dataclass(frozen=True)
class RowOrder:
    """Order of rows: a new permutation in each epoch.

    The row of one sample is computed without a list of the others.
    """

    seed: int
    num_rows: int

    def row(self, sample: int) -> int:
        """Row of a sample, by its number from the start of the training."""
        epoch, index = divmod(sample, self.num_rows)
        half = max(1, ((self.num_rows - 1).bit_length() + 1) // 2)
        while True:
            # A permutation of the numbers of 2 · half bits.
            left, right = index >> half, index & ((1 << half) - 1)
            for number in range(_ROUNDS):
                text = f"{self.seed} {epoch} {number} {right}".encode()
                drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
                left, right = right, left ^ (drawn & ((1 << half) - 1))
            index = left << half | right
            if index < self.num_rows:  # else repeat: a permutation comes back into the range
                return index


def from_bytes(name: str, documents: list[bytes], vocab: int) -> Corpus:
    """Corpus whose tokens are the bytes of documents."""
    if vocab < NUM_BYTES:
        raise FivefoldError(
            f"bytes are {NUM_BYTES} tokens, and the model knows {vocab}: use a vocabulary of at "
            f"least {NUM_BYTES}, as in --set vocab={NUM_BYTES}"
        )
    end = NUM_BYTES if vocab > NUM_BYTES else None
    arrays = [byte_tokens(text, end) for text in documents if text]
    begins = np.cumsum([0, *(len(array) for array in arrays[:-1])], dtype=np.int64)
    size = sum(map(len, documents))
    return Corpus(name, (Shard(np.concatenate(arrays), begins),), end, text_bytes=size)


def byte_tokens(text: bytes, end: int | None) -> NDArray[np.uint16]:
    """Bytes of a document, then the end token, if any."""
    last = [] if end is None else [np.array([end], np.uint16)]
    return np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), *last])


@cache
def standard_library(vocab: int) -> Corpus:
    """Source code of Python's standard library, present on every machine.

    Cached, so that ranks that are forked later have it too.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    documents = read_sources(folder)
    if not documents:
        raise FivefoldError(
            f"no source files in {folder}: use a Python that came with its standard library"
        )
    return from_bytes("Python's standard library", documents, vocab)


@cache
def rhymes(vocab: int) -> Corpus:
    """Nursery rhymes of the package: a tiny model learns them in a minute."""
    text = (Path(__file__).parents[1] / "presets" / "rhymes.txt").read_bytes()
    return from_bytes("nursery rhymes", [text], vocab)


def read_sources(folder: Path, most_bytes: int = MOST_BYTES) -> list[bytes]:
    """Read the Python files of a folder by name, up to `most_bytes` in all, without tests and
    installed packages."""
    documents: list[bytes] = []
    for name in sorted(_names(folder)):
        documents.append((folder / name).read_bytes())
        most_bytes -= len(documents[-1])
        if most_bytes < 0:
            return documents[:-1]
    return documents


def _names(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [child for child in folders if child not in _SKIPPED]
        inside = Path(root).relative_to(folder)
        yield from ((inside / file).as_posix() for file in files if file.endswith(".py"))

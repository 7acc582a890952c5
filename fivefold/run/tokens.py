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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import FivefoldError

NUM_BYTES = 256  # the tokens that bytes are; the next one ends a document where there is room
MOST_BYTES = 16 << 20
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_ROUNDS = 4  # of a Feistel network: enough for an order that looks like none


class Rows(NamedTuple):
    """Rows of seq + 1 tokens; each token should be predicted by those in front of it."""

    tokens: NDArray[np.int64]  # (rows, seq + 1)
    begins: NDArray[np.bool_]  # (rows, seq + 1): whether a document begins here


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, one behind the other; both arrays may be memory-mapped files."""

    name: str
    tokens: NDArray[np.uint16]
    begins: NDArray[np.int64]  # places of the documents' first tokens, in rising order
    end: int | None  # the token behind each document; None where the vocabulary has no room

    def __str__(self) -> str:
        end = (
            "no end-of-document token, for which the vocabulary has no room"
            if self.end is None
            else f"end-of-document token {self.end}"
        )
        return (
            f"{self.name}: {len(self.tokens):,} tokens in {len(self.begins):,} documents, one a "
            f"byte, {end}"
        )

    def num_rows(self, seq: int) -> int:
        """Rows of one epoch."""
        return (len(self.tokens) - 1) // seq

    def rows(self, numbers: list[int], seq: int) -> Rows:
        """These rows of an epoch."""
        places = np.array(numbers, np.int64)[:, None] * seq + np.arange(seq + 1)
        after = np.searchsorted(self.begins, places, side="right") - 1
        return Rows(self.tokens[places].astype(np.int64), self.begins[after] == places)


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


@dataclass(frozen=True)
class Source:
    """A corpus cut into rows for a training: the samples of any step."""

    corpus: Corpus
    order: Order
    seq: int

    @classmethod
    def of(cls, corpus: Corpus, seq: int, seed: int) -> Source:
        """Refuses a corpus that does not fill one row."""
        num_rows = corpus.num_rows(seq)
        if num_rows < 1:
            raise FivefoldError(
                f"{corpus.name} has {len(corpus.tokens):,} tokens, and a row takes {seq + 1:,}: "
                "give a smaller --seq"
            )
        return cls(corpus, Order(seed, num_rows), seq)

    def step(self, number: int, global_batch: int) -> Rows:
        """The samples of a step, from 0, in the order of their numbers."""
        first = number * global_batch
        numbers = [self.order.row(sample) for sample in range(first, first + global_batch)]
        return self.corpus.rows(numbers, self.seq)


def from_bytes(name: str, documents: list[bytes], vocab: int) -> Corpus:
    """A corpus whose tokens are the bytes of its documents."""
    if vocab < NUM_BYTES:
        raise FivefoldError(
            f"bytes are {NUM_BYTES} tokens, and the model knows {vocab}: use a vocabulary of at "
            f"least {NUM_BYTES}, as in --set vocab={NUM_BYTES}"
        )
    end = NUM_BYTES if vocab > NUM_BYTES else None
    behind = [] if end is None else [np.array([end], np.uint16)]
    arrays = [
        np.concatenate([np.frombuffer(text, np.uint8).astype(np.uint16), *behind])
        for text in documents
        if text
    ]
    lengths = [len(each) for each in arrays]
    begins = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return Corpus(name, np.concatenate(arrays), begins, end)


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

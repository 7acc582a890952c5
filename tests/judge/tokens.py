"""Which tokens a step reads, as docs/tokens.md says it: corpora, mixtures, the order of rows."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Row(NamedTuple):
    """`seq + 1` tokens, and whether a document begins at each."""

    tokens: Ids
    begins: Flags


class Corpus(Protocol):
    def num_rows(self, seq: int) -> int: ...
    def row(self, number: int, seq: int) -> Row: ...


@dataclass(frozen=True)
class Text:
    """One long line of tokens."""

    tokens: Ids
    begins: Flags

    def num_rows(self, seq: int) -> int:
        return (len(self.tokens) - 1) // seq

    def row(self, number: int, seq: int) -> Row:
        part = slice(number * seq, (number + 1) * seq + 1)
        return Row(self.tokens[part], self.begins[part])


@dataclass(frozen=True)
class Random:
    """Tokens from 32 random bits each; every row has a Philox generator of its own."""

    seed: int
    vocab: int

    def num_rows(self, seq: int) -> int:
        return 2**40

    def row(self, number: int, seq: int) -> Row:
        raw = np.random.Philox(key=np.array([self.seed, number], np.uint64)).random_raw(seq + 1)
        halves = [int(word) >> shift & 0xFFFFFFFF for word in raw for shift in (0, 32)]
        drawn = [half * self.vocab // 2**32 for half in halves[: seq + 1]]
        return Row(np.array(drawn), np.zeros(seq + 1, np.bool_))


def read_folder(folder: Path) -> Text:
    """All shards that the index lists, one after another."""
    index: dict[str, Any] = json.loads((folder / "index.json").read_text())
    dtype = {"uint16": "<u2", "uint32": "<u4"}[index["meaning"]["dtype"]]
    tokens, begins = list[Ids](), list[Flags]()
    for shard in index["shards"]:
        tokens.append(np.fromfile(folder / shard["tokens"]["name"], dtype).astype(np.int64))
        begins.append(np.zeros(len(tokens[-1]), np.bool_))
        begins[-1][np.fromfile(folder / shard["begins"]["name"], "<i8")] = True
    return Text(np.concatenate(tokens), np.concatenate(begins))


@cache
def standard_library(vocab: int) -> Text:
    """The bytes of Python's own sources in the order of their names, at most 16 MiB; token 256 ends
    each file if the vocabulary has it."""
    root, names = Path(sysconfig.get_path("stdlib")), list[str]()
    for folder, inner, files in os.walk(root):
        left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        inner[:] = [each for each in inner if each not in left_out]
        found = [Path(folder, each).relative_to(root) for each in files if each.endswith(".py")]
        names += [each.as_posix() for each in found]
    tokens, begins, left = list[Ids](), list[Flags](), 16 << 20
    for name in sorted(names):
        text = (root / name).read_bytes()
        left -= len(text)
        if left < 0:
            break
        if text:
            end = [256] if vocab > 256 else []
            tokens.append(np.array([*text, *end]))
            begins.append(np.arange(len(tokens[-1])) == 0)
    return Text(np.concatenate(tokens), np.concatenate(begins))


def open_corpus(name: str, vocab: int, seed: int) -> Corpus:
    if name == "stdlib":
        return standard_library(vocab)
    return Random(seed, vocab) if name == "synthetic" else read_folder(Path(name))


def shuffle(seed: int, epoch: int, index: int, count: int) -> int:
    """Where a Feistel network of four rounds sends a number below `count`: over an even number of
    bits, again and again until the result is below `count`."""
    bits = max(1, -(-(count - 1).bit_length() // 2))
    low = 2**bits - 1
    while True:
        left, right = index // 2**bits, index % 2**bits
        for number in range(4):
            digest = hashlib.blake2b(b"%d %d %d %d" % (seed, epoch, number, right), digest_size=8)
            left, right = right, left ^ int(digest.hexdigest(), 16) & low
        index = left * 2**bits + right
        if index < count:
            return index


class Samples:
    """The samples of a training one after another, and the rows of its evaluation."""

    def __init__(self, data: str, vocab: int, seq: int, seed: int) -> None:
        self.seq, self.seed = seq, seed
        words = [word.rpartition(":") for word in shlex.split(data)]
        if len(words) == 1:
            words = [(data, ":", "1")]
        self.corpora = [open_corpus(name, vocab, seed) for name, _, _ in words]
        self.weights = [Fraction(weight) for _, _, weight in words]
        rows = [corpus.num_rows(seq) for corpus in self.corpora]
        self.num_held_out = [max(1, number // 128) if number > 1 else 0 for number in rows]
        self.num_trained = [a - b for a, b in zip(rows, self.num_held_out, strict=True)]

    def __iter__(self) -> Iterator[Row]:
        taken = [0] * len(self.corpora)
        for part in self._parts():
            epoch, index = divmod(taken[part], self.num_trained[part])
            taken[part] += 1
            number = shuffle(self.seed, epoch, index, self.num_trained[part])
            yield self.corpora[part].row(number, self.seq)

    def _parts(self) -> Iterator[int]:
        """The corpus of each sample: of the first n that come to a corpus it takes round(n times
        its share), and leaves the others to the next ones."""
        passed = [0] * len(self.corpora)
        while True:
            for part, weight in enumerate(self.weights):
                share = weight / sum(self.weights[part:])
                before, passed[part] = passed[part], passed[part] + 1
                if _round(passed[part] * share) > _round(before * share):
                    yield part
                    break

    def held_out(self, most: int) -> list[Row]:
        """The first of the last rows, from the corpus that is furthest below its share."""
        taken, rows = [0] * len(self.corpora), list[Row]()
        while len(rows) < most:
            left = [i for i, have in enumerate(self.num_held_out) if taken[i] < have]
            if not left:
                break
            part = min(left, key=lambda i: (taken[i] + 1) / self.weights[i])
            rows.append(self.corpora[part].row(self.num_trained[part] + taken[part], self.seq))
            taken[part] += 1
        return rows


def _round(number: Fraction) -> int:
    """To the nearest, and halves up."""
    return (2 * number.numerator + number.denominator) // (2 * number.denominator)

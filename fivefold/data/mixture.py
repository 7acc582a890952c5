"""A weighted mixture of corpora: the samples of a training, and rows held out for evaluation.

The corpus and row of a sample are a pure function of the seed and the sample's number, computed for
this sample alone. Shares are exact: the samples of a corpus among the first n differ from its share
of n by less than the number of corpora.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from fivefold.core import FivefoldError
from fivefold.core.model import BYTES, TokenizerId
from fivefold.core.plan import RHYMES, STANDARD_LIBRARY, SYNTHETIC, LossOn, parse_mixture
from fivefold.data.rows import (
    SIDES,
    Corpus,
    RowOrder,
    RowPlace,
    Synthetic,
    TokenRows,
    is_paired,
    read_rows,
    rhymes,
    standard_library,
)
from fivefold.data.shards import open_corpus, read_index

_ROWS_PER_HELD_OUT = 128  # one row in so many is held out


@dataclass(frozen=True)
class Shares:
    """Assigns samples to parts by integer weights, from the sample's number alone."""

    weights: tuple[int, ...]

    def draw(self, sample: int) -> tuple[int, int]:
        """Part of a sample, and number of earlier samples of that part.

        The first part takes round(n · share) of the first n samples. The remaining samples are
        numbered anew, and the other parts divide them in the same way.
        """
        number, total_weight = sample, sum(self.weights)
        for part, weight in enumerate(self.weights[:-1]):
            before, after = (
                (2 * count * weight + total_weight) // (2 * total_weight)
                for count in (number, number + 1)
            )
            if after > before:
                return part, before
            number, total_weight = number - before, total_weight - weight
        return len(self.weights) - 1, number


@dataclass(frozen=True)
class CorpusShare:
    """A corpus, the order of its rows in training, and the number of last rows held out."""

    corpus: Corpus | Synthetic
    order: RowOrder
    num_held_out: int

    @classmethod
    def of(cls, corpus: Corpus | Synthetic, seq: int, seed: int, together: int = 1) -> CorpusShare:
        """Share of a corpus; refuses one without a full row. Of a single row, none is held out. So
        many rows stay `together`, and are counted as one."""
        num_rows = corpus.num_rows(seq)
        if num_rows < 1:
            raise FivefoldError(
                f"{corpus} is too short: a row takes {seq + 1:,} tokens; give a smaller --seq or "
                "more text"
            )
        num_rows //= together
        num_held_out = max(1, num_rows // _ROWS_PER_HELD_OUT) if num_rows > 1 else 0
        return cls(corpus, RowOrder(seed, num_rows - num_held_out), num_held_out)


@dataclass(frozen=True)
class Source:
    """Samples of a training, and held-out rows."""

    parts: tuple[CorpusShare, ...]
    shares: Shares
    seq: int
    together: int = 1  # rows that follow one another in every order: those of a pair

    @classmethod
    def of(cls, corpus: Corpus | Synthetic, seq: int, seed: int) -> Source:
        """Source of a single corpus."""
        return cls((CorpusShare.of(corpus, seq, seed),), Shares((1,)), seq)

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.parts[0].corpus)
        total = sum(self.shares.weights)
        pairs = zip(self.shares.weights, self.parts, strict=True)
        return "; ".join(f"{weight / total:.3g} of {part.corpus}" for weight, part in pairs)

    @property
    def tokenizer(self) -> TokenizerId | None:
        """Common tokenizer of the corpora; None for random tokens."""
        corpora = [part.corpus for part in self.parts if isinstance(part.corpus, Corpus)]
        return TokenizerId(corpora[0].tokenizer, corpora[0].digest) if corpora else None

    @property
    def folders(self) -> list[Path]:
        """Folders of the corpora that are not bytes."""
        corpora = [part.corpus for part in self.parts if isinstance(part.corpus, Corpus)]
        return [Path(corpus.name) for corpus in corpora if corpus.tokenizer != BYTES]

    def source_row(self, sample: int) -> tuple[str, int]:
        """Name of a sample's corpus, and its row there."""
        corpus, row = self.row_place(sample)
        return corpus.name, row

    def samples(self, numbers: Iterable[int]) -> TokenRows:
        """Read samples by their numbers from the start of the training."""
        return read_rows([self.row_place(number) for number in numbers], self.seq)

    def held_out(self, most: int) -> list[RowPlace]:
        """Up to so many held-out rows; empty if no corpus has any.

        Each row is from the corpus that is furthest below its share and has rows left.
        """
        taken, places = [0] * len(self.parts), list[RowPlace]()
        while len(places) < most:
            left = [i for i, part in enumerate(self.parts) if taken[i] < part.num_held_out]
            if not left:
                break
            i = min(left, key=lambda i: Fraction(taken[i] + 1, self.shares.weights[i]))
            part = self.parts[i]
            first = (part.order.num_rows + taken[i]) * self.together
            places += [(part.corpus, first + offset) for offset in range(self.together)]
            taken[i] += 1
        return places

    def row_place(self, sample: int) -> RowPlace:
        """Corpus of a sample, and its row there."""
        sample, side = divmod(sample, self.together)
        number, index = self.shares.draw(sample)
        part = self.parts[number]
        return part.corpus, part.order.row(index) * self.together + side


def tokenizers_of(spec: str) -> dict[str, TokenizerId]:
    """Tokenizers of the corpora of a `data` key, except random tokens. Checked before the
    vocabulary: another tokenizer is why a model does not know a token."""
    tokenizers: dict[str, TokenizerId] = {}
    for name in parse_mixture(spec):
        if name in (STANDARD_LIBRARY, RHYMES):
            tokenizers[name] = TokenizerId(BYTES, BYTES)
        elif name != SYNTHETIC:
            meaning = read_index(Path(name)).meaning
            tokenizers[name] = TokenizerId(meaning.tokenizer, meaning.fingerprint)
    return tokenizers


def open_source(
    spec: str, vocab: int, seq: int, seed: int, *, verify: bool = False, loss: LossOn = "assistant"
) -> Source:
    """Open the source of a `data` key: one corpus, or several with weights.

    `verify` checks the checksum of every token file; `loss` is on which tokens of conversations.
    """
    weights = parse_mixture(spec)
    corpora = [_open(name, vocab, seed, verify) for name in weights]
    corpora = [
        replace(data_source, loss=loss) if isinstance(data_source, Corpus) else data_source
        for data_source in corpora
    ]
    # With two tokenizers in one training, one token would mean two things.
    tokenized = [corpus for corpus in corpora if isinstance(corpus, Corpus)]
    for other in tokenized[1:]:
        if other.digest != tokenized[0].digest:
            first, second = (TokenizerId(e.tokenizer, e.digest) for e in (tokenized[0], other))
            raise FivefoldError(
                f"{tokenized[0].name} has tokens of one tokenizer ({first}) and {other.name} of "
                f"another ({second}), so that one token means two things: tokenize both with one "
                "tokenizer"
            )
    together = SIDES if any(is_paired(data_source) for data_source in corpora) else 1
    common = math.lcm(*(weight.denominator for weight in weights.values()))
    return Source(
        tuple(CorpusShare.of(corpus, seq, seed, together) for corpus in corpora),
        Shares(tuple(int(weight * common) for weight in weights.values())),
        seq,
        together,
    )


def _open(name: str, vocab: int, seed: int, verify: bool) -> Corpus | Synthetic:
    if name == STANDARD_LIBRARY:
        return standard_library(vocab)
    if name == RHYMES:
        return rhymes(vocab)
    if name == SYNTHETIC:
        return Synthetic(seed, vocab)
    return open_corpus(Path(name), vocab, verify=verify)

"""What may not change the text of a training or the loss of an evaluation: layouts, sizes of
microbatches, restarts, the order of rows, and rows without a loss."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.batch import Batch
from fivefold.core.model.presets import load, with_overrides
from fivefold.data.mixture import CorpusShare, Shares, Source
from fivefold.data.rank_reader import RankReader
from fivefold.data.rows import RowPlace, TokenRows
from fivefold.model.batch import NOT_COUNTED
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import init_weights
from tests.selection import salt

SEQ, CPU = 8, torch.device("cpu")
WEIGHTS = (5, 3, 1)


@dataclass(frozen=True)
class Numbered:
    """A corpus whose first token of a row is the number of the row, and of the corpus."""

    number: int
    num: int
    silent_every: int = 0  # rows of which no token has a loss; 0: none
    paired: bool = False
    masked: bool = True

    def num_rows(self, seq: int) -> int:
        return self.num

    def read(self, row: int, into: TokenRows) -> None:
        draw = np.random.default_rng((self.number, row))
        into.tokens[:] = draw.integers(0, 256, len(into.tokens))
        into.tokens[0], into.tokens[1] = row, self.number
        into.begins[:: 2 + row % 5] = True
        into.silent[:] = draw.random(len(into.silent)) < 0.3
        if self.silent_every and row % self.silent_every == 0:
            into.silent[:] = True


def source_of(*corpora: Numbered, seed: int = 3) -> Source:
    parts = tuple(CorpusShare.of(corpus, SEQ, seed) for corpus in corpora)  # type: ignore[arg-type]
    return Source(parts, Shares(WEIGHTS[: len(corpora)]), SEQ)


def drawn_batches(dice: random.Random, sequences: int) -> Iterator[Batch]:
    """The ways to cut a global batch, in a random order."""
    while True:
        dp, size = dice.choice((1, 2, 3, 4, 6, 8, 12)), dice.choice((1, 2, 3, 4))
        try:
            yield Batch.resolve(dp, SEQ, batch=sequences, microbatch_size=size)
        except FivefoldError:  # it does not divide the batch
            continue


def rows_read(source: Source, batch: Batch, first: int) -> list[tuple[int, ...]]:
    """Tokens and labels of the rows of a step in their global order, from all data ranks."""
    shape = (batch.microbatches, batch.dp, batch.microbatch_size)
    rows: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for dp in range(batch.dp):
        step = RankReader(source, batch, True, dp, CPU).step(first)
        for number, microbatch in enumerate(step.of(0)):
            for i in range(batch.microbatch_size):
                tokens = microbatch.tokens[i].tolist()
                rows[number, dp, i] = (*tokens, *microbatch.labels[i].tolist())
    assert len(rows) == np.prod(shape)
    return [rows[place] for place in np.ndindex(*shape)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("i", range(12))
def test_any_layouts_and_restarts_read_every_sample_once_in_one_order(i: int) -> None:
    dice = random.Random(f"{salt()}: {i}")
    sequences, num_steps = dice.choice((12, 24, 48)), 6
    source = source_of(
        *(Numbered(number, 97 + 50 * number) for number in range(dice.choice((1, 3))))
    )
    whole = Batch.resolve(1, SEQ, batch=sequences, microbatch_size=1)
    expected = [rows_read(source, whole, step * sequences) for step in range(num_steps)]
    batches = drawn_batches(dice, sequences)
    # Another layout after each restart; a restart reads its last steps again.
    step, seen = 0, set[int]()
    while step < num_steps:
        batch, last = next(batches), dice.randint(step + 1, num_steps)
        for number in range(step, last):
            assert rows_read(source, batch, number * sequences) == expected[number], (batch, number)
            seen.add(number)
        step = last if last == num_steps else dice.randint(step + 1, last)
    assert seen == set(range(num_steps))


@pytest.mark.parametrize("num_corpora", [1, 2, 3])
def test_an_epoch_has_every_row_once_and_a_mixture_its_shares(num_corpora: int) -> None:
    corpora = [Numbered(number, 40 * weight + 7) for number, weight in enumerate(WEIGHTS)]
    source = source_of(*corpora[:num_corpora])
    weights = WEIGHTS[:num_corpora]
    counts, rows = Counter[int](), Counter[tuple[int, int]]()
    for sample in range(30 * sum(weights)):
        corpus, row = source.row_place(sample)
        counts[corpus.number] += 1  # type: ignore[union-attr]
        rows[corpus.number, row] += 1  # type: ignore[union-attr]
        for number, weight in enumerate(weights):
            assert abs(counts[number] - (sample + 1) * weight / sum(weights)) < num_corpora
    assert counts == {number: 30 * weight for number, weight in enumerate(weights)}
    assert set(rows.values()) == {1}  # no epoch is over
    held_out = {(corpus.number, row) for corpus, row in source.held_out(20)}  # type: ignore[union-attr]
    assert held_out and held_out.isdisjoint(rows)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    shape = with_overrides(load("tiny"), {"layers": "1"})
    model = from_config(shape, dtype=torch.float64)
    init_weights(model, shape, 0)
    return model.eval()


def mean_loss(decoder: Decoder, batch: Batch, places: list[RowPlace]) -> float | None:
    """As an evaluation computes it, over all data ranks."""
    total = count = 0.0
    source = source_of(Numbered(0, 97))
    for dp in range(batch.dp):
        for microbatches in RankReader(source, batch, True, dp, CPU).rows(places):
            for microbatch in microbatches:
                with torch.no_grad():
                    total += float(decoder(microbatch.tokens, microbatch))
                count += int((microbatch.labels != NOT_COUNTED).sum())
    return total / count if count else None


@pytest.mark.sample(2)
@pytest.mark.parametrize("i", range(8))
def test_an_evaluation_has_one_value(decoder: Decoder, i: int) -> None:
    dice = random.Random(f"{salt()}: {i}")
    text, silent = Numbered(1, 60), Numbered(2, 60, silent_every=1)
    places: list[RowPlace] = [(text, row) for row in range(dice.randint(1, 40))]  # type: ignore[list-item]
    whole = Batch.resolve(1, SEQ, batch=1, microbatch_size=1)
    expected = mean_loss(decoder, whole, places)
    assert expected is not None
    for sequences in (12, 24):
        batch = next(drawn_batches(dice, sequences))
        unanswered: list[RowPlace] = [(silent, row) for row in range(dice.randint(1, 30))]  # type: ignore[list-item]
        for rows in (
            places,
            places[::-1],
            dice.sample(places, len(places)),
            dice.sample([*places, *unanswered], len(places) + len(unanswered)),
        ):
            assert mean_loss(decoder, batch, rows) == pytest.approx(expected, rel=1e-12)
        assert mean_loss(decoder, batch, unanswered) is None
        twice = mean_loss(decoder, batch, [*places, places[0]])
        assert twice != pytest.approx(expected, rel=1e-9) or len(places) == 1

"""Text as rows: an order that is a function of its number, and documents that stay themselves."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.plan.plan import parse_mixture
from fivefold.data.mixture import CorpusShare, Shares, Source, open_source
from fivefold.data.rows import (
    Corpus,
    RowOrder,
    Shard,
    Synthetic,
    TokenRows,
    from_bytes,
    read_rows,
    read_sources,
    standard_library,
)

TEXTS = [b"def f():\n", b"", b"x = 1\n", b"import os\nimport sys\n"]


def joined(vocab: int) -> Corpus:
    return from_bytes("three files", TEXTS, vocab)


def counting(name: str, num_tokens: int, first: int = 0) -> Corpus:
    """A corpus whose every token is known by its place."""
    tokens = np.arange(first, first + num_tokens, dtype=np.uint32)
    return Corpus(name, (Shard(tokens, np.array([0])),), end=None)


def mixed(*shares: tuple[int, Corpus | Synthetic], seq: int = 4, seed: int = 0) -> Source:
    parts = tuple(CorpusShare.of(corpus, seq, seed) for _, corpus in shares)
    return Source(parts, Shares(tuple(weight for weight, _ in shares)), seq)


def same(one: TokenRows, other: TokenRows) -> bool:
    return all(a.tolist() == b.tolist() for a, b in zip(one, other, strict=True))


def step_of(source: Source, number: int, size: int) -> TokenRows:
    """The samples of a step of that size."""
    return source.samples(range(number * size, (number + 1) * size))


def held_out(source: Source, most: int) -> np.ndarray:
    """The tokens of rows that are held out."""
    return read_rows(source.held_out(most), source.seq).tokens


@settings(max_examples=40)
@given(st.integers(1, 500), st.integers(0, 2**40), st.integers(0, 5))
def test_every_row_comes_once_an_epoch(num_rows: int, seed: int, epoch: int) -> None:
    order = RowOrder(seed, num_rows)
    rows = [order.row(epoch * num_rows + place) for place in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))


def test_the_order_is_a_function_of_seed_and_sample() -> None:
    order = RowOrder(3, 1000)
    first, second = ([order.row(epoch * 1000 + n) for n in range(1000)] for epoch in (0, 1))
    assert [RowOrder(3, 1000).row(n) for n in reversed(range(1000))] == first[::-1]
    others = (second, [RowOrder(4, 1000).row(n) for n in range(1000)], list(range(1000)))
    for other in others:  # a random order leaves one of 1000 in its place
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 10


def test_the_order_stays_what_it_is() -> None:
    """A training that is resumed with a later version must go on in the same order."""
    found = [RowOrder(0, 1000).row(n) for n in range(8)]
    assert found == [501, 122, 42, 319, 897, 855, 632, 893]


def test_bytes_are_tokens_and_documents_begin_where_they_do() -> None:
    corpus = joined(256)
    (shard,) = corpus.shards
    assert bytes(shard.tokens.astype(np.uint8)) == b"".join(TEXTS)
    assert shard.begins.tolist() == [0, 9, 15] and corpus.end is None
    assert str(corpus).endswith("36 tokens in 3 documents, one a byte, no end-of-document token")


def test_a_token_ends_documents_where_there_is_room() -> None:
    corpus = joined(257)
    (shard,) = corpus.shards
    assert shard.tokens[[9, 16, 38]].tolist() == [256] * 3 and len(shard.tokens) == 39
    assert shard.begins.tolist() == [0, 10, 17] and corpus.end == 256
    assert str(corpus).endswith("39 tokens in 3 documents, one a byte, end-of-document token 256")


@pytest.mark.parametrize("cuts", [[], [9], [9, 15]], ids=str)
@pytest.mark.parametrize("seq", [1, 4, 7, 35])
def test_rows_share_one_token_and_leave_none_out(seq: int, cuts: list[int]) -> None:
    (whole,) = joined(256).shards
    places = np.split(whole.begins, np.searchsorted(whole.begins, cuts))
    starts = [0, *cuts]
    shards = tuple(
        Shard(tokens, begins - start)
        for tokens, begins, start in zip(np.split(whole.tokens, cuts), places, starts, strict=True)
    )
    corpus = Corpus("cut", shards, end=None)
    rows = read_rows([(corpus, row) for row in range(corpus.num_rows(seq))], seq)
    assert rows.tokens.shape == (35 // seq, seq + 1)
    read, predicted = rows.tokens[:, :-1].ravel(), rows.tokens[:, 1:].ravel()
    assert read.tolist() == whole.tokens[: read.size].tolist()
    assert predicted.tolist() == whole.tokens[1 : read.size + 1].tolist()
    begins = np.isin(np.arange(whole.tokens.size), whole.begins)
    assert rows.begins[:, :-1].ravel().tolist() == begins[: read.size].tolist()
    assert rows.begins[:, 1:].ravel().tolist() == begins[1 : read.size + 1].tolist()


def test_samples_do_not_depend_on_the_size_of_a_step() -> None:
    source, again = (
        mixed((2, joined(256)), (1, counting("numbers", 50)), seed=7) for _ in range(2)
    )
    small = np.concatenate([step_of(source, number, 2).tokens for number in range(12)])
    large = np.concatenate([step_of(source, number, 6).tokens for number in range(4)])
    assert small.tolist() == large.tolist() == source.samples(range(24)).tokens.tolist()
    assert same(step_of(again, 3, 6), step_of(source, 3, 6))  # alone, and in a run


def test_one_corpus_is_read_in_its_order_and_its_last_rows_are_held_out() -> None:
    source = Source.of(counting("numbers", 4 * 300 + 1), seq=4, seed=3)
    drawn = source.samples(range(298)).tokens[:, 0] // 4
    assert drawn.tolist() == [RowOrder(3, 298).row(sample) for sample in range(298)]
    assert sorted(drawn.tolist()) == list(range(298))
    assert [source.source_row(sample)[1] for sample in range(298)] == drawn.tolist()
    assert held_out(source, 1).tolist() == [[1192, 1193, 1194, 1195, 1196]]
    assert (held_out(source, 9)[:, 0] // 4).tolist() == [298, 299]


def test_the_smallest_corpora_hold_out_one_row_or_none() -> None:
    source = Source.of(counting("two rows", 9), seq=4, seed=0)
    assert held_out(source, 5).shape == (1, 5)
    source = Source.of(counting("one row", 5), seq=4, seed=0)
    assert held_out(source, 5).shape == (0, 5)
    assert source.samples(range(3)).tokens.tolist() == [[0, 1, 2, 3, 4]] * 3


@settings(max_examples=60)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(0, 10**12))
def test_shares_are_exact_and_every_index_comes_in_turn(weights: list[int], first: int) -> None:
    shares = Shares(tuple(weights))
    drawn = [shares.draw(sample) for sample in range(first, first + 200)]
    for part, weight in enumerate(weights):
        indices = [index for which, index in drawn if which == part]
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        share = Fraction(weight, sum(weights))
        for sample, (which, index) in enumerate(drawn, first):
            if which == part:
                assert abs(index - sample * share) < len(weights)


def test_whole_shares_come_whole_in_every_step() -> None:
    shares = Shares((7, 2, 1))
    for step in range(5):
        parts = [shares.draw(sample)[0] for sample in range(step * 10, step * 10 + 10)]
        assert [parts.count(part) for part in range(3)] == [7, 2, 1]
    drawn = [shares.draw(sample) for sample in range(5)]  # which no version may change
    assert drawn == [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3)]


def test_a_mixture_reads_every_row_of_each_corpus_once_an_epoch() -> None:
    few, many = counting("few", 4 * 11 + 1), counting("many", 4 * 41 + 1, first=1000)
    source = mixed((1, few), (3, many), seed=5)
    places = [source.source_row(sample) for sample in range(400)]
    for name, num_rows in (("few", 10), ("many", 40)):
        rows = [row for which, row in places if which == name]
        for epoch in range(len(rows) // num_rows):
            part = rows[epoch * num_rows : (epoch + 1) * num_rows]
            assert sorted(part) == list(range(num_rows))
    firsts = source.samples(range(400)).tokens[:, 0]
    found = [
        ("few", token // 4) if token < 1000 else ("many", (token - 1000) // 4) for token in firsts
    ]
    assert found == places


def test_rows_are_held_out_in_proportion_as_long_as_there_are_some() -> None:
    few, many = counting("few", 4 * 300 + 1), counting("many", 4 * 2000 + 1, first=10_000)
    source = mixed((1, few), (2, many))
    firsts = held_out(source, 6)[:, 0]
    assert sum(token < 10_000 for token in firsts) == 2
    firsts = held_out(source, 100)[:, 0]
    assert sum(token < 10_000 for token in firsts) == 2 and len(firsts) == 2 + 2000 // 128
    drawn = {source.source_row(sample) for sample in range(3000)}
    assert not drawn & {("few", 298), ("few", 299)} and ("few", 297) in drawn
    assert max(row for name, row in drawn if name == "many") == 2000 - 15 - 1


def test_synthetic_tokens_are_a_function_of_seed_and_sample() -> None:
    source = open_source("synthetic", vocab=1000, seq=63, seed=1)
    rows = source.samples(range(64))
    assert same(source.samples(range(40, 43)), TokenRows(*(each[40:43] for each in rows)))
    assert 0 <= rows.tokens.min() < 5 and 995 < rows.tokens.max() < 1000
    assert abs(rows.tokens.mean() - 499.5) < 20 and len(np.unique(rows.tokens)) > 900
    other = open_source("synthetic", vocab=1000, seq=63, seed=2).samples(range(64))
    assert (rows.tokens == other.tokens).mean() < 0.01
    assert held_out(source, 3).shape == (3, 64)
    fixed = read_rows([(Synthetic(0, 50_000), 3)], 3).tokens[0]
    assert fixed.tolist() == [6019, 23757, 22002, 24396]  # which no version may change


def test_a_data_key_is_parsed() -> None:
    assert parse_mixture("a/b") == {"a/b": 1}
    assert parse_mixture("c:/d:0.7 'my text:.3'") == {
        "c:/d": Fraction(7, 10),
        "my text": Fraction(3, 10),
    }
    for spec, message in {
        " ": "names no corpus",
        "a b:1": "a has no weight; write a:0.5",
        "a:1 a:2": "a appears twice",
        "a:0 b:1": "a:0 has no weight above 0",
        "'a": "close the quotes",
    }.items():
        with pytest.raises(BadFile, match=message):
            parse_mixture(spec)


def test_a_source_says_what_it_is() -> None:
    source = open_source("stdlib:1 synthetic:3", vocab=256, seq=16, seed=0)
    assert str(source).startswith("0.25 of Python's standard library: ")
    assert str(source).endswith("; 0.75 of random tokens below 256, each row one document")
    assert str(open_source("stdlib", 256, 16, 0)) == str(standard_library(256))


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(FivefoldError, match="give a smaller --seq"):
        Source.of(joined(256), seq=36, seed=0)
    with pytest.raises(FivefoldError, match="the model knows 255: use a vocabulary of at least"):
        joined(255)


def test_sources_are_sorted_and_bounded(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a/z.py",
        "c.py",
        "a.txt",
        "test/t.py",
        "x/tests/t.py",
        "site-packages/s.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_sources(tmp_path) == [b"a/z.py", b"b.py", b"c.py"]
    assert read_sources(tmp_path, most_bytes=10) == [b"a/z.py", b"b.py"]
    assert read_sources(tmp_path, most_bytes=9) == [b"a/z.py"]


def test_every_machine_has_the_standard_library() -> None:
    corpus = standard_library(256)
    assert standard_library(256) is corpus  # which forked ranks inherit
    (shard,) = corpus.shards
    text = bytes(shard.tokens.astype(np.uint8))
    assert b"class OrderedDict" in text and 1_000_000 < len(text) <= 16 << 20
    assert b"import" in text and len(shard.begins) > 100


def test_text_needs_no_torch() -> None:
    modules = "fivefold.data.mixture, fivefold.data.documents, fivefold.commands.tokens"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

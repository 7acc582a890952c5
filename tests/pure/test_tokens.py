"""Text as rows: an order that is a function of its number, and documents that stay themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.run.tokens import Corpus, Order, Source, from_bytes, read_sources, standard_library

TEXTS = [b"def f():\n", b"", b"x = 1\n", b"import os\nimport sys\n"]


def joined(vocab: int) -> Corpus:
    return from_bytes("three files", TEXTS, vocab)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 500), st.integers(0, 2**40), st.integers(0, 5))
def test_every_row_comes_once_an_epoch(num_rows: int, seed: int, epoch: int) -> None:
    order = Order(seed, num_rows)
    rows = [order.row(epoch * num_rows + place) for place in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))


def test_the_order_is_a_function_of_seed_and_sample() -> None:
    order = Order(3, 1000)
    first, second = ([order.row(epoch * 1000 + n) for n in range(1000)] for epoch in (0, 1))
    assert [Order(3, 1000).row(n) for n in reversed(range(1000))] == first[::-1]
    others = (second, [Order(4, 1000).row(n) for n in range(1000)], list(range(1000)))
    for other in others:  # a random order leaves one of 1000 in its place
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 10


def test_the_order_stays_what_it_is() -> None:
    """A training that is resumed with a later version must go on in the same order."""
    found = [Order(0, 1000).row(n) for n in range(8)]
    assert found == [501, 122, 42, 319, 897, 855, 632, 893]


def test_bytes_are_tokens_and_documents_begin_where_they_do() -> None:
    corpus = joined(256)
    assert bytes(corpus.tokens.astype(np.uint8)) == b"".join(TEXTS)
    assert corpus.begins.tolist() == [0, 9, 15] and corpus.end is None
    assert "36 tokens in 3 documents" in str(corpus) and "no room" in str(corpus)


def test_a_token_ends_documents_where_there_is_room() -> None:
    corpus = joined(257)
    assert corpus.tokens[[9, 16, 38]].tolist() == [256] * 3 and len(corpus.tokens) == 39
    assert corpus.begins.tolist() == [0, 10, 17] and corpus.end == 256
    assert "end-of-document token 256" in str(corpus)


@pytest.mark.parametrize("seq", [1, 4, 7, 35])
def test_rows_share_one_token_and_leave_none_out(seq: int) -> None:
    corpus = joined(256)
    rows = corpus.rows(list(range(corpus.num_rows(seq))), seq)
    assert rows.tokens.shape == (35 // seq, seq + 1)
    read, predicted = rows.tokens[:, :-1].ravel(), rows.tokens[:, 1:].ravel()
    assert read.tolist() == corpus.tokens[: read.size].tolist()
    assert predicted.tolist() == corpus.tokens[1 : read.size + 1].tolist()
    begins = np.isin(np.arange(corpus.tokens.size), corpus.begins)
    assert rows.begins[:, :-1].ravel().tolist() == begins[: read.size].tolist()
    assert rows.begins[:, 1:].ravel().tolist() == begins[1 : read.size + 1].tolist()


def test_samples_do_not_depend_on_the_size_of_a_step() -> None:
    source = Source.of(joined(256), seq=4, seed=7)
    small = np.concatenate([source.step(number, 2).tokens for number in range(6)])
    large = np.concatenate([source.step(number, 6).tokens for number in range(2)])
    assert small.tolist() == large.tolist()
    assert len({tuple(row) for row in small[:8]}) == source.order.num_rows == 8


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
    text = bytes(corpus.tokens.astype(np.uint8))
    assert b"class OrderedDict" in text and 1_000_000 < len(text) <= 16 << 20
    assert b"import" in text and len(corpus.begins) > 100


def test_text_needs_no_torch() -> None:
    code = "import sys, fivefold.run.tokens; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

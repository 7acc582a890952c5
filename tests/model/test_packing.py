"""Edges of packing: documents that end where a row does, and both texts of a preference pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fivefold.core.layout.batch import Batch
from fivefold.data.batches import samples, samples_from_rows
from fivefold.data.conversations import parted
from fivefold.data.rows import REJECTED, Corpus, Shard, read_rows
from fivefold.model.batch import NOT_COUNTED
from fivefold.model.documents import Documents

SEQ = 4  # so that rows have five tokens


def corpus_of(*lengths: int, masked: bool = True) -> Corpus:
    """Tokens are numbered from 1, and all have a loss."""
    size = sum(lengths)
    begins = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    mask = np.ones(size, np.uint8) if masked else None
    return Corpus("c", (Shard(np.arange(1, size + 1, dtype=np.uint16), begins, mask),), None)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ((5, 2), [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]),  # fills its row to the last token
        ((2, 3, 1), [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]),  # two do
        ((2, 4), [[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]]),  # one token too many for the first row
        ((6, 1), [[1, 2, 3, 4, 5], [7, 0, 0, 0, 0]]),  # longer than a row: alone, without its end
        ((1, 6), [[1, 0, 0, 0, 0], [2, 3, 4, 5, 6]]),
    ],
    ids=str,
)
def test_conversations_fill_rows_to_the_last_token(
    lengths: tuple[int, ...], rows: list[list[int]]
) -> None:
    corpus = corpus_of(*lengths)
    assert corpus.num_rows(SEQ) == len(rows)
    found = read_rows([(corpus, number) for number in range(len(rows))], SEQ)
    assert found.tokens.tolist() == rows
    assert found.silent.tolist() == [[token == 0 for token in row] for row in rows]
    firsts = set(np.cumsum([1, *lengths[:-1]]).tolist())
    padding = [row.index(0) if 0 in row else None for row in rows]
    wanted = [
        [token in firsts or place == pad for place, token in enumerate(row)]
        for row, pad in zip(rows, padding, strict=True)
    ]
    assert found.begins.tolist() == wanted


def test_a_document_that_begins_with_the_last_token_of_a_row_begins_in_both_rows() -> None:
    """The token is predicted in one row and read in the next. Nothing predicts it."""
    corpus = corpus_of(4, 5, masked=False)
    assert corpus.num_rows(SEQ) == 2
    rows = read_rows([(corpus, 0), (corpus, 1)], SEQ)
    assert rows.begins.tolist() == [[True, *[False] * 3, True], [True, *[False] * 4]]
    tokens, begins = torch.from_numpy(rows.tokens), torch.from_numpy(rows.begins)
    found = samples_from_rows(Batch(1, SEQ, 1, 2), tokens, begins)
    assert found.labels.flatten(0, 2).tolist() == [[2, 3, 4, NOT_COUNTED], [6, 7, 8, 9]]
    assert found.positions.flatten(0, 2).tolist() == [[0, 1, 2, 3]] * 2


def test_a_document_of_the_last_token_alone_is_one_of_its_own() -> None:
    begins = torch.tensor([[True, False, False, True, False]])
    found = samples_from_rows(Batch(1, SEQ, 1, 1), torch.arange(5)[None], begins)
    assert found.positions.flatten().tolist() == [0, 1, 2, 0]
    assert found.labels.flatten().tolist() == [1, 2, NOT_COUNTED, 4]
    assert found.documents is not None
    documents = Documents.of(found.documents.reshape(1, SEQ))
    assert documents.starts == ((0, 3),)
    assert documents.longer_than(3, torch.device("cpu")).tolist() == [[0, 0, 0, 0]]
    assert documents.longer_than(2, torch.device("cpu")).tolist() == [[1, 1, 1, 0]]


def test_neither_text_of_a_pair_has_a_loss_on_its_prompt() -> None:
    prompt, answer = [0, 0], [1, 1]
    mask = np.array([*prompt, *answer, *(REJECTED | each for each in (*prompt, *answer, 1))])
    shard = Shard(np.arange(9, dtype=np.uint16), np.array([0]), mask.astype(np.uint8))
    corpus = Corpus("pairs", (shard,), None, paired=True)
    rows = read_rows([(corpus, 0), (corpus, 1)], SEQ)
    assert rows.tokens.tolist() == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 8]]
    assert rows.silent.tolist() == [
        [True, True, False, False, True],
        [True, True, False, False, False],
    ]


def test_earlier_turns_that_both_texts_of_a_pair_share_have_no_loss() -> None:
    spans = [(2, 4), (6, 8)]
    first, second = parted(("u:a1u:b2", list(spans)), ("u:a1u:c3", list(spans)), "row 1")
    assert first == ("u:a1u:b2", [(6, 8)]) and second == ("u:a1u:c3", [(6, 8)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (1, 2, 3)], ids=str)
def test_rows_do_not_depend_on_where_shards_end(cuts: tuple[int, ...], masked: bool) -> None:
    """Documents of 4, 1, 3 and 1 tokens: shards end where rows do, and elsewhere."""
    whole = corpus_of(4, 1, 3, 1, masked=masked)
    (one,) = whole.shards
    ends = [*(int(one.begins[each]) for each in cuts), len(one.tokens)]
    shards = tuple(
        Shard(
            one.tokens[low:high],
            one.begins[(one.begins >= low) & (one.begins < high)] - low,
            None if one.mask is None else one.mask[low:high],
        )
        for low, high in zip([0, *ends], ends, strict=False)
    )
    parts = Corpus("c", shards, None)
    count = whole.num_rows(SEQ)
    assert parts.num_rows(SEQ) == count == 2
    rows, same = (read_rows([(each, n) for n in range(count)], SEQ) for each in (whole, parts))
    assert all((a == b).all() for a, b in zip(rows, same, strict=True))


def test_a_token_that_nothing_follows_fills_no_row() -> None:
    """Each row has a token more than it predicts from."""
    rows = {size: corpus_of(size, masked=False).num_rows(SEQ) for size in (4, 5, 8, 9)}
    assert rows == {4: 0, 5: 1, 8: 1, 9: 2}


@pytest.mark.parametrize(
    ("seq", "shares"), [(4, (1, 1, 2 / 3, 1 / 3)), (5, (1, 1, 0.75, 0.5, 0.25))]
)
def test_random_rows_end_anywhere_in_their_second_half(seq: int, shares: tuple[float, ...]) -> None:
    """Of the tokens before the end of a row nine in ten have a loss, and none after it."""
    labels = samples(Batch(1, seq, 1, 20_000), 7, seed=0, step=0).labels.view(-1, seq)
    counted = (labels != NOT_COUNTED).double().mean(dim=0)
    assert counted.tolist() == pytest.approx([0.9 * share for share in shares], abs=0.015)

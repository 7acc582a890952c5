"""The batch identity: global batch = microbatch · accumulation · dp."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.batch import Batch

COUNT = st.integers(1, 64)


def test_the_identity_is_spelled_out() -> None:
    batch = Batch.resolve(4, 8192, batch=32)
    assert str(batch) == (
        "global batch 32 sequences = 1 · 8 · 4 (microbatch · accumulation · dp) = 262,144 tokens"
    )


def test_llama_3_405b_batch_is_16m_tokens() -> None:
    # Llama 3 report, Table 4: dp 128, 16 sequences of 8,192 tokens a data rank, 16M tokens a step.
    assert Batch.resolve(128, 8192, microbatches=16).tokens == 16 * 2**20


@pytest.mark.parametrize(
    ("asked", "size", "microbatches"),
    [
        ({}, 1, 1),
        ({"microbatches": 6}, 1, 6),
        ({"microbatch_size": 2}, 2, 1),
        ({"batch": 24}, 1, 12),
        ({"batch": 24, "microbatch_size": 3}, 3, 4),
        ({"batch": 24, "microbatches": 4}, 3, 4),
        ({"microbatch_size": 3, "microbatches": 4}, 3, 4),
        ({"batch": 24, "microbatch_size": 3, "microbatches": 4}, 3, 4),
    ],
)
def test_what_is_left_open_is_derived(asked: dict[str, int], size: int, microbatches: int) -> None:
    batch = Batch.resolve(2, 128, **asked)
    assert (batch.microbatch_size, batch.microbatches) == (size, microbatches)
    assert batch.sequences == size * microbatches * 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": 30}, "not a multiple of microbatch 1 · dp 4 = 4: use 28 or 32"),
        ({"batch": 3}, "not a multiple of microbatch 1 · dp 4 = 4: use 4"),
        (
            {"batch": 1001, "microbatches": 25},
            "global batch 1,001 is not a multiple of accumulation 25 · dp 4 = 100: "
            "use 1,000 or 1,100",
        ),
        (
            {"batch": 32, "microbatch_size": 2, "microbatches": 8},
            "global batch 32 is not 2 · 8 · 4 = 64 (global batch = microbatch · accumulation · dp)",
        ),
        ({"batch": 0, "microbatches": -1}, "batch=0, microbatches=-1: give whole numbers"),
    ],
)
def test_what_does_not_divide_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(FivefoldError) as refusal:
        Batch.resolve(4, 128, **asked)
    assert message in str(refusal.value)


@given(COUNT, COUNT, COUNT)
def test_any_two_give_the_third(dp: int, size: int, microbatches: int) -> None:
    whole = Batch(dp, 16, size, microbatches)
    total = whole.sequences
    assert Batch.resolve(dp, 16, batch=total, microbatch_size=size) == whole
    assert Batch.resolve(dp, 16, batch=total, microbatches=microbatches) == whole
    assert Batch.resolve(dp, 16, microbatch_size=size, microbatches=microbatches) == whole
    assert whole.tokens == 16 * total


@given(st.integers(1, 500), COUNT, COUNT)
def test_the_batches_that_a_refusal_offers_are_legal(batch: int, dp: int, size: int) -> None:
    try:
        assert Batch.resolve(dp, 16, batch=batch, microbatch_size=size).sequences == batch
    except FivefoldError as refusal:
        offered = str(refusal).split("use ")[1].replace(",", "").split(" or ")
        for one in map(int, offered):
            assert Batch.resolve(dp, 16, batch=one, microbatch_size=size).sequences == one
            assert abs(one - batch) < dp * size

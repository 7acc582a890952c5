"""The sampler: what it draws, how often, and that nothing but its key decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.generate import sampling as sampling_module
from fivefold.generate.requests import Request, Sampling
from fivefold.generate.sampling import (
    Draw,
    choose,
    draw_table,
    draw_tokens,
    filtered,
    likeliest_tokens,
    token_ranks,
    uniform,
)

LOGITS = torch.tensor([0.3, 2.0, -1.0, 2.0, 0.9, -3.0], dtype=torch.float64)


def chosen(logits: torch.Tensor, sampling: Sampling, request: str, index: int) -> tuple[int, float]:
    """The draw from one row."""
    (found,) = choose(logits[None], [Draw(sampling, request, index)])
    return found


def odds_of(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return filtered(logits[None], [sampling])[0]


def test_greedy_takes_the_first_of_equals() -> None:
    token, logprob = chosen(LOGITS, Sampling(), "a", 0)
    assert token == 1
    assert logprob == LOGITS.log_softmax(0)[1].item()


def test_random_numbers_are_a_function_of_seed_request_and_index() -> None:
    assert uniform(1, "a", 2) == uniform(1, "a", 2)
    keys = [(s, r, i) for s in range(5) for r in ("a", "b", "1", "1:2") for i in range(20)]
    assert len({uniform(*key) for key in keys}) == len(keys)
    assert uniform(1, "2:a", 3) != uniform(1, "a", 3)


def test_random_numbers_are_uniform() -> None:
    drawn = torch.tensor([uniform(0, "r", i) for i in range(20_000)], dtype=torch.float64)
    assert abs(drawn.mean().item() - 0.5) < 4 / math.sqrt(12 * 20_000)
    counts = torch.histc(drawn, 20, 0, 1)
    chi_squared = ((counts - 1000) ** 2 / 1000).sum().item()
    assert chi_squared < 45.3  # 19 degrees of freedom, p = 0.0006


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8), Sampling(1.0, 4, 0.9)),
        *(Sampling(1.0, min_p=0.15), Sampling(2.0, top_p=0.9, min_p=0.1)),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    draws = 20_000
    rows = choose(LOGITS.expand(draws, -1), [Draw(sampling, "r", i) for i in range(draws)])
    counts = Counter(token for token, _ in rows)
    for token, odds in enumerate(odds_of(LOGITS, sampling).tolist()):
        error = 4.5 * math.sqrt(odds * (1 - odds) / draws)
        assert abs(counts[token] / draws - odds) <= error, token


def test_top_k_and_top_p_by_hand() -> None:
    kept = odds_of(LOGITS, Sampling(1.0, top_k=3)).nonzero().flatten().tolist()
    assert kept == [1, 3, 4]
    odds = LOGITS.softmax(0)
    both = (odds[1] + odds[3]).item()
    for top_p, expected in [(1e-9, [1]), (both - 1e-6, [1, 3]), (both + 1e-6, [1, 3, 4])]:
        found = odds_of(LOGITS, Sampling(1.0, top_p=top_p))
        assert found.nonzero().flatten().tolist() == expected
        torch.testing.assert_close(found.sum(), torch.tensor(1.0, dtype=torch.float64))
    first = odds_of(LOGITS, Sampling(1.0, top_k=2, top_p=0.5))  # of the two, renormalised
    assert first.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_p", [0.0, 1e-9, 0.05, 0.3, 0.35, 0.9, 1.0])
def test_min_p_by_hand(min_p: float, temperature: float) -> None:
    odds = (LOGITS / temperature).softmax(0)
    allowed = odds >= min_p * odds.max()
    expected = odds * allowed / (odds * allowed).sum()
    torch.testing.assert_close(odds_of(LOGITS, Sampling(temperature, min_p=min_p)), expected)
    # After temperature and before the other filters, of what it leaves.
    nucleus = odds_of(LOGITS, Sampling(temperature, top_p=0.5, min_p=min_p))
    order = expected.argsort(descending=True, stable=True)
    before = expected[order].cumsum(0) - expected[order]
    assert nucleus.nonzero().flatten().tolist() == sorted(order[before < 0.5].tolist())


def test_min_p_of_a_row_changes_no_other() -> None:
    rows = filtered(LOGITS.expand(2, -1), [Sampling(1.0, min_p=0.9), Sampling(1.0)])
    assert rows[0].nonzero().flatten().tolist() == [1, 3]
    torch.testing.assert_close(rows[1], LOGITS.softmax(0))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 2), Sampling(0.0)])
def test_exclusions_of_a_row_are_never_drawn(sampling: Sampling) -> None:
    exclusions = frozenset({1, 3, 99})
    draws = [Draw(sampling, "r", i, exclusions=exclusions) for i in range(200)]
    rows = choose(LOGITS.expand(400, -1), [*draws, *(Draw(sampling, "r", i) for i in range(200))])
    assert not {token for token, _ in rows[:200]} & exclusions
    assert rows[200:] == [chosen(LOGITS, sampling, "r", i) for i in range(200)]
    for token, logprob in rows[:200]:
        assert logprob == LOGITS.log_softmax(0)[token].item(), "that of the model"
    draws = [Draw(sampling, "r", i, exclusions=frozenset({99})) for i in range(200)]
    assert choose(LOGITS.expand(200, -1), draws) == rows[200:]


def test_a_rank_counts_the_tokens_that_are_at_least_as_likely() -> None:
    rows = LOGITS.expand(6, -1)
    assert token_ranks(rows, torch.arange(6)).tolist() == [4, 2, 5, 2, 3, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_likeliest_tokens_are_those_of_a_stable_sort(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = (2 * torch.randn(30, 40, generator=generator)).round().to(dtype)  # with many equals
    rows[3], rows[4, 1:30] = 1.0, -math.inf
    logprobs, tokens = rows.log_softmax(1).sort(dim=1, descending=True, stable=True)
    pairs = likeliest_tokens(rows, count).view(30, count, 2)
    assert torch.equal(pairs[..., 0], tokens[:, :count].double())
    assert torch.equal(pairs[..., 1], logprobs[:, :count].double())


def test_likeliest_tokens_of_rows_that_are_not_finite_are_tokens() -> None:
    rows = torch.tensor([[math.nan] * 4, [1.0, math.nan, math.inf, 0.0], [-math.inf] * 4])
    tokens = likeliest_tokens(rows, 3).view(3, 3, 2)[..., 0]
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert all(len(set(row)) == 3 for row in tokens.tolist())


def test_only_rows_that_ask_have_alternatives_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[str, int]] = []

    def count_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(logits: Tensor, *options: Any) -> Tensor:
            computed.append((function.__name__, len(logits)))
            return function(logits, *options)

        return call

    for function in (likeliest_tokens, token_ranks):
        monkeypatch.setattr(sampling_module, function.__name__, count_rows(function))
    monkeypatch.setattr(sampling_module, "_MOST_ROWS", 2)
    rows = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    draws = [Draw(Sampling(1.0), "r", i) for i in range(8)]
    draw_table(rows, draws, 0, False)
    draw_table(rows, draws, 3, True)  # asked for on another replica
    assert not computed
    for i in (1, 4, 6):
        draws[i] = replace(draws[i], alternatives=3 - i // 4)
    draws[6] = replace(draws[6], target=5, ranked=True)
    table = draw_table(rows, draws, 3, True)
    assert computed == [("likeliest_tokens", 2), ("likeliest_tokens", 1), ("token_ranks", 1)]
    assert torch.equal(table[:, :2], draw_tokens(rows, draws))
    assert torch.equal(table[[1, 4, 6], 2:8], likeliest_tokens(rows[[1, 4, 6]], 3))
    assert table[:, 8].tolist() == [0.0] * 6 + [float((rows[6] >= rows[6, 5]).sum()), 0.0]
    assert not table[[0, 2, 3, 5, 7], 2:].any()


def test_log_probabilities_are_those_of_the_model() -> None:
    for index in range(20):
        token, logprob = chosen(LOGITS.float(), Sampling(2.0, top_k=3), "r", index)
        assert logprob == LOGITS.float().log_softmax(0)[token].item()


@settings(max_examples=100)
@given(
    st.lists(st.floats(-80, 80), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.integers(1, 50),
    st.floats(1e-6, 1),
    st.integers(0, 50),
)
def test_a_token_without_probability_is_never_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, index: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    given = torch.tensor(logits, dtype=torch.float64)
    token, _ = chosen(given, sampling, "r", index)
    assert 0 <= token < len(logits)
    assert odds_of(given, sampling)[token] > 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", (), 1), "no token"),
        (Request("a", (1,) * 64, 1), "has 64 tokens and the model takes 64"),
        (Request("a", (99,), 1), "token 99 is not in the vocabulary of 67"),
        (Request("a", (1,), 0), "max_tokens = 0"),
        (Request("a", (1,), 1, Sampling(-1.0)), "temperature = -1"),
        (Request("a", (1,), 1, Sampling(math.nan)), "temperature = nan"),
        (Request("a", (1,), 1, Sampling(top_k=0)), "top_k = 0"),
        (Request("a", (1,), 1, Sampling(top_p=0.0)), "top_p = 0"),
        (Request("a", (1,), 1, Sampling(min_p=1.1)), "min_p = 1.1"),
        (Request("a", (1,), 1, Sampling(min_p=math.nan)), "min_p = nan"),
    ],
)
def test_what_cannot_be_generated_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(FivefoldError, match=message):
        request_.check(vocab=67, max_seq=64)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 9.9e-6, 1e-5, 2e-5])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """However large logits are: divided by them, they would overflow."""
    for dtype, scale in ((torch.float32, 1e38), (torch.float64, 1.0)):
        logits = (LOGITS + torch.arange(6) / 10).to(dtype) * scale  # without equals
        for index in range(5):
            drawn = chosen(logits, Sampling(temperature, top_p=0.9), "r", index)
            assert drawn == chosen(logits, Sampling(), "r", index)


@pytest.mark.parametrize("temperature", [1.5, 2.0, 7.0])
def test_temperatures_above_one_flatten(temperature: float) -> None:
    odds = odds_of(LOGITS, Sampling(temperature))
    expected = (LOGITS / temperature).exp()
    torch.testing.assert_close(odds, expected / expected.sum())
    counts = [
        Counter(
            token
            for token, _ in choose(
                LOGITS.expand(2000, -1), [Draw(sampling, "r", i) for i in range(2000)]
            )
        )
        for sampling in (Sampling(temperature), Sampling(1.0))
    ]
    hot, usual = (each[2] + each[5] for each in counts)
    assert hot > 1.5 * usual, "unlikely tokens are drawn more often"


def test_a_row_that_is_not_finite_is_told_and_spoils_no_other() -> None:
    bad = [[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [-math.inf] * 4]
    good = [[0.0, 1.0, -math.inf, 2.0], [3.0, 1.0, 2.0, 0.0]]
    logits = torch.tensor([*bad, *good])
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.5)):
        rows = choose(logits, [Draw(sampling, "r", i) for i in range(len(logits))])
        assert all(0 <= token < 4 for token, _ in rows), "the next step may read it already"
        assert all(math.isnan(logprob) for _, logprob in rows[:4])
        alone = [chosen(logits[i], sampling, "r", i) for i in (4, 5)]
        assert rows[4:] == alone and all(math.isfinite(logprob) for _, logprob in alone)


def test_rows_are_drawn_together_as_alone() -> None:
    """Whatever is in the other rows, greedy ones included."""
    generator = torch.Generator().manual_seed(3)
    samplings = [Sampling(), Sampling(0.7), Sampling(1.3, 4), Sampling(1.0, None, 0.6, 5)]
    samplings = [*samplings, Sampling(2.0, 2, 0.9, 1), Sampling()]
    logits = torch.randn(len(samplings), 50, generator=generator, dtype=torch.float64)
    draws = [Draw(each, f"r{i}", i) for i, each in enumerate(samplings)]
    alone = [choose(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]
    assert choose(logits, draws) == alone
    assert len({token for token, _ in alone}) > 2

"""Dropout: its mask by the formula, its statistics, its gradients, and when it is off."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import GPT, LLAMA, batch_of, filled, gradients
from torch import Tensor

from fivefold.core.layout.splits import AttentionCall, ContextSplit
from fivefold.model import dropout
from fivefold.model.attention import causal_attention
from fivefold.model.batch import AttentionInfo, TokenBatch
from fivefold.model.documents import Documents
from fivefold.model.dropout import PairDropout, drop, dropping, keeps, site_keys, token_keys
from fivefold.model.kernels.regions import eager
from fivefold.parallel.context import ContextAttention

RATE = 0.3
SIGMAS = 5.0  # one of a million healthy statistics is further away


def with_keys(batch: TokenBatch, seed: int = 3) -> TokenBatch:
    rows, seq = batch.tokens.shape
    return replace(batch, keys=token_keys(seed, torch.arange(rows), seq))


def mixed_by_hand(x: int) -> int:
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B % 2**32
    return (x >> 16) ^ x


def kept_by_hand(seed: int, sample: int, place: int, site: int, feature: int) -> bool:
    """The rule, one number at a time."""
    lanes: list[int] = []
    for salt in (0x2B7E1516, 0x243F6A88):
        lane = salt
        for word in (seed, seed >> 32, sample, sample >> 32, place):
            lane = mixed_by_hand(lane ^ word % 2**32)
        lanes.append(lane)
    low = mixed_by_hand(lanes[0] ^ mixed_by_hand(site ^ 0x2B7E1516))
    high = mixed_by_hand(lanes[1] % 2**31 ^ mixed_by_hand(site ^ 0x243F6A88)) % 2**31
    return mixed_by_hand(mixed_by_hand(low ^ feature) ^ high) >= int(RATE * 2**32)


def mask(seed: int, samples: Tensor, seq: int, site: int, width: int) -> Tensor:
    keys = site_keys(token_keys(seed, samples, seq), site, site + 1)[0]
    return keeps(keys, torch.arange(width), RATE)


def test_a_mask_is_the_written_function_of_seed_sample_place_site_and_feature() -> None:
    samples = torch.tensor([0, 7, 2**33 + 5])
    for seed, site in ((0, 0), (2**40 + 3, 29)):
        found = mask(seed, samples, 6, site, 5)
        for row, sample in enumerate(samples.tolist()):
            for place in range(6):
                wanted = [kept_by_hand(seed, sample, place, site, each) for each in range(5)]
                assert found[row, place].tolist() == wanted


def assert_independent(one: Tensor, other: Tensor) -> None:
    """The share of activations that both keep is that of two independent masks."""
    kept = 1 - RATE
    expected, count = kept * kept, one.numel()
    spread = math.sqrt(expected * (1 - expected) / count)
    assert abs((one & other).double().mean().item() - expected) < SIGMAS * spread


def test_the_share_that_is_kept_and_its_spread() -> None:
    kept = mask(1, torch.arange(64), 64, 2, 128)
    spread = math.sqrt(RATE * (1 - RATE))
    assert abs(kept.double().mean().item() - (1 - RATE)) < SIGMAS * spread / math.sqrt(kept.numel())
    for dims in ((1, 2), (0, 2), (0, 1)):  # of every row, of every place, of every feature
        shares = kept.double().mean(dim=dims)
        deviations = (shares - (1 - RATE)) / (spread / math.sqrt(kept.numel() / len(shares)))
        assert deviations.abs().max() < SIGMAS
        assert 0.6 < deviations.pow(2).mean() < 1.6  # as wide as chance, and no wider


@pytest.mark.parametrize("distance", [1, 2, 32])
def test_neighbours_are_independent(distance: int) -> None:
    kept = mask(1, torch.arange(64), 64, 2, 128)
    for dim in range(3):  # rows, places, features
        length = kept.shape[dim] - distance
        assert_independent(kept.narrow(dim, 0, length), kept.narrow(dim, distance, length))


@pytest.mark.parametrize("other", [(2, 0, 2), (1, 64, 2), (1, 0, 3), (1, 0, 258)])
def test_seeds_steps_and_sites_are_independent(other: tuple[int, int, int]) -> None:
    seed, first, site = other
    samples = torch.arange(64)
    assert_independent(mask(1, samples, 64, 2, 128), mask(seed, samples + first, 64, site, 128))


def test_pairs_are_independent_of_heads_queries_and_keys() -> None:
    places = torch.arange(64)
    pairs = PairDropout(RATE, token_keys(1, torch.arange(8), 64), site=1)
    kept = pairs.keeps(8, places, places)
    share = math.sqrt(RATE * (1 - RATE) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - RATE)) < SIGMAS * share
    for dim in range(4):
        length = kept.shape[dim] - 1
        assert_independent(kept.narrow(dim, 0, length), kept.narrow(dim, 1, length))
    some = replace(pairs, first_head=2).keeps(3, places[5:9], places[7:20], skipped_heads=3)
    assert torch.equal(some, kept[:, 5:8, 5:9, 7:20])


def test_no_product_overflows() -> None:
    """So that a compiler may not turn it into something else."""
    assert (2**32 - 1) * dropout._MULTIPLIER < 2**63
    assert token_keys(2**62, torch.tensor([2**62]), 64).min() >= 0


def test_what_is_kept_keeps_the_mean_and_its_gradient() -> None:
    keys = token_keys(1, torch.arange(2), 8)
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    dropped = dropping(eager)(x, keys, RATE)
    kept = keeps(keys, torch.arange(16), RATE)
    assert torch.equal(dropped == 0, ~kept) and torch.equal(dropped, drop(x, keys, RATE))
    torch.testing.assert_close(dropped[kept], x[kept] / (1 - RATE), rtol=1e-15, atol=0)
    (found,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(found, kept.double() / (1 - RATE), rtol=1e-15, atol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_drops_pairs_has_the_gradients_of_its_formula(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 8, 6), (2, 2, 8, 6), (2, 2, 8, 6))
    q, k, v = (
        torch.randn(*each, generator=generator, dtype=torch.float64, requires_grad=True)
        for each in shapes
    )
    pairs = PairDropout(RATE, token_keys(5, torch.arange(2), 8), site=4)
    visible = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    documents, window = None, None
    if masked:
        numbers = torch.tensor([[0] * 7 + [1], [0, 1, 1, 1, 1, 1, 1, 2]])
        documents, window = Documents.of(numbers), 4
        visible = visible & ~torch.ones(8, 8, dtype=torch.bool).tril(-4)
        visible = visible & (numbers[:, None, :, None] == numbers[:, None, None, :])
    info = AttentionInfo(torch.arange(8).expand(2, 8), documents, window, pairs)

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        scores = (q @ k.mT / math.sqrt(6)).masked_fill(~visible, -math.inf)
        places = torch.arange(8)
        return (scores.softmax(-1) * pairs.keeps(4, places, places) / (1 - RATE)) @ v

    out, wanted = causal_attention(q, k, v, info), by_hand(q, k, v)
    torch.testing.assert_close(out, wanted, rtol=1e-13, atol=1e-15)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for found, each in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-14)


def test_off_without_keys_and_in_evaluation() -> None:
    shape = replace(GPT, dropout=0.5, attention_dropout=0.5)
    decoder, batch = filled(shape), batch_of(shape)
    still = decoder(batch.tokens, batch)
    assert torch.equal(still, filled(replace(shape, dropout=0.0))(batch.tokens, batch))
    first, again = (decoder(batch.tokens, with_keys(batch)) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, still)
    decoder.eval()
    assert torch.equal(still, decoder(batch.tokens, with_keys(batch)))


@pytest.mark.parametrize("key", ["dropout", "embedding_dropout", "attention_dropout"])
def test_every_rate_and_every_token_key_counts(key: str) -> None:
    shape = replace(LLAMA, **{key: 0.4})
    decoder, batch = filled(shape), batch_of(shape)
    losses = {decoder(batch.tokens, with_keys(batch, seed)).item() for seed in range(3)}
    losses.add(decoder(batch.tokens, batch).item())
    assert len(losses) == 4


@pytest.mark.parametrize(("rate", "first"), [(0.4, 0.0), (0.0, 0.4), (0.4, 0.2)])
def test_the_embedding_drops_at_its_own_rate(rate: float, first: float) -> None:
    shape = replace(LLAMA, dropout=rate, embedding_dropout=first)
    decoder, batch = filled(shape), with_keys(batch_of(shape))
    seen: list[float] = []

    def counted(x_BSD: Tensor, keys_BS: Tensor, rate: float) -> Tensor:
        seen.append(rate)
        return drop(x_BSD, keys_BS, rate)

    decoder.drop = counted
    for block in decoder.all_blocks():
        block.drop = counted
    decoder(batch.tokens, batch)
    parts = [rate] * (2 * shape.layers) if rate else []
    assert seen == [first] * bool(first) + parts


def test_every_block_drops_by_itself() -> None:
    """Two layers with the same weights and input drop different features."""
    shape = replace(LLAMA, dropout=0.5, layers=2)
    decoder, batch = filled(shape), with_keys(batch_of(shape))
    context = decoder.context(batch, torch.float64)
    assert context.sites is not None
    used = {tuple(context.sites.of(site).flatten().tolist()) for site in range(7)}
    assert len(used) == 7
    assert gradients(decoder, batch)


@pytest.mark.parametrize("tp_coord", [0, 1])
@pytest.mark.parametrize("coord", [0, 1, 2])
def test_a_rank_that_has_some_heads_of_a_row_drops_their_pairs(coord: int, tp_coord: int) -> None:
    """Ulysses: of the query heads that tp leaves to a rank, each context rank gets a part."""
    heads, ranks, seq = 2, 3, 6
    batch = with_keys(batch_of(LLAMA, rows=1, seq=seq))
    assert batch.keys is not None
    pairs = PairDropout(RATE, batch.keys, site=4)
    info = AttentionInfo(batch.positions, None, None, pairs, row=batch)
    own: Any = SimpleNamespace(tokens=(range(seq),), mesh=SimpleNamespace(coord=lambda _: coord))
    call = AttentionCall(0, seq, 0, seq, causal=True, masked=False)
    first = tp_coord * heads * ranks
    sees = ContextAttention._sees(own, call, (range(seq),), info.at(4, first), heads)
    every = pairs.keeps(2 * heads * ranks, torch.arange(seq), torch.arange(seq))
    begin = first + coord * heads
    assert sees.keep_mask is not None and sees.keep_mask.equal(every[:, begin : begin + heads])
    assert len({bytes(each.flatten().byte().numpy()) for each in every[0]}) == 2 * heads * ranks


@pytest.mark.parametrize(
    ("window", "lengths"), [(None, None), (None, (12,)), (None, (5, 7)), (4, (12,)), (4, (5, 7))]
)
def test_context_ranks_drop_the_pairs_that_one_process_drops(
    window: int | None, lengths: tuple[int, ...] | None
) -> None:
    """A rank that has all tokens in order, as Ulysses gives them to it."""
    seq = 12
    batch = with_keys(batch_of(LLAMA, rows=1, seq=seq))
    assert batch.keys is not None
    pairs, documents = PairDropout(RATE, batch.keys, site=2), None
    if lengths is not None:
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        documents = Documents.of(torch.tensor([numbers]))
    info = AttentionInfo(batch.positions, documents, window, pairs, row=batch)
    mesh: Any = SimpleNamespace(coord=lambda _: 0)
    split = ContextSplit(inner=1, outer=1, zigzag=False, gathers=False)
    results: list[tuple[Tensor, ...]] = []
    for kernel in (causal_attention, ContextAttention(mesh, split, seq)):
        inputs = [
            torch.randn(1, 2, seq, 8, generator=generator, dtype=torch.float64).requires_grad_()
            for generator in [torch.Generator().manual_seed(0)]
            for _ in range(3)
        ]
        out = kernel(*inputs, info)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for one_process, rank in zip(*results, strict=True):
        torch.testing.assert_close(rank, one_process, rtol=1e-12, atol=1e-13)

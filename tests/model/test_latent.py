"""Latent attention and the rotations it uses: numbers by hand, heads in shares."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, LLAMA, batch_of, filled
from torch import Tensor, nn

from fivefold.core.model.shape import Rope, Shape
from fivefold.model.attention import LatentAttention, causal_attention
from fivefold.model.batch import AttentionInfo
from fivefold.model.decoder import from_config
from fivefold.model.layers import rotary_frequencies, rotary_tables, rotate

F64 = torch.float64
CPU = torch.device("cpu")
DIRECT = replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, q_rank=None), rope=None)
BIASED = replace(DEEPSEEK, qkv_bias=True, out_bias=True, rope_interleaved=False)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(x: Tensor, position: int, shape: Shape) -> Tensor:
    """One head of one token, its pairs as complex numbers."""
    cos, sin = rotary_tables(shape, torch.tensor([[position]]), F64)
    turn = torch.complex(cos[0, 0, 0], sin[0, 0, 0])
    if shape.rope_interleaved:
        pairs = torch.complex(x[0::2].contiguous(), x[1::2].contiguous())
    else:
        pairs = torch.complex(*x.chunk(2))
    return torch.view_as_real(pairs * turn).flatten()


def by_hand(attention: LatentAttention, shape: Shape, x_SD: Tensor) -> Tensor:
    """Token by token, head by head, key by key."""
    mla, out = attention.mla, []

    def linear(module: nn.Module, x: Tensor) -> Tensor:
        y = module.weight @ x
        return y if module.bias is None else y + module.bias

    temperature = 1.0
    if shape.rope is not None:
        temperature = (0.1 * shape.rope.mscale_all_dim * math.log(shape.rope.factor) + 1) ** 2
    for s in range(len(x_SD)):
        if attention.q is not None:
            q = linear(attention.q, x_SD[s])
        else:
            latent = linear(attention.q_down, x_SD[s])
            q = linear(attention.q_up, rms(latent, attention.q_latent_norm.weight, 1e-6))
        heads = []
        for h, q_h in enumerate(q.chunk(shape.heads)):
            q_turned = turned(q_h[mla.nope_dim :], s, shape)
            scores, values = [], []
            for t in range(s + 1):
                latent, shared = linear(attention.kv_down, x_SD[t]).split(
                    [mla.kv_rank, mla.rope_dim]
                )
                kv = linear(
                    attention.kv_up, rms(latent, attention.kv_latent_norm.weight, 1e-6)
                ).chunk(shape.heads)[h]
                score = q_h[: mla.nope_dim] @ kv[: mla.nope_dim]
                score = score + q_turned @ turned(shared, t, shape)
                scores.append(score * temperature / math.sqrt(shape.head_dim))
                values.append(kv[mla.nope_dim :])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        out.append(linear(attention.out, torch.cat(heads)))
    return torch.stack(out)


@pytest.mark.parametrize("shape", [DEEPSEEK, DIRECT, BIASED], ids=["v3", "direct", "biased"])
def test_latent_attention_by_hand(shape: Shape) -> None:
    decoder = filled(shape)
    attention = decoder.get_submodule("blocks.0.attention")
    x = torch.randn(1, 5, shape.width, dtype=F64)
    context = decoder.context(batch_of(shape, rows=1, seq=5), F64)
    expected = by_hand(attention, shape, x[0])
    torch.testing.assert_close(attention(x, context)[0], expected, rtol=1e-11, atol=1e-12)


def test_the_kernel_gets_keys_and_values_of_their_own_widths() -> None:
    """And of their own memory: what attention saves as a view would keep more than that."""
    decoder, batch = filled(DEEPSEEK), batch_of(DEEPSEEK)
    sizes: list[tuple[int, ...]] = []
    kept: list[int] = []  # elements

    def kernel(q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo) -> Tensor:
        sizes.extend(tuple(each.shape) for each in (q, k, v))
        kept.extend(each.untyped_storage().nbytes() // each.element_size() for each in (q, k, v))
        return causal_attention(q, k, v, info)

    decoder.get_submodule("blocks.0.attention").kernel = kernel
    decoder(batch.tokens, batch)
    assert sizes == [(2, 4, 16, 10), (2, 4, 16, 10), (2, 4, 16, 8)]
    assert kept == [math.prod(size) for size in sizes]


@pytest.mark.parametrize("shape", [DEEPSEEK, DIRECT], ids=["v3", "direct"])
def test_latent_attention_runs_on_a_share_of_its_heads(shape: Shape) -> None:
    """Two halves of the heads, with the latents of all, add up to the whole."""
    whole = filled(shape)
    x = torch.randn(2, 16, shape.width, dtype=F64)
    context = whole.context(batch_of(shape), F64)
    expected = whole.get_submodule("blocks.0.attention")(x, context)
    total = torch.zeros_like(expected)
    for half in range(2):
        attention = filled(shape).get_submodule("blocks.0.attention")
        for name in ("q", "q_up", "kv_up"):
            part = getattr(attention, name)
            if part is not None:
                part.weight = nn.Parameter(part.weight.chunk(2, dim=0)[half])
        attention.out.weight = nn.Parameter(attention.out.weight.chunk(2, dim=1)[half])
        total += attention(x, context)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-13)


def test_packed_documents_do_not_see_one_another() -> None:
    decoder = filled(replace(DEEPSEEK, mtp=0))
    documents = torch.tensor([[0] * 6 + [1] * 10])
    batch = batch_of(DEEPSEEK, rows=1, documents=documents)
    attention = decoder.get_submodule("blocks.0.attention")
    x = torch.randn(1, 16, DEEPSEEK.width, dtype=F64)
    context = decoder.context(batch, F64)
    changed = x.clone()
    changed[:, :6] += 1
    same = attention(x, context) == attention(changed, context)
    assert same[:, 6:].all() and not same[:, :6].any()


def test_interleaved_pairs_by_hand() -> None:
    shape = replace(LLAMA, head_dim=4, rope_theta=100.0)  # frequencies 1 and 1/10
    rotary = rotary_tables(shape, torch.tensor([[3]]), F64)
    x = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=F64).view(1, 1, 1, 4)
    by_hand = [math.cos(3), 2 * math.cos(0.3), math.sin(3), 2 * math.sin(0.3)]
    found = rotate(x, *rotary, interleaved=True).flatten()
    torch.testing.assert_close(found, torch.tensor(by_hand, dtype=F64), rtol=1e-14, atol=0)


def test_interleaved_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=F64)
    shape = replace(LLAMA, head_dim=8)

    def score(a: int, b: int) -> float:
        mine, theirs = (rotary_tables(shape, torch.tensor([[at]]), F64) for at in (a, b))
        return float((rotate(q, *mine, True) * rotate(k, *theirs, True)).sum())

    assert score(5, 2) == pytest.approx(score(13, 10), rel=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-3)


def test_yarn_by_hand() -> None:
    """Frequencies 1, 1/10, 1/100, 1/1000; pair i turns 1000/(2π·10^i) times in 1000 tokens."""
    rope = Rope("yarn", factor=8.0, original_seq=1000, beta_fast=20.0, beta_slow=1.0)
    shape = replace(LLAMA, head_dim=8, rope_theta=1e4, rope=rope)
    # 20 turns lie at pair log10(1000/40π) = 0.9, rounded down 0; one turn at 2.2, rounded up 3.
    by_hand = [1.0, (2 / 3 + 1 / 24) / 10, (1 / 3 + 2 / 24) / 100, 1 / 8000]
    got = rotary_frequencies(shape, F64, CPU)
    torch.testing.assert_close(got, torch.tensor(by_hand, dtype=F64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.5, "mscale_all_dim": 1.0},
            (1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40)),
        ),
    ],
)
def test_yarn_scales_what_is_rotated(changes: dict[str, float], scale: float) -> None:
    shape = replace(LLAMA, rope=Rope("yarn", 40.0, 64, **changes))
    cos, _ = rotary_tables(shape, torch.tensor([[0]]), F64)
    torch.testing.assert_close(cos, torch.full_like(cos, scale), rtol=1e-14, atol=0)


def test_a_norm_over_all_heads_is_not_one_over_each() -> None:
    shape = replace(LLAMA, qk_norm="full")
    decoder = from_config(shape, dtype=F64)
    attention = decoder.get_submodule("blocks.0.attention")
    assert attention.q_norm.weight.shape == (24,) and attention.k_norm.weight.shape == (12,)
    decoder = filled(shape)
    attention = decoder.get_submodule("blocks.0.attention")
    seen: list[Tensor] = []
    attention.kernel = lambda q, k, v, info: seen.extend((q, k)) or q
    x = torch.randn(1, 1, 24, dtype=F64)
    attention(x, decoder.context(batch_of(shape, rows=1, seq=1), F64))
    for found, name in zip(seen, ("q", "k"), strict=True):
        weight = getattr(attention, f"{name}_norm").weight
        expected = rms(getattr(attention, name).weight @ x[0, 0], weight, shape.norm_eps)
        torch.testing.assert_close(found.flatten(), expected, rtol=1e-12, atol=1e-13)

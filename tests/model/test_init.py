"""Initial values depend on seed and name only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA

from fivefold.core.layout.weight_table import by_name
from fivefold.model.decoder import from_config
from fivefold.model.init import init_weights, initial_weight

WIDE = replace(LLAMA, width=512, ffn=700, layers=8)
EXPERTS = replace(DEEPSEEK, width=128, layers=8)


def test_a_slice_starts_as_the_whole_does() -> None:
    whole = from_config(LLAMA)
    init_weights(whole, LLAMA, 3)
    own = dict(whole.named_parameters())
    for layers in (range(2), range(2, 4)):
        part = from_config(LLAMA, layers=layers)
        init_weights(part, LLAMA, 3)
        assert all(torch.equal(each, own[name]) for name, each in part.named_parameters())


def test_the_copy_of_a_tied_head_starts_as_the_embedding() -> None:
    last = from_config(GPT, layers=range(1, 2))
    init_weights(last, GPT, 3)
    assert last.head is not None
    assert torch.equal(last.head.weight, initial_weight(by_name(GPT)["embed.weight"], GPT, 3))


def test_other_seeds_and_names_give_other_values() -> None:
    table = by_name(LLAMA)
    q, out = table["blocks.0.attention.q.weight"], table["blocks.1.attention.q.weight"]
    assert not torch.equal(initial_weight(q, LLAMA, 0), initial_weight(q, LLAMA, 1))
    assert not torch.equal(initial_weight(q, LLAMA, 0), initial_weight(out, LLAMA, 0))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    initial_weight(by_name(LLAMA)["embed.weight"], LLAMA, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("blocks.0.attention.q.weight", 0.02),
        ("blocks.0.mlp.gate.weight", 0.02),
        ("blocks.0.attention.out.weight", 0.02 / math.sqrt(16)),
        ("blocks.7.mlp.down.weight", 0.02 / math.sqrt(16)),
        ("blocks.7.mlp.router.weight", 0.02),
        ("blocks.7.mlp.experts.up.weight", 0.02),
        ("blocks.7.mlp.experts.down.weight", 0.02 / math.sqrt(16)),
        ("blocks.7.mlp.shared.down.weight", 0.02 / math.sqrt(16)),
        ("blocks.7.attention.kv_down.weight", 0.02),
        ("mtp.0.join.weight", 0.02),
    ],
)
def test_spread_of_values(name: str, spread: float) -> None:
    shape = WIDE if name in by_name(WIDE) else EXPERTS
    drawn = initial_weight(by_name(shape)[name], shape, 0, torch.float64)
    assert drawn.std().item() == pytest.approx(spread, rel=5 / math.sqrt(2 * drawn.numel()))
    assert abs(drawn.mean().item()) < 5 * spread / math.sqrt(drawn.numel())


def test_experts_differ_from_one_another() -> None:
    drawn = initial_weight(by_name(DEEPSEEK)["blocks.1.mlp.experts.up.weight"], DEEPSEEK, 0)
    assert len({expert.sum().item() for expert in drawn}) == 8


def test_norms_are_one_and_biases_zero() -> None:
    table = by_name(GPT)
    assert initial_weight(table["norm.weight"], GPT, 0).eq(1).all()
    for name in ("norm.bias", "blocks.0.attention.q.bias", "blocks.0.mlp.down.bias"):
        assert initial_weight(table[name], GPT, 0).eq(0).all()
    assert not initial_weight(table["embed.positions"], GPT, 0).eq(1).any()
    decoder = from_config(DEEPSEEK)
    for buffer in decoder.buffers():
        buffer.fill_(7.0)
    init_weights(decoder, DEEPSEEK, 0)
    assert all(buffer.eq(0).all() for buffer in decoder.buffers())
    assert decoder.get_parameter("blocks.0.attention.kv_latent_norm.weight").eq(1).all()


def test_a_narrow_weight_is_the_float32_one_rounded() -> None:
    weight = by_name(LLAMA)["embed.weight"]
    wide = initial_weight(weight, LLAMA, 5)
    assert torch.equal(initial_weight(weight, LLAMA, 5, torch.bfloat16), wide.bfloat16())

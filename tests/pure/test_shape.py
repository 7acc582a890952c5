"""Shapes against published figures: parameters and FLOPs, part by part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.errors import BadFile
from fivefold.core.model.mixers import mixer_cost
from fivefold.core.model.presets import load, presets
from fivefold.core.model.shape import (
    Moe,
    Parameters,
    Shape,
    embedding_parameters,
    forward_flops,
    head_parameters,
    layer_flops,
    layer_kinds,
    layer_parameters,
    parameters,
    training_flops,
    visible_keys,
)

# Weights in the released checkpoints, to the last one.
EXACT = {
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without MTP, as the files of Qwen3-Coder-Next
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the file also stores the balancing biases
    "bloom-176b": 176_247_271_424,
}

# (billions in the paper or model card, digits it is given to)
REPORTED = {
    "gpt2-medium": (0.355, 3),
    "gpt2-large": (0.774, 3),
    "gpt2-xl": (1.558, 3),
    "gpt3-175b": (175, 0),
    "opt-175b": (175, 0),
    "llama-7b": (6.7, 1),
    "llama-13b": (13.0, 1),
    "llama-33b": (32.5, 1),
    "llama-65b": (65.3, 1),
    "llama-2-13b": (13.02, 2),
    "llama-2-70b": (68.98, 2),
    "llama-3-8b": (8.03, 2),
    "llama-3-70b": (70.55, 2),
    "qwen2-0.5b": (0.49, 2),
    "qwen2-1.5b": (1.54, 2),
    "qwen2-7b": (7.62, 2),
    "qwen2-72b": (72.71, 2),
    "qwen2.5-1.5b": (1.54, 2),
    "qwen2.5-3b": (3.09, 2),
    "qwen2.5-7b": (7.62, 2),
    "qwen2.5-14b": (14.77, 2),
    "qwen2.5-32b": (32.76, 2),
    "qwen3-0.6b": (0.6, 1),
    "qwen3-1.7b": (1.7, 1),
    "qwen3-4b": (4.0, 1),
    "qwen3-14b": (14.8, 1),
    "qwen3-32b": (32.8, 1),
    "qwen2-57b-a14b": (57.41, 2),
    "mixtral-8x22b": (140.62, 2),
    "deepseek-67b": (67.4, 1),
    "llama-4-maverick": (400.7, 1),
    "megatron-8.3b": (8.3, 1),
    "gpt-1t": (1008.0, 1),
    "mt-nlg-530b": (530, 0),
}

# Billions that one token meets, by the reports, and half of the last digit they give.
ACTIVE = {
    "mixtral-8x7b": (12.88, 0.005),
    "mixtral-8x22b": (39, 0.5),
    "qwen3-30b-a3b": (3.3, 0.06),
    "qwen3-235b-a22b": (22, 0.5),
    "qwen3-next-80b-a3b": (3.9, 0.05),
    "qwen2-57b-a14b": (14, 0.5),
    "olmoe-1b-7b": (1.3, 0.05),
    "deepseek-v2": (21, 0.5),
    "llama-4-maverick": (17, 0.5),
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_equal_the_released_checkpoint(name: str) -> None:
    assert parameters(load(name)).total == EXACT[name]


@pytest.mark.parametrize("name", REPORTED)
def test_parameters_agree_with_the_report(name: str) -> None:
    billions, digits = REPORTED[name]
    assert round(parameters(load(name)).total / 1e9, digits) == billions


def test_every_preset_is_held_against_a_published_figure() -> None:
    assert set(presets()) - set(EXACT) - set(REPORTED) == {
        "byte-10m",
        "palm-540b",
        "tiny",
        "tiny-moe",
    }


def test_palm_counts_one_kv_head_and_a_tied_embedding() -> None:
    palm = parameters(load("palm-540b"))
    # The paper's 540.35 B is the matrices; one norm a layer and the last one come on top.
    assert (palm.total - palm.norms) / 1e9 == pytest.approx(540.354, abs=5e-4)
    assert palm.norms == (118 + 1) * 18432
    assert palm.head == 0


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_agree_with_the_report(name: str) -> None:
    billions, tolerance = ACTIVE[name]
    assert parameters(load(name)).active / 1e9 == pytest.approx(billions, abs=tolerance)


def test_deepseek_v3_activates_37_billion_without_its_input_embedding() -> None:
    v3 = parameters(load("deepseek-v3"))
    assert (v3.active - v3.embedding) / 1e9 == pytest.approx(36.6, abs=0.05)
    assert v3.active / 1e9 == pytest.approx(37.55, abs=0.01)


def test_deepseek_v3_mtp_is_beside_the_total() -> None:
    shape = load("deepseek-v3")
    v3, without = parameters(shape), parameters(dataclasses.replace(shape, mtp=0))
    assert v3.total == without.total and without.mtp == 0
    # The released 685 B are 671 B and 14 B of MTP, which repeat embedding and head.
    repeated = 2 * shape.vocab * shape.width
    assert (v3.mtp + repeated) / 1e9 == pytest.approx(13.5, abs=0.1)
    assert sum(v3.parts().values()) == v3.total + v3.mtp


def test_tiny_by_hand() -> None:
    tiny = parameters(load("tiny"))
    assert tiny.parts() == {
        "embedding": 256 * 64,
        "attention": 8 * (64 * 64 + 2 * 64 * 32 + 64 * 64),
        "mlp": 8 * 3 * 64 * 176,
        "router": 0,
        "experts": 0,
        "shared_experts": 0,
        "norms": 17 * 64,
        "head": 256 * 64,
        "mtp": 0,
    }
    assert tiny.active == tiny.total


def test_tiny_moe_by_hand() -> None:
    shape = load("tiny-moe")
    moe = parameters(shape)
    assert [shape.is_moe_layer(i) for i in range(8)] == [False] + 7 * [True]
    assert moe.mlp == 3 * 64 * 176
    assert moe.router == 7 * 64 * 8
    assert moe.experts == 7 * 8 * 3 * 64 * 64
    assert moe.shared_experts == 7 * 3 * 64 * 64
    assert moe.total - moe.active == 7 * (8 - 2) * 3 * 64 * 64


def test_maverick_has_experts_in_each_second_layer() -> None:
    shape = load("llama-4-maverick")
    assert shape.num_moe_layers == 24
    assert shape.is_moe_layer(1) and not shape.is_moe_layer(0)
    assert [i for i in range(8) if shape.is_global_layer(i)] == [3, 7]


@pytest.mark.parametrize("name", presets())
def test_layers_and_ends_sum_to_the_whole(name: str) -> None:
    shape = load(name)
    pieces = embedding_parameters(shape) + head_parameters(shape)
    pieces = sum((layer_parameters(shape, i) for i in range(shape.layers)), pieces)
    assert pieces == dataclasses.replace(parameters(shape), mtp=0)


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("seq", [1, 4096, 131072])
def test_training_flops_are_six_per_active_parameter_and_causal_attention(
    name: str, seq: int
) -> None:
    shape = dataclasses.replace(load(name), mtp=0)
    sizes, flops = parameters(shape), training_flops(shape, seq)
    touched = sizes.active - sizes.embedding + (shape.vocab * shape.width if shape.tied else 0)
    assert flops.total - flops.scores == pytest.approx(6 * touched, rel=1e-12)
    attending = [i for i in range(shape.layers) if not shape.is_recurrent(i)]
    keys = sum(visible_keys(shape, i, seq) for i in attending)
    scores = 6 * shape.heads * (shape.head_dim + shape.value_dim) * keys
    mixed = 3 * mixer_cost(shape.of_mixer, seq).flops * (shape.layers - len(attending))
    assert flops.scores == pytest.approx(scores + mixed, rel=1e-12)
    assert sum(flops.parts().values()) == pytest.approx(flops.total, rel=1e-12)
    assert flops.total == pytest.approx(3 * forward_flops(shape, seq).total)


def test_kinds_of_layers() -> None:
    assert layer_kinds(load("deepseek-v3")) == {0: 3, 3: 58}
    # Dense and local, with experts and local, with experts and global: 24, 12 and 12 of 48.
    assert layer_kinds(load("llama-4-maverick")) == {0: 24, 1: 12, 3: 12}


def test_layer_flops_sum_to_the_forward_pass() -> None:
    shape = load("deepseek-v3")
    layers = sum(layer_flops(shape, i, 4096).total for i in range(shape.layers))
    whole = forward_flops(shape, 4096)
    ends = 2 * 129280 * 7168 + 2 * 7168
    assert layers + ends + whole.mtp == pytest.approx(whole.total, rel=1e-12)
    # An MTP layer costs a layer, the join of two states, three norms, and the head once more.
    layer = layer_flops(shape, 60, 4096).total
    extra = 2 * (2 * 7168**2 + 3 * 7168 + 129280 * 7168)
    assert whole.mtp == pytest.approx(layer + extra, rel=1e-12)


def test_causal_attention_is_half_of_the_square() -> None:
    shape, seq = load("llama-3.1-405b"), 8192
    assert training_flops(shape, seq).scores == 6 * 126 * (128 * 128) * seq


def test_latent_attention_scores_use_both_widths() -> None:
    shape, seq = load("deepseek-v2"), 1000
    assert forward_flops(shape, seq).scores == 60 * 128 * seq * (192 + 128)


def test_gpt3_training_cost() -> None:
    # arXiv:2005.14165 table D.1: 3.14e23 FLOPs for 300 B tokens, 6 per parameter, no attention.
    flops = training_flops(load("gpt3-175b"), 2048)
    assert (flops.total - flops.scores) * 300e9 == pytest.approx(3.14e23, rel=0.01)


def test_llama_405b_training_cost() -> None:
    # arXiv:2407.21783: 3.8e25 FLOPs on 15.6 T tokens.
    assert 6 * parameters(load("llama-3.1-405b")).total * 15.6e12 == pytest.approx(3.8e25, rel=0.01)
    flops = training_flops(load("llama-3.1-405b"), 8192)
    assert flops.total * 15.6e12 == pytest.approx(3.8e25, rel=0.05)


def brute_force_keys(shape: Shape, seq: int) -> float:
    """Visible keys token by token; the diagonal makes them half a key more than the square's."""
    assert shape.window is not None
    if shape.window_kind == "sliding":
        seen = [min(i + 1, shape.window) for i in range(seq)]
    else:
        seen = [i % shape.window + 1 for i in range(seq)]
    return sum(seen) / seq


@given(seq=st.integers(1, 300), window=st.integers(1, 300), chunked=st.booleans())
def test_windows_against_counting(seq: int, window: int, chunked: bool) -> None:
    kind = "chunked" if chunked else "sliding"
    shape = dataclasses.replace(load("tiny"), window=window, window_kind=kind)
    ours, counted = visible_keys(shape, 0, seq), brute_force_keys(shape, seq)
    assert counted - 0.5 - 1e-9 <= ours < counted
    assert ours <= seq / 2


def test_global_layers_ignore_the_window() -> None:
    shape = load("llama-4-maverick")
    assert visible_keys(shape, 3, 32768) == 16384
    assert visible_keys(shape, 0, 32768) == 4096


def test_biases_and_norms_by_hand() -> None:
    layer = layer_parameters(load("gpt2"), 0)
    assert layer.attention == 4 * 768 * 768 + 4 * 768
    assert layer.mlp == 8 * 768 * 768 + 4 * 768 + 768
    assert layer.norms == 4 * 768
    assert embedding_parameters(load("gpt2")).embedding == (50257 + 1024) * 768
    assert layer_parameters(load("olmoe-1b-7b"), 0).norms == 2 * 2048 + 2 * 2048
    assert layer_parameters(load("qwen3-8b"), 0).norms == 2 * 4096 + 2 * 128
    assert layer_parameters(load("deepseek-v3"), 0).norms == 2 * 7168 + 1536 + 512


def test_adding_keeps_every_part() -> None:
    one = Parameters(embedding=1, experts=8, active_experts=2, mtp=5)
    both = one + Parameters(head=3, experts=8, active_experts=2)
    assert both == Parameters(embedding=1, head=3, experts=16, active_experts=4, mtp=5)
    assert (both.total, both.active) == (20, 8)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"layers": 20_000}, ["layers = 20000: must be above 0 and at most 10,000"]),
        ({"mtp": 20_000}, ["mtp = 20000: must be at least 0 and at most 10,000"]),
        ({"vocab": 2 * 10**9}, ["vocab = 2000000000: must be above 0 and at most 1,000,000,000"]),
        ({"rope_theta": float("inf")}, ["rope_theta = inf: must be above 0 and finite"]),
        (
            {"moe": Moe(experts=8, top_k=9, ffn=64, groups=4, groups_kept=2)},
            ["moe.top_k = 9 exceeds moe.experts = 8: lower it"],
        ),
    ],
)
def test_each_mistake_has_one_reason(changes: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(BadFile) as caught:
        dataclasses.replace(load("tiny"), **changes)
    assert caught.value.problems == reasons

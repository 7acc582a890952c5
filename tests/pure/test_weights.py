"""The table of weights: names, sizes, and what a tp rank holds of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core import count, models
from fivefold.core.errors import FivefoldError
from fivefold.core.shape import Mla, Moe, Rope, Shape
from fivefold.core.weights import Piece, Weight, by_name, local_shape, piece, weights

TINY = models.load("tiny")  # width 64, 8 heads and 4 KV heads of 8, ffn 176, vocabulary 256
GPT2 = models.load("gpt2")
QWEN3 = models.load("qwen3-0.6b")

UNSUPPORTED = {
    "moe": {"moe": Moe(experts=4, top_k=1, ffn=8)},
    "mla": {"mla": Mla(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=8), "kv_heads": 8},
    "mtp": {"mtp": 1},
    "alibi": {"positions": "alibi"},
    "parallel_block": {"parallel_block": True},
    "embedding_norm": {"embedding_norm": True},
    "chunked": {"window": 8, "window_kind": "chunked"},
    "global_every": {"global_every": 4},
    "qk_norm=full": {"qk_norm": "full"},
    "qk_norm=l2": {"qk_norm": "l2"},
    "yarn": {"rope": Rope("yarn", 4.0, 1024)},
    "rope_interleaved": {"rope_interleaved": True},
}
# Presets whose dense decoder the table can list; the rest need a feature of UNSUPPORTED.
REFUSED = {
    *("bloom-176b", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "llama-4-maverick"),
    *("mixtral-8x22b", "mixtral-8x7b", "olmoe-1b-7b", "palm-540b", "qwen2-57b-a14b"),
    *("qwen3-235b-a22b", "qwen3-30b-a3b", "tiny-moe"),
}


@pytest.mark.parametrize("name", sorted(set(models.presets()) - REFUSED))
def test_the_table_weighs_what_is_counted(name: str) -> None:
    shape = models.load(name)
    assert sum(one.numel for one in weights(shape)) == count.parameters(shape).total


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_presets_with_later_features_are_refused(name: str) -> None:
    with pytest.raises(FivefoldError, match="can be planned but not built"):
        weights(models.load(name))


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_refusal_names_the_feature(word: str) -> None:
    shape = replace(TINY, **UNSUPPORTED[word])
    with pytest.raises(FivefoldError, match=word) as caught:
        weights(shape)
    others = [other for other in UNSUPPORTED if other != word and other in str(caught.value)]
    assert not others


def test_a_llama_block_by_hand() -> None:
    assert [one for one in weights(TINY) if one.block == "blocks.3"] == [
        Weight("blocks.3.attention_norm.weight", (64,), "blocks.3", "whole"),
        Weight("blocks.3.attention.q.weight", (64, 64), "blocks.3", "column"),
        Weight("blocks.3.attention.k.weight", (32, 64), "blocks.3", "kv"),
        Weight("blocks.3.attention.v.weight", (32, 64), "blocks.3", "kv"),
        Weight("blocks.3.attention.out.weight", (64, 64), "blocks.3", "row"),
        Weight("blocks.3.mlp_norm.weight", (64,), "blocks.3", "whole"),
        Weight("blocks.3.mlp.gate.weight", (176, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.up.weight", (176, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.down.weight", (64, 176), "blocks.3", "row"),
    ]


def test_the_ends_by_hand() -> None:
    ends = [one for one in weights(TINY) if not one.block.startswith("blocks")]
    assert ends == [
        Weight("embed.weight", (256, 64), "embed", "vocab"),
        Weight("norm.weight", (64,), "head", "whole"),
        Weight("head.weight", (256, 64), "head", "vocab"),
    ]
    assert weights(TINY)[0].block == "embed" and weights(TINY)[-1].name == "head.weight"


def test_gpt2_has_positions_biases_and_no_second_head() -> None:
    names = [one.name for one in weights(GPT2)]
    assert names[:2] == ["embed.weight", "embed.positions"]
    assert names[-2:] == ["norm.weight", "norm.bias"]
    cuts = {one.name: (one.shape, one.cut) for one in weights(GPT2)}
    assert cuts["blocks.0.attention.q.bias"] == ((768,), "column")
    assert cuts["blocks.0.attention.k.bias"] == ((768,), "kv")
    assert cuts["blocks.0.attention.out.bias"] == ((768,), "whole")
    assert cuts["blocks.0.mlp.up.bias"] == ((3072,), "column")
    assert cuts["blocks.0.mlp.down.bias"] == ((768,), "whole")
    assert not any("gate" in name for name in names)


def test_a_tied_head_leads_to_the_embedding() -> None:
    assert by_name(GPT2)["head.weight"] == by_name(GPT2)["embed.weight"]
    assert by_name(TINY)["head.weight"].name == "head.weight"


def test_kv_heads_fewer_than_tp_are_replicated() -> None:
    keys = by_name(TINY)["blocks.0.attention.k.weight"]  # 4 heads of 8 rows
    held = [piece(keys, TINY, 8, False, coord) for coord in range(8)]
    assert [one.start for one in held] == [0, 0, 8, 8, 16, 16, 24, 24]
    assert held[5] == Piece(0, 16, 24, 32, copies=2, partial=True)
    assert piece(keys, TINY, 2, True, 1) == Piece(0, 16, 32, 32, copies=1, partial=False)


def test_an_odd_vocabulary_is_padded() -> None:
    embed = by_name(GPT2)["embed.weight"]  # 50257 = 8 · 6282 + 1
    last = piece(embed, GPT2, 8, False, 7)
    assert last == Piece(0, 43981, 50264, 50264, copies=1, partial=False)
    assert local_shape(embed, last) == (6283, 768)


def test_row_cut_splits_inputs() -> None:
    down = by_name(TINY)["blocks.0.mlp.down.weight"]
    held = piece(down, TINY, 4, True, 3)
    assert held == Piece(1, 132, 176, 176, copies=1, partial=False)
    assert local_shape(down, held) == (64, 44)


@pytest.mark.parametrize(
    ("name", "without_sp", "with_sp"),
    [
        ("blocks.0.attention_norm.weight", False, True),
        ("blocks.0.attention.q_norm.weight", True, True),
        ("blocks.0.attention.k_norm.weight", True, True),
        ("norm.weight", False, True),
    ],
)
def test_when_a_whole_weight_has_a_partial_gradient(
    name: str, without_sp: bool, with_sp: bool
) -> None:
    weight = by_name(QWEN3)[name]
    assert piece(weight, QWEN3, 4, False, 1).partial is without_sp
    assert piece(weight, QWEN3, 4, True, 1).partial is with_sp
    assert piece(weight, QWEN3, 4, True, 1).copies == 4
    assert local_shape(weight, piece(weight, QWEN3, 4, True, 1)) == weight.shape


@st.composite
def shapes_and_tp(draw: st.DrawFn) -> tuple[Shape, int]:
    """A small dense model and a tp degree that legality would let through."""
    tp = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([k for k in range(1, 13) if k % tp == 0 or tp % k == 0]))
    heads = kv_heads * draw(st.sampled_from([g for g in range(1, 13) if kv_heads * g % tp == 0]))
    flags = ("tied", "norm_bias", "qkv_bias", "out_bias", "mlp_bias")
    shape = Shape(
        name="drawn",
        layers=draw(st.integers(1, 2)),
        width=draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        ffn=tp * draw(st.integers(1, 5)),
        vocab=draw(st.integers(1, 40)),
        max_seq=draw(st.integers(1, 9)),
        positions=draw(st.sampled_from(["rotary", "learned", "none"])),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        qk_norm=draw(st.sampled_from(["none", "head"])),
        **{flag: draw(st.booleans()) for flag in flags},
    )
    return shape, tp


@given(shapes_and_tp(), st.booleans())
def test_pieces_tile_every_weight(drawn: tuple[Shape, int], sp: bool) -> None:
    shape, tp = drawn
    for weight in weights(shape):
        held = [piece(weight, shape, tp, sp, coord) for coord in range(tp)]
        (copies,) = {one.copies for one in held}
        (size,) = {one.size for one in held}
        times = Counter(i for one in held for i in range(one.start, one.stop))
        assert times == dict.fromkeys(range(size), copies)
        dim = held[0].dim or 0
        assert 0 <= size - weight.shape[dim] < tp, "padding is less than one row a rank"
        assert size == weight.shape[dim] or weight.cut == "vocab"
        assert all(local_shape(weight, one)[dim] == one.stop - one.start for one in held)
        assert not any(one.partial for one in held) or copies > 1


@given(shapes_and_tp())
def test_queries_meet_their_own_keys(drawn: tuple[Shape, int]) -> None:
    """Head h uses KV head h·kv_heads // heads; both must lie on the same rank."""
    shape, tp = drawn
    table, d = by_name(shape), shape.head_dim
    for coord in range(tp):
        q = piece(table["blocks.0.attention.q.weight"], shape, tp, False, coord)
        k = piece(table["blocks.0.attention.k.weight"], shape, tp, False, coord)
        needed = {h * shape.kv_heads // shape.heads for h in range(q.start // d, q.stop // d)}
        assert needed == set(range(k.start // d, k.stop // d))


@given(shapes_and_tp())
def test_one_rank_holds_everything(drawn: tuple[Shape, int]) -> None:
    shape, _ = drawn
    for weight in weights(shape):
        size = weight.shape[0]
        assert piece(weight, shape, 1, True, 0) == Piece(None, 0, size, size, 1, False)

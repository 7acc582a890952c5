"""The table of weights: names, sizes, and what a tp rank holds of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import (
    Weight,
    WeightShard,
    buffers,
    by_name,
    decays,
    local_shape,
    planned_weights,
    tp_shard,
    tuned,
    weights,
)
from fivefold.core.model import parameters
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Mla, Moe, Shape
from fivefold.core.model.tuning import Tuning

TINY = models.load("tiny")  # width 64, 8 heads and 4 KV heads of 8, ffn 176, vocabulary 256
GPT2 = models.load("gpt2")
QWEN3 = models.load("qwen3-0.6b")
TINY_MOE = models.load("tiny-moe")  # as tiny, with 8 experts of 64 and a shared one from layer 1 on
V3 = models.load("deepseek-v3")
MLA = Mla(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6, q_rank=12)
LATENT = replace(TINY, mla=MLA, kv_heads=8)

UNSUPPORTED = {
    "alibi": {"positions": "alibi"},
    "embedding_norm": {"embedding_norm": True},
    "qk_norm in latent": {"mla": MLA, "kv_heads": 8, "qk_norm": "head"},
    "prediction with learned": {"mtp": 1, "positions": "learned"},
}
# Presets that need a feature of UNSUPPORTED.
REFUSED = {"bloom-176b", "qwen3-next-80b-a3b"}


@pytest.mark.parametrize("name", sorted(set(models.presets()) - REFUSED))
def test_the_table_weighs_what_is_counted(name: str) -> None:
    shape = models.load(name)
    counted = parameters(shape)
    assert sum(one.numel for one in weights(shape)) == counted.total + counted.mtp


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_presets_with_later_features_are_refused(name: str) -> None:
    with pytest.raises(FivefoldError, match=r"can be planned but not built|is planned only"):
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
        Weight("blocks.3.attention_norm.weight", (64,), "blocks.3", "whole", "norm"),
        Weight("blocks.3.attention.q.weight", (64, 64), "blocks.3", "column"),
        Weight("blocks.3.attention.k.weight", (32, 64), "blocks.3", "kv"),
        Weight("blocks.3.attention.v.weight", (32, 64), "blocks.3", "kv"),
        Weight("blocks.3.attention.out.weight", (64, 64), "blocks.3", "row"),
        Weight("blocks.3.mlp_norm.weight", (64,), "blocks.3", "whole", "norm"),
        Weight("blocks.3.mlp.gate.weight", (176, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.up.weight", (176, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.down.weight", (64, 176), "blocks.3", "row"),
    ]


def test_the_ends_by_hand() -> None:
    ends = [one for one in weights(TINY) if not one.block.startswith("blocks")]
    assert ends == [
        Weight("embed.weight", (256, 64), "embed", "vocab", "embedding"),
        Weight("norm.weight", (64,), "head", "whole", "norm"),
        Weight("head.weight", (256, 64), "head", "vocab", "embedding"),
    ]
    assert weights(TINY)[0].block == "embed" and weights(TINY)[-1].name == "head.weight"


def test_a_layer_with_experts_by_hand() -> None:
    mlp = [one for one in weights(TINY_MOE) if one.name.startswith("blocks.3.mlp.")]
    assert mlp == [
        Weight("blocks.3.mlp.router.weight", (8, 64), "blocks.3", "whole"),
        Weight("blocks.3.mlp.experts.gate.weight", (8, 64, 64), "blocks.3", "expert", expert_dim=1),
        Weight("blocks.3.mlp.experts.up.weight", (8, 64, 64), "blocks.3", "expert", expert_dim=1),
        Weight("blocks.3.mlp.experts.down.weight", (8, 64, 64), "blocks.3", "expert", expert_dim=2),
        Weight("blocks.3.mlp.shared.gate.weight", (64, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.shared.up.weight", (64, 64), "blocks.3", "column"),
        Weight("blocks.3.mlp.shared.down.weight", (64, 64), "blocks.3", "row"),
    ]
    first = [one.name for one in weights(TINY_MOE) if one.name.startswith("blocks.0.mlp.")]
    assert first == [f"blocks.0.mlp.{one}.weight" for one in ("gate", "up", "down")]


def test_the_width_of_experts_lies_in_their_expert_dim() -> None:
    moe = Moe(experts=4, top_k=1, ffn=24, shared=1, shared_ffn=16, shared_gated=True)
    shape = replace(TINY, moe=moe, mlp_bias=True)
    experts = [one for one in weights(shape) if one.cut == "expert"]
    assert len(experts) == 3 * TINY.layers
    assert all(one.shape[one.expert_dim or 0] == 24 and one.shape[0] == 4 for one in experts)
    gate = by_name(shape)["blocks.0.mlp.shared_gate.weight"]
    assert (gate.shape, gate.cut) == ((1, 64), "whole")
    assert not any(one.name.endswith(".bias") for one in weights(shape)), "experts have none"


def test_latent_attention_by_hand() -> None:
    shape = replace(LATENT, qkv_bias=True, out_bias=True, head_dim=8)
    found = [one for one in weights(shape) if one.name.startswith("blocks.0.attention.")]
    name = "blocks.0.attention"
    assert found == [
        Weight(f"{name}.q_down.weight", (12, 64), "blocks.0", "whole", spread=True),
        Weight(f"{name}.q_down.bias", (12,), "blocks.0", "whole", "bias", spread=True),
        Weight(f"{name}.q_latent_norm.weight", (12,), "blocks.0", "whole", "norm", spread=True),
        Weight(f"{name}.q_up.weight", (64, 12), "blocks.0", "column"),
        Weight(f"{name}.kv_down.weight", (12, 64), "blocks.0", "whole", spread=True),
        Weight(f"{name}.kv_down.bias", (12,), "blocks.0", "whole", "bias", spread=True),
        Weight(f"{name}.kv_latent_norm.weight", (8,), "blocks.0", "whole", "norm", spread=True),
        Weight(f"{name}.kv_up.weight", (80, 8), "blocks.0", "column"),
        Weight(f"{name}.out.weight", (64, 48), "blocks.0", "row"),
        Weight(f"{name}.out.bias", (64,), "blocks.0", "whole", "bias"),
    ]
    direct = replace(shape, mla=replace(MLA, q_rank=None))
    assert by_name(direct)[f"{name}.q.weight"].cut == "column"
    assert not any("q_down" in one.name for one in weights(direct))


def test_layers_ahead_are_blocks_of_their_own_behind_the_head() -> None:
    shape = replace(TINY_MOE, mtp=2)
    names = [one.name for one in weights(shape)]
    behind = names[names.index("head.weight") + 1 :]
    assert behind[:3] == [f"mtp.0.{one}.weight" for one in ("token_norm", "hidden_norm", "join")]
    assert "mtp.1.block.mlp.experts.up.weight" in behind and behind[-1] == "mtp.1.norm.weight"
    assert {one.block for one in weights(shape) if one.name in behind} == {"mtp.0", "mtp.1"}
    assert by_name(shape)["mtp.0.join.weight"].shape == (64, 128)
    assert by_name(shape)["mtp.embed.weight"].name == "embed.weight"
    tied = by_name(replace(shape, tied=True))
    assert "mtp.embed.weight" not in tied and tied["head.weight"].name == "embed.weight"


def test_biases_of_the_choice_are_buffers() -> None:
    found = buffers(V3)
    assert [one.name for one in found[:2]] == [f"blocks.{i}.mlp.router.bias" for i in (3, 4)]
    assert found[-1].name == "mtp.0.block.mlp.router.bias" and found[-1].block == "mtp.0"
    assert len(found) == 59 and {one.shape for one in found} == {(256,)}
    assert not {one.name for one in found} & set(by_name(V3))
    assert buffers(TINY_MOE) == buffers(TINY) == ()


@pytest.mark.parametrize("name", sorted(models.presets()))
def test_roles_are_those_that_the_names_say(name: str) -> None:
    """Of stacked experts too, whose biases have two dims."""
    shape = models.load(name)
    if shape.moe is not None:
        shape = replace(
            shape, moe=replace(shape.moe, biases=True), sinks=not (shape.mla or shape.hybrid)
        )
    tables = ("embed.weight", "embed.positions", "head.weight")
    for one in planned_weights(shape):
        kind = one.name.split(".")[-2] if "." in one.name else ""
        if one.name in tables or one.name.endswith("_conv"):
            wanted = "embedding"
        elif kind.endswith("norm") and one.name.endswith(".weight"):
            wanted = "norm"
        elif one.name.endswith((".bias", ".sinks", ".router.shift")):
            wanted = "bias"
        elif one.name.endswith((".attention.decay", ".decay_bias", ".attention.norm")):
            wanted = "norm"
        else:
            wanted = "matrix"
        assert one.role == wanted, one.name
        assert decays(one.role) == (wanted in ("matrix", "embedding"))
    lora = tuned(replace(TINY_MOE, mlp_bias=True), Tuning(rank=2, alpha=4.0))
    assert {one.role for one in weights(lora) if ".lora." in one.name} == {"matrix"}


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
    held = [tp_shard(keys, TINY, 8, False, coord) for coord in range(8)]
    assert [one.start for one in held] == [0, 0, 8, 8, 16, 16, 24, 24]
    assert held[5] == WeightShard(0, 16, 24, 32, copies=2, partial=True)
    assert tp_shard(keys, TINY, 2, True, 1) == WeightShard(0, 16, 32, 32, copies=1, partial=False)


def test_an_odd_vocabulary_is_padded() -> None:
    embed = by_name(GPT2)["embed.weight"]  # 50257 = 8 · 6282 + 1
    last = tp_shard(embed, GPT2, 8, False, 7)
    assert last == WeightShard(0, 43981, 50264, 50264, copies=1, partial=False)
    assert local_shape(embed, last) == (6283, 768)


def test_row_cut_splits_inputs() -> None:
    down = by_name(TINY)["blocks.0.mlp.down.weight"]
    held = tp_shard(down, TINY, 4, True, 3)
    assert held == WeightShard(1, 132, 176, 176, copies=1, partial=False)
    assert local_shape(down, held) == (64, 44)


@pytest.mark.parametrize(
    ("name", "without_sp", "with_sp"),
    [
        ("blocks.0.attention_norm.weight", False, True),
        ("blocks.0.attention.q_norm.weight", True, True),
        ("blocks.0.attention.k_norm.weight", True, True),
        ("norm.weight", False, True),
        ("blocks.3.mlp.router.weight", False, True),
        ("blocks.3.mlp.experts.up.weight", False, True),
        ("blocks.3.attention.q_down.weight", True, True),
        ("blocks.3.attention.kv_latent_norm.weight", True, True),
        ("mtp.0.join.weight", False, True),
    ],
)
def test_when_a_whole_weight_has_a_partial_gradient(
    name: str, without_sp: bool, with_sp: bool
) -> None:
    shape = next(shape for shape in (QWEN3, V3) if name in by_name(shape))
    weight = by_name(shape)[name]
    assert tp_shard(weight, shape, 4, False, 1).partial is without_sp
    assert tp_shard(weight, shape, 4, True, 1).partial is with_sp
    assert tp_shard(weight, shape, 4, True, 1).copies == 4
    assert local_shape(weight, tp_shard(weight, shape, 4, True, 1)) == weight.shape


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
        qk_norm=draw(st.sampled_from(["none", "head", "full"])),
        **{flag: draw(st.booleans()) for flag in flags},
    )
    if draw(st.booleans()):
        moe = Moe(experts=draw(st.integers(1, 5)), top_k=1, ffn=3, shared=1, shared_ffn=tp)
        shape = replace(shape, moe=moe)
    return shape, tp


@given(shapes_and_tp(), st.booleans())
def test_pieces_tile_every_weight(drawn: tuple[Shape, int], sp: bool) -> None:
    shape, tp = drawn
    for weight in weights(shape):
        held = [tp_shard(weight, shape, tp, sp, coord) for coord in range(tp)]
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
        q = tp_shard(table["blocks.0.attention.q.weight"], shape, tp, False, coord)
        k = tp_shard(table["blocks.0.attention.k.weight"], shape, tp, False, coord)
        needed = {h * shape.kv_heads // shape.heads for h in range(q.start // d, q.stop // d)}
        assert needed == set(range(k.start // d, k.stop // d))


@given(shapes_and_tp())
def test_one_rank_holds_everything(drawn: tuple[Shape, int]) -> None:
    shape, _ = drawn
    for weight in weights(shape):
        size = weight.shape[0]
        assert tp_shard(weight, shape, 1, True, 0) == WeightShard(None, 0, size, size, 1, False)

"""Published configs of families with other norms, rotations and blocks than Llama's: as many
parameters as published, written as read, and refusals of what is not computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hf_configs import Table, decoder
from hf_variant_configs import MISTRAL_SMALL, OLMO3_YARN, VARIANTS

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.layout.weight_table import weights
from fivefold.core.model import parameters
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.hf_families import ORIGINAL
from fivefold.core.model.presets import load, scale_down, to_text, with_overrides
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.huggingface.config_export import as_hf
from fivefold.planner.space import SearchSpace, all_degrees

LONG = {"max_position_embeddings": 131072}
OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LONGROPE: Table = {
    "rope_type": "longrope",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + i for i in range(48)],
}
PYTHIA: Table = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 16384,
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}
FALCON: Table = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "layer_norm_epsilon": 1e-5,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def gemma(*sizes: Any) -> Table:
    keys = decoder(*sizes, head_dim=256, rms_norm_eps=1e-6, attention_bias=False)
    return keys | {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


# Each with the number of parameters that its model card or files give.
PUBLISHED: dict[str, tuple[Table, int]] = {
    "olmo-2-7b": (
        decoder(
            *("olmo2", 32, 4096, 32, 32, 11008, 100352),
            max_position_embeddings=4096,
            rope_theta=500000,
            rms_norm_eps=1e-6,
            attention_bias=False,
        ),
        7_298_617_344,
    ),
    "glm-4-9b-0414": (
        decoder(
            *("glm4", 40, 4096, 32, 2, 13696, 151552),
            **LONG,
            head_dim=128,
            attention_bias=True,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
        ),
        9_400_279_040,
    ),
    "phi-3-mini-4k": (
        decoder(
            *("phi3", 32, 3072, 32, 32, 8192, 32064),
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=2047,
            rope_scaling=None,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        ),
        3_821_079_552,
    ),
    "phi-4": (
        decoder(
            *("phi3", 40, 5120, 40, 10, 17920, 100352),
            max_position_embeddings=16384,
            rms_norm_eps=1e-5,
            sliding_window=None,
            rope_theta=250000,
        ),
        14_659_507_200,
    ),
    "phi-4-mini": (
        decoder(
            *("phi3", 32, 3072, 24, 8, 8192, 200064),
            **LONG,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=262144,
            partial_rotary_factor=0.75,
            rope_scaling=LONGROPE,
            tie_word_embeddings=True,
        ),
        3_836_021_760,
    ),
    "gemma-2-2b": (
        gemma("gemma2", 26, 2304, 8, 4, 9216, 256000)
        | {
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        gemma("gemma3_text", 26, 1152, 4, 1, 6912, 262144)
        | {
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        999_885_952,
    ),
    "gpt-oss-20b": (
        decoder(
            *("gpt_oss", 24, 2880, 64, 8, 2880, 201088),
            **LONG,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=150000,
            rope_scaling=OSS_YARN,
            attention_bias=True,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            swiglu_limit=7.0,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        20_914_757_184,
    ),
    "pythia-6.9b": (PYTHIA, 6_857_302_016),
    "falcon-7b": (FALCON, 6_921_720_704),
    **VARIANTS,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str) -> None:
    config, number = PUBLISHED[name]
    shape = shape_from_config(config, name)
    assert parameters(shape).total == number == sum(one.numel for one in weights(shape))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_newer_config_is_written_as_it_was_read(name: str) -> None:
    config = PUBLISHED[name][0]
    shape = shape_from_config(config, name)
    written = as_hf(shape, "bfloat16").config
    same = (config.keys() & written.keys()) - {"num_kv_heads"}
    assert {key: written[key] for key in same} == {key: config[key] for key in same}
    assert len(same) > 8 and shape_from_config(written, name) == shape


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        (
            "phi-4",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "short_factor = None: must be",
        ),
        (
            "phi-4",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "default, longrope, su, yarn",
        ),
        ("phi-4", {"rope_scaling": LONGROPE}, "rope.long has 48 factors: .* each of 64 pairs"),
        ("phi-4-mini", {"rope_scaling": LONGROPE | {"long_factor": ["1"] * 48}}, "long_factor = "),
        ("phi-4-mini", {"rope_scaling": LONGROPE | {"short_factor": [0] * 48}}, "must be above 0"),
        ("phi-4-mini", {"original_max_position_embeddings": 1}, "longrope needs at least 2"),
        ("phi-4", {"partial_rotary_factor": 1.5}, "no more than all of it"),
        ("pythia-6.9b", {"rotary_pct": 0.001}, "must rotate some of a head"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: not"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("gemma-2-2b", {"layer_types": ["full_attention"] * 25}, "layer_types = .*each n-th"),
        ("gemma-2-2b", {"final_logit_softcapping": 0.0}, "logit_cap = 0.0: must be above 0"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: not supported"),
        ("falcon-7b", {"alibi": True}, "alibi = True: not supported"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: not"),
        ("falcon-7b", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1: not supported"),
        ("olmo-2-7b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: not"),
        ("olmo-3-7b", {"rope_theta": 10000}, "rope_theta = 10000: not supported"),
        ("smollm3-3b", {"use_sliding_window": True}, "use_sliding_window = True: not"),
        ("smollm3-3b", {"layer_types": ["sliding_attention"] * 36}, "only full_attention is"),
        ("smollm3-3b", {"no_rope_layers": [0, 1, 1] * 12}, "must be 0 for each n-th layer"),
        ("starcoder2-3b", {"hidden_act": "silu"}, "supported are gelu_new"),
        ("stablelm-3b-4e1t", {"qk_layernorm": True}, "qk_layernorm = True: not supported"),
        ("stablelm-3b-4e1t", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1: not supported"),
        ("stablelm-3b-4e1t", {"head_dim": 96}, "head_dim = 96: not supported; only 80 is"),
        ("ernie-4.5-0.3b", {"attention_dropout": 0.1}, "attention_dropout = 0.1: not"),
        ("dots.llm1", {"max_window_layers": 30}, "a window on some layers only"),
    ],
)
def test_a_feature_of_no_shape_is_refused(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadFile, match=named):
        shape_from_config(PUBLISHED[name][0] | changes, name)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_older_spellings_of_longrope(kind: str) -> None:
    config = PUBLISHED["phi-4-mini"][0]
    factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    shape = shape_from_config(config, "phi")
    older = {"rope_scaling": {"type": kind, **factors}}
    assert shape_from_config(config | older, "phi") == shape
    # A length beside the table has priority; of this family it has a default.
    assert shape.rope is not None and shape.outgrown_at == 4096
    table = LONGROPE | {"original_max_position_embeddings": 100}
    assert shape_from_config(config | {"rope_scaling": table}, "phi") == shape
    unsaid = {key: each for key, each in config.items() if key != ORIGINAL}
    assert shape_from_config(unsaid, "phi") == shape
    assert shape.rope.scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert replace(shape.rope, attention_factor=1.5).scale == 1.5
    assert replace(shape.rope, factor=1.0).scale == 1.0


def test_longrope_is_planned_and_scaled_down() -> None:
    shape = shape_from_config(PUBLISHED["phi-4-mini"][0], "phi")
    plan = resolve(PlanOptions(to_text(shape), layout="tp=2 cp=2", seq=8192))
    assert plan.shape == shape
    small = scale_down(shape, plan.layout)
    assert small.rope is not None and small.outgrown_at == 20
    assert (small.head_dim, small.rotary_dim) == (8, 6)
    assert small.rope.long == (1.0, 17.0, 33.0) and len(small.rope.short) == 3


def test_layers_of_a_window_are_not_scaled_in_olmo3() -> None:
    config = PUBLISHED["olmo-3-7b"][0]
    shape = shape_from_config(config, "olmo3")
    assert shape.rope is not None and shape.local_theta == shape.rope_theta == 500_000
    nested = {
        "full_attention": OLMO3_YARN | {"rope_theta": 500_000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500_000},
    }
    keys = config.keys() - {"rope_scaling", "rope_theta"}
    newer = {key: config[key] for key in keys} | {"rope_parameters": nested}
    assert shape_from_config(newer, "olmo3") == shape
    plain = shape_from_config(config | {"rope_scaling": None}, "olmo3")
    assert plain.local_theta is None and plain.global_rotary


def test_layers_without_positions_by_interval_or_list() -> None:
    config = PUBLISHED["smollm3-3b"][0]
    assert shape_from_config(config, "s").global_every == 4
    assert shape_from_config(config | {"no_rope_layers": None}, "s").global_every == 4
    assert shape_from_config(config | {"no_rope_layers": [1, 0] * 18}, "s").global_every == 2
    assert shape_from_config(config | {"no_rope_layers": [1] * 36}, "s").global_every is None


@pytest.mark.parametrize("inner", ["mistral", "ministral", None])
def test_the_text_model_of_mistral3_is_of_its_own_family(inner: str | None) -> None:
    text = {key: value for key, value in MISTRAL_SMALL.items() if key != "model_type"}
    text |= {} if inner is None else {"model_type": inner}
    shape = shape_from_config({"model_type": "mistral3", "text_config": text}, "m")
    assert shape.family == (inner or "mistral")
    assert parameters(shape).total == 23_572_403_200


def test_windows_of_ministral() -> None:
    """In all layers, in none, and in all but each n-th."""
    config = MISTRAL_SMALL | {"model_type": "ministral", "sliding_window": 4096}
    everywhere = shape_from_config(config, "m")
    assert (everywhere.window, everywhere.global_every) == (4096, None)
    full, within = "full_attention", "sliding_attention"
    assert shape_from_config(config | {"layer_types": [within] * 40}, "m") == everywhere
    assert shape_from_config(config | {"layer_types": [full] * 40}, "m").window is None
    some = shape_from_config(config | {"layer_types": [within, full] * 20}, "m")
    assert (some.window, some.global_every, some.global_rotary) == (4096, 2, True)
    with pytest.raises(BadFile, match="each n-th"):
        shape_from_config(config | {"layer_types": [full, within] * 20}, "m")


def test_the_embedding_may_have_a_dropout_of_its_own() -> None:
    config = PUBLISHED["phi-4"][0] | {"resid_pdrop": 0.1}
    assert shape_from_config(config | {"embd_pdrop": 0.1}, "p").embedding_dropout is None
    shape = shape_from_config(config | {"embd_pdrop": 0.3}, "p")
    assert (shape.dropout, shape.embedding_rate) == (0.1, 0.3)
    assert as_hf(shape, "bfloat16").config["embd_pdrop"] == 0.3


def test_a_family_that_cannot_be_planned_says_why() -> None:
    with pytest.raises(BadFile, match="'jamba': some of its layers mix"):
        shape_from_config({"model_type": "jamba"}, "config.json")


def test_biases_of_experts_are_neither_split_nor_rounded() -> None:
    model = {"moe.biases": "true", "moe.shared": "0", "moe.shared_ffn": "0"}
    with pytest.raises(FivefoldError, match="etp=2 would add biases of experts more than once"):
        resolve(PlanOptions("tiny-moe", layout="tp=2 etp=2", set=model))
    with pytest.raises(FivefoldError, match="experts with biases are not rounded to fp8"):
        resolve(PlanOptions("tiny-moe", layout="dp=2", set=model, precision="fp8"))


def test_a_search_knows_that_biases_of_experts_are_not_split() -> None:
    model = {"moe.biases": "true", "moe.shared": "0", "moe.shared_ffn": "0"}
    shape = with_overrides(load("tiny-moe"), model)
    space = SearchSpace(shape=shape, gpus=4, seq=256, batch=8)
    assert {each.etp for each in all_degrees(space)} == {1}
    split = replace(space, shape=load("tiny-moe"))
    assert {each.etp for each in all_degrees(split)} > {1}


def test_contradictory_blocks_are_refused() -> None:
    wrong = {
        "norm_at = after: a parallel_block": {"norm_at": "after"},
        "parallel_norms = 3: 1, or 2": {"parallel_norms": 3},
        "rotary_dim = 200: at most head_dim": {"rotary_dim": 200},
        "rotary_dim = 3: rotary positions need an even": {"rotary_dim": 3},
    }
    shape = shape_from_config(PYTHIA, "pythia")
    wrong |= {
        "set global_every too": {"local_theta": 100.0},
        "set global_rotary": {"local_theta": 100.0, "global_every": 2},
    }
    for named, changes in wrong.items():
        with pytest.raises(BadFile, match=named):
            type(shape)(**({**vars(shape)} | changes))

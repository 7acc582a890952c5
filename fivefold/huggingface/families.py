"""How Hugging Face families are written, and those with norms, rotations or blocks of another form
than Llama's: the inverse of `core/model/hf_families.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from fivefold.core import Fields
from fivefold.core.model import Rope, Shape

EXPERT = "{}"  # the number of an expert in a name
ACTIVATIONS = {
    "swiglu": "silu",
    "swiglu_clamped": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_pytorch_tanh",
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
}


class Writer(NamedTuple):
    """How a family is written: the class that loads it, the keys of its config, and the modules of
    a block, and outside of blocks, that Llama does not have or names otherwise.

    Linears with one name are rows of one tensor, in the order of the forward. `grouped`: of each
    KV head its queries, its key and its value, one head after another.
    """

    architecture: str
    keys: Callable[[Shape], Fields]
    block_names: Mapping[str, str] = MappingProxyType({})
    outer: Mapping[str, str] = MappingProxyType({})
    blocks: str = "model.layers"
    transposed: bool = False  # linears are inputs × outputs
    grouped: bool = False
    interleaved: bool = False  # rows of gate and up of experts take turns
    two_norms: Mapping[str, str] = MappingProxyType({})  # if a parallel block has one for each


def decoder_keys(shape: Shape) -> Fields:
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_seq,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": ACTIVATIONS[shape.activation],
        "attention_dropout": shape.attention_dropout,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope is None else _rope_scaling(shape.rope, shape.max_seq),
    }


def _rope_scaling(rope: Rope, max_seq: int) -> Fields:
    """Only the keys of this kind: the transformers package warns about others."""
    table: Fields = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear" or rope.original_seq != max_seq:
        table["original_max_position_embeddings"] = rope.original_seq
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        table |= {} if rope.truncate else {"truncate": False}
        temperatures = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        table |= {key: value for key, value in temperatures.items() if value}
    if rope.kind == "longrope":
        table |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    if rope.kind in ("yarn", "longrope") and rope.attention_factor is not None:
        table["attention_factor"] = rope.attention_factor
    return table


def partial_share(shape: Shape) -> float:
    """The part of a head that is rotated, so that readers that round down find all of it."""
    share = shape.rotated_dim / shape.head_dim
    exact = int(shape.head_dim * share) == shape.rotated_dim
    return share if exact else math.nextafter(share, 2.0)


def _olmo2(shape: Shape) -> Fields:
    return decoder_keys(shape) | {"attention_bias": shape.qkv_bias}


def _glm(shape: Shape) -> Fields:
    own: Fields = {"attention_bias": shape.qkv_bias, "partial_rotary_factor": partial_share(shape)}
    return decoder_keys(shape) | own


def _phi3(shape: Shape) -> Fields:
    dropouts: Fields = {"resid_pdrop": shape.dropout, "embd_pdrop": shape.embedding_rate}
    own: Fields = {"sliding_window": shape.window, "partial_rotary_factor": partial_share(shape)}
    if shape.rope is not None:  # has priority over that of the table
        own["original_max_position_embeddings"] = shape.rope.original_seq
    return decoder_keys(shape) | dropouts | own


def _gpt_neox(shape: Shape) -> Fields:
    keys = decoder_keys(shape)
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps"):
        del keys[key]
    return keys | {
        "hidden_dropout": shape.dropout,
        "layer_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias,
        "use_parallel_residual": shape.parallel_block,
        "rotary_pct": partial_share(shape),
        "rotary_emb_base": keys.pop("rope_theta"),
    }


def _falcon(shape: Shape) -> Fields:
    """The newer architecture if the older one cannot say it."""
    keys, parallel = decoder_keys(shape), shape.parallel_block
    newer = shape.kv_heads not in (1, shape.heads) or shape.parallel_norms > 1
    scaling: Fields = {key: keys[key] for key in ("rope_theta", "rope_scaling")}
    return scaling | {
        "hidden_size": shape.width,
        "ffn_hidden_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_seq,
        "layer_norm_epsilon": shape.norm_eps,
        "activation": ACTIVATIONS[shape.activation],
        "bias": shape.mlp_bias,
        "alibi": False,
        "new_decoder_architecture": newer,
        "multi_query": shape.kv_heads == 1 and not newer,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": shape.parallel_norms if newer else None,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }


def _gemma(shape: Shape) -> Fields:
    keys = decoder_keys(shape)
    activation: Fields = {"hidden_activation": keys["hidden_act"]}
    return keys | activation | {"attention_bias": shape.qkv_bias}


def _gemma3(shape: Shape) -> Fields:
    return _gemma2(shape) | {
        "rope_local_base_freq": shape.local_theta,
        "sliding_window_pattern": shape.global_every,
    }


def _gemma2(shape: Shape) -> Fields:
    keys = _gemma(shape)
    del keys["hidden_act"]
    return keys | {
        "query_pre_attn_scalar": shape.score_dim or shape.head_dim,
        "attn_logit_softcapping": shape.score_cap,
        "final_logit_softcapping": shape.logit_cap,
        "sliding_window": shape.window,
        "layer_types": layer_types(shape),
    }


def layer_types(shape: Shape) -> list[str]:
    """Of a model with windows: which layers have one."""
    kinds = (shape.is_global_layer(i) for i in range(shape.layers))
    return ["full_attention" if is_global else "sliding_attention" for is_global in kinds]


def _llama4(shape: Shape) -> Fields:
    moe = shape.moe
    assert moe is not None, "a family with experts is tried for shapes with experts only"
    every = shape.global_every or shape.layers + 1
    globals_ = [shape.is_global_layer(i) for i in range(shape.layers)]
    return decoder_keys(shape) | {
        "intermediate_size": moe.ffn,
        "intermediate_size_mlp": shape.ffn,
        "attention_bias": shape.qkv_bias,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_layers": list(shape.moe_layers),
        "interleave_moe_layer_step": moe.every,
        "attention_chunk_size": shape.window,
        "no_rope_layer_interval": every,
        "no_rope_layers": [int(not is_global) for is_global in globals_],
        "layer_types": [
            "full_attention" if is_global else "chunked_attention" for is_global in globals_
        ],
        "use_qk_norm": shape.qk_norm == "l2",
        "attn_temperature_tuning": shape.nope_floor is not None,
        "floor_scale": shape.nope_floor or 8192,
        "attn_scale": shape.nope_scale,
    }


def _gpt_oss(shape: Shape) -> Fields:
    moe = shape.moe
    assert moe is not None, "a family with experts is tried for shapes with experts only"
    keys = decoder_keys(shape)
    scaling, theta = keys.pop("rope_scaling") or {"rope_type": "default"}, keys.pop("rope_theta")
    return keys | {
        "rope_parameters": scaling | {"rope_theta": theta},  # without it, that of gpt-oss-120b
        "attention_bias": shape.qkv_bias,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.ffn,
        "sliding_window": shape.window,
        "layer_types": layer_types(shape),
    }


def _seed_oss(shape: Shape) -> Fields:
    return decoder_keys(shape) | {
        "attention_bias": shape.qkv_bias,
        "attention_out_bias": shape.out_bias,
        "mlp_bias": shape.mlp_bias,
        "residual_dropout": shape.dropout,
    }


def _olmo3(shape: Shape) -> Fields:
    keys = _olmo2(shape)
    scaling, theta = keys.pop("rope_scaling") or {"rope_type": "default"}, keys.pop("rope_theta")
    local: Fields = {"rope_type": "default", "rope_theta": shape.local_theta or theta}
    return keys | {
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": theta},
            "sliding_attention": local,
        },
        "sliding_window": shape.window,
        "layer_types": layer_types(shape),
    }


def _smollm3(shape: Shape) -> Fields:
    return decoder_keys(shape) | {
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "no_rope_layers": [int(not shape.is_global_layer(i)) for i in range(shape.layers)],
    }


def _starcoder2(shape: Shape) -> Fields:
    keys = decoder_keys(shape)
    keys["norm_epsilon"] = keys.pop("rms_norm_eps")
    if shape.activation == "gelu_tanh":
        keys["hidden_act"] = "gelu_pytorch_tanh"  # to the last bit what files of the family have
    return keys | {
        "use_bias": shape.mlp_bias,
        "sliding_window": shape.window,
        "residual_dropout": shape.dropout,
        "embedding_dropout": shape.embedding_rate,
    }


def _stablelm(shape: Shape) -> Fields:
    keys = decoder_keys(shape)
    keys["layer_norm_eps"] = keys.pop("rms_norm_eps")
    return keys | {
        "use_qkv_bias": shape.qkv_bias,
        "use_parallel_residual": shape.parallel_block,
        "partial_rotary_factor": partial_share(shape),
    }


def _ernie4_5(shape: Shape) -> Fields:
    return decoder_keys(shape) | {"use_bias": shape.mlp_bias}


def _ministral(shape: Shape) -> Fields:
    kinds = layer_types(shape) if shape.window else ["full_attention"] * shape.layers
    # Masks of both kinds are made there whatever the layers are, so that null fails.
    window = shape.window or shape.max_seq
    return decoder_keys(shape) | {"sliding_window": window, "layer_types": kinds}


_FUSED = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}
_QKV = ("attention.q", "attention.k", "attention.v")
_GATE, _UP, _DOWN = (f"mlp.experts.{name}.weight" for name in ("gate", "up", "down"))
OLMO2 = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
GLM4 = _FUSED | {
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
PHI3 = _FUSED | dict.fromkeys(_QKV, "self_attn.qkv_proj")
GEMMA3 = OLMO2 | {"mlp_norm": "pre_feedforward_layernorm"}
_LLAMA4_EXPERTS = "feed_forward.experts"
LLAMA4 = {
    **{f"mlp.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "mlp.router": "feed_forward.router",
    **dict.fromkeys((_GATE, _UP), f"{_LLAMA4_EXPERTS}.gate_up_proj"),
    _DOWN: f"{_LLAMA4_EXPERTS}.down_proj",
    **{
        f"mlp.shared.{name}": f"feed_forward.shared_expert.{name}_proj"
        for name in ("gate", "up", "down")
    },
}
GPT_OSS = {
    "attention.sinks": "self_attn.sinks",
    "mlp.router": "mlp.router",
    "mlp.router.shift": "mlp.router.bias",
    **dict.fromkeys((_GATE, _UP), "mlp.experts.gate_up_proj"),
    **dict.fromkeys(
        ("mlp.experts.gate.bias", "mlp.experts.up.bias"), "mlp.experts.gate_up_proj_bias"
    ),
    _DOWN: "mlp.experts.down_proj",
    "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
}
STARCODER2 = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
GPT_NEOX_OUTER = {
    "embed.weight": "gpt_neox.embed_in.weight",
    "norm": "gpt_neox.final_layer_norm",
    "head.weight": "embed_out.weight",
}
GPT_NEOX = dict.fromkeys(_QKV, "attention.query_key_value") | {
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
FALCON_OUTER = {
    "embed.weight": "transformer.word_embeddings.weight",
    "norm": "transformer.ln_f",
    "head.weight": "lm_head.weight",
}
FALCON = dict.fromkeys(_QKV, "self_attention.query_key_value") | {
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

NEWER: dict[str, Writer] = {
    "olmo2": Writer("Olmo2ForCausalLM", _olmo2, OLMO2),
    "glm": Writer("GlmForCausalLM", _glm, _FUSED),
    "glm4": Writer("Glm4ForCausalLM", _glm, GLM4),
    "phi3": Writer("Phi3ForCausalLM", _phi3, PHI3),
    "gemma": Writer("GemmaForCausalLM", _gemma),
    "gemma2": Writer("Gemma2ForCausalLM", _gemma2, GEMMA3),
    "gemma3_text": Writer("Gemma3ForCausalLM", _gemma3, GEMMA3),
    "llama4_text": Writer("Llama4ForCausalLM", _llama4, LLAMA4),
    "gpt_oss": Writer("GptOssForCausalLM", _gpt_oss, GPT_OSS, interleaved=True),
    "gpt_neox": Writer(
        *("GPTNeoXForCausalLM", _gpt_neox, GPT_NEOX, GPT_NEOX_OUTER, "gpt_neox.layers"),
        grouped=True,
    ),
    "falcon": Writer(
        *("FalconForCausalLM", _falcon, FALCON, FALCON_OUTER, "transformer.h"),
        grouped=True,
        two_norms={"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    ),
    "seed_oss": Writer("SeedOssForCausalLM", _seed_oss),
    "olmo3": Writer("Olmo3ForCausalLM", _olmo3, OLMO2),
    "smollm3": Writer("SmolLM3ForCausalLM", _smollm3),
    "starcoder2": Writer("Starcoder2ForCausalLM", _starcoder2, STARCODER2),
    "stablelm": Writer("StableLmForCausalLM", _stablelm),
    "ernie4_5": Writer("Ernie4_5ForCausalLM", _ernie4_5),
    "ministral": Writer("MinistralForCausalLM", _ministral),
}

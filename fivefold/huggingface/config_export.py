"""`Shape` to a Hugging Face `config.json`: the inverse of `hf_config.py`, family by family.

A config is returned only if reading it gives the same shape, so that no feature of the model is
lost in the export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.core import BadFile, Fields, FivefoldError
from fivefold.core.model import Moe, Shape, refuse_mixer, shape_from_config
from fivefold.huggingface.families import (
    ACTIVATIONS,
    EXPERT,
    NEWER,
    Writer,
    decoder_keys,
    layer_types,
    partial_share,
)

# A shape does not have these. The transformers package has defaults, which may be outside the
# vocabulary, so that unknown ids are written as null.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


GPT2_OUTER = {
    "embed.weight": "transformer.wte.weight",
    "embed.positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "head.weight": "lm_head.weight",
}
GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
# Names of modules in a block that differ from those of Llama.
MOE = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": f"mlp.experts.{EXPERT}.gate_proj",
    "mlp.experts.up": f"mlp.experts.{EXPERT}.up_proj",
    "mlp.experts.down": f"mlp.experts.{EXPERT}.down_proj",
}
MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": f"block_sparse_moe.experts.{EXPERT}.w1",
    "mlp.experts.up": f"block_sparse_moe.experts.{EXPERT}.w3",
    "mlp.experts.down": f"block_sparse_moe.experts.{EXPERT}.w2",
}
QWEN2_MOE = MOE | {
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
SHARED = {
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
}
DEEPSEEK = {**MOE, **SHARED} | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}


class HfModel(NamedTuple):
    """A model in a Hugging Face family: the shape with that family, and the config."""

    shape: Shape
    config: Fields


def as_hf(shape: Shape, dtype: str, source: Mapping[str, Any] | None = None) -> HfModel:
    """The model in its own family, or in the first one that can express it.

    `dtype` is torch's name for the dtype of the weights. The ids of special tokens are taken from
    the config `source`.
    """
    refuse_mixer(shape, "a Hugging Face config")
    for family in dict.fromkeys((shape.family, *WRITERS)):
        config = _written(shape, family)
        if config is not None and not _lost(shape, config):
            token_ids = {key: (source or {}).get(key) for key in TOKEN_IDS}
            config |= {"torch_dtype": dtype, **token_ids}
            return HfModel(replace(shape, family=family), config)
    raise FivefoldError(
        f"model {shape.name!r} cannot be expressed in a Hugging Face config: {_why_not(shape)}; "
        f"train a model of one of {', '.join(WRITERS)} to export it"
    )


def _written(shape: Shape, family: str) -> Fields | None:
    """The config in that family; None if only one of family and model has experts or latents.

    A shared expert may have no width, but its gate would be a weight that the model does not have.
    """
    writer = WRITERS.get(family)
    if writer is None or ("mlp.router" in writer.block_names) != (shape.moe is not None):
        return None
    if ("attention.kv_down" in writer.block_names) != (shape.mla is not None):
        return None
    if "mlp.shared_gate" in writer.block_names and not _moe(shape).shared:
        return None
    return {
        "architectures": [writer.architecture],
        "model_type": family,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        **writer.keys(shape),
    }


def _lost(shape: Shape, config: Fields) -> list[str]:
    """The names of the shape's fields that the config does not express.

    Few families have keys for dropout. It is a matter of training: weights do not depend on it.
    """
    try:
        back = shape_from_config(config, shape.name)
    except BadFile as error:
        return error.problems
    names = {field.name for field in dataclasses.fields(Shape) if field.compare}
    names -= {"dropout", "embedding_dropout"}
    return sorted(name for name in names if getattr(back, name) != getattr(shape, name))


def _why_not(shape: Shape) -> str:
    config = _written(shape, shape.family)
    if config is not None:
        return f"that of {shape.family} has no keys for its {', '.join(_lost(shape, config))}"
    return f"no family has its attention, experts and norms together (its own is {shape.family!r})"


def _gpt2(shape: Shape) -> Fields:
    return {
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.embedding_rate,
        "attn_pdrop": shape.attention_dropout,
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.max_seq,
        "layer_norm_epsilon": shape.norm_eps,
        "activation_function": ACTIVATIONS[shape.activation],
        "scale_attn_weights": (shape.score_dim or shape.head_dim) == shape.head_dim,
    }


def _biased(shape: Shape) -> Fields:
    return decoder_keys(shape) | {"attention_bias": shape.qkv_bias}


def _mistral(shape: Shape) -> Fields:
    return decoder_keys(shape) | {"sliding_window": shape.window}


def _windowed(shape: Shape) -> Fields:
    """A window applies only if it is enabled, to layers that Qwen's families choose by different
    rules if they are not listed."""
    if shape.window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    switched: Fields = {"use_sliding_window": True, "sliding_window": shape.window}
    return switched | {"max_window_layers": 0, "layer_types": layer_types(shape)}


def _qwen2(shape: Shape) -> Fields:
    return decoder_keys(shape) | _windowed(shape)


def _qwen3(shape: Shape) -> Fields:
    return _biased(shape) | _windowed(shape)


def _mixtral(shape: Shape) -> Fields:
    moe = _moe(shape)
    experts: Fields = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
    return _mistral(shape) | experts


def _qwen2_moe(shape: Shape) -> Fields:
    shared: Fields = {"shared_expert_intermediate_size": _moe(shape).shared_ffn}
    return _qwen2(shape) | _qwen_experts(shape) | shared | {"qkv_bias": shape.qkv_bias}


def _qwen_experts(shape: Shape) -> Fields:
    moe = _moe(shape)
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.renormalise,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(range(moe.first_dense)),
    }


def _olmoe(shape: Shape) -> Fields:
    moe = _moe(shape)
    return _biased(shape) | {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.renormalise,
    }


def _deepseek_v2(shape: Shape) -> Fields:
    """Neither `rope_interleave` nor `norm_topk_prob`, which the transformers package fixes here."""
    method = "group_limited_greedy" if _moe(shape).groups > 1 else "greedy"
    return _deepseek(shape, method, "softmax")


def _deepseek_v3(shape: Shape) -> Fields:
    return _deepseek(shape, "noaux_tc", "sigmoid") | {
        "norm_topk_prob": _moe(shape).renormalise,
        "rope_interleave": shape.rope_interleaved,
        "num_nextn_predict_layers": shape.mtp,
    }


def _deepseek(shape: Shape, topk_method: str, scoring: str) -> Fields:
    moe, mla, fields = _moe(shape), shape.mla, _biased(shape)
    assert mla is not None, "a family with latents is tried for shapes with latents only"
    del fields["head_dim"]  # there it is the width of the rotary part
    return fields | {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "moe_layer_freq": 1,
        "topk_method": topk_method,
        "scoring_func": scoring,
        **_deepseek_experts(moe),
    }


def _glm4_moe(shape: Shape) -> Fields:
    moe = _moe(shape)
    return decoder_keys(shape) | {
        "attention_bias": shape.qkv_bias,
        "partial_rotary_factor": partial_share(shape),
        "use_qk_norm": shape.qk_norm == "head",
        "num_nextn_predict_layers": shape.mtp,
        "norm_topk_prob": moe.renormalise,
        **_deepseek_experts(moe),
    }


def _dots1(shape: Shape) -> Fields:
    window: Fields = {"sliding_window": shape.window, "max_window_layers": 0}
    experts: Fields = {"norm_topk_prob": _moe(shape).renormalise, **_deepseek_experts(_moe(shape))}
    return _biased(shape) | window | experts


def _deepseek_experts(moe: Moe) -> Fields:
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared,
        "first_k_dense_replace": moe.first_dense,
        "routed_scaling_factor": moe.scaling,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
    }


def _moe(shape: Shape) -> Moe:
    assert shape.moe is not None, "a family with experts is tried for shapes with experts only"
    return shape.moe


WRITERS: dict[str, Writer] = {
    "gpt2": Writer(
        *("GPT2LMHeadModel", _gpt2, GPT2_BLOCK, GPT2_OUTER),
        blocks="transformer.h",
        transposed=True,
    ),
    "llama": Writer("LlamaForCausalLM", lambda s: _biased(s) | {"mlp_bias": s.mlp_bias}),
    "mistral": Writer("MistralForCausalLM", _mistral),
    "qwen2": Writer("Qwen2ForCausalLM", _qwen2),
    "qwen3": Writer("Qwen3ForCausalLM", _qwen3),
    "mixtral": Writer("MixtralForCausalLM", _mixtral, MIXTRAL),
    "qwen2_moe": Writer("Qwen2MoeForCausalLM", _qwen2_moe, QWEN2_MOE),
    "qwen3_moe": Writer("Qwen3MoeForCausalLM", lambda s: _qwen3(s) | _qwen_experts(s), MOE),
    "olmoe": Writer("OlmoeForCausalLM", _olmoe, MOE),
    "deepseek_v2": Writer("DeepseekV2ForCausalLM", _deepseek_v2, DEEPSEEK),
    "deepseek_v3": Writer("DeepseekV3ForCausalLM", _deepseek_v3, DEEPSEEK),
    "glm4_moe": Writer("Glm4MoeForCausalLM", _glm4_moe, {**MOE, **SHARED}),
    "dots1": Writer("Dots1ForCausalLM", _dots1, {**MOE, **SHARED}),
    **NEWER,
}

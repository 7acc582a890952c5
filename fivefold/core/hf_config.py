"""Hugging Face `config.json` to `Shape`, one function per family.

Sizes must be in the file; other absent keys have the family's default in the `transformers`
package. A feature that a Shape cannot express is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fivefold.core.errors import BadFile
from fivefold.core.hf_families import NEWER, PLAIN, decoder_fields, dropouts
from fivefold.core.hf_variants import VARIANTS
from fivefold.core.hybrid import Hybrid
from fivefold.core.shape import Mla, Moe, Shape
from fivefold.core.tables import (
    Config,
    Fields,
    attention_bias,
    expert_placement,
    head_dim,
    indices,
)

_MIXED = (
    "some of its layers mix tokens by a recurrence and some by attention, and a model here has one "
    "mixer for all layers; use a model with attention, or write the recurrence as an own mixer"
)
REFUSED = dict.fromkeys(("falcon_h1", "jamba", "bamba", "granitemoehybrid"), _MIXED)
# Their text model has a table of its own, of this family if it does not say.
WITH_IMAGES = {"llama4": "llama4_text", "gemma3": "gemma3_text", "mistral3": "mistral"}


def shape_from_config(config: Mapping[str, Any], where: str) -> Shape:
    """Read the text model of a parsed config, or raise one `BadFile` with every problem."""
    family = config.get("model_type")
    text = config.get("text_config")
    if isinstance(family, str) and family in WITH_IMAGES and isinstance(text, Mapping):
        config = cast("Mapping[str, Any]", text)
        family = config.get("model_type", WITH_IMAGES[family])
    if isinstance(family, str) and family in REFUSED:
        raise BadFile(where, [f"model_type = {family!r}: {REFUSED[family]}"])
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadFile(where, [f"model_type = {family!r} is not known; use one of {known}"])
    problems: list[str] = []
    fields = FAMILIES[family](Config(config, problems))
    if problems:
        raise BadFile(where, problems)
    try:
        return Shape(name=where, family=family, source=where, **fields)
    except BadFile as error:
        raise BadFile(where, error.problems) from error


def _gpt2(config: Config) -> Fields:
    width, heads = config.whole("n_embd"), config.whole("n_head")
    config.must_be("scale_attn_by_inverse_layer_idx", False)
    config.must_be("add_cross_attention", False)
    return {
        "layers": config.whole("n_layer"),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim(config, width, heads),
        "ffn": config.whole("n_inner", 4 * width),
        "vocab": config.whole("vocab_size"),
        "max_seq": config.whole(config.first_of(("n_positions", "n_ctx"))),
        "tied": config.flag("tie_word_embeddings", True),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "activation": config.choice("activation_function", "gelu_new", PLAIN),
        "positions": "learned",
        "attention_dropout": config.number("attn_pdrop", 0.1),
        **dropouts(config, "resid_pdrop", "embd_pdrop", 0.1),
        **dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), True),
    }


def _llama(config: Config) -> Fields:
    fields = decoder_fields(config, multi_head=True) | attention_bias(config)
    return fields | {"mlp_bias": config.flag("mlp_bias", False)}


def _mistral(config: Config) -> Fields:
    config.must_be("layer_types", None)
    return decoder_fields(config) | {"window": config.optional_whole("sliding_window", 4096)}


def _qwen2(config: Config) -> Fields:
    fields = decoder_fields(config)
    return fields | {"qkv_bias": True, "window": _qwen_window(config, fields["layers"])}


def _qwen3(config: Config) -> Fields:
    # Only the dense family has heads of 128 by default.
    return _qwen3_attention(config) | {"head_dim": config.whole("head_dim", 128)}


def _qwen3_attention(config: Config) -> Fields:
    fields = decoder_fields(config) | attention_bias(config)
    return fields | {"qk_norm": "head", "window": _qwen_window(config, fields["layers"])}


def _mixtral(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, theta=1e6)
    moe = Moe(
        experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn=fields["ffn"],
        renormalise=True,
    )
    return fields | {"window": config.optional_whole("sliding_window"), "moe": moe}


def _qwen2_moe(config: Config) -> Fields:
    fields = _qwen2(config) | {"qkv_bias": config.flag("qkv_bias", True)}
    moe = _qwen_moe(config, fields["layers"]) | _gated_expert(config, 5632)
    return fields | {"moe": Moe(**moe)}


def _gated_expert(config: Config, usual: int) -> Fields:
    shared = config.whole("shared_expert_intermediate_size", usual, least=0)
    return {"shared": int(shared > 0), "shared_ffn": shared, "shared_gated": shared > 0}


def _qwen3_moe(config: Config) -> Fields:
    fields = _qwen3_attention(config)
    return fields | {"moe": Moe(**_qwen_moe(config, fields["layers"]))}


def _qwen3_next(config: Config) -> Fields:
    fields = decoder_fields(config, partial=0.25) | attention_bias(config)
    moe = _qwen_moe(config, fields["layers"]) | _gated_expert(config, 512)
    moe |= {"renormalise": config.flag("norm_topk_prob", True)}
    hybrid = Hybrid(
        attention_every=_full_attention_every(config, fields["layers"]),
        heads=config.whole("linear_num_value_heads", 32),
        key_heads=config.whole("linear_num_key_heads", 16),
        head_dim=config.whole("linear_value_head_dim", 128),
        key_dim=config.whole("linear_key_head_dim", 128),
        kernel=config.whole("linear_conv_kernel_dim", 4),
    )
    own: Fields = {"norm": "rms_offset", "qk_norm": "head", "attention_gate": True}
    own |= {"head_dim": config.whole("head_dim")}  # the family's default is no share of the width
    return fields | own | {"moe": Moe(**moe), "hybrid": hybrid} | _ahead(config)


def _full_attention_every(config: Config, layers: int) -> int:
    """Each n-th layer has full attention, which `layer_types` may list."""
    kinds = config.items("layer_types")
    every = config.whole("full_attention_interval", 4)
    if kinds is None or not config.usable("num_hidden_layers"):
        return every
    every = 1 + kinds.index("full_attention") if "full_attention" in kinds else layers + 1
    names = ("linear_attention", "full_attention")
    if kinds != [names[(i + 1) % every == 0] for i in indices(layers)]:
        config.problem("layer_types", "full_attention must be in each n-th layer only")
    return every


def _qwen_moe(config: Config, layers: int) -> Fields:
    step = config.whole("decoder_sparse_step", 1)
    dense = config.layer_set("mlp_only_layers") or ()
    wanted = [i for i in indices(layers) if (i + 1) % step == 0 and i not in dense]
    return {
        "experts": config.whole(config.first_of(("num_experts", "num_local_experts"))),
        "top_k": config.whole("num_experts_per_tok"),
        "ffn": config.whole("moe_intermediate_size"),
        "renormalise": config.flag("norm_topk_prob", False),
        **expert_placement(config, "mlp_only_layers", wanted, layers),
    }


def _olmoe(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, multi_head=True) | attention_bias(config)
    config.must_be("clip_qkv", None)
    moe = Moe(
        experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn=fields["ffn"],
        renormalise=config.flag("norm_topk_prob", False),
    )
    return fields | {"qk_norm": "full", "moe": moe}


def _deepseek_v2(config: Config) -> Fields:
    choice = {"greedy": "greedy", "group_limited_greedy": "groups"}
    limited = config.choice("topk_method", "greedy", choice) == "groups"
    config.must_be("scoring_func", "softmax")
    # The transformers package ignores it, and DeepSeek's own code then does not scale.
    config.must_be("norm_topk_prob", False)
    routing: Fields = {"scaling": config.number("routed_scaling_factor", 1.0)}
    if limited:
        routing |= {"groups": config.whole("n_group"), "groups_kept": config.whole("topk_group")}
    return _deepseek(config, routing)


def _deepseek_v3(config: Config) -> Fields:
    config.must_be("topk_method", "noaux_tc")
    config.must_be("scoring_func", "sigmoid")
    return _deepseek(config, _sigmoid_routing(config, 2.5, 8, 4)) | _ahead(config)


def _sigmoid_routing(config: Config, scaling: float, groups: int, kept: int) -> Fields:
    return {
        "score": "sigmoid",
        "scaling": config.number("routed_scaling_factor", scaling),
        "renormalise": config.flag("norm_topk_prob", True),
        "groups": config.whole("n_group", groups),
        "groups_kept": config.whole("topk_group", kept),
        "group_score": "top2",
        "bias": True,
    }


def _ahead(config: Config) -> Fields:
    """Newer versions of transformers assume one such layer; here the default is none."""
    mtp = config.first_of(("num_nextn_predict_layers", "num_mtp_layers"))
    return {"mtp": config.whole(mtp, 0, least=0)}


def _dots1(config: Config) -> Fields:
    fields = decoder_fields(config) | attention_bias(config)
    routing = _sigmoid_routing(config, 1.0, 1, 1)
    routing |= {"renormalise": config.flag("norm_topk_prob", False)}
    experts = _deepseek_experts(config, fields["layers"], routing)
    window = _upper_window(config, fields["layers"], 62)
    return fields | {"qk_norm": "head", "window": window, "moe": experts}


def _glm4_moe(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, partial=0.5)
    experts = _deepseek_experts(config, fields["layers"], _sigmoid_routing(config, 1.0, 1, 1), 1)
    own: Fields = {"qkv_bias": config.flag("attention_bias", False), "moe": experts}
    own |= {"qk_norm": "head" if config.flag("use_qk_norm", False) else "none"}
    return fields | own | _ahead(config)


def _deepseek(config: Config, routing: Fields) -> Fields:
    fields = decoder_fields(config, multi_head=True) | attention_bias(config)
    layers, heads = fields["layers"], fields["heads"]
    mla = Mla(
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
        q_rank=config.optional_whole("q_lora_rank", 1536),
    )
    moe = _deepseek_experts(config, layers, routing)
    own: Fields = {"kv_heads": heads, "head_dim": mla.nope_dim + mla.rope_dim, "mla": mla}
    return fields | own | {"rope_interleaved": config.flag("rope_interleave", True), "moe": moe}


def _deepseek_experts(config: Config, layers: int, routing: Fields, usual: int = 0) -> Moe:
    """`usual`: shared experts, and leading layers without experts, if a config does not say."""
    expert = config.whole("moe_intermediate_size")
    shared = config.whole("n_shared_experts", usual, 0)
    dense = config.whole("first_k_dense_replace", usual, 0)
    step = config.whole("moe_layer_freq", 1)
    wanted = [i for i in indices(layers) if i >= dense and i % step == 0]
    return Moe(
        experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn=expert,
        shared=shared,
        shared_ffn=shared * expert,
        **expert_placement(config, "moe_layer_freq", wanted, layers),
        **routing,
    )


def _llama4(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, theta=500_000.0) | attention_bias(config)
    layers, expert = fields["layers"], fields["ffn"]
    step = config.whole("interleave_moe_layer_step", 1)
    listed = config.layer_set("moe_layers")
    by_step = [i for i in indices(layers) if (i + 1) % step == 0]
    wanted = by_step if listed is None else [i for i in indices(layers) if i in listed]
    moe = Moe(
        experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok", 1),
        ffn=expert,
        shared=1,
        shared_ffn=expert,
        score="sigmoid",
        weigh_inputs=True,
        **expert_placement(config, "moe_layers", wanted, layers),
    )
    own: Fields = {"head_dim": config.whole("head_dim", 128), "moe": moe}
    own |= {"ffn": config.whole("intermediate_size_mlp")}
    own |= {"window": config.optional_whole("attention_chunk_size", 8192)}
    own |= {"window_kind": "chunked", "global_every": _llama4_global_every(config, layers)}
    own |= {"qk_norm": "l2" if config.flag("use_qk_norm", True) else "none"}
    if config.flag("attn_temperature_tuning", True):
        own |= {"nope_floor": config.whole("floor_scale", 8192)}
        own |= {"nope_scale": config.number("attn_scale", 0.1)}
    return fields | own | {"rope_interleaved": True}


def _llama4_global_every(config: Config, layers: int) -> int:
    """Llama 4 lists its layers without positions twice more; all three must agree."""
    every = config.whole("no_rope_layer_interval", 4)
    local = [(i + 1) % every != 0 for i in indices(layers)]
    kinds = ["chunked_attention" if one else "full_attention" for one in local]
    sound = config.usable("num_hidden_layers", "no_rope_layer_interval")
    for key, wanted in (("no_rope_layers", local), ("layer_types", kinds)):
        if sound and config.items(key) and config.items(key) != wanted:
            config.problem(key, f"must follow no_rope_layer_interval = {every}")
    return every


def _qwen_window(config: Config, layers: int) -> int | None:
    """Qwen's window applies only with `use_sliding_window`, and on the upper layers."""
    if not config.flag("use_sliding_window", False):
        return None
    return _upper_window(config, layers, 28)


def _upper_window(config: Config, layers: int, usual: int) -> int | None:
    """Of the layers from `max_window_layers` on, which must be all or none."""
    first = config.whole("max_window_layers", usual, least=0)
    by_rule = ["sliding_attention" if i >= first else "full_attention" for i in indices(layers)]
    kinds = config.items("layer_types") or by_rule
    window = config.optional_whole("sliding_window", 4096)
    if window is None or all(kind == "full_attention" for kind in kinds):
        return None
    mixed = any(kind != "sliding_attention" for kind in kinds)
    if mixed and config.usable("num_hidden_layers", "max_window_layers", "layer_types"):
        config.problem("max_window_layers", "a window on some layers only is not supported; set 0")
    return window


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "llama4_text": _llama4,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    **NEWER,
    **VARIANTS,
}

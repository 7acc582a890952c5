"""Hugging Face `config.json` to `Shape`, one function per family.

Sizes must be in the file; other absent keys have the family's default in the `transformers`
package. A feature that a Shape cannot express is refused by name, never ignored.

Hugging Face configs of families that differ by a few keys from those of `hf_families.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from fivefold.core import (
    BadFile,
    Config,
    Fields,
    UnknownName,
    attention_bias,
    expert_placement,
    head_dim,
    indices,
)
from fivefold.core.model.hf_families import (
    NEWER,
    PLAIN,
    alternating,
    decoder_fields,
    dropouts,
    olmo2,
    two_rotations,
    windows_of,
)
from fivefold.core.model.mixers import Hybrid
from fivefold.core.model.shape import Mla, Moe, Shape


def _seed_oss(config: Config) -> Fields:
    """Llama with biases; only what is added to the residual is dropped."""
    return decoder_fields(config) | {
        "head_dim": config.integer("head_dim", 128),
        "qkv_bias": config.flag("attention_bias", True),
        "out_bias": config.flag("attention_out_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
        "dropout": config.number("residual_dropout", 0.1),
        "embedding_dropout": 0.0,
        "attention_dropout": config.number("attention_dropout", 0.1),
    }


def _olmo3(config: Config) -> Fields:
    """OLMo 2 with a window in three of four layers, whose positions are not scaled."""
    fields = olmo2(config) | alternating(config, 4)
    theta = config.number("rope_theta", 500_000.0)
    # Another one is of all layers in some versions of transformers, and of a few in others.
    config.must_be("rope_theta", 500_000)
    rotations = two_rotations(config, fields["max_seq"], theta, theta)
    if rotations["rope"] is None and rotations["local_theta"] == rotations["rope_theta"]:
        del rotations["local_theta"]  # one rotation for all layers
    return fields | rotations


def _smollm3(config: Config) -> Fields:
    """Llama without positions in each fourth layer."""
    fields = decoder_fields(config, theta=2_000_000.0) | attention_bias(config)
    config.must_be("use_sliding_window", False)  # it would be one of layers without positions
    config.ignore("sliding_window", "max_window_layers")
    kinds = config.items("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        config.problem("layer_types", "not supported; only full_attention is")
    own: Fields = {"mlp_bias": config.flag("mlp_bias", False)}
    own |= {"tied": config.flag("tie_word_embeddings", True)}
    # Each n-th layer, which a list of zeros and ones may say.
    layers = fields["layers"]
    every = config.integer("no_rope_layer_interval", 4)
    listed = config.items("no_rope_layers")
    if listed is not None and config.usable("num_hidden_layers"):
        every = listed.index(0) + 1 if 0 in listed else layers + 1
        if listed != [int((i + 1) % every != 0) for i in indices(layers)]:
            config.problem("no_rope_layers", "must be 0 for each n-th layer and 1 for the others")
    return fields | own | {"global_every": every if every <= layers else None}


def _starcoder2(config: Config) -> Fields:
    """Rotary positions, with the norms, biases and MLPs of GPT-2."""
    bias, eps = config.flag("use_bias", True), config.number("norm_epsilon", 1e-5)
    config.must_be("norm_type", "layer_norm")
    config.must_be("mlp_type", "default")
    config.must_be("layer_norm_epsilon", eps)
    config.ignore("activation_function")  # of the code before transformers, which has hidden_act
    return decoder_fields(config, kinds=PLAIN) | {
        "tied": config.flag("tie_word_embeddings", True),
        "window": config.optional_integer("sliding_window"),
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": eps,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
        **dropouts(config, "residual_dropout", "embedding_dropout"),
    }


def _stablelm(config: Config) -> Fields:
    """Llama with LayerNorms, and a part of each head without positions."""
    fields = decoder_fields(config, partial=0.25)
    config.must_be("qk_layernorm", False)  # each head has weights of its own there
    config.must_be("hidden_dropout", 0)  # of MLPs alone
    if config.usable("hidden_size", "num_attention_heads"):
        config.must_be("head_dim", fields["width"] // fields["heads"])
    return fields | {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "qkv_bias": config.flag("use_qkv_bias", False),
        "parallel_block": config.flag("use_parallel_residual", False),
    }


def _ernie4_5(config: Config) -> Fields:
    """Llama that rotates neighbouring pairs."""
    fields = decoder_fields(config, eps=1e-5, theta=500_000.0)
    config.must_be("attention_dropout", 0)
    own: Fields = {"head_dim": config.integer("head_dim", 128), "rope_interleaved": True}
    own |= {"tied": config.flag("tie_word_embeddings", True)}
    biases = ("qkv_bias", "out_bias", "mlp_bias")
    return fields | own | dict.fromkeys(biases, config.flag("use_bias", False))


def _ministral(config: Config) -> Fields:
    """Mistral with a window in all layers, in none, or in all but each n-th."""
    fields = decoder_fields(config)
    layers = fields["layers"]
    kinds = config.items("layer_types") or ["sliding_attention" for _ in indices(layers)]
    return fields | windows_of(config, "layer_types", kinds, layers)


VARIANTS: dict[str, Callable[[Config], Fields]] = {
    "seed_oss": _seed_oss,
    "olmo3": _olmo3,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "ernie4_5": _ernie4_5,
    "ministral": _ministral,
}


_MIXED = (
    "some of its layers mix tokens by a recurrence and some by attention, and a model here has one "
    "mixer for all layers; use a model with attention, or write the recurrence as an own mixer"
)
REFUSED = dict.fromkeys(
    (
        *("falcon_h1", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "kimi_linear", "lfm2"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "minimax"),
    ),
    _MIXED,
)
# Their text model has a table of its own, of this family if it does not say.
WITH_IMAGES = {"llama4": "llama4_text", "gemma3": "gemma3_text", "mistral3": "mistral"}


# What changes no number: origin, tokens, generation, training, precision, files, other heads.
_BOOKKEEPING = re.compile(
    r"_.*|summary_.*|unsloth_.*|.*_token_ids?|.*_token_index|architectures|model_type|"
    r"auto_map|transformers_version|torch_dtype|dtype|name_or_path|quantization_config|"
    r"compression_config|use_cache|cache_implementation|attn_implementation|"
    r"experts_implementation|initializer_range|initializer_factor|gradient_checkpointing|"
    r"pretraining_tp|ep_size|router_aux_loss_coef|output_router_logits|aux_loss_alpha|seq_aux|"
    r"reorder_and_upcast_attn|attention_softmax_in_fp32|scale_attention_softmax_in_fp32|"
    r"finetuning_task|id2label|label2id|num_labels|problem_type|classifier_dropout|"
    r"tokenizer_class|prefix|task_specific_params|is_decoder|chunk_size_feed_forward|"
    r"return_dict|output_attentions|output_hidden_states|torchscript|use_bfloat16|"
    r"tf_legacy_loss|license|model_max_length|max_sequence_length|max_length|min_length|"
    r"do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|"
    r"top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|"
    r"encoder_no_repeat_ngram_size|bad_words_ids|num_return_sequences|output_scores|"
    r"return_dict_in_generate|remove_invalid_values|exponential_decay_length_penalty|"
    r"suppress_tokens|begin_suppress_tokens|keys_to_ignore_at_inference|is_llama_config|"
    r"for_llm_compressor|transformers\.js_config|initial_context_length|ff_factor|"
    r"use_flash_attn|n_special|predict_special_tokens|output_past"
)
# Features that are off, in families that have no key for them. A family that has one reads it.
_OFF: dict[str, object] = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "lm_head_bias", "use_bias"), False),
    **dict.fromkeys(("alibi", "use_mrope", "rope_interleaved", "use_sliding_window"), False),
    **dict.fromkeys(("tie_encoder_decoder", "is_encoder_decoder", "add_cross_attention"), False),
    **dict.fromkeys(("use_bidirectional_attention", "use_qk_norm", "qk_layernorm"), False),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0),
    **dict.fromkeys(("router_jitter_noise", "shared_expert_intermediate_size"), 0),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor", "compression_ratio"), 1),
    **dict.fromkeys(("partial_rotary_factor", "rotary_scaling_factor"), 1),
    **{"apply_residual_connection_post_layernorm": False, "pruned_heads": {}},
    **{"scale_attn_weights": True, "is_causal": True},
}


def _is_harmless(key: str, value: Any) -> bool:
    """Whether a key of a config changes nothing, with this value, where no reader knows it."""
    if key == "layer_types":
        kinds = cast("list[object]", value if isinstance(value, list) else [value])
        return all(kind == "full_attention" for kind in kinds)
    off = key in _OFF and value == _OFF[key]
    return off or _BOOKKEEPING.fullmatch(key) is not None


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
    table = Config(config, problems)
    fields = FAMILIES[family](table)
    if table.refuse_unread(_is_harmless):
        problems.append(f"the keys that are read: fivefold import {family} --keys")
    if problems:
        raise BadFile(where, problems)
    try:
        return Shape(name=where, family=family, source=where, **fields)
    except BadFile as error:
        raise BadFile(where, error.problems) from error


def _gpt2(config: Config) -> Fields:
    width, heads = config.integer("n_embd"), config.integer("n_head")
    config.must_be("scale_attn_by_inverse_layer_idx", False)
    size = head_dim(config, width, heads)
    scaled = config.flag("scale_attn_weights", True)
    return {
        "layers": config.integer("n_layer"),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": size,
        "score_dim": None if scaled or size == 1 else 1,
        "ffn": config.integer("n_inner", 4 * width),
        "vocab": config.integer("vocab_size"),
        "max_seq": config.integer(config.first_of(("n_positions", "n_ctx"))),
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
    return decoder_fields(config) | {"window": config.optional_integer("sliding_window", 4096)}


def _qwen2(config: Config) -> Fields:
    fields = decoder_fields(config)
    return fields | {"qkv_bias": True} | _qwen_windows(config, fields["layers"])


def _qwen3(config: Config) -> Fields:
    # Only the dense family has heads of 128 by default.
    fields: Fields = decoder_fields(config) | attention_bias(config) | {"qk_norm": "head"}
    windows = _qwen_windows(config, fields["layers"])
    return fields | windows | {"head_dim": config.integer("head_dim", 128)}


def _mixtral(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, theta=1e6)
    moe = Moe(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        ffn=fields["ffn"],
        renormalise=True,
    )
    return fields | {"window": config.optional_integer("sliding_window"), "moe": moe}


def _qwen2_moe(config: Config) -> Fields:
    fields = decoder_fields(config) | {"qkv_bias": config.flag("qkv_bias", True)}
    moe = _qwen_moe(config, fields["layers"]) | _gated_expert(config, 5632)
    # Of the layers below `max_window_layers`, each second one has none.
    windows = _qwen_windows(config, fields["layers"], lambda i, first: i % 2 == 0 and i < first)
    return fields | windows | {"moe": Moe(**moe)}


def _gated_expert(config: Config, usual: int) -> Fields:
    shared = config.integer("shared_expert_intermediate_size", usual, least=0)
    return {"shared": int(shared > 0), "shared_ffn": shared, "shared_gated": shared > 0}


def _qwen3_moe(config: Config) -> Fields:
    fields: Fields = decoder_fields(config) | attention_bias(config) | {"qk_norm": "head"}
    config.must_be("use_qk_norm", True)
    # Here a window is in all layers, whatever `max_window_layers` says.
    switched = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if switched else None
    config.ignore("sliding_window", "max_window_layers")
    kind = "full_attention" if window is None else "sliding_attention"
    if any(listed != kind for listed in config.items("layer_types") or []):
        config.problem("layer_types", f"must be {kind} in all layers, as sliding_window says")
    return fields | {"window": window, "moe": Moe(**_qwen_moe(config, fields["layers"]))}


def _qwen3_next(config: Config) -> Fields:
    fields = decoder_fields(config, partial=0.25) | attention_bias(config)
    moe = _qwen_moe(config, fields["layers"]) | _gated_expert(config, 512)
    moe |= {"renormalise": config.flag("norm_topk_prob", True)}
    hybrid = Hybrid(
        attention_every=_full_attention_every(config, fields["layers"]),
        heads=config.integer("linear_num_value_heads", 32),
        key_heads=config.integer("linear_num_key_heads", 16),
        head_dim=config.integer("linear_value_head_dim", 128),
        key_dim=config.integer("linear_key_head_dim", 128),
        kernel=config.integer("linear_conv_kernel_dim", 4),
    )
    own: Fields = {"norm": "rms_offset", "qk_norm": "head", "attention_gate": True}
    own |= {"head_dim": config.integer("head_dim")}  # the family's default is no share of the width
    return fields | own | {"moe": Moe(**moe), "hybrid": hybrid} | _ahead(config)


def _full_attention_every(config: Config, layers: int) -> int:
    """Each n-th layer has full attention, which `layer_types` may list."""
    kinds = config.items("layer_types")
    every = config.integer("full_attention_interval", 4)
    if kinds is None or not config.usable("num_hidden_layers"):
        return every
    every = 1 + kinds.index("full_attention") if "full_attention" in kinds else layers + 1
    names = ("linear_attention", "full_attention")
    if kinds != [names[(i + 1) % every == 0] for i in indices(layers)]:
        config.problem("layer_types", "full_attention must be in each n-th layer only")
    return every


def _qwen_moe(config: Config, layers: int) -> Fields:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.layer_set("mlp_only_layers") or ()
    expected = [i for i in indices(layers) if (i + 1) % step == 0 and i not in dense]
    return {
        "experts": config.integer(config.first_of(("num_experts", "num_local_experts"))),
        "top_k": config.integer("num_experts_per_tok"),
        "ffn": config.integer("moe_intermediate_size"),
        "renormalise": config.flag("norm_topk_prob", False),
        **expert_placement(config, "mlp_only_layers", expected, layers),
    }


def _olmoe(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, multi_head=True) | attention_bias(config)
    config.must_be("clip_qkv", None)
    moe = Moe(
        experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        ffn=fields["ffn"],
        renormalise=config.flag("norm_topk_prob", False),
    )
    return fields | {"qk_norm": "full", "moe": moe}


def _deepseek_v2(config: Config) -> Fields:
    choice = {"greedy": "greedy", "group_limited_greedy": "groups"}
    limited = config.choice("topk_method", "greedy", choice) == "groups"
    config.must_be("scoring_func", "softmax")
    config.must_be("rope_interleave", True)
    # The transformers package ignores it, and DeepSeek's own code then does not scale.
    config.must_be("norm_topk_prob", False)
    routing: Fields = {"scaling": config.number("routed_scaling_factor", 1.0)}
    config.ignore("n_group", "topk_group")  # of the greedy choice
    if limited:
        routing |= {
            "groups": config.integer("n_group"),
            "groups_kept": config.integer("topk_group"),
        }
    return _deepseek(config, routing)


def _deepseek_v3(config: Config) -> Fields:
    config.must_be("topk_method", "noaux_tc")
    config.must_be("scoring_func", "sigmoid")
    return _deepseek(config, _sigmoid_routing(config, 2.5, 8, 4)) | _ahead(config)


def _sigmoid_routing(config: Config, scaling: float, groups: int, groups_kept: int) -> Fields:
    return {
        "score": "sigmoid",
        "scaling": config.number("routed_scaling_factor", scaling),
        "renormalise": config.flag("norm_topk_prob", True),
        "groups": config.integer("n_group", groups),
        "groups_kept": config.integer("topk_group", groups_kept),
        "group_score": "top2",
        "bias": True,
    }


def _ahead(config: Config) -> Fields:
    """Newer versions of transformers assume one such layer; here the default is none."""
    mtp = config.first_of(("num_nextn_predict_layers", "num_mtp_layers"))
    return {"mtp": config.integer(mtp, 0, least=0)}


def _dots1(config: Config) -> Fields:
    fields = decoder_fields(config) | attention_bias(config)
    routing = _sigmoid_routing(config, 1.0, 1, 1)
    routing |= {"renormalise": config.flag("norm_topk_prob", False)}
    experts = _deepseek_experts(config, fields["layers"], routing)
    config.must_be("scoring_func", "noaux_tc", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    windows = _windows(config, fields["layers"], 62, lambda i, first: i >= first)
    return fields | windows | {"qk_norm": "head", "moe": experts}


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
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        q_rank=config.optional_integer("q_lora_rank", 1536),
    )
    moe = _deepseek_experts(config, layers, routing)
    config.must_be("qk_head_dim", mla.nope_dim + mla.rope_dim)
    own: Fields = {"kv_heads": heads, "head_dim": mla.nope_dim + mla.rope_dim, "mla": mla}
    return fields | own | {"rope_interleaved": config.flag("rope_interleave", True), "moe": moe}


def _deepseek_experts(config: Config, layers: int, routing: Fields, usual: int = 0) -> Moe:
    """`usual`: shared experts, and leading layers without experts, if a config does not say."""
    expert = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", usual, 0)
    dense = config.integer("first_k_dense_replace", usual, 0)
    step = config.integer("moe_layer_freq", 1)
    expected = [i for i in indices(layers) if i >= dense and i % step == 0]
    return Moe(
        experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        ffn=expert,
        shared=shared,
        shared_ffn=shared * expert,
        **expert_placement(config, "moe_layer_freq", expected, layers),
        **routing,
    )


def _llama4(config: Config) -> Fields:
    fields = decoder_fields(config, eps=1e-5, theta=500_000.0) | attention_bias(config)
    layers, expert = fields["layers"], fields["ffn"]
    step = config.integer("interleave_moe_layer_step", 1)
    listed = config.layer_set("moe_layers")
    by_step = [i for i in indices(layers) if (i + 1) % step == 0]
    expected = by_step if listed is None else [i for i in indices(layers) if i in listed]
    moe = Moe(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 1),
        ffn=expert,
        shared=1,
        shared_ffn=expert,
        score="sigmoid",
        weigh_inputs=True,
        **expert_placement(config, "moe_layers", expected, layers),
    )
    own: Fields = {"head_dim": config.integer("head_dim", 128), "moe": moe}
    own |= {"ffn": config.integer("intermediate_size_mlp")}
    own |= {"window": config.optional_integer("attention_chunk_size", 8192)}
    own |= {"window_kind": "chunked", "global_every": _llama4_global_every(config, layers)}
    own |= {"qk_norm": "l2" if config.flag("use_qk_norm", True) else "none"}
    if config.flag("attn_temperature_tuning", True):
        own |= {"nope_floor": config.integer("floor_scale", 8192)}
        own |= {"nope_scale": config.number("attn_scale", 0.1)}
    config.ignore("floor_scale", "attn_scale")
    return fields | own | {"rope_interleaved": True}


def _llama4_global_every(config: Config, layers: int) -> int:
    """Llama 4 lists its layers without positions twice more; all three must agree."""
    every = config.integer("no_rope_layer_interval", 4)
    local = [(i + 1) % every != 0 for i in indices(layers)]
    kinds = ["chunked_attention" if is_local else "full_attention" for is_local in local]
    sound = config.usable("num_hidden_layers", "no_rope_layer_interval")
    for key, expected in (("no_rope_layers", local), ("layer_types", kinds)):
        listed = config.items(key)  # also where it is not compared: it is a known key
        if sound and listed and listed != expected:
            config.problem(key, f"must follow no_rope_layer_interval = {every}")
    return every


Windowed = Callable[[int, int], bool]
"""Whether a layer has a window, from its number and `max_window_layers`."""


def _qwen_windows(
    config: Config, layers: int, windowed: Windowed = lambda i, first: i >= first
) -> Fields:
    """Qwen's windows apply only with `use_sliding_window`."""
    if config.flag("use_sliding_window", False):
        return _windows(config, layers, 28, windowed)
    config.ignore("sliding_window", "max_window_layers")
    if any(kind != "full_attention" for kind in config.items("layer_types") or []):
        config.problem("layer_types", "has windows, which use_sliding_window = false excludes")
    return {}


def _windows(config: Config, layers: int, usual: int, windowed: Windowed) -> Fields:
    """Of layers as `layer_types` lists them, or else by a rule of the family."""
    first = config.integer("max_window_layers", usual, least=0)
    names = ("full_attention", "sliding_attention")
    by_rule = [names[windowed(i, first)] for i in indices(layers)]
    listed = config.items("layer_types")
    key = "max_window_layers" if listed is None else "layer_types"
    return windows_of(config, key, by_rule if listed is None else listed, layers)


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


class _KeyRecorder(Config):
    """Answers a reader of configs without a file, and records which keys it asks for and what their
    values may be. Each `branch` answers otherwise, so that all branches of a reader run."""

    def __init__(self, kinds: dict[str, str], branch: int, prefix: str = "") -> None:
        super().__init__({}, [], prefix)
        self._kinds, self._branch = kinds, branch

    def ignore(self, *keys: str, kind: str = "") -> None:
        for key in keys:
            name = self._prefix + key
            self._kinds[name] = self._kinds.get(name) or kind

    def has(self, key: str) -> bool:
        self.ignore(key)
        return self._branch % 2 == 0

    gives = has

    def flag(self, key: str, default: bool) -> bool:
        self.ignore(key, kind="true or false")
        return self.has(key)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        self.ignore(key, kind=f"whole number from {least}")
        return default or 4

    def number(self, key: str, default: float | None = None) -> float:
        self.ignore(key, kind="number")
        return default or 1.0

    def choice(self, key: str, default: str, meanings: Mapping[str, str]) -> str:
        self.ignore(key, kind=" or ".join(meanings))
        return list(meanings.values())[self._branch % len(meanings)]

    def must_be(self, key: str, *allowed: object) -> None:
        # A size may be one that other keys say.
        sizes = any(isinstance(value, int | float) and value > 1 for value in allowed)
        self.ignore(key, kind="number" if sizes else " or ".join(map(json.dumps, allowed)))

    def table(self, key: str) -> Config:
        self.ignore(key, kind="table")
        return _KeyRecorder(self._kinds, self._branch, f"{self._prefix}{key}.")

    def items(self, key: str) -> list[object] | None:
        self.ignore(key, kind="list")

    def first_of(self, keys: Iterable[str]) -> str:
        names = list(keys)
        self.ignore(*names)
        return names[self._branch % len(names)]


def known_keys(family: str) -> dict[str, str]:
    """The keys that a config of a family may have, with what their values may be: nothing where
    another spelling says it. Features that other families have may be said to be off."""
    if family not in FAMILIES:
        raise UnknownName("family", family, FAMILIES)
    kinds: dict[str, str] = {}
    for branch in range(1, 11):  # flags both ways with each of five choices, first the usual one
        FAMILIES[family](_KeyRecorder(kinds, branch))
    return dict(sorted(({key: json.dumps(value) for key, value in _OFF.items()} | kinds).items()))

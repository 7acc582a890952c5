"""Hugging Face configs of families that differ by a few keys from those of `hf_families.py`."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core import Config, Fields, attention_bias, indices
from fivefold.core.model.hf_families import (
    PLAIN,
    alternating,
    decoder_fields,
    dropouts,
    olmo2,
    two_rotations,
    windows_of,
)


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
    return fields | own | {"global_every": _without_positions(config, fields["layers"])}


def _without_positions(config: Config, layers: int) -> int | None:
    """Each n-th layer, which a list of zeros and ones may say."""
    every = config.integer("no_rope_layer_interval", 4)
    listed = config.items("no_rope_layers")
    if listed is not None and config.usable("num_hidden_layers"):
        every = listed.index(0) + 1 if 0 in listed else layers + 1
        if listed != [int((i + 1) % every != 0) for i in indices(layers)]:
            config.problem("no_rope_layers", "must be 0 for each n-th layer and 1 for the others")
    return every if every <= layers else None


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

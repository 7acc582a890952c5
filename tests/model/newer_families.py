"""Small configs of the families with norms, rotations or blocks of another form than Llama's: one
of each for parity, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers

Keys = dict[str, Any]
SIZES: Keys = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 83,
    "max_position_embeddings": 64,
}
# Ids outside of a small vocabulary are refused there, and a padding token has no gradient.
NO_TOKENS: Keys = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
OLDER: Keys = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}


def _rope(
    theta: float, partial: float | None = None, kind: str = "default", **more: object
) -> Keys:
    table: Keys = {"rope_type": kind, "rope_theta": theta, **more}
    return {
        "rope_parameters": table | ({} if partial is None else {"partial_rotary_factor": partial})
    }


def _yarn(theta: float, **more: object) -> Keys:
    table: Keys = {"factor": 8.0, "original_max_position_embeddings": 8, **more}
    return _rope(theta, None, "yarn", **table)["rope_parameters"]


def _longrope(pairs: int, partial: float = 0.75, **more: object) -> Keys:
    """What divides frequencies differs from pair to pair, and much between the two lengths."""
    short, long = ([1 + i / 8 for i in range(pairs)], [3.0 + i for i in range(pairs)])
    return _rope(100.0, partial, "longrope", short_factor=short, long_factor=long, **more)


CONFIGS: dict[str, Callable[[], Any]] = {
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, **NO_TOKENS),
    "glm": lambda: transformers.GlmConfig(**SIZES, **NO_TOKENS, head_dim=12),
    "glm4": lambda: transformers.Glm4Config(
        **SIZES, **NO_TOKENS, head_dim=16, attention_bias=False, **_rope(500.0, 0.25)
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 4},
        **NO_TOKENS,
        head_dim=12,
        use_qk_norm=True,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        **_rope(500.0, 0.5),
    ),
    "phi3": lambda: transformers.Phi3Config(
        **SIZES, **NO_TOKENS, sliding_window=7, **_rope(10000.0, 0.75)
    ),
    # Rows of the tests are 24 tokens, and prompts grow past 32.
    "phi3-longer": lambda: transformers.Phi3Config(
        **SIZES, **NO_TOKENS, original_max_position_embeddings=16, **_longrope(3)
    ),
    "phi3-shorter": lambda: transformers.Phi3Config(
        **SIZES,
        **NO_TOKENS,
        original_max_position_embeddings=24,
        sliding_window=7,
        **_longrope(3, attention_factor=1.3),
    ),
    "llama-longrope": lambda: transformers.LlamaConfig(
        **SIZES, **NO_TOKENS, **_longrope(4, 1.0, original_max_position_embeddings=20, factor=2.0)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**OLDER, **NO_TOKENS),
    "gpt-neox-in-turn": lambda: transformers.GPTNeoXConfig(
        **OLDER,
        **NO_TOKENS,
        use_parallel_residual=False,
        attention_bias=False,
        **_rope(500.0, 1.0, "linear", factor=4.0),
    ),
    # Roots of widths are rounded to 32 bits there: 36 and 64 have exact ones.
    "gemma": lambda: transformers.GemmaConfig(
        **SIZES | {"hidden_size": 36}, **NO_TOKENS, head_dim=16
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES | {"hidden_size": 36},
        **NO_TOKENS,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=1.5,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES | {"hidden_size": 36, "num_hidden_layers": 4},
        **NO_TOKENS,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **NO_TOKENS,
        head_dim=16,
        intermediate_size_mlp=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=7,
        floor_scale=5,
        attn_scale=0.3,
        **_rope(500.0),
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES | {"num_hidden_layers": 4},
        **NO_TOKENS,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        **_rope(
            150000.0,
            kind="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(
        **SIZES, **NO_TOKENS, head_dim=12, attention_out_bias=True, mlp_bias=True, **_rope(1e7)
    ),
    # Its own window and rotation in two layers, and scaled positions in the third.
    "olmo3": lambda: transformers.Olmo3Config(
        **SIZES,
        **NO_TOKENS,
        sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": _yarn(500.0, attention_factor=1.2),
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "olmo3-unscaled": lambda: transformers.Olmo3Config(
        **SIZES | {"num_hidden_layers": 4}, **NO_TOKENS, sliding_window=5
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SIZES, **NO_TOKENS, no_rope_layer_interval=2, rope_parameters=_yarn(500.0)
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, **NO_TOKENS, sliding_window=7),
    "stablelm": lambda: transformers.StableLmConfig(
        **SIZES, **NO_TOKENS, use_qkv_bias=True, **_rope(500.0, 0.25)
    ),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **SIZES, **NO_TOKENS, use_parallel_residual=True, **_rope(500.0, 0.75)
    ),
    "ernie4-5": lambda: transformers.Ernie4_5Config(
        **SIZES, **NO_TOKENS, head_dim=12, use_bias=True
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **SIZES | {"num_hidden_layers": 4},
        **NO_TOKENS,
        head_dim=12,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "dots1-moe": lambda: transformers.Dots1Config(
        **SIZES,
        **NO_TOKENS,
        head_dim=12,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "falcon-7b": lambda: transformers.FalconConfig(
        **OLDER, **NO_TOKENS, ffn_hidden_size=56, multi_query=True, parallel_attn=True
    ),
    "falcon-40b": lambda: transformers.FalconConfig(
        **OLDER, **NO_TOKENS, num_kv_heads=2, new_decoder_architecture=True, bias=True
    ),
    "falcon-in-turn": lambda: transformers.FalconConfig(
        **OLDER, **NO_TOKENS, multi_query=False, parallel_attn=False, tie_word_embeddings=False
    ),
}


def _flag(dice: random.Random) -> bool:
    return dice.random() < 0.5


def _decoder(dice: random.Random) -> Keys:
    kv_heads = dice.choice((1, 2, 3))
    heads = kv_heads * dice.choice((1, 2, 3))
    return {
        "num_hidden_layers": dice.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * dice.choice((4, 8)),
        "intermediate_size": dice.choice((7, 16, 24, 33, 56)),
        "vocab_size": dice.randint(11, 90),
        "max_position_embeddings": 48,
        "rms_norm_eps": dice.choice((1e-6, 1e-5, 1e-3)),
        "hidden_act": dice.choice(("silu", "silu", "gelu")),
        "tie_word_embeddings": _flag(dice),
        **_rope(dice.choice((100.0, 1e4, 5e5))),
        **NO_TOKENS,
    }


def _partial(dice: random.Random, keys: Keys, size: int | None = None) -> Keys:
    """An even number of a head's dims."""
    size = size or keys["hidden_size"] // keys["num_attention_heads"]
    return keys | _rope(100.0, dice.choice(range(2, size + 1, 2)) / size)


def _olmo2(dice: random.Random) -> Keys:
    return _decoder(dice) | {"attention_bias": _flag(dice)}


def _glm(dice: random.Random) -> Keys:
    size = dice.choice((4, 6, 10, 16))
    own = {"head_dim": size, "attention_bias": _flag(dice)}
    return _partial(dice, _decoder(dice), size) | own


def grouped_experts(dice: random.Random, layers: int) -> Keys:
    """Experts in groups, some of which a token may choose from, after some dense layers."""
    groups, group = dice.choice((1, 2)), dice.randint(2, 3)
    return {
        "moe_intermediate_size": dice.choice((8, 11)),
        "n_routed_experts": groups * group,
        "num_experts_per_tok": dice.randint(1, group),
        "n_group": groups,
        "topk_group": dice.randint(1, groups),
        "n_shared_experts": dice.choice((0, 1, 2)),
        "first_k_dense_replace": dice.randrange(layers),
        "norm_topk_prob": _flag(dice),
        "routed_scaling_factor": dice.choice((1.0, 2.5)),
    }


def _glm4_moe(dice: random.Random) -> Keys:
    keys = _glm(dice) | {"use_qk_norm": _flag(dice), "num_mtp_layers": 0}
    return keys | grouped_experts(dice, keys["num_hidden_layers"])


def _phi3(dice: random.Random) -> Keys:
    keys = _partial(dice, _decoder(dice)) | {"sliding_window": dice.choice((None, 5, 20))}
    if _flag(dice):
        return keys
    partial = keys["rope_parameters"]["partial_rotary_factor"]
    size = keys["hidden_size"] // keys["num_attention_heads"]
    table = _longrope(int(size * partial) // 2, partial)
    return keys | table | {"original_max_position_embeddings": dice.choice((5, 20, 40))}


def _gemma(dice: random.Random) -> Keys:
    keys = _decoder(dice) | {"head_dim": dice.choice((4, 6, 16)), "attention_bias": _flag(dice)}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": dice.choice((1, 2, 4))}
    return keys | {"hidden_size": dice.choice((16, 36, 64)), "hidden_act": "gelu_pytorch_tanh"}


def _windows(dice: random.Random) -> Keys:
    return {"sliding_window": dice.choice((1, 5, 20)), "query_pre_attn_scalar": dice.choice((4, 9))}


def _gemma2(dice: random.Random) -> Keys:
    keys = _gemma(dice) | _windows(dice)
    keys |= {"hidden_activation": keys.pop("hidden_act")}
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return keys | {key: dice.choice((None, 0.5, 3.0, 30.0)) for key in caps}


def _gemma3(dice: random.Random) -> Keys:
    keys = _gemma(dice) | _windows(dice)
    keys |= {"hidden_activation": keys.pop("hidden_act")}
    tables = {
        "full_attention": _rope(dice.choice((100.0, 1e6)))["rope_parameters"],
        "sliding_attention": _rope(dice.choice((10.0, 1e4)))["rope_parameters"],
    }
    if _flag(dice):
        tables["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    every = {"sliding_window_pattern": dice.choice((1, 2, 3, 6))}
    return keys | every | {"rope_parameters": tables}


def _llama4(dice: random.Random) -> Keys:
    keys, experts = _decoder(dice), dice.choice((1, 2, 4))
    return keys | {
        "head_dim": dice.choice((4, 6, 16)),
        "attention_bias": _flag(dice),
        "intermediate_size_mlp": dice.choice((8, 11)),
        "num_local_experts": experts,
        "num_experts_per_tok": dice.randint(1, experts),
        "interleave_moe_layer_step": dice.randint(1, min(2, keys["num_hidden_layers"])),
        "no_rope_layer_interval": dice.choice((1, 2, 4)),
        "attention_chunk_size": dice.choice((1, 5, 20)),
        "use_qk_norm": _flag(dice),
        "attn_temperature_tuning": _flag(dice),
        "floor_scale": dice.choice((3, 8)),
    }


def _gpt_oss(dice: random.Random) -> Keys:
    keys, experts = _decoder(dice), dice.choice((1, 2, 4))
    return keys | {
        "head_dim": dice.choice((4, 6, 16)),
        "hidden_act": "silu",
        "attention_bias": _flag(dice),
        "num_local_experts": experts,
        "num_experts_per_tok": dice.randint(1, experts),
        "sliding_window": dice.choice((1, 5, 20)),
    }


def _older(dice: random.Random) -> Keys:
    keys = _decoder(dice)
    unknown = ("num_key_value_heads", "rms_norm_eps", "hidden_act")
    return {key: value for key, value in keys.items() if key not in unknown}


def _gpt_neox(dice: random.Random) -> Keys:
    return _partial(dice, _older(dice)) | {
        "layer_norm_eps": dice.choice((1e-5, 1e-3)),
        "hidden_act": dice.choice(("gelu", "gelu_new", "relu")),
        "attention_bias": _flag(dice),
        "use_parallel_residual": _flag(dice),
    }


def _falcon(dice: random.Random) -> Keys:
    keys = _older(dice) | {"bias": _flag(dice), "ffn_hidden_size": dice.choice((None, 24))}
    del keys["intermediate_size"]
    if _flag(dice):
        divisors = [n for n in (1, 2, 3) if keys["num_attention_heads"] % n == 0]
        norms = {"num_ln_in_parallel_attn": dice.choice((None, 1, 2))}
        own = {"num_kv_heads": dice.choice(divisors), "new_decoder_architecture": True}
        return keys | norms | own
    return keys | {"multi_query": _flag(dice), "parallel_attn": _flag(dice)}


DRAWS: dict[str, tuple[type, Callable[[random.Random], Keys]]] = {
    "olmo2": (transformers.Olmo2Config, _olmo2),
    "glm": (transformers.GlmConfig, _glm),
    "glm4": (transformers.Glm4Config, _glm),
    "glm4_moe": (transformers.Glm4MoeConfig, _glm4_moe),
    "phi3": (transformers.Phi3Config, _phi3),
    "gpt_neox": (transformers.GPTNeoXConfig, _gpt_neox),
    "falcon": (transformers.FalconConfig, _falcon),
    "llama4_text": (transformers.Llama4TextConfig, _llama4),
    "gpt_oss": (transformers.GptOssConfig, _gpt_oss),
    "gemma": (transformers.GemmaConfig, _gemma),
    "gemma2": (transformers.Gemma2Config, _gemma2),
    "gemma3_text": (transformers.Gemma3TextConfig, _gemma3),
}

"""Random small configs of every Hugging Face family that is imported, each a function of a seed.

A drawn config is legal in the `transformers` package and has no feature that a Shape refuses. Sizes
are often odd or unequal, so that a width that is taken for another one does not fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import newer_families
import transformers

Keys = dict[str, Any]
MAX_SEQ = 48


class Draw(NamedTuple):
    """A config as keys of the package, with the class that takes them."""

    config_class: type
    keys: Keys

    def config(self) -> Any:
        return self.config_class(**self.keys)

    def __str__(self) -> str:
        return f"transformers.{self.config_class.__name__}(**{self.keys})"


def draw(seed: str, family: str) -> Draw:
    """The config of this family for this seed."""
    config_class, keys = DRAWS[family]
    return Draw(config_class, keys(random.Random(f"{seed}: {family}")))


def _flag(dice: random.Random) -> bool:
    return dice.random() < 0.5


def _gpt2(dice: random.Random) -> Keys:
    heads = dice.choice((1, 2, 3, 4))
    return {
        "n_layer": dice.randint(1, 3),
        "n_head": heads,
        "n_embd": heads * dice.choice((3, 4, 8)),
        "n_inner": dice.choice((None, 13, 24)),
        "n_positions": MAX_SEQ,
        "vocab_size": dice.randint(11, 90),
        "activation_function": dice.choice(("gelu_new", "gelu", "relu", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": dice.choice((1e-5, 1e-3)),
        "tie_word_embeddings": _flag(dice),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _decoder(dice: random.Random, kinds: tuple[str, ...] = ("linear", "llama3", "yarn")) -> Keys:
    """What every family after GPT-2 has. A pad token would have no gradient in the package."""
    kv_heads = dice.choice((1, 2, 3))
    heads = kv_heads * dice.choice((1, 2, 3))
    return {
        "num_hidden_layers": dice.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * dice.choice((2, 4, 6, 8)),
        "intermediate_size": dice.choice((7, 16, 24, 33, 56)),
        "vocab_size": dice.randint(11, 90),
        "max_position_embeddings": MAX_SEQ,
        "rms_norm_eps": dice.choice((1e-6, 1e-5, 1e-3)),
        "hidden_act": dice.choice(("silu", "silu", "gelu")),
        "tie_word_embeddings": _flag(dice),
        "rope_parameters": _rope(dice, dice.choice((None, *kinds))),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }


def _rope(dice: random.Random, kind: str | None) -> Keys:
    table: Keys = {"rope_type": kind or "default", "rope_theta": dice.choice((100.0, 1e4, 5e5))}
    if kind is None:
        return table
    table["factor"] = dice.choice((1.5, 4.0, 40.0))
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": dice.choice((2.0, 4.0))}
    if kind == "yarn":
        table |= {"beta_fast": dice.choice((8.0, 32.0)), "beta_slow": dice.choice((0.5, 1.0))}
        if _flag(dice):
            table |= {
                "mscale": dice.choice((0.707, 1.0)),
                "mscale_all_dim": dice.choice((0.5, 1.0)),
            }
        elif _flag(dice):
            table["attention_factor"] = dice.choice((0.8, 1.3))
    if kind != "linear":
        table["original_max_position_embeddings"] = dice.choice((8, 16, MAX_SEQ))
    return table


def _head_dim(dice: random.Random) -> Keys:
    return {"head_dim": dice.choice((2, 4, 6, 10, 16))}


def _window(dice: random.Random) -> int | None:
    return dice.choice((None, 1, 5, 20, 100))


def _llama(dice: random.Random) -> Keys:
    biases = {"attention_bias": _flag(dice), "mlp_bias": _flag(dice)}
    return _decoder(dice) | biases | (_head_dim(dice) if _flag(dice) else {})


def _mistral(dice: random.Random) -> Keys:
    return _decoder(dice) | {"sliding_window": _window(dice)} | _head_dim(dice)


def _qwen2(dice: random.Random) -> Keys:
    window = _window(dice)
    used = {"use_sliding_window": window is not None, "sliding_window": window}
    return _decoder(dice) | used | {"max_window_layers": 0}


def _qwen3(dice: random.Random) -> Keys:
    return _qwen2(dice) | _head_dim(dice) | {"attention_bias": _flag(dice)}


def _chosen(dice: random.Random, experts: str) -> Keys:
    count = dice.choice((1, 2, 4, 5, 8))
    return {experts: count, "num_experts_per_tok": dice.randint(1, count)}


def _mixtral(dice: random.Random) -> Keys:
    keys = _decoder(dice) | _chosen(dice, "num_local_experts")
    return keys | {"sliding_window": _window(dice)} | _head_dim(dice)


def _olmoe(dice: random.Random) -> Keys:
    own = {"attention_bias": _flag(dice), "norm_topk_prob": _flag(dice)}
    return _decoder(dice) | _chosen(dice, "num_experts") | own


def _qwen_experts(dice: random.Random, layers: int) -> Keys:
    """Experts in each n-th layer, or in all after the first few."""
    placed: Keys = {"decoder_sparse_step": dice.randint(1, min(2, layers)), "mlp_only_layers": []}
    if _flag(dice):
        placed = {"decoder_sparse_step": 1, "mlp_only_layers": list(range(dice.randrange(layers)))}
    own = {"moe_intermediate_size": dice.choice((8, 11, 24)), "norm_topk_prob": _flag(dice)}
    return _chosen(dice, "num_experts") | placed | own


def _qwen2_moe(dice: random.Random) -> Keys:
    keys = _qwen2(dice)
    shared = {"shared_expert_intermediate_size": dice.choice((5, 16)), "qkv_bias": _flag(dice)}
    return keys | _qwen_experts(dice, keys["num_hidden_layers"]) | shared


def _qwen3_moe(dice: random.Random) -> Keys:
    keys = _qwen3(dice)
    return keys | _qwen_experts(dice, keys["num_hidden_layers"])


def _latent(dice: random.Random, least_of_group: int) -> Keys:
    """Latent attention, and experts in groups of at least so many.

    The package views rotary pairs as complex numbers, for which the parts before them must be even.
    """
    keys = _decoder(dice)
    groups, group = dice.choice((1, 2, 4)), dice.randint(least_of_group, 3)
    kept = dice.randint(1, groups)
    return keys | {
        "num_key_value_heads": keys["num_attention_heads"],
        "q_lora_rank": dice.choice((None, 5, 20)),
        "kv_lora_rank": dice.choice((4, 12)),
        "qk_nope_head_dim": dice.choice((2, 6, 10)),
        "qk_rope_head_dim": dice.choice((2, 4, 8)),
        "v_head_dim": dice.choice((1, 4, 14, 20)),
        "attention_bias": _flag(dice),
        "first_k_dense_replace": dice.randrange(keys["num_hidden_layers"]),
        "n_routed_experts": groups * group,
        "num_experts_per_tok": dice.randint(1, kept * group),
        "n_group": groups,
        "topk_group": kept,
        "n_shared_experts": dice.choice((0, 1, 2)),
        "moe_intermediate_size": dice.choice((8, 11, 24)),
        "routed_scaling_factor": dice.choice((1.0, 2.5, 16.0)),
    }


def _deepseek_v2(dice: random.Random) -> Keys:
    return _latent(dice, 1) | {"topk_method": dice.choice(("greedy", "group_limited_greedy"))}


def _deepseek_v3(dice: random.Random) -> Keys:
    own = {"norm_topk_prob": _flag(dice), "rope_interleave": _flag(dice)}
    return _latent(dice, 2) | own | {"num_nextn_predict_layers": 0}


def _seed_oss(dice: random.Random) -> Keys:
    rates = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    keys = _llama(dice) | _head_dim(dice) | rates
    return keys | {"attention_out_bias": _flag(dice)}


def _kinds(dice: random.Random, layers: int) -> Keys:
    """A window in all layers but each n-th."""
    every, names = dice.choice((1, 2, 3, 9)), ("sliding_attention", "full_attention")
    kinds = [names[(i + 1) % every == 0] for i in range(layers)]
    return {"layer_types": kinds, "sliding_window": dice.choice((1, 5, 20, 100))}


def _olmo3(dice: random.Random) -> Keys:
    keys = _decoder(dice) | {"attention_bias": _flag(dice)}
    local = _rope(dice, None) | ({} if _flag(dice) else {"rope_theta": 500.0})
    tables = {"full_attention": keys["rope_parameters"], "sliding_attention": local}
    return keys | _kinds(dice, keys["num_hidden_layers"]) | {"rope_parameters": tables}


def _ministral(dice: random.Random) -> Keys:
    keys = _decoder(dice) | _head_dim(dice)
    windows = {"sliding_window": dice.choice((1, 5, 20, 100))}  # null fails there
    return keys | (_kinds(dice, keys["num_hidden_layers"]) if _flag(dice) else windows)


def _smollm3(dice: random.Random) -> Keys:
    return _llama(dice) | {"no_rope_layer_interval": dice.choice((1, 2, 4))}


def _layer_norms(dice: random.Random, eps: str) -> Keys:
    keys = _decoder(dice)
    del keys["rms_norm_eps"]
    return keys | {eps: dice.choice((1e-5, 1e-3))}


def _starcoder2(dice: random.Random) -> Keys:
    return _layer_norms(dice, "norm_epsilon") | {
        "hidden_act": dice.choice(("gelu_pytorch_tanh", "gelu", "relu")),
        "use_bias": _flag(dice),
        "sliding_window": _window(dice),
    }


def _stablelm(dice: random.Random) -> Keys:
    keys = _layer_norms(dice, "layer_norm_eps")
    size = keys["hidden_size"] // keys["num_attention_heads"]
    keys["rope_parameters"]["partial_rotary_factor"] = dice.randint(1, size // 2) * 2 / size
    return keys | {"use_qkv_bias": _flag(dice), "use_parallel_residual": _flag(dice)}


def _ernie4_5(dice: random.Random) -> Keys:
    return _decoder(dice) | _head_dim(dice) | {"use_bias": _flag(dice)}


def _dots1(dice: random.Random) -> Keys:
    keys = _decoder(dice) | _head_dim(dice) | {"attention_bias": _flag(dice)}
    keys |= {"sliding_window": _window(dice), "max_window_layers": dice.choice((0, 9))}
    return keys | newer_families.grouped_experts(dice, keys["num_hidden_layers"])


DRAWS: dict[str, tuple[type, Callable[[random.Random], Keys]]] = {
    "gpt2": (transformers.GPT2Config, _gpt2),
    "llama": (transformers.LlamaConfig, _llama),
    "mistral": (transformers.MistralConfig, _mistral),
    "qwen2": (transformers.Qwen2Config, _qwen2),
    "qwen3": (transformers.Qwen3Config, _qwen3),
    "mixtral": (transformers.MixtralConfig, _mixtral),
    "qwen2_moe": (transformers.Qwen2MoeConfig, _qwen2_moe),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _qwen3_moe),
    "olmoe": (transformers.OlmoeConfig, _olmoe),
    "deepseek_v2": (transformers.DeepseekV2Config, _deepseek_v2),
    "deepseek_v3": (transformers.DeepseekV3Config, _deepseek_v3),
    "seed_oss": (transformers.SeedOssConfig, _seed_oss),
    "olmo3": (transformers.Olmo3Config, _olmo3),
    "smollm3": (transformers.SmolLM3Config, _smollm3),
    "starcoder2": (transformers.Starcoder2Config, _starcoder2),
    "stablelm": (transformers.StableLmConfig, _stablelm),
    "ernie4_5": (transformers.Ernie4_5Config, _ernie4_5),
    "ministral": (transformers.MinistralConfig, _ministral),
    "dots1": (transformers.Dots1Config, _dots1),
    **newer_families.DRAWS,
}

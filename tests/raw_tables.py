"""Tables of keys that raw `config.json` files share, with small sizes."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]

COMMON: Keys = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "use_cache": True,
}
SIZES: Keys = {
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 43,
    "max_position_embeddings": 64,
}
DECODER: Keys = {
    **COMMON,
    **SIZES,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
WINDOWED: Keys = {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}
LLAMA3: Keys = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
LATENT: Keys = {
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "pretraining_tp": 1,
    "attention_bias": False,
    "num_key_value_heads": 4,
    "kv_lora_rank": 6,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
}
YARN: Keys = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}
KINDS = ["sliding_attention", "full_attention"]


def raw_keys(model_type: str, architecture: str, *tables: Keys, **more: Any) -> Keys:
    merged: Keys = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    for table in tables:
        merged |= table
    return merged | more


def older_keys(model_type: str, architecture: str, **more: Any) -> Keys:
    """Without KV heads and RMS norms."""
    return raw_keys(model_type, architecture, COMMON, SIZES, **more)


def falcon_keys(**more: Any) -> Keys:
    keys = older_keys("falcon", "Falcon", **more)
    del keys["intermediate_size"]
    return keys

"""Raw `config.json` files of models that cannot be built here, with what a refusal must name."""

from __future__ import annotations

from typing import NamedTuple

from tests.raw_tables import (
    COMMON,
    DECODER,
    LATENT,
    SIZES,
    WINDOWED,
    Keys,
    falcon_keys,
    raw_keys,
)


class RefusedConfig(NamedTuple):
    """A raw config, and patterns that the problems of its refusal match, one for each."""

    raw: Keys
    problems: tuple[str, ...]


NO_RMS = {key: value for key, value in DECODER.items() if key != "rms_norm_eps"}
UNKNOWN = "not known here, and might change the model"
KEYS = r"the keys that are read: fivefold import {} --keys"
RECURRENT = r"recurrence.* use a model with attention"
ANOTHER = r"is not known; use one of gpt2, llama, "


def of_type(model_type: str, architecture: str, reason: str, *tables: Keys) -> RefusedConfig:
    """A model that its type alone refuses."""
    problem = rf"model_type = '{model_type}'.*{reason}"
    return RefusedConfig(raw_keys(model_type, architecture, *tables), (problem,))


GRANITE: Keys = {
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
}
DELTA: Keys = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 4,
    "partial_rotary_factor": 0.25,
}
# Above each entry is the model on the hub whose file it follows.
REFUSED_CONFIGS: dict[str, RefusedConfig] = {
    # stanford-crfm/alias-gpt2-small-x21
    "gpt2-mistral": RefusedConfig(
        raw_keys(
            *("gpt2", "GPT2", COMMON),
            activation_function="gelu_new",
            n_ctx=64,
            n_embd=16,
            n_head=4,
            n_inner=None,
            n_layer=2,
            n_positions=64,
            reorder_and_upcast_attn=True,
            scale_attn_by_inverse_layer_idx=True,
            scale_attn_weights=True,
            vocab_size=43,
        ),
        (r"scale_attn_by_inverse_layer_idx = True: not supported; only False is",),
    ),
    # tiiuae/falcon-rw-1b
    "falcon-rw": RefusedConfig(
        falcon_keys(
            alibi=True,
            apply_residual_connection_post_layernorm=False,
            attention_dropout=0.0,
            bias=True,
            hidden_dropout=0.0,
            layer_norm_epsilon=1e-5,
            multi_query=False,
            new_decoder_architecture=False,
            parallel_attn=False,
        ),
        (r"alibi = True: not supported; only False is",),
    ),
    # stabilityai/stablelm-2-12b
    "stablelm-2-12b": RefusedConfig(
        raw_keys(
            *("stablelm", "StableLm", NO_RMS),
            hidden_dropout=0.0,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            qk_layernorm=True,
            use_parallel_residual=True,
            use_qkv_bias=False,
        ),
        (r"qk_layernorm = True: not supported; only False is",),
    ),
    # Qwen/Qwen2.5-7B-Instruct-1M
    "qwen2.5-1m": RefusedConfig(
        raw_keys(
            *("qwen2", "Qwen2", DECODER, WINDOWED),
            dual_chunk_attention_config={
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
        ),
        (rf"dual_chunk_attention_config = .*: {UNKNOWN}", KEYS.format("qwen2")),
    ),
    # Qwen/Qwen3-30B-A3B-Instruct-2507 with the sparse attention of its config_1m.json
    "qwen3-1m": RefusedConfig(
        raw_keys(
            *("qwen3_moe", "Qwen3Moe", DECODER, WINDOWED),
            decoder_sparse_step=1,
            dual_chunk_attention_config={
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
                "sparse_attention_enabled": True,
            },
            head_dim=8,
            mlp_only_layers=[],
            moe_intermediate_size=12,
            norm_topk_prob=True,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        (rf"dual_chunk_attention_config = .*: {UNKNOWN}", KEYS.format("qwen3_moe")),
    ),
    # google/gemma-3-4b-it, whose text model leaves out what is as in its class
    "gemma3": RefusedConfig(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "image_token_index": 42,
            "mm_tokens_per_image": 4,
            "text_config": {
                "hidden_size": 16,
                "intermediate_size": 28,
                "model_type": "gemma3_text",
                "num_hidden_layers": 6,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 5,
            },
            "vision_config": {"hidden_size": 8, "model_type": "siglip_vision_model"},
        },
        (
            r"num_attention_heads is missing: add it",
            r"max_position_embeddings is missing: add it",
            r"num_key_value_heads is missing: add it",
            r"vocab_size is missing: add it",
        ),
    ),
    # mistralai/Ministral-3-8B-Base-2512
    "ministral3": of_type("ministral3", "Ministral3", ANOTHER, DECODER, {"head_dim": 8}),
    # ibm-granite/granite-3.3-8b-base
    "granite": of_type("granite", "Granite", ANOTHER, DECODER, GRANITE),
    # ibm-granite/granite-4.0-h-tiny
    "granite-4": of_type(
        *("granitemoehybrid", "GraniteMoeHybrid", RECURRENT, DECODER, GRANITE),
        {"layer_types": ["mamba", "attention"], "mamba_d_state": 8, "mamba_n_heads": 4},
    ),
    # swiss-ai/Apertus-8B-2509
    "apertus": of_type(
        *("apertus", "Apertus", ANOTHER, DECODER),
        {"hidden_act": "xielu", "post_norm": False, "qk_norm": True},
    ),
    # LGAI-EXAONE/EXAONE-4.0-1.2B
    "exaone4": of_type(
        *("exaone4", "Exaone4", ANOTHER, DECODER),
        {"layer_types": ["full_attention"] * 2, "sliding_window_pattern": None},
    ),
    # nvidia/Nemotron-H-8B-Base-8K
    "nemotron_h": of_type(
        *("nemotron_h", "NemotronH", RECURRENT, NO_RMS),
        {"hybrid_override_pattern": "M-*-", "mamba_num_heads": 4, "ssm_state_size": 8},
    ),
    # moonshotai/Kimi-Linear-48B-A3B-Base
    "kimi_linear": of_type(
        *("kimi_linear", "KimiLinear", RECURRENT, DECODER),
        {
            "kv_lora_rank": 6,
            "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 4},
            "mla_use_nope": True,
        },
    ),
    # moonshotai/Kimi-K2-Base
    "kimi_k2": of_type("kimi_k2", "DeepseekV3", ANOTHER, DECODER, LATENT),
    # Qwen/Qwen3.5-35B-A3B-Base
    "qwen3_5_moe": RefusedConfig(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {**DECODER, **DELTA, "model_type": "qwen3_5_moe_text"},
            "vision_config": {"hidden_size": 8},
        },
        (rf"model_type = 'qwen3_5_moe'.*{RECURRENT}",),
    ),
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": of_type(
        *("minimax_m2", "MiniMaxM2", ANOTHER, DECODER),
        {"num_local_experts": 4, "rotary_dim": 4, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    ),
    # MiniMaxAI/MiniMax-Text-01-hf
    "minimax": of_type(
        *("minimax", "MiniMax", RECURRENT, DECODER),
        {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    # LiquidAI/LFM2-1.2B
    "lfm2": of_type(
        *("lfm2", "Lfm2", RECURRENT, DECODER),
        {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    ),
    # allenai/OLMo-7B-hf
    "olmo": of_type("olmo", "Olmo", ANOTHER, NO_RMS, {"clip_qkv": None}),
    # CohereLabs/c4ai-command-r-v01
    "cohere": of_type("cohere", "Cohere", ANOTHER, NO_RMS, {"logit_scale": 0.0625}),
    # microsoft/phi-2
    "phi": of_type("phi", "Phi", ANOTHER, COMMON, SIZES, {"qk_layernorm": False}),
}

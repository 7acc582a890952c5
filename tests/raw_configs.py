"""Raw `config.json` files of every family that is imported, with the keys that their publishers
write, and small sizes. `newer` spells one as transformers 5 does."""

from __future__ import annotations

import copy

from tests.raw_tables import (
    COMMON,
    DECODER,
    KINDS,
    LATENT,
    LLAMA3,
    WINDOWED,
    YARN,
    Keys,
    falcon_keys,
    older_keys,
    raw_keys,
)
from tests.raw_variants import VARIANTS

# Above each entry is the model on the hub whose file it follows.
CONFIGS: dict[str, Keys] = {
    # openai-community/gpt2
    "gpt2": raw_keys(
        *("gpt2", "GPT2"),
        {key: value for key, value in COMMON.items() if key != "torch_dtype"},
        n_ctx=64,
        n_embd=16,
        n_head=4,
        n_layer=2,
        n_positions=64,
        vocab_size=43,
        activation_function="gelu_new",
        attn_pdrop=0.1,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        layer_norm_epsilon=1e-5,
        n_inner=None,
        reorder_and_upcast_attn=False,
        scale_attn_by_inverse_layer_idx=False,
        scale_attn_weights=True,
        summary_activation=None,
        summary_first_dropout=0.1,
        summary_proj_to_labels=True,
        summary_type="cls_index",
        summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    ),
    # meta-llama/Meta-Llama-3.1-8B
    "llama": raw_keys(
        *("llama", "Llama", DECODER),
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
        rope_scaling=LLAMA3,
        head_dim=4,
        _name_or_path="meta-llama/Meta-Llama-3.1-8B",
        _attn_implementation_autoset=True,
    ),
    # HuggingFaceTB/SmolLM2-1.7B
    "llama-smollm2": raw_keys(
        *("llama", "Llama", DECODER),
        attention_bias=False,
        is_llama_config=True,
        mlp_bias=False,
        pad_token_id=2,
        pretraining_tp=1,
        rope_interleaved=False,
        **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    ),
    # mistralai/Mistral-7B-Instruct-v0.1, as transformers saves it
    "mistral": raw_keys("mistral", "Mistral", DECODER, sliding_window=5, head_dim=4),
    # Qwen/Qwen2-7B
    "qwen2": raw_keys("qwen2", "Qwen2", DECODER, WINDOWED, use_mrope=False),
    # Qwen/Qwen3-8B
    "qwen3": raw_keys("qwen3", "Qwen3", DECODER, WINDOWED, attention_bias=False, head_dim=8),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral": raw_keys(
        *("mixtral", "Mixtral", DECODER),
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        router_jitter_noise=0.0,
        sliding_window=None,
    ),
    # Qwen/Qwen1.5-MoE-A2.7B
    "qwen2_moe": raw_keys(
        *("qwen2_moe", "Qwen2Moe", DECODER, WINDOWED),
        decoder_sparse_step=1,
        moe_intermediate_size=12,
        norm_topk_prob=False,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=10,
    ),
    # Qwen/Qwen3-Coder-30B-A3B-Instruct
    "qwen3_moe": raw_keys(
        *("qwen3_moe", "Qwen3Moe", DECODER, WINDOWED),
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=8,
        mlp_only_layers=[],
        moe_intermediate_size=12,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        qkv_bias=False,  # these three: Qwen3-Coder
        shared_expert_intermediate_size=0,
        use_qk_norm=True,
    ),
    # allenai/OLMoE-1B-7B-0924
    "olmoe": raw_keys(
        *("olmoe", "Olmoe", DECODER),
        attention_bias=False,
        clip_qkv=None,
        norm_topk_prob=False,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.01,
        pad_token_id=1,
    ),
    # deepseek-ai/DeepSeek-V2
    "deepseek_v2": raw_keys(
        *("deepseek_v2", "DeepseekV2", DECODER, LATENT),
        norm_topk_prob=False,
        rope_scaling=YARN,
        routed_scaling_factor=16.0,
        scoring_func="softmax",
        topk_method="group_limited_greedy",
    ),
    # deepseek-ai/DeepSeek-V3
    "deepseek_v3": raw_keys(
        *("deepseek_v3", "DeepseekV3", DECODER, LATENT),
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
        rope_scaling=YARN,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
    # meta-llama/Llama-4-Scout-17B-16E
    "llama4_text": raw_keys(
        *("llama4_text", "Llama4", DECODER),
        attention_bias=False,
        attention_chunk_size=5,
        attn_scale=0.1,
        attn_temperature_tuning=True,
        cache_implementation="hybrid",
        floor_scale=8,
        for_llm_compressor=False,
        head_dim=8,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=24,
        num_local_experts=4,
        num_experts_per_tok=1,
        no_rope_layers=[],
        no_rope_layer_interval=2,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
        rope_scaling=LLAMA3,
        use_qk_norm=True,
    ),
    # zai-org/GLM-4.5-Air
    "glm4_moe": raw_keys(
        *("glm4_moe", "Glm4Moe", DECODER),
        attention_bias=True,
        first_k_dense_replace=1,
        head_dim=8,
        moe_intermediate_size=12,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=2,
        num_nextn_predict_layers=0,
        partial_rotary_factor=0.5,
        routed_scaling_factor=1.0,
        topk_group=1,
        use_qk_norm=True,
    ),
    # rednote-hilab/dots.llm1.base
    "dots1": raw_keys(
        *("dots1", "Dots1", DECODER),
        attention_bias=False,
        first_k_dense_replace=1,
        head_dim=8,
        max_window_layers=2,
        moe_intermediate_size=12,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        scoring_func="noaux_tc",
        sliding_window=None,
        topk_group=1,
    ),
    # allenai/OLMo-2-1124-7B
    "olmo2": raw_keys("olmo2", "Olmo2", DECODER, attention_bias=False, pad_token_id=1),
    # zai-org/glm-4-9b-hf
    "glm": raw_keys(
        *("glm", "Glm", DECODER),
        attention_bias=True,
        head_dim=8,
        partial_rotary_factor=0.5,
        eos_token_id=[2, 3],
        pad_token_id=2,
    ),
    # zai-org/GLM-4-9B-0414
    "glm4": raw_keys(
        *("glm4", "Glm4", DECODER),
        attention_bias=False,
        head_dim=8,
        pad_token_id=2,
        partial_rotary_factor=0.5,
    ),
    # microsoft/Phi-4-mini-instruct
    "phi3": raw_keys(
        *("phi3", "Phi3", DECODER),
        attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0,
        full_attn_mod=1,  # these four: Phi-4-mini
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        original_max_position_embeddings=16,
        pad_token_id=0,
        partial_rotary_factor=1.0,
        resid_pdrop=0.0,
        rope_scaling={"long_factor": [3.0, 4.0], "short_factor": [1.0, 1.5], "type": "longrope"},
        sliding_window=7,
    ),
    # EleutherAI/gpt-neox-20b
    "gpt_neox": older_keys(
        *("gpt_neox", "GPTNeoX"),
        attention_probs_dropout_prob=0,  # these two: gpt-neox-20b
        hidden_dropout_prob=0,
        hidden_act="gelu_fast",
        classifier_dropout=0.1,
        layer_norm_eps=1e-5,
        rotary_emb_base=10000,
        rotary_pct=0.5,
        tie_word_embeddings=False,
        use_parallel_residual=True,
    ),
    # tiiuae/falcon-7b-instruct, as transformers saves it
    "falcon": falcon_keys(
        alibi=False,
        apply_residual_connection_post_layernorm=False,
        attention_dropout=0.0,
        bias=False,
        ffn_hidden_size=28,
        ff_factor=4,
        hidden_dropout=0.0,
        layer_norm_epsilon=1e-5,
        multi_query=True,
        num_kv_heads=4,
        new_decoder_architecture=False,
        parallel_attn=True,
        rope_theta=10000.0,
    ),
    # tiiuae/falcon-40b
    "falcon-newer": falcon_keys(
        activation="gelu",
        alibi=False,
        bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        layer_norm_epsilon=1e-5,
        multi_query=True,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=None,
        parallel_attn=True,
    ),
    # google/gemma-2b
    "gemma": raw_keys(
        *("gemma", "Gemma", DECODER),
        attention_bias=False,
        head_dim=8,
        hidden_act="gelu",
        hidden_activation=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    # google/gemma-2-9b
    "gemma2": raw_keys(
        *("gemma2", "Gemma2", DECODER),
        attention_bias=False,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=8,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16,
        sliding_window=5,
        sliding_window_size=5,
        tie_word_embeddings=True,
    ),
    # google/gemma-3-12b-pt
    "gemma3_text": raw_keys(
        *("gemma3_text", "Gemma3", DECODER),
        attention_bias=False,
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=8,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16,
        rope_local_base_freq=500.0,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=1000000.0,
        sliding_window=5,
        sliding_window_pattern=2,
        tie_word_embeddings=True,
    ),
    # openai/gpt-oss-20b
    "gpt_oss": raw_keys(
        *("gpt_oss", "GptOss", DECODER),
        attention_bias=True,
        experts_per_token=2,
        head_dim=8,
        initial_context_length=16,
        layer_types=KINDS,
        num_experts_per_tok=2,
        num_local_experts=4,
        output_router_logits=False,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=5,
        swiglu_limit=7.0,
    ),
    # ByteDance-Seed/Seed-OSS-36B-Base
    "seed_oss": raw_keys(
        *("seed_oss", "SeedOss", DECODER),
        attention_bias=True,
        attention_out_bias=False,
        head_dim=8,
        mlp_bias=False,
        residual_dropout=0.1,
        rope_scaling={"rope_type": "default"},
    ),
    # allenai/Olmo-3-1025-7B
    "olmo3": raw_keys(
        *("olmo3", "Olmo3", DECODER),
        attention_bias=False,
        layer_types=KINDS,
        rope_scaling={
            "attention_factor": 1.2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
        },
        rope_theta=500000,
        sliding_window=5,
    ),
    # HuggingFaceTB/SmolLM3-3B
    "smollm3": raw_keys(
        *("smollm3", "SmolLM3", DECODER),
        attention_bias=False,
        layer_types=["full_attention"] * 2,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=2,
        no_rope_layers=[1, 0],
        pad_token_id=2,
        pretraining_tp=2,
        sliding_window=None,
        use_sliding_window=False,
    ),
    # bigcode/starcoder2-3b
    "starcoder2": raw_keys(
        *("starcoder2", "Starcoder2"),
        {key: value for key, value in DECODER.items() if key != "rms_norm_eps"},
        activation_function="gelu",
        attention_softmax_in_fp32=True,
        embedding_dropout=0.1,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5,
        mlp_type="default",
        norm_epsilon=1e-5,
        norm_type="layer_norm",
        residual_dropout=0.1,
        scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True,
        sliding_window=5,
        tie_word_embeddings=True,
        use_bias=True,
    ),
    # stabilityai/stablelm-2-1_6b
    "stablelm": raw_keys(
        *("stablelm", "StableLm"),
        {key: value for key, value in DECODER.items() if key != "rms_norm_eps"},
        hidden_dropout=0.0,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_layernorm=False,
        use_parallel_residual=False,
        use_qkv_bias=True,
    ),
    # baidu/ERNIE-4.5-0.3B-PT
    "ernie4_5": raw_keys(
        *("ernie4_5", "Ernie4_5"),
        {key: value for key, value in DECODER.items() if key != "attention_dropout"},
        compression_ratio=1.0,
        head_dim=8,
        tie_word_embeddings=True,
        use_bias=False,
    ),
    # mistralai/Ministral-8B-Instruct-2410
    "ministral": raw_keys(
        "ministral", "Ministral", DECODER, head_dim=8, layer_types=KINDS, sliding_window=5
    ),
    **VARIANTS,
}


def newer(raw: Keys) -> Keys:
    """The same file as transformers 5 writes it."""
    keys = copy.deepcopy(raw) | {"transformers_version": "5.0.0"}
    if "torch_dtype" in keys:
        keys["dtype"] = keys.pop("torch_dtype")
    if "rope_theta" not in keys and "rotary_emb_base" not in keys:
        return keys
    table = keys.pop("rope_scaling", None) or {"rope_type": "default"}
    table["rope_type"] = table.pop("type", None) or table["rope_type"]
    table["rope_theta"] = keys.pop("rope_theta", None) or keys.pop("rotary_emb_base")
    for key in ("partial_rotary_factor", "rotary_pct"):
        if key in keys:
            table["partial_rotary_factor"] = keys.pop(key)
    local = keys.pop("rope_local_base_freq", None)
    if local is not None or keys["model_type"] == "olmo3":
        within = {"rope_type": "default", "rope_theta": local or table["rope_theta"]}
        table = {"full_attention": table, "sliding_attention": within}
    return keys | {"rope_parameters": table}

"""Published configs of families that differ by a few keys from others."""

from __future__ import annotations

from hf_configs import Table, decoder

OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.2079441541679836,
    "original_max_position_embeddings": 8192,
}
MISTRAL_SMALL = decoder(
    *("mistral", 40, 5120, 32, 8, 32768, 131072),
    max_position_embeddings=131072,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e9,
    sliding_window=None,
)
# Each with the number of parameters that its model card or files give.
VARIANTS: dict[str, tuple[Table, int]] = {
    "seed-oss-36b": (
        decoder(
            *("seed_oss", 64, 5120, 80, 8, 27648, 155136),
            max_position_embeddings=524288,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=10000000.0,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            residual_dropout=0.1,
        ),
        36_151_104_512,
    ),
    "olmo-3-7b": (
        decoder(
            *("olmo3", 32, 4096, 32, 32, 11008, 100278),
            max_position_embeddings=65536,
            rms_norm_eps=1e-6,
            rope_theta=500000,
            rope_scaling=OLMO3_YARN,
            attention_bias=False,
            sliding_window=4096,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        ),
        7_298_011_136,
    ),
    "smollm3-3b": (
        decoder(
            *("smollm3", 36, 2048, 16, 4, 11008, 128256),
            max_position_embeddings=65536,
            rms_norm_eps=1e-6,
            rope_theta=5000000.0,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            layer_types=["full_attention"] * 36,
            use_sliding_window=False,
            sliding_window=None,
        ),
        3_075_098_624,
    ),
    "starcoder2-3b": (
        decoder("starcoder2", 30, 3072, 24, 2, 12288, 49152)
        | {
            "max_position_embeddings": 16384,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "use_bias": True,
            **dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.1),
        },
        3_030_371_328,
    ),
    "stablelm-3b-4e1t": (
        decoder(
            *("stablelm", 32, 2560, 32, 32, 6912, 50304),
            max_position_embeddings=4096,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.25,
            rope_theta=10000,
            use_qkv_bias=False,
        ),
        2_795_443_200,
    ),
    "ernie-4.5-0.3b": (
        decoder(
            *("ernie4_5", 18, 1024, 16, 2, 3072, 103424),
            max_position_embeddings=131072,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            use_bias=False,
        ),
        360_748_032,
    ),
    "dots.llm1": (
        decoder(
            *("dots1", 62, 4096, 32, 32, 10944, 152064),
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000000,
            attention_bias=False,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            n_group=1,
            topk_group=1,
        ),
        142_774_381_696 - 61 * 128,  # its files have biases of routers, which are no parameters
    ),
}

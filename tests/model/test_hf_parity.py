"""Parity with the `transformers` package: random weights, tiny configs, float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import newer_families
import pytest
import torch
import transformers
from safetensors.torch import load_file
from small import DEEPSEEK, batch_of, filled, state_from_hf, state_to_hf

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.layout.weight_table import by_name, weights
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.presets import load
from fivefold.core.model.shape import Shape
from fivefold.huggingface.config_export import WRITERS
from fivefold.huggingface.names import to_hf
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.moe import Router
from tests.model.float64 import Float64Everywhere

F64 = torch.float64
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 83,
    "max_position_embeddings": 64,
}
QWEN = {**SIZES, "use_sliding_window": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# Their defaults are not where they differ: one pair in the ramp, another temperature for each part.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "rms_norm_eps": 1e-4,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        vocab_size=83,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-biases": lambda: transformers.LlamaConfig(
        **SIZES,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**QWEN, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**QWEN, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=6, num_experts_per_tok=3, sliding_window=7
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **QWEN, **EXPERTS, shared_expert_intermediate_size=20, norm_topk_prob=False
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **QWEN, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    # The gradient of a padding token's embedding is zero there.
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, pad_token_id=None, eos_token_id=0
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **LATENT,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        topk_group=3,
        routed_scaling_factor=16.0,
        rope_parameters=YARN,
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, topk_method="greedy", attention_bias=True
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=20,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
        rope_parameters=YARN,
    ),
    "deepseek-v3-halves": lambda: transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=20,
        topk_group=2,
        num_nextn_predict_layers=0,
        rope_interleave=False,
        rope_parameters=YARN | {"mscale": 0.0, "mscale_all_dim": 0.0},
    ),
    **newer_families.CONFIGS,
}


@dataclass(frozen=True)
class Pair:
    """Their model and ours with the same weights."""

    theirs: Any
    ours: Decoder
    shape: Shape


def pair(name: str) -> Pair:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    with Float64Everywhere():
        theirs = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).double()
    theirs.eval()  # GPT-2 has dropout
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(0.1 * torch.randn_like(each))  # norms and biases must not be 1 and 0
        for each_name, each in theirs.named_buffers():
            if each_name.endswith("e_score_correction_bias"):
                each.copy_(0.1 * torch.randn_like(each).float())
    shape = shape_from_config(config.to_dict(), name)
    ours = from_config(shape, dtype=F64)
    ours.load_state_dict(state_from_hf(shape, saved(theirs)), strict=not shape.tied)
    return Pair(theirs, ours, shape)


def saved(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under the names that the package writes to disk, experts one by one."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def saved_gradients(model: Any) -> dict[str, torch.Tensor]:
    """The same names, to gradients; zero where the package computed none."""
    slopes = copy.deepcopy(model)
    with torch.no_grad():
        for mine, given in zip(slopes.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(mine) if given.grad is None else given.grad)
    return saved(slopes)


@pytest.fixture(scope="module", params=list(CONFIGS))
def models(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param)


def test_every_family_is_here() -> None:
    assert {config().model_type for config in CONFIGS.values()} == set(WRITERS)


def test_same_loss_logits_and_gradients(models: Pair) -> None:
    batch = batch_of(models.shape, seq=24)
    with Float64Everywhere():
        out = models.theirs(batch.tokens)
        log_odds = out.logits.log_softmax(-1)
    counted = batch.labels != -100
    picked = log_odds.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    their_loss = -(picked * counted).sum()
    models.theirs.zero_grad()
    their_loss.backward()
    models.ours.zero_grad()
    loss = models.ours(batch.tokens, batch)
    loss.backward()

    torch.testing.assert_close(loss, their_loss, rtol=1e-10, atol=0)
    assert models.ours.head is not None
    models.ours.head.cross_entropy = lambda logits, labels: logits
    logits = models.ours(batch.tokens, batch)
    torch.testing.assert_close(logits, out.logits.flatten(0, 1), rtol=1e-10, atol=1e-10)

    ours = {name: each.grad for name, each in models.ours.named_parameters()}
    expected = state_from_hf(models.shape, saved_gradients(models.theirs))
    expected = {name: each for name, each in expected.items() if not name.endswith("router.bias")}
    assert ours.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        # Some are zero but for rounding: a key's bias moves no softmax without rotation.
        scale = max(grad.abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-10 * scale)


def test_weights_go_out_as_they_came_in(models: Pair) -> None:
    theirs = saved(models.theirs)
    out = state_to_hf(models.shape, models.ours.state_dict())
    assert out.keys() == theirs.keys()
    assert all(torch.equal(each, theirs[name]) for name, each in out.items())
    assert all(each.is_contiguous() for each in out.values())


ROUTED = [name for name in CONFIGS if name.startswith(("mixtral", "deepseek")) or "moe" in name]


@pytest.mark.parametrize("name", ROUTED)
def test_same_experts_with_the_same_weights(name: str) -> None:
    models = pair(name)
    batch = batch_of(models.shape, rows=4, seq=40)
    theirs: list[tuple[torch.Tensor, torch.Tensor]] = []
    ours: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in models.theirs.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, x, y: theirs.append((y[2], y[1])))
    for module in models.ours.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, x, y: ours.append((y.experts, y.weights)))
    with Float64Everywhere(), torch.no_grad():
        models.theirs(batch.tokens)
    models.ours(batch.tokens, batch)
    assert len(theirs) == len(ours) == models.shape.num_moe_layers > 0
    for (their_experts, expected), (experts, found) in zip(theirs, ours, strict=True):
        order, their_order = experts.argsort(1), their_experts.argsort(1)
        assert torch.equal(experts.gather(1, order), their_experts.gather(1, their_order))
        expected = expected.gather(1, their_order)
        torch.testing.assert_close(found.gather(1, order), expected, rtol=1e-10, atol=0)
        assert experts.unique().numel() == models.shape.moe.experts, "some expert is never chosen"


def test_gpt2_places_by_hand() -> None:
    shape = load("gpt2")
    key = to_hf(shape, "blocks.3.attention.k.weight")
    assert (key.name, key.transposed) == ("transformer.h.3.attn.c_attn.weight", True)
    assert key.start == 768
    value = to_hf(shape, "blocks.3.attention.v.bias")
    assert (value.name, value.transposed) == ("transformer.h.3.attn.c_attn.bias", False)
    assert value.start == 1536
    norm = to_hf(shape, "blocks.0.mlp_norm.weight")
    assert (norm.name, norm.transposed, norm.start) == ("transformer.h.0.ln_2.weight", False, 0)


def test_places_of_experts_and_latents_by_hand() -> None:
    mixtral, v3 = load("mixtral-8x7b"), load("deepseek-v3")
    up = to_hf(mixtral, "blocks.3.mlp.experts.up.weight")
    names = up.names(by_name(mixtral)["blocks.3.mlp.experts.up.weight"])
    assert names == [f"model.layers.3.block_sparse_moe.experts.{e}.w3.weight" for e in range(8)]
    expected = {
        "blocks.0.mlp.gate.weight": "layers.0.mlp.gate_proj.weight",
        "blocks.3.mlp.router.weight": "layers.3.mlp.gate.weight",
        "blocks.3.mlp.router.bias": "layers.3.mlp.gate.e_score_correction_bias",
        "blocks.3.mlp.shared.down.weight": "layers.3.mlp.shared_experts.down_proj.weight",
        "blocks.3.attention.kv_down.weight": "layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "blocks.3.attention.q_latent_norm.weight": "layers.3.self_attn.q_a_layernorm.weight",
        "mtp.0.token_norm.weight": "layers.61.enorm.weight",
        "mtp.0.hidden_norm.weight": "layers.61.hnorm.weight",
        "mtp.0.join.weight": "layers.61.eh_proj.weight",
        "mtp.0.norm.weight": "layers.61.shared_head.norm.weight",
        "mtp.0.block.mlp_norm.weight": "layers.61.post_attention_layernorm.weight",
        "mtp.0.block.mlp.router.bias": "layers.61.mlp.gate.e_score_correction_bias",
    }
    assert {ours: to_hf(v3, ours).name for ours in expected} == {
        ours: f"model.{theirs}" for ours, theirs in expected.items()
    }


def test_layers_ahead_carry_the_embedding_and_the_head_once_more() -> None:
    state = filled(DEEPSEEK).state_dict()
    out = state_to_hf(DEEPSEEK, state)
    assert torch.equal(out["model.layers.3.embed_tokens.weight"], state["embed.weight"])
    assert torch.equal(out["model.layers.3.shared_head.head.weight"], state["head.weight"])
    back = state_from_hf(DEEPSEEK, out)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], each) for name, each in state.items())


def test_a_missing_or_wrong_expert_is_named() -> None:
    out = state_to_hf(DEEPSEEK, filled(DEEPSEEK).state_dict())
    del out["model.layers.1.mlp.experts.5.up_proj.weight"]
    out["model.layers.2.mlp.experts.7.down_proj.weight"] = torch.zeros(24, 17)
    with pytest.raises(BadFile) as caught:
        state_from_hf(DEEPSEEK, out)
    missing, wrong = caught.value.problems
    assert missing.startswith("model.layers.1.mlp.experts.5.up_proj.weight is missing")
    assert "experts.7.down_proj.weight has shape (24, 17)" in wrong and "(24, 16)" in wrong


def test_published_gpt2_files_lack_the_prefix_and_have_masks() -> None:
    models = pair("gpt2")
    bare = {
        name.removeprefix("transformer."): each
        for name, each in models.theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    state = state_from_hf(models.shape, bare)
    assert torch.equal(state["embed.weight"], models.theirs.transformer.wte.weight)
    assert len(state) == len(weights(models.shape))


def test_every_problem_of_a_file_is_named_at_once() -> None:
    models = pair("llama")
    state = dict(models.theirs.state_dict())
    del state["model.norm.weight"]
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(57, 32)
    state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(56, 32)
    with pytest.raises(BadFile) as caught:
        state_from_hf(models.shape, state)
    wrong, missing, extra = caught.value.problems
    assert missing.startswith("model.norm.weight is missing")
    assert "up_proj.weight has shape (57, 32)" in wrong and "(56, 32)" in wrong
    assert extra.startswith("model.layers.9.mlp.up_proj.weight is not in the model")


def test_a_family_without_known_names_is_refused() -> None:
    with pytest.raises(FivefoldError, match=r"family 'opt'.*use a model of one of gpt2, llama"):
        to_hf(load("opt-175b"), "embed.weight")

"""Parity with the `transformers` package: random weights, tiny configs, float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from small import batch_of
from torch.overrides import TorchFunctionMode

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.hf import shape_from_config
from fivefold.core.models import load
from fivefold.core.shape import Shape
from fivefold.core.weights import weights
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.hf_names import state_from_hf, state_to_hf, to_hf

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
}


class Float64Everywhere(TorchFunctionMode):
    """Lifts to float64 what the package computes in float32 whatever the model's type: the inner
    part of its norms, its rotary tables, the softmax and the loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lifted = {name: self.lift(value) for name, value in (kwargs or {}).items()}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(self.lift, args), **lifted)

    @staticmethod
    def lift(value: object) -> object:
        return F64 if value is torch.float32 else value


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
            config, attn_implementation="eager"
        ).double()
    theirs.eval()  # GPT-2 has dropout
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(0.1 * torch.randn_like(each))  # norms and biases must not be 1 and 0
    shape = shape_from_config(config.to_dict(), name)
    ours = from_config(shape, dtype=F64)
    state = state_from_hf(shape, theirs.state_dict())
    with torch.no_grad():
        for weight, parameter in ours.named_parameters():
            parameter.copy_(state[weight])
    return Pair(theirs, ours, shape)


@pytest.fixture(scope="module", params=list(CONFIGS))
def models(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param)


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

    theirs = {name: each.grad for name, each in models.theirs.named_parameters()}
    ours = {name: each.grad for name, each in models.ours.named_parameters()}
    expected = state_from_hf(models.shape, theirs)
    assert ours.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        # Some are zero but for rounding: a key's bias moves no softmax without rotation.
        scale = max(grad.abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-10 * scale)


def test_weights_go_out_as_they_came_in(models: Pair) -> None:
    theirs = models.theirs.state_dict()
    out = state_to_hf(models.shape, dict(models.ours.named_parameters()))
    tied = {"lm_head.weight"} if models.shape.tied else set[str]()
    assert out.keys() == theirs.keys() - tied
    assert all(torch.equal(each, theirs[name]) for name, each in out.items())
    assert all(each.is_contiguous() for each in out.values())


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
    assert extra.startswith("model.layers.9.mlp.up_proj.weight has no place")


def test_a_family_without_known_names_is_refused() -> None:
    with pytest.raises(FivefoldError, match=r"family 'opt'.*use a model of one of gpt2, llama"):
        to_hf(load("opt-175b"), "embed.weight")

"""Shapes to Hugging Face configs: what is written reads back to the same shape, or is refused."""

from __future__ import annotations

import pytest
from hf_configs import CONFIGS

from fivefold.core.errors import FivefoldError
from fivefold.core.model import presets as models
from fivefold.core.model.hf_config import shape_from_config
from fivefold.huggingface.config_export import WRITERS, as_hf

PRESETS = [name for name in models.presets() if models.load(name).family in WRITERS]


@pytest.mark.parametrize("name", PRESETS)
def test_config_of_a_preset_reads_back(name: str) -> None:
    shape = models.load(name)
    model = as_hf(shape, "bfloat16")
    assert shape_from_config(model.config, name) == model.shape == shape
    assert model.shape.family == shape.family == model.config["model_type"]


# Llama 4 has images, and Qwen3-Next is planned only.
READ_ONLY = {"llama-4-maverick", "qwen3-next-80b-a3b"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in READ_ONLY])
def test_no_key_of_a_published_config_changes(name: str) -> None:
    written = as_hf(shape_from_config(CONFIGS[name], name), "bfloat16").config
    same = CONFIGS[name].keys() & written.keys() - {"n_inner", "rope_scaling", "max_window_layers"}
    windows = {"sliding_window"} if written.get("use_sliding_window") is False else set[str]()
    assert {key: written[key] for key in same - windows} == {
        key: CONFIGS[name][key] for key in same - windows
    }
    assert "model_type" in same and len(same) > 8


def test_special_tokens_are_those_of_the_source() -> None:
    source = {"eos_token_id": [7, 8], "hidden_size": 1, "quantization_config": {}}
    config = as_hf(models.load("tiny"), "float32", source).config
    assert (config["eos_token_id"], config["bos_token_id"]) == ([7, 8], None)
    assert config["hidden_size"] == 64 and "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"qk_norm": "head"}, "qwen3"),
        ({"window": "7"}, "mistral"),
        ({"qkv_bias": "true"}, "qwen2"),
        ({"qkv_bias": "true", "window": "7"}, "qwen2"),
        ({"qkv_bias": "true", "out_bias": "true"}, "llama"),
    ],
)
def test_a_changed_model_goes_to_the_family_that_has_the_change(
    changes: dict[str, str], family: str
) -> None:
    shape = models.with_overrides(models.load("tiny"), changes)
    model = as_hf(shape, "float32")
    assert model.shape.family == model.config["model_type"] == family
    assert shape_from_config(model.config, "back") == shape


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("tiny", {"norm": "layer"}, "that of llama has no keys for its norm"),
        ("tiny-moe", {}, "no family has its attention, experts"),
        # The package does not build it, whatever the config says.
        ("deepseek-v2", {"moe.renormalise": "true"}, "that of deepseek_v2 has no keys for its"),
        # A shared expert of width 0 would still have a gate.
        ("qwen2-57b-a14b", {"moe.shared": "0", "moe.shared_ffn": "0"}, "no family has"),
    ],
)
def test_what_no_config_says_is_refused(name: str, changes: dict[str, str], named: str) -> None:
    shape = models.with_overrides(models.load(name), changes)
    with pytest.raises(FivefoldError, match=named):
        as_hf(shape, "float32")


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_a_model_without_shared_experts_keeps_its_family(name: str) -> None:
    shape = models.with_overrides(models.load(name), {"moe.shared": "0", "moe.shared_ffn": "0"})
    model = as_hf(shape, "float32")
    assert model.config["n_shared_experts"] == 0
    assert shape_from_config(model.config, name) == shape

"""Names of models in other frameworks, by the presets here."""

from __future__ import annotations

import re

from fivefold.core import FivefoldError
from fivefold.core.model import presets as models

# TorchTitan's family, flavor (up to 0.2.2) and configuration (main), by our preset.
TITAN: dict[str, tuple[str, str, str]] = {
    "llama-3.1-8b": ("llama3", "8B", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "70B", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "405B", "llama3_405b"),
    "deepseek-v2-lite": ("deepseek_v3", "16B", "deepseek_v3_16b"),
    "deepseek-v2": ("deepseek_v3", "236B", ""),
    "deepseek-v3": ("deepseek_v3", "671B", "deepseek_v3_671b"),
    "qwen3-0.6b": ("qwen3", "0.6B", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "1.7B", "qwen3_1_7b"),
    "qwen3-4b": ("qwen3", "4B", ""),
    "qwen3-8b": ("qwen3", "8B", ""),
    "qwen3-14b": ("qwen3", "14B", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "32B", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B", ""),
    "llama-4-maverick": ("llama4", "17bx128e", ""),
}
_HOSTED = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+?)(?:/|$|,| )")


def titan_of(model: str) -> tuple[str, str, str] | None:
    """TorchTitan's names of a preset."""
    return TITAN.get(_preset_or(model))


def titan_model(family: str, flavor: str) -> str | None:
    """The preset of a family and a flavor, or of a configuration."""
    for name, (its_family, its_flavor, config) in TITAN.items():
        if (family, flavor) in ((its_family, its_flavor), ("", config)) and flavor:
            return name
    return None


def hosted_name(model: str) -> str:
    """The repository of a model on Hugging Face, if its source is there; else its name."""
    try:
        match = _HOSTED.search(models.load(model).source)
    except FivefoldError:
        return model
    return model if match is None else match[1]


def hosted_model(repository: str) -> str | None:
    """The preset of a repository, by its source or its name."""
    for name in models.presets():
        if hosted_name(name).lower() == repository.lower():
            return name
    return model_called(repository.rsplit("/", 1)[-1])


def recipe_name(model: str) -> str:
    """A name as Megatron-Bridge's recipes have it."""
    name = re.sub(r"^llama-(\d)\.?(\d)?-", r"llama\1\2-", _preset_or(model).lower())
    return re.sub(r"[^a-z0-9]+", "_", name)


def model_called(model_text: str) -> str | None:
    """The preset with the longest name in these words (`llama31_8b_pretrain_config`)."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    inside = [name for name in models.presets() if plain(name) in plain(model_text)]
    return max(inside, key=len, default=None)


def _preset_or(model: str) -> str:
    try:
        return models.preset_name(model)
    except FivefoldError:
        return "the-model" if models.is_text(model) else model.rsplit("/", 1)[-1]

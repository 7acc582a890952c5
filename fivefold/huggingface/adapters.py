"""Low-rank adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.

Each of our factors is one tensor of theirs, under the name of the linear in Hugging Face files;
stacked experts are in one tensor for each expert.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.shape import Shape
from fivefold.core.tuning import ADAPTER, ALL, Tuning
from fivefold.core.weights import Weight, weights
from fivefold.huggingface.files import read_json, write_json
from fivefold.huggingface.names import to_hf

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _FACTORS = "base_model.model.", {"a": "lora_A", "b": "lora_B"}
# What changes the arithmetic, and what we compute.
_USUAL: dict[str, Any] = {
    **{"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none"},
    **{"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None},
}
_SHOWN = 8


def merged(shape: Shape, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads the weights of a model with its adapters added to them."""
    tuning = shape.tuning
    if tuning is None or not tuning.rank:
        return read

    def full(name: str) -> Tensor:
        weight = read(name)
        if not tuning.adapts(name):
            return weight
        linear = name.removesuffix(".weight")
        a, b = (read(f"{linear}{ADAPTER}{factor}").double() for factor in _FACTORS)
        return (weight.double() + tuning.scale * (b @ a)).to(weight.dtype)

    return full


def _linears(shape: Shape) -> Iterator[tuple[Weight, list[str]]]:
    """The linears that may have an adapter, and their modules in Hugging Face files."""
    if shape.family == "gpt2":
        raise FivefoldError(
            "gpt2 stores queries, keys and values in one transposed matrix, and their adapters are "
            "apart here: export the merged model, without --adapter"
        )
    for one in weights(replace(shape, tuning=None)):
        if Tuning(1).adapts(one.name):
            names = to_hf(shape, one.name).names(one)
            yield one, [name.removesuffix(".weight") for name in names]


def write_adapter(
    folder: Path, shape: Shape, base: str, read: Callable[[str], Tensor], dtype: torch.dtype
) -> list[Path]:
    """Write the adapters of a model; the folder is never partial."""
    tuning = shape.tuning
    if tuning is None or not tuning.rank:
        raise FivefoldError("this run has no adapters: export its model, without --adapter")
    if tuning.train_only:
        raise FivefoldError(
            f"train_only = {tuning.train_only}: other weights have learned too, which adapters do "
            "not hold; export the merged model, without --adapter"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FivefoldError(f"{folder} is there already: give a folder that is new or empty")
    tensors: dict[str, Tensor] = {}
    found = list(_linears(shape))
    for one, modules in found:
        for factor, theirs in _FACTORS.items() if tuning.adapts(one.name) else ():
            values = read(f"{one.name.removesuffix('.weight')}{ADAPTER}{factor}").to(dtype)
            parts = values.unbind() if one.expert else [values]
            for module, part in zip(modules, parts, strict=True):
                tensors[f"{_PREFIX}{module}.{theirs}.weight"] = part.contiguous()
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)  # left by a writer that was killed
    try:
        beside.mkdir(parents=True)
        save_file(tensors, beside / FILE, metadata={"format": "pt"})
        write_json(beside / CONFIG, _config(tuning, found, base))
        beside.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(str(folder), [f"{reason}; free some room, or give another folder"]) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return [folder / FILE]


def _config(tuning: Tuning, found: list[tuple[Weight, list[str]]], base: str) -> dict[str, Any]:
    adapted = [module for one, modules in found if tuning.adapts(one.name) for module in modules]
    others = [module for one, modules in found if not tuning.adapts(one.name) for module in modules]
    leaves = {module.rpartition(".")[2] for module in adapted}
    by_leaf = not leaves & {module.rpartition(".")[2] for module in others}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.rank,
        "lora_alpha": tuning.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(leaves) if by_leaf else adapted,
        "use_rslora": False,
        "inference_mode": True,
        **_USUAL,
    }


class AdapterFolder:
    """An adapter that PEFT has saved, of this model; else all problems are raised at once."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._file = folder / FILE
        config = read_json(folder / CONFIG)
        sizes = self._sizes()
        problems = list(_unsupported(config))
        rank = config.get("r")
        if not isinstance(rank, int) or rank < 1:
            raise BadFile(str(folder / CONFIG), ["r: give the rank, a whole number above 0"])
        self._modules = {
            one.name: modules
            for one, modules in _linears(shape)
            if any(_name(module, "a") in sizes for module in modules)
        }
        self.tuning = Tuning(rank, _alpha(config, rank), _targets(shape, set(self._modules)))
        wanted: dict[str, tuple[int, ...]] = {}
        for one, modules in _linears(shape):
            outputs, inputs = one.shape[-2:]
            for module in modules if one.name in self._modules else ():
                wanted[_name(module, "a")] = (rank, inputs)
                wanted[_name(module, "b")] = (outputs, rank)
        problems += _differences(wanted, sizes)
        if problems:
            rest = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise BadFile(str(folder), [*problems[:_SHOWN], *rest])

    def weight(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """One of our factors, as `dtype`."""
        linear, _, factor = weight.name.rpartition(ADAPTER)
        names = [_name(module, factor) for module in self._modules[f"{linear}.weight"]]
        with safe_open(self._file, "pt") as file:
            parts = [file.get_tensor(name).to(dtype) for name in names]
        return torch.stack(parts) if weight.expert else parts[0].contiguous()

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        try:
            with safe_open(self._file, "pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            rule = f"{error}; give a folder that PEFT has saved, with {CONFIG} and {FILE}"
            raise BadFile(str(self._file), [rule]) from error


def _name(module: str, factor: str) -> str:
    return f"{_PREFIX}{module}.{_FACTORS[factor]}.weight"


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type") != "LORA":
        yield f"peft_type {config.get('peft_type')}: only LORA adapters are read; merge it in PEFT"
    for key, usual in _USUAL.items():
        if (config.get(key) or usual) != usual:
            yield f"{key} = {config[key]}: is not computed here; merge it in PEFT first"


def _alpha(config: Mapping[str, Any], rank: int) -> float:
    """Ours is divided by the rank; that of rsLoRA by its root."""
    alpha = float(config.get("lora_alpha", 8))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _targets(shape: Shape, adapted: set[str]) -> str:
    """The key `lora_targets` of these weights."""
    names = [one.name for one in weights(shape) if Tuning(1).adapts(one.name)]
    if adapted == set(names) or not adapted:
        return ALL
    kinds = {name.split(".", 2)[2].removesuffix(".weight") for name in adapted}
    short = "+".join(sorted(kinds))
    if {name for name in names if Tuning(1, 1.0, short).adapts(name)} == adapted:
        return short
    return "+".join(sorted(name.removesuffix(".weight") for name in adapted))


def _differences(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in found.keys() - wanted.keys():
        yield f"{name} is of no linear of this model: give the adapter of this model"
    for name, size in wanted.items():
        if name not in found:
            yield f"{name} is missing: give all files of the adapter"
        elif found[name] != size:
            yield f"{name} has shape {found[name]}, and this model asks for {size}"

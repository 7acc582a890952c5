"""Low-rank adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.

Each of our factors is one tensor of theirs, under the name of the linear in Hugging Face files.
Those of stacked experts are written as `expert_adapters` says, and read from there, or from one
tensor for each expert, which PEFT saved while transformers had a linear for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight, buffers, weights
from fivefold.core.model import ADAPTER, ALL, Shape, Tuning
from fivefold.huggingface.expert_adapters import (
    DOWN,
    FUSED,
    ExpertLayer,
    FusedPlace,
    expert_layers,
    find_fused,
    fused_factors,
)
from fivefold.huggingface.files import CONFIG as MODEL_CONFIG
from fivefold.huggingface.files import (
    HfFolder,
    new_folder,
    read_json,
    refuse_existing,
    write_json,
    write_model,
)
from fivefold.huggingface.names import fuses_linears, to_hf

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
BASE = "base"  # the folder of a model that cannot be loaded from elsewhere
_BASE_BYTES = 5_000_000_000  # of a file of it
_PREFIX, _FACTORS = "base_model.model.", {"a": "lora_A", "b": "lora_B"}
# What changes the arithmetic, and what we compute.
_USUAL: dict[str, Any] = {
    **{"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none"},
    "modules_to_save": None,
}
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
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
    if fuses_linears(shape):
        raise FivefoldError(
            f"{shape.family} stores several linears in one matrix, and their adapters are apart "
            "here: export the merged model, without --adapter"
        )
    for one in weights(replace(shape, tuning=None)):
        if Tuning(1).adapts(one.name):
            names = to_hf(shape, one.name).names(one)
            yield one, [name.removesuffix(".weight") for name in names]


def base_of(shape: Shape, origin: str, read: Callable[[str], Tensor]) -> str | None:
    """What transformers loads the frozen weights of a model by: the name on the hub, or else the
    folder, that it was imported from. None if that has gone, or has other weights."""
    folder, frozen = Path(origin), replace(shape, tuning=None)
    if not origin or not (folder / MODEL_CONFIG).is_file():
        return None
    try:
        source = HfFolder(folder, frozen)
    except FivefoldError:
        return None
    for one in (*weights(frozen), *buffers(frozen)):
        values = read(one.name)
        if not torch.equal(source.weight(one, values.dtype), values):
            return None
    cached = re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+$", str(folder))
    return str(folder) if cached is None else "/".join(cached.groups())


def write_adapter(
    folder: Path,
    shape: Shape,
    base: str | None,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write the adapters of a model; the folder is never partial. Without a `base` that can be
    loaded, the frozen model is written beside them, with this config."""
    tuning = shape.tuning
    if tuning is None or not tuning.rank:
        raise FivefoldError("this run has no adapters: export its model, without --adapter")
    if tuning.train_only:
        raise FivefoldError(
            f"train_only = {tuning.train_only}: other weights have learned too, which adapters do "
            "not hold; export the merged model, without --adapter"
        )
    refuse_existing(folder)
    tensors: dict[str, Tensor] = {}
    for one, modules in _linears(shape):
        for factor in _FACTORS if tuning.adapts(one.name) and not one.expert else ():
            values = read(f"{one.name.removesuffix('.weight')}{ADAPTER}{factor}").to(dtype)
            tensors[_name(modules[0], factor)] = values.contiguous()
    for layer in expert_layers(shape):
        for module, *pair in fused_factors(layer, tuning, lambda name: read(name).to(dtype)):
            tensors |= {_name(module, each): part for each, part in zip("ab", pair, strict=True)}
    with new_folder(folder) as part:
        save_file(tensors, part / FILE, metadata={"format": "pt"})
        if base is None:
            frozen = replace(shape, tuning=None)
            write_model(part / BASE, frozen, config or {}, read, dtype, _BASE_BYTES)
            base = str((folder / BASE).resolve())
        write_json(part / CONFIG, _config(shape, tuning, base))
    return [folder / FILE]


def _config(shape: Shape, tuning: Tuning, base: str) -> dict[str, Any]:
    """What PEFT wraps: modules, and parameters where experts are stacked.

    Where a model has experts, PEFT takes every linear named as one of theirs for an expert. Other
    MLPs of it are therefore named by their parameters too.
    """
    layers = list(expert_layers(shape))
    adapted: dict[bool, list[str]] = {True: [], False: []}
    parameters: dict[bool, list[str]] = {True: [], False: []}
    for one, (module, *_) in _linears(shape):
        if not one.expert:
            is_parameter = bool(layers) and ".mlp." in one.name
            names = parameters if is_parameter else adapted
            names[tuning.adapts(one.name)].append(f"{module}.weight" if is_parameter else module)
    for layer in layers:
        given = layer.parameters(layer.adapted(tuning))
        for each in (FUSED, DOWN):
            parameters[each in given].append(f"{layer.module}.{each}")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.rank,
        "lora_alpha": tuning.alpha,
        "lora_dropout": 0.0,
        "target_modules": _shortest(adapted[True], adapted[False], 1),
        "target_parameters": _shortest(parameters[True], parameters[False], 4) or None,
        "use_rslora": False,
        "inference_mode": True,
        **_USUAL,
        **_doubled(layers, tuning),
    }


def _shortest(adapted: list[str], others: list[str], most: int) -> list[str]:
    """The last words of names if they say which are adapted, else the names."""

    def ends(names: list[str]) -> set[str]:
        """Without the number of the layer, at most so many words."""
        words = [name.rpartition(".layers.")[2].split(".")[1:] for name in names]
        return {".".join(each[-most:]) for each in words}

    return sorted(ends(adapted)) if not ends(adapted) & ends(others) else adapted


def _doubled(layers: list[ExpertLayer], tuning: Tuning) -> dict[str, Any]:
    """Ranks and scales of gate and up that have an adapter each in one parameter."""
    kinds = {layer.module: set(layer.adapted(tuning)) for layer in layers}
    both = [module for module, each in kinds.items() if {"gate", "up"} <= each]
    one = [module for module, each in kinds.items() if len({"gate", "up"} & each) == 1]
    names = [f"{module}.{FUSED}" for module in both]
    keys = (
        names
        if one
        else sorted({name.rpartition(".layers.")[2].split(".", 1)[1] for name in names})
    )
    values = {"rank_pattern": 2 * tuning.rank, "alpha_pattern": 2 * tuning.alpha}
    return {pattern: dict.fromkeys(keys, value) for pattern, value in values.items()}


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
        self._fused, wanted = find_fused(shape, sizes, rank, _name)
        adapted = {*self._modules, *self._fused}
        self.tuning = Tuning(rank, _alpha(config, rank), _targets(shape, adapted))
        for one, modules in _linears(shape):
            outputs, inputs = one.shape[-2:]
            for module in modules if one.name in self._modules else ():
                wanted[_name(module, "a")] = (rank, inputs)
                wanted[_name(module, "b")] = (outputs, rank)
        problems += _differences(wanted, sizes)
        problems += [] if problems else self._joined(rank)
        if problems:
            rest = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise BadFile(str(folder), [*problems[:_SHOWN], *rest])

    def weight(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """One of our factors, as `dtype`."""
        linear, _, factor = weight.name.rpartition(ADAPTER)
        if (place := self._fused.get(f"{linear}.weight")) is not None:
            return place.factor(factor, self._read(place, factor)).to(dtype)
        names = [_name(module, factor) for module in self._modules[f"{linear}.weight"]]
        with safe_open(self._file, "pt") as file:
            parts = [file.get_tensor(name).to(dtype) for name in names]
        return torch.stack(parts) if weight.expert else parts[0].contiguous()

    def _read(self, place: FusedPlace, factor: str) -> Tensor:
        with safe_open(self._file, "pt") as file:
            return file.get_tensor(_name(place.module, factor))

    def _joined(self, rank: int) -> Iterator[str]:
        """Adapters of twice the rank that are not one for gate and one for up."""
        for place in self._fused.values():
            if place.rank != rank and not place.is_alone(self._read(place, "b")):
                name = _name(place.module, "b")
                yield f"{name} joins gate and up at rank {place.rank}: merge it in PEFT first"

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
    for key, plain in _PATTERNS.items():
        found: Mapping[str, Any] = config.get(key) or {}
        is_double = all(
            name.endswith(FUSED)
            and value == 2 * config.get(plain, 8)
            and not config.get("use_rslora")
            for name, value in found.items()
        )
        if not is_double or bool(found) != any(config.get(each) for each in _PATTERNS):
            yield f"{key} = {found}: is not computed here; merge it in PEFT first"


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

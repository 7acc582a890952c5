"""Low-rank adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.

Each of our factors is one tensor of theirs, under the name of the linear in Hugging Face files.
Those of stacked experts are written as `expert_adapters` says, and read from there, or from one
tensor for each expert, which PEFT saved while transformers had a linear for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight, buffers, weights
from fivefold.core.model import ADAPTER, ALL, Shape, Tuning
from fivefold.huggingface.families import EXPERT
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

# Adapters of stacked experts as PEFT stores them for the transformers package, from 5 on.
#
# A module there has the experts of a layer in two parameters, `gate_up_proj` (gate above up) and
# `down_proj`. PEFT wraps the module once for each parameter, gate and up inside. A is the factors
# of all experts one below another, (experts · rank) × inputs; B is outputs × (rank · experts).
# Where gate and up have adapters of their own, the parameter has one of twice the rank: A has both,
# and B has them on its diagonal. An adapter of the plain rank has one A for both.

Sizes = Mapping[str, tuple[int, ...]]
FUSED, DOWN = "gate_up_proj", "down_proj"
_INNER = "base_layer"  # PEFT's name of what a wrapper wraps
_KINDS = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one layer: their module, and our weights by kind."""

    module: str
    weights: Mapping[str, Weight]

    def adapted(self, tuning: Tuning) -> list[str]:
        """The kinds that have adapters."""
        return [kind for kind in _KINDS if tuning.adapts(self.weights[kind].name)]

    def parameters(self, kinds: list[str]) -> dict[str, tuple[str, list[str]]]:
        """For each parameter with adapters: the module of its wrapper, and the kinds in it."""
        fused_kinds = [kind for kind in kinds if kind != "down"]
        wrappers: dict[str, tuple[str, list[str]]] = {}
        if fused_kinds:
            inner = f"{self.module}.{_INNER}" if "down" in kinds else self.module
            wrappers[FUSED] = (inner, fused_kinds)
        if "down" in kinds:
            wrappers[DOWN] = (self.module, ["down"])
        return wrappers

    def outputs(self, parameter: str) -> dict[str, slice]:
        """The outputs of each kind among those of a parameter."""
        if parameter == DOWN:
            return {"down": slice(0, self.weights["down"].shape[1])}
        width = self.weights["up"].shape[1]
        return {"gate": slice(0, width), "up": slice(width, 2 * width)}


def expert_layers(shape: Shape) -> Iterator[ExpertLayer]:
    """Layers with experts whose gate, up and down may have adapters."""
    weights_by_layer: dict[str, dict[str, Weight]] = {}
    for weight in weights(replace(shape, tuning=None)):
        if weight.expert and Tuning(1).adapts(weight.name):
            layer, _, kind = weight.name.removesuffix(".weight").rpartition(".")
            weights_by_layer.setdefault(layer, {})[kind] = weight
    for kinds in weights_by_layer.values():
        name, _, _ = to_hf(shape, kinds["up"].name).name.partition(f".{EXPERT}.")
        yield ExpertLayer(name.replace(".block_sparse_moe.", ".mlp."), kinds)


def fused_factors(
    layer: ExpertLayer, tuning: Tuning, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The wrappers of a layer, each with its A and its B; `read` takes the name of a factor."""
    for parameter, (module, kinds) in layer.parameters(layer.adapted(tuning)).items():
        linears = [layer.weights[kind].name.removesuffix(".weight") for kind in kinds]
        a_ERD = torch.cat([read(f"{linear}{ADAPTER}a") for linear in linears], 1)
        parts = [read(f"{linear}{ADAPTER}b") for linear in linears]
        places = layer.outputs(parameter)
        size = max(span.stop for span in places.values())
        b_EOR = parts[0].new_zeros(len(a_ERD), size, a_ERD.shape[1])
        for number, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
            b_EOR[:, places[kind], number * tuning.rank : (number + 1) * tuning.rank] = part
        yield module, a_ERD.flatten(0, 1), b_EOR.permute(1, 2, 0).flatten(1).contiguous()


@dataclass(frozen=True)
class FusedPlace:
    """Where the adapter of one of our linears is: in the wrapper `module`, of rank `rank` there."""

    module: str
    num_experts: int
    rank: int
    outputs: slice
    ranks: slice

    def factor(self, factor: str, tensor: Tensor) -> Tensor:
        """Our factor a or b, of all experts."""
        if factor == "a":
            return tensor.reshape(self.num_experts, self.rank, -1)[:, self.ranks].contiguous()
        b_EOR = tensor.reshape(len(tensor), self.rank, self.num_experts).permute(2, 0, 1)
        return b_EOR[:, self.outputs, self.ranks].contiguous()

    def is_alone(self, tensor: Tensor) -> bool:
        """Whether these ranks of B act on these outputs only."""
        b_ORE = tensor.reshape(len(tensor), self.rank, self.num_experts)[:, self.ranks]
        other_rows = torch.cat([b_ORE[: self.outputs.start], b_ORE[self.outputs.stop :]])
        return not other_rows.any()


def find_fused(
    shape: Shape, sizes: Sizes, rank: int, name: Callable[[str, str], str]
) -> tuple[dict[str, FusedPlace], dict[str, tuple[int, ...]]]:
    """The linears of experts with adapters in such a file, and the sizes that their tensors need.

    `name` is that of a tensor, from a module and a factor.
    """
    places: dict[str, FusedPlace] = {}
    expected_sizes: dict[str, tuple[int, ...]] = {}
    for layer in expert_layers(shape):
        for parameter, (module, kinds) in layer.parameters(_kinds(layer, sizes, name)).items():
            num_experts, _, inputs = layer.weights[kinds[0]].shape
            outputs = layer.outputs(parameter)
            stored_rank = sizes.get(name(module, "a"), (0,))[0] // num_experts
            is_double = parameter == FUSED and stored_rank == 2 * rank
            full = 2 * rank if is_double else rank
            expected_sizes[name(module, "a")] = (num_experts * full, inputs)
            expected_sizes[name(module, "b")] = (
                max(span.stop for span in outputs.values()),
                full * num_experts,
            )
            for number, kind in enumerate(kinds):
                ranks = slice(number * rank, (number + 1) * rank) if is_double else slice(0, rank)
                linear = layer.weights[kind].name
                places[linear] = FusedPlace(module, num_experts, full, outputs[kind], ranks)
    return places, expected_sizes


def _kinds(layer: ExpertLayer, sizes: Sizes, name: Callable[[str, str], str]) -> list[str]:
    """The kinds with adapters: a wrapper alone is of the parameter that its sizes fit."""
    if name(f"{layer.module}.{_INNER}", "a") in sizes:
        return list(_KINDS)
    if (a := sizes.get(name(layer.module, "a"))) is None:
        return []
    b = sizes.get(name(layer.module, "b"), (0,))
    _, outputs, inputs = layer.weights["down"].shape
    return ["down"] if (a[-1], b[0]) == (inputs, outputs) else ["gate", "up"]


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
    for weight in weights(replace(shape, tuning=None)):
        if Tuning(1).adapts(weight.name):
            names = to_hf(shape, weight.name).names(weight)
            yield weight, [name.removesuffix(".weight") for name in names]


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
    for weight in (*weights(frozen), *buffers(frozen)):
        values = read(weight.name)
        if not torch.equal(source.weight(weight, values.dtype), values):
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
    for weight, modules in _linears(shape):
        for factor in _FACTORS if tuning.adapts(weight.name) and not weight.expert else ():
            values = read(f"{weight.name.removesuffix('.weight')}{ADAPTER}{factor}").to(dtype)
            tensors[_name(modules[0], factor)] = values.contiguous()
    for layer in expert_layers(shape):
        for module, *pair in fused_factors(layer, tuning, lambda name: read(name).to(dtype)):
            tensors |= {
                _name(module, factor_name): part
                for factor_name, part in zip("ab", pair, strict=True)
            }
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
    for weight, (module, *_) in _linears(shape):
        if not weight.expert:
            is_parameter = bool(layers) and ".mlp." in weight.name
            names = parameters if is_parameter else adapted
            names[tuning.adapts(weight.name)].append(f"{module}.weight" if is_parameter else module)
    for layer in layers:
        layer_parameters = layer.parameters(layer.adapted(tuning))
        for parameter in (FUSED, DOWN):
            parameters[parameter in layer_parameters].append(f"{layer.module}.{parameter}")
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


def _shortest(adapted: list[str], other_names: list[str], most: int) -> list[str]:
    """The last words of names if they say which are adapted, else the names."""

    def ends(names: list[str]) -> set[str]:
        """Without the number of the layer, at most so many words."""
        name_parts = [name.rpartition(".layers.")[2].split(".")[1:] for name in names]
        return {".".join(parts[-most:]) for parts in name_parts}

    return sorted(ends(adapted)) if not ends(adapted) & ends(other_names) else adapted


def _doubled(layers: list[ExpertLayer], tuning: Tuning) -> dict[str, Any]:
    """Ranks and scales of gate and up that have an adapter each in one parameter."""
    kinds = {layer.module: set(layer.adapted(tuning)) for layer in layers}
    full_modules = [
        module for module, module_kinds in kinds.items() if {"gate", "up"} <= module_kinds
    ]
    half_modules = [
        module for module, module_kinds in kinds.items() if len({"gate", "up"} & module_kinds) == 1
    ]
    names = [f"{module}.{FUSED}" for module in full_modules]
    keys = (
        names
        if half_modules
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
            linear.name: modules
            for linear, modules in _linears(shape)
            if any(_name(module, "a") in sizes for module in modules)
        }
        self._fused, expected_sizes = find_fused(shape, sizes, rank, _name)
        adapted = {*self._modules, *self._fused}
        self.tuning = Tuning(rank, _alpha(config, rank), _targets(shape, adapted))
        for weight, modules in _linears(shape):
            outputs, inputs = weight.shape[-2:]
            for module in modules if weight.name in self._modules else ():
                expected_sizes[_name(module, "a")] = (rank, inputs)
                expected_sizes[_name(module, "b")] = (outputs, rank)
        problems += _differences(expected_sizes, sizes)
        problems += [] if problems else self._joined(rank)
        if problems:
            tail = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise BadFile(str(folder), [*problems[:_SHOWN], *tail])

    def weight(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """One of our factors, as `dtype`."""
        linear, _, factor = weight.name.rpartition(ADAPTER)
        if (location := self._fused.get(f"{linear}.weight")) is not None:
            return location.factor(factor, self._read(location, factor)).to(dtype)
        names = [_name(module, factor) for module in self._modules[f"{linear}.weight"]]
        with safe_open(self._file, "pt") as file:
            parts = [file.get_tensor(name).to(dtype) for name in names]
        return torch.stack(parts) if weight.expert else parts[0].contiguous()

    def _read(self, location: FusedPlace, factor: str) -> Tensor:
        with safe_open(self._file, "pt") as file:
            return file.get_tensor(_name(location.module, factor))

    def _joined(self, rank: int) -> Iterator[str]:
        """Adapters of twice the rank that are not one for gate and one for up."""
        for location in self._fused.values():
            if location.rank != rank and not location.is_alone(self._read(location, "b")):
                name = _name(location.module, "b")
                yield f"{name} joins gate and up at rank {location.rank}: merge it in PEFT first"

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
        pattern: Mapping[str, Any] = config.get(key) or {}
        is_double = all(
            name.endswith(FUSED)
            and value == 2 * config.get(plain, 8)
            and not config.get("use_rslora")
            for name, value in pattern.items()
        )
        if not is_double or bool(pattern) != any(
            config.get(pattern_key) for pattern_key in _PATTERNS
        ):
            yield f"{key} = {pattern}: is not computed here; merge it in PEFT first"


def _alpha(config: Mapping[str, Any], rank: int) -> float:
    """Ours is divided by the rank; that of rsLoRA by its root."""
    alpha = float(config.get("lora_alpha", 8))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _targets(shape: Shape, adapted: set[str]) -> str:
    """The key `lora_targets` of these weights."""
    names = [weight.name for weight in weights(shape) if Tuning(1).adapts(weight.name)]
    if adapted == set(names) or not adapted:
        return ALL
    kinds = {name.split(".", 2)[2].removesuffix(".weight") for name in adapted}
    short = "+".join(sorted(kinds))
    if {name for name in names if Tuning(1, 1.0, short).adapts(name)} == adapted:
        return short
    return "+".join(sorted(name.removesuffix(".weight") for name in adapted))


def _differences(
    expected_sizes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in sizes.keys() - expected_sizes.keys():
        yield f"{name} is of no linear of this model: give the adapter of this model"
    for name, size in expected_sizes.items():
        if name not in sizes:
            yield f"{name} is missing: give all files of the adapter"
        elif sizes[name] != size:
            yield f"{name} has shape {sizes[name]}, and this model asks for {size}"

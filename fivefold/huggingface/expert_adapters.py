"""Adapters of stacked experts as PEFT stores them for the transformers package, from 5 on.

A module there has the experts of a layer in two parameters, `gate_up_proj` (gate above up) and
`down_proj`. PEFT wraps the module once for each parameter, gate and up inside. A is the factors of
all experts one below another, (experts · rank) × inputs; B is outputs × (rank · experts). Where
gate and up have adapters of their own, the parameter has one of twice the rank: A has both, and B
has them on its diagonal. An adapter of the plain rank has one A for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core.layout import Weight, weights
from fivefold.core.model import ADAPTER, Shape, Tuning
from fivefold.huggingface.families import EXPERT
from fivefold.huggingface.names import to_hf

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

"""Matmuls in tiles of fixed size, so that a row has the same bits among any other rows.

On a GPU by a kernel of our own (`generate/tile_kernel.py`). Elsewhere by torch, tile by tile and in
float32 or wider: there its bfloat16 matmuls give rows to threads, and compute some of them by other
instructions than others. Activations have that problem in every type, at the end of what a thread
computes.

Legend: M rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model import Activate, Biases, Linear, LowRank, PlainMath, Values, weigh_rows

# Rows of a tile. On a CPU a multiple of all vectors. On a GPU so many read weights at full speed.
ROWS = {"cpu": 32, "cuda": 64}
EXPERT_ROWS = 16
_PIECE = 16384  # numbers of an activation: fewer than torch gives to two threads
_VECTORS = 64  # two vectors of the narrowest type


def tile_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """x · weightᵀ, plus the bias, in the type of x or in another."""
    x_MI, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    if _has_kernel(x):
        from fivefold.generate.tile_kernel import multiply_tiles  # Triton is there only with CUDA

        ends_E = torch.full((1,), len(x_MI), device=x.device)
        y_MO = multiply_tiles(x_MI, weight_OI[None], bias_O, ends_E, ROWS["cuda"], dtype)
    else:
        y_MO = _by_torch(x_MI, weight_OI, bias_O, ROWS[x.device.type]).to(dtype)
    return y_MO.view(*x.shape[:-1], len(weight_OI))


def wide_tile_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`tile_linear` in float32 or wider, for routers."""
    return tile_linear(x, weight_OI, bias_O, dtype=_wide(x))


def tile_experts(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_matmul` in tiles of fixed size."""
    if _has_kernel(x_MI):
        from fivefold.generate.tile_kernel import multiply_tiles

        return multiply_tiles(x_MI, weight_EOI, None, ends_E, EXPERT_ROWS, x_MI.dtype)
    y_MO = x_MI.new_empty(len(x_MI), weight_EOI.shape[1])
    counted: Any = ends_E
    ends: list[int] = counted.tolist()
    for weight_OI, (start, end) in zip(weight_EOI, pairwise([0, *ends]), strict=True):
        if end > start:
            y_MO[start:end] = _by_torch(x_MI[start:end], weight_OI, None, EXPERT_ROWS)
    return y_MO


class TileMath(PlainMath):
    """Forward of linears of one input and of their adapters, in tiles of fixed size."""

    def __init__(self, adapters: Sequence[LowRank | None]) -> None:
        self.adapters = adapters

    def fprop(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        pairs = zip(weights, biases, strict=True)
        results = [tile_linear(x[0], weight, bias) for weight, bias in pairs]
        for adapter, y_NO in zip(self.adapters, results, strict=True):
            if adapter is not None:
                low_NR = adapter.select(tile_linear(x[0], adapter.a, None)) * adapter.scale
                y_NO.add_(tile_linear(low_NR, adapter.b, None))
        return (
            results
            if outs is None
            else [out.copy_(y) for out, y in zip(outs, results, strict=True)]
        )


def tile_math(layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()) -> TileMath:
    """The arithmetic of linears of one input."""
    return TileMath([linear.lora for linear in linears])


class PiecewiseActivate(Activate):
    """An activation in pieces of full vectors on one thread, whatever its rows."""

    def __init__(self, plain: Activate) -> None:
        self.remakes, self.run = plain.remakes, plain.run

    def __call__(self, gate: Tensor | None, up: Tensor, weight: Tensor | None = None) -> Tensor:
        tensors = [tensor for tensor in (gate, up) if tensor is not None]
        flat = [F.pad(tensor.flatten(), (0, -up.numel() % _VECTORS)) for tensor in tensors]
        pieces = zip(*(torch.split(flat_tensor, _PIECE) for flat_tensor in flat), strict=True)
        activated = torch.cat([self.run(*piece) for piece in pieces])
        return weigh_rows(activated[: up.numel()].view_as(up), weight)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_torch(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rows: int) -> Tensor:
    wide, missing = _wide(x_MI), -len(x_MI) % rows
    tiles = torch.split(F.pad(x_MI.to(wide), (0, 0, 0, missing)), rows)
    weight, bias = weight_OI.to(wide), None if bias_O is None else bias_O.to(wide)
    multiply = partial(F.linear, weight=weight, bias=bias)
    return torch.cat([multiply(tile) for tile in tiles])[: len(x_MI)]

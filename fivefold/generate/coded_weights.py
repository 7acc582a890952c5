"""Linears and experts whose weights are codes in fp8, with a float32 scale for each row.

Splits   as weights: a rank has its shard of the full weight's codes. A scale is that of a full row,
         so that no layout rounds otherwise, and a kernel needs it once, after its sum.
Moves    nothing more.
Costs    a byte for each weight and 4 for each row, in place of 2 or more a weight. Activations are
         not rounded. Few tokens read codes (`code_kernel.py`, of experts `tile_kernel.py`); for
         others the values of a weight are written first, in the type of activations.
Refuses  adapters, weights of a running job, and GPUs that have no such numbers.

Codes and scales are those of training's rows (`model/fp8/rows.py`).

Legend: N tokens, M rows of experts, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core import FivefoldError
from fivefold.generate.tiles import EXPERT_ROWS, tile_linear
from fivefold.model import (
    Biases,
    Decoder,
    ExpertStack,
    GroupedMatmul,
    Linear,
    LinearMath,
    PlainMath,
    Values,
)
from fivefold.model.fp8 import weight_values

_LEAST_CAPABILITY = (8, 9)  # of GPUs with e4m3
_FEW_ROWS = 32  # of an expert: so many read codes


class CodedMath(PlainMath):
    """Forward of linears of one input whose weights are codes. In `fixed_tiles` a row has the same
    bits among any others."""

    def __init__(self, linears: Sequence[Linear], fixed_tiles: bool) -> None:
        self.linears, self.fixed_tiles = linears, fixed_tiles
        self.codes: Tensor | None = None
        self.bias: Tensor | None = None
        self.scale: Tensor | None = None

    def join(self) -> None:
        """Make the weights of all linears rows of one tensor, which one matmul reads."""
        self.codes, self.bias = (
            join_rows([getattr(linear, name) for linear in self.linears])
            for name in ("weight", "bias")
        )
        self.scale = torch.cat([_row_scale(linear) for linear in self.linears])
        sizes = [len(linear.weight) for linear in self.linears]
        for linear, scale in zip(self.linears, torch.split(self.scale, sizes), strict=True):
            linear.scale_rows(scale)

    def fprop(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        assert self.codes is not None and self.scale is not None, "join comes first"
        bias = None if biases[0] is None else self.bias  # a row-split linear adds its own later
        y_NO = _coded_linear(x[0], self.codes, self.scale, bias, self.fixed_tiles)
        results = torch.split(y_NO, [len(weight) for weight in weights], dim=-1)
        if outs is None:
            return results
        return [out.copy_(y) for out, y in zip(outs, results, strict=True)]


@torch.no_grad()
def join_rows(parts: Sequence[nn.Parameter | None]) -> Tensor | None:
    """One tensor, whose rows the parts become."""
    tensors: list[Tensor] = [parameter for parameter in parts if parameter is not None]
    if not tensors:
        return None
    joined, sizes = torch.cat(tensors), [len(tensor) for tensor in tensors]
    for part, rows in zip(tensors, torch.split(joined, sizes), strict=True):
        part.set_(rows)  # pyright: ignore[reportArgumentType], which knows storages alone
    return joined


class CodedLinears:
    """The arithmetic of a stage whose weights of linears and experts are codes."""

    def __init__(self, device: torch.device, fixed_tiles: bool) -> None:
        if device.type == "cuda":
            require_codes(device, "--precision fp8")
        self.fixed_tiles, self.maths = fixed_tiles, list[CodedMath]()

    def __call__(
        self, layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()
    ) -> LinearMath:
        assert all(linear.lora is None for linear in linears), "adapters are refused before"
        self.maths.append(CodedMath(linears, self.fixed_tiles))
        return self.maths[-1]

    def join(self, decoder: Decoder) -> None:
        """Join the weights that one matmul reads, before they have values."""
        for math in self.maths:
            math.join()
        for module in decoder.modules():
            if isinstance(module, ExpertStack):
                coded = partial(_coded_experts, module, module.matmul, self.fixed_tiles)
                module.matmul = coded


def _row_scale(module: Linear | ExpertStack) -> Tensor:
    """The scales of a weight that is codes."""
    assert module.row_scale is not None, "this weight is no codes"
    return module.row_scale


def require_codes(device: torch.device, option: str) -> None:
    """Refuse a GPU without numbers of fp8."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise FivefoldError(
            f"{option} on {torch.cuda.get_device_name(device)} (compute capability "
            f"{capability[0]}.{capability[1]}): GPUs have such numbers from "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} on; leave it out"
        )


def _coded_linear(
    x_NI: Tensor, codes_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None, fixed_tiles: bool
) -> Tensor:
    if x_NI.is_cuda and not fixed_tiles:
        from fivefold.generate.code_kernel import (  # Triton is there only with CUDA
            MOST_TOKENS,
            coded_linear,
        )
        from fivefold.generate.skinny_kernel import takes

        if takes(x_NI, MOST_TOKENS):
            return coded_linear(x_NI, codes_OI, bias_O, scale_O1)
    multiply = tile_linear if fixed_tiles else F.linear
    return multiply(x_NI, weight_values(codes_OI, scale_O1, x_NI.dtype), bias_O)


def _coded_experts(
    stack: ExpertStack,
    matmul: GroupedMatmul,
    fixed_tiles: bool,
    x_MI: Tensor,
    codes_EOI: Tensor,
    ends_E: Tensor,
) -> Tensor:
    scale_EO1, narrow = _row_scale(stack), x_MI.dtype != torch.float64
    if x_MI.is_cuda and narrow and not fixed_tiles and len(x_MI) <= _FEW_ROWS * len(codes_EOI):
        from fivefold.generate.tile_kernel import multiply_tiles

        tiles = (ends_E, EXPERT_ROWS, x_MI.dtype, scale_EO1)
        return multiply_tiles(x_MI, codes_EOI, None, *tiles)
    return matmul(x_MI, weight_values(codes_EOI, scale_EO1, x_MI.dtype), ends_E)

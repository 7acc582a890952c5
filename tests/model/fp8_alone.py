"""Linears in fp8 on one device, without a model around them; and rounding by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.model.fp8.linear import FusedLinears, RoundedWeights
from fivefold.model.fp8.rounding import rounding_of
from fivefold.model.layers import Linear
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import NOT_SHARED, SplitMatmuls


def fused(fp8: Fp8, copied: Sequence[int] = ()) -> FusedLinears:
    return FusedLinears(["one"], fp8, rounding_of(fp8), RoundedWeights(), copied)


def project(
    math: FusedLinears, x_BSI: Tensor, linears: Sequence[Linear], queue: GradientQueue | None = None
) -> list[Tensor]:
    """Linears of one input, (B, S, O) each."""
    boundary = AxisBoundary(Mesh(Topology(Layout()), x_BSI.device), "tp", sp=False, dim=0)
    matmuls = SplitMatmuls(boundary, queue, 1, row=x_BSI.shape[1])
    return list(matmuls.project_rows(False, math, NOT_SHARED, x_BSI, linears))


def rows_of(x_BSW: Tensor) -> Tensor:
    """All tokens below one another."""
    return torch.flatten(x_BSW, 0, -2)


def rounded(full: Tensor) -> Tensor:
    """To fp8 and back with a scale for each row, as `docs/fp8.md` defines it: by a table of all
    numbers of the format, and none of the functions of the engine."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    maximum = full.abs().amax(-1, keepdim=True).float().clamp(min=2.0**-100)
    scale = maximum / torch.full_like(maximum, 448.0)
    factor = torch.ones_like(scale) / scale
    scaled = (full.double() * factor.double()).float().double()
    above = torch.searchsorted(numbers, scaled.abs()).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    down, up = scaled.abs() - low, high - scaled.abs()
    takes_low = (down < up) | ((down == up) & (above % 2 == 1))  # of equals the even code
    return torch.where(takes_low, low, high) * scaled.sign() * scale.double()

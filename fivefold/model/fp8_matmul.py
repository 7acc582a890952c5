"""Matmuls of fp8 operands: on tensor cores where a GPU has them for these, else emulated.

The emulation multiplies the rounded values in float32, or in float64 where the result is float64.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.flash import is_fake
from fivefold.model.fp8_operand import Operand, Shares

_MULTIPLE = 16  # of widths that fp8 matmuls take
_TENSOR_SCALES, _BLOCK_SCALES = (8, 9), (9, 0)  # compute capabilities
_ONLY_BLOCKS = 9  # cuBLAS has blocks of 128 for this major capability alone


def scaled_matmul(a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a · bᵀ in `dtype`; `fast`: partial sums may have fewer bits, if that is faster."""
    if runs_on_tensor_cores(a, b, dtype):
        return _on_tensor_cores(a, b, dtype, fast)
    wide = torch.promote_types(dtype, torch.float32)
    return (a.values(wide) @ b.values(wide).T).to(dtype)


def runs_on_tensor_cores(a: Operand, b: Operand, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for this device, these widths and scales."""
    (rows, summed), outputs = a.codes.shape, len(b.codes)
    if not a.codes.is_cuda or is_fake(a.codes) or dtype == torch.float64:
        return False
    if summed % _MULTIPLE or outputs % _MULTIPLE or not rows:
        return False
    capability = _capability(a.codes.device)
    if a.shares == "tensor":
        return capability >= _TENSOR_SCALES
    aligned = rows % 4 == 0  # scales of a column are read in pieces of 16 bytes
    return aligned and capability >= _BLOCK_SCALES and capability[0] == _ONLY_BLOCKS


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _on_tensor_cores(a: Operand, b: Operand, dtype: torch.dtype, fast: bool) -> Tensor:
    names: dict[Shares, F.ScalingType] = {
        "tensor": F.ScalingType.TensorWise,
        "row": F.ScalingType.BlockWise1x128,
        "square": F.ScalingType.BlockWise128x128,
    }
    assert a.shares != "square", "weights are the second operand"
    of_b = b.scale.T if b.shares == "square" else b.scale
    return F.scaled_mm(
        a.codes,
        b.codes.T,
        a.scale,
        names[a.shares],
        of_b,
        names[b.shares],
        output_dtype=dtype,
        use_fast_accum=fast and a.shares == "tensor",
    )

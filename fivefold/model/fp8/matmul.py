"""Matmuls of fp8 operands: on tensor cores where a GPU has them for these, else emulated.

The emulation multiplies the rounded values in float32, or in float64 where the result is float64.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import Fp8
from fivefold.model.fp8.operand import Operand, Shares
from fivefold.model.kernels import is_fake

_MULTIPLE = 16  # of widths that fp8 matmuls take
_TENSOR_SCALES, _BLOCK_SCALES, _SMALL_BLOCKS = (8, 9), (9, 0), (10, 0)  # compute capabilities
_ONLY_BLOCKS = 9  # cuBLAS has blocks of 128 for this major capability alone


def scaled_matmul(a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a · bᵀ in `dtype`; `fast`: partial sums may have fewer bits, if that is faster."""
    if is_fake(a.codes):  # no kernel holds more than its result
        return a.codes.new_empty(len(a.codes), len(b.codes), dtype=dtype)
    if runs_on_tensor_cores(a, b, dtype):
        return _on_tensor_cores(a, b, dtype, fast)
    wide = torch.promote_types(dtype, torch.float32)
    return (a.values(wide) @ b.values(wide).T).to(dtype)


def runs_on_tensor_cores(a: Operand, b: Operand, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for this device, these widths and scales."""
    (rows, summed), outputs = a.codes.shape, len(b.codes)
    if not a.codes.is_cuda or dtype == torch.float64:
        return False
    if summed % _MULTIPLE or outputs % _MULTIPLE or not rows or a.shares == "small":
        return False
    capability = _capability(a.codes.device)
    if a.shares == "tensor":
        return capability >= _TENSOR_SCALES
    aligned = rows % 4 == 0  # scales of a column are read in pieces of 16 bytes
    return aligned and capability >= _BLOCK_SCALES and capability[0] == _ONLY_BLOCKS


def require_units(fp8: Fp8, device: torch.device) -> None:
    """Refuse a GPU whose matmuls would be emulated, unless that was asked for."""
    if device.type != "cuda" or fp8.emulated:
        return
    name, capability = torch.cuda.get_device_name(device), _capability(device)
    missing = missing_units(fp8, capability)
    if missing:
        raise FivefoldError(
            f"precision = fp8 with fp8 = {fp8.scaling} on {name} (compute capability "
            f"{capability[0]}.{capability[1]}): {missing}, or fp8_matmul=emulated, which "
            "multiplies the same rounded values in float32, slowly"
        )


def missing_units(fp8: Fp8, capability: tuple[int, int]) -> str:
    """What a GPU lacks for these matmuls, and what to choose instead; empty if it lacks nothing."""
    if capability < _TENSOR_SCALES:
        return "it has no fp8 matmuls, which begin with 8.9; choose precision=bf16"
    if fp8.scaling == "mxfp8":
        blackwell = capability >= _SMALL_BLOCKS
        why = "torch wants their scales in an order that is not built here"
        why = why if blackwell else "matmuls in blocks of 32 begin with 10.0 (Blackwell)"
        return f"{why}; choose fp8=tensorwise"
    if fp8.scaling == "blockwise" and capability[0] != _ONLY_BLOCKS:
        return "cuBLAS has matmuls in blocks of 128 for 9.0 alone; choose fp8=tensorwise"
    return ""


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

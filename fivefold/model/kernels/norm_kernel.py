"""The backward of a root-mean-square norm as one Triton kernel, where tensors are on a GPU.

A compiler makes two of it, because the input's gradient needs sums over a row and the weight's over
all rows: both read the input and the gradient. Here each program takes many rows, and keeps its sum
for the weight until it has done them all. The arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_RESIDENT = 16  # warps on each multiprocessor: enough loads under way
_WIDEST = 1 << 14  # a row of a program is in its registers


@triton.jit
def _rms_backward(
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    found_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_rows: int,
    width: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        offsets = row.to(tl.int64) * width + column
        x = tl.load(x_ptr + offsets, inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + offsets, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / width + eps)
        normed, weighed = x * scale, grad * weight
        x_grad = (weighed - normed * (tl.sum(normed * weighed) / width)) * scale
        tl.store(found_ptr + offsets, x_grad + residual, inside)
        total += grad * normed
    tl.store(sums_ptr + program * width + column, total, inside)


def takes(inputs: Sequence[Any], needs: Sequence[bool], gradient: Tensor) -> bool:
    """Whether the kernel computes this: input and weight, no bias, rows that fit its registers."""
    return (
        gradient.is_cuda
        and gradient.dtype != torch.float64
        and gradient.shape[-1] <= _WIDEST
        and inputs[2] is None
        and tuple(needs) == (True, True, False, False)
    )


def rms_gradients(
    inputs: Sequence[Any], gradient: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight, the first added to that of the residual."""
    x, weight, _, eps = inputs
    width = x.shape[-1]
    rows = [tensor.reshape(-1, width).contiguous() for tensor in (x, gradient, residual)]
    x_grad = torch.empty_like(rows[0])
    block = triton.next_power_of_2(width)
    resident = max(1, _RESIDENT // _warps(block)) * _processors(x_grad.device)
    programs = min(len(x_grad), resident)
    sums = x_grad.new_empty((programs, width), dtype=torch.float32)
    with torch.cuda.device(x_grad.device):
        _rms_backward[(programs,)](
            *rows,
            weight,
            x_grad,
            sums,
            len(x_grad),
            width,
            eps,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return x_grad.view_as(x), sums.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    """16 elements a thread, in whole warps."""
    return min(32, max(1, block // (16 * 32)))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

"""Grouped fp8 matmuls of experts: rows sorted by expert, each times the weight of its expert.

A row has one scale and an expert's weight has one: Hopper's grouped kernel takes a scale for each
row and each output, and no blocks. The scale of a weight is repeated for all its outputs.

Legend: M rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.fp8.operand import CODES
from fivefold.model.fp8.rounding import scale_and_factor, to_codes
from fivefold.model.fp8.rows import RowOperand
from fivefold.model.kernels import is_fake

_MULTIPLE = 16  # of widths that the grouped kernel takes
_MAJORS = (9, 10)  # compute capabilities that have one


class StackOperand(NamedTuple):
    """The weights of all experts in fp8, (E, O, I), and a scale for each output, (E, O)."""

    codes: Tensor
    scale: Tensor


class BothStacks(NamedTuple):
    """The same as forward and as dgrad read it: (E, O, I) and (E, I, O)."""

    rows: StackOperand
    turned: StackOperand


def expert_maxima(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of each expert, (E,) in float32."""
    found_E = torch.zeros(len(parts[0]), dtype=torch.float32, device=parts[0].device)
    for part in parts:
        raise_maxima(found_E, part)
    return found_E


def raise_maxima(found_E: Tensor, stack_EOI: Tensor) -> None:
    """Raise numbers to the largest absolute value of each expert; weights may be on the host."""
    if is_fake(stack_EOI):
        return
    if _has_kernel(stack_EOI):
        from fivefold.model.fp8 import (
            rows_kernel as fp8_rows_kernel,  # Triton is there only with CUDA
        )

        fp8_rows_kernel.raise_maxima(found_E, stack_EOI)
        return
    maxima_E = stack_EOI.abs().amax((1, 2)).to(found_E)
    found_E.copy_(torch.maximum(found_E, maxima_E))


def round_stacks(parts: Sequence[Tensor], maximum_E: Tensor) -> BothStacks:
    """Stacked weights below one another, with one scale for each expert."""
    first, outputs = parts[0], sum(part.shape[1] for part in parts)
    experts, _, inputs = first.shape
    scale_E, factor_E = scale_and_factor(maximum_E, "e4m3")
    sizes = ((experts, outputs, inputs), (experts, inputs, outputs))
    if is_fake(first):
        codes, turned = (first.new_empty(size, dtype=CODES["e4m3"]) for size in sizes)
    elif _has_kernel(first):
        from fivefold.model.fp8 import rows_kernel as fp8_rows_kernel

        codes, turned = fp8_rows_kernel.cast_stacks(parts, maximum_E)
    else:
        codes = to_codes(torch.cat([*parts], 1), factor_E[:, None, None], "e4m3")
        turned = codes.transpose(1, 2).contiguous()
    scales = [scale_E[:, None].expand(experts, size[1]).contiguous() for size in sizes]
    return BothStacks(StackOperand(codes, scales[0]), StackOperand(turned, scales[1]))


def scaled_grouped(
    x: RowOperand, weight: StackOperand, ends_E: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """The rows of every expert times its weight, (M, O); `fast` as in `fp8_matmul`."""
    if is_fake(x.codes):
        return x.codes.new_empty(len(x.codes), weight.codes.shape[1], dtype=dtype)
    if has_grouped_kernel(x, weight, dtype):
        return F.scaled_grouped_mm(
            x.codes,
            weight.codes.transpose(1, 2),
            x.scale,
            F.ScalingType.RowWise,
            weight.scale,
            F.ScalingType.RowWise,
            offs=ends_E,
            output_dtype=dtype,
            use_fast_accum=fast,
        )
    wide = torch.promote_types(dtype, torch.float32)
    values, ends = x.values(wide), ends_E.tolist()
    spans = zip(weight.codes, weight.scale, [0, *ends], ends, strict=False)
    products = [
        values[start:end] @ (codes_OI.to(wide) * scale_O.to(wide)[:, None]).T
        for codes_OI, scale_O, start, end in spans
    ]
    return torch.cat(products).to(dtype)


def has_grouped_kernel(x: RowOperand, weight: StackOperand, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for this device and these widths."""
    if not x.codes.is_cuda or dtype != torch.bfloat16 or not len(x.codes):
        return False
    aligned = not any(width % _MULTIPLE for width in weight.codes.shape[1:])
    return aligned and _major(x.codes.device) in _MAJORS


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64

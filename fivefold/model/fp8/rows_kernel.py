"""Rows and weights of experts to fp8 as Triton kernels: the bits of `model/fp8/rows.py` and
`model/fp8/rows.py`.

A program holds one row, so that one pass finds its maximum and writes its codes. Divisions are
those of IEEE, as in `model/fp8/kernel.py`.

Legend: M rows, W columns, E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.core.layout import LARGEST, LEAST_MAXIMUM
from fivefold.model.fp8.operand import CODES

_MOST, _E4M3 = LARGEST["e4m3"], CODES["e4m3"]
_AT_ONCE = 4096  # elements of one load of a maximum
_ROWS, _COLUMNS = 64, 128  # of a cast of weights: both stores write 64 bytes or more at once
_VALUES = (4, 1024)  # rows and columns of a program that dequantises


@triton.jit
def _row_maxima(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    found_ptr: tl.tensor,
    first_width: int,
    second_width: int,
    TWO: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    x = tl.load(first_ptr + row * first_width + column, column < first_width, other=0.0)
    most = tl.max(tl.abs(x.to(tl.float32)), 0)
    if TWO:
        y = tl.load(second_ptr + row * second_width + column, column < second_width, other=0.0)
        most = tl.maximum(most, tl.max(tl.abs(y.to(tl.float32)), 0))
    tl.store(found_ptr + row, most)


@triton.jit
def _round_rows(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    first_width: int,
    second_width: int,
    codes_stride: tl.int64,
    scale_stride: tl.int64,
    most: tl.constexpr,
    least: tl.constexpr,
    GIVEN: tl.constexpr,
    TWO: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    in_first, in_second = column < first_width, column < second_width
    x = tl.load(first_ptr + row * first_width + column, in_first, other=0.0).to(tl.float32)
    y = x
    if TWO:
        y = tl.load(second_ptr + row * second_width + column, in_second, other=0.0).to(tl.float32)
    if GIVEN:  # noqa: SIM108, Triton compiles one of both
        maximum = tl.load(maximum_ptr + row)
    else:
        maximum = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 0)
    scale = tl.div_rn(tl.maximum(maximum, least), most)
    factor = tl.div_rn(1.0, scale)
    tl.store(scale_ptr + row * scale_stride, scale)
    codes = (x * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row * codes_stride + column, codes, in_first)
    if TWO:
        codes = (y * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + row * codes_stride + first_width + column, codes, in_second)


@triton.jit
def _row_values(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    values_ptr: tl.tensor,
    num_rows: int,
    width: int,
    codes_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    codes = tl.load(codes_ptr + row[:, None] * codes_stride + column[None, :], inside, other=0)
    scale = tl.load(scale_ptr + row, row < num_rows, other=0.0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    tl.store(values_ptr + row[:, None] * width + column[None, :], values, inside)


@triton.jit
def _expert_maximum(
    x_ptr: tl.tensor, found_ptr: tl.tensor, numel: tl.int64, SIZE: tl.constexpr
) -> None:
    expert = tl.program_id(0).to(tl.int64)
    most = tl.zeros((SIZE,), tl.float32)
    step = tl.num_programs(1).to(tl.int64) * SIZE
    for start in range(tl.program_id(1).to(tl.int64) * SIZE, numel, step):
        offsets = start + tl.arange(0, SIZE)
        x = tl.load(x_ptr + expert * numel + offsets, offsets < numel, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    tl.atomic_max(found_ptr + expert, tl.max(most, 0))


@triton.jit
def _cast_stack(
    x_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    num_rows: int,
    width: int,
    first_row: int,
    all_rows: tl.int64,
    most: tl.constexpr,
    least: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    expert = tl.program_id(0).to(tl.int64)
    scale = tl.div_rn(tl.maximum(tl.load(maximum_ptr + expert), least), most)
    factor = tl.div_rn(1.0, scale)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x_offsets = expert * num_rows * width + row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + x_offsets, inside, other=0.0).to(tl.float32)
    codes = (x * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    matrix = expert * all_rows * width
    codes_offsets = matrix + (first_row + row)[:, None] * width + column[None, :]
    tl.store(codes_ptr + codes_offsets, codes, inside)
    turned_offsets = matrix + column[:, None] * all_rows + (first_row + row)[None, :]
    within = (column < width)[:, None] & (row < num_rows)[None, :]
    tl.store(turned_ptr + turned_offsets, tl.trans(codes), within)


def row_maxima(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of each row of one or two matrices, (M,)."""
    first, second, sizes = _one_or_two(parts)
    found_M = torch.empty(len(first), dtype=torch.float32, device=first.device)
    if len(first):
        with torch.cuda.device(first.device):
            _row_maxima[(len(first),)](first, second, found_M, *sizes[:2], **sizes[2])
    return found_M


def round_rows(parts: Sequence[Tensor], maximum_M: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of one or two matrices beside one another, and the scale of each row."""
    first = parts[0]
    width = sum(part.shape[1] for part in parts)
    codes = torch.empty(len(first), width, dtype=torch.uint8, device=first.device)
    scale_M = torch.empty(len(first), dtype=torch.float32, device=first.device)
    _round_into(parts, maximum_M, codes, scale_M)
    return codes.view(_E4M3), scale_M


def pack_rows(x_NW: Tensor, packed_NP: Tensor) -> None:
    """Codes and scales of rows into packed ones, whose last bytes are the scale."""
    scales = packed_NP.view(torch.float32)[:, -1]
    _round_into([x_NW], None, packed_NP, scales)


def _round_into(
    parts: Sequence[Tensor], maximum_M: Tensor | None, codes: Tensor, scale_M: Tensor
) -> None:
    first, second, (first_width, second_width, options) = _one_or_two(parts)
    if not len(first):
        return
    with torch.cuda.device(first.device):
        _round_rows[(len(first),)](
            first,
            second,
            scale_M if maximum_M is None else maximum_M,
            codes,
            scale_M,
            first_width,
            second_width,
            codes.stride(0),
            scale_M.stride(0),
            most=_MOST,
            least=LEAST_MAXIMUM,
            GIVEN=maximum_M is not None,
            **options,
        )


def _one_or_two(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[int, int, dict[str, int]]]:
    first, second = parts[0].contiguous(), parts[-1].contiguous()
    widths = (first.shape[1], second.shape[1])
    size = triton.next_power_of_2(max(widths))
    warps = min(16, max(1, size // 512))
    return first, second, (*widths, {"TWO": len(parts) > 1, "SIZE": size, "num_warps": warps})


def row_values(codes: Tensor, scale_M: Tensor, dtype: torch.dtype) -> Tensor:
    """The rounded values, whole rows of memory."""
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if values.numel():
        rows, columns = _VALUES
        grid = (triton.cdiv(len(codes), rows), triton.cdiv(codes.shape[1], columns))
        with torch.cuda.device(codes.device):
            _row_values[grid](
                codes.view(torch.uint8),
                scale_M,
                values,
                *codes.shape,
                codes.stride(0),
                ROWS=rows,
                COLUMNS=columns,
            )
    return values


def raise_maxima(found_E: Tensor, stack_EOI: Tensor) -> None:
    """Raise numbers to the largest absolute value of each expert."""
    numel = stack_EOI[0].numel()
    grid = (len(stack_EOI), min(64, triton.cdiv(numel, _AT_ONCE)))
    with torch.cuda.device(found_E.device):
        _expert_maximum[grid](stack_EOI.contiguous(), found_E, numel, SIZE=_AT_ONCE, num_warps=8)


def cast_stacks(parts: Sequence[Tensor], maximum_E: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of stacked weights below one another, (E, O, I) and (E, I, O)."""
    first, outputs = parts[0], sum(tensor.shape[1] for tensor in parts)
    experts, _, inputs = first.shape
    codes = torch.empty(experts, outputs, inputs, dtype=torch.uint8, device=first.device)
    turned = torch.empty(experts, inputs, outputs, dtype=torch.uint8, device=first.device)
    start = 0
    with torch.cuda.device(first.device):
        for part in parts:
            rows = part.shape[1]
            grid = (experts, triton.cdiv(rows, _ROWS), triton.cdiv(inputs, _COLUMNS))
            _cast_stack[grid](
                part.contiguous(),
                maximum_E,
                codes,
                turned,
                rows,
                inputs,
                start,
                outputs,
                most=_MOST,
                least=LEAST_MAXIMUM,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
            )
            start += rows
    return codes.view(_E4M3), turned.view(_E4M3)

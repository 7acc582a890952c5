"""Rounding to fp8 as Triton kernels, where tensors are on a GPU: the bits of `rounding.py`.

Tensorwise takes two passes, the maximum and the cast; blockwise takes one, because a program holds
whole blocks. A pass writes codes both as the tensor lies and transposed. Divisions are those of
IEEE: Triton's own are approximate, and scales would differ in their last bit.

Legend: as in `model/fp8/rounding.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.core.layout import BLOCK, LARGEST, LEAST_MAXIMUM, Fp8Format
from fivefold.model.fp8.operand import ALIGNED, CODES, Both, Operand

# The fastest on an H200 (`benchmarks/fp8.py tiles`).
_PROGRAMS = 8  # for each multiprocessor, of a maximum: enough loads under way
_AT_ONCE = 2048  # elements of one load of it
_ROWS, _COLUMNS = 64, 128  # of a cast: both stores write 64 bytes or more at once
_WARPS = 4


@triton.jit
def _codes(x: tl.tensor, factor: tl.tensor, E5M2: tl.constexpr) -> tl.tensor:
    """Codes as bytes, to the nearest and even."""
    product = x * factor
    if E5M2:
        return product.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return product.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _maximum(x_ptr: tl.tensor, found_ptr: tl.tensor, numel: tl.int64, SIZE: tl.constexpr) -> None:
    most = tl.zeros((SIZE,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * SIZE
    for start in range(tl.program_id(0).to(tl.int64) * SIZE, numel, step):
        offsets = start + tl.arange(0, SIZE)
        x = tl.load(x_ptr + offsets, offsets < numel, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    tl.atomic_max(found_ptr, tl.max(most, 0))


@triton.jit
def _cast_tensor(
    x_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    num_rows: int,
    width: int,
    codes_stride: tl.int64,
    turned_stride: tl.int64,
    most: tl.constexpr,
    least: tl.constexpr,
    E5M2: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    maximum = tl.maximum(tl.load(maximum_ptr), least)
    scale = tl.div_rn(maximum, most)
    factor = tl.div_rn(1.0, scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(tl.float32)
    codes = _codes(x, factor, E5M2)
    tl.store(codes_ptr + row[:, None] * codes_stride + column[None, :], codes, inside)
    if BOTH:
        offsets = column[:, None] * turned_stride + row[None, :]
        within = (column < width)[:, None] & (row < num_rows)[None, :]
        tl.store(turned_ptr + offsets, tl.trans(codes), within)


@triton.jit
def _cast_blocks(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    turned_scale_ptr: tl.tensor,
    seq: int,
    width: int,
    blocks_of_row: int,  # T
    num_tokens: tl.int64,  # N
    codes_stride: tl.int64,
    turned_stride: tl.int64,
    all_columns: tl.int64,  # of all parts
    most: tl.constexpr,
    least: tl.constexpr,
    E5M2: tl.constexpr,
    BOTH: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    batch_row, block_index = block // blocks_of_row, block % blocks_of_row
    token = block_index * SIZE + tl.arange(0, SIZE)
    column = (tl.program_id(1) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    row = batch_row.to(tl.int64) * seq + token
    token_mask, wide = token < seq, column < width
    inside = token_mask[:, None] & wide[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(tl.float32)
    size = tl.abs(x)
    scale = tl.div_rn(tl.maximum(tl.max(size, 1), least), most)
    codes = _codes(x, tl.div_rn(1.0, scale)[:, None], E5M2)
    tl.store(codes_ptr + row[:, None] * codes_stride + column[None, :], codes, inside)
    tl.store(scale_ptr + tl.program_id(1) * num_tokens + row, scale, token_mask)
    if BOTH:
        scale = tl.div_rn(tl.maximum(tl.max(size, 0), least), most)
        codes = _codes(x, tl.div_rn(1.0, scale)[None, :], E5M2)
        padded = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
        spots = column[:, None] * turned_stride + padded[None, :]
        tl.store(turned_ptr + spots, tl.trans(codes), wide[:, None] & (padded >= 0)[None, :])
        tl.store(turned_scale_ptr + block.to(tl.int64) * all_columns + column, scale, wide)


@triton.jit
def _cast_squares(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    turned_scale_ptr: tl.tensor,
    num_rows: int,
    width: int,
    turned_stride: tl.int64,
    scale_stride: int,
    turned_scale_stride: int,
    most: tl.constexpr,
    least: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    column = (tl.program_id(1) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offsets, inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), least), most)
    codes = _codes(x, tl.div_rn(1.0, scale), False)
    tl.store(codes_ptr + offsets, codes, inside)
    spots = column[:, None] * turned_stride + row[None, :]
    within = (column < width)[:, None] & (row < num_rows)[None, :]
    tl.store(turned_ptr + spots, tl.trans(codes), within)
    tl.store(scale_ptr + tl.program_id(0) * scale_stride + tl.program_id(1), scale)
    tl.store(turned_scale_ptr + tl.program_id(1) * turned_scale_stride + tl.program_id(0), scale)


def largest(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of them all; a NaN does not count, but stays one when it is
    cast."""
    first = parts[0]
    maximum = torch.zeros((), dtype=torch.float32, device=first.device)
    most = _PROGRAMS * _processors(first.device)
    with torch.cuda.device(first.device):
        for part in parts:
            numel = part.numel()
            if numel:
                programs = min(most, triton.cdiv(numel, _AT_ONCE))
                _maximum[(programs,)](part.contiguous(), maximum, numel, SIZE=_AT_ONCE)
    return maximum


def cast(
    parts: Sequence[Tensor], maximum: Tensor, form: Fp8Format, with_columns: bool, beside: bool
) -> Both:
    """Matrices `beside` or below one another, with the scale of one maximum."""
    first = parts[0]
    rows = len(first) if beside else sum(map(len, parts))
    width = sum(tensor.shape[1] for tensor in parts) if beside else first.shape[1]
    codes = _empty(first, rows, width)
    # Transposed codes were wrong on an H200 where bf16's were right: float32 is suspected, which no
    # run rounds.
    turns = with_columns and first.dtype != torch.float32
    turned = _empty(first, width, rows) if turns else codes
    scale = torch.empty((), dtype=torch.float32, device=first.device)
    with torch.cuda.device(first.device):
        for part, start in zip(parts, _starts(parts, 1 if beside else 0), strict=True):
            codes_view = codes[:, start:] if beside else codes[start:]
            turned_view = turned[start:] if beside else turned[:, start:]
            turned_view = turned_view if turns else codes_view
            grid = (triton.cdiv(len(part), _ROWS), triton.cdiv(part.shape[1], _COLUMNS))
            _cast_tensor[grid](
                part.contiguous(),
                maximum,
                scale,
                codes_view,
                turned_view,
                *part.shape,
                codes.stride(0),
                turned.stride(0),
                **_numbers(form),
                BOTH=turns,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                num_warps=_WARPS,
            )
    kind = CODES[form]
    if with_columns and not turns:
        turned = codes.T.contiguous()
    columns = Operand(turned.view(kind), scale, "tensor") if with_columns else None
    return Both(Operand(codes.view(kind), scale, "tensor"), columns)


def round_blocks(parts: Sequence[Tensor], form: Fp8Format, with_columns: bool, seq: int) -> Both:
    """Tokens: 1 × 128 along the width, and if `both` 128 × 1 along tokens, in runs of `seq`. All
    parts but the last are whole blocks wide."""
    matrices = [part.contiguous() for part in parts]
    first, tokens = matrices[0], len(matrices[0])
    width, blocks = sum(part.shape[1] for part in matrices), triton.cdiv(seq, BLOCK)
    all_blocks = tokens // seq * blocks
    codes = _empty(first, tokens, width)
    scale = _scales(first, triton.cdiv(width, BLOCK), tokens)
    turned = _empty(first, width, all_blocks * BLOCK) if with_columns else codes
    turned_scale = _scales(first, all_blocks, width) if with_columns else scale
    with torch.cuda.device(first.device):
        for matrix, start in zip(matrices, _starts(matrices, 1), strict=True):
            _cast_blocks[(all_blocks, triton.cdiv(matrix.shape[1], BLOCK))](
                matrix,
                codes[:, start:],
                scale[start // BLOCK :],
                turned[start:] if with_columns else codes,
                turned_scale[:, start:] if with_columns else scale,
                seq,
                matrix.shape[1],
                blocks,
                tokens,
                codes.stride(0),
                turned.stride(0),
                width,
                **_numbers(form),
                BOTH=with_columns,
                SIZE=BLOCK,
                num_warps=_WARPS,
            )
    kind = CODES[form]
    columns = Operand(turned.view(kind), turned_scale.T, "row") if with_columns else None
    return Both(Operand(codes.view(kind), scale.T, "row"), columns)


def round_squares(parts: Sequence[Tensor]) -> Both:
    """Weights below one another: 128 × 128, both ways. All but the last are whole blocks high."""
    first = parts[0]
    outputs, inputs = sum(map(len, parts)), first.shape[1]
    high, wide = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)
    codes, turned = _empty(first, outputs, inputs), _empty(first, inputs, outputs)
    scale, turned_scale = (
        torch.zeros(rows, columns + -columns % ALIGNED, dtype=torch.float32, device=first.device)
        for rows, columns in ((high, wide), (wide, high))
    )
    numbers = _numbers("e4m3")
    del numbers["E5M2"]
    with torch.cuda.device(first.device):
        for part, start in zip(parts, _starts(parts, 0), strict=True):
            _cast_squares[(triton.cdiv(len(part), BLOCK), wide)](
                part.contiguous(),
                codes[start:],
                scale[start // BLOCK :],
                turned[:, start:],
                turned_scale[:, start // BLOCK :],
                *part.shape,
                turned.stride(0),
                scale.stride(0),
                turned_scale.stride(0),
                **numbers,
                SIZE=BLOCK,
                num_warps=8,
            )
    kind = CODES["e4m3"]
    return Both(
        Operand(codes.view(kind), scale, "square"),
        Operand(turned.view(kind), turned_scale, "square"),
    )


def _starts(parts: Sequence[Tensor], dim: int) -> Iterator[int]:
    start = 0
    for part in parts:
        yield start
        start += part.shape[dim]


def _empty(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.uint8, device=like.device)


def _scales(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device=like.device)


def _numbers(form: Fp8Format) -> dict[str, Any]:
    return {"most": LARGEST[form], "least": LEAST_MAXIMUM, "E5M2": form == "e5m2"}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

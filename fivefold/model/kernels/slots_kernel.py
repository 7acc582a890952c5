"""Rows of slots as Triton kernels, where they are on a GPU.

What the compiler makes of indices and sums reads at a third of an H200's bandwidth. The order of a
sum is that of `model/slots.py`.

Legend: N tokens, K experts of a token, M slots, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a program: loads of 16 bytes a thread
_ROWS = 4  # of a program that copies: fewer programs, and several loads at once


@triton.jit
def _sum_rows(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    places_ptr: tl.tensor,
    total_ptr: tl.tensor,
    width: int,
    CHOICES: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), WIDE)
    for k in tl.static_range(CHOICES):
        row = tl.load(places_ptr + token * CHOICES + k)
        mask = (column < width) & (row >= 0)
        total += tl.load(first_ptr + row * width + column, mask, other=0.0).to(WIDE)
        if HAS_SECOND:
            total += tl.load(second_ptr + row * width + column, mask, other=0.0).to(WIDE)
    tl.store(total_ptr + token * width + column, total, column < width)


@triton.jit
def _take_rows(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: int,
    width: int,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(order_ptr + row, row < num_rows, other=-1)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    taken = tl.load(
        x_ptr + (slot // CHOICES)[:, None] * width + column[None, :],
        inside & (slot >= 0)[:, None],
        other=0.0,
    )
    tl.store(rows_ptr + row[:, None] * width + column[None, :], taken, inside)


def sum_rows(first_MD: Tensor, second_MD: Tensor | None, places_NK: Tensor) -> Tensor:
    """`sum_of_choices`; a place of -1 counts for nothing."""
    (num_tokens, num_choices), width = places_NK.shape, first_MD.shape[1]
    total_ND = first_MD.new_empty(num_tokens, width)
    second = first_MD if second_MD is None else second_MD
    if total_ND.numel():
        with torch.cuda.device(first_MD.device):
            _sum_rows[(num_tokens, triton.cdiv(width, _COLUMNS))](
                first_MD.contiguous(),
                second.contiguous(),
                places_NK.contiguous(),
                total_ND,
                width,
                CHOICES=num_choices,
                HAS_SECOND=second_MD is not None,
                WIDE=tl.float64 if first_MD.dtype == torch.float64 else tl.float32,
                COLUMNS=_COLUMNS,
            )
    return total_ND


def take_rows(x_ND: Tensor, order_M: Tensor, num_choices: int) -> Tensor:
    """The token of every slot; a slot of -1 is an empty row."""
    num_rows, width = len(order_M), x_ND.shape[1]
    rows_MD = x_ND.new_empty(num_rows, width)
    if rows_MD.numel():
        with torch.cuda.device(x_ND.device):
            _take_rows[(triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS))](
                x_ND.contiguous(),
                order_M,
                rows_MD,
                num_rows,
                width,
                CHOICES=num_choices,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
            )
    return rows_MD

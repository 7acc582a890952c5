"""Linears of a few tokens as Triton kernels, which read the weight once at the speed of memory.

One token: every program multiplies some rows of the weight by the input and sums them at the end.
Up to 16: by tensor cores, on 16 tokens of which some are empty. More tokens are torch's, unless the
weight is codes in fp8: those are widened in registers, and a row's scale multiplies its sum. Up to
256 tokens that is faster than to write the values of a weight for torch.

The kernel of one token begins before the one in front of it has ended, where a GPU can do this
(`early_kernel.py`): nobody writes weights, so the first of them are read meanwhile.

Legend: M tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.generate.pdl_kernel import begins_early, let_next_begin, wait_for_last

MOST_TOKENS, MOST_WITH_CODES = 16, 256
# Rows of a program and inputs that it reads of each at once: on an H200 within 3% of the fastest
# for the matmuls of Llama 8B, but for QKV, which 8 rows and 512 inputs read 14% faster.
_ROWS, _BLOCK = 4, 1024
_CODE_ROWS, _CODE_BLOCK = 4, 2048
# Codes that a thread loads together. Summed at once they need no register each, and so more
# programs read at a time: compiled for an H200, 40 KB of a multiprocessor instead of 16.
_RUN = 16


class TokenTile(NamedTuple):
    """Tokens and rows of a program, inputs that it reads at once, and reads under way."""

    tokens: int
    rows: int
    block: int
    stages: int = 4


_FEW = TokenTile(MOST_TOKENS, 32, 128)
_FEW_WITH_CODES = (TokenTile(MOST_TOKENS, 32, 256), TokenTile(32, 32, 128), TokenTile(64, 64, 128))


@triton.jit
def widened(weight: tl.tensor, dtype: tl.constexpr, CODES: tl.constexpr) -> tl.tensor:
    if CODES:
        weight = weight.to(tl.float8e4nv, bitcast=True)
    return weight.to(dtype)


@triton.jit
def _one_token(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    outputs: int,
    inputs: int,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_row = row < outputs
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * inputs
    let_next_begin(EARLY)
    inside = is_row[:, None] & (column < inputs)[None, :]
    weight = tl.load(row_ptr + column[None, :], inside, other=0, eviction_policy="evict_first")
    wait_for_last(EARLY)
    sums = tl.zeros((ROWS, BLOCK // RUN), tl.float32)
    for start in range(0, inputs, BLOCK):
        x = tl.load(x_ptr + start + column, start + column < inputs, other=0.0).to(tl.float32)
        later = start + BLOCK + column
        inside = is_row[:, None] & (later < inputs)[None, :]
        following = tl.load(
            row_ptr + later[None, :], inside, other=0, eviction_policy="evict_first"
        )
        products = widened(weight, tl.float32, CODES) * x[None, :]
        if RUN > 1:
            products = tl.sum(tl.reshape(products, (ROWS, BLOCK // RUN, RUN)), 2)
        sums += products
        weight = following
    y = tl.sum(sums, 1)
    if CODES:
        y *= tl.load(scale_ptr + row, is_row, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y, is_row)


@triton.jit
def _few_tokens(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: int,
    outputs: int,
    inputs: int,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < outputs, token < tokens
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, inputs, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < inputs
        inside = is_row[:, None] & is_column[None, :]
        weight = tl.load(row_ptr + column[None, :], inside, other=0)
        x_place = token[None, :] * inputs + column[:, None]
        x = tl.load(x_ptr + x_place, is_column[:, None] & is_token[None, :], other=0.0)
        sums = tl.dot(widened(weight, x.dtype, CODES), x, sums, input_precision="ieee")
    if CODES:
        sums *= tl.load(scale_ptr + row, is_row, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)[:, None]
    y_place = token[None, :] * outputs + row[:, None]
    tl.store(y_ptr + y_place, sums, is_row[:, None] & is_token[None, :])


def token_tile(tokens: int) -> TokenTile:
    """The tile of so many tokens and a weight of codes."""
    fitting = (tile for tile in _FEW_WITH_CODES if tokens <= tile.tokens)
    return next(fitting, _FEW_WITH_CODES[-1])


def takes(x: Tensor, most: int = MOST_TOKENS) -> bool:
    """Whether these kernels support this input."""
    few = x.numel() // x.shape[-1] <= most
    return few and x.is_cuda and x.dtype != torch.float64


def skinny_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O1: Tensor | None = None
) -> Tensor:
    """x · weightᵀ, plus the bias; with scales, of a weight that is codes."""
    x_MI, (outputs, inputs) = x.reshape(-1, x.shape[-1]).contiguous(), weight_OI.shape
    coded = scale_O1 is not None
    weight = weight_OI.view(torch.uint8) if coded else weight_OI
    scale, bias = (weight if tensor is None else tensor for tensor in (scale_O1, bias_O))
    assert weight.is_contiguous() and scale.is_contiguous()
    y_MO = x.new_empty(len(x_MI), outputs)
    has = {"CODES": coded, "HAS_BIAS": bias_O is not None}
    if len(x_MI) == 1:
        rows, block = (_CODE_ROWS, _CODE_BLOCK) if coded else (_ROWS, _BLOCK)
        _one_token[(triton.cdiv(outputs, rows),)](
            *(x_MI, weight, scale, bias, y_MO, outputs, inputs),
            **has,
            ROWS=rows,
            BLOCK=block,
            RUN=_RUN if coded else 1,
            **begins_early(x),
        )
    else:
        tile = token_tile(len(x_MI)) if coded else _FEW
        # Tiles of tokens are neighbours, so that all but one find the weight in the cache.
        grid = triton.cdiv(len(x_MI), tile.tokens), triton.cdiv(outputs, tile.rows)
        _few_tokens[grid](
            *(x_MI, weight, scale, bias, y_MO, len(x_MI), outputs, inputs),
            **has,
            TOKENS=tile.tokens,
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_stages=tile.stages,
        )
    return y_MO.view(*x.shape[:-1], outputs)

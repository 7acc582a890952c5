"""Linears of a few tokens as Triton kernels, which read the weight once at the speed of memory.

One token: every program multiplies some rows of the weight by the input and sums them at the end.
Up to 16: by tensor cores, on 16 tokens of which some are empty. More tokens are torch's. Weights of
codes have kernels of their own (`code_kernel.py`).

The kernel of one token begins before the one in front of it has ended, where a GPU can do this
(`early_kernel.py`): nobody writes weights, so the first of them are read meanwhile.

Legend: M tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.generate.pdl_kernel import begins_early, let_next_begin, wait_for_last

MOST_TOKENS = 16
# Rows of a program and inputs that it reads of each at once: on an H200 within 3% of the fastest
# for the matmuls of Llama 8B, but for QKV, which 8 rows and 512 inputs read 14% faster.
_ROWS, _BLOCK = 4, 1024
_FEW_ROWS, _FEW_BLOCK, _FEW_STAGES = 32, 128, 4


@triton.jit
def _one_token(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    outputs: int,
    inputs: int,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_row = row < outputs
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * inputs
    let_next_begin(EARLY)
    inside = is_row[:, None] & (column < inputs)[None, :]
    weight = tl.load(row_ptr + column[None, :], inside, other=0.0, eviction_policy="evict_first")
    wait_for_last(EARLY)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, inputs, BLOCK):
        x = tl.load(x_ptr + start + column, start + column < inputs, other=0.0).to(tl.float32)
        later = start + BLOCK + column
        inside = is_row[:, None] & (later < inputs)[None, :]
        following = tl.load(
            row_ptr + later[None, :], inside, other=0.0, eviction_policy="evict_first"
        )
        sums += weight.to(tl.float32) * x[None, :]
        weight = following
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y, is_row)


@triton.jit
def _few_tokens(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: int,
    outputs: int,
    inputs: int,
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
        weight = tl.load(row_ptr + column[None, :], inside, other=0.0)
        x_place = token[None, :] * inputs + column[:, None]
        x = tl.load(x_ptr + x_place, is_column[:, None] & is_token[None, :], other=0.0)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)[:, None]
    y_place = token[None, :] * outputs + row[:, None]
    tl.store(y_ptr + y_place, sums, is_row[:, None] & is_token[None, :])


def takes(x: Tensor, most: int = MOST_TOKENS) -> bool:
    """Whether these kernels support this input."""
    few = x.numel() // x.shape[-1] <= most
    return few and x.is_cuda and x.dtype != torch.float64


def skinny_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x times the transposed weight, plus the bias."""
    x_MI, (outputs, inputs) = x.reshape(-1, x.shape[-1]).contiguous(), weight_OI.shape
    bias, has_bias = weight_OI if bias_O is None else bias_O, bias_O is not None
    assert weight_OI.is_contiguous() and bias.is_contiguous()
    y_MO = x.new_empty(len(x_MI), outputs)
    if len(x_MI) == 1:
        _one_token[(triton.cdiv(outputs, _ROWS),)](
            *(x_MI, weight_OI, bias, y_MO, outputs, inputs),
            HAS_BIAS=has_bias,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            **begins_early(x),
        )
    else:
        grid = triton.cdiv(len(x_MI), MOST_TOKENS), triton.cdiv(outputs, _FEW_ROWS)
        _few_tokens[grid](
            *(x_MI, weight_OI, bias, y_MO, len(x_MI), outputs, inputs),
            HAS_BIAS=has_bias,
            TOKENS=MOST_TOKENS,
            ROWS=_FEW_ROWS,
            BLOCK=_FEW_BLOCK,
            num_stages=_FEW_STAGES,
        )
    return y_MO.view(*x.shape[:-1], outputs)

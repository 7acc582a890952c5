"""Linears of a few tokens by weights of codes in fp8, as Triton kernels at the speed of memory.

Hopper widens e4m3 to float16 in one instruction and to bfloat16 in several, which is slower than
memory. So bfloat16 activations become float16 here: a token, or a part of it, is multiplied by the
power of two that brings its largest number near 16. Numbers that are 2^-18 of it keep all bits, and
what smaller ones lose is far below the rounding of a result. Activations in float32 stay so.

One token: products of two codes are rounded to float16, added as such in pairs, and summed in
float32. More: by tensor cores, which sum in float32, with rows of halves that another kernel writes
first. A row's scale multiplies its sum.

Legend: M tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.generate.pdl_kernel import begins_early, let_next_begin, wait_for_last

MOST_TOKENS = 256  # for which reading codes is faster than writing their values for torch
_WORD = 4  # codes that a thread multiplies at once
# Of a program of one token, and those that it reads of each row at once: fewer where there are few
# programs, so that all of them run at a time. On an H200 within 3% of the fastest for Llama 8B.
_ROWS, _WORDS, _WORDS_OF_FEW = 8, 512, 256
_FEW_PROGRAMS = 528  # four for each multiprocessor of a Hopper GPU


class TokenTile(NamedTuple):
    """Tokens and rows of a program, inputs that it reads at once, and reads under way."""

    tokens: int
    rows: int
    block: int
    stages: int = 4


# By tokens: for weights of many outputs, and of fewer than a program of 64 for each multiprocessor.
_TILES = (TokenTile(16, 32, 256), TokenTile(32, 64, 128), TokenTile(64, 64, 128))
_NARROW_TILES = (TokenTile(16, 32, 256), TokenTile(32, 32, 256), TokenTile(64, 64, 256, 3))
_MANY_OUTPUTS = 64 * 132


@triton.jit
def _factor(highest: tl.tensor) -> tl.tensor:
    """The power of two that brings a number of these float32 bits between 16 and 32."""
    exponent = tl.maximum(highest & 0x7F800000, 0x10000000)
    return (0x41800000 - (exponent - 0x3F800000)).to(tl.float32, bitcast=True)


@triton.jit
def _halves(pair: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Two bfloat16 numbers times a factor, as two of float16."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        .reg .f32 a, b;
        shl.b32 low, $1, 16;
        and.b32 high, $1, 0xffff0000;
        mov.b32 a, low;
        mov.b32 b, high;
        mul.f32 a, a, $2;
        mul.f32 b, b, $2;
        cvt.rn.f16x2.f32 $0, b, a;
        }
        """,
        "=r,r,f",
        [pair, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _products(codes: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The sum of four codes times two pairs of float16."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .b32 p, q;
        .reg .f32 s, t;
        mov.b32 {a, b}, $1;
        cvt.rn.f16x2.e4m3x2 p, a;
        cvt.rn.f16x2.e4m3x2 q, b;
        mul.rn.f16x2 p, p, $2;
        fma.rn.f16x2 p, q, $3, p;
        mov.b32 {a, b}, p;
        cvt.f32.f16 s, a;
        cvt.f32.f16 t, b;
        add.f32 $0, s, t;
        }
        """,
        "=f,r,r,r",
        [codes, first, second],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _highest(pair: tl.tensor) -> tl.tensor:
    """The larger absolute value of two bfloat16 numbers, as bits of a float32."""
    return tl.maximum(pair & 0x7FFF0000, (pair << 16) & 0x7FFF0000)


@triton.jit
def _one_token(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    outputs: int,
    num_words: int,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WORDS)
    is_row = row < outputs
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * num_words
    let_next_begin(EARLY)
    inside = is_row[:, None] & (column < num_words)[None, :]
    codes = tl.load(row_ptr + column[None, :], inside, other=0, eviction_policy="evict_first")
    wait_for_last(EARLY)
    sums = tl.zeros((ROWS, WORDS), tl.float32)
    for start in range(0, num_words, WORDS):
        word = start + column
        first = tl.load(x_ptr + 2 * word, word < num_words, other=0)
        second = tl.load(x_ptr + 2 * word + 1, word < num_words, other=0)
        later = word + WORDS
        inside = is_row[:, None] & (later < num_words)[None, :]
        following = tl.load(
            row_ptr + later[None, :], inside, other=0, eviction_policy="evict_first"
        )
        factor = _factor(tl.max(tl.maximum(_highest(first), _highest(second)), 0))
        factors = factor + tl.zeros((WORDS,), tl.float32)
        first, second = _halves(first, factors), _halves(second, factors)
        products = _products(
            codes,
            tl.broadcast_to(first[None, :], (ROWS, WORDS)),
            tl.broadcast_to(second[None, :], (ROWS, WORDS)),
        )
        sums += products * (1.0 / factor)
        codes = following
    y = tl.sum(sums, 1) * tl.load(scale_ptr + row, is_row, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y, is_row)


@triton.jit
def _write_halves(
    x_ptr: tl.tensor,
    half_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    inputs: int,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    index, is_column = token.to(tl.int64) * inputs + column, column < inputs
    x = tl.load(x_ptr + index, is_column, other=0.0).to(tl.float32)
    factor = _factor(tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True))
    tl.store(half_ptr + index, x * factor, is_column)
    tl.store(factor_ptr + token, 1.0 / factor)


@triton.jit
def _few_tokens(
    x_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: int,
    outputs: int,
    inputs: int,
    HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < outputs, token < tokens
    row_ptr = weight_ptr + row.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    for start in range(0, inputs, BLOCK):
        column = start + tl.arange(0, BLOCK)
        read_row, read_token = is_row[:, None], is_token[None, :]
        if not EVEN:  # else no mask of columns: reads with one take twice as long
            read_row &= (column < inputs)[None, :]
            read_token &= (column < inputs)[:, None]
        weight = tl.load(row_ptr + column[None, :], read_row, other=0)
        x = tl.load(x_ptr + token[None, :] * inputs + column[:, None], read_token, other=0.0)
        values = weight.to(tl.float8e4nv, bitcast=True).to(x.dtype)
        sums = tl.dot(values, x, sums, input_precision="ieee")
    sums *= tl.load(scale_ptr + row, is_row, other=0.0)[:, None]
    if HALVES:
        sums *= tl.load(factor_ptr + token, is_token, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, is_row, other=0.0).to(tl.float32)[:, None]
    y_place = token[None, :] * outputs + row[:, None]
    tl.store(y_ptr + y_place, sums, is_row[:, None] & is_token[None, :])


def token_tile(tokens: int, outputs: int) -> TokenTile:
    """The tile for a number of tokens and outputs."""
    tiles = _TILES if outputs >= _MANY_OUTPUTS else _NARROW_TILES
    return next((tile for tile in tiles if tokens <= tile.tokens), tiles[-1])


def coded_linear(x: Tensor, codes_OI: Tensor, bias_O: Tensor | None, scale_O1: Tensor) -> Tensor:
    """x times the transposed weight, whose rows are codes with a scale each, plus the bias."""
    x_MI, (outputs, inputs) = x.reshape(-1, x.shape[-1]).contiguous(), codes_OI.shape
    assert codes_OI.is_contiguous() and scale_O1.is_contiguous()
    y_MO = x.new_empty(len(x_MI), outputs)
    has_bias, bias = bias_O is not None, scale_O1 if bias_O is None else bias_O
    if len(x_MI) == 1 and x.dtype == torch.bfloat16 and inputs % _WORD == 0:
        operands = (x_MI.view(torch.int32), codes_OI.view(torch.int32))
        programs = triton.cdiv(outputs, _ROWS)
        _one_token[(programs,)](
            *(*operands, scale_O1, bias, y_MO, outputs, inputs // _WORD),
            HAS_BIAS=has_bias,
            ROWS=_ROWS,
            WORDS=_WORDS if programs > _FEW_PROGRAMS else _WORDS_OF_FEW,
            **begins_early(x),
        )
        return y_MO.view(*x.shape[:-1], outputs)
    halves, tile = x.dtype != torch.float32, token_tile(len(x_MI), outputs)
    block = tile.block if halves else tile.block // 2
    factor_M = scale_O1
    if halves:
        x_MI, factor_M = _as_halves(x_MI)
    # Tiles of tokens are neighbours, so that all but one find the weight in the cache.
    grid = triton.cdiv(len(x_MI), tile.tokens), triton.cdiv(outputs, tile.rows)
    _few_tokens[grid](
        *(x_MI, factor_M, codes_OI.view(torch.uint8), scale_O1, bias, y_MO),
        *(len(x_MI), outputs, inputs),
        HALVES=halves,
        HAS_BIAS=has_bias,
        EVEN=inputs % block == 0,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        BLOCK=block,
        num_stages=tile.stages,
        **begins_early(x),
    )
    return y_MO.view(*x.shape[:-1], outputs)


def _as_halves(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float16, and the factor that each is to be multiplied by."""
    half_MI = torch.empty_like(x_MI, dtype=torch.float16)
    factor_M = x_MI.new_empty(len(x_MI), dtype=torch.float32)
    inputs = x_MI.shape[1]
    _write_halves[(len(x_MI),)](
        *(x_MI, half_MI, factor_M, inputs),
        BLOCK=triton.next_power_of_2(inputs),
        num_warps=8,
        **begins_early(x_MI),
    )
    return half_MI, factor_M

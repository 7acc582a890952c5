"""Matmuls in fixed tiles as a Triton kernel: the same tile and the same order of inputs for every
row, whatever the number of rows, and no split of the inputs over programs.

A program multiplies one tile of rows by some rows of one weight. Rows may belong to experts, each
with a weight of its own; a tile then has rows of one expert. Which tile has which rows is computed
on the device, so that steps can be captured.

Legend: M rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS, _INPUTS = 32, 128  # of a tile


@triton.jit
def widened(weight: tl.tensor, dtype: tl.constexpr, CODES: tl.constexpr) -> tl.tensor:
    if CODES:
        weight = weight.to(tl.float8e4nv, bitcast=True)
    return weight.to(dtype)


@triton.jit
def _multiply_tile(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    stops_ptr: tl.tensor,
    outputs: int,
    inputs: int,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    first, stop = tl.load(firsts_ptr + tile), tl.load(stops_ptr + tile)
    if first >= stop:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = first + tl.arange(0, ROWS)
    is_output, is_row = output < outputs, row < stop
    of_expert = tl.load(experts_ptr + tile).to(tl.int64) * outputs
    weight_ptr += (of_expert + output)[:, None] * inputs
    x_ptr += row[None, :] * inputs
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        is_column = column < inputs
        weight = tl.load(
            weight_ptr + column[None, :], is_output[:, None] & is_column[None, :], other=0
        )
        x = tl.load(x_ptr + column[:, None], is_column[:, None] & is_row[None, :], other=0.0)
        sums = tl.dot(widened(weight, x.dtype, CODES), x, sums, input_precision="ieee")
    if CODES:
        sums *= tl.load(scale_ptr + of_expert + output, is_output, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, is_output, other=0.0).to(tl.float32)[:, None]
    y_place = row[None, :] * outputs + output[:, None]
    tl.store(y_ptr + y_place, sums, is_output[:, None] & is_row[None, :])


def multiply_tiles(
    x_MI: Tensor,
    weight_EOI: Tensor,
    bias_O: Tensor | None,
    ends_E: Tensor,
    rows: int,
    dtype: torch.dtype,
    scale_EO1: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each expert by its weight, by tiles of fixed size; sums are float32.
    With scales, of weights that are codes."""
    x_MI, (experts, outputs, inputs) = x_MI.contiguous(), weight_EOI.shape
    weight = weight_EOI if scale_EO1 is None else weight_EOI.view(torch.uint8)
    assert weight.is_contiguous()
    y_MO = x_MI.new_empty(len(x_MI), outputs, dtype=dtype)
    tiles = triton.cdiv(len(x_MI), rows) + experts - 1  # each may have one that is not full
    if not len(x_MI):
        return y_MO
    _multiply_tile[(triton.cdiv(outputs, _OUTPUTS), tiles)](
        x_MI,
        weight,
        *(weight if tensor is None else tensor for tensor in (scale_EO1, bias_O)),
        y_MO,
        *tile_table(ends_E, tiles, rows),
        outputs,
        inputs,
        CODES=scale_EO1 is not None,
        HAS_BIAS=bias_O is not None,
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_stages=4,
    )
    return y_MO


def tile_table(ends_E: Tensor, tiles: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert, first row and end of rows of each tile; spare tiles are empty. Without
    synchronization."""
    ends_E = ends_E.long()
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    last_E = ((ends_E - starts_E + rows - 1) // rows).cumsum(0)  # tiles up to each expert
    numbers = torch.arange(tiles, device=ends_E.device)
    expert = torch.searchsorted(last_E, numbers, right=True).clamp(max=len(ends_E) - 1)
    before = torch.cat([last_E.new_zeros(1), last_E[:-1]])[expert]
    return expert, starts_E[expert] + (numbers - before) * rows, ends_E[expert]

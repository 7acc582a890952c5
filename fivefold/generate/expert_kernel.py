"""Experts of few tokens as Triton kernels: their choice, the order of slots and the two matmuls.

A step of decode reads the weights of every expert that a token chose, and multiplies few rows by
each. So a program takes some outputs of one expert, reads their weights once, and multiplies all
slots of that expert. Rows are read from the tokens themselves, the gate, the activation and the
weight of a slot are applied before anything is written. No size depends on what was chosen, so
steps can be captured; nothing is added by atomics.

Legend: N tokens, E experts, L experts of this rank, K experts of a token, M = N·K slots, D model
width, F expert width, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.core.model import Moe
from fivefold.generate.pdl_kernel import begin_early, begins_early
from fivefold.model import Experts, Routing

_NEVER_ZERO = tl.constexpr(1e-20)  # as `expert_weights` adds
_LOWEST = tl.constexpr(float("-inf"))
_COLUMNS = 1024  # of a program that sums


class ExpertTile(NamedTuple):
    """Sizes of a program: outputs, inputs at once, rows, warps and stages of its loop."""

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int


def tiling(slots: int, experts: int, itemsize: int) -> ExpertTile:
    """Sizes for so many slots of so many experts: rows for most of an expert's, so that its weights
    are read once."""
    if itemsize == 4:
        return ExpertTile(32, 32, 16, 4, 2)
    rows = 16 if slots <= 8 * experts else 32 if slots <= 20 * experts else 64
    return ExpertTile(64, 128, rows, 4, 3)


@triton.jit
def _best(ranked: tl.tensor, number: tl.tensor, last: int) -> tl.tensor:
    """The number of the highest, of equals the lowest; NaN gives any number there is."""
    highest = tl.max(tl.max(ranked, 1), 0)
    lowest = tl.where(ranked == highest, number, last)
    return tl.min(tl.min(lowest, 1), 0)


@triton.jit
def _choose(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scaling: float,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    SUMMED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    group, inside = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    number = group[:, None] * SIZE + inside[None, :]
    is_expert = (group < GROUPS)[:, None] & (inside < SIZE)[None, :]
    logits = tl.load(logits_ptr + token * EXPERTS + number, is_expert, other=_LOWEST)
    if SOFTMAX:
        odds = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = odds / tl.sum(tl.sum(odds, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    tl.store(scores_ptr + token * EXPERTS + number, scores, is_expert)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + number, is_expert, other=0.0)
    ranked = tl.where(is_expert, ranked, _LOWEST)
    if KEPT < GROUPS:
        best = tl.max(ranked, 1)
        if SUMMED == 2:
            first = tl.min(tl.where(ranked == best[:, None], inside[None, :], SIZE), 1)
            best += tl.max(tl.where(inside[None, :] == first[:, None], _LOWEST, ranked), 1)
        is_best = group < 0
        best = tl.where(group < GROUPS, best, _LOWEST)
        for _ in tl.static_range(KEPT):
            taken = tl.min(tl.where(best == tl.max(best, 0), group, GROUPS - 1), 0)
            is_best = is_best | (group == taken)
            best = tl.where(group == taken, _LOWEST, best)
        ranked = tl.where(is_best[:, None], ranked, _LOWEST)
    lane = tl.arange(0, CHOICE_BLOCK)
    chosen, weights = lane * 0, lane * 0.0
    for k in tl.static_range(CHOICES):
        expert = _best(ranked, number, EXPERTS - 1)
        score = tl.sum(tl.sum(tl.where(number == expert, scores, 0.0), 1), 0)
        chosen = tl.where(lane == k, expert, chosen)
        weights = tl.where(lane == k, score, weights)
        ranked = tl.where(number == expert, _LOWEST, ranked)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + _NEVER_ZERO)
    at, is_choice = token * CHOICES + lane, lane < CHOICES
    tl.store(chosen_ptr + at, chosen.to(tl.int64), is_choice)
    tl.store(weights_ptr + at, weights * scaling, is_choice)


@triton.jit
def _sort(
    chosen_ptr: tl.tensor,
    order_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    slots: int,
    first_expert: int,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    index, experts = tl.program_id(0), tl.num_programs(0)
    expert, slot = first_expert + index, tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + slot, slot < slots, other=-1)
    is_slot = (chosen == expert).to(tl.int32)
    first = tl.sum(((chosen >= first_expert) & (chosen < expert)).to(tl.int32), 0)
    tl.store(order_ptr + first + tl.cumsum(is_slot, 0) - 1, slot, is_slot > 0)
    tl.store(firsts_ptr + index, first)
    if index == experts - 1:
        tl.store(firsts_ptr + experts, first + tl.sum(is_slot, 0))


@triton.jit
def _gate_and_up(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    h_ptr: tl.tensor,
    outputs: int,
    inputs: int,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    expert = tl.program_id(0)
    first, stop = tl.load(firsts_ptr + expert), tl.load(firsts_ptr + expert + 1)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, column = output < outputs, tl.arange(0, INPUTS)
    at = (expert.to(tl.int64) * outputs + output)[:, None] * inputs + column[None, :]
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < stop
        slot = tl.load(order_ptr + row, is_row, other=0)
        row_ptr = x_ptr + (slot // CHOICES).to(tl.int64)[None, :] * inputs + column[:, None]
        gate, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            is_column = begin + column < inputs
            is_weight = is_output[:, None] & is_column[None, :]
            x = tl.load(row_ptr + begin, is_column[:, None] & is_row[None, :], other=0.0)
            gates = tl.load(gate_ptr + at + begin, is_weight, other=0.0)
            gate = tl.dot(gates, x, gate, input_precision="ieee")
            ups = tl.load(up_ptr + at + begin, is_weight, other=0.0)
            up = tl.dot(ups, x, up, input_precision="ieee")
        weight = tl.load(weights_ptr + slot, is_row, other=0.0)
        h = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
        target_ptr = h_ptr + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(target_ptr, h, is_output[:, None] & is_row[None, :])


@triton.jit
def _down(
    h_ptr: tl.tensor,
    down_ptr: tl.tensor,
    order_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    outputs: int,
    inputs: int,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    expert = tl.program_id(0)
    first, stop = tl.load(firsts_ptr + expert), tl.load(firsts_ptr + expert + 1)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, column = output < outputs, tl.arange(0, INPUTS)
    at = (expert.to(tl.int64) * outputs + output)[:, None] * inputs + column[None, :]
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < stop
        row_ptr = h_ptr + row.to(tl.int64)[None, :] * inputs + column[:, None]
        y = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            is_column = begin + column < inputs
            h = tl.load(row_ptr + begin, is_column[:, None] & is_row[None, :], other=0.0)
            is_weight = is_output[:, None] & is_column[None, :]
            downs = tl.load(down_ptr + at + begin, is_weight, other=0.0)
            y = tl.dot(downs, h, y, input_precision="ieee")
        slot = tl.load(order_ptr + row, is_row, other=0).to(tl.int64)
        target_ptr = y_ptr + slot[None, :] * outputs + output[:, None]
        tl.store(target_ptr, y, is_output[:, None] & is_row[None, :])


@triton.jit
def _sum(
    y_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    total_ptr: tl.tensor,
    width: int,
    first_expert: int,
    stop_expert: int,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(CHOICES):
        slot = token * CHOICES + k
        expert = tl.load(chosen_ptr + slot)
        columns = tl.where((expert >= first_expert) & (expert < stop_expert), width, 0)
        total += tl.load(y_ptr + slot * width + column, column < columns, other=0.0).to(tl.float32)
    tl.store(total_ptr + token * width + column, total, column < width)


def choose_experts(logits_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Routing:
    """Scores, the best experts of each token and their weights, as a router computes them."""
    tokens, experts = logits_NE.shape
    chosen_NK = logits_NE.new_empty((tokens, moe.top_k), dtype=torch.int64)
    scores_NE, weights_NK = (
        torch.empty_like(logits_NE),
        chosen_NK.new_empty(chosen_NK.shape, dtype=logits_NE.dtype),
    )
    size = experts // moe.groups
    _choose[(tokens,)](
        logits_NE,
        logits_NE if bias_E is None else bias_E,
        scores_NE,
        chosen_NK,
        weights_NK,
        moe.scaling,
        EXPERTS=experts,
        CHOICES=moe.top_k,
        CHOICE_BLOCK=triton.next_power_of_2(moe.top_k),
        GROUPS=moe.groups,
        GROUP_BLOCK=triton.next_power_of_2(moe.groups),
        SIZE_BLOCK=triton.next_power_of_2(size),
        KEPT=moe.groups_kept,
        SUMMED=1 if moe.group_score == "max" else min(2, size),
        SOFTMAX=moe.score == "softmax",
        HAS_BIAS=bias_E is not None,
        RENORMALISE=moe.renormalise,
        num_warps=1 if experts <= 128 else 4,
        **begins_early(logits_NE),
    )
    return Routing(chosen_NK, weights_NK, scores_NE, logits_NE)


def run_experts(
    x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: Experts, first: int, total: Tensor
) -> Tensor:
    """The sum of each token over its experts on this rank, the `first` and those after it."""
    assert experts.gate is not None
    gate, up, down = (stack.weight for stack in (experts.gate, experts.up, experts.down))
    (local, width, ffn), (tokens, choices) = down.shape, chosen_NK.shape
    slots, options = tokens * choices, begins_early(x_ND)
    order_M = chosen_NK.new_empty(slots, dtype=torch.int32)
    firsts_L = order_M.new_empty(local + 1)
    block = triton.next_power_of_2(slots)
    _sort[(local,)](chosen_NK, order_M, firsts_L, slots, first, BLOCK=block, num_warps=4, **options)
    sizes = tiling(slots, local, x_ND.element_size())
    tile = {"ROWS": sizes.rows, "OUTPUTS": sizes.outputs, "INPUTS": sizes.inputs, **options}
    tile |= {"num_warps": sizes.warps, "num_stages": sizes.stages}
    h_MF, y_MD = x_ND.new_empty(slots, ffn), x_ND.new_empty(slots, width, dtype=total.dtype)
    _gate_and_up[(local, triton.cdiv(ffn, sizes.outputs))](
        *(x_ND, gate, up, weights_NK, order_M, firsts_L, h_MF),
        *(ffn, width),
        CHOICES=choices,
        **tile,
    )
    _down[(local, triton.cdiv(width, sizes.outputs))](
        *(h_MF, down, order_M, firsts_L, y_MD), *(width, ffn), **tile
    )
    _sum[(tokens, triton.cdiv(width, _COLUMNS))](
        *(y_MD, chosen_NK, total, width, first, first + local),
        CHOICES=choices,
        COLUMNS=_COLUMNS,
        **options,
    )
    return total

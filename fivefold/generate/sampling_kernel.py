"""Draws from float32 logits as two Triton kernels, without a sort and without probabilities of the
whole vocabulary in memory.

The first kernel reduces parts of every row to a maximum, its token, and a sum of exponentials: a
greedy token and the log-probability of any token need no more. In the second one a program has a
row. If the row is drawn, it looks for the threshold of its filters: a pass over the row weighs the
tokens above eight pivots, between which the next pass looks, until a single logit is left. Where
many tokens have that logit, the first ones stay. A last pass draws in the order of tokens. So only
rows with filters pay for them.

A program adds in an order of its own, so that a row has the same draw to the bit alone and beside
others. Weights are float32; tokens below e^-87 of the likeliest have none.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RULES = (
    6  # numbers of a row: temperature (0: greedy), top-k, top-p, log min-p, uniform, target or -1
)
_BLOCK = 4096  # tokens of a part, and of a tile in a pass
_PIVOTS = 8
_WARPS = 16


@triton.jit
def _reduce_parts(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    row_stride: int,
    allowed_stride: int,
    vocab: int,
    num_parts: int,
    BLOCK: tl.constexpr,
    EXCLUDES: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, token < vocab, other=-float("inf"))
    top = tl.max(x, 0)
    # Part of a row may be -inf, and has the sum 0 then; +inf and NaN make it NaN.
    total = tl.sum(tl.exp(x - tl.where(top > -float("inf"), top, 0.0)), 0)
    highest = top
    if EXCLUDES:
        allowed_ptr += row * allowed_stride
        x = tl.load(allowed_ptr + token, token < vocab, other=-float("inf"))
        highest = tl.max(x, 0)
    first = tl.min(tl.where(x == highest, token, vocab - 1), 0)
    parts_ptr += row * 4 * num_parts + part
    tl.store(parts_ptr, top)
    tl.store(parts_ptr + num_parts, total)
    tl.store(parts_ptr + 2 * num_parts, highest)
    tl.store(parts_ptr + 3 * num_parts, first.to(tl.float32))  # exact up to 2^24


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """Integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _between(low: tl.tensor, high: tl.tensor, number: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Floats at `number` of `COUNT` equal steps in the order of floats."""
    order = (_order(low) + (_order(high) - _order(low)) * number // COUNT).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    row_ptr: tl.tensor,
    vocab: int,
    top: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    goal: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """The highest logit with `goal` tokens, or their weight, from it on; at least `low`."""
    column, number = tl.arange(0, BLOCK), 1 + tl.arange(0, PIVOTS)
    high, passes, is_open = top, tl.full((), 0, tl.int32), low < top
    while is_open:
        # Distances to the maximum halve at first, the last pivot is the maximum. Then steps are
        # equal; where logits of very different sizes remain, equal in the order of floats.
        halves = tl.where(number == PIVOTS, 0.0, tl.exp2(-number.to(tl.float32)))
        steps = 1.0 - number.to(tl.float32) / (PIVOTS + 1)
        pivots = high - (high - low) * tl.where(passes == 0, halves, steps)
        pivots = tl.where(passes < 6, pivots, _between(low, high, number, PIVOTS + 1))
        weights = tl.zeros((PIVOTS, BLOCK), tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), tl.float32)
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + column
            x = tl.load(row_ptr + token, token < vocab, other=-float("inf"))
            weight = tl.full((BLOCK,), 1.0, tl.float32)
            if not COUNTS:
                weight = tl.exp2((x - top) * rate)
            # Not a selection and a sum: a fifth fewer instructions.
            weights += (x[None, :] >= pivots[:, None]).to(tl.float32) * weight[None, :]
            lowest = tl.minimum(lowest, tl.where(x >= low, x, float("inf")))
            highest = tl.maximum(highest, tl.where(x < high, x, -float("inf")))
        totals = tl.sum(weights, 1)
        low = tl.maximum(tl.max(tl.where(totals >= goal, pivots, low), 0), tl.min(lowest, 0))
        high = tl.minimum(tl.min(tl.where(totals >= goal, high, pivots), 0), high)
        exact = tl.max((totals == goal).to(tl.int32), 0) > 0
        is_open = (tl.max(highest, 0) > low) & (low < high) & (exact == 0)
        passes += 1
    return low


@triton.jit
def _weigh(
    row_ptr: tl.tensor,
    vocab: int,
    top: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number of tokens above a threshold, number of tokens at it, weight of those above."""
    column = tl.arange(0, BLOCK)
    above, equals = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + column
        x = tl.load(row_ptr + token, token < vocab, other=-float("inf"))
        above += tl.where(x > low, 1.0, 0.0)
        equals += tl.where(x == low, 1.0, 0.0)
        weights += tl.where(x > low, tl.exp2((x - top) * rate), 0.0)
    return tl.sum(above, 0), tl.sum(equals, 0), tl.sum(weights, 0)


@triton.jit
def _draw(
    row_ptr: tl.tensor,
    vocab: int,
    top: tl.tensor,
    rules_ptr: tl.tensor,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """A token of a row whose maximum is finite."""
    temperature, top_k = tl.load(rules_ptr).to(tl.float32), tl.load(rules_ptr + 1).to(tl.float32)
    top_p, log_min_p = tl.load(rules_ptr + 2).to(tl.float32), tl.load(rules_ptr + 3).to(tl.float32)
    rate = 1.4426950408889634 / temperature  # weights are powers of 2
    low = top + temperature * tl.maximum(log_min_p, -87.0)
    if top_k < vocab:
        low = _threshold(row_ptr, vocab, top, rate, low, top_k, True, BLOCK, PIVOTS)
    above, equals, mass = _weigh(row_ptr, vocab, top, rate, low, BLOCK)
    ties = tl.minimum(equals, top_k - above)  # of tokens at the threshold, the first ones stay
    weight = tl.exp2((low - top) * rate)
    mass += ties * weight
    if top_p < 1.0:
        goal, floor = mass * top_p, low
        low = _threshold(row_ptr, vocab, top, rate, low, goal, False, BLOCK, PIVOTS)
        above, equals, mass = _weigh(row_ptr, vocab, top, rate, low, BLOCK)
        weight = tl.exp2((low - top) * rate)
        stay = tl.maximum(tl.ceil((goal - mass) / weight), 1.0)
        ties = tl.minimum(tl.where(low > floor, equals, ties), stay)
        mass += ties * weight
    # Sums over tiles are float64: within a tile, float32 tells its tokens apart.
    goal = tl.load(rules_ptr + 4) * mass.to(tl.float64)
    column = tl.arange(0, BLOCK)
    start, first, ties_of_tile = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), ties
    end, begin = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    while (start < vocab) & (end <= goal):
        x = tl.load(row_ptr + start + column, start + column < vocab, other=-float("inf"))
        taken = tl.minimum(tl.sum(tl.where(x == low, 1.0, 0.0), 0), ties)
        mass = tl.sum(tl.where(x > low, tl.exp2((x - top) * rate), 0.0), 0) + taken * weight
        # Where rounding has put the goal beyond all tokens, the last tile with any is taken.
        first = tl.where(mass > 0, start, first)
        begin = tl.where(mass > 0, end, begin)
        ties_of_tile = tl.where(mass > 0, ties, ties_of_tile)
        end += mass.to(tl.float64)
        ties -= taken
        start += BLOCK
    x = tl.load(row_ptr + first + column, first + column < vocab, other=-float("inf"))
    ranks = tl.cumsum(tl.where(x == low, 1.0, 0.0), 0)
    stays = (x > low) | ((x == low) & (ranks <= ties_of_tile))
    ends = tl.cumsum(tl.where(stays, tl.exp2((x - top) * rate), 0.0), 0)
    beyond = stays & (ends > (goal - begin).to(tl.float32))
    token = tl.min(tl.where(beyond, column, BLOCK), 0)
    last = tl.max(tl.where(stays, column, 0), 0)
    return first + tl.where(token < BLOCK, token, last)


# Of rows that may begin anywhere a thread reads one number at a time, in the layout in which the
# pivots weigh it. Four at a time would change hands through shared memory in every pass.
@triton.jit(do_not_specialize=["allowed_stride"])
def _finish_rows(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    rules_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    allowed_stride: int,
    vocab: int,
    num_parts: int,
    RULES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    rules_ptr += row * RULES
    parts_ptr += row * 4 * num_parts + part
    tops = tl.load(parts_ptr, part < num_parts, other=-float("inf"))
    totals = tl.load(parts_ptr + num_parts, part < num_parts, other=0.0)
    highest = tl.load(parts_ptr + 2 * num_parts, part < num_parts, other=-float("inf"))
    firsts = tl.load(parts_ptr + 3 * num_parts, part < num_parts, other=0.0).to(tl.int32)
    top, best = tl.max(tops, 0), tl.max(highest, 0)
    total = tl.sum(totals * tl.exp(tops - top), 0)
    token = tl.min(tl.where(highest == best, firsts, vocab - 1), 0)
    if (tl.load(rules_ptr) > 0) & (best > -float("inf")) & (best < float("inf")):
        token = _draw(allowed_ptr + row * allowed_stride, vocab, best, rules_ptr, BLOCK, PIVOTS)
    target = tl.load(rules_ptr + 5).to(tl.int32)
    logit = tl.load(logits_ptr + row * row_stride + tl.where(target < 0, token, target))
    tl.store(out_ptr + row * 2, token.to(tl.float64))
    tl.store(out_ptr + row * 2 + 1, (logit - top - tl.log(total)).to(tl.float64))


def draw_rows(logits_NV: Tensor, allowed_NV: Tensor, rules: Tensor) -> Tensor:
    """Draw a token from each row of `allowed_NV` by its rules, (N, `RULES`) in float64; returns it
    and its log-probability, or that of the target, in `logits_NV`: (N, 2) in float64."""
    (rows, vocab), strides = logits_NV.shape, (logits_NV.stride(0), allowed_NV.stride(0))
    assert logits_NV.stride(1) == allowed_NV.stride(1) == 1 and rules.is_contiguous()
    num_parts = triton.cdiv(vocab, _BLOCK)
    parts = logits_NV.new_empty(rows, 4, num_parts)
    drawn_N2 = logits_NV.new_empty(rows, 2, dtype=torch.float64)
    excludes = allowed_NV is not logits_NV
    tensors, sizes = (logits_NV, allowed_NV, parts), (*strides, vocab, num_parts)
    _reduce_parts[(rows, num_parts)](*tensors, *sizes, BLOCK=_BLOCK, EXCLUDES=excludes, num_warps=8)
    _finish_rows[(rows,)](
        *tensors,
        rules,
        drawn_N2,
        *sizes,
        RULES=RULES,
        PARTS=triton.next_power_of_2(num_parts),
        BLOCK=_BLOCK,
        PIVOTS=_PIVOTS,
        num_warps=_WARPS,
    )
    return drawn_N2

"""Slots of experts: sorted by expert, and the way of rows to their slots and back.

A *slot* is one token on one of its experts: slot n·K + k is the k-th choice of token n. Backwards
sum in a fixed order, without atomics.

Legend: N tokens, K experts of a token, M slots, D model width, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Slots(NamedTuple):
    """The slots that are not dropped, sorted by expert, and within an expert by token."""

    order: Tensor  # (M,) int64: the slot of each row; N·K, one past the last slot, for an empty row
    counts: Tensor  # (E,) int64: rows of each expert
    num_tokens: int
    num_choices: int
    complete: bool  # every slot is here, once


def sort_slots(
    experts_NK: Tensor, num_experts: int, drops: bool, room: int | None, kept: int | None = None
) -> Slots:
    """The slots sorted by expert.

    This waits for the device only where slots are dropped and `kept` is not given.
    """
    experts_M = experts_NK.flatten()
    order_M = experts_M.sort(stable=True).indices
    counts_E = count_slots(experts_M[None], num_experts)[0]
    complete = not drops and room is None
    if room is not None:
        order_M, counts_E = _with_empty_rows(experts_M, order_M, counts_E, room)
    elif drops:
        order_M = order_M[: int(counts_E.sum()) if kept is None else kept]
    return Slots(order_M, counts_E, *experts_NK.shape, complete)


def _with_empty_rows(
    experts_M: Tensor, order_M: Tensor, counts_E: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    """Order and counts with `room` rows for every expert, without the dropped slots."""
    dropped, num_slots = room * len(counts_E), len(experts_M)
    sorted_M = experts_M.index_select(0, order_M)
    starts = F.pad(counts_E.cumsum(0), (1, 0))
    indices_M = torch.arange(num_slots, device=experts_M.device)
    row_M = (sorted_M * room + indices_M - starts[sorted_M]).clamp(max=dropped)
    padded = order_M.new_full((dropped + 1,), num_slots).scatter(0, row_M, order_M)
    return padded[:dropped], torch.full_like(counts_E, room)


def count_slots(experts_UM: Tensor, num_experts: int) -> Tensor:
    """The number of slots of each expert in each unit, (units, E) int64, without dropped ones."""
    zeros_UE = experts_UM.new_zeros(len(experts_UM), num_experts + 1)
    return zeros_UE.scatter_add(1, experts_UM, torch.ones_like(experts_UM))[:, :num_experts]


def rows_of_slots(x_ND: Tensor, slots: Slots) -> Tensor:
    """The token of every slot, in the order of the slots; zeros in empty rows."""
    return _ToSlots.apply(x_ND, slots)


def weights_of_slots(weights_NK: Tensor, slots: Slots) -> Tensor:
    """The weight of every slot, in the order of the slots, as a column."""
    slots_of_one = slots._replace(num_tokens=slots.num_tokens * slots.num_choices, num_choices=1)
    return _ToSlots.apply(weights_NK.reshape(-1, 1), slots_of_one)


def choices_of_slots(y_MD: Tensor, slots: Slots) -> Tensor:
    """The rows of each token by its choices, (N, K, D); zeros for dropped slots."""
    return _FromSlots.apply(y_MD, slots)


class _ToSlots(torch.autograd.Function):
    """Tokens to one row for each slot. Backward sums them in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, slots: Slots) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.slots = slots._replace(order=None, counts=None)  # backward needs no counts
        return _take(x_ND, slots, slots.num_choices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slots: Slots = ctx.slots._replace(order=ctx.saved_tensors[0])
        return _put(gradients[0], slots).sum(1), None


class _FromSlots(torch.autograd.Function):
    """Rows in the order of experts to the order of tokens; backward is the inverse."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, slots: Slots) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.slots = slots._replace(order=None, counts=None)  # backward needs no counts
        return _put(y_MD, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slots: Slots = ctx.slots._replace(order=ctx.saved_tensors[0])
        return _take(gradients[0].flatten(0, 1), slots, 1), None


def _take(rows: Tensor, slots: Slots, slots_of_row: int) -> Tensor:
    """The row of every slot, where each row has so many slots."""
    if slots.complete:
        return rows.index_select(0, slots.order // slots_of_row)
    empty = slots.order == slots.num_tokens * slots.num_choices
    taken = rows.index_select(0, (slots.order // slots_of_row).clamp(max=max(0, len(rows) - 1)))
    return taken.masked_fill_(empty[:, None], 0)


def _put(rows: Tensor, slots: Slots) -> Tensor:
    """Rows in the order of their slots, (N, K, ·)."""
    num_slots, width = slots.num_tokens * slots.num_choices, rows.shape[1]
    if slots.complete:
        put = rows.new_empty(num_slots, width).index_copy_(0, slots.order, rows)
    else:  # empty rows go to one row at the end, which is cut off
        put = rows.new_zeros(num_slots + 1, width).index_copy_(0, slots.order, rows)[:num_slots]
    return put.view(slots.num_tokens, slots.num_choices, width)

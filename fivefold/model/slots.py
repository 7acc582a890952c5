"""Slots of experts: sorted by expert, and the way of rows to their slots and back.

A *slot* is one token on one of its experts: slot n·K + k is the k-th choice of token n. The rows of
a token are summed one choice after another, in a fixed order and without atomics. No tensor has a
row for every choice of every token: over several nodes most choices of a row are elsewhere.

Legend: N tokens, K experts of a token, M slots, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.kernels import Fuse


class RowCodes(Protocol):
    """How rows go to experts."""

    two_readers: bool  # gate and up read rows of their own

    @property
    def tokens(self) -> RowCodes:
        """How they go before the weights of slots are known."""
        ...

    def round(self, x: Tensor) -> Tensor:
        """Rows that begin to travel to experts."""
        ...

    def round_gradient(self, y: Tensor) -> Tensor:
        """The same; in backward their gradients begin to travel."""
        ...

    def open(self, x: Tensor) -> Tensor:
        """What is moved of rows that autograd knows as `x`."""
        ...

    def close(self, moved: Tensor) -> Tensor:
        """What autograd knows of rows that were moved."""
        ...


class PlainRows:
    """Values, as they are."""

    two_readers = True

    @property
    def tokens(self) -> PlainRows:
        return self

    def round(self, x: Tensor) -> Tensor:
        return x

    def round_gradient(self, y: Tensor) -> Tensor:
        return y

    def open(self, x: Tensor) -> Tensor:
        return x

    def close(self, moved: Tensor) -> Tensor:
        return moved


AS_THEY_ARE = PlainRows()


_AT_ONCE = 2**24  # elements, 64 MiB in float32: large enough for a GPU, small beside what is saved


class Slots(NamedTuple):
    """The slots that are not dropped, sorted by expert, and within an expert by token."""

    order: Tensor  # (M,) int64: the slot of each row; -1 for an empty row
    rows: Tensor  # (N, K) int64: the row of each slot; -1 for a slot that has none
    counts: Tensor  # (E,) int64: rows of each expert
    complete: bool  # every slot is here, once


def sort_slots(
    experts_NK: Tensor,
    num_experts: int,
    drops: bool,
    capacity: int | None,
    num_rows: int | None = None,
) -> Slots:
    """The slots sorted by expert.

    This waits for the device only where slots are dropped and `num_rows` is not given.
    """
    experts_M = experts_NK.flatten()
    order_M = experts_M.sort(stable=True).indices
    counts_E = count_slots(experts_M[None], num_experts)[0]
    complete = not drops and capacity is None
    if capacity is not None:
        # Order and counts with `capacity` rows for every expert, without the dropped slots.
        dropped, num_slots = capacity * len(counts_E), len(experts_M)
        sorted_M = experts_M.index_select(0, order_M)
        starts = F.pad(counts_E.cumsum(0), (1, 0))
        indices_M = torch.arange(num_slots, device=experts_M.device)
        row_M = (sorted_M * capacity + indices_M - starts[sorted_M]).clamp(max=dropped)
        padded = order_M.new_full((dropped + 1,), -1).scatter(0, row_M, order_M)
        order_M, counts_E = (padded[:dropped], torch.full_like(counts_E, capacity))
    elif drops:
        order_M = order_M[: int(counts_E.sum()) if num_rows is None else num_rows]
    return Slots(order_M, _rows_by_slot(order_M, *experts_NK.shape), counts_E, complete)


def _rows_by_slot(order_M: Tensor, num_tokens: int, num_choices: int) -> Tensor:
    """The inverse of the order, (N, K). Empty rows go to one place at the end, which is cut off."""
    num_slots = num_tokens * num_choices
    numbers_M = torch.arange(len(order_M), device=order_M.device)
    rows = order_M.new_full((num_slots + 1,), -1)
    rows.index_copy_(0, order_M.remainder(num_slots + 1), numbers_M)
    return rows[:num_slots].view(num_tokens, num_choices)


def count_slots(experts_UM: Tensor, num_experts: int) -> Tensor:
    """The number of slots of each expert in each unit, (units, E) int64, without dropped ones."""
    zeros_UE = experts_UM.new_zeros(len(experts_UM), num_experts + 1)
    return zeros_UE.scatter_add(1, experts_UM, torch.ones_like(experts_UM))[:, :num_experts]


class SlotSums:
    """Rows from tokens to their slots and back, where they are summed; `fuse` makes the kernels,
    and on a GPU they are our own (`model/kernels/slots_kernel.py`)."""

    def __init__(self, fuse: Fuse) -> None:
        # Over nodes, tokens are as many as come.
        self.sum_by_torch = fuse(sum_of_choices, varies=True)

    def rows(self, x_ND: Tensor, slots: Slots, codes: RowCodes = AS_THEY_ARE) -> Tensor:
        """The token of every slot, in the order of the slots; zeros in empty rows."""
        return _ToSlots.apply(x_ND, slots, self, False, codes)

    def rows_for_two(
        self, x_ND: Tensor, slots: Slots, codes: RowCodes = AS_THEY_ARE
    ) -> tuple[Tensor, Tensor]:
        """The same, once in memory, for two readers: backward adds their gradients as it sums."""
        if codes.two_readers:
            return _ToSlots.apply(x_ND, slots, self, True, codes)
        rows_MD = self.rows(x_ND, slots, codes)
        return rows_MD, rows_MD

    def weights(self, weights_NK: Tensor, slots: Slots) -> Tensor:
        """The weight of every slot, in the order of the slots, as a column."""
        slots_of_one = slots._replace(rows=slots.rows.reshape(-1, 1))
        return self.rows(weights_NK.reshape(-1, 1), slots_of_one)

    def tokens(self, y_MD: Tensor, slots: Slots, codes: RowCodes = AS_THEY_ARE) -> Tensor:
        """The sum of the rows of each token, in the order of its choices."""
        return _FromSlots.apply(y_MD, slots, self, codes)

    def sum(self, parts: Sequence[Tensor], places_NK: Tensor, complete: bool) -> Tensor:
        """`sum_of_choices` of one or two parts."""
        first, second = (*parts, None)[:2]
        if not first.is_cuda:
            return self.sum_by_torch(first, second, places_NK, complete)
        from fivefold.model.kernels import sum_rows  # Triton is there only with CUDA

        return sum_rows(first, second, places_NK)

    def take(self, x_ND: Tensor, order_M: Tensor, num_choices: int, complete: bool) -> Tensor:
        """The token of every slot in the order of the slots, and zeros in empty rows."""
        if not x_ND.is_cuda:
            # By torch: two or more kernels.
            tokens_M = order_M.div(num_choices, rounding_mode="floor")  # -1 for an empty row
            return _rows_at(x_ND, tokens_M, complete)
        from fivefold.model.kernels import take_rows

        return take_rows(x_ND, order_M, num_choices)


class _ToSlots(torch.autograd.Function):
    """Tokens to one row for each slot. Backward sums the rows of each token."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, slots: Slots, sums: SlotSums, two: bool, codes: RowCodes
    ) -> Any:
        ctx.save_for_backward(slots.rows)
        ctx.sums, ctx.complete = sums, slots.complete
        ctx.set_materialize_grads(False)
        taken = sums.take(codes.open(x_ND), slots.order, slots.rows.shape[1], slots.complete)
        rows_MD = codes.close(taken)
        return (rows_MD, rows_MD.view_as(rows_MD)) if two else rows_MD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        (rows_NK,) = ctx.saved_tensors
        grads = [grad for grad in gradients if grad is not None]
        return ctx.sums.sum(grads, rows_NK, ctx.complete), None, None, None, None


class _FromSlots(torch.autograd.Function):
    """The rows of each token, summed. Backward is the way of tokens to slots."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, slots: Slots, sums: SlotSums, codes: RowCodes) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.sums, ctx.num_choices, ctx.complete = sums, slots.rows.shape[1], slots.complete
        ctx.codes = codes
        return sums.sum([y_MD], slots.rows, slots.complete)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (order_M,), codes = ctx.saved_tensors, ctx.codes
        sent = codes.open(gradients[0])
        taken = ctx.sums.take(sent, order_M, ctx.num_choices, ctx.complete)
        return codes.close(taken), None, None, None


def sum_of_choices(
    first_MD: Tensor, second_MD: Tensor | None, places_NK: Tensor, complete: bool
) -> Tensor:
    """For each token the sum of its rows, and of a second set of rows if there is one: in float32
    or wider, in the order of its choices, and rounded once."""
    if torch.compiler.is_compiling():
        return _sum_in_one_kernel(first_MD, second_MD, places_NK, complete)
    (num_tokens, num_choices), width = places_NK.shape, first_MD.shape[1]
    parts = [first_MD] if second_MD is None else [first_MD, second_MD]
    if num_choices == len(parts) == 1:
        return _rows_at(first_MD, places_NK.flatten(), complete)
    wide = torch.promote_types(first_MD.dtype, torch.float32)
    total_ND = first_MD.new_empty(num_tokens, width)
    for block in _blocks(num_tokens, num_choices * len(parts) * width):
        taken = [_rows_at(part, places_NK[block].flatten(), complete) for part in parts]
        sums = [
            choice_rows.view(-1, num_choices, width).sum(1, dtype=wide) for choice_rows in taken
        ]
        total_ND[block] = sums[0] if second_MD is None else sums[0].add_(sums[1])
    return total_ND


def _sum_in_one_kernel(
    first_MD: Tensor, second_MD: Tensor | None, places_NK: Tensor, complete: bool
) -> Tensor:
    """The same with its terms written out: compilers read each row once and write none of them."""
    total_ND = first_MD.new_zeros(1, 1, dtype=torch.promote_types(first_MD.dtype, torch.float32))
    for k in range(places_NK.shape[1]):
        total_ND = total_ND + _rows_at(first_MD, places_NK[:, k], complete)
        if second_MD is not None:
            total_ND = total_ND + _rows_at(second_MD, places_NK[:, k], complete)
    return total_ND.to(first_MD.dtype)


def weigh_rows(rows_MF: Tensor, weights_M1: Tensor | None) -> Tensor:
    """Rows times their weights, in float32 or wider, and rounded once."""
    if weights_M1 is None:
        return rows_MF
    if torch.compiler.is_compiling():
        return (rows_MF * weights_M1).to(rows_MF.dtype)
    return _Weigh.apply(rows_MF, weights_M1)


class _Weigh(torch.autograd.Function):
    """Operator by operator, without a float32 tensor of the size of the rows."""

    @staticmethod
    def forward(ctx: Any, rows_MF: Tensor, weights_M1: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MF, weights_M1)
        return torch.mul(rows_MF, weights_M1, out=torch.empty_like(rows_MF))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (rows_MF, weights_M1), (grad_MF,) = ctx.saved_tensors, gradients
        product_M1, zero = torch.empty_like(weights_M1), weights_M1.new_zeros(1, 1)
        for block in _blocks(*rows_MF.shape):
            # The zero makes products as wide as weights are, without wide copies of their factors.
            products_MF = torch.addcmul(zero, grad_MF[block], rows_MF[block])
            product_M1[block] = products_MF.sum(1, keepdim=True)
        return torch.mul(grad_MF, weights_M1, out=torch.empty_like(rows_MF)), product_M1


def _blocks(num_rows: int, width: int) -> Iterable[slice]:
    """Rows to compute at once."""
    step = max(1, _AT_ONCE // width)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _rows_at(rows: Tensor, places: Tensor, complete: bool) -> Tensor:
    """The rows at these places, and zeros where a place is -1."""
    if complete:
        return rows.index_select(0, places)
    if not len(rows):
        return rows.new_zeros(len(places), rows.shape[1])
    return rows.index_select(0, places.clamp(min=0)).masked_fill_((places < 0)[:, None], 0)

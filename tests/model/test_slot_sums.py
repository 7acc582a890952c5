"""Slots: the rows of tokens on their experts, and their sums; numbers by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.model.kernels.regions import eager
from fivefold.model.slots import SlotSums, sort_slots

F64 = torch.float64
SUMS = SlotSums(eager)


def test_slots_are_sorted_by_expert_and_then_by_token() -> None:
    slots = sort_slots(torch.tensor([[2, 0], [0, 3], [2, 0]]), 5, False, None)
    assert slots.order.tolist() == [1, 2, 5, 0, 4, 3]
    assert slots.counts.tolist() == [3, 0, 2, 1, 0] and slots.complete
    assert slots.rows.tolist() == [[3, 0], [1, 5], [4, 2]]


# Token 0 on experts 2 and 0, token 1 on 0 and nowhere, token 2 nowhere at all; expert 1 is empty.
DROPPED = torch.tensor([[2, 0], [0, 3], [3, 3]])


def test_slots_that_go_nowhere_have_no_row() -> None:
    slots = sort_slots(DROPPED, 3, True, None)
    assert slots.order.tolist() == [1, 2, 0]
    assert slots.counts.tolist() == [2, 0, 1] and not slots.complete


def test_with_room_every_expert_has_as_many_rows() -> None:
    """-1 is the empty row, and the row of a slot that has none."""
    slots = sort_slots(DROPPED, 3, True, 2)
    assert slots.order.tolist() == [1, 2, -1, -1, 0, -1]
    assert slots.rows.tolist() == [[4, 0], [1, -1], [-1, -1]]
    assert slots.counts.tolist() == [2, 2, 2] and not slots.complete
    assert sort_slots(DROPPED, 3, True, 3).order.tolist() == [1, 2, -1, -1, -1, -1, 0, -1, -1]


@pytest.mark.parametrize("room", [None, 2])
def test_rows_of_slots_and_back_by_hand(room: int | None) -> None:
    x = torch.tensor([[1.0, 10], [2, 20], [3, 30]], dtype=F64, requires_grad=True)
    slots = sort_slots(DROPPED, 3, True, room)
    rows = SUMS.rows(x, slots)
    kept = [[1.0, 10], [2, 20], [1, 10]]
    padded = [[1.0, 10], [2, 20], [0, 0], [0, 0], [1, 10], [0, 0]]
    assert rows.tolist() == (kept if room is None else padded)
    y = SUMS.tokens(rows * 2, slots)
    assert y.tolist() == [[4, 40], [4, 40], [0, 0]]
    (grad,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=F64))
    # Twice the gradient of the sum for each slot that is there: two of token 0, one of token 1.
    assert grad.tolist() == [[4, 8], [6, 8], [0, 0]]


@pytest.mark.parametrize("room", [None, 2])
def test_sums_count_no_empty_row(room: int | None) -> None:
    """Rows of token 0 on experts 2 and 0, and of token 1 on 0."""
    slots = sort_slots(DROPPED, 3, True, room)
    order = [1, 2, 0] if room is None else [1, 2, -1, -1, 0, -1]
    by_slot = {0: [1.0, 2], 1: [3, 4], 2: [5, 6], -1: [float("inf"), float("nan")]}
    rows = torch.tensor([by_slot[each] for each in order], dtype=F64, requires_grad=True)
    y = SUMS.tokens(rows, slots)
    assert y.tolist() == [[1 + 3, 2 + 4], [5, 6], [0, 0]]
    slope = torch.tensor([[1.0, 10], [2, 20], [3, 30]], dtype=F64)
    (of_rows,) = torch.autograd.grad(y, rows, slope)
    expected = {0: [1, 10], 1: [1, 10], 2: [2, 20], -1: [0, 0]}
    assert of_rows.tolist() == [expected[each] for each in order]


@pytest.mark.parametrize("room", [None, 2])
def test_two_readers_share_rows_and_their_gradients_are_added(room: int | None) -> None:
    x = torch.tensor([[1.0, 10], [2, 20], [3, 30]], dtype=F64, requires_grad=True)
    slots = sort_slots(DROPPED, 3, True, room)
    first, second = SUMS.rows_for_two(x, slots)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, SUMS.rows(x, slots)) and torch.equal(second, first)
    (both,) = torch.autograd.grad((first * 3).sum() + (second * 4).sum(), x, retain_graph=True)
    assert both.tolist() == [[14, 14], [7, 7], [0, 0]]
    (one,) = torch.autograd.grad(second.sum(), x)
    assert one.tolist() == [[2, 2], [1, 1], [0, 0]]


def test_narrow_rows_are_summed_in_float32_and_rounded_once() -> None:
    """2⁸ + 1 is no bf16 number, but 2⁸ + 1 + 1 is."""
    slots = sort_slots(torch.tensor([[0, 1, 2]]), 3, False, None)
    rows = torch.tensor([[256.0], [1], [1]], dtype=torch.bfloat16, requires_grad=True)
    y = SUMS.tokens(rows, slots)
    assert y.tolist() == [[258]] and y.dtype == torch.bfloat16
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(SUMS.rows(x, slots), x, rows.detach())
    assert grad.tolist() == [[258]]
    readers = [torch.tensor(each)[:, None].bfloat16() for each in ([256.0, 1, 0], [0.0, 1, 0])]
    (grad,) = torch.autograd.grad(SUMS.rows_for_two(x, slots), x, readers)
    assert grad.tolist() == [[258]]


@pytest.mark.parametrize("room", [None, 3])
def test_blocks_of_rows_give_what_all_at_once_give(
    room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: no sum crosses a block."""
    torch.manual_seed(4)
    slots = sort_slots(torch.randint(0, 4, (7, 2)), 3, True, room)
    rows = torch.randn(len(slots.order), 5, dtype=torch.bfloat16)
    x = torch.randn(7, 5, dtype=torch.bfloat16, requires_grad=True)

    def found() -> list[Tensor]:
        two = SUMS.rows_for_two(x, slots)
        return [SUMS.tokens(rows, slots), *torch.autograd.grad(two, x, [rows, rows])]

    whole = found()
    for at_once in (1, 20, 30):  # one token, two, three; with two readers fewer
        monkeypatch.setattr("fivefold.model.slots._AT_ONCE", at_once)
        for mine, theirs in zip(found(), whole, strict=True):
            assert torch.equal(mine, theirs)


def test_no_row_is_saved() -> None:
    """The way back needs only where rows are."""
    slots = sort_slots(torch.full((6, 4), 3).fill_diagonal_(0), 3, True, None)
    rows, x = torch.randn(4, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        SUMS.tokens(rows, slots)
        SUMS.rows_for_two(x, slots)
    assert [each.data_ptr() for each in saved] == [slots.order.data_ptr(), slots.rows.data_ptr()]


def test_slots_that_all_go_nowhere_sum_to_zeros() -> None:
    slots = sort_slots(torch.full((2, 2), 3), 3, True, None)
    rows = torch.zeros(0, 5, requires_grad=True)
    y = SUMS.tokens(rows, slots)
    assert y.shape == (2, 5) and not y.count_nonzero()
    (of_rows,) = torch.autograd.grad(y.sum(), rows)
    assert of_rows.shape == (0, 5)


def test_weights_of_slots_are_a_column_in_their_order() -> None:
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=F64, requires_grad=True)
    column = SUMS.weights(weights, sort_slots(DROPPED, 3, True, 2))
    assert column[:, 0].tolist() == [0.2, 0.3, 0, 0, 0.1, 0]
    column[:, 0].dot(torch.arange(1.0, 7, dtype=F64)).backward()
    assert weights.grad is not None and weights.grad.tolist() == [[5, 1], [2, 0], [0, 0]]

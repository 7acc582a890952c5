"""Sizes of results that are remembered are those that torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fivefold.rehearse.sizes import SizesOnly

CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum that is broadcast": lambda x, y: x + y[0],
    "a matmul": lambda x, y: x @ y.t(),
    "columns first": lambda x, y: (x.t() * 2.0).t(),
    "whole numbers": lambda x, y: (x > 0).long() * 2,
    "whole numbers times a fraction": lambda x, y: (x > 0).long() * 2.0,
    "whole numbers or truths": lambda x, y: (x > 0) * True,
    "a reduction": lambda x, y: x.sum(1, keepdim=True),
    "joined": lambda x, y: torch.cat([x, y]),
    "of two results": lambda x, y: x.max(1).indices,
    "a view": lambda x, y: x.view(-1),
    "a view that its schema calls new": lambda x, y: torch.ops.aten._unsafe_view(x, [-1]),
    "in place": lambda x, y: x.mul_(y),
    "made anew": lambda x, y: torch.arange(5),
    "made of numbers": lambda x, y: torch.tensor([1, 2, 3]),
    "of another type": lambda x, y: x.to(torch.bfloat16),
    "to the host": lambda x, y: x.to("cpu"),
}


def facts(tensor: Tensor, inputs: tuple[Tensor, ...]) -> tuple[object, ...]:
    own = tensor.untyped_storage()._cdata
    shared = [each.untyped_storage()._cdata == own for each in inputs]
    return tensor.shape, tensor.stride(), tensor.dtype, shared


@pytest.mark.parametrize("name", CASES)
def test_what_is_remembered_is_what_torch_computes(name: str) -> None:
    with_values = torch.zeros(4, 6), torch.ones(4, 6)
    wanted = facts(CASES[name](*with_values), with_values)
    for _ in range(3):  # computed, and remembered twice
        with SizesOnly():
            inputs = torch.zeros(4, 6), torch.ones(4, 6)
            found = CASES[name](*inputs)
        assert found.is_meta and facts(found, inputs) == wanted


def test_results_that_are_remembered_are_memory_of_their_own() -> None:
    with SizesOnly():
        x = torch.zeros(3)
        made = [x + 1.0 for _ in range(3)]
    assert len({each.untyped_storage()._cdata for each in (x, *made)}) == 4


def test_gradients_have_sizes_too() -> None:
    with SizesOnly():
        x = torch.zeros(4, 6, requires_grad=True)
        for _ in range(2):
            (torch.nn.functional.silu(x) @ torch.ones(6, 2)).sum().backward()
    assert x.grad is not None and x.grad.is_meta and x.grad.shape == x.shape


def test_a_result_that_is_not_made_stays_none() -> None:
    backward = torch.ops.aten.convolution_backward
    with SizesOnly():
        sizes = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.zeros(2, 2, 1)
        how = (None, [1], [0], [1], False, [0], 1, [True, False, False])
        found = [backward(*sizes, *how) for _ in range(3)]
    for x_grad, weight_grad, bias_grad in found:
        assert x_grad.shape == (1, 2, 4) and weight_grad is None and bias_grad is None


def test_a_number_that_is_written_down_can_be_read() -> None:
    with SizesOnly():
        rounded = torch.tensor(3.14159, dtype=torch.bfloat16)
        sums = torch.zeros(2) + rounded
    assert rounded.item() == torch.tensor(3.14159).bfloat16().item()
    assert sums.is_meta and sums.dtype == torch.float32

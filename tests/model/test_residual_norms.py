"""The residual's sum and the norm after it as one region: outputs, gradients and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.model.kernels.regions import Compute, Fuse, eager
from fivefold.model.layers import NORMS

WIDTH, EPS = 12, 1e-5


def traced(compute: Compute, varies: bool = False) -> Compute:
    return torch.compile(compute, fullgraph=True, dynamic=varies, backend="eager")


def draw(seed: int, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("fuse", [eager, traced])
@pytest.mark.parametrize("frozen", ["", "x", "y", "weight"])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_sums_and_norms_are_those_of_autograd(
    kind: str, summed: bool, frozen: str, fuse: Fuse
) -> None:
    if frozen == "x" and not summed:
        pytest.skip("nothing else reaches the sum")
    inputs = {"x": draw(0, 2, 5, WIDTH), "y": draw(1, 2, 5, WIDTH)}
    inputs |= {"weight": draw(2, WIDTH), "bias": draw(3, WIDTH)}
    for name, each in inputs.items():
        each.requires_grad_(name != frozen)
    x, y, weight, bias = inputs.values()
    region = NORMS[kind]
    found = region.after_sum(fuse)(x, y if summed else None, weight, bias, EPS)
    total = x + y if summed else x
    truth = (region.compute(total, weight, bias, EPS), total)
    leaves = [each for each in inputs.values() if each.requires_grad and (summed or each is not y)]
    given = [draw(4, 2, 5, WIDTH), draw(5, 2, 5, WIDTH)]
    gradients = zip(
        torch.autograd.grad(found, leaves, given),
        torch.autograd.grad(truth, leaves, given),
        strict=True,
    )
    for each, other in (*zip(found, truth, strict=True), *gradients):
        torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("summed", [True, False])
def test_only_the_sum_is_saved(summed: bool) -> None:
    x, y, weight = draw(0, 5, WIDTH).requires_grad_(), draw(1, 5, WIDTH), draw(2, WIDTH)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        region = NORMS["rms"].after_sum(eager)
        _, total = region(x, y if summed else None, weight, None, EPS)
    assert {each.data_ptr() for each in kept} == {total.data_ptr(), weight.data_ptr()}
    assert (total.data_ptr() == x.data_ptr()) != summed


def test_the_gradient_that_is_added_is_left_as_it_was() -> None:
    """Others may read it: it is the gradient of both addends of a sum before."""
    x, weight = draw(0, 5, WIDTH).requires_grad_(), draw(2, WIDTH)
    normed, total = NORMS["rms"].after_sum(eager)(x, None, weight, None, EPS)
    given, before = [draw(4, 5, WIDTH), draw(5, 5, WIDTH)], draw(5, 5, WIDTH)
    torch.autograd.grad((normed, total), x, given)
    assert torch.equal(given[1], before)

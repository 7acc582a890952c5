"""States in host memory: the same weights to the bit, a few at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fivefold.core.units import Row
from fivefold.run.optimizer import HostOptimizer, Name, make_optimizer


@dataclass
class Weight:
    row: Row
    tensor: Tensor
    grad: Tensor


def some_weights() -> list[Weight]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 16), (16,), (4, 4), (32, 8), (5,))
    rows = [Row(f"w{i}", "block", shape) for i, shape in enumerate(shapes)]
    return [
        Weight(row, torch.randn(row.shape, generator=generator), torch.zeros(row.shape))
        for row in rows
    ]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("at_once", [1, 600, 10**9])
def test_equals_the_plain_optimizer(name: Name, at_once: int) -> None:
    plain, hosted = some_weights(), some_weights()
    pairs = [(len(each.row.shape) > 1, each.tensor) for each in plain]
    one = make_optimizer(name, pairs, lr=1e-2, weight_decay=0.1)
    other = HostOptimizer(name, hosted, lr=1e-2, weight_decay=0.1, at_once=at_once)
    for step in range(4):
        for left, right in zip(plain, hosted, strict=True):
            drawn = torch.randn(left.row.shape, generator=torch.Generator().manual_seed(step))
            left.grad = left.tensor.grad = drawn
            right.grad = drawn.clone()
        one.step()
        other.step()
    for left, right in zip(plain, hosted, strict=True):
        assert torch.equal(left.tensor, right.tensor)
    assert any(
        bool((left.tensor != first.tensor).any())
        for left, first in zip(plain, some_weights(), strict=True)
    )


def test_batches_hold_to_their_size() -> None:
    hosted = HostOptimizer("sgd", some_weights(), lr=1e-2, weight_decay=0.0, at_once=600)
    sizes = [sum(each.tensor.nbytes for each in batch) for batch in hosted.batches]
    assert len(sizes) > 1
    assert all(
        size <= 600 or len(batch) == 1 for size, batch in zip(sizes, hosted.batches, strict=True)
    )

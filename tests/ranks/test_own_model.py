"""The data dimension on modules that are not ours: the example, unused weights, stray ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.data import shard
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.flat_unit import UnitOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(worker: Worker, world: int, zero: int) -> list[float]:
    if world == 1:
        return example().train(steps=5)
    with worker.joined(world):
        return example().train(steps=5, zero=zero)


@pytest.mark.parametrize("zero", range(4))
def test_the_example_computes_what_one_process_does(pool: Pool, zero: int) -> None:
    (alone,) = pool.run_each([(run_example, (1, zero))])
    together = pool.run_each([(run_example, (2, zero))] * 2)
    assert alone[0] > alone[-1]
    for losses in together:
        assert losses == pytest.approx(alone, rel=1e-12)


class Skipping(nn.Module):
    """Its second layer is used only where told. No weight fills its place: units have padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if use else x


@contextmanager
def nan_where_nothing_was_written() -> Iterator[None]:
    """Torch fills new memory with NaN under deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def token(rank: int, number: int) -> Tensor:
    return torch.full((1, 3), 1.0 + rank + number, dtype=torch.float64)


Uses = tuple[tuple[bool, ...], ...]
"""By rank and microbatch, whether the second layer is used."""


def sums(worker: Worker, zero: int, used_by: Uses) -> list[list[float]]:
    """The summed gradients of two steps, as this rank's optimizer gets them."""
    with worker.joined(2), nan_where_nothing_was_written():
        mesh = Mesh(Topology(Layout(shard=2, zero=zero)), torch.device("cpu"))
        model = Skipping()
        blocks = {"first": [model.first], "second": [model.second]}
        data = shard(model, blocks, mesh, UnitOptions(zero), bucket=100)
        found, uses = [], used_by[mesh.rank]
        for number in range(2):
            for microbatch, use in enumerate(uses):
                with data.backward(last=microbatch == len(uses) - 1):
                    model(token(mesh.rank, number + microbatch), use).sum().backward()
            data.finish()
            for unit in data.units:
                assert unit.unit.padding and unit.gradient is not None
                assert unit.gradient.isfinite().all()
            found.append([float(each.grad.sum()) for each in data.owned])
            data.publish()
        return found


ONE_MICROBATCH: tuple[Uses, ...] = (
    ((True,), (False,)),
    ((False,), (True,)),
    ((False,), (False,)),
)
# From stage 2 on, all ranks must use the same weights in all microbatches but the last.
TWO_MICROBATCHES: tuple[Uses, ...] = (
    ((False, True), (True, False)),
    ((True, True), (False, False)),
)


@pytest.mark.parametrize(
    ("zero", "used_by"),
    [
        *((zero, used_by) for zero in range(3) for used_by in ONE_MICROBATCH),
        *((zero, used_by) for zero in range(2) for used_by in TWO_MICROBATCHES),
    ],
)
def test_weights_that_no_token_reaches(pool: Pool, zero: int, used_by: Uses) -> None:
    """They have zeros, and the first gradient of each other one takes the place of what was in
    memory before."""
    found = pool.run_each([(sums, (zero, used_by))] * 2)
    truth = []
    for number in range(2):
        model = Skipping()
        for rank, uses in enumerate(used_by):
            for microbatch, use in enumerate(uses):
                model(token(rank, number + microbatch), use).sum().backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        truth.append(float(sum(one.sum() for one in grads)))
    ranks = found[:1] if zero == 0 else found
    for number, wanted in enumerate(truth):
        total = sum(sum(of_rank[number]) for of_rank in ranks)
        assert total == pytest.approx(wanted, rel=1e-12)


def test_a_weight_outside_all_blocks_is_refused() -> None:
    model = Skipping()
    mesh = Mesh(Topology(Layout()), torch.device("cpu"))
    with pytest.raises(FivefoldError, match=r"second\.bias, second\.weight belong to no block"):
        shard(model, {"first": [model.first]}, mesh, UnitOptions(zero=3))

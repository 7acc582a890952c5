"""Parts of one rank's parallel code, with its peers left out or told by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small import MOE, batch_of
from torch import Tensor

from fivefold.core.layout.splits import ContextSplit
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.model.batch import TokenBatch
from fivefold.model.linear_math import PlainMath, Sent
from fivefold.parallel.bit_sums import Tape, bit_sum
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.context import shard
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import SharedOutputs, SplitMatmuls
from fivefold.rehearse.rank import joined

CPU = torch.device("cpu")


class LateSum:
    """The mesh of one of two ranks with equal terms: a sum is there when it is waited for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self, axis: str) -> int:
        return 2

    def coord(self, axis: str) -> int:
        return self.rank

    def all_reduce(self, x: Tensor, axis: str, op: Any, *, yields: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: x.mul_(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_shared_gradients_are_read_when_their_sum_is_there(rank: int) -> None:
    """The first rank has the sum, the other one zero; what is not shared stays."""
    boundary = AxisBoundary(cast("Any", LateSum(rank)), "tp", True, dim=0)
    own, first, second = (torch.randn(5, width) for width in (4, 2, 3))
    shared = SharedOutputs("kv", (1, 2))
    summed = SplitMatmuls(boundary, None, 0).sum_shared_grads([own, first, second], shared)
    expected = [own, 2 * first, 2 * second] if rank == 0 else [own, 0 * first, 0 * second]
    assert all(torch.equal(*pair) for pair in zip(summed, expected, strict=True))


class Alone(LateSum):
    """A mesh of one rank."""

    def size(self, axis: str) -> int:
        return 1


class CountedMath(PlainMath):
    """Counts how often gradients become operands: in fp8 each time is a kernel that rounds."""

    def __init__(self) -> None:
        self.rounded = 0

    def operands(self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool) -> Any:
        self.rounded += gradient
        return super().operands(sent, run, gradient, with_columns)


def test_a_gradient_is_rounded_once_for_both_of_its_matmuls() -> None:
    """Without chunks, which need operands of their own."""
    boundary, math = AxisBoundary(cast("Any", Alone(0)), "tp", False, dim=0), CountedMath()
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    y = SplitMatmuls(boundary, None, 0, row=6).row_linear(math, x, weight)
    gradients = torch.autograd.grad(y.square().sum(), (x, weight))
    expected = torch.autograd.grad((x @ weight.T).square().sum(), (x, weight))
    assert math.rounded == 1
    for computed, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(computed, wanted)


def test_experts_of_padding_are_none() -> None:
    """Choices of a row that is padded for context ranks go with its tokens."""
    batch = batch_of(MOE, rows=2, seq=6)
    chosen = torch.arange(2 * 6 * 3 * 2).view(2, 6, 3, 2)
    split = ContextSplit(inner=1, outer=2, zigzag=True, gathers=False)
    parts = [shard(_replaying(batch, chosen), split, 8, coord).replayed for coord in (0, 1)]
    first, second = (part for part in parts if part is not None)
    assert torch.equal(torch.cat([first[:, :2], second, first[:, 2:]], 1)[:, :6], chosen)
    assert first[:, 2:].eq(-1).all() and first.shape == (2, 4, 3, 2)


def _replaying(batch: TokenBatch, chosen: Tensor) -> TokenBatch:
    return TokenBatch(batch.tokens, batch.labels, batch.positions, None, replayed=chosen)


@pytest.fixture
def middle() -> Iterator[Mesh]:
    """The second of three stages; its messages go nowhere."""
    plan = resolve(PlanOptions("tiny", layout="pp=3", set={"layers": "3"}))
    with joined(1, 3):
        mesh = Mesh.of(plan, CPU)
        mesh.record_on(Tape(full=True))
        yield mesh
        mesh.close_groups()


@pytest.mark.parametrize("peer", [0, 2])
def test_a_tape_names_both_ends_of_a_message(middle: Mesh, peer: int) -> None:
    """By rank: a replay compares what one end has sent with what the other has received."""
    tape, x = middle.tape, torch.randn(4)
    assert tape is not None
    middle.send(x, peer).wait()
    assert tape.messages(sent=True) == {(1, peer): [int(bit_sum(x))]}
    middle.receive(x.shape, x.dtype, peer).wait()
    assert list(tape.messages(sent=False)) == [(peer, 1)]

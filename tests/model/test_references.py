"""What the runs of `train --check` do besides training: sketches of gradients, sums reordered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.layout.boxes import boxes_of, whole_box
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.weight_table import by_name, local_shape, shard_of, weights
from fivefold.core.model import presets as models
from fivefold.model.linear_math import ReorderedSums, _split_matmul
from fivefold.parallel.tensor import cut
from fivefold.train.check import _compared_gradients
from fivefold.train.loop import Projection
from fivefold.train.state import TrainedRank

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["tp=2", "tp=8", "dp=4 ep=2 etp=2"])
def test_sketches_of_shards_add_up(layout: str) -> None:
    """Of tensor ranks and of experts, each cut again through its rows."""
    shape, chosen = models.load("tiny-moe"), Layout.parse(layout)
    coords = [chosen.coord(rank) for rank in range(chosen.world)]
    for weight in (*weights(shape)[:1], *weights(shape)[-14:]):
        full, project = torch.randn(weight.shape), Projection(weight, CPU).of
        total = torch.zeros(8, 8, dtype=torch.float64)
        shards = {shard_of(weight, shape, chosen, coord) for coord in coords}
        for shard in {(one.start, one.inner): one for one in shards}.values():
            values = cut(full, shard).flatten()
            for start, stop in ((0, 7), (7, len(values))):
                boxes = boxes_of(weight.shape, shard, local_shape(weight, shard), start, stop)
                total += project(values[start:stop], boxes)
        assert total.allclose(project(full, (whole_box(weight.shape),))), weight.name


def test_a_sketch_shows_how_far_two_gradients_are_apart() -> None:
    """A scale, noise, and rows that are swapped, all within a factor of two."""
    weight = by_name(models.load("tiny"))["blocks.0.mlp.up.weight"]
    project, box = Projection(weight, CPU).of, (whole_box(weight.shape),)
    full = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    noise = 1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    for other in (1.001 * full, full + noise, full.flip(0)):
        found, truth = project(other - full, box).norm(), (other - full).norm()
        assert truth / 2 < found < 2 * truth
    assert project(1.001 * full, box).sub(project(full, box)).norm() > 0


def attention(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None, None], k[None, None], k[None, None])


def loss(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.T, torch.arange(len(x)), reduction="sum")


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: x @ w.T,
        lambda x, w: F.linear(x, w, w.sum(1)),
        lambda x, w: torch.bmm(x[None], w.T[None]),
        lambda x, w: x.new_zeros(len(x), len(w)).addmm_(x, w.T),
        lambda x, w: torch.mm(x.detach(), w.detach().T, out=x.new_empty(len(x), len(w))) * x.sum(),
        lambda x, w: x.square().mean(-1) * w.norm(),
        lambda x, w: torch.nn.utils.get_total_norm([x.detach().repeat(99, 1)]) * x.sum(),
        attention,
        loss,
    ],
)
def test_reordered_sums_differ_by_rounding_alone(
    compute: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """In the result and in the gradient, which backward computes in the same mode."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1000, generator=generator) / 30 for n in (48, 64))

    def run(dtype: torch.dtype) -> list[Tensor]:
        inputs = [each.to(dtype).requires_grad_() for each in (x, weight)]
        result = compute(*inputs)
        gradients = torch.autograd.grad(result.square().sum(), inputs, allow_unused=True)
        return [result.detach(), *(each for each in gradients if each is not None)]

    plain, truth = run(torch.float32), run(torch.float64)
    with ReorderedSums():
        reordered = run(torch.float32)
    assert any(not a.equal(b) for a, b in zip(plain, reordered, strict=True))
    for one, exact in zip(reordered, truth, strict=True):
        assert one.dtype == torch.float32
        assert (one - exact).norm() < 2e-6 * exact.norm()


def test_sums_by_index_are_added_in_float64() -> None:
    """Though their indices are integers."""
    terms = torch.randn(4096, 1, generator=torch.Generator().manual_seed(0))
    index = torch.zeros(4096, dtype=torch.int64)

    def scattered() -> Tensor:
        return terms.new_zeros(1).scatter_add(0, index, terms[:, 0])

    def of_embedding() -> Tensor:
        weight = torch.zeros(1, 1, requires_grad=True)
        F.embedding(index, weight).backward(terms)
        assert weight.grad is not None
        return weight.grad[0]

    exact = terms.double().sum(0).float()
    for compute in (scattered, of_embedding):
        assert not compute().equal(exact)
        with ReorderedSums():
            assert compute().equal(exact)


def test_reordered_sums_leave_integers_and_wider_types_alone() -> None:
    numbers = torch.arange(10)
    with ReorderedSums():
        assert numbers.sum() == 45 and numbers.sum().dtype == torch.int64
        assert torch.ones(3).sum(dtype=torch.float64).dtype == torch.float64
        assert torch.ones(3, dtype=torch.float64).mean() == 1
        narrow = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(narrow, narrow, narrow).sum().backward()  # sums in float32
        assert torch.ones(0, 4).sum(0).equal(torch.zeros(4))
        assert (torch.ones(2, 1) @ torch.ones(1, 2)).equal(torch.ones(2, 2))


def test_a_matmul_that_widens_its_result_is_split_as_it_is() -> None:
    """As those of experts on a GPU, which a CPU does not have."""
    a, b = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(64, 8, dtype=torch.bfloat16)
    sizes: list[int] = []

    def widening(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        sizes.append(a.shape[-1])
        return a.to(out_dtype) @ b.to(out_dtype)

    total = _split_matmul(widening, "mm", (a, b, torch.float32), {}, 3 / 7)
    assert total.dtype == torch.float32 and sizes == [24, 40]
    assert torch.allclose(total, a.float() @ b.float(), atol=1e-5)


@pytest.mark.parametrize(("off", "passed"), [(2.5e-6, True), (4e-6, False)])
def test_a_spread_that_is_small_by_chance_condemns_no_gradient(off: float, passed: bool) -> None:
    """Nine of ten gradients differ by up to 1e-6, though most by nothing: 3e-6 is allowed."""
    names = [f"weight {number}" for number in range(10)]
    truth = {name: np.ones((8, 8)) for name in names}
    shares = dict(zip(names, [0.0] * 6 + [1e-6] * 4, strict=True))
    reordered = {name: truth[name] * (1 + share) for name, share in shares.items()}
    wrong = truth | {"weight 0": truth["weight 0"] * (1 + off)}
    runs = [TrainedRank(first_step=1, sketches={1: one}) for one in (wrong, truth, reordered)]
    (step,) = _compared_gradients(runs[:1], runs[1:], end=2)
    assert step.worst.tensor == "weight 0" and step.worst.passed == passed
    assert step.worst.allowed == pytest.approx(3e-6)

"""Rows and sums of slots on a GPU, and experts with them, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.launch.backend import num_gpus
from fivefold.model.kernels.regions import Fuse, compiled, eager
from fivefold.model.slots import SlotSums, sort_slots

needs_gpu = pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one")
SUMS = SlotSums(eager)


def found(experts: Tensor, room: int | None, leaves: list[Tensor]) -> list[Tensor]:
    """Tokens to slots for two readers, sums back, and gradients, on the device of the leaves."""
    slots = sort_slots(experts.to(leaves[0].device), 6, True, room)
    x, weights, slope = leaves
    x, weights = x.requires_grad_(), weights.requires_grad_()
    first, second = SUMS.rows_for_two(x, slots)
    rows = first * 2 + second * SUMS.weights(weights, slots)
    y = SUMS.tokens(rows.to(x.dtype), slots)
    return [y, *torch.autograd.grad(y, (x, weights), slope)]


@needs_gpu
@pytest.mark.parametrize("width", [8, 64, 1024, 2056])
@pytest.mark.parametrize("room", [None, 40])
def test_slots_on_a_gpu_are_summed_as_in_float64(room: int | None, width: int) -> None:
    """Expert 6 stands for dropped slots. Each result is rounded to bf16 up to three times."""
    torch.manual_seed(5)
    experts = torch.randint(0, 8, (70, 4)).clamp(max=6)
    given = [torch.randn(70, width), torch.rand(70, 4), torch.randn(70, width)]
    narrow = [each.bfloat16() for each in (given[0], given[2])]
    leaves = [narrow[0].cuda(), given[1].cuda(), narrow[1].cuda()]
    wide = [narrow[0].double(), given[1].double(), narrow[1].double()]
    for here, there in zip(found(experts, room, leaves), found(experts, room, wide), strict=True):
        assert here.is_cuda
        bound = 0.05 * (width / 64) ** 0.5 if here.shape == (70, 4) else 0.05
        torch.testing.assert_close(here.cpu().double(), there, rtol=3 * 2**-8, atol=bound)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_slots_on_a_gpu_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    experts = torch.randint(0, 8, (70, 4)).clamp(max=6)
    given = [torch.randn(70, 96), torch.rand(70, 4), torch.randn(70, 96)]
    here, there = (
        found(experts, None, [each.to(device, dtype) for each in given])
        for device in ("cuda", "cpu")
    )
    bound = 1e-5 if dtype == torch.float32 else 1e-13
    for mine, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=bound, atol=bound)


@needs_gpu
@pytest.mark.parametrize("fuse", [eager, compiled])
def test_a_layer_with_experts_on_a_gpu_is_that_of_a_cpu(fuse: Fuse) -> None:
    """In float32, forward and backward, through grouped matmuls."""
    from fivefold.core.model import presets as models
    from fivefold.model.layers import WeightFactory
    from fivefold.model.moe import MoeMlp

    shape = models.load("tiny-moe")
    assert shape.moe is not None
    torch.manual_seed(7)
    results: list[list[Tensor]] = []
    x, slope = torch.randn(2, 32, shape.width), torch.randn(2, 32, shape.width)
    kept: dict[str, Tensor] = {}
    for device, how in (("cpu", eager), ("cuda", fuse)):
        layer = MoeMlp(shape, shape.moe, WeightFactory(torch.float32, torch.device(device), how))
        for name, weight in layer.named_parameters():
            kept.setdefault(name, torch.randn(weight.shape) * 0.1)
            weight.data.copy_(kept[name])
        there = x.to(device).requires_grad_()
        y = layer(there)
        leaves = [there, *layer.parameters()]
        results.append([y, *torch.autograd.grad(y, leaves, slope.to(device))])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)

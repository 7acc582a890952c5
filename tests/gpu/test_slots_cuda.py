"""Sums of slots on a GPU, operator by operator and compiled, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.launch.backend import num_gpus
from fivefold.model.regions import Fuse, compiled, eager
from fivefold.model.slots import SlotSums, sort_slots

needs_gpu = pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one")


def found(sums: SlotSums, experts: Tensor, room: int | None, leaves: list[Tensor]) -> list[Tensor]:
    """Tokens to slots, weighed sums back, and gradients, on the device of the leaves."""
    slots = sort_slots(experts.to(leaves[0].device), 6, True, room)
    x, weights, slope = leaves
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = sums.weighed_tokens(sums.rows(x, slots) * 2, slots, weights)
    both = y + sums.tokens(sums.rows(x, slots), slots)
    return [both, *torch.autograd.grad(both, (x, weights), slope)]


@needs_gpu
@pytest.mark.parametrize("room", [None, 40])
@pytest.mark.parametrize("fuse", [eager, compiled])
def test_slots_on_a_gpu_are_summed_as_in_float64(fuse: Fuse, room: int | None) -> None:
    """Experts 6 and above are dropped slots. Each result is rounded to bf16 up to three times."""
    torch.manual_seed(5)
    experts = torch.randint(0, 8, (70, 4)).clamp(max=6)
    given = [torch.randn(70, 64), torch.rand(70, 4), torch.randn(70, 64)]
    narrow = [each.bfloat16() for each in (given[0], given[2])]
    leaves = [narrow[0].cuda(), given[1].cuda(), narrow[1].cuda()]
    wide = [narrow[0].double(), given[1].double(), narrow[1].double()]
    mine = found(SlotSums(fuse), experts, room, leaves)
    for here, there in zip(mine, found(SlotSums(eager), experts, room, wide), strict=True):
        assert here.is_cuda
        torch.testing.assert_close(here.cpu().double(), there, rtol=3 * 2**-8, atol=0.05)

"""Our AdamW kernel beside torch's, and the same weights to the bit wherever states are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fivefold.core.recipe import Recipe
from fivefold.core.units import LocalWeight
from fivefold.optim import make_updater
from fivefold.optim.optimizer import ADAM_BETAS, ADAM_EPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = ((3, 5), (1000,), (4096, 1031), (1 << 22,))
FACTOR, DECAY, LR = 0.37, 0.1, 1e-2


def owned_weights(dtype: torch.dtype) -> list[Any]:
    """Weights as a rank owns them, the same every time."""
    torch.manual_seed(0)
    found: list[Any] = []
    for number, sizes in enumerate(SIZES):
        tensor = torch.randn(sizes, device="cuda", dtype=dtype)
        row = LocalWeight(f"w{number}", "blocks.0", sizes)
        found.append(SimpleNamespace(row=row, tensor=tensor, start=0, grad=None, factor=None))
    return found


def updated(owned: list[Any], recipe: Recipe, master: bool) -> list[torch.Tensor]:
    """The weights after three updates."""
    updater = make_updater(recipe, owned, torch.device("cuda"), master=master)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(3):
        for each in owned:
            wide = torch.float32 if master else each.tensor.dtype
            each.grad = torch.randn(each.row.shape, device="cuda", dtype=wide, generator=generator)
            each.factor = torch.tensor(FACTOR, device="cuda", dtype=torch.float64)
        updater.step()
    return [each.tensor for each in owned]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_adamw(dtype: torch.dtype) -> None:
    recipe = Recipe(lr=LR, weight_decay=DECAY)
    ours = updated(owned_weights(dtype), recipe, master=False)
    theirs = owned_weights(dtype)
    groups = [
        {
            "params": [each.tensor for each in theirs if len(each.row.shape) > 1],
            "weight_decay": DECAY,
        },
        {
            "params": [each.tensor for each in theirs if len(each.row.shape) < 2],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(3):
        for each in theirs:
            grad = torch.randn(each.row.shape, device="cuda", dtype=dtype, generator=generator)
            each.tensor.grad = (grad.float() * FACTOR).to(dtype)
        optimizer.step()
    for mine, each in zip(ours, theirs, strict=True):
        # Clipped gradients are rounded to bfloat16 there, and not here.
        bound = 1e-6 if dtype == torch.float32 else 2e-2
        assert float((mine - each.tensor).abs().max()) <= bound * float(each.tensor.abs().max())


@pytest.mark.parametrize("master", [False, True])
def test_states_in_host_memory_give_the_same_bits(master: bool) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    recipe = Recipe(lr=LR, weight_decay=DECAY)
    here = updated(owned_weights(dtype), recipe, master)
    away = Recipe(lr=LR, weight_decay=DECAY, offload="cpu")
    there = updated(owned_weights(dtype), away, master)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine, cast(torch.Tensor, other))

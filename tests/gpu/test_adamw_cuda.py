"""Our AdamW kernel beside torch's, and the same weights to the bit wherever states are."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.core.recipe import Recipe
from fivefold.core.units import LocalWeight
from fivefold.launch.processes import num_gpus
from fivefold.optim import make_updater
from fivefold.optim.optimizer import ADAM_BETAS, ADAM_EPS

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
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


def kernel_is_adamw(dtype: torch.dtype) -> None:
    recipe = Recipe(lr=LR, weight_decay=DECAY)
    ours, theirs = updated(owned_weights(dtype), recipe, master=False), owned_weights(dtype)
    groups = [
        {
            "params": [each.tensor for each in theirs if (len(each.row.shape) > 1) == decays],
            "weight_decay": DECAY if decays else 0.0,
        }
        for decays in (True, False)
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


def same_bits(master: bool) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    recipes = [Recipe(lr=LR, weight_decay=DECAY, offload=where) for where in ("none", "cpu")]
    here, there = (updated(owned_weights(dtype), each, master) for each in recipes)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine, other)


CHECKS = {
    "the kernel is AdamW in float32": partial(kernel_is_adamw, torch.float32),
    "the kernel is AdamW in bfloat16": partial(kernel_is_adamw, torch.bfloat16),
    "states in host memory give the same bits": partial(same_bits, master=False),
    "states and masters in host memory do too": partial(same_bits, master=True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_updates_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

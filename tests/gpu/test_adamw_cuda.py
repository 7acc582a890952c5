"""Our AdamW kernel beside torch's, and the same weights to the bit wherever states are."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.core.layout.units import LocalWeight
from fivefold.core.layout.weight_table import WeightShard
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.backend import num_gpus
from fivefold.optim.optimizer import ADAM_BETAS, ADAM_EPS
from fivefold.optim.rounding import RoundingKey, round_stochastically, rounding_bits
from fivefold.optim.updater import make_updater

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


def updated(
    owned: list[Any], recipe: Recipe, master: bool, block_bytes: int | None = None
) -> list[torch.Tensor]:
    """The weights after three updates."""
    device = torch.device("cuda")
    updater = make_updater(recipe, owned, device, master=master, block_bytes=block_bytes)
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


def same_bits_of_narrow_states(master: bool) -> None:
    """Wherever states in bfloat16 are, and in whatever blocks."""
    dtype, found = torch.bfloat16 if master else torch.float32, []
    for where, size in (("none", None), ("none", 1 << 20), ("cpu", None)):
        recipe = Recipe(lr=LR, weight_decay=DECAY, states="bf16", offload=where, seed=3)
        found.append(updated(owned_weights(dtype), recipe, master, size))
    for mine, *others in zip(*found, strict=True):
        assert all(torch.equal(mine, other) for other in others)


# A full weight and the shard that a rank has of it: all, some columns, some experts and outputs of
# these, the last rows of a vocabulary with padding after them.
SHARDS: tuple[tuple[tuple[int, ...], tuple[int, ...], WeightShard], ...] = (
    ((300, 70), (300, 70), WeightShard(None, 0, 0, 0, 1, False)),
    ((300, 70), (300, 35), WeightShard(1, 35, 70, 70, 1, False)),
    ((6, 50, 70), (2, 25, 70), WeightShard(0, 2, 4, 6, 1, False, (1, 25, 50))),
    ((300, 70), (101, 70), WeightShard(0, 202, 303, 303, 1, False)),
)


def states_are_rounded_as_by_torch() -> None:
    """The kernel's moments, rounded by torch's operators, are those that it rounds itself; of two
    thirds of a shard, from an odd element on."""
    for shape, local, shard in SHARDS:
        row, full = LocalWeight("w", "blocks.0", local), (shape, shard)
        size = row.numel
        first = torch.Generator("cuda").manual_seed(2)
        grad = torch.randn(size, device="cuda", generator=first)
        start, given = 7, grad[7 : 7 + size * 2 // 3].clone()
        wide = [torch.zeros_like(given) for _ in range(3)]
        narrow = [torch.zeros_like(given), *(torch.zeros_like(given).bfloat16() for _ in range(2))]
        from fivefold.optim.adamw_kernel import AdamwKernel  # Triton is there only with CUDA

        kernel = AdamwKernel(None, given.device, LR, 1, ADAM_BETAS, ADAM_EPS)
        kernel.update(wide[0], given, wide[1:], DECAY)
        key = RoundingKey.of(5, 1, row, start, full)
        kernel.update(narrow[0], given, narrow[1:], DECAY, rounding=key)
        assert torch.equal(wide[0], narrow[0])
        bits = rounding_bits(5, 1, row, start, len(given), given.device, full)
        for mine, exact in zip(narrow[1:], wide[1:], strict=True):
            expected = round_stochastically(exact, bits)
            assert torch.equal(mine, expected), (shape, local)
            assert not torch.equal(mine, exact.bfloat16())
            bits >>= 16


def nothing_changes_by_what_is_not_a_number() -> None:
    """Neither weights nor masters nor states."""
    for dtype in (torch.float32, torch.bfloat16):
        owned, narrow = owned_weights(dtype), dtype == torch.bfloat16
        recipe = Recipe(lr=LR, weight_decay=DECAY, states="bf16" if narrow else "fp32")
        updater = make_updater(recipe, owned, torch.device("cuda"), master=True)
        assert updater.skips
        states = [one.read() for each in updater.states().values() for one in each if one]
        tensors = [*states, *(each.tensor for each in owned)]
        for factor, moves in ((1.0, True), (float("nan"), False), (0.5, True)):
            before = [one.clone() for one in tensors]
            for each in owned:
                each.grad = torch.ones(each.row.shape, device="cuda")
                each.factor = torch.tensor(factor, device="cuda", dtype=torch.float64)
            updater.step()
            assert all(map(torch.equal, before, tensors)) != moves


CHECKS = {
    "the kernel is AdamW in float32": partial(kernel_is_adamw, torch.float32),
    "the kernel is AdamW in bfloat16": partial(kernel_is_adamw, torch.bfloat16),
    "states in host memory give the same bits": partial(same_bits, master=False),
    "states and masters in host memory do too": partial(same_bits, master=True),
    "so do states in bfloat16": partial(same_bits_of_narrow_states, master=False),
    "and those with masters": partial(same_bits_of_narrow_states, master=True),
    "states are rounded as by torch": states_are_rounded_as_by_torch,
    "nothing changes by what is not a number": nothing_changes_by_what_is_not_a_number,
}


@pytest.mark.parametrize("name", CHECKS)
def test_updates_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

"""Updates with bfloat16 states beside torch's fused float32 AdamW, on one GPU in one run.

    python benchmarks/update.py [--elements 64] [--tensors 8]

Ours: float32 masters, bfloat16 weights, states that are rounded stochastically, and gradients in
float32 and in bfloat16, clipped; once with whole weights, and once with the columns of a tensor
rank. Torch's: float32 weights, gradients and states, not clipped. Medians of 20 updates; the ratio
should be at most 1.2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from fivefold.core.layout.units import LocalWeight
from fivefold.core.layout.weight_table import WeightShard
from fivefold.core.plan.recipe import Recipe
from fivefold.optim.optimizer import ADAM_BETAS, ADAM_EPS, Updater
from fivefold.optim.updater import make_updater

MOST = 1.2
WIDTH = 4096
WARM_UP, MEASURED = 3, 20


def seconds(run: Callable[[], object]) -> float:
    """The median time of one update on the device."""
    times: list[float] = []
    for _ in range(WARM_UP + MEASURED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[WARM_UP:])


def ours(states: str, grad_dtype: torch.dtype, rows: int, tensors: int, columns: bool) -> Updater:
    """Our updater over bfloat16 weights with masters."""
    owned: list[Any] = []
    shape, full = (rows, WIDTH), {}
    shard = WeightShard(None, 0, 0, 0, 1, False)
    if columns:
        shape, shard = (2 * rows, WIDTH // 2), WeightShard(1, WIDTH // 2, WIDTH, WIDTH, 1, False)
    for number in range(tensors):
        row = LocalWeight(f"w{number}", "blocks.0", shape)
        tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(shape, device="cuda", dtype=grad_dtype)
        factor = torch.tensor(0.5, device="cuda")
        owned.append(SimpleNamespace(row=row, tensor=tensor, start=0, grad=grad, factor=factor))
        full[row.name] = ((shape[0], WIDTH), shard)
    recipe = Recipe(states=states)  # pyright: ignore[reportArgumentType]
    return make_updater(recipe, owned, torch.device("cuda"), master=True, full=full)


def torch_fused(rows: int, tensors: int) -> Callable[[], object]:
    """Torch's fused update, all in float32."""
    weights = [torch.randn(rows, WIDTH, device="cuda") for _ in range(tensors)]
    for each in weights:
        each.grad = torch.randn_like(each)
    return torch.optim.AdamW(weights, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=64, help="of a tensor, in 2²⁰")
    parser.add_argument("--tensors", type=int, default=8)
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return
    rows = said.elements * 2**20 // WIDTH
    fused = seconds(torch_fused(rows, said.tensors))
    print(f"torch, fused, float32: {1e3 * fused:.2f} ms")
    for states in ("bf16", "fp32"):
        for dtype in (torch.float32, torch.bfloat16):
            for columns in (False, True) if states == "bf16" else (False,):
                mine = seconds(ours(states, dtype, rows, said.tensors, columns).step)
                what = f"{states} states, {dtype} gradients" + ", columns" * columns
                verdict = "" if mine <= MOST * fused else f": above {MOST}"
                print(f"{what}: {1e3 * mine:.2f} ms, {mine / fused:.2f} times{verdict}")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

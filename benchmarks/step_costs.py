"""What a step costs beside its kernels, on one GPU: the loop around it, and more microbatches.

    python benchmarks/step_costs.py

`train` runs llama-3.2-1b with two rows of 8,192 tokens a step; the bare step is the same program
without loop, data and records. Eight microbatches of these rows are timed against one. It exits
with 1 if the loop costs more than 1%, or eight microbatches more than 8.05 times one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent))

import clock

from fivefold.core.plan.plan import Plan
from fivefold.data.batches import samples
from fivefold.model.kernels.regions import compiled
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step, updater_of

STEPS = 30
FEW = 6  # of eight microbatches each
MOST_LOOP, MOST_MICROBATCHES = 1.01, 8.05


def bare_step(plan: Plan, steps: int = STEPS) -> float:
    """Median seconds of a step."""
    mesh = Mesh.of(plan, torch.device("cuda"))
    job = compose(plan, mesh, seed=0, dtype=torch.bfloat16, fuse=compiled)
    updater = updater_of(job, plan.options.train, master=True)
    batches = samples(plan.batch, plan.shape.vocab, seed=0, step=0).to(mesh.device).of(0)
    times: list[float] = []
    for _ in range(clock.WARM_UP + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(job, updater, batches, plan.options.train.clip)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[clock.WARM_UP :])


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return 0
    job = clock.JOBS["cuda"]
    loop = clock.measure("cuda", None, STEPS).wall / STEPS
    bare = bare_step(clock.plan_of(job, None, STEPS))
    eight = bare_step(clock.plan_of(job, None, STEPS, microbatches=8), FEW)
    print(f"a step of train {1e3 * loop:.2f} ms, bare {1e3 * bare:.2f}: {loop / bare:.4f} times")
    print(f"eight microbatches {1e3 * eight:.2f} ms: {eight / bare:.3f} times one")
    return int(eight / bare > MOST_MICROBATCHES or loop / bare > MOST_LOOP)


if __name__ == "__main__":
    sys.exit(main())

"""Very many steps of a small model in every dimension, to find memory that is used after its end.

    python benchmarks/stress.py [--steps 50000] [--layouts "tp=2;cp=2"] [--at-once 1]

A DeepSeek-V3 in small (latent attention, experts with a shared one) is trained in float64 on ranks
of this machine, the steps divided over the layouts. The heap is made to notice: glibc overwrites
what is freed (MALLOC_PERTURB_) and, where its checks are installed, looks at every chunk
(MALLOC_CHECK_). A part of the collectives is waited for late, so that several are in flight at
once. The loss of every step must be that of the undisturbed run, to the bit. A crash, a hang or
another loss fails.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes.util import find_library
from typing import Any
from unittest.mock import patch

PERTURBED = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
SHAPE = {
    "layers": "2",
    "width": "32",
    "ffn": "64",
    "heads": "4",
    "vocab": "64",
    "mla.kv_rank": "8",
    "mla.q_rank": "8",
    "mla.nope_dim": "8",
    "mla.rope_dim": "8",
    "mla.value_dim": "8",
    "head_dim": "16",
    "moe.experts": "4",
    "moe.top_k": "2",
    "moe.ffn": "16",
    "moe.shared_ffn": "16",
    "moe.groups": "1",
    "moe.groups_kept": "1",
    "moe.first_dense": "1",
    "mtp": "0",
}
LAYOUTS = ("tp=2", "cp=2", "dp=2 ep=2", "pp=2", "tp=2 pp=2")
PERIOD = 50  # steps after which the run begins anew, so that the right losses are few
SHARE = 0.2  # of the collectives that are waited for late
LATE = 2e-3  # seconds, at most


def rank_task(worker: Any, plan: Any, steps: int, seed: int) -> list[float]:
    """Train this rank; the losses of one period, all others having been equal."""
    import torch

    from fivefold.data.batches import samples
    from fivefold.parallel.composition import compose
    from fivefold.parallel.mesh import Mesh
    from fivefold.step import step

    def period(job: Any) -> list[float]:
        optimizer = torch.optim.AdamW([each.tensor for each in job.owned], lr=1e-3)
        found: list[float] = []
        for number in range(PERIOD):
            drawn = samples(plan.batch, plan.shape.vocab, seed=0, step=number)
            batches = drawn.of(plan.layout.coord(job.mesh.rank).dp)
            found.append(float(step(job, optimizer, batches, 1.0).loss))
        return found

    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        worker.phase("build")
        wanted = period(compose(plan, mesh, seed=0, dtype=torch.float64))
        with disturbed(seed + worker.rank):
            for number in range(max(1, steps // PERIOD)):
                worker.phase(f"period {number}")
                losses = period(compose(plan, mesh, seed=0, dtype=torch.float64))
                assert losses == wanted, f"period {number}: {losses} instead of {wanted}"
                if worker.rank == 0:
                    worker.report(PERIOD)
        mesh.close_groups()
    return wanted


@contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """Wait late for some collectives."""
    from fivefold.parallel import transport

    draw = random.Random(seed)

    def late(wait: Any) -> Any:
        def waited(pending: Any) -> Any:
            if draw.random() < SHARE:
                time.sleep(draw.random() * LATE)
            return wait(pending)

        return waited

    with ExitStack() as stack:
        for kind in (transport.InFlight, transport.Functional):
            stack.enter_context(patch.object(kind, "wait", late(kind.wait)))
        yield


def plan_of(layout: str) -> Any:
    from fivefold.core.plan.plan import PlanOptions, resolve

    return resolve(PlanOptions("deepseek-v3", layout=layout, seq=16, set=SHAPE), small=True)


def stress(layout: str, steps: int, seed: int) -> int:
    """Steps that were run in one layout."""
    from fivefold.launch.processes import Pool

    plan, done = plan_of(layout), 0

    def on_report(count: int) -> None:
        nonlocal done
        done += count
        if done % (20 * PERIOD) == 0:
            print(f"{layout}: {done:,} of {steps:,} steps", flush=True)

    with Pool(plan.layout.world, patience=120.0) as pool:
        tasks = [(rank_task, (plan, steps, seed))] * plan.layout.world
        first, *others = pool.run_each(tasks, on_report=on_report)
    assert all(losses == first for losses in others), "ranks disagree on the loss"
    return done


def with_checks() -> None:
    """Start again with glibc's checks, which it reads once."""
    if all(os.environ.get(name) == value for name, value in PERTURBED.items()):
        return
    checks = find_library("c_malloc_debug") or ""
    preload = {"LD_PRELOAD": checks} if checks else {}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PERTURBED, **preload})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--layouts", default=";".join(LAYOUTS))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    layouts = asked.layouts.split(";")
    began, share = time.perf_counter(), -(-asked.steps // len(layouts))
    print(f"heap checks: {', '.join(f'{k}={os.environ.get(k)}' for k in PERTURBED)}", flush=True)
    with ThreadPoolExecutor(asked.at_once) as workers:
        found = list(workers.map(lambda one: stress(one, share, asked.seed), layouts))
    seconds = time.perf_counter() - began
    for layout, steps in zip(layouts, found, strict=True):
        print(f"| {layout} | {steps:,} steps |")
    print(f"{sum(found):,} steps without a crash, losses equal to the bit, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    with_checks()
    sys.exit(main())

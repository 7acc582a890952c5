"""One rank alone on one GPU, compiled against operator by operator, in turn in one run.

    python benchmarks/one_rank.py [CASE ...] [--times 3]

Real shards and real kernels; collectives take no time, as nobody is at their other end. TFLOP/s are
those of the model that the passes of this rank compute, recomputation and update not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fivefold.core.model import layer_flops
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.backend import num_gpus
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.rehearse.on_gpu import MeasuredRank, measure_rank


@dataclass(frozen=True)
class RankCase:
    """One rank of a job, in the middle of its pipeline where it has one."""

    model: str
    layout: str
    rank: int
    at_least: float  # times the speed without compilation
    said: dict[str, Any] = field(default_factory=dict[str, Any])

    def plan(self, compiles: bool) -> Plan:
        recipe = Recipe(compile=compiles)
        return resolve(
            PlanOptions(self.model, layout=self.layout, machine="h200", train=recipe, **self.said)
        )


CASES = {
    "405B": RankCase(
        "llama-3.1-405b", "dp=128 tp=8 pp=16", 1024, 1.05, {"seq": 8192, "microbatches": 16}
    ),
    "70B": RankCase(
        "llama-3.1-70b",
        "dp=2 tp=4 pp=8",
        8,
        1.05,
        {"seq": 8192, "microbatches": 16, "schedule": "zb-v"},
    ),
    "Mixtral": RankCase(
        "mixtral-8x22b",
        "dp=8 tp=2 pp=4 ep=8",
        16,
        1.15,
        {"seq": 4096, "microbatches": 8, "ep_nodes": 1},
    ),
    "DeepSeek-V3": RankCase(
        "deepseek-v3",
        "dp=128 pp=16 ep=64",
        128,
        1.15,
        {"seq": 4096, "microbatches": 8, "ep_nodes": 1},
    ),
}


def run(worker: Worker, plan: Plan, rank: int) -> MeasuredRank:
    worker.phase("measure")
    return measure_rank(plan, rank)


def measured(case: RankCase, compiles: bool) -> MeasuredRank:
    """In a process of its own."""
    with Pool(1, patience=300.0) as pool:
        (found,) = pool.run_each([(run, (case.plan(compiles), case.rank))])
    return found


def model_flops(plan: Plan, rank: int) -> float:
    """What the passes of this rank compute in a step, forward and backward."""
    place = plan.layout.coord(rank).pp
    layers = [i for stage in plan.schedule.placement.stages_of(place) for i in plan.stages[stage]]
    tokens = plan.batch.microbatches * plan.batch.microbatch_size * plan.batch.seq
    each = sum(layer_flops(plan.shape, i, plan.batch.seq).total for i in layers)
    return 3 * each * tokens / (plan.layout.tp * plan.layout.cp)


def main(names: list[str], times: int) -> int:
    if not num_gpus():  # torch would look in a way that no fork survives
        print("no GPU here: run this on a machine with one")
        return 0
    slow = 0
    for name in names or CASES:
        case = CASES[name]
        flops = model_flops(case.plan(True), case.rank)
        found: dict[bool, list[MeasuredRank]] = {False: [], True: []}
        for _ in range(times):
            for compiles, runs in found.items():
                runs.append(measured(case, compiles))
        print(json.dumps({name: [[one.step for one in runs] for runs in found.values()]}))
        eager, fast = (median(one.step - one.update for one in runs) for runs in found.values())
        memory = [max(one.peak for one in runs) / 2**30 for runs in found.values()]
        slow += eager / fast < case.at_least
        print(
            f"{name} `{case.layout}` rank {case.rank}: compiled {flops / fast / 1e12:.0f} TFLOP/s, "
            f"{memory[1]:.1f} GiB; operator by operator {flops / eager / 1e12:.0f}, "
            f"{memory[0]:.1f} GiB: {eager / fast:.3f} times (at least {case.at_least})",
            flush=True,
        )
    return int(slow > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--times", type=int, default=3)
    said = parser.parse_args()
    sys.exit(main(said.cases, said.times))

"""Decode steps that are replayed over NCCL: ranks of tp on one GPU, with and without graphs.

    python -m tests.gpu.generate_graphs

prints a table in markdown. `tests/gpu/nccl.py` says what sharing a GPU needs. Captured collectives
are as right as others only if every rank captures and replays the same steps in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fivefold.api.verifying import runnable
from fivefold.core.plan import Plan, PlanOptions
from fivefold.generate.cache import KvCache
from fivefold.generate.engine import DecoderForward
from fivefold.generate.layout import LayoutEngine, forward_plan, mesh_of, stage_of
from fivefold.generate.requests import Completion
from fivefold.launch.backend import NcclLibrary, forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.generated import BATCHED, GeneratedTrial

CASES = (
    *(("tiny", "tp=2", False), ("tiny", "tp=2", True), ("tiny", "tp=4", False)),
    *(("tiny", "dp=2 tp=2", False), ("gpt2", "tp=2", False), ("qwen3-8b", "dp=2 tp=2", True)),
)
MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.25}
PATIENCE = 90.0


class EagerEngine(LayoutEngine):
    """An engine whose steps are issued kernel by kernel."""

    def __init__(self, plan: Plan, mesh: Any, stage: Any, blocks: int, **limits: Any) -> None:
        from fivefold.generate.on_gpu import attend_on_gpu  # Triton is there only with CUDA

        super().__init__(plan, mesh, stage, blocks, **limits)
        make = partial(KvCache, kernel=attend_on_gpu)
        self.forward = DecoderForward(stage.model, blocks, make, self.ends)


@dataclass(frozen=True)
class Seen:
    """What a rank has completed, and how many steps of each way it has captured."""

    captured: int
    completions: dict[str, dict[str, Completion]]


def generate_rank(worker: Worker, plan: Plan, dtype: str) -> Seen:
    """The same requests with graphs and without, on one rank."""
    from fivefold.generate.on_gpu import GraphedForward

    rank = forked_device("cuda", "nccl", worker.rank, plan.layout.world)
    captured, found = 0, dict[str, dict[str, Completion]]()
    with worker.joined(plan.layout.world, rank):
        torch.backends.cuda.matmul.allow_tf32 = False
        trial = GeneratedTrial(plan.shape, dtype, 0, plan.layout.dp)
        blocks = trial.most * len(trial.requests)
        mesh = mesh_of(plan, rank.device, False)
        for way, kind in (("eager", EagerEngine), ("graphs", LayoutEngine)):
            worker.phase(way)
            stage = stage_of(plan, mesh, getattr(torch, dtype), False)
            stage.fill(lambda weight, _: _weight(trial, weight.name))
            engine = kind(plan, mesh, stage, blocks, limits=BATCHED)
            found[way] = engine.run(trial.requests)
            if isinstance(engine.forward, GraphedForward):
                captured += len(engine.forward.captured)
            engine.close()
        torch.distributed.barrier()
        torch.cuda.synchronize(rank.device)
        mesh.close_groups()
    return Seen(captured, found)


def _weight(trial: GeneratedTrial, name: str) -> torch.Tensor:
    full = trial.full_weight(name)
    assert full is not None, name
    return full


def verdict(ranks: Sequence[Seen], dtype: str) -> tuple[bool, str]:
    """Whether graphs changed nothing, in words."""
    first = ranks[0].completions
    same = all(each.completions["graphs"] == first["graphs"] for each in ranks)
    equal = {id: each.tokens == first["graphs"][id].tokens for id, each in first["eager"].items()}
    # Where a token differs in bfloat16, what follows is another text.
    pairs = [
        (a, b)
        for id, each in first["eager"].items()
        if equal[id]
        for a, b in zip(each.logprobs, first["graphs"][id].logprobs, strict=True)
    ]
    apart = max(abs(a - b) for a, b in pairs) if pairs else float("inf")
    captured = min(each.captured for each in ranks)
    enough = all(equal.values()) or (dtype == "bfloat16" and any(equal.values()))
    good = same and enough and captured > 0 and apart <= MOST_DIFFERENCE[dtype]
    said = f"{captured} captured | {sum(equal.values())} of {len(equal)} equal | {apart:.0e}"
    return good, said


def main() -> int:
    NcclLibrary.here().require(4, 1)
    print("| model | layout | in | sizes | completions | log-probabilities | |")
    print("|---|---|---|---|---|---|---|")
    passed: list[bool] = []
    for model, layout, sp in CASES:
        changes = {"layers": "2"} if model.startswith("tiny") else {}
        options = PlanOptions(model, layout=layout, sp=sp, set=changes)
        plan = forward_plan(runnable(options, trains=False))
        for dtype in MOST_DIFFERENCE:
            good, said = verdict(on_nccl(plan, dtype), dtype)
            passed.append(good)
            name = layout + (" sp" if sp else "")
            result = "pass" if good else "FAIL"
            print(f"| {model} | {name} | {dtype} | {said} | {result} |", flush=True)
    print(f"\n{sum(passed)} of {len(passed)} pass")
    return 0 if all(passed) else 1


def on_nccl(plan: Plan, dtype: str) -> Sequence[Seen]:
    with Pool(plan.layout.world, PATIENCE) as pool:
        return pool.run_each([(generate_rank, (plan, dtype))] * plan.layout.world)


if __name__ == "__main__":
    sys.exit(main())

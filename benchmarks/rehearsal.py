"""Planned, rehearsed and measured: one rank of many jobs on one GPU.

    python benchmarks/rehearsal.py measured FILE [MODEL ...]     on a GPU: a line for each job
    python benchmarks/rehearsal.py measured-eager FILE [MODEL ...]    the same without compilation
    python benchmarks/rehearsal.py rehearsed FILE [MODEL ...]    the same ranks without one
    python benchmarks/rehearsal.py table FILE ...                both beside what is planned now

Lines are appended; with models, only of jobs whose model has one of these words. The table is
Markdown, of the jobs that were measured.

Every job runs in processes of its own, so that its memory is gone before the next. `rehearsed` is
the peak of the same rank on tensors without values, `measured` torch's max_memory_allocated.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.planner.estimate import rank_memory, rank_seconds_alone
from fivefold.planner.setting import EstimateSetting, estimate_setting

MACHINE = "h200"
GIB = 2**30
LONG = 131_072
# model, layout, rank, and what else is said.
JOBS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama-3.2-1b", "dp=1", 0, {"seq": 8192}),
    ("llama-3.2-1b", "dp=1", 0, {"seq": 8192, "microbatch_size": 2}),
    ("llama-3.2-1b", "dp=1", 0, {"seq": 8192, "microbatches": 4}),
    ("llama-3.2-1b", "dp=1", 0, {"seq": 8192, "microbatch_size": 2, "recompute": "selective"}),
    ("llama-3.2-1b", "dp=1", 0, {"seq": 8192, "microbatch_size": 4, "recompute": "full"}),
    ("llama-3.2-3b", "dp=1", 0, {"seq": 8192}),
    ("llama-3.2-3b", "dp=1", 0, {"seq": 8192, "recompute": "full", "microbatch_size": 2}),
    ("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 1}),
    ("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 1, "recompute": "selective"}),
    ("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 1, "recompute": "full", "microbatches": 2}),
    ("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 2, "microbatches": 2}),
    ("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 3, "microbatches": 2}),
    ("llama-3.1-8b", "dp=64", 0, {"seq": 8192, "zero": 3}),
    ("llama-3.1-8b", "dp=4 tp=2", 0, {"seq": 8192, "zero": 1, "microbatches": 2}),
    ("llama-3.1-8b", "dp=8 tp=8", 0, {"seq": 8192, "zero": 1, "microbatch_size": 4}),
    ("llama-3.1-8b", "dp=2 cp=4", 0, {"seq": 32_768, "zero": 1}),
    ("llama-3.1-8b", "dp=4 cp=16", 0, {"seq": LONG, "zero": 3}),
    ("llama-3.1-70b", "dp=4 tp=8 pp=4", 0, {"seq": 8192, "microbatches": 8}),
    ("llama-3.1-70b", "dp=4 tp=8 pp=4", 96, {"seq": 8192, "microbatches": 8}),
    ("llama-3.1-405b", "dp=128 tp=8 pp=16", 1024, {"seq": 8192, "microbatches": 16}),
    ("llama-3.1-405b", "dp=128 tp=8 pp=16", 15_360, {"seq": 8192, "microbatches": 16}),
    ("llama-3.1-405b", "dp=128 tp=8 pp=16", 1024,
     {"seq": 8192, "microbatches": 16, "recompute": "full"}),
    ("deepseek-v3", "dp=128 pp=16 ep=64", 128, {"seq": 4096, "microbatches": 8, "zero": 1}),
    ("deepseek-v3", "dp=128 pp=16 ep=64", 128,
     {"seq": 4096, "microbatches": 32, "zero": 1, "recompute": "full"}),
    ("mixtral-8x7b", "dp=8 ep=8", 0, {"seq": 4096, "zero": 1}),
    ("qwen3-30b-a3b", "dp=16 ep=16", 0, {"seq": 4096, "zero": 1}),
)  # fmt: skip


def plan_of(model: str, layout: str, said: dict[str, Any], eager: bool = False) -> Plan:
    """The plan of a job; without a pipeline one microbatch where nothing is said."""
    count = {} if "pp=" in layout or "microbatches" in said else {"microbatches": 1}
    recipe = Recipe(compile=False) if eager else Recipe()
    keys = {"machine": MACHINE, "ep_nodes": 1, "train": recipe, **said, **count}
    return resolve(PlanOptions(model, layout=layout, **keys))


def rehearsed(worker: Worker, plan: Plan, rank: int) -> tuple[int, dict[str, int]]:
    from fivefold.rehearse.rank import rehearse_rank

    worker.phase("rehearse")
    found = rehearse_rank(plan, rank, {})
    return found.peak, found.memory


def measured(worker: Worker, plan: Plan, rank: int) -> tuple[int, float, float, dict[str, float]]:
    from fivefold.rehearse.on_gpu import measure_rank

    worker.phase("measure")
    found = measure_rank(plan, rank)
    return found.peak, found.step, found.update, found.actions


def write(path: Path, name: str, only: list[str]) -> None:
    """A line for each job, by one of the two functions above; `only` those of some models."""
    import fivefold.rehearse.rehearsal  # noqa: F401, before the ranks are forked

    eager, name = name == "measured-eager", name.removesuffix("-eager")
    function = {"rehearsed": rehearsed, "measured": measured}[name]
    chosen = [job for job in JOBS if not only or any(word in job[0] for word in only)]
    with path.open("a", encoding="utf-8") as file:
        for model, layout, rank, said in chosen:
            plan, began = plan_of(model, layout, said, eager), time.perf_counter()
            line: dict[str, Any] = {"model": model, "layout": layout, "rank": rank, "said": said}
            try:
                with Pool(1, patience=400.0) as pool:
                    (line[name],) = pool.run_each([(function, (plan, rank))])
            except Exception as error:
                line[name], line["error"] = None, str(error)[:1500]
            line["seconds"] = round(time.perf_counter() - began, 1)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line)[:300], flush=True)


def joined(paths: list[Path]) -> list[dict[str, Any]]:
    """The lines of all files, those of one job together."""
    found: dict[str, dict[str, Any]] = {}
    for line in (json.loads(text) for path in paths for text in path.open(encoding="utf-8")):
        key = json.dumps([line[name] for name in ("model", "layout", "rank", "said")])
        found.setdefault(key, {}).update(line)
    return list(found.values())


def planned(plan: Plan, setting: EstimateSetting, rank: int) -> float:
    """Bytes that tensors of a rank have."""
    parts = rank_memory(plan, setting, rank)
    return sum(each for name, each in parts.items() if name not in ("context", "nccl", "margin"))


def table(paths: list[Path]) -> None:
    """Print what was measured beside what is planned."""
    setting, _ = estimate_setting(machine.load(MACHINE), "bf16", 0.0, "compiled", 1.0)
    print("| job | rank | planned GiB | rehearsed | measured | planned s | measured s |")
    print("|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"planned": [], "rehearsed": [], "time": []}
    for line in (line for line in joined(paths) if "measured" in line):
        if line["measured"] is None or line.get("rehearsed") is None:
            print(f"| {line['model']} `{line['layout']}` | {line['rank']} | failed |")
            continue
        plan = plan_of(line["model"], line["layout"], line["said"])
        seen, peak, step = line["rehearsed"][0], line["measured"][0], line["measured"][1]
        guess, seconds = (
            planned(plan, setting, line["rank"]),
            rank_seconds_alone(plan, setting, line["rank"]),
        )
        more = " ".join(f"{key}={value}" for key, value in line["said"].items())
        for name, one, truth in (
            ("planned", guess, peak), ("rehearsed", seen, peak), ("time", seconds, step),
        ):  # fmt: skip
            errors[name].append(abs(one / truth - 1))
        print(
            f"| {line['model']} `{line['layout']}` {more} | {line['rank']} | {guess / GIB:.1f} | "
            f"{seen / GIB:.1f} | {peak / GIB:.1f} | {seconds:.3f} | {step:.3f} |"
        )
    for name, each in errors.items():
        print(f"\n{name}: mean error {mean(each):.1%}, worst {max(each):.1%}, {len(each)} jobs")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table([Path(each) for each in sys.argv[2:]])
    else:
        write(Path(sys.argv[2]), sys.argv[1], only=sys.argv[3:])

"""Three trainings on eight GPUs, beside what was planned before anybody ran them.

    python benchmarks/eight.py [--json FILE] [--only WORD ...] [--machine NAME]
    python benchmarks/eight.py --plan    writes data/eight-planned.json, without a GPU
    python benchmarks/eight.py --dry     tiny versions on CPU ranks

Llama-3.1-8B sharded over data ranks; Qwen3-30B-A3B with its experts over all ranks; and a fifth of
the layers of Llama-3.1-70B over tp and pp. Each takes 20 steps of random tokens, and the median of
the last 14 counts, with the most memory that torch has allocated on a rank. One table, and one JSON
that has both. With fewer than eight GPUs it says so and exits 2. Predictions are those of
data/eight-planned.json for the GPU that is found: they are committed, and `--plan` alone changes
them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

PLANNED = Path(__file__).parent / "data" / "eight-planned.json"
RANKS, STEPS, SKIPPED = 8, 20, 6
GPUS = {"H100": "h100", "H200": "h200"}  # by the name of the GPU
NO_TENSORS = ("context", "nccl", "margin")
JOBS = {
    "8B data": ("llama-3.1-8b", "dp=8", "--batch", "32", "--seq", "8192"),
    "30B experts": (
        *("qwen3-30b-a3b", "dp=8 ep=8", "--batch", "32", "--seq", "4096"),
        *("--recompute", "full"),
    ),
    "70B tensor and pipeline": (
        *("llama-3.1-70b", "tp=4 pp=2", "--batch", "16", "--seq", "8192"),
        *("--schedule", "interleaved", "--set", "layers=16"),
    ),
}
DRY = {
    "8B data": ("tiny", "dp=2", "--batch", "4", "--seq", "32"),
    "30B experts": ("tiny-moe", "dp=2 ep=2", "--batch", "4", "--seq", "32"),
    "70B tensor and pipeline": ("tiny", "tp=2 pp=2", "--batch", "4", "--seq", "32"),
}
Numbers = dict[str, float]


def fivefold(*words: str) -> str:
    """What a command prints; its error ends this."""
    command = [sys.executable, "-m", "fivefold", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def planned(job: tuple[str, ...], machine: str) -> Numbers:
    """Seconds of a step and GiB of tensors, as `plan` estimates them."""
    model, layout, *keys = job
    text = fivefold("plan", model, "--layout", layout, *keys, "--machine", machine, "--json")
    estimate = json.loads(text)["layouts"][0]
    memory = estimate["memory_gib"]
    return {
        **{name: estimate[name] for name in ("step_s", "step_s_low", "step_s_high", "mfu")},
        "tokens_per_s_per_gpu": estimate["tokens_per_s_per_gpu"],
        "memory_gib": memory["total"] - sum(memory[name] for name in NO_TENSORS),
        "total_gib": memory["total"],
        "nccl_gib": memory["nccl"],
    }


def measured(job: tuple[str, ...], folder: Path, device: str, steps: int, skipped: int) -> Numbers:
    """The same of a training, from its records."""
    model, layout, *keys = job
    settings = ("data=synthetic", f"steps={steps}")
    shutil.rmtree(folder, ignore_errors=True)
    fivefold(
        *("train", model, "--layout", layout, "--device", device, "--out", str(folder)),
        *(*keys, *(() if "--set" in keys else ("--set",)), *settings),  # ends with its keys
    )
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows: list[dict[str, Any]] = [row for row in map(json.loads, lines) if "seconds" in row]
    late = rows[skipped:]
    return {
        "step_s": statistics.median(row["seconds"] for row in late),
        "tokens_per_s_per_gpu": statistics.median(row["tokens_per_s_per_gpu"] for row in late),
        "memory_gib": max(row["memory_gib"] for row in rows),
    }


def write_plans(machines: Iterable[str]) -> None:
    plans = {
        machine: {name: planned(job, machine) for name, job in JOBS.items()} for machine in machines
    }
    PLANNED.write_text(json.dumps({"jobs": JOBS, "planned": plans}, indent=1) + "\n", "utf-8")
    print(f"{PLANNED.relative_to(PLANNED.parent.parent.parent)}: {', '.join(plans)}")


def found_machine(name: str | None) -> str | None:
    """The machine whose predictions count; None where this one cannot run them."""
    count = torch.cuda.device_count()
    if count < RANKS:
        print(f"{RANKS} GPUs are needed, and there are {count}: --dry runs tiny versions on CPUs")
        return None
    gpu = torch.cuda.get_device_name(0)
    machine = name or next((GPUS[word] for word in GPUS if word in gpu), None)
    known = json.loads(PLANNED.read_text("utf-8"))["planned"]
    if machine not in known:
        print(f"{gpu}: nothing was planned for it, only for {', '.join(known)}; choose --machine")
        return None
    return machine


def run(jobs: dict[str, tuple[str, ...]], plans: dict[str, Numbers], dry: bool) -> dict[str, Any]:
    """Every job, and how far it is from its plan; one that fails has its error instead."""
    results: dict[str, Any] = {}
    steps, skipped = (4, 1) if dry else (STEPS, SKIPPED)
    print("| job | s a step, planned | measured | GiB, planned | measured |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, job in jobs.items():
            results[name] = row = {"job": job, "planned": plans[name]}
            try:
                row["measured"] = measured(
                    job, Path(folder, "run"), "cpu" if dry else "cuda", steps, skipped
                )
            except RuntimeError as error:
                row["error"] = str(error)
                print(f"| {name} | {error} |", flush=True)
                continue
            pairs = [(plans[name][key], row["measured"][key]) for key in ("step_s", "memory_gib")]
            row["measured_over_planned"] = [real / plan for plan, real in pairs]
            cells = (f"{plan:.2f} | {real:.2f}" for plan, real in pairs)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="jobs with one of these words")
    parser.add_argument("--machine", help="whose predictions count")
    parser.add_argument("--json", type=Path, default=Path("build/eight.json"))
    options = parser.parse_args()
    if options.plan:
        write_plans([options.machine] if options.machine else GPUS.values())
        return 0
    jobs = {
        name: job
        for name, job in (DRY if options.dry else JOBS).items()
        if not options.only or any(word in name for word in options.only)
    }
    machine = "laptop" if options.dry else found_machine(options.machine)
    if machine is None:
        return 2
    if options.dry:
        plans = {name: planned(job, machine) for name, job in jobs.items()}
    else:
        plans = json.loads(PLANNED.read_text("utf-8"))["planned"][machine]
    results = run(jobs, plans, options.dry)
    facts = {"date": str(date.today()), "machine": machine, "torch": torch.__version__}
    if not options.dry:
        facts |= {"gpu": torch.cuda.get_device_name(0), "nccl": str(torch.cuda.nccl.version())}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**facts, "jobs": results}, indent=1) + "\n", "utf-8")
    print(f"in {options.json}")
    return 1 if any("error" in row for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

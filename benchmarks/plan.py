"""What an answer of the planner costs: CPU-seconds of the whole command, in a new process each.

Exits with 1 where an answer takes more than 3 CPU-seconds (user and system, start included), or
where a search weighs fewer than 500,000 layouts a second: estimates them, or passes them over by a
bound. Other processes on the machine slow it
down, by caches and clocks, so the best of some runs counts; nothing else should run meanwhile.
Modules have their bytecode, as an installed package has; without it every answer takes 0.25 s more.
`--markdown` prints the table of docs/planner.md.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

LEAST_A_SECOND = 500_000
MOST_SECONDS = 3.0
REPEATS = 3  # the best is taken: what else runs only slows


class Job(NamedTuple):
    """One question; `weighed` where it searches enough layouts to tell the speed of a search."""

    words: str
    weighed: bool = False

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "fivefold", *self.words.split(), "--json"]


GIVEN = "plan llama-3.1-405b --layout dp=128,tp=8,pp=16 --zero 1 --schedule zb-v --machine h100"
JOBS = (
    Job("plan tiny --machine laptop"),
    Job("plan llama-3.1-8b --machine h100 --gpus 8"),
    Job("plan llama-3.1-8b --machine h100 --gpus 64"),
    Job("plan llama-3.1-8b --machine h100 --gpus 64 --seq 1048576"),
    Job("plan llama-3.1-70b --machine h100 --gpus 64"),
    Job("plan llama-3.1-70b --machine h100 --gpus 256"),
    Job("plan llama-3.1-70b --machine h100 --gpus 1024"),
    Job("plan llama-3.1-405b --machine h100 --gpus 1024"),
    Job("plan llama-3.1-405b --machine h100 --gpus 4096"),
    Job("plan llama-3.1-405b --machine h100 --gpus 16384 --batch 2048", weighed=True),
    Job("plan llama-3.1-405b --machine h100 --gpus 98304"),
    Job("plan mixtral-8x22b --machine h100 --gpus 64"),
    Job("plan qwen3-235b-a22b --machine gb200 --gpus 128"),
    Job("plan deepseek-v3 --machine h800 --gpus 256"),
    Job("plan deepseek-v3 --machine h800 --gpus 2048 --batch 15360", weighed=True),
    Job("plan gpt-1t --machine a100 --gpus 3072"),
    Job(GIVEN),
    Job("plan llama-3.1-70b --machine h100 --gpus 64 --set what_if=gpus=2x"),
    Job("plan llama-3.1-70b --machine h100 --gpus 64 --compare"),
    Job("plan llama-3.1-8b --machine h100 --gpus 64 --sweep gpus=8..64"),
    Job("schedule zb-v --stages 16 --microbatches 64"),
)


class Cost(NamedTuple):
    """CPU-seconds of the whole command at best, and what it answered."""

    seconds: float
    answer: dict[str, Any]


def main(arguments: list[str]) -> int:
    """Print a table; 1 where a target is missed."""
    row = "| {} | {} | {} |" if "--markdown" in arguments else "{:82} {:>12}  {}"
    print(row.format("command", "CPU-seconds", "first choice"))
    if "--markdown" in arguments:
        print("|---|---|---|")
    missed: list[str] = []
    for job, cost in _costs():
        weighed = sum(cost.answer.get(key, 0) for key in ("candidates", "passed_over"))
        speed = weighed / (cost.answer.get("seconds") or 1.0)
        if cost.seconds > MOST_SECONDS:
            missed.append(f"{job.words}: {cost.seconds:.2f} CPU-seconds")
        if job.weighed and speed < LEAST_A_SECOND:
            missed.append(f"{job.words}: {speed:,.0f} layouts/s")
        print(row.format(job.words, f"{cost.seconds:.2f}", _first_choice(cost.answer)), flush=True)
    print(f"\ntargets: {MOST_SECONDS:g} CPU-seconds an answer; {LEAST_A_SECOND:,} layouts/s")
    print("\n".join(["missed:", *missed]) if missed else "all met")
    return int(bool(missed))


def _costs() -> Iterator[tuple[Job, Cost]]:
    with TemporaryDirectory() as bytecode:
        for job in JOBS:
            yield job, _measured(job, bytecode)


def _measured(job: Job, bytecode: str) -> Cost:
    """`bytecode`: the folder in which it is kept from run to run."""
    costs: list[Cost] = []
    others = {key: each for key, each in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, job.command, capture_output=True, text=True, check=True)
    for _ in range(REPEATS):
        before = _children_seconds()
        done = run(env={**others, "PYTHONPYCACHEPREFIX": bytecode})
        costs.append(Cost(_children_seconds() - before, json.loads(done.stdout)))
    return min(costs, key=lambda each: each.seconds)


def _children_seconds() -> float:
    """User and system seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _first_choice(answer: dict[str, Any]) -> str:
    """The first layout of an answer, with its schedule and step."""
    layouts = answer.get("layouts")
    if not layouts:
        return ""
    first = layouts[0]
    return f"{first['layout']}, {first['schedule']}: {first['step_s']:.2f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The planner's first choice, run as it was written: `plan -o`, then `rehearse` and `train`.

    python -m tests.ranks.first_choices [WORDS]

runs all jobs, or those whose name has the words, and prints a table in markdown; the tests run one
of each kind. Widths, GPUs and machines are real; layers are fewer, so that a rank takes seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fivefold.core.plan.plan import Plan, read, resolve
from tests.commands import in_fork

HEAD = """# First choices

The layout that `plan` ranks first, written with `-o` and given to `rehearse` as it is: the first
and the last rank, or all of up to 4. Collectives must be those that were predicted; memory must fit
into the GPU and be at most 5% (or 16 MiB) above the estimate. Jobs of `tiny` models also `train`
for 2 steps on CPU processes: their traffic and states must be as planned, to the byte. Made by
`make verify-all` on {date}.
"""
COLUMNS = (
    "job", "first choice", "ZeRO", "schedule", "recompute", "microbatches",
    "planned GiB", "rehearsed", "trained", "seconds", "",
)  # fmt: skip
PLAN = "plan.toml"
BAND = 0.05  # above the estimate: the difference that `rehearse` reports
SMALL = 16 / 1024  # GiB: of a tiny model, what it has for a moment counts as much as the rest
FEW = 4  # ranks: all are rehearsed
GIB = 2**30


@dataclass(frozen=True)
class Job:
    """A question to the planner."""

    model: str
    gpus: int
    machine: str
    seq: int
    batch: int
    layers: int | None = None  # None: all of the model
    trains: bool = False
    gap: str = ""  # why the estimate is known to be too low; the plan must fit all the same

    def __str__(self) -> str:
        layers = [] if self.layers is None else [f"layers={self.layers}"]
        sizes = [f"seq={self.seq}", f"batch={self.batch}", *layers]
        return " ".join([self.model, f"{self.gpus} x {self.machine}", *sizes])

    @property
    def words(self) -> list[str]:
        words = [self.model, "--gpus", str(self.gpus), "--machine", self.machine]
        words += ["--seq", str(self.seq), "--batch", str(self.batch)]
        return words + ([] if self.layers is None else ["--set", f"layers={self.layers}"])


JOBS = (
    Job("llama-3.2-1b", 8, "h100", 4096, 64),
    Job("llama-3.1-8b", 16, "a100", 8192, 64, layers=8),
    Job("llama-3.1-70b", 64, "h100", 8192, 32, layers=16),
    Job("llama-3.1-405b", 128, "h100", 8192, 32, layers=16),
    Job("llama-2-7b", 4, "a100-40g", 2048, 16, layers=8),
    Job("qwen3-8b", 8, "h200", 32_768, 16, layers=6),
    Job("qwen2.5-72b", 64, "h800", 4096, 64, layers=16),
    Job("gpt3-175b", 32, "a100", 2048, 64, layers=12),
    Job("mixtral-8x7b", 32, "h100", 4096, 64, layers=8),
    Job("deepseek-v3", 64, "gb200", 4096, 128, layers=6),
    Job("deepseek-v3", 256, "h800", 4096, 256, layers=8),
    Job("deepseek-v2-lite", 8, "a100-40g", 4096, 64, layers=6),
    Job("qwen3-30b-a3b", 16, "gb200", 4096, 64, layers=8),
    Job("tiny", 4, "laptop", 64, 16, trains=True),
    Job("tiny-moe", 4, "laptop", 64, 8, trains=True),
    Job("tiny", 2, "h100", 128, 8, trains=True),
)


@dataclass(frozen=True)
class Outcome:
    """The plan as it was read back, what `rehearse` and `train` said, and what is wrong."""

    plan: Plan
    rehearsed: dict[str, Any]
    trained: dict[str, Any] | None
    problems: tuple[str, ...]

    @property
    def planned_gib(self) -> float:
        """Bytes of tensors, as a rehearsal counts them."""
        return self.rehearsed["planned_gib"]["total"]


def run(job: Job, folder: Path) -> Outcome:
    """Plan, rehearse and perhaps train in a folder."""
    found = _said(["plan", *job.words, "-o", PLAN, "--json"], folder)
    plan = resolve(read(folder / PLAN))
    world = plan.layout.world
    ranks = [] if world <= FEW else ["--rank", "0", "--rank", str(world - 1)]
    rehearsed = _said(["rehearse", PLAN, *ranks, "--json"], folder)
    trained = None
    if job.trains:
        words = ["train", PLAN, "--steps", "2", "--out", "run", "--json"]
        trained = _said(words, folder)
    outcome = Outcome(plan, rehearsed, trained, ())
    problems = (*_changed(found["layouts"][0], plan), *wrong(job, outcome))
    return Outcome(plan, rehearsed, trained, problems)


def _said(words: list[str], folder: Path) -> dict[str, Any]:
    """The JSON of a command, which must end with exit code 0."""
    done = in_fork(words, folder)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-500:]}{done.stderr[-1000:]}"
    return json.loads(done.stdout)


def _changed(first: dict[str, Any], plan: Plan) -> Iterator[str]:
    """Keys of the first choice that the file does not say."""
    for name in ("layout", "zero", "schedule", "chunks", "microbatches", "recompute", "context"):
        written = getattr(plan.options, name)
        if first[name] != written:
            yield f"{name} is {written} in the file, chosen was {first[name]}"


def wrong(job: Job, outcome: Outcome) -> Iterator[str]:
    """What is not as planned."""
    rehearsed, trained, plan = outcome.rehearsed, outcome.trained, outcome.plan
    assert plan.machine is not None
    if rehearsed["layout"] != str(plan.layout):
        yield f"rehearsed {rehearsed['layout']}"
    if not (rehearsed["passed"] and rehearsed["traffic"]["match"] and rehearsed["matched"]):
        yield "the rehearsal differs from the plan"
    total, planned = rehearsed["memory_gib"]["total"], outcome.planned_gib
    above = total - planned > max(BAND * planned, SMALL)
    if above and not job.gap:
        yield f"{total:.2f} GiB rehearsed, {planned:.2f} planned"
    if job.gap and not above:
        yield f"the estimate is no longer too low: {job.gap} is no gap"
    beside = sum(rehearsed["planned_gib"].get(name, 0.0) for name in ("context", "nccl"))
    if total + beside > plan.machine.memory / GIB:
        yield f"{total:.2f} GiB do not fit"
    if trained is not None:
        if trained["layout"] != str(plan.layout) or len(trained["steps"]) != 2:
            yield f"trained {trained['layout']} for {len(trained['steps'])} steps"
        if not trained["traffic"]["match"]:
            yield "the traffic of the training differs from the plan"
        if trained["memory"]["ranks_as_planned"] != plan.layout.world:
            yield "the states of the training differ from the plan"


def cells(job: Job, outcome: Outcome) -> list[str]:
    """What the table says about a job."""
    plan, rehearsed = outcome.plan, outcome.rehearsed["memory_gib"]["total"]
    schedule = f"{plan.options.schedule}, {plan.layout.chunks} chunks" if plan.layout.pp > 1 else ""
    words = [str(job), f"`{plan.layout}`", str(plan.layout.zero), schedule, str(plan.recompute)]
    sizes = [f"{outcome.planned_gib:.2f}", f"{rehearsed:.2f}{f' ({job.gap})' if job.gap else ''}"]
    return [*words, str(plan.batch.microbatches), *sizes, "2 steps" if job.trains else ""]


def main(words: str = "") -> int:
    print(HEAD.format(date=date.today()))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    jobs = [job for job in JOBS if words in str(job)]
    passed = 0
    for job in jobs:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(job, Path(folder))
        passed += not outcome.problems
        result = f"FAIL: {'; '.join(outcome.problems)}" if outcome.problems else "pass"
        seconds = f"{time.perf_counter() - began:.0f}"
        print(f"| {' | '.join([*cells(job, outcome), seconds, result])} |", flush=True)
    print(f"\n{passed} of {len(jobs)} first choices run as written")
    return 0 if passed == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

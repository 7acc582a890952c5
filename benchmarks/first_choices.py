"""The first choice of `fivefold plan` beside the recipe that others published for the same job.

Prints docs/first-choices.md. Both layouts are estimated by the same functions, for the same machine
and batch, under fivefold's own software in bf16, so that their difference is one of layouts. What
others measured is shown beside it; their software was another.

    python -m benchmarks.first_choices > docs/first-choices.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.planner.error_bars import accuracy
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.planning import PlanRequest, PlanResult, best_plans, plan_request
from fivefold.render import duration, gib
from fivefold.render.plan import loses, name_of

NEMO = "NVIDIA DGX Cloud benchmarks 25.02 (NeMo)"
BRIDGE = "Megatron-Bridge 25.11"
LLAMA3 = "Llama 3, arXiv 2407.21783, table 4"


@dataclass(frozen=True)
class Recipe:
    """A published layout: the keys of a plan, its source, and what is not as published."""

    layout: str
    source: str
    keys: dict[str, Any]
    measured: str = ""
    changed: str = ""


@dataclass(frozen=True)
class Job:
    """One question to the planner; without a batch, its default."""

    title: str
    model: str
    machine: str
    gpus: int
    recipe: Recipe | None
    seq: int | None = None
    batch: int | None = None

    @property
    def command(self) -> str:
        words = ["fivefold plan", self.model, f"--machine {self.machine}", f"--gpus {self.gpus}"]
        words += [] if self.seq is None else [f"--seq {self.seq}"]
        words += [] if self.batch is None else [f"--batch {self.batch}"]
        return " ".join(words)

    @property
    def request(self) -> PlanRequest:
        named = {"model": self.model, "machine": self.machine, "gpus": self.gpus}
        options = PlanOptions(**named, seq=self.seq, batch=self.batch)
        where = machine.load(self.machine)
        return plan_request(options, where, {}, precision="bf16", headroom=0.05)


def interleaved(chunks: int, **keys: Any) -> dict[str, Any]:
    return {"zero": 1, "schedule": "interleaved", "chunks": chunks, **keys}


def nemo_70b(gpus: int, step: str) -> Job:
    layout = f"dp={gpus // 32} tp=4 pp=4 cp=2"
    recipe = Recipe(layout, NEMO, interleaved(5), step)
    return Job(
        f"70B on {gpus:,} H100", "llama-3.1-70b", "h100", gpus, recipe, seq=8192, batch=2 * gpus
    )


def llama_405b(gpus: int, measured: str = "", changed: str = "") -> Job:
    layout = f"dp={gpus // 128} tp=8 pp=16"
    assumed = (
        "a microbatch of one row and 4 chunks are assumed, and ZeRO-1: the source shards gradients "
        "too, but fivefold would then reduce them for every microbatch"
    )
    recipe = Recipe(
        layout, LLAMA3, interleaved(4), measured, f"{changed}; {assumed}" if changed else assumed
    )
    title = f"405B on {gpus:,} H100"
    return Job(title, "llama-3.1-405b", "h100", gpus, recipe, seq=8192, batch=2048)


JOBS = (
    Job(
        "8B on 8 H100", "llama-3.1-8b", "h100", 8,
        Recipe("dp=4 cp=2", NEMO, {"zero": 1}, "12.78 s"), seq=8192, batch=128,
    ),
    Job(
        "8B on 64 H100", "llama-3.1-8b", "h100", 64,
        Recipe("dp=32 cp=2", NEMO, {"zero": 1}, "13.00 s"), seq=8192, batch=1024,
    ),
    nemo_70b(64, "14.61 s"),
    nemo_70b(256, "14.72 s"),
    nemo_70b(1024, "14.86 s"),
    Job(
        "405B on 1,024 H100", "llama-3.1-405b", "h100", 1024,
        Recipe(
            "dp=8 tp=8 pp=8 cp=2", BRIDGE, interleaved(8), "14.03 s in fp8",
            "measured in fp8, estimated in bf16",
        ),
        seq=8192, batch=512,
    ),
    llama_405b(2048, changed="published for 8,192 and 16,384 GPUs"),
    llama_405b(4096, changed="published for 8,192 and 16,384 GPUs"),
    llama_405b(8192, "430 TFLOP/s a GPU"),
    llama_405b(16_384, "400 TFLOP/s a GPU"),
    Job(
        "DeepSeek-V3 on 256 H800", "deepseek-v3", "h800", 256,
        Recipe(
            "dp=16 pp=16 ep=8", BRIDGE, {"zero": 1, "schedule": "1f1b", "recompute": "selective"},
            "", "published for 256 B200 in mxfp8",
        ),
        seq=4096, batch=2048,
    ),
    Job(
        "DeepSeek-V3 on 2,048 H800", "deepseek-v3", "h800", 2048,
        Recipe(
            "dp=128 pp=16 ep=64", "DeepSeek-V3, arXiv 2412.19437, section 3",
            {"zero": 1, "schedule": "dualpipe", "recompute": "selective"}, "19.9 s in fp8",
            "trained in fp8, estimated in bf16; microbatch of one row is assumed",
        ),
        seq=4096, batch=15_360,
    ),
    Job(
        "Mixtral 8x22B on 64 H100", "mixtral-8x22b", "h100", 64,
        Recipe(
            "dp=4 tp=2 pp=4 cp=2 ep=8", "NeMo 2 recipe mixtral_8x22b", interleaved(14), "",
            "published for 128 GPUs",
        ),
        seq=4096, batch=512,
    ),
    Job(
        "Qwen3-235B-A22B on 128 GB200", "qwen3-235b-a22b", "gb200", 128,
        Recipe(
            "dp=64 tp=2 ep=64", "Megatron-Bridge 25.09", {"zero": 1}, "",
            "published for 64 GPUs in fp8 and mxfp8, with half the batch",
        ),
        seq=4096, batch=2048,
    ),
    Job(
        "8B at 1M tokens on 256 H100", "llama-3.1-8b", "h100", 256,
        Recipe(
            "tp=8 cp=32", "NeMo 24.03 long-sequence performance", {"zero": 1}, "",
            "published for Llama-2-7B in fp8 on four such replicas; batch and recomputation are "
            "assumed",
        ),
        seq=1 << 20, batch=4,
    ),
    Job(
        "GPT-1T on 3,072 A100", "gpt-1t", "a100", 3072,
        Recipe(
            "dp=6 tp=8 pp=64", "Narayanan and others, SC21, table 1",
            {"zero": 0, "schedule": "1f1b", "recompute": "full", "sp": False}, "102.6 s",
        ),
        seq=2048, batch=3072,
    ),
    Job("tiny on a laptop", "tiny", "laptop", 8, None),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The first choice of a job, and the estimate of its recipe."""

    job: Job

    @cached_property
    def found(self) -> PlanResult:
        return best_plans(self.job.request, 1)

    @property
    def first(self) -> Estimate:
        return self.found.plans[0]

    @cached_property
    def recipe(self) -> Estimate | None:
        """The published layout on the same machine, at its least recomputation that fits, if the
        recipe does not say how much."""
        asked, recipe = self.job.request, self.job.recipe
        if recipe is None:
            return None
        options = replace(
            asked.options,
            layout=recipe.layout,
            batch=asked.space.batch,
            **{"schedule": "1f1b", "microbatch_size": 1, "recompute": "none", **recipe.keys},
        )
        said = [options.recompute] if "recompute" in recipe.keys else ["none", "selective", "full"]
        for kind in said:
            found = estimate_plan(resolve(replace(options, recompute=kind)), asked.setting)
            if found.verdict != "does not fit":
                return found
        return found

    @property
    def is_same(self) -> bool:
        """Whether the recipe has the degrees of the first choice."""
        recipe = self.recipe
        return recipe is not None and str(recipe.plan.layout) == str(self.first.plan.layout)

    @property
    def why(self) -> str:
        """Why the first choice is not worse than the recipe."""
        recipe, first = self.recipe, self.first
        if recipe is None:
            return "no recipe was published"
        if recipe.verdict == "does not fit":
            limit = first.setting.machine.memory
            need = f"{gib(recipe.total)} of {gib(limit)}"
            return f"the recipe does not fit under fivefold, {need}: {self._largest(recipe)}"
        words = loses(recipe, first, self.found.fastest.step)
        if self.is_same:
            return f"the same degrees; the recipe is {words}"
        return f"the recipe is {words}"

    @staticmethod
    def _largest(one: Estimate) -> str:
        largest = sorted(one.memory.items(), key=lambda pair: -pair[1])[:3]
        return ", ".join(f"{name} {gib(size)}" for name, size in largest)

    @property
    def is_worse(self) -> bool:
        """Whether the recipe fits and is faster by more than estimates can tell; one that leaves
        less memory free than a search does is no choice of it."""
        return self.is_slower and self.recipe is not None and self.recipe.verdict == "fits"

    @property
    def is_slower(self) -> bool:
        """Whether the recipe is faster by more than estimates can tell, with whatever is left of
        the memory."""
        recipe = self.recipe
        if recipe is None or recipe.verdict == "does not fit":
            return False
        return not accuracy().within(self.first.step, recipe.step)

    def cells(self) -> list[str]:
        """The row of the table."""
        first, recipe, job = self.first, self.recipe, self.job
        mine = [f"`{name_of(first)}`", duration(first.step), f"{first.total / 2**30:.1f}"]
        if recipe is None or job.recipe is None:
            return [job.title, *mine, "–", "–", "–", "–"]
        much = "" if recipe.verdict == "fits" else f", {recipe.verdict}"
        size = f"{recipe.total / 2**30:.1f}{much}"
        theirs = [f"`{name_of(recipe)}`", duration(recipe.step), size]
        return [job.title, *mine, *theirs, job.recipe.measured or "–"]

    def section(self) -> Iterator[str]:
        """What is said about one job below the table."""
        job, first = self.job, self.first
        seq, batch = first.plan.batch.seq, first.plan.batch.sequences
        sizes = f"{batch:,} sequences of {seq:,} tokens"
        yield f"**{job.title}**, {sizes} (`{job.command}`): {self.why}."
        simpler = self.found.simpler
        if first.step > self.found.fastest.step:
            fastest = f"{name_of(self.found.fastest)}, {duration(self.found.fastest.step)}"
            yield f"The fastest is {fastest}; the first choice is equal and simpler: {simpler}."
        if self.found.warnings:
            yield f"{'; '.join(self.found.warnings)}."
        if job.recipe is not None:
            changed = f"; {job.recipe.changed}" if job.recipe.changed else ""
            yield f"Recipe: {job.recipe.source}{changed}."


HEAD = """\
# First choices beside published recipes

Made by `python -m benchmarks.first_choices` on {date}. For each job: the first choice of
`fivefold plan`, and the layout that others published for the job or one like it. Both were
estimated for the same machine, batch and sequence length, under fivefold's own software in bf16:
the two steps differ by the layouts alone. *Measured* is what the source reports for its own
software. Where a source does not give the recomputation, the least that fits is taken; a microbatch
is one sequence.

Steps of layouts of one job that differ by less than {equal:.1%} are equal as far as estimates can
tell ([how that was measured](planner.md#equal-layouts)). Of equal layouts the simplest is the first
choice. An estimated step is within {time:.0%} of the measured one for half of all published runs,
within {p90:.0%} for nine in ten.
"""
COLUMNS = ("job", "first choice", "step", "GiB", "published", "step", "GiB", "measured")


def main(words: str = "") -> int:
    off = accuracy()
    print(HEAD.format(date=date.today(), equal=off.equal, time=off.time, p90=off.time_p90))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = [Comparison(job) for job in JOBS if words in job.title]
    for one in found:
        print(f"| {' | '.join(one.cells())} |", flush=True)
    print("\n## Why the first choice is not worse\n")
    for one in found:
        print("- " + "\n  ".join(one.section()))
    worse = [one.job.title for one in found if one.is_worse]
    same = sum(one.is_same for one in found)
    print(f"\n{same} of {len(found)} first choices have the published degrees.")
    print(f"{len(worse)} are slower than the recipe by more than estimates can tell.")
    tight = [one.job.title for one in found if one.is_slower and not one.is_worse]
    if tight:
        print(f"Slower than a recipe that is too tight for a search: {', '.join(tight)}.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Rehearsed memory of twelve jobs under every recomputation: more of it never takes more.

    python -m tests.ranks.recomputed [WORDS]

rehearses all jobs, or those whose name has the words, and prints a table in markdown; the tests
rehearse one. Widths are those of the models; layers are fewer where a rank would have many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from fivefold.core.model.recompute import MODULES
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.rehearse.rank import RehearsedRank, rehearse_rank

HEAD = """# Rehearsed recomputation

Peak memory of one rank in GiB, rehearsed on tensors without values, compiled, bf16 with float32
masters, AdamW. `all modules` is `norm+act+attention+mlp+experts`. A job passes if
full ≤ selective ≤ norm, act ≤ none and all modules ≤ each module ≤ none, if full keeps no more
than all modules after its first forward, and if a module that the rank does not have changes
nothing. The peak of full can be above that of all modules: in backward it has the activations of a
whole block, they only those of one module. Made by `make verify-all` on {date}.
"""
ALL = "+".join(MODULES)
KINDS = ("none", *MODULES, "selective", ALL, "full")
GIB = 2**30
# Which kind takes no more than which other.
ORDER = (
    *((each, "none") for each in KINDS[1:]),
    *((ALL, each) for each in (*MODULES, "selective")),
    *(("selective", each) for each in ("norm", "act")),
    ("full", "selective"),
)
SHORT, STAGES = {"layers": "6"}, {"layers": "32"}  # two for each of 16 stages


@dataclass(frozen=True)
class Job:
    """One rank of a job."""

    model: str
    layout: str
    rank: int = 0
    said: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.said.items() if name != "set"]
        words += [f"{name}={value}" for name, value in self.said.get("set", {}).items()]
        return " ".join([f"{self.model} `{self.layout}`", *words])

    def plan(self, recompute: str) -> Plan:
        count = {} if "pp=" in self.layout else {"microbatches": 1}
        words = {"layout": self.layout, "recompute": recompute, "ep_nodes": 1, **count, **self.said}
        return resolve(PlanOptions(self.model, **words))

    def rehearse(self) -> dict[str, RehearsedRank]:
        """The rank under every kind of recomputation."""
        return {kind: rehearse_rank(self.plan(kind), self.rank, {}) for kind in KINDS}

    def missing(self) -> list[str]:
        """Modules that no layer of this rank has."""
        plan = self.plan("none")
        stages = plan.schedule.placement.stages_of(plan.layout.coord(self.rank).pp)
        routed = {plan.shape.is_moe_layer(i) for stage in stages for i in plan.stages[stage]}
        return [name for name, has in (("mlp", False), ("experts", True)) if has not in routed]


JOBS = (
    Job("llama-3.2-1b", "dp=8", 0, {"seq": 4096, "zero": 1, "set": SHORT}),
    Job("llama-3.1-8b", "dp=8", 0, {"seq": 8192, "zero": 3, "set": SHORT}),
    Job("llama-3.1-70b", "dp=4 tp=8 pp=16", 0, {"seq": 8192, "set": STAGES}),
    Job("llama-3.1-405b", "tp=8 cp=2 pp=16", 16, {"seq": 16_384, "set": STAGES}),
    Job("qwen3-8b", "dp=2 tp=4", 0, {"seq": 4096, "zero": 2, "microbatches": 2, "set": SHORT}),
    Job("qwen2.5-14b", "dp=2 cp=4", 0, {"seq": 32_768, "context": "ulysses", "set": SHORT}),
    Job("gpt2-xl", "dp=8", 0, {"seq": 1024, "zero": 0, "microbatch_size": 4, "set": SHORT}),
    Job("gpt3-175b", "tp=8 pp=16", 8, {"seq": 2048, "schedule": "zb-h1", "set": STAGES}),
    Job("mixtral-8x7b", "dp=8 ep=8", 0, {"seq": 4096, "zero": 1, "set": SHORT}),
    Job("qwen3-30b-a3b", "dp=4 tp=4 ep=16", 0, {"seq": 4096, "set": SHORT}),
    Job("deepseek-v3", "dp=64 pp=8 ep=64", 64, {"seq": 4096, "zero": 1, "set": {"layers": "16"}}),
    Job("deepseek-v2-lite", "dp=2 cp=4 ep=8", 0, {"seq": 16_384, "zero": 1, "set": SHORT}),
)


def kept(run: RehearsedRank) -> int:
    """The bytes after the first forward: later, gradients may be more than what is saved."""
    return run.levels[0].bytes


def disorder(job: Job, runs: Mapping[str, RehearsedRank]) -> Iterator[str]:
    """Every rule that is broken."""
    peaks = {kind: run.peak for kind, run in runs.items()}
    for less, more in ORDER:
        if peaks[less] > peaks[more]:
            yield f"{less} takes {peaks[less]:,} bytes, more than {more} with {peaks[more]:,}"
    if kept(runs["full"]) > kept(runs[ALL]):
        yield f"full keeps {kept(runs['full']):,} bytes, all modules {kept(runs[ALL]):,}"
    for name in job.missing():
        if peaks[name] != peaks["none"]:
            yield f"the rank has no {name}, and recomputing it takes {peaks[name]:,} bytes"


def main(words: str = "") -> int:
    print(HEAD.format(date=date.today()))
    columns = ["job", "rank", *("all modules" if kind == ALL else kind for kind in KINDS), ""]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    jobs = [job for job in JOBS if words in str(job)]
    passed = 0
    for job in jobs:
        runs = job.rehearse()
        broken = list(disorder(job, runs))
        passed += not broken
        sizes = [f"{runs[kind].peak / GIB:.2f}" for kind in KINDS]
        result = f"FAIL: {'; '.join(broken)}" if broken else "pass"
        print(f"| {' | '.join([str(job), str(job.rank), *sizes, result])} |", flush=True)
    print(f"\n{passed} of {len(jobs)} jobs pass")
    return 0 if passed == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Every dimension over NCCL: ranks that share one GPU, against one process on it.

    python -m tests.gpu.nccl [PART | PART:WORDS ...]

runs the named parts, or all, and prints a table in markdown; with words, the cases that have them.
Ranks share a GPU only with NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1. Each case has new
processes: torch 2.11 crashes when it splits a group in a process that has had another group of all
ranks before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from fivefold.commands.verify import runnable
from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.launch.backend import NcclLibrary
from fivefold.launch.processes import Pool
from fivefold.verify.compare import Dtype
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge
from tests.gpu.disturbed import run_careless, run_disturbed, run_hasty

HEAD = """# Verified over NCCL

2, 4 and 8 ranks that share one H200, against one process on it: {nccl}, torch {torch}, {date}.
`tiny` and `tiny-moe` with few layers, 2 steps of AdamW (`hung`: 1). Times mean nothing here: ranks
on one GPU take turns.

| part | case | ranks | type | loss | gradients | norm | weights | traffic | seconds | |
|---|---|---|---|---|---|---|---|---|---|---|"""
MOST_RANKS = 8
PATIENCE = 60.0  # seconds without a message of any rank: it hangs
PUBLISHED = 1e-10  # what float64 must reach


@dataclass(frozen=True)
class Case:
    """One layout to prove."""

    layout: str
    words: dict[str, Any] = field(default_factory=dict)
    dtype: Dtype = "float64"
    seed: int = 0
    steps: int = 2
    run: Callable[..., VerifiedRank] = run_rank
    compiled: bool = False
    fails: bool = False  # a planted mistake

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.words.items() if name != "set"]
        set_ = [f"{name}={value}" for name, value in self.words.get("set", {}).items()]
        seed = [f"seed {self.seed}"] if self.seed else []
        planted = ["with a wait left out"] if self.fails else []
        return " ".join([self.layout, *words, *set_, *seed, *planted])

    def plan(self) -> Plan:
        words = dict(self.words)
        model, sizes = words.pop("model", "tiny"), {"layers": "4"} | words.pop("set", {})
        options = PlanOptions(model, layout=self.layout, set=sizes, **words)
        return runnable(options)  # fp8 in blocks needs a wider model


def case(layout: str, **words: Any) -> Case:
    return Case(layout, words)


def experts(layout: str, **words: Any) -> Case:
    return case(layout, model="tiny-moe", **words)


SYNCHRONOUS = [family for family in FAMILIES if not family.asynchronous]
HUNG = (  # what locked before messages had their order
    case("pp=2"),
    case("pp=4", schedule="dualpipe", microbatches=8),
    case("dp=2 pp=2", schedule="interleaved", zero=2),
    experts("dp=2 tp=2 pp=2 ep=2", set={"layers": "2"}),
)


def schedules() -> Iterator[Case]:
    """Every synchronous schedule, alone on 2 and 4 ranks."""
    for family in SYNCHRONOUS:
        for ranks in (2, 4):
            chunks = family.default_chunks
            numbers = range(ranks, 99)
            microbatches = next(m for m in numbers if not family.problems(ranks, m, chunks))
            layers = {"layers": str(2 * ranks)}
            yield case(f"pp={ranks}", schedule=family.name, microbatches=microbatches, set=layers)


def data() -> Iterator[Case]:
    for zero in range(4):
        yield case("dp=2", zero=zero)
        yield case("dp=2x2", zero=zero, microbatches=2)
    yield case("dp=8", zero=3)
    yield case("dp=4 tp=2", zero=2)
    yield case("dp=2 pp=2", zero=3, gather="microbatch")


def contexts() -> Iterator[Case]:
    for kind in ("zigzag", "ring", "allgather", "ulysses", "hybrid"):
        yield case("cp=4", context=kind)
        yield case("cp=2 tp=2" if kind != "hybrid" else "cp=4 tp=2", context=kind, packed=True)


def tensor() -> Iterator[Case]:
    """Collectives beside matmuls: not at all, in backward, and in chunks."""
    for overlap in (0, 1, 2, 4):
        yield case("tp=2", tp_overlap=overlap, microbatch_size=2, microbatches=2)
    yield case("tp=4", tp_overlap=2, tp_keep="gathered")
    yield case("tp=2", tp_overlap=2, sp=False)
    yield case("tp=2 cp=2", tp_overlap=2, recompute="full")
    yield case("tp=2 pp=2", tp_overlap=2, schedule="zb-h1", microbatch_size=2)
    yield case("tp=2 pp=2", tp_overlap=2, schedule="dualpipe", microbatches=4)
    yield experts("dp=2 tp=2 ep=2", tp_overlap=2)
    for overlap in (1, 2):
        words = {"tp_overlap": overlap, "microbatch_size": 2}
        yield replace(case("tp=2", **words), run=run_disturbed, seed=overlap)
        yield replace(case("tp=2", **words), run=run_hasty, seed=overlap, fails=True)


def expert() -> Iterator[Case]:
    yield experts("dp=2 ep=2")
    yield experts("dp=4 ep=4", zero=3)
    yield experts("dp=4 ep=4", ep_nodes=2)
    yield experts("dp=8 ep=8", ep_nodes=4, zero=1)
    yield experts("tp=2 ep=2")
    yield experts("dp=2 tp=2 ep=2 etp=2")
    yield experts("dp=2 cp=2 ep=4", balance="aux+z")
    yield experts("dp=2 ep=2", balance="capacity-pad:1.5")
    yield experts("dp=2 pp=2 ep=2", schedule="dualpipe-v", ep_nodes=2)


def together() -> Iterator[Case]:
    """All dimensions that 8 ranks have room for, and what else is easily wrong."""
    yield experts("dp=2 tp=2 cp=2 ep=4")
    yield experts("tp=2 pp=2 cp=2 ep=2", schedule="zb-h1")
    yield experts("dp=2 pp=2 cp=2 ep=4", schedule="interleaved")
    yield experts("dp=2 pp=2 tp=2 ep=4", schedule="dualpipe", microbatches=4)
    yield experts("dp=2 pp=2 tp=2 ep=2", schedule="dualpipe-v", zero=2)
    yield experts("dp=2 tp=2 pp=2 ep=2", schedule="zb-v", recompute="selective")
    yield experts("dp=2 pp=4 ep=2", schedule="v-min", set={"layers": "8"})
    yield experts("dp=2 pp=4 ep=2", schedule="v-half", set={"layers": "8"})
    yield experts("dp=2 pp=2 cp=2 ep=2", schedule="bfs")
    yield case("dp=2 tp=2 pp=2 order=tp-cp-pp-dp")
    for layout in ("pp=2", "tp=2 pp=2", "pp=4"):
        yield case(layout, set={"tied": "true"})
    yield case("pp=2", schedule="zb-v", set={"tied": "true"})
    for layout in ("pp=2", "tp=2 pp=2", "dp=2 ep=2"):
        yield experts(layout, set={"mtp": "1"})
    for recompute in ("selective", "full", "full:1"):
        yield case("tp=2 pp=2", recompute=recompute)
        yield experts("tp=2 cp=2 ep=2", recompute=recompute)
    yield case("tp=8", set={"kv_heads": "4"})
    yield case("tp=2 pp=2", sp=False)


def narrow() -> Iterator[Case]:
    """In bf16; experts are left out, because rounding chooses other ones."""
    for layout, words in (
        ("tp=2", {}),
        ("tp=4 dp=2", {}),
        ("pp=2", {}),
        ("pp=4", {"schedule": "zb-v", "set": {"layers": "8"}}),
        ("pp=4", {"schedule": "dualpipe", "microbatches": 8}),
        ("dp=2", {"zero": 3}),
        ("dp=4", {"zero": 2}),
        ("cp=2", {}),
        ("cp=4", {"context": "ulysses"}),
        ("dp=2 tp=2 pp=2", {}),
    ):
        yield replace(case(layout, **words), dtype="bfloat16")


def hung() -> Iterator[Case]:
    """Ten seeds of each, for one step: they hung in the first."""
    for seed in range(1, 11):
        yield from (replace(each, seed=seed, steps=1) for each in HUNG)


def late() -> Iterator[Case]:
    """Collectives that end late and memory that is overwritten at once; one with a mistake."""
    for layout, words in (
        ("tp=2", {}),
        ("pp=2", {}),
        ("pp=4", {"schedule": "zb-v", "set": {"layers": "8"}}),
        ("pp=4", {"schedule": "dualpipe", "microbatches": 8}),
        ("dp=2", {"zero": 3}),
        ("dp=2x2", {"zero": 2, "microbatches": 2}),
        ("cp=4", {}),
        ("cp=2 tp=2", {"context": "ulysses", "recompute": "selective"}),
        ("dp=2 ep=2", {"model": "tiny-moe"}),
        ("dp=2 tp=2 pp=2 ep=2", {"model": "tiny-moe"}),
    ):
        yield replace(case(layout, **words), run=run_disturbed, seed=7)
    yield replace(case("tp=2"), run=run_careless, seed=7, fails=True)


def compiled() -> Iterator[Case]:
    """Kernels as the compiler makes them, in every dimension."""
    for layout, words in (
        ("tp=2", {}),
        ("tp=2", {"recompute": "selective", "packed": True}),
        ("tp=4", {"recompute": "norm+attention"}),
        ("dp=2", {"zero": 3, "recompute": "full"}),
        ("pp=2", {}),
        ("pp=2", {"schedule": "zb-h1", "recompute": "selective"}),
        ("pp=4", {"schedule": "zb-v", "set": {"layers": "8"}}),
        ("pp=2", {"schedule": "dualpipe", "microbatches": 4}),
        ("cp=2", {"recompute": "mlp"}),
        ("cp=4", {"context": "ulysses"}),
        ("dp=2 ep=2", {"model": "tiny-moe", "balance": "aux"}),
        ("tp=2 cp=2 ep=2", {"model": "tiny-moe", "recompute": "experts"}),
        ("dp=2 pp=2 tp=2 ep=4", {"model": "tiny-moe", "schedule": "dualpipe", "microbatches": 4}),
        ("dp=2 tp=2 pp=2 ep=2", {"model": "tiny-moe", "schedule": "zb-v"}),
        ("dp=2 tp=2 cp=2 ep=4", {"model": "tiny-moe", "recompute": "selective"}),
    ):
        yield replace(case(layout, **words), compiled=True)


def dropout() -> Iterator[Case]:
    """Masks of features and of pairs, drawn on the GPU; the last two by compiled kernels."""
    both = {"dropout": "0.2", "attention_dropout": "0.1"}
    yield case("tp=2 cp=2", set=both)
    yield case("dp=2 pp=2", schedule="zb-h1", recompute="full", set=both)
    yield experts("dp=2 tp=2 cp=2 ep=4", set=both)
    yield replace(case("tp=2", recompute="selective", set={"dropout": "0.2"}), compiled=True)
    yield replace(experts("dp=2 ep=2", set={"dropout": "0.2"}), compiled=True)


def fp8() -> Iterator[Case]:
    """Linears and experts in fp8, emulated in float64."""
    for scaling, layout, words in (
        ("tensorwise", "tp=2", {"recompute": "selective"}),
        ("tensorwise", "tp=2", {"tp_overlap": 2, "microbatch_size": 2}),
        ("tensorwise", "dp=2", {"zero": 3, "gather": "microbatch", "recompute": "full"}),
        ("tensorwise", "dp=2x2", {"zero": 2}),
        ("tensorwise", "tp=2 cp=2", {}),
        ("tensorwise", "pp=4", {"schedule": "zb-v", "set": {"layers": "8"}}),
        ("tensorwise", "dp=2 tp=2 pp=2", {"schedule": "zb-h1", "zero": 1, "fp8_skip": "1+1"}),
        ("tensorwise", "dp=2 ep=2", {"model": "tiny-moe", "zero": 3}),
        ("tensorwise", "dp=4 tp=2 ep=4 etp=2", {"model": "tiny-moe", "ep_nodes": 2}),
        ("tensorwise", "dp=2 pp=2 tp=2 ep=2", {"model": "tiny-moe", "schedule": "dualpipe"}),
        ("blockwise", "tp=2", {"set": {"kv_heads": "1"}}),
        ("blockwise", "dp=2 tp=2", {"zero": 3, "fp8_wgrad": "bf16"}),
        ("blockwise", "cp=2", {"context": "ring"}),
        ("blockwise", "dp=2 pp=2 ep=2", {"model": "tiny-moe", "zero": 3}),
    ):
        yield case(layout, precision="fp8", fp8=scaling, **words)


PARTS = {
    "schedules": schedules,
    "data": data,
    "tensor": tensor,
    "contexts": contexts,
    "experts": expert,
    "together": together,
    "bf16": narrow,
    "hung": hung,
    "late": late,
    "compiled": compiled,
    "dropout": dropout,
    "fp8": fp8,
}


@dataclass
class Prover:
    """Runs cases and prints a line for each."""

    passed: int = 0
    failed: int = 0

    def prove(self, part: str, case: Case) -> None:
        start, plan = time.perf_counter(), case.plan()
        try:
            patience = PATIENCE * (4 if case.compiled else 1)
            with Pool(plan.layout.world + 1, patience) as pool:
                cells, good = self._cells(case, self._verdict(pool, plan, case))
        except RankLost as lost:
            cells, good = ["", "", "", "", "", f"FAIL: {' '.join(str(lost).split())[:300]}"], False
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        *numbers, result = cells
        seconds = f"{time.perf_counter() - start:.1f}"
        row = [part, case, plan.layout.world, case.dtype, *numbers, seconds, result]
        print(f"| {' | '.join(map(str, row))} |", flush=True)

    def _verdict(self, pool: Pool, plan: Plan, case: Case) -> VerifyVerdict:
        settings = VerifySettings(
            dtype=case.dtype,
            seed=case.seed,
            steps=case.steps,
            device="cuda",
            backend="nccl",
            compiled=case.compiled,
        )
        seeds = () if case.run is run_rank else (case.seed,)
        ranks = [(case.run, (plan, settings, *seeds))] * plan.layout.world
        *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
        return judge(plan, settings, runs, truths)

    def _cells(self, case: Case, verdict: VerifyVerdict) -> tuple[list[str], bool]:
        exact = case.dtype != "float64" or max(verdict.errors.values()) <= PUBLISHED
        exact = exact and not verdict.flips
        good = verdict.passed and exact
        errors = [verdict.errors[f"{name}_err"] for name in ("loss", "grad", "norm", "weight")]
        traffic = "equal" if verdict.traffic_match else "differs"
        result = "pass" if good else f"FAIL at {verdict.diverges_at}"
        if case.fails:
            good, result = not good, "PASS: the mistake was not found" if good else "found"
        return [*(f"{each:.0e}" for each in errors), traffic, result], good


def main(names: Sequence[str]) -> int:
    import torch

    nccl = NcclLibrary.current()
    nccl.require(MOST_RANKS, 1)
    print(HEAD.format(nccl=nccl, torch=torch.__version__, date=date.today()), flush=True)
    most = float(os.environ.get("FIVEFOLD_SECONDS", "inf"))
    prover, began, left = Prover(), time.perf_counter(), 0
    for name in names or PARTS:
        part, _, words = name.partition(":")
        for each in (each for each in PARTS[part]() if words in str(each)):
            if time.perf_counter() - began > most:
                left += 1
            else:
                prover.prove(part, each)
    over = f", {left} not run: the time was over" if left else ""
    print(f"\n{prover.passed} of {prover.passed + prover.failed} cases pass{over}")
    return 1 if prover.failed or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

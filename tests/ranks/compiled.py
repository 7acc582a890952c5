"""Compiled ranks against one process that is not: every dimension, split backward and recomputed
module, and every kind of model.

    python -m tests.ranks.compiled [WORDS]

runs all cases, or those whose name has the words, and prints a table in markdown; the tests run
one. Ranks are kept over all cases, and share torch's cache of kernels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch._dynamo
import torch._dynamo.utils as dynamo

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.compare import Dtype
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge
from tests.ranks.table import PUBLISHED, Table

HEAD = """# Verified compiled

Ranks whose kernels are compiled (`verify --compile`), against one process whose kernels are not, on
CPUs: every dimension, pipelines with split backward, every module of recomputation, packed rows,
every ZeRO stage, and models with experts, latent attention, a window, tied embeddings and
multi-token prediction. `tiny` and `tiny-moe` with 2 layers, or one for each stage; 2 steps of
AdamW. float32 is held to tolerances that are measured, float64 to 1e-10 as well. No graph has a
break. Made by `make verify-all` on {date}.
"""
COLUMNS = ("layout", "schedule", "ZeRO", "recompute", "model and rows", "type")
MOST_RANKS = 8
PATIENCE = 600.0  # seconds without a message: compiling sends none
LATENT = {
    **{"head_dim": "6", "kv_heads": "8", "mla.kv_rank": "12", "mla.nope_dim": "2"},
    **{"mla.rope_dim": "4", "mla.value_dim": "3"},
}
LEARNED = {"positions": "learned", "norm": "layer", "norm_bias": "true", "max_seq": "64"}
CHOICE = {"moe.score": "sigmoid", "moe.bias": "true", "moe.groups": "2", "moe.groups_kept": "1"}
MODELS: dict[str, dict[str, str]] = {
    "tiny": {},
    "biased, qk-norm": {"qkv_bias": "true", "mlp_bias": "true", "qk_norm": "head"},
    "one KV head": {"kv_heads": "1"},
    "window": {"window": "7"},
    "tied": {"tied": "true"},
    "tied, odd vocab": {"tied": "true", "vocab": "251"},
    "learned, layer norm": LEARNED,
    "latent": LATENT,
    "predicts 2 more": {"mtp": "2"},
    "experts": {},
    "experts by groups": CHOICE,
    "experts, latent, predicts 1 more": LATENT | CHOICE | {"mtp": "1"},
}
MOE, GROUPS, DEEPSEEK = "experts", "experts by groups", "experts, latent, predicts 1 more"
STAGES = {"zb-v": 2, "dualpipe-v": 2, "interleaved": 2}  # on each rank

# What is said of a case beside its layout: a model of MODELS, options of a plan, `dtype`.
SAID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp=2", {}),
    ("tp=2", {"recompute": "norm", "packed": True}),
    ("tp=2", {"recompute": "act", "model": "biased, qk-norm"}),
    ("tp=2", {"recompute": "attention", "model": "one KV head"}),
    ("tp=2", {"recompute": "mlp", "model": "tied, odd vocab"}),
    ("tp=2", {"recompute": "norm+attention", "tp_keep": "gathered"}),
    ("tp=2", {"recompute": "full", "dtype": "float32"}),
    ("tp=4", {"recompute": "selective", "sp": False}),
    ("tp=2", {"model": "learned, layer norm"}),
    ("tp=2", {"recompute": "attention", "model": "latent"}),
    ("dp=2", {"zero": 0}),
    ("dp=2", {"zero": 1, "recompute": "selective", "packed": True}),
    ("dp=2", {"zero": 2, "recompute": "act", "microbatches": 2}),
    ("dp=2", {"zero": 3, "recompute": "full", "dtype": "float32"}),
    ("dp=2x2", {"zero": 3, "model": "predicts 2 more"}),
    ("cp=2", {"packed": True}),
    ("cp=2", {"context": "ring", "recompute": "mlp"}),
    ("cp=2", {"context": "allgather", "recompute": "attention", "model": "latent"}),
    ("cp=2", {"context": "ulysses", "recompute": "norm", "packed": True, "dtype": "float32"}),
    ("cp=4", {"context": "hybrid", "recompute": "selective"}),
    ("cp=2", {"model": "window", "packed": True, "recompute": "full"}),
    ("pp=2", {"recompute": "selective", "model": "tied"}),
    ("pp=2", {"schedule": "zb-h1"}),
    ("pp=2", {"schedule": "zb-h1", "recompute": "norm", "packed": True}),
    ("pp=2", {"schedule": "zb-h1", "recompute": "mlp", "model": "learned, layer norm"}),
    ("pp=2", {"schedule": "zb-v", "recompute": "act"}),
    ("pp=2", {"schedule": "zb-v", "recompute": "full", "dtype": "float32"}),
    ("pp=2", {"schedule": "zb-v", "recompute": "selective,full@0-1", "model": "tied"}),
    ("pp=2", {"schedule": "dualpipe-v", "recompute": "attention"}),
    ("pp=2", {"schedule": "dualpipe-v", "recompute": "mlp", "dtype": "float32"}),
    ("pp=2", {"schedule": "dualpipe", "recompute": "selective"}),
    ("pp=2", {"schedule": "interleaved", "recompute": "norm+mlp", "packed": True}),
    ("pp=2", {"schedule": "interleaved", "recompute": "selective", "model": "predicts 2 more"}),
    ("dp=2 ep=2", {"model": MOE, "balance": "aux"}),
    ("dp=2 ep=2", {"model": MOE, "balance": "aux+z", "recompute": "experts", "dtype": "float32"}),
    ("dp=2 ep=2", {"model": GROUPS, "balance": "bias", "recompute": "norm+experts", "zero": 3}),
    ("tp=2 ep=2", {"model": MOE, "recompute": "selective", "dtype": "float32"}),
    ("cp=2 ep=2", {"model": MOE, "balance": "capacity:1.25", "packed": True}),
    ("dp=2 tp=2 ep=2 etp=2", {"model": MOE, "recompute": "experts", "zero": 1}),
    ("dp=2 pp=2 ep=2", {"model": MOE, "schedule": "zb-h1", "recompute": "full"}),
    ("dp=2 pp=2 ep=2", {"model": MOE, "schedule": "dualpipe-v", "balance": "aux"}),
    ("dp=2 pp=2 ep=2", {"model": DEEPSEEK, "schedule": "zb-h1", "dtype": "float32"}),
    ("dp=2 tp=2 cp=2", {"zero": 3, "recompute": "selective", "packed": True}),
    ("tp=2 pp=2 cp=2", {"schedule": "zb-h1", "recompute": "full:2", "packed": True}),
    ("dp=2 tp=2 pp=2", {"schedule": "zb-v", "zero": 1, "recompute": "norm", "dtype": "float32"}),
    ("dp=2 tp=2 pp=2 ep=2", {"model": MOE, "schedule": "zb-h1", "recompute": "experts"}),
    ("dp=2 tp=2 cp=2 ep=4", {"model": MOE, "recompute": "selective", "balance": "aux"}),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One layout to prove."""

    layout: str
    model: str
    dtype: Dtype
    said: Mapping[str, Any] = field(hash=False)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.said.items()]
        return ", ".join([self.layout, self.model, *words, self.dtype])

    @property
    def settings(self) -> VerifySettings:
        return VerifySettings(dtype=self.dtype, compiled=True)

    @cached_property
    def plan(self) -> Plan:
        preset = "tiny-moe" if self.model.startswith("experts") else "tiny"
        layers = 2 * STAGES.get(self.said.get("schedule", ""), 1)
        sizes = {"layers": str(layers), **MODELS[self.model]}
        return resolve(PlanOptions(preset, layout=self.layout, set=sizes, **self.said), small=True)


def cases() -> Iterator[Case]:
    """All of them."""
    for layout, said in SAID:
        words = {"model": "tiny", "dtype": "float64", **said}
        yield Case(layout, words.pop("model"), words.pop("dtype"), words)


def run_compiled(worker: Worker, plan: Plan, settings: VerifySettings) -> VerifiedRank:
    """The steps of a rank, which must have compiled something, without a break.

    What earlier cases compiled is forgotten: torch limits how many sizes one function has.
    """
    torch._dynamo.reset()
    dynamo.counters.clear()
    found = run_rank(worker, plan, settings)
    assert dynamo.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert not dynamo.counters["graph_break"], dict(dynamo.counters["graph_break"])
    return found


def prove(pool: Pool, case: Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    plan, settings = case.plan, case.settings
    ranks = [(run_compiled, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    return judge(plan, settings, runs, truths)


def most_error(case: Case) -> float:
    """Beside the tolerance that is derived."""
    return PUBLISHED if case.dtype == "float64" else math.inf


def cells(case: Case) -> list[str]:
    """What the table says about a case."""
    plan, said = case.plan, case.said
    words = [f"{name}={said[name]}" for name in ("context", "balance", "tp_keep") if name in said]
    layout = " ".join([case.layout, *words, *([] if said.get("sp", True) else ["no-sp"])])
    model = f"{case.model}, packed" if plan.packed else case.model
    schedule = plan.options.schedule if plan.layout.pp > 1 else ""
    return [layout, schedule, str(plan.layout.zero), str(plan.recompute), model, case.dtype]


def main(words: str = "") -> int:
    table = Table(
        HEAD, COLUMNS, "layouts", MOST_RANKS, prove, cells,
        most_error=most_error, patience=PATIENCE,
    )  # fmt: skip
    return table.run(case for case in cases() if words in str(case))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

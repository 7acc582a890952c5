"""Random legal plans of real widths over all keys, each a function of a seed, for rehearsals."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.splits import ContextKind
from fivefold.core.model.recompute import MODULES
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.catalog import FAMILIES, family

NUM_DRAWS = 60
MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen3-8b",
    "gpt2-xl",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
)
KEPT = ("full-but-attention", "full:2-but-attention")
RECOMPUTES = (
    *(*MODULES, "none", "none", "selective", "full", "full:2", "attention+mlp+experts", *KEPT),
)
BALANCES = ("none", "none", "aux", "aux-seq+z", "capacity-pad:1.25")
TRAININGS: tuple[dict[str, Any], ...] = ({}, {}, {"states": "bf16"}, {"optimizer": "sgd"})


def draw(seed: str) -> Plan:
    """The first legal one of this seed."""
    chance = random.Random(seed)
    while True:
        try:
            return resolve(_options(chance))
        except FivefoldError:
            continue


def draw_fp8(seed: str) -> Plan:
    """The same in fp8, of any scaling."""
    chance = random.Random(seed)
    while True:
        keys: dict[str, Any] = {
            "fp8": chance.choice(["tensorwise", "blockwise"]),
            "fp8_wgrad": chance.choice(["fp8", "fp8", "bf16"]),
            "fp8_skip": chance.choice(["0+0", "0+0", "1+1"]),
        }
        try:
            return resolve(replace(_options(chance), precision="fp8", **keys))
        except FivefoldError:
            continue


def _options(chance: random.Random) -> PlanOptions:
    """Keys that are often legal together."""
    model = chance.choice(MODELS)
    routed = model in MODELS[-3:]
    dp, tp, cp, pp = (
        chance.choice(each) for each in ((1, 2, 4, 8), (1, 2, 4), (1, 1, 2), (1, 2, 4))
    )
    layout = f"dp={dp} tp={tp} cp={cp} pp={pp}"
    ep = chance.choice([1, 2, 4, 8]) if routed else 1
    names = [each.name for each in FAMILIES if not each.asynchronous]
    schedule = chance.choice(names) if pp > 1 else "1f1b"
    chunks = family(schedule).min_chunks
    rule = chance.choice(RECOMPUTES)
    if pp > 1 and chance.random() < 0.3:
        rule = f"{rule},{chance.choice(RECOMPUTES)}@0"
    changes = {"layers": str(pp * chunks * chance.choice([3, 4, 6]))}
    if model == "gpt2-xl":
        changes["attention_dropout"] = chance.choice(["0.0", "0.1"])
    return PlanOptions(
        model,
        layout=f"{layout} ep={ep}",
        zero=chance.choice([0, 1, 2, 3]),
        gather=chance.choice(["step", "microbatch", None]),
        grad_dtype=chance.choice(["fp32", "fp32", "bf16"]),
        unit_size=chance.choice([None, None, 100.0, 600.0]),
        prefetch=chance.choice([0, 1, 1, 2]),
        sp=chance.random() < 0.8,
        context=chance.choice(get_args(ContextKind)),
        schedule=schedule,
        microbatches=chance.choice([2 * pp, 3 * pp]) if pp > 1 else chance.choice([1, 2, 3]),
        microbatch_size=chance.choice([1, 1, 2]),
        seq=1024 if model == "gpt2-xl" else chance.choice([2048, 4096]),
        recompute=rule,
        balance=chance.choice(BALANCES) if routed else "none",
        ep_nodes=chance.choice([1, 1, 2]) if ep > 1 else 1,
        tp_keep=chance.choice(["shard", "shard", "gathered"]),
        set=changes,
        train=Recipe(**chance.choice(TRAININGS)),
    )

"""Random plans for the bridges: every key that a target may have or lack, drawn until legal."""

from __future__ import annotations

import random
from typing import Any

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.catalog import FAMILIES

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "tiny-moe", "qwen2-7b")
_DEGREES = (1, 1, 1, 2, 2, 4, 8)
_NUMBERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"precision": "fp32"},
    {"precision": "fp16"},
    {"precision": "fp8"},
    {"precision": "fp8", "fp8": "blockwise"},
    {"precision": "fp8", "fp8": "mxfp8", "fp8_gradients": "e4m3"},
    {"precision": "fp8", "fp8_gradients": "e4m3", "fp8_skip": "1+1"},
)
_RULES = (
    *("none", "none", "full", "full:2", "selective", "norm", "mlp", "attention+mlp"),
    *("norm+experts", "none,full@0"),
)


def _recipe(draw: random.Random) -> Recipe:
    return Recipe(
        steps=draw.choice((20, 1000)),
        optimizer=draw.choice(("adamw", "adamw", "sgd", "muon")),
        lr=draw.choice((1e-3, 3e-4, 1e-5)),
        lr_curve=draw.choice(("cosine", "linear", "constant", "wsd")),
        warmup=draw.choice((None, 7)),
        weight_decay=draw.choice((0.1, 0.0)),
        clip=draw.choice((1.0, 0.5)),
        seed=draw.choice((0, 42)),
        offload=draw.choice(("none", "none", "none", "cpu", "nvme:/fast")),
        lora=draw.choice((0, 0, 0, 16)),
        data=draw.choice(("stdlib", "synthetic")),
        save_every=draw.choice((None, 10)),
    )


def _options(draw: random.Random) -> PlanOptions:
    dp = f"{draw.choice((1, 1, 2))}x{draw.choice((1, 2, 4, 8))}"
    degrees = {axis: draw.choice(_DEGREES) for axis in ("tp", "pp", "cp", "ep")}
    degrees["etp"] = draw.choice((1, 1, 1, degrees["tp"]))
    layout = " ".join([f"dp={dp}", *(f"{axis}={each}" for axis, each in degrees.items())])
    order = draw.choice(("", "", " order=tp-cp-pp-dp"))
    return PlanOptions(
        model=draw.choice(MODELS),
        layout=layout + order,
        zero=draw.choice((None, 0, 1, 2, 3)),
        gather=draw.choice((None, "step", "microbatch")),
        grad_dtype=draw.choice(("fp32", "fp32", "bf16")),
        sp=draw.choice((True, True, False)),
        context=draw.choice(("zigzag", "ring", "allgather", "ulysses", "hybrid")),
        schedule=draw.choice([each.name for each in FAMILIES]),
        chunks=draw.choice((None, None, 3)),
        microbatches=draw.choice((None, 8, 16)),
        microbatch_size=draw.choice((1, 2)),
        seq=draw.choice((4096, 8192)),
        recompute=draw.choice(_RULES),
        tp_keep=draw.choice(("shard", "shard", "gathered")),
        prefetch=draw.choice((1, 1, 2)),
        train=_recipe(draw),
        **draw.choice(_NUMBERS),
    )


def random_plan(seed: int) -> Plan:
    """A legal plan, the same for the same seed."""
    draw = random.Random(seed)
    while True:
        try:
            return resolve(_options(draw))
        except FivefoldError:
            continue

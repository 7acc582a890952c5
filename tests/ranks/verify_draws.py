"""Random verifications on at most 8 ranks, each a function of a seed and legal for the core."""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass, fields
from typing import Any, get_args

from fivefold.commands.verify import runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.splits import ContextKind
from fivefold.core.model.recompute import MODULES
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.core.schedule.catalog import FAMILIES, family
from fivefold.verify.runs import VerifySettings

MOST_RANKS = 8
BALANCES = ("none", "aux", "aux-seq+z", "aux-global", "bias", "capacity:1.25", "capacity-pad:1")
KEPT = ("full-but-attention", "full:2-but-attention")
RECOMPUTES = (
    *(*MODULES, "none", "none", "selective", "full", "full:2", "attention+mlp+experts", *KEPT),
)
LATENTS = {
    "head_dim": "6",
    "kv_heads": "8",
    "mla.kv_rank": "12",
    "mla.nope_dim": "2",
    "mla.rope_dim": "4",
}
CHANGES: tuple[dict[str, str], ...] = (
    {"tied": "true"},
    {"vocab": "251"},
    {"mtp": "1"},
    {"mtp": "2"},
    {"window": "7"},
    {"qk_norm": "head"},
    {"qkv_bias": "true", "out_bias": "true"},
    {"kv_heads": "1"},
    {"positions": "learned", "norm": "layer", "norm_bias": "true", "max_seq": "64"},
    {"dropout": "0.2"},
    {"dropout": "0.2", "embedding_dropout": "0.0"},
    {"dropout": "0.1", "attention_dropout": "0.3"},
    LATENTS | {"mla.value_dim": "3"},
    LATENTS | {"mla.value_dim": "10", "mla.q_rank": "9"},
)
EXPERTS: tuple[dict[str, str], ...] = (
    {"moe.first_dense": "1"},
    {"moe.score": "sigmoid", "moe.renormalise": "true"},
    {"moe.groups": "2", "moe.groups_kept": "1"},
    {"moe.shared": "0", "moe.shared_ffn": "0"},
    {"moe.top_k": "1"},
)


@dataclass(frozen=True)
class Draw:
    """A plan and how it is verified."""

    options: PlanOptions
    settings: VerifySettings
    plan: Plan

    def __str__(self) -> str:
        """The command that repeats it."""
        usual = {each.name: each.default for each in fields(PlanOptions)}
        words = ["fivefold", "verify", self.options.model]
        for name, value in vars(self.options).items():
            flag = f"--{name.replace('_', '-')}"
            if name in ("model", "set", "train") or value == usual[name]:
                continue
            if isinstance(value, bool):
                words += ["--packed"] if name == "packed" else ["--set", "sp=false"]
            else:
                words += [flag, str(value)]
        words += ["--set", " ".join(f"{key}={value}" for key, value in self.options.set.items())]
        settings = self.settings
        words += ["--steps", str(settings.steps), "--seed", str(settings.seed)]
        words += ["--set", "offload=cpu"] if settings.offload else []
        return shlex.join(words)


def draw(seed: str) -> Draw:
    """The first legal one of this seed."""
    dice = random.Random(seed)
    while True:
        options = _options(dice)
        try:
            plan = runnable(options)
        except FivefoldError:
            continue
        if plan.layout.world <= MOST_RANKS:
            return Draw(options, _settings(dice, plan), plan)


def _options(dice: random.Random) -> PlanOptions:
    routed = dice.random() < 0.6
    degrees = {name: dice.choice((1, 1, 2, 2, 4)) for name in ("dp", "tp", "pp", "cp")}
    words = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if degrees["dp"] == 4 and dice.random() < 0.5:
        words[0] = "dp=2x2"
    if routed:
        words += [f"ep={dice.choice((1, 2, 4))}", f"etp={dice.choice((1, 1, 2))}"]
    words += dice.choice(([], [], ["order=tp-cp-pp-dp"]))
    named = family(dice.choice([each.name for each in FAMILIES]))
    stages = degrees["pp"]
    chunks = named.chunks_on(stages, None)
    choices: dict[str, Any] = {
        "zero": dice.randrange(4),
        "gather": dice.choice((None, None, "step", "microbatch")),
        "sp": dice.random() < 0.8,
        "context": dice.choice(get_args(ContextKind)),
        "schedule": named.name,
        "microbatches": named.smallest_count(dice.randint(1, 4), stages, chunks),
        "microbatch_size": dice.choice((1, 2)),
        "seq": dice.choice((8, 16, 17, 31)),
        "packed": dice.random() < 0.5,
        "recompute": dice.choice(RECOMPUTES),
        "balance": dice.choice(BALANCES) if routed else "none",
        "unit_size": dice.choice((None, 0.03, 0.1)),
        "prefetch": dice.choice((0, 1, 1, 3)),
        "tp_keep": dice.choice(("shard", "gathered")),
    }
    changes = {"layers": str(stages * chunks + dice.randrange(2))} | dice.choice(CHANGES)
    changes |= dice.choice(CHANGES) if dice.random() < 0.3 else {}
    changes |= dice.choice(EXPERTS) if routed else {}
    changes |= {"moe.bias": "true"} if choices["balance"] == "bias" else {}
    model = "tiny-moe" if routed else "tiny"
    return PlanOptions(model, layout=" ".join(words) or "dp=1", set=changes, **choices)


def _settings(dice: random.Random, plan: Plan) -> VerifySettings:
    """Where weights are late, until they are as late as they get, and one step more."""
    return VerifySettings(
        steps=plan.layout.pp + 1 if plan.schedule.asynchronous else dice.choice((1, 2)),
        offload=dice.random() < 0.2,
        seed=dice.randrange(1000),
    )

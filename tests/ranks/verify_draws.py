"""Random verifications on at most 8 ranks, each a function of a seed and legal for the core.

    python -m tests.ranks.verify_draws SALT NUMBER

runs the first draws of a salt, prints a line for each and the command that repeats what fails, and
ends with the largest error over its tolerance.
"""

from __future__ import annotations

import random
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from fivefold.commands.verify import VERIFIED_OPTIMIZERS, runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.splits import ContextKind
from fivefold.core.model.recompute import MODULES
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.catalog import FAMILIES, family
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import VerifyVerdict, run_trial
from tests.own_mixers import PATH, with_mixer
from tests.ranks import compiled
from tests.ranks.kept_pool import KeptPool

MOST_RANKS = 8
MOST_COMPILED = 2  # ranks: each compiles its own kernels
BALANCES = (
    *("none", "aux", "aux-seq+z", "aux-global", "bias", "capacity:1.25", "capacity-pad:1"),
    "capacity-position:0.75",
)
KEPT = ("full-but-attention", "full:2-but-attention")
RECOMPUTES = (
    *(*MODULES, "none", "none", "selective", "full", "full:2", "attention+mlp+experts", *KEPT),
    *("norm+act+mlp", "selective,full@0-0"),
)
LATENTS = {
    "head_dim": "6",
    "kv_heads": "8",
    "mla.kv_rank": "12",
    "mla.nope_dim": "2",
    "mla.rope_dim": "4",
}
BIASED = {"qkv_bias": "true", "out_bias": "true"}
SOME_GLOBAL = {"window": "7", "global_every": "2"}
CHANGES: tuple[dict[str, str], ...] = (
    {"tied": "true"},
    {"vocab": "251"},
    {"vocab": "251", "tied": "true"},
    {"mtp": "1"},
    {"mtp": "2"},
    {"window": "7"},
    {"window": "6", "window_kind": "chunked"},
    SOME_GLOBAL,
    SOME_GLOBAL | {"nope_floor": "3"},
    SOME_GLOBAL | {"global_rotary": "true", "local_theta": "100"},
    {"qk_norm": "head"},
    {"qk_norm": "full"},
    {"qk_norm": "l2"},
    BIASED,
    BIASED | {"mlp_bias": "true", "kv_heads": "2"},
    {"kv_heads": "1"},
    {"positions": "learned", "norm": "layer", "norm_bias": "true", "max_seq": "64"},
    {"positions": "alibi", "embedding_norm": "true"},
    {"positions": "none", "activation": "relu"},
    {"norm_at": "after", "qk_norm": "full"},
    {"norm_at": "both", "norm": "rms_offset", "scaled_embedding": "true"},
    {"parallel_block": "true", "parallel_norms": "2", "activation": "gelu", "rotary_dim": "4"},
    {"parallel_block": "true", "rope_interleaved": "true"},
    {"activation": "geglu_tanh", "score_cap": "5", "logit_cap": "9"},
    {"activation": "swiglu_clamped", "sinks": "true"},
    {"attention_gate": "true"},
    {"rope.kind": "yarn", "rope.factor": "4", "rope.original_seq": "8"},
    {"dropout": "0.2"},
    {"dropout": "0.2", "embedding_dropout": "0.0"},
    {"dropout": "0.1", "attention_dropout": "0.3"},
    LATENTS | {"mla.value_dim": "3"},
    LATENTS | {"mla.value_dim": "10", "mla.q_rank": "9"},
)
EXPERTS: tuple[dict[str, str], ...] = (
    {"moe.first_dense": "1"},
    {"moe.every": "2"},
    {"moe.score": "sigmoid", "moe.renormalise": "true", "moe.scaling": "2.5"},
    {"moe.groups": "2", "moe.groups_kept": "1"},
    {"moe.groups": "4", "moe.groups_kept": "2", "moe.group_score": "top2"},
    {"moe.shared": "0", "moe.shared_ffn": "0"},
    {"moe.shared_gated": "true"},
    {"moe.top_k": "1", "moe.weigh_inputs": "true"},
    {"moe.biases": "true"},
)
MIXERS = ("gated-scan", "test-groups", "test-shared")
TARGETS = ("all", "all", "q+v", "attention", "mlp.down", "gate+up", "q_down+kv_up", "experts.down")
PARTS = ("", "", "embed", "head", "*norm", "bias", "blocks.1", "attention", "router+experts")
FP8_KINDS = ("tensorwise", "tensorwise", "blockwise", "mxfp8")
# What `fivefold verify` has as flags; everything else is a key of --set.
FLAGS = (
    *("layout", "zero", "context", "schedule", "microbatches", "microbatch_size", "seq"),
    *("recompute", "precision", "fp8"),
)


@dataclass(frozen=True)
class Draw:
    """A plan and how it is verified."""

    options: PlanOptions
    settings: VerifySettings
    plan: Plan

    def __str__(self) -> str:
        """The command that repeats it."""
        program = ["fivefold"] if self.options.model.isidentifier() else ["python", str(PATH)]
        if self.options.model == "tiny-moe":
            program = ["fivefold"]
        return shlex.join([*program, *self.arguments])

    @property
    def arguments(self) -> list[str]:
        """The words after the name of the program."""
        flags, keys = ["verify", self.options.model], dict(self.options.set)
        values = _differing(self.options, PlanOptions, ("model", "set", "train"))
        for name, value in values.items():
            if name in FLAGS:
                flags += [f"--{name.replace('_', '-')}", str(value)]
            else:
                keys[name] = _as_text(value)
        train = _differing(self.options.train, Recipe, ())
        keys |= {name: _as_text(value) for name, value in train.items()}
        settings = self.settings
        keys |= {"offload": "cpu"} if settings.offload else {}
        keys |= {"optimizer": settings.optimizer} if settings.optimizer != "adamw" else {}
        flags += ["--dtype", settings.dtype, "--steps", str(settings.steps)]
        flags += ["--seed", str(settings.seed), *(["--compile"] if settings.compiled else [])]
        return [*flags, "--set", " ".join(f"{key}={value}" for key, value in keys.items())]


def _differing(options: object, kind: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default."""
    values = vars(options)
    return {
        field.name: values[field.name]
        for field in fields(kind)
        if field.name not in without and values[field.name] != field.default
    }


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    kind = dice.choices(("tiny", "tiny-moe", "mixer"), (35, 55, 10))[0]
    routed, mixed = kind == "tiny-moe", kind == "mixer"
    degrees = {name: dice.choice((1, 1, 2, 2, 4)) for name in ("dp", "tp", "pp", "cp")}
    layout = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if degrees["dp"] == 4 and dice.random() < 0.5:
        layout[0] = "dp=2x2"
    if routed:
        layout += [f"ep={dice.choice((1, 2, 4))}", f"etp={dice.choice((1, 1, 2))}"]
    layout += dice.choice(([], [], ["order=tp-cp-pp-dp"]))
    schedule = family(dice.choice([entry.name for entry in FAMILIES]))
    stages = degrees["pp"]
    chunks = schedule.chunks_on(stages, None)
    choices: dict[str, Any] = {
        "zero": dice.randrange(4),
        "gather": dice.choice((None, None, "step", "microbatch")),
        "sp": dice.random() < 0.8,
        "context": "ulysses" if mixed else dice.choice(get_args(ContextKind)),
        "schedule": schedule.name,
        "microbatches": schedule.smallest_count(dice.randint(1, 4), stages, chunks),
        "microbatch_size": dice.choice((1, 2)),
        "seq": dice.choice((8, 16, 17, 31)),
        "packed": dice.random() < 0.5,
        "recompute": dice.choice(RECOMPUTES),
        "balance": dice.choice(BALANCES) if routed else "none",
        "unit_size": dice.choice((None, 0.03, 0.1)),
        "prefetch": dice.choice((0, 1, 1, 3)),
        "tp_keep": dice.choice(("shard", "gathered")),
        "tp_overlap": dice.choice((0, 1, 1, 1, 2)),
        "ep_nodes": dice.choice((None, None, 2)) if routed else None,
        "train": _tuning(dice),
    }
    choices |= _precision(dice)
    changes = {"layers": str(stages * chunks + dice.randrange(2))}
    if mixed:
        mixer = dice.choice(MIXERS)
        shape = {"positions": "rotary", "kv_heads": 4} if mixer == "test-groups" else {}
        return PlanOptions(
            with_mixer(mixer, **shape), layout=" ".join(layout) or "dp=1", set=changes, **choices
        )
    changes |= dice.choice(CHANGES)
    changes |= dice.choice(CHANGES) if dice.random() < 0.3 else {}
    changes |= dice.choice(EXPERTS) if routed else {}
    changes |= {"moe.bias": "true"} if choices["balance"] == "bias" else {}
    return PlanOptions(kind, layout=" ".join(layout) or "dp=1", set=changes, **choices)


def _tuning(dice: random.Random) -> Recipe:
    """Adapters and frozen parts, in one of four draws."""
    if dice.random() > 0.25:
        return Recipe()
    rank, parts = dice.choice((0, 2, 4, 4)), dice.choice(PARTS)
    if not rank:
        return Recipe(train_only=parts)
    alpha = dice.choice((None, 3.0))
    return Recipe(lora=rank, lora_alpha=alpha, lora_targets=dice.choice(TARGETS), train_only=parts)


def _precision(dice: random.Random) -> dict[str, Any]:
    """fp8 in one of five draws, gradients of bfloat16 in one of ten."""
    kind = dice.random()
    if kind < 0.1:
        return {"grad_dtype": "bf16"}
    if kind > 0.3:
        return {}
    return {
        "precision": "fp8",
        "fp8": dice.choice(FP8_KINDS),
        "fp8_wgrad": dice.choice((None, None, "bf16")),
        "fp8_gradients": dice.choice((None, "e4m3", "e5m2")),
        "fp8_skip": dice.choice((None, None, "1+0", "0+1")),
        **({"seq": None} if dice.random() < 0.5 else {}),  # the shortest that has whole blocks
    }


def _settings(dice: random.Random, plan: Plan) -> VerifySettings:
    """Where weights are late, until they are as late as they get, and one step more.

    Experts in float32 may be chosen by rounding, and fp8 is emulated in float64.
    """
    precise = plan.shape.moe is not None or plan.fp8 is not None or dice.random() < 0.85
    few = plan.layout.world <= MOST_COMPILED and plan.shape.layers <= 4
    own = plan.shape.own_mixer is not None
    return VerifySettings(
        dtype="float64" if precise else "float32",
        steps=plan.layout.pp + 1 if plan.schedule.asynchronous else dice.choice((1, 2)),
        optimizer=dice.choice(("adamw", *VERIFIED_OPTIMIZERS)),
        offload=dice.random() < 0.2,
        seed=dice.randrange(1000),
        compiled=few and not own and dice.random() < 0.5,
    )


def prove(pool: Pool, drawn: Draw) -> VerifyVerdict:
    """Run one draw on a pool of at least one more process than it has ranks."""
    if drawn.settings.compiled:  # which sends no message for long
        with Pool(drawn.plan.layout.world + 1, compiled.PATIENCE) as patient:
            return compiled.prove(patient, drawn)
    return run_trial(pool, drawn.plan, drawn.settings)


def strain(verdict: VerifyVerdict) -> float:
    """The largest error over its tolerance."""
    return max(verdict.errors[name] / most for name, most in verdict.tolerance.items())


def complaint(drawn: Draw, verdict: VerifyVerdict) -> str:
    """What there is to know of a draw that fails."""
    facts = asdict(verdict) | {"traffic": verdict.traffic_match}
    return f"{drawn}\n{facts}"


def main(salt: str, number: str) -> int:
    kept, strains, failures = KeptPool(), list[float](), 0
    for i in range(int(number)):
        drawn, began = draw(f"{salt}: {i}"), time.perf_counter()
        try:
            verdict = prove(kept.whole(), drawn)
        except Exception:
            failures += 1
            print(f"{i} RAISED {drawn}\n{traceback.format_exc()}", flush=True)
            continue
        seconds = time.perf_counter() - began
        if verdict.passed:
            strains.append(strain(verdict))
            print(f"{i} {strains[-1]:.3f} {seconds:.1f} s {drawn}", flush=True)
        else:
            failures += 1
            print(f"{i} FAILED {complaint(drawn, verdict)}", flush=True)
    kept.close()
    print(f"{number} draws of {salt}: {failures} fail, at most {max(strains):.3f} of a tolerance")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""fp8 in layouts of all five dimensions, tensorwise and blockwise, and mxfp8 in a few.

    python -m tests.ranks.fp8_layouts

runs all of them and prints a table in markdown; the tests run a few.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import PlanOptions
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import VerifyVerdict, run_trial
from tests.ranks.table import Table

HEAD = """# Verified fp8

Linears rounded to fp8 by `docs/fp8.md`, in float64 emulation, against a reference with a rounding
of its own: 2 steps of AdamW, every error at most 1e-10, and no value rounded to another number (0
flips), of inputs, output gradients and weights alike. `tiny` models have 2 layers, over pp 4;
blockwise they are widened: width 192, over tp heads and MLP of whole blocks, rows of 160 tokens, or
of whole blocks where cp or sp cuts them. Made by `python -m tests.ranks.fp8_layouts` on {date}.
"""
COLUMNS = ("fp8", "model", "layout", "keys", "flips")
BIASED = {"qkv_bias": "true", "out_bias": "true", "mlp_bias": "true", "qk_norm": "head"}
ONE_KV = {"kv_heads": "1"}
LATENTS = {
    **{"head_dim": "64", "kv_heads": "8", "mla.kv_rank": "80", "mla.nope_dim": "32"},
    **{"mla.rope_dim": "32", "mla.value_dim": "32"},
}
SCALINGS = ("tensorwise", "blockwise")
MOST_RANKS = 16


@dataclass(frozen=True)
class Fp8Case:
    """One layout to prove, with one scaling."""

    scaling: str
    layout: str
    model: str = "tiny"
    set: dict[str, str] = field(default_factory=dict[str, str])
    keys: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return " ".join([self.scaling, self.model, self.layout, *self.words])

    @property
    def words(self) -> list[str]:
        named = {**self.set, **self.keys}
        if LATENTS.items() <= self.set.items():
            named = {k: v for k, v in named.items() if k not in LATENTS} | {"attention": "latent"}
        return [f"{name}={value}" for name, value in named.items()]


def _both(
    layout: str, model: str = "tiny", set: dict[str, str] | None = None, **keys: Any
) -> Iterator[Fp8Case]:
    return (Fp8Case(scaling, layout, model, set or {}, keys) for scaling in SCALINGS)


def small_blocks() -> Iterator[Fp8Case]:
    """Blocks of 32, with powers of two as scales: a handful, since layouts do as with those of
    128."""
    yield Fp8Case("mxfp8", "dp=1", keys={"microbatch_size": 2})
    yield Fp8Case("mxfp8", "dp=2", keys={"zero": 3, "recompute": "full"})
    yield Fp8Case("mxfp8", "tp=2", set=ONE_KV | BIASED)
    yield Fp8Case("mxfp8", "tp=2 cp=2", keys={"fp8_wgrad": "bf16"})
    yield Fp8Case("mxfp8", "pp=2", keys={"schedule": "zb-h1"})
    yield Fp8Case("mxfp8", "dp=2 ep=2", model="tiny-moe")


def cases() -> Iterator[Fp8Case]:
    """Each dimension alone, with what it changes about rounding, and then several together."""
    yield from _both("dp=1", microbatch_size=2)
    yield from _both("dp=2", zero=1)
    yield from _both("dp=2x2", zero=2, recompute="norm+act")
    yield from _both("dp=2", zero=3, gather="step")
    yield from _both("dp=2", zero=3, gather="microbatch", recompute="full")
    yield from _both("tp=2", recompute="selective")
    yield from _both("tp=2", sp=False, set=BIASED)
    yield from _both("tp=2", set=ONE_KV | BIASED)
    yield from _both("tp=2", tp_overlap=2, microbatch_size=2, tp_keep="gathered")
    yield from _both("dp=2 tp=2", set=ONE_KV, zero=3, fp8_wgrad="bf16", recompute="attention+mlp")
    yield from _both("tp=2", set=LATENTS)
    yield from _both("tp=2 cp=2", set=LATENTS | {"mla.q_rank": "72"}, sp=False)
    for context in ("ring", "zigzag", "allgather", "ulysses"):
        yield from _both("cp=2", context=context)
    yield Fp8Case("tensorwise", "tp=2 cp=2", keys={"seq": 45, "microbatch_size": 2})  # padded
    yield Fp8Case("tensorwise", "cp=4", keys={"seq": 9, "recompute": "full"})
    yield from _both("dp=2 cp=2", set=BIASED, zero=2, fp8_gradients="e5m2")
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"):
        yield from _both("pp=2", schedule=schedule, microbatches=4)
    yield from _both("dp=2 tp=2 pp=2", schedule="zb-h1", zero=1, fp8_skip="1+1")
    yield from _both("tp=2 cp=2 pp=2", schedule="zb-v", set=ONE_KV)
    yield from _experts()
    yield from _both("dp=2 ep=2", "tiny-moe")
    yield from _both("dp=2 tp=2 ep=2 etp=2", "tiny-moe", zero=1)
    yield from _both("dp=2 tp=2 pp=2 cp=2 ep=2", "tiny-moe", schedule="zb-h1", zero=1)
    yield from small_blocks()


def _experts() -> Iterator[Fp8Case]:
    """Routed experts, which both scalings round alike: most of them tensorwise, which is faster."""
    for layout, set_, keys in (
        ("dp=1", {"moe.weigh_inputs": "true"}, {"microbatch_size": 2, "recompute": "norm+act"}),
        ("cp=2 ep=2", {}, {"seq": 9, "recompute": "experts"}),  # padded
        ("tp=2 etp=2", {}, {"recompute": "full"}),
        ("tp=2 etp=2", {}, {"sp": False, "balance": "capacity-position:0.75"}),
        ("dp=4 ep=4", {}, {"ep_nodes": 2, "zero": 2}),
        ("dp=4 tp=2 ep=4 etp=2", {"moe.weigh_inputs": "true"}, {"ep_nodes": 2}),
        ("dp=2 ep=2", {}, {"balance": "capacity-pad:1.25", "fp8_wgrad": "bf16"}),
        ("dp=4 ep=2", {}, {"zero": 3, "gather": "microbatch", "fp8_skip": "1+0"}),
        ("dp=2x2", {}, {"zero": 3, "gather": "step"}),
        ("dp=3", {}, {"zero": 3, "unit_size": 0.01, "prefetch": 2}),
        ("dp=2 cp=2 ep=2", {}, {"zero": 3, "recompute": "full"}),
        ("dp=2 tp=2 ep=2 etp=2", {}, {"zero": 3, "gather": "microbatch"}),
        ("dp=2 tp=2 etp=2", {}, {"zero": 3, "sp": False}),
        ("dp=2 pp=2 ep=2", {}, {"zero": 3, "schedule": "zb-h1", "microbatches": 4}),
        ("dp=2 pp=2 ep=2", {}, {"schedule": "dualpipe", "microbatches": 4}),
    ):
        yield Fp8Case("tensorwise", layout, "tiny-moe", set_, keys)
    yield Fp8Case("blockwise", "tp=2 etp=2", "tiny-moe")
    yield Fp8Case("blockwise", "dp=4 ep=2", "tiny-moe", keys={"zero": 3, "gather": "microbatch"})


def prove(pool: Pool, case: Fp8Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    changes = {"layers": "4" if "pp" in case.layout else "2"} | case.set
    said = {"precision": "fp8", "fp8": case.scaling, "set": changes, **case.keys}
    return run_trial(
        pool, runnable(PlanOptions(case.model, layout=case.layout, **said)), VerifySettings(steps=2)
    )


FLIPS: dict[str, int | None] = {}


def _prove(pool: Pool, case: Fp8Case) -> VerifyVerdict:
    verdict = prove(pool, case)
    FLIPS[str(case)] = verdict.flips
    return verdict


def cells(case: Fp8Case) -> list[object]:
    """What the table says about a case."""
    return [case.scaling, case.model, case.layout, " ".join(case.words), FLIPS[str(case)]]


def main() -> int:
    return Table(HEAD, COLUMNS, "layouts", MOST_RANKS, _prove, cells).run(cases())


if __name__ == "__main__":
    sys.exit(main())

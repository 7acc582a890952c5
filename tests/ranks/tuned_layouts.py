"""Adapters (LoRA) and frozen parts in layouts of all five dimensions, with every ZeRO stage.

    python -m tests.ranks.tuned_layouts

runs all of them and prints a table in markdown; the tests run a few.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import VerifyVerdict, run_trial
from tests.ranks.table import Table

HEAD = """# Verified adapters and frozen parts

`lora` and `train_only` (docs/tuning.md) in float64 against one process: 2 steps of AdamW, every
error at most 1e-10, collectives as predicted. Made by `python -m tests.ranks.tuned_layouts` on
{date}.
"""
COLUMNS = ("trains", "model", "layout", "keys")
BIASED = {"qkv_bias": "true", "out_bias": "true", "mlp_bias": "true", "qk_norm": "head"}
ONE_KV = {"kv_heads": "1"}
LATENTS = {
    **{"head_dim": "16", "kv_heads": "8", "mla.kv_rank": "16", "mla.nope_dim": "8"},
    **{"mla.rope_dim": "8", "mla.value_dim": "8", "mla.q_rank": "24"},
}
MOST_RANKS = 16


@dataclass(frozen=True)
class TunedCase:
    """One layout to prove, with what trains in it."""

    layout: str
    trains: dict[str, Any]
    model: str = "tiny"
    set: dict[str, str] = field(default_factory=dict[str, str])
    keys: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return " ".join([self.model, self.layout, _words(self.trains), self.words]).strip()

    @property
    def words(self) -> str:
        named = {**self.set, **self.keys}
        if LATENTS.items() <= self.set.items():
            named = {k: v for k, v in named.items() if k not in LATENTS} | {"attention": "latent"}
        return _words(named)


def _words(named: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in named.items())


def _lora(
    layout: str, model: str = "tiny", set: dict[str, str] | None = None, **keys: Any
) -> TunedCase:
    return TunedCase(layout, {"lora": 4}, model, set or {}, keys)


def _only(
    layout: str, parts: str, model: str = "tiny", set: dict[str, str] | None = None, **keys: Any
) -> TunedCase:
    return TunedCase(layout, {"train_only": parts}, model, set or {}, keys)


def cases() -> Iterator[TunedCase]:
    """Each dimension alone, with what it changes about adapters, and then several together."""
    yield _lora("dp=1", set=BIASED, microbatch_size=2)
    yield from (_lora("dp=2x2", zero=zero, unit_size=0.06) for zero in range(4))
    yield _lora("dp=2", zero=3, gather="microbatch", recompute="full")
    yield _lora("dp=2", grad_dtype="fp32", zero=2, recompute="norm+act")
    yield _lora("tp=2", set=BIASED, recompute="selective")
    yield _lora("tp=2", set=ONE_KV | BIASED, sp=False)
    yield _lora("tp=4", set={"kv_heads": "2"}, recompute="attention+mlp")
    yield _lora("tp=2", tp_overlap=2, microbatch_size=2, tp_keep="gathered")
    yield _lora("tp=2", set=LATENTS)
    yield _lora("tp=2 cp=2", set=LATENTS, sp=False)
    yield from (_lora("cp=2", context=each) for each in ("ring", "zigzag", "allgather", "ulysses"))
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "pipedream-2bw"):
        yield _lora("pp=2", schedule=schedule, microbatches=4)
    yield _lora("dp=2 tp=2 pp=2", schedule="zb-h1", zero=3, set={"tied": "true"})
    yield _lora("tp=2 cp=2 pp=2", schedule="zb-v", set=ONE_KV, zero=1)
    yield from _experts()
    yield from _frozen()


def _experts() -> Iterator[TunedCase]:
    moe = "tiny-moe"
    yield _lora("dp=1", moe)
    yield _lora("dp=4 ep=2", moe, zero=3, recompute="experts")
    yield _lora("dp=2 tp=2 ep=2 etp=2", moe, zero=1)
    yield _lora("tp=2 etp=2", moe, sp=False, set={"moe.weigh_inputs": "true"})
    yield _lora("dp=2 pp=2 ep=2", moe, schedule="dualpipe", microbatches=4)
    yield _lora("dp=2 tp=2 pp=2 cp=2 ep=2", moe, schedule="zb-h1", zero=2)
    yield TunedCase("dp=2 ep=2", {"lora": 4, "lora_targets": "q+experts.down"}, moe)
    yield _lora("dp=2 pp=2 ep=2", moe, set={"mtp": "1", "tied": "true"}, zero=3)


def _frozen() -> Iterator[TunedCase]:
    yield from (_only("dp=2 tp=2", "attention+*norm", zero=zero) for zero in range(4))
    yield _only("pp=2", "head", schedule="zb-h1")
    yield _only("pp=2 tp=2", "embed", set={"tied": "true"}, zero=1)
    yield _only("pp=2 dp=2", "blocks.1", schedule="dualpipe", microbatches=4)
    yield _only("tp=2", "bias", set=BIASED)
    yield _only("tp=2 pp=2", "bias+q_norm", set=BIASED, schedule="zb-h1")
    yield _only("dp=2 ep=2", "router+experts", "tiny-moe", zero=3)
    yield _only("dp=2 pp=2 ep=2", "router+shared", "tiny-moe", schedule="zb-h1")
    both = {"lora": 4, "lora_alpha": 3.0, "lora_targets": "q_proj+v_proj", "train_only": "head"}
    yield TunedCase("tp=2 cp=2", both, set=ONE_KV)
    yield TunedCase("dp=2 pp=2", {"lora": 4, "train_only": "embed+norm"}, set={"tied": "true"})


def prove(pool: Pool, case: TunedCase) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    changes = {"layers": "4" if "pp" in case.layout else "2"} | case.set
    said: dict[str, Any] = {"set": changes, "train": Recipe(**case.trains), **case.keys}
    plan = runnable(PlanOptions(case.model, layout=case.layout, **said))
    return run_trial(pool, plan, VerifySettings(steps=2))


def cells(case: TunedCase) -> list[object]:
    """What the table says about a case."""
    return [_words(case.trains), case.model, case.layout, case.words]


def main() -> int:
    return Table(HEAD, COLUMNS, "layouts", MOST_RANKS, prove, cells).run(cases())


if __name__ == "__main__":
    sys.exit(main())

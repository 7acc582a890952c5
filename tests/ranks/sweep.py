"""Every layout of 2, 4 and 8 ranks over data and tensor, with what else can differ drawn by hash.

    python -m tests.ranks.sweep

runs all of them and prints a table in markdown; the tests run a few.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import VerifyVerdict, run_trial
from tests.ranks.table import Table

HEAD = """# Verified layouts

Every layout of 2, 4 and 8 ranks over data and tensor, on `tiny` with 2 layers in float64, 2 steps
of AdamW; model variant, recomputation and unit size drawn by hash. Made by `make verify-all` on
{date}.
"""
COLUMNS = ("layout", "model", "recompute", "unit")
WORLDS = (2, 4, 8)
MODELS = ({}, {"tied": "true"}, {"vocab": "251"}, {"kv_heads": "2"}, {"qkv_bias": "true"})
RECOMPUTES = ("none", "norm", "act", "selective", "attention", "mlp", "full", "full:2")
BUCKETS = (None, 60_000, 300_000)


@dataclass(frozen=True)
class Case:
    """One layout to prove."""

    layout: str
    zero: int
    sp: bool

    def __str__(self) -> str:
        return f"{self.layout} zero={self.zero}" + ("" if self.sp else " no-sp")

    def draw(self, what: str, options: int) -> int:
        """A number below `options`, the same on every machine."""
        digest = hashlib.blake2b(f"{self}:{what}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % options

    @property
    def model(self) -> dict[str, str]:
        return MODELS[self.draw("model", len(MODELS))] | {"layers": "2"}

    @property
    def recompute(self) -> str:
        return RECOMPUTES[self.draw("recompute", len(RECOMPUTES))]

    @property
    def bucket(self) -> int | None:
        return BUCKETS[self.draw("bucket", len(BUCKETS))]


def cases() -> Iterator[Case]:
    """All of them: each split of dp into replicas and shards, each stage, with and without sp."""
    for world in WORLDS:
        for tp in _divisors(world):
            for replicate in _divisors(world // tp):
                shard = world // tp // replicate
                layout = f"dp={replicate}x{shard} tp={tp}"
                for zero in range(4):
                    yield from (
                        Case(layout, zero, sp) for sp in ((True, False) if tp > 1 else (True,))
                    )


def prove(pool: Pool, case: Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    options = PlanOptions(
        "tiny",
        layout=case.layout,
        zero=case.zero,
        sp=case.sp,
        recompute=case.recompute,
        unit_size=None if case.bucket is None else case.bucket / 1e6,
        set=case.model,
    )
    return run_trial(pool, resolve(options, small=True), VerifySettings())


def cells(case: Case) -> list[str]:
    """What the table says about a case."""
    model = " ".join(f"{key}={value}" for key, value in case.model.items() if key != "layers")
    bucket = "blocks" if case.bucket is None else f"{case.bucket // 1000} kB"
    return [str(case), model, case.recompute, bucket]


def main() -> int:
    return Table(HEAD, COLUMNS, "layouts", max(WORLDS), prove, cells).run(cases())


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


if __name__ == "__main__":
    sys.exit(main())

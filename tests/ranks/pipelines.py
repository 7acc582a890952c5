"""Every schedule on 2, 4 and 8 ranks, and together with data and tensor; the rest drawn by hash.

    python -m tests.ranks.pipelines

runs all of them and prints a table in markdown; the tests run a few that differ most.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.definition import AUTO, Family
from fivefold.core.schedule.schedule import INPUT_GRAD, Action, merged
from fivefold.core.schedule.selection import choose
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import VerifyVerdict, run_trial
from tests.ranks.table import Table
from tests.selection import shuffled

HEAD = """# Verified pipelines

Every schedule on 2, 4 and 8 ranks, with each number of chunks among 1, 2 and 4 that it allows; and
on `dp=2 tp=2 pp=2`, where every schedule meets every ZeRO stage and every recomputation, and every
stage every recomputation. On `tiny` with one layer more than stages, in float64, 2 steps of AdamW;
asynchronous schedules 12 steps, held against an emulation of their delays. Model variant, unit size
and sequence parallelism drawn by hash. Made by `python -m tests.ranks.pipelines` on {date}.
"""
COLUMNS = ("schedule", "layout", "ZeRO", "recompute", "model", "unit")
PIPELINES = (2, 4, 8)
CHUNKS = (1, 2, 4)
MOST_RANKS = 8
MIXED = "dp=2 tp=2 pp=2"
SYNCHRONOUS = (*(family.name for family in FAMILIES if not family.asynchronous), AUTO)
ASYNCHRONOUS = tuple(family.name for family in FAMILIES if family.asynchronous)
SHARDINGS: tuple[tuple[int, str | None], ...] = (
    (0, None),
    (1, None),
    (2, None),
    (3, "step"),
    (3, "microbatch"),
)
RECOMPUTES = ("none", "selective", "full", "norm+attention", "act+mlp")  # one for each sharding
BUCKETS = (None, 60_000)  # the second one gives most stages several units
BIASED = {"qkv_bias": "true", "out_bias": "true", "mlp_bias": "true", "qk_norm": "head"}
LEARNED = {"positions": "learned", "norm": "layer", "norm_bias": "true", "max_seq": "64"}
MODELS: dict[str, dict[str, str]] = {
    "tiny": {},
    "tied": {"tied": "true"},
    "odd vocab": {"vocab": "251"},
    "tied, odd vocab": {"tied": "true", "vocab": "251"},
    "one KV head": {"kv_heads": "1"},
    "biased, qk-norm": BIASED,
    "biased, learned, layer norm": BIASED | LEARNED,
}


@dataclass(frozen=True)
class Case:
    """One pipeline to prove; `zero` and `gather` are None where there is no data axis."""

    schedule: str
    layout: str
    chunks: int
    zero: int | None = None
    gather: str | None = None
    recompute: str | None = None  # drawn

    def __str__(self) -> str:
        words = [self.schedule, self.layout, f"chunks={self.chunks}"]
        words += [f"{name}={value}" for name, value in self.sharding.items()]
        return " ".join([*words, self.recomputed])

    @property
    def sharding(self) -> dict[str, int | str]:
        said = {"zero": self.zero, "gather": self.gather}
        return {name: value for name, value in said.items() if value is not None}

    def draw(self, what: str, options: int) -> int:
        """A number below `options`, the same on every machine."""
        key = (self.schedule, self.layout, self.chunks, self.zero, self.gather, what)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % options

    @property
    def recomputed(self) -> str:
        return self.recompute or RECOMPUTES[self.draw("recompute", len(RECOMPUTES))]

    @property
    def model(self) -> str:
        """No asynchronous schedule takes a tied model."""
        names = [name for name in MODELS if not (self.is_asynchronous and "tied" in name)]
        return names[self.draw("model", len(names))]

    @property
    def bucket(self) -> int | None:
        return BUCKETS[self.draw("bucket", len(BUCKETS))]

    @property
    def sp(self) -> bool:
        return "tp" not in self.layout or self.draw("sp", 3) > 0

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @property
    def settings(self) -> VerifySettings:
        return VerifySettings(steps=12 if self.is_asynchronous else 2)

    @cached_property
    def plan(self) -> Plan:
        ranks = int(self.layout.rpartition("=")[2])
        options = PlanOptions(
            "tiny",
            layout=self.layout,
            schedule=self.schedule,
            chunks=self.chunks,
            zero=self.zero,
            gather=self.gather,
            unit_size=None if self.bucket is None else self.bucket / 1e6,
            sp=self.sp,
            recompute=self.recomputed,
            set=MODELS[self.model] | {"layers": str(ranks * self.chunks + 1)},
        )
        return resolve(options, small=True)

    @property
    def splits(self) -> bool:
        """Whether some rank computes a weight gradient by itself."""
        schedule = self.plan.schedule
        steps = (step for rank in range(schedule.num_ranks) for step in merged(schedule, rank))
        return any(isinstance(step, Action) and step.kind == INPUT_GRAD for step in steps)

    def features(self) -> Iterator[str]:
        """What is new about a case that no other one has shown."""
        yield from (self.schedule, self.layout, self.model, f"chunks {self.chunks}")
        if self.layout == MIXED:
            backward = "split" if self.splits else "whole"
            others = (self.sharding, self.recomputed, f"sp={self.sp}", f"unit={self.bucket}")
            yield from (f"{backward} {other}" for other in others)


def cases() -> Iterator[Case]:
    """All of them."""
    for name in (*SYNCHRONOUS, *ASYNCHRONOUS):
        for ranks in PIPELINES:
            layout = f"pp={ranks}"
            yield from (Case(name, layout, chunks) for chunks in CHUNKS if _fits(name, chunks))
    for number, name in enumerate(SYNCHRONOUS):
        for place, (zero, gather) in enumerate(SHARDINGS):
            # Each pair of schedule, sharding and recomputation, without every triple of them.
            recompute = RECOMPUTES[(number + place) % len(RECOMPUTES)]
            yield Case(name, MIXED, choose(name).default_chunks, zero, gather, recompute)
    for name in ASYNCHRONOUS:
        yield from (Case(name, MIXED, 1, zero) for zero in (0, 1))


def _fits(name: str, chunks: int) -> bool:
    family: Family = choose(name)
    most = chunks if family.max_chunks is None else family.max_chunks
    return family.min_chunks <= chunks <= most


def part() -> list[Case]:
    """As few synchronous cases as show everything, each with the most new; by salt."""
    some = shuffled(case for case in cases() if not case.is_asynchronous)
    features = {case: set(case.features()) for case in some}
    left = set[str]().union(*features.values())
    found: list[Case] = []
    while left:
        found.append(max(features, key=lambda case: len(features[case] & left)))
        left -= features[found[-1]]
    return found


def prove(pool: Pool, case: Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    return run_trial(pool, case.plan, case.settings)


def cells(case: Case) -> list[str]:
    """What the table says about a case."""
    zero = " ".join(map(str, case.sharding.values()))
    bucket = "blocks" if case.bucket is None else f"{case.bucket // 1000} kB"
    layout = f"{case.layout} chunks={case.chunks}" + ("" if case.sp else " no-sp")
    return [case.schedule, layout, zero, case.recomputed, case.model, bucket]


def main() -> int:
    return Table(HEAD, COLUMNS, "pipelines", MOST_RANKS, prove, cells).run(cases())


if __name__ == "__main__":
    sys.exit(main())

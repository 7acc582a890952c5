"""Every kind of context parallelism, by itself and with the other dimensions; the rest by hash.

    python -m tests.ranks.contexts

runs all of them and prints a table in markdown; the tests run a few that differ most.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from fivefold.core.layout.splits import ContextKind
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.verify.compare import Dtype
from fivefold.verify.runs import VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge
from tests.ranks.table import PUBLISHED, Table
from tests.selection import shuffled

HEAD = """# Verified context layouts

Every kind on 2, 4 and 8 ranks, with packed documents (one to five of random lengths in a row), a
sliding window, one KV head and rows that need padding; with data and tensor ranks under every ZeRO
stage, and with tensor and pipeline ranks under split backwards. On `tiny` with 2 layers, or one for
each stage; in float64 where nothing else is said; 2 steps of AdamW. What a case does not ask for is
drawn by hash. Made by `make verify-all` on {date}.
"""
COLUMNS = ("context", "layout", "rows", "model", "recompute", "ZeRO")
KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
DEGREES = (2, 4, 8)
MOST_RANKS = 8
DATA, STAGES, HEADS = "dp=2 tp=2 cp=2", "tp=2 pp=2 cp=2", "tp=2 cp=2"
SCHEDULES = ("zb-h1", "zb-v", "dualpipe-v")
RECOMPUTES = ("none", "selective", "norm+attention", "act+mlp", "full:2", "full-but-attention")
# They compute some of it again.
OF_ATTENTION = ("selective", "norm+attention", "full:2", "full-but-attention")
ROWS: dict[str, dict[str, int | bool]] = {
    "whole": {},
    "packed": {"packed": True},
    "padded": {"seq": 37},
    "packed, padded": {"packed": True, "seq": 37},
    "mostly padding": {"seq": 17},
}
UNEVEN = "six KV heads"  # that four ranks do not divide
MODELS: dict[str, dict[str, str]] = {
    "tiny": {},
    "one KV head": {"kv_heads": "1"},
    "window": {"window": "7"},
    "tied": {"tied": "true"},
    "odd vocab": {"vocab": "251"},
    "learned, layer norm": {"positions": "learned", "norm": "layer", "max_seq": "64"},
    UNEVEN: {"heads": "12", "kv_heads": "6", "head_dim": "8"},
}
ATTENTION = ("one KV head", "window", UNEVEN)  # what changes attention meets every kind
ALONE = (("whole", "tiny"), ("packed", "tiny"), ("whole", "window"), ("whole", "one KV head"))
MORE = {2: ("padded", "window"), 4: ("packed, padded", "window"), 8: ("mostly padding", "tiny")}


@dataclass(frozen=True)
class Case:
    """One layout to prove; None is drawn."""

    context: ContextKind
    layout: str
    rows: str | None = None
    model: str | None = None
    recompute: str | None = None
    zero: int | None = None
    schedule: str | None = None
    sp: bool = True
    dtype: Dtype = "float64"

    def __str__(self) -> str:
        words = [self.context, self.layout, self.named_rows, self.named_model, self.recomputed]
        words += [] if self.zero is None else [f"zero={self.zero}"]
        words += [each for each in (self.schedule, None if self.sp else "no-sp") if each]
        return ", ".join(words if self.dtype == "float64" else [*words, self.dtype])

    def draw(self, what: str, options: int) -> int:
        """A number below `options`, the same on every machine."""
        said = tuple(getattr(self, name) for name in self.__dataclass_fields__)
        digest = hashlib.blake2b(repr((*said, what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % options

    @property
    def named_rows(self) -> str:
        return self.rows or [*ROWS][self.draw("rows", len(ROWS))]

    @property
    def named_model(self) -> str:
        return self.model or [*MODELS][self.draw("model", len(MODELS))]

    @property
    def recomputed(self) -> str:
        return self.recompute or RECOMPUTES[self.draw("recompute", len(RECOMPUTES))]

    @property
    def settings(self) -> VerifySettings:
        return VerifySettings(dtype=self.dtype)

    @cached_property
    def plan(self) -> Plan:
        stages = 2 if self.schedule in (None, "zb-h1") else 4
        options = PlanOptions(
            "tiny",
            layout=self.layout,
            context=self.context,
            recompute=self.recomputed,
            zero=self.zero,
            schedule=self.schedule or "1f1b",
            sp=self.sp,
            microbatches=None if self.schedule else 1 + ("dp" in self.layout),
            set={**MODELS[self.named_model], "layers": str(stages)},
            **ROWS[self.named_rows],  # type: ignore[arg-type]
        )
        return resolve(options, small=True)

    def features(self) -> Iterator[tuple[object, ...]]:
        """What is new about a case that no other one has shown."""
        for each in (self.layout, self.named_rows, self.recomputed):
            yield self.context, each
        others = (f"ZeRO {self.zero}", self.schedule, f"sp {self.sp}", self.dtype)
        yield from ((self.layout, each) for each in others)
        yield self.named_model, self.context if self.named_model in ATTENTION else None


def cases() -> Iterator[Case]:
    """All of them."""
    for kind in KINDS:
        for degree in DEGREES:
            for rows, model in (*ALONE, MORE[degree]):
                yield Case(kind, f"cp={degree}", rows, model)
        yield from (Case(kind, "cp=4", model=UNEVEN, recompute=each) for each in OF_ATTENTION)
        yield from (Case(kind, DATA, zero=zero) for zero in range(4))
        yield from (Case(kind, STAGES, schedule=name) for name in SCHEDULES)
        yield from (Case(kind, HEADS, model=name) for name in MODELS if name != "tiny")
        yield Case(kind, HEADS, sp=False)
        yield Case(kind, HEADS, dtype="float32")


def part() -> list[Case]:
    """As few cases as show everything, each with the most new; by salt."""
    features = {case: set(case.features()) for case in shuffled(cases())}
    left = set[tuple[object, ...]]().union(*features.values())
    found: list[Case] = []
    while left:
        found.append(max(features, key=lambda case: len(features[case] & left)))
        left -= features[found[-1]]
    return found


def prove(pool: Pool, case: Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks.

    The mesh must have noted every collective that the dispatcher saw.
    """
    plan, settings = case.plan, case.settings
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    for heard in (heard for each in runs for heard in each.heard):
        assert heard.noted and heard.seen == heard.noted
    return judge(plan, settings, runs, truths)


def most_error(case: Case) -> float:
    """Beside the tolerance that is derived."""
    return PUBLISHED if case.dtype == "float64" else math.inf


def cells(case: Case) -> list[str]:
    """What the table says about a case."""
    layout = " ".join(filter(None, [case.layout, case.schedule, None if case.sp else "no-sp"]))
    model = case.named_model if case.dtype == "float64" else f"{case.named_model}, {case.dtype}"
    zero = str(case.plan.layout.zero)
    return [case.context, layout, case.named_rows, model, case.recomputed, zero]


def main() -> int:
    return Table(HEAD, COLUMNS, "layouts", MOST_RANKS, prove, cells, most_error=most_error).run(
        cases()
    )


if __name__ == "__main__":
    sys.exit(main())

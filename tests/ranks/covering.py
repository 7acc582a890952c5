"""A covering array: every two values that can meet do so in some run of at most 8 ranks.

    python -m tests.ranks.covering

runs all of them and prints a table in markdown; the tests run a few. Two values that never
meet have their reason in `why_never`, and the foot of the table lists them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from fivefold.commands.verify import runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.rules import problems
from fivefold.core.layout.splits import ContextKind
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.core.schedule.catalog import FAMILIES, family

if TYPE_CHECKING:  # pairs are counted without torch
    from fivefold.launch.processes import Pool
    from fivefold.verify.trial import VerifyVerdict

HEAD = """# Verified combinations

Every two values of dp, tp, pp, cp, ep, etp, sequence parallelism, schedule, balancing, context
kind, ZeRO stage, recomputation, offload, tied embeddings and odd vocabulary that can meet do so in
one of these runs of at most 8 ranks; those that cannot are below. On `tiny-moe` with as many layers
as stages and at least one more than pipeline ranks, as many microbatches of 2 rows as the schedule
needs, in float64, 2 steps of AdamW; asynchronous schedules 2 steps more than stages, held against
an emulation of their delays. Made by `make verify-all` on {date}.
"""
COLUMNS = (
    "layout", "sp", "schedule", "balance", "context", "ZeRO", "recompute", "offload", "model",
)  # fmt: skip
MODEL = "tiny-moe"
MOST_RANKS = 8

Value = int | str
Word = tuple[str, Value]  # a factor and one of its values
Pair = tuple[Word, Word]

FACTORS: dict[str, tuple[Value, ...]] = {
    "dp": (1, 2, 4),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "sp": ("on", "off"),
    "schedule": tuple(each.name for each in FAMILIES),
    "balance": (
        "none",
        "aux",
        "aux-seq",
        "aux-global",
        "z",
        "bias",
        "capacity:1.25",
        "capacity-position:1",
        "capacity-pad:1.25",
    ),
    "context": get_args(ContextKind),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "cpu"),
    "tied": ("no", "yes"),
    "vocab": ("even", "odd"),
}
DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp")
OF_LAYOUT = (*DEGREES, "sp")
OTHERS = tuple(name for name in FACTORS if name not in OF_LAYOUT)
WORDS: tuple[Word, ...] = tuple((name, value) for name in FACTORS for value in FACTORS[name])

# A factor that does nothing where its axis has one rank, and why.
IDLE = {
    "sp": ("tp", "one tensor rank holds all tokens, with sequence parallelism or without"),
    "schedule": ("pp", "one pipeline rank takes its microbatches in turn, whatever the schedule"),
    "context": ("cp", "one context rank holds the whole row, whatever the kind"),
}
# What an asynchronous schedule takes of a factor, and why no more.
ASYNCHRONOUS: dict[str, tuple[tuple[Value, ...], str]] = {
    "zero": ((0, 1), "the core refuses it: older versions of weights are kept whole"),
    "tied": (
        ("no",),
        "the core refuses it: both ends share a weight, each with its own delay",
    ),
    "balance": (("none",), "the core refuses it: there is no step whose tokens could be counted"),
}


@dataclass(frozen=True)
class Case:
    """One run; None is a factor whose axis has one rank."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    sp: str | None
    schedule: str | None = None
    balance: str = "none"
    context: str | None = None
    zero: int = 0
    recompute: str = "none"
    offload: str = "none"
    tied: str = "no"
    vocab: str = "even"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.words)

    @cached_property
    def words(self) -> list[Word]:
        """What it has a value of."""
        said = ((each.name, getattr(self, each.name)) for each in fields(self))
        return [(name, value) for name, value in said if value is not None]

    @property
    def pairs(self) -> set[Pair]:
        """The pairs of values it covers."""
        return set(itertools.combinations(self.words, 2))

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def layout(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in DEGREES)

    @property
    def model(self) -> dict[str, str]:
        """The changes to the model, its number of layers left out."""
        tied = {"tied": "true"} if self.tied == "yes" else {}
        odd = {"vocab": "251"} if self.vocab == "odd" else {}
        return tied | odd | ({"moe.bias": "true"} if self.balance == "bias" else {})

    @property
    def steps(self) -> int:
        """Two; where weights are late, until they are as late as they get, and two more."""
        return self.pp + 2 if self.schedule and family(self.schedule).asynchronous else 2

    @property
    def options(self) -> PlanOptions:
        named = family(self.schedule or "1f1b")
        chunks = named.chunks_on(self.pp, None)
        return PlanOptions(
            MODEL,
            layout=self.layout,
            sp=self.sp != "off",
            schedule=named.name,
            microbatches=named.smallest_count(max(2, self.pp), self.pp, chunks),
            microbatch_size=2,  # so that a row is not a microbatch
            balance=self.balance,
            context=self.context or "zigzag",
            zero=self.zero,
            recompute=self.recompute,
            set=self.model | {"layers": str(max(self.pp + 1, self.pp * chunks))},
        )

    @cached_property
    def plan(self) -> Plan:
        return runnable(self.options)

    @property
    def is_legal(self) -> bool:
        """Whether the core accepts it."""
        try:
            return self.plan.layout.world <= MOST_RANKS
        except FivefoldError:
            return False


class Never(NamedTuple):
    """Why two values are in no run: too many ranks, one does nothing, or the core refuses them."""

    kind: Literal["count", "idle", "refused"]
    reason: str


def why_never(pair: Pair) -> Never | None:
    """The reason, or None where some run can have both values."""
    said: dict[str, Any] = dict(pair)
    ranks = fewest_ranks(said)
    if ranks > MOST_RANKS:
        over = ", for experts lie over dp·cp·tp" if "ep" in said else ""
        return Never("count", f"{ranks} ranks at least{over}")
    for name, (axis, reason) in IDLE.items():
        if name in said and said.get(axis) == 1:
            return Never("idle", reason)
    if "schedule" in said and family(said["schedule"]).asynchronous:
        for name, (taken, reason) in ASYNCHRONOUS.items():
            if name in said and said[name] not in taken:
                return Never("refused", reason)
    return None


def fewest_ranks(said: dict[str, Any]) -> int:
    """The fewest ranks with these degrees; those of the experts lie over those of a stage."""
    dp, tp, pp, cp, ep, etp = (said.get(name, 1) for name in DEGREES)
    return pp * math.lcm(dp * tp * cp, ep * etp)


def all_pairs() -> Iterator[Pair]:
    """Every two values of two factors."""
    for one, other in itertools.combinations(FACTORS, 2):
        for first in FACTORS[one]:
            yield from (((one, first), (other, second)) for second in FACTORS[other])


@cache
def cases() -> tuple[Case, ...]:
    """All of them: greedily, for the pair that needs most ranks, on no more than it needs."""
    met = _Met()
    layouts = list(_layouts())
    fits = {word: [_fits(case, word) for case in layouts] for word in WORDS}
    homes: dict[Pair, list[Case]] = {}
    for pair in (pair for pair in all_pairs() if why_never(pair) is None):
        both = map(all, zip(*(fits[word] for word in pair), strict=True))
        fitting = list(itertools.compress(layouts, both))
        fewest = min(case.world for case in fitting)
        homes[pair] = [case for case in fitting if case.world == fewest]

    def hardest(pair: Pair) -> tuple[int, int]:
        (one, _), (other, _) = pair
        return homes[pair][0].world, len(FACTORS[one]) * len(FACTORS[other])

    found: list[Case] = []
    for pair in sorted(homes, key=hardest, reverse=True):
        if not met.has(pair):
            filled = sorted((met.filled(case, pair) for case in homes[pair]), key=met.gain)
            found.append(next(case for case in reversed(filled) if case.is_legal))
            met.add(found[-1])
    return tuple(found)


class _Met:
    """Which values have met. A set of values is a number with a bit for each of them."""

    def __init__(self) -> None:
        self.bit = {word: 1 << place for place, word in enumerate(WORDS)}
        self.met = dict(self.bit)  # each with itself
        self.used: Counter[Word] = Counter()
        self.never = dict.fromkeys(WORDS, 0)
        for one, other in (pair for pair in all_pairs() if why_never(pair)):
            self.never[one] |= self.bit[other]
            self.never[other] |= self.bit[one]

    def has(self, pair: Pair) -> bool:
        one, other = pair
        return bool(self.met[one] & self.bit[other])

    def gain(self, case: Case) -> int:
        """Pairs that would be new, each counted from both sides."""
        together = sum(self.bit[word] for word in case.words)
        return sum((together & ~self.met[word]).bit_count() for word in case.words)

    def add(self, case: Case) -> None:
        together = sum(self.bit[word] for word in case.words)
        for word in case.words:
            self.met[word] |= together
            self.used[word] += 1

    def filled(self, case: Case, pair: Pair) -> Case:
        """A layout with the pair's values, and then of each factor the one that meets most."""
        said = {name: getattr(case, name) for name in OF_LAYOUT} | dict(pair)
        together = sum(self.bit[word] for word in said.items() if word[1] is not None)
        for name in (name for name in OTHERS if name not in said):
            words = [
                (name, value)
                for value in FACTORS[name]
                if not self.never[name, value] & together and _matters(case, (name, value))
            ]
            if words:
                best = max(words, key=lambda word: (self._news(word, together), -self.used[word]))
                said[name] = best[1]
                together |= self.bit[best]
        return replace(case, **said)

    def _news(self, word: Word, together: int) -> int:
        return (together & ~self.met[word]).bit_count()


def _layouts() -> Iterator[Case]:
    """Every legal layout of few enough ranks, with and without sequence parallelism."""
    shape = models.load(MODEL)
    for degrees in itertools.product(*(FACTORS[name] for name in DEGREES)):
        said: dict[str, Any] = dict(zip(DEGREES, degrees, strict=True))
        for sp in FACTORS["sp"] if said["tp"] > 1 else (None,):
            case = Case(**said, sp=sp)  # type: ignore[arg-type]
            layout = Layout.parse(case.layout, sp=sp != "off")
            if case.world <= MOST_RANKS and not problems(layout, shape, seq=shape.max_seq):
                yield case


def _fits(case: Case, word: Word) -> bool:
    """Whether a layout has, or can have, a value."""
    name, value = word
    return getattr(case, name) == value if name in OF_LAYOUT else _matters(case, word)


def _matters(case: Case, word: Word) -> bool:
    """Whether a value does something on this layout, or can do so on no other with its degrees."""
    name, value = word
    if name in IDLE and getattr(case, IDLE[name][0]) == 1:
        return False
    if name == "zero" and case.dp * case.cp == 1:
        return value == 0  # there is nobody to share with
    if value == "hybrid" and case.cp == 2:
        return 4 in (case.dp, case.tp, case.pp)  # two ranks are a mere ring
    return True


def prove(pool: Pool, case: Case) -> VerifyVerdict:
    """Run one case on a pool of at least one more process than it has ranks."""
    from fivefold.verify.runs import VerifySettings
    from fivefold.verify.trial import run_trial

    return run_trial(
        pool, case.plan, VerifySettings(offload=case.offload == "cpu", steps=case.steps)
    )


def cells(case: Case) -> list[object]:
    """What the table says about a case."""
    named = ", ".join(f"{key}={value}" for key, value in case.model.items())
    free = (case.sp, case.schedule, case.balance, case.context)
    said = [each or "" for each in free]
    layout = str(Layout.parse(case.layout))
    return [layout, *said, case.zero, case.recompute, case.offload, named]


def foot() -> str:
    """The pairs that are in no run, by reason."""
    found: defaultdict[Never, list[str]] = defaultdict(list)
    for pair in all_pairs():
        if never := why_never(pair):
            found[never].append(" with ".join(f"{name}={value}" for name, value in pair))
    num_pairs = sum(map(len, found.values()))
    lines = [f"- {never.reason}: {', '.join(pairs)}" for never, pairs in found.items()]
    return "\n".join([f"{num_pairs} pairs are in no run:", "", *lines])


def main() -> int:
    from tests.ranks.table import Table

    table = Table(HEAD, COLUMNS, "combinations", MOST_RANKS, prove, cells, foot())
    return table.run(cases())


if __name__ == "__main__":
    sys.exit(main())

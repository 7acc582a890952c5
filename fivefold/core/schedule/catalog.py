"""The bubbles of named schedules as the papers write them, and where those forms hold.

All are times, for equal stages and free transfers; p counts ranks, m microbatches, v chunks a rank,
and F, B, W are the times of a full stage. F&B is an overlapped pair that gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fivefold.core.errors import IllegalSchedule, UnknownName, bullets, counted
from fivefold.core.schedule import MOST_CHUNKS, Schedule, flush, v_shape, zero_bubble
from fivefold.core.schedule.clock import Objective

Times = tuple[float, float, float]


def _always(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    return True


@dataclass(frozen=True)
class ClosedForm:
    """`text` is the time of the bubble, `domain` where it is exact, `holds` the same to compute.

    `of` says whether the bubble is that of the makespan or of the longest span of a rank.
    """

    text: str
    domain: str = ""
    holds: Callable[[Times, int, int], bool] = _always
    of: Objective = "makespan"


def _short_weights(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return weight <= min(forward, backward) and num_microbatches >= num_ranks


def _short_weights_twice(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return weight <= forward and 2 * weight <= forward + backward and enough


def _balanced(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return max(forward, weight) <= backward <= 2 * weight and enough


def _long_backward(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return max(forward, weight) <= backward


def _filled(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches >= num_ranks


FLUSH = ClosedForm("(p−1)(F+B+W)")
INTERLEAVED = ClosedForm("(p−1)(F+B+W)/v")
BREADTH_FIRST = ClosedForm("(p−1)(F+B+W)/v", "m ≥ p", _filled)
ZB_H1 = ClosedForm("(p−1)(F+B−W)", "W ≤ F, W ≤ B and m ≥ p", _short_weights)
ZB_H2 = ClosedForm("(p−1)(F+B−2W)", "W ≤ F, 2W ≤ F+B and m ≥ 2p−1", _short_weights_twice, of="span")
ZB_INTERLEAVED = ClosedForm("(p−1)(F+B−W)/v", "W ≤ F, W ≤ B and m ≥ p", _short_weights)
ZB_V = ClosedForm("(p−1)B/2", "F ≤ B, W ≤ B ≤ 2W and m ≥ 2p−1", _balanced)
DUALPIPE = ClosedForm("(p/2−1)(F&B+B−2W)", "F ≤ B and W ≤ B", _long_backward)
DUALPIPE_V = ClosedForm("(p−1)(F&B+B−2W)/2", "F ≤ B and W ≤ B", _long_backward)

# All schedules by name: where each is legal, what its bubble is, and why it is there.


AUTO = "auto"
MOST_STAGES = 4096
MOST_ACTIONS = 200_000  # stages × microbatches × chunks: what is made and played in seconds


@dataclass(frozen=True)
class Rule:
    """One bound of a domain; `of_stages` where the number of microbatches cannot mend it."""

    text: str
    holds: Callable[[int, int], bool]
    of_stages: bool = False


_ROUNDS = Rule("microbatches must be a multiple of the stages", lambda p, m: m % p == 0)
_EVEN_RANKS = Rule("stages must be even: two directions meet", lambda p, m: p % 2 == 0, True)
_EVEN_BATCH = Rule("microbatches must be even: half in each direction", lambda p, m: m % 2 == 0)
_TWICE = Rule("microbatches must be at least twice the stages", lambda p, m: m >= 2 * p)
_FILLED = Rule(
    "microbatches must be at least the stages, or weights are two updates old",
    lambda p, m: m >= p,
)


@dataclass(frozen=True)
class Family:
    """One named schedule: its maker, its domain and its explanation."""

    name: str
    make: Callable[[int, int, int], Schedule]
    because: str
    closed_form: ClosedForm | None = None
    min_chunks: int = 1
    max_chunks: int | None = 1
    rules: tuple[Rule, ...] = ()
    asynchronous: bool = False
    aliases: tuple[str, ...] = ()
    only: tuple[int, int, int] | None = None  # a file fits one (stages, microbatches, chunks)

    @property
    def default_chunks(self) -> int:
        """What is used when nobody says: the minimum, or two for a search that may choose."""
        return 2 if self.name == AUTO else self.min_chunks

    def chunks_on(self, num_ranks: int, asked: int | None) -> int:
        """The chunks of a layout with so many pipeline ranks; without a pipeline there is one."""
        if asked is not None:
            return asked
        return self.default_chunks if num_ranks > 1 else 1

    def stages_on(self, num_ranks: int, num_chunks: int) -> int | None:
        """How many stages the schedule has there; None where only a search can tell."""
        if num_ranks == 1:
            return 1
        if self.only is not None:  # ranks of a file may hold different numbers of stages
            return self.make(*self.only).num_stages
        return None if self.name == AUTO else num_ranks * num_chunks

    def problems(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
        """Every rule of the domain that these numbers break."""
        found = [
            f"{what} must be at least 1"
            for what, number in (("stages", num_ranks), ("microbatches", num_microbatches))
            if number < 1
        ]
        if num_chunks < self.min_chunks:
            found.append(f"chunks must be at least {self.min_chunks}")
        if self.max_chunks is not None and num_chunks > self.max_chunks:
            found.append(f"chunks must be {self.max_chunks}")
        if num_ranks >= 1:
            found += [
                rule.text for rule in self.rules if not rule.holds(num_ranks, num_microbatches)
            ]
        return found + list(too_large(num_ranks, num_microbatches, num_chunks))

    def nearest(
        self, num_ranks: int, num_microbatches: int, num_chunks: int
    ) -> tuple[int, int, int] | None:
        """The legal (stages, microbatches, chunks) that changes stages least, then the rest."""
        if self.only is not None:
            return self.only
        chunks = max(num_chunks, self.min_chunks)
        if self.max_chunks is not None:
            chunks = min(chunks, self.max_chunks)
        here = max(1, num_ranks)
        for depths in ((here,), (here - 1, here + 1)):
            legal = [
                (ranks, count)
                for ranks in depths
                for count in self._counts(ranks, num_microbatches)
                if not self.problems(ranks, count, chunks)
            ]
            if legal:
                ranks, count = min(
                    legal, key=lambda one: (abs(one[1] - num_microbatches), -one[1], -one[0])
                )
                return ranks, count, chunks
        return None

    def _counts(self, num_ranks: int, num_microbatches: int) -> range:
        """Where the nearest legal number of microbatches lies, if there is one."""
        if not self._may_have(num_ranks):
            return range(0)
        least = max(1, num_microbatches - 2 * num_ranks)
        return range(least, max(num_microbatches, 2 * num_ranks) + 2 * num_ranks)

    def _may_have(self, num_ranks: int) -> bool:
        """Whether some number of microbatches may be legal on so many ranks."""
        return 1 <= num_ranks <= MOST_STAGES and all(
            rule.holds(num_ranks, 0) for rule in self.rules if rule.of_stages
        )

    def smallest_count(self, at_least: int, num_ranks: int, num_chunks: int) -> int:
        """The smallest legal number of microbatches from `at_least`, which it is where none is."""
        if self.only is not None:
            return self.only[1]
        hopeless = not self._may_have(num_ranks) or any(too_large(num_ranks, at_least, num_chunks))
        counts = range(0) if hopeless else range(at_least, at_least + 2 * num_ranks + 1)
        legal = (count for count in counts if not self.problems(num_ranks, count, num_chunks))
        return next(legal, at_least)

    def require(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
        """Refuse numbers outside the domain, with every rule and the nearest legal numbers."""
        if self.problems(num_ranks, num_microbatches, num_chunks):
            head, *reasons = self._refusal(num_ranks, num_microbatches, num_chunks)
            raise IllegalSchedule(bullets(head, reasons))

    def refusal(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
        """Why these numbers are outside the domain, in one line."""
        head, *reasons = self._refusal(num_ranks, num_microbatches, num_chunks)
        return f"{head} {'; '.join(reasons)}"

    def _refusal(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[str]:
        numbers = (num_ranks, num_microbatches, num_chunks)
        yield f"{self.name} cannot run {_numbers(*numbers)}:"
        if far := list(too_large(*numbers)):  # nothing is near, and looking would take forever
            yield from far
            return
        yield from self.problems(*numbers)
        if near := self.nearest(*numbers):
            yield f"nearest: {_numbers(*near)}"


def too_large(num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[str]:
    """What makes a schedule too large to be made and played."""
    if num_ranks > MOST_STAGES:
        yield f"stages must be at most {MOST_STAGES:,}: lower them"
    if num_chunks > MOST_CHUNKS:
        yield f"chunks must be at most {MOST_CHUNKS}: lower them"
    if min(num_ranks, num_chunks) >= 1 and num_ranks * num_microbatches * num_chunks > MOST_ACTIONS:
        yield (
            f"stages × microbatches × chunks must be at most {MOST_ACTIONS:,}: lower one of them; "
            "the bubble hardly depends on microbatches beyond 4p"
        )


def _numbers(num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
    return ", ".join(
        (
            counted(num_ranks, "stage"),
            counted(num_microbatches, "microbatch"),
            counted(num_chunks, "chunk"),
        )
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpipe", flush.gpipe,
        "ranks wait while the pipeline fills, before the first forward reaches them, and while it "
        "drains", FLUSH, aliases=("afab",),
    ),
    Family(
        "1f1b", flush.one_forward_one_backward,
        "the pipeline fills and drains as in GPipe; what it saves is memory",
        FLUSH, aliases=("pipedream-flush",),
    ),
    Family(
        "interleaved", flush.interleaved,
        "the pipeline fills and drains by chunks, which are v times shorter than stages",
        INTERLEAVED, min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
    ),
    Family(
        "bfs", flush.breadth_first,
        "the pipeline fills and drains by chunks; all microbatches pass a chunk before the next",
        BREADTH_FIRST, min_chunks=2, max_chunks=None,
    ),
    Family(
        "zb-h1", zero_bubble.zb_h1,
        "the pipeline fills and drains as in 1F1B; weight gradients that were kept back fill what "
        "they can of it, in the same memory", ZB_H1,
    ),
    Family(
        "zb-h2", zero_bubble.zb_h2,
        "ranks start one by one; with up to twice the memory of 1F1B there are more weight "
        "gradients to fill the drain", ZB_H2,
    ),
    Family(
        "zb-interleaved", zero_bubble.zb_interleaved,
        "the pipeline fills and drains by chunks, and weight gradients fill what they can of it",
        ZB_INTERLEAVED, min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
    ),
    Family(
        "zb-v", v_shape.zb_v,
        "ranks wait until the first microbatch has come down the V, and later wherever weight "
        "gradients are too few or too short to cover the way of a gradient",
        ZB_V, min_chunks=2, max_chunks=2,
    ),
    Family(
        "v-half", v_shape.v_half,
        "with less memory fewer microbatches are in flight, too few to cover fill and drain",
        min_chunks=2, max_chunks=2,
    ),
    Family(
        "v-min", v_shape.v_min,
        "with the least memory so few microbatches are in flight that ranks wait for each to come "
        "back", min_chunks=2, max_chunks=2,
    ),
    Family(
        "dualpipe", v_shape.dualpipe,
        "two directions meet in the middle, so only half the ranks lie between a rank and its "
        "nearer end", DUALPIPE, rules=(_EVEN_RANKS, _EVEN_BATCH, _TWICE),
    ),
    Family(
        "dualpipe-v", v_shape.dualpipe_v,
        "the pipeline fills and drains by chunks, two of which a rank folds into one V",
        DUALPIPE_V, min_chunks=2, max_chunks=2, rules=(_TWICE,),
    ),
    Family(
        "pipedream", flush.pipedream,
        "the window shown has a fill and a drain, which windows that follow one another do without",
        asynchronous=True,
    ),
    Family(
        "pipedream-2bw", flush.pipedream_2bw,
        "the window shown has a fill and a drain, which windows that follow one another do without",
        rules=(_FILLED,), asynchronous=True,
    ),
)  # fmt: skip


def names() -> list[str]:
    """Every name the command line accepts, aliases included."""
    return [*(name for family in FAMILIES for name in (family.name, *family.aliases)), AUTO]


def family(name: str) -> Family:
    """Look a schedule up by name or alias."""
    for each in FAMILIES:
        if name.lower() in (each.name, *each.aliases):
            return each
    raise UnknownName("schedule", name, names())


def make(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Make a named schedule, or refuse with the rule and the nearest legal numbers."""
    found = family(name)
    chunks = found.default_chunks if num_chunks is None else num_chunks
    found.require(num_ranks, num_microbatches, chunks)
    return found.make(num_ranks, num_microbatches, chunks)


def synchronous(
    num_ranks: int, num_microbatches: int, max_chunks: int
) -> Iterator[tuple[Family, int]]:
    """The families that compute what one device would, with every legal number of chunks."""
    for each in FAMILIES:
        if each.asynchronous:
            continue
        for chunks in range(each.min_chunks, 1 + min(max_chunks, each.max_chunks or max_chunks)):
            if not each.problems(num_ranks, num_microbatches, chunks):
                yield each, chunks

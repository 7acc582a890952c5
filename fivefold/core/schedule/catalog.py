"""All schedules by name: where each is legal, what its bubble is, and why it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fivefold.core.errors import IllegalSchedule, UnknownName, bullets
from fivefold.core.schedule import asynchronous, dualpipe, flush, vshape, zero_bubble
from fivefold.core.schedule.value import Schedule

AUTO = "auto"
Rule = tuple[str, Callable[[int, int], bool]]

_ROUNDS: Rule = ("microbatches must be a multiple of the stages", lambda p, m: m % p == 0)
_EVEN_RANKS: Rule = ("stages must be even: two directions meet", lambda p, m: p % 2 == 0)
_EVEN_BATCH: Rule = ("microbatches must be even: half in each direction", lambda p, m: m % 2 == 0)
_TWICE: Rule = ("microbatches must be at least twice the stages", lambda p, m: m >= 2 * p)
_FILLED: Rule = (
    "microbatches must be at least the stages, or weights are two updates old",
    lambda p, m: m >= p,
)


@dataclass(frozen=True)
class Family:
    """One named schedule: its maker, its domain and its explanation."""

    name: str
    make: Callable[[int, int, int], Schedule]
    bubble: str
    because: str
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
            found += [text for text, holds in self.rules if not holds(num_ranks, num_microbatches)]
        return found

    def nearest(
        self, num_ranks: int, num_microbatches: int, num_chunks: int
    ) -> tuple[int, int, int]:
        """The legal (stages, microbatches, chunks) that changes stages least, then the rest."""
        if self.only is not None:
            return self.only
        chunks = max(num_chunks, self.min_chunks)
        if self.max_chunks is not None:
            chunks = min(chunks, self.max_chunks)
        legal = (
            (ranks, microbatches, chunks)
            for ranks in range(max(1, num_ranks - 1), max(1, num_ranks) + 2)
            for microbatches in range(1, max(num_microbatches, 2 * ranks) + 2 * ranks)
            if not self.problems(ranks, microbatches, chunks)
        )
        return min(
            legal,
            key=lambda each: (
                abs(each[0] - num_ranks),
                abs(each[1] - num_microbatches),
                -each[1],
                -each[0],
            ),
        )

    def smallest_count(self, at_least: int, num_ranks: int, num_chunks: int) -> int:
        """The smallest legal number of microbatches from `at_least`, or the nearest legal one."""
        counts = range(at_least, at_least + 2 * num_ranks + 1)
        legal = (count for count in counts if not self.problems(num_ranks, count, num_chunks))
        return next(legal, self.nearest(num_ranks, at_least, num_chunks)[1])

    def require(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
        """Refuse numbers outside the domain, with every rule and the nearest legal numbers."""
        problems = self.problems(num_ranks, num_microbatches, num_chunks)
        if problems:
            near = self.nearest(num_ranks, num_microbatches, num_chunks)
            given = _numbers(num_ranks, num_microbatches, num_chunks)
            way_out = f"nearest: {_numbers(*near)}"
            raise IllegalSchedule(bullets(f"{self.name} cannot run {given}:", [*problems, way_out]))


def _numbers(num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
    return f"{num_ranks} stages, {num_microbatches} microbatches, {num_chunks} chunks"


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpipe", flush.gpipe, "(p−1)(F+B+W)",
        "every rank waits for the pipeline to fill before its first forward and to empty after its "
        "last backward", aliases=("afab",),
    ),
    Family(
        "1f1b", flush.one_forward_one_backward, "(p−1)(F+B+W)",
        "the pipeline fills and drains as in GPipe; only the memory is smaller",
        aliases=("pipedream-flush",),
    ),
    Family(
        "interleaved", flush.interleaved, "(p−1)(F+B+W)/v",
        "the pipeline fills and drains by chunks, which are v times shorter than stages",
        min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
    ),
    Family(
        "bfs", flush.breadth_first, "(p−1)(F+B+W)/v",
        "the pipeline fills and drains by chunks; all microbatches pass a chunk before the next",
        min_chunks=2, max_chunks=None,
    ),
    Family(
        "zb-h1", zero_bubble.zb_h1, "(p−1)(F+B−W)",
        "weight gradients kept back fill a third of what 1F1B idles, in the same memory",
    ),
    Family(
        "zb-h2", zero_bubble.zb_h2, "(p−1)(F+B−2W) of each rank's own span",
        "with twice the memory weight gradients fill the drain too; ranks still start one by one",
    ),
    Family(
        "zb-interleaved", zero_bubble.zb_interleaved, "(p−1)(F+B−W)/v",
        "weight gradients fill part of the drain, and chunks make fill and drain shorter",
        min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
    ),
    Family(
        "zb-v", vshape.zb_v, "(p−1)B/2 where W ≤ F ≤ B ≤ 2W and m ≥ 2p−1",
        "only the start is idle, until the first microbatch has gone down the V; weight gradients "
        "fill the rest", min_chunks=2, max_chunks=2,
    ),
    Family(
        "v-half", vshape.v_half, "about 1.5p at F=B=W=1",
        "with half the memory there are too few microbatches in flight to cover fill and drain",
        min_chunks=2, max_chunks=2,
    ),
    Family(
        "v-min", vshape.v_min, "about 2p at F=B=W=1",
        "with a third of the memory, ranks wait for each microbatch to come back",
        min_chunks=2, max_chunks=2,
    ),
    Family(
        "dualpipe", dualpipe.dualpipe, "(p/2−1)(F&B+B+W−3W)",
        "two directions meet in the middle, so only half the ranks lie between a rank and its "
        "nearer end", rules=(_EVEN_RANKS, _EVEN_BATCH, _TWICE),
    ),
    Family(
        "dualpipe-v", dualpipe.dualpipe_v, "(p−1)(F&B+B+W−3W)/2",
        "the fold halves the chunks that fill and drain the pipeline",
        min_chunks=2, max_chunks=2, rules=(_TWICE,),
    ),
    Family(
        "pipedream", asynchronous.pipedream, "none in steady state",
        "it is only the first fill and the last drain: steps follow one another without draining",
        asynchronous=True,
    ),
    Family(
        "pipedream-2bw", asynchronous.pipedream_2bw, "none in steady state",
        "it is only the first fill and the last drain: steps follow one another without draining",
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

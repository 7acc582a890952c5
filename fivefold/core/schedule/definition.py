"""What is known of one named schedule: how it is made, where it is legal, what it costs.

A `Family` has one entry in `catalog.py`. The planner prices a schedule by what its family says and
never by its name, so every field that has no default must be stated for a new schedule.

Legend: p pipeline ranks, m microbatches, v chunks per rank; F, B, W times of a full stage (1/p of
the model) for one microbatch: forward, input gradient, weight gradient. F&B is an overlapped pair
that gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from fivefold.core import IllegalSchedule, bullets, counted
from fivefold.core.schedule.clock import Objective
from fivefold.core.schedule.in_flight import HeldMoments, RankPosition, none_deferred
from fivefold.core.schedule.schedule import (
    MOST_CHUNKS,
    Placement,
    Schedule,
    loop_placement,
    mirrored_placement,
    v_placement,
)

if TYPE_CHECKING:
    from fivefold.core.schedule.in_flight import Array

AUTO = "auto"
MOST_STAGES = 4096
MOST_ACTIONS = 200_000  # stages × microbatches × chunks: what is made and played in seconds

Times = tuple[float, float, float]
PlacementKind = Literal["loop", "V", "bidirectional"]  # a loop of one chunk is linear
PLACEMENTS: dict[PlacementKind, Callable[[int, int], Placement]] = {
    "loop": loop_placement,
    "V": lambda num_ranks, num_chunks: v_placement(num_ranks),
    "bidirectional": lambda num_ranks, num_chunks: mirrored_placement(num_ranks),
}


def _always(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    return True


@dataclass(frozen=True)
class ClosedForm:
    """The bubble as its paper gives it, as a time, for equal stages and free transfers.

    `text` is the formula, `domain` says where it is exact, `holds` computes that. `of` says whether
    it is the bubble of the makespan or of the longest span of a rank.
    """

    text: str
    domain: str = ""
    holds: Callable[[Times, int, int], bool] = _always
    of: Objective = "makespan"


@dataclass(frozen=True)
class Rule:
    """One rule of legality; `of_stages` if no number of microbatches can satisfy it."""

    text: str
    holds: Callable[[int, int], bool]
    of_stages: bool = False


class PipelineTimes(NamedTuple):
    """Pipelines to estimate, one per layout: sizes, and seconds of the average stage.

    `other_stages`: seconds of one microbatch through all stages except the slowest. `late_check`:
    the optimizer does not wait for the global gradient norm, so steps of different ranks overlap.
    """

    p: Array
    m: Array
    v: Array
    forward: Array
    inputs: Array  # input gradients, with recomputation
    weights: Array
    other_stages: Array
    late_check: bool

    @property
    def total(self) -> Array:
        """One microbatch on one stage, forward and backward."""
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Family:
    """One named schedule.

    `because` explains its bubble. `paths` names the chains of actions that can set its makespan, a
    key of `cost.stages.makespans.PATHS`: "loop" or "V" (a rank that never waits once it has begun)
    bound every schedule on that placement. `bubble` estimates the seconds that the slowest rank
    waits in a step, `in_flight` the microbatches in flight on a rank at its peak, `deferred` what
    the rank holds when weight gradients wait: that may be more, with fewer microbatches.
    """

    name: str
    make: Callable[[int, int, int], Schedule]
    because: str
    paths: str
    bubble: Callable[[PipelineTimes], Array]
    in_flight: Callable[[RankPosition], Array]
    deferred: Callable[[RankPosition], HeldMoments] = none_deferred
    placement: PlacementKind = "loop"
    closed_form: ClosedForm | None = None
    min_chunks: int = 1
    max_chunks: int | None = 1
    rules: tuple[Rule, ...] = ()
    forwards_first: bool = False  # no backward before the last forward: all losses wait
    pairs: bool = False  # a forward and a backward of two microbatches run as one step
    asynchronous: bool = False
    aliases: tuple[str, ...] = ()
    only: tuple[int, int, int] | None = None  # a file fits one (stages, microbatches, chunks)
    own: bool = False  # a user's function makes it

    @property
    def is_named(self) -> bool:
        """Whether its order comes from a name, and neither from a search nor from a user."""
        return self.name != AUTO and self.only is None and not self.own

    @property
    def default_chunks(self) -> int:
        """Chunks if the user gives none: the minimum, or two for a search, which may use fewer."""
        return 2 if self.name == AUTO else self.min_chunks

    def chunks_on(self, num_ranks: int, chunks: int | None) -> int:
        """Chunks of a layout with this many pipeline ranks; one without a pipeline."""
        if chunks is not None:
            return chunks
        return self.default_chunks if num_ranks > 1 else 1

    def stages_on(self, num_ranks: int, num_chunks: int) -> int | None:
        """Number of stages; None if only a search can tell."""
        if num_ranks == 1:
            return 1
        if self.only is not None:  # ranks of a file may have different numbers of stages
            return self.make(*self.only).num_stages
        return None if self.name == AUTO or self.own else num_ranks * num_chunks

    def problems(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
        """Every rule that these numbers break."""
        reasons = [
            f"{what} must be at least 1"
            for what, number in (("stages", num_ranks), ("microbatches", num_microbatches))
            if number < 1
        ]
        if num_chunks < self.min_chunks:
            reasons.append(f"chunks must be at least {self.min_chunks}")
        if self.max_chunks is not None and num_chunks > self.max_chunks:
            reasons.append(f"chunks must be {self.max_chunks}")
        if num_ranks >= 1:
            reasons += [
                rule.text for rule in self.rules if not rule.holds(num_ranks, num_microbatches)
            ]
        return reasons + list(too_large(num_ranks, num_microbatches, num_chunks))

    def nearest(
        self, num_ranks: int, num_microbatches: int, num_chunks: int
    ) -> tuple[int, int, int] | None:
        """The legal (stages, microbatches, chunks) that changes stages least, then the rest."""
        if self.only is not None:
            return self.only
        chunks = max(num_chunks, self.min_chunks)
        if self.max_chunks is not None:
            chunks = min(chunks, self.max_chunks)
        num_near = max(1, num_ranks)
        for depths in ((num_near,), (num_near - 1, num_near + 1)):
            legal = [
                (ranks, count)
                for ranks in depths
                for count in self._counts(ranks, num_microbatches)
                if not self.problems(ranks, count, chunks)
            ]
            if legal:
                ranks, count = min(
                    legal, key=lambda pair: (abs(pair[1] - num_microbatches), -pair[1], -pair[0])
                )
                return ranks, count, chunks
        return None

    def _counts(self, num_ranks: int, num_microbatches: int) -> range:
        """The range that contains the nearest legal number of microbatches, if there is one."""
        if not self._may_have(num_ranks):
            return range(0)
        least = max(1, num_microbatches - 2 * num_ranks)
        return range(least, max(num_microbatches, 2 * num_ranks) + 2 * num_ranks)

    def _may_have(self, num_ranks: int) -> bool:
        """Whether some number of microbatches may be legal on this many ranks."""
        return 1 <= num_ranks <= MOST_STAGES and all(
            rule.holds(num_ranks, 0) for rule in self.rules if rule.of_stages
        )

    def smallest_count(self, at_least: int, num_ranks: int, num_chunks: int) -> int:
        """The smallest legal number of microbatches from `at_least` on; `at_least` if none is."""
        if self.only is not None:
            return self.only[1]
        hopeless = not self._may_have(num_ranks) or any(too_large(num_ranks, at_least, num_chunks))
        counts = range(0) if hopeless else range(at_least, at_least + 2 * num_ranks + 1)
        legal = (count for count in counts if not self.problems(num_ranks, count, num_chunks))
        return next(legal, at_least)

    def require(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
        """Refuse illegal numbers, with every broken rule and the nearest legal numbers."""
        if self.problems(num_ranks, num_microbatches, num_chunks):
            head, *reasons = self._refusal(num_ranks, num_microbatches, num_chunks)
            raise IllegalSchedule(bullets(head, reasons))

    def refusal(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
        """Why these numbers are illegal, in one line."""
        head, *reasons = self._refusal(num_ranks, num_microbatches, num_chunks)
        return f"{head} {'; '.join(reasons)}"

    def _refusal(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[str]:
        numbers = (num_ranks, num_microbatches, num_chunks)
        yield f"{self.name} cannot run {_numbers(*numbers)}:"
        if far := list(too_large(*numbers)):  # nothing is near, and the search would take forever
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


def fill_and_drain(times: PipelineTimes) -> Array:
    """One microbatch passes all other stages while the pipeline fills and drains, by chunks."""
    return times.other_stages / times.v


def no_bubble(times: PipelineTimes) -> Array:
    """An asynchronous pipeline never drains."""
    return times.p * 0.0

"""Schedules on linear and looped placements: rank r has stages r, p + r, 2p + r, …

GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021) and looped
breadth-first (Lamy-Poirier 2023) run backwards whole and drain between steps. Zero-bubble schedules
(Qi et al. 2023) split the backward: input gradients go first, because the previous stage waits for
them, and delayed weight gradients fill slots that would be idle. PipeDream never drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fivefold.core.schedule.definition import (
    ClosedForm,
    Family,
    PipelineTimes,
    Rule,
    Times,
    fill_and_drain,
    no_bubble,
)
from fivefold.core.schedule.in_flight import (
    all_in_flight,
    depth_in_flight,
    interleaved_in_flight,
    ranks_in_flight,
    zb_h1_deferred,
    zb_h2_deferred,
    zb_h2_in_flight,
    zb_interleaved_deferred,
)
from fivefold.core.schedule.loops import Loop, LoopOrder, Run, alternating, one_by_one, part
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Schedule,
    linear_placement,
    loop_placement,
)

if TYPE_CHECKING:
    from fivefold.core.schedule.in_flight import Array


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    return _breadth_first("gpipe", num_ranks, num_microbatches, num_chunks)


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All forwards of a chunk before the next chunk, and the same backwards."""
    return _breadth_first("bfs", num_ranks, num_microbatches, num_chunks)


def _breadth_first(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    def runs(rank: int) -> Iterator[Run]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        yield from (Run(stage, FORWARD, 0, num_microbatches) for stage in stages)
        yield from (Run(stage, BACKWARD, 0, num_microbatches) for stage in reversed(stages))

    order = LoopOrder(one_by_one(runs(rank)) for rank in range(num_ranks))
    return Schedule(name, loop_placement(num_ranks, num_chunks), num_microbatches, order)


def one_forward_one_backward(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Rank r runs p − r forwards ahead, then one backward for each further forward."""
    order = LoopOrder(
        alternate(rank, num_ranks, num_microbatches, num_chunks, ahead=num_ranks - rank)
        for rank in range(num_ranks)
    )
    return Schedule("1f1b", linear_placement(num_ranks), num_microbatches, order)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks a rank, p microbatches at a time: the bubble falls by v."""

    def ahead(rank: int) -> int:
        return (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1

    order = LoopOrder(
        alternate(rank, num_ranks, num_microbatches, num_chunks, ahead(rank))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", loop_placement(num_ranks, num_chunks), num_microbatches, order)


def rounds(
    kind: str, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int
) -> list[Run]:
    """What one rank runs of a kind: p microbatches through each chunk, then the next p. Backwards
    go through the chunks in reverse."""
    if num_chunks == 1:
        return [Run(rank, kind, 0, num_microbatches)]
    chunks = range(num_chunks)[:: 1 if kind == FORWARD else -1]
    return [
        Run(chunk * num_ranks + rank, kind, first, min(num_ranks, num_microbatches - first))
        for first in range(0, num_microbatches, num_ranks)
        for chunk in chunks
    ]


def alternate(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, ahead: int
) -> Iterator[Loop]:
    """`ahead` forwards first, then backward and forward in turn, then the backwards left."""
    shape, total = (rank, num_ranks, num_microbatches, num_chunks), num_microbatches * num_chunks
    forwards, backwards = rounds(FORWARD, *shape), rounds(BACKWARD, *shape)
    left = max(0, total - ahead)
    yield from one_by_one(part(forwards, 0, ahead))
    yield from alternating(part(backwards, 0, left), part(forwards, ahead, total))
    yield from one_by_one(part(backwards, left, total))


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """As much memory as 1F1B: rank r runs p − r forwards ahead and delays r weight gradients."""
    return _in_1f1b_memory("zb-h1", num_ranks, num_microbatches, num_chunks)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """ZB-H1 over v chunks a rank: the same memory, the bubble divided by v."""
    return _in_1f1b_memory("zb-interleaved", num_ranks, num_microbatches, num_chunks)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Twice the memory: 2(p − r) − 1 forwards ahead and 2r weight gradients delayed."""
    return _zero_bubble(
        "zb-h2",
        (num_ranks, num_microbatches, num_chunks),
        ahead=lambda rank: 2 * (num_ranks - rank) - 1,
        delay=lambda rank: 2 * rank,
    )


def _in_1f1b_memory(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return _zero_bubble(
        name,
        (num_ranks, num_microbatches, num_chunks),
        ahead=lambda rank: num_chunks * num_ranks - rank,
        delay=lambda rank: rank,
    )


def _zero_bubble(
    name: str,
    numbers: tuple[int, int, int],
    ahead: Callable[[int], int],
    delay: Callable[[int], int],
) -> Schedule:
    num_ranks, num_microbatches, num_chunks = numbers
    order = LoopOrder(
        split_alternate(rank, *numbers, ahead(rank), delay(rank)) for rank in range(num_ranks)
    )
    return Schedule(name, loop_placement(num_ranks, num_chunks), num_microbatches, order)


def split_alternate(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, ahead: int, delay: int
) -> Iterator[Loop]:
    """`ahead` forwards, then input gradient and forward in turn, weight gradients `delay` later, or
    as soon as no forward is left."""
    shape, total = (rank, num_ranks, num_microbatches, num_chunks), num_microbatches * num_chunks
    forwards, gradients, weights = (
        rounds(kind, *shape) for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
    )
    left = max(0, total - ahead)
    late = min(delay, left)
    yield from one_by_one(part(forwards, 0, ahead))
    yield from alternating(part(gradients, 0, late), part(forwards, ahead, ahead + late))
    yield from alternating(
        part(gradients, late, left),
        part(weights, 0, left - late),
        part(forwards, ahead + late, total),
    )
    yield from alternating(part(gradients, left, total), part(weights, left - late, total - late))
    yield from one_by_one(part(weights, total - late, total))


# Asynchronous pipelines never drain: gradients are computed on weights of some updates ago.
#
# PipeDream (Narayanan et al. 2019) updates after every microbatch and stashes weights: stage s
# has p − s versions, and its gradients come p − s − 1 updates late. PipeDream-2BW (Narayanan et
# al. 2021) accumulates gradients over m ≥ p microbatches and has two versions, one update late.
# Neither computes what one device would; both are labelled asynchronous wherever they are offered.


@dataclass(frozen=True)
class Delays:
    """After how many microbatches a stage updates, and on which version a microbatch is computed.

    Version n is the weights after n updates.
    """

    every: int
    constant: bool  # all stages compute a microbatch on the same version

    @classmethod
    def of(cls, schedule: Schedule) -> Delays:
        """The delays of an asynchronous schedule, whose microbatches are one window."""
        if schedule.name == "pipedream":
            return cls(every=1, constant=False)
        assert schedule.name == "pipedream-2bw", f"{schedule.name} is not asynchronous"
        return cls(every=schedule.num_microbatches, constant=True)

    def version(self, microbatch: int, num_updates: int) -> int:
        """PipeDream takes the newest weights of its stage; 2BW those of the window before last."""
        return max(0, microbatch // self.every - 1) if self.constant else num_updates


def pipedream(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One window of the endless 1F1B order, with one weight version for each forward ahead."""
    versions = tuple(num_ranks - rank for rank in range(num_ranks))
    return _endless("pipedream", num_ranks, num_microbatches, versions)


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The same order with two weight versions, because updates come every m ≥ p microbatches."""
    return _endless("pipedream-2bw", num_ranks, num_microbatches, (2,) * num_ranks)


def _endless(
    name: str, num_ranks: int, num_microbatches: int, versions: tuple[int, ...]
) -> Schedule:
    window = one_forward_one_backward(num_ranks, num_microbatches)
    return replace(window, name=name, asynchronous=True, weight_versions=versions)


# What the planner needs: seconds that ranks wait. The bubbles are those of the makespan for equal
# stages; how they behave for small m or long B was measured with the clock. numpy is imported late,
# because commands without an estimate do without it.


def _zb_h1_bubble(times: PipelineTimes) -> Array:
    """Weight gradients fill the drain, as many as there are microbatches."""
    import numpy as np

    filled = np.minimum(times.m, times.p) - 1
    return (times.p - 1) * (times.forward + times.inputs) - filled * times.weights


def _zb_interleaved_bubble(times: PipelineTimes) -> Array:
    return _zb_h1_bubble(times) / times.v


def _zb_h2_bubble(times: PipelineTimes) -> Array:
    """The last stage starts after p − 1 forwards, unless steps of different ranks overlap."""
    import numpy as np

    p, m = times.p, times.m
    filled = np.minimum(m - 1, 2 * (p - 1))
    span = (p - 1) * (times.forward + times.inputs) - filled * times.weights
    return span if times.late_check else np.maximum((p - 1) * times.forward, span)


def _short_weights(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return weight <= min(forward, backward) and num_microbatches >= num_ranks


def _short_weights_twice(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return weight <= forward and 2 * weight <= forward + backward and enough


_ROUNDS = Rule("microbatches must be a multiple of the stages", lambda p, m: m % p == 0)
_FILLED = Rule(
    "microbatches must be at least the stages, or weights are two updates old",
    lambda p, m: m >= p,
)
_ONE_TRIP = ClosedForm("(p−1)(F+B+W)")
_WINDOW = "the window shown fills and drains; consecutive windows do neither"

GPIPE = Family(
    "gpipe", gpipe,
    "ranks wait while the pipeline fills, before the first forward reaches them, and while it "
    "drains",
    paths="gpipe", bubble=fill_and_drain, in_flight=all_in_flight,
    closed_form=_ONE_TRIP, forwards_first=True, aliases=("afab",),
)  # fmt: skip
ONE_F_ONE_B = Family(
    "1f1b", one_forward_one_backward,
    "the pipeline fills and drains as in GPipe; what it saves is memory",
    paths="1f1b", bubble=fill_and_drain, in_flight=depth_in_flight,
    closed_form=_ONE_TRIP, aliases=("pipedream-flush",),
)  # fmt: skip
INTERLEAVED = Family(
    "interleaved", interleaved,
    "the pipeline fills and drains by chunks, which are v times shorter than stages",
    paths="interleaved", bubble=fill_and_drain, in_flight=interleaved_in_flight,
    closed_form=ClosedForm("(p−1)(F+B+W)/v"),
    min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
)  # fmt: skip
BREADTH_FIRST = Family(
    "bfs", breadth_first,
    "the pipeline fills and drains by chunks; all microbatches pass a chunk before the next",
    paths="gpipe", bubble=fill_and_drain, in_flight=all_in_flight,
    closed_form=ClosedForm("(p−1)(F+B+W)/v", "m ≥ p", lambda times, p, m: m >= p),
    min_chunks=2, max_chunks=None, forwards_first=True,
)  # fmt: skip
ZB_H1 = Family(
    "zb-h1", zb_h1,
    "the pipeline fills and drains as in 1F1B; delayed weight gradients fill what they can of it, "
    "in the same memory",
    paths="zb-h1", bubble=_zb_h1_bubble, in_flight=ranks_in_flight,
    deferred=zb_h1_deferred,
    closed_form=ClosedForm("(p−1)(F+B−W)", "W ≤ F, W ≤ B and m ≥ p", _short_weights),
)  # fmt: skip
ZB_H2 = Family(
    "zb-h2", zb_h2,
    "ranks start one by one; with up to twice the memory of 1F1B there are more weight gradients "
    "to fill the drain",
    paths="zb-h2", bubble=_zb_h2_bubble, in_flight=zb_h2_in_flight,
    deferred=zb_h2_deferred,
    closed_form=ClosedForm(
        "(p−1)(F+B−2W)", "W ≤ F, 2W ≤ F+B and m ≥ 2p−1", _short_weights_twice, of="span"
    ),
)  # fmt: skip
ZB_INTERLEAVED = Family(
    "zb-interleaved", zb_interleaved,
    "the pipeline fills and drains by chunks, and weight gradients fill what they can of it",
    paths="zb-h1", bubble=_zb_interleaved_bubble, in_flight=ranks_in_flight,
    deferred=zb_interleaved_deferred,
    closed_form=ClosedForm("(p−1)(F+B−W)/v", "W ≤ F, W ≤ B and m ≥ p", _short_weights),
    min_chunks=2, max_chunks=None, rules=(_ROUNDS,),
)  # fmt: skip
PIPEDREAM = Family(
    "pipedream", pipedream, _WINDOW,
    paths="never drained", bubble=no_bubble, in_flight=depth_in_flight, asynchronous=True,
)  # fmt: skip
PIPEDREAM_2BW = Family(
    "pipedream-2bw", pipedream_2bw, _WINDOW,
    paths="never drained", bubble=no_bubble, in_flight=depth_in_flight,
    rules=(_FILLED,), asynchronous=True,
)  # fmt: skip

"""All schedules by name, and everything that is known of each of them.

Schedules on linear and looped placements: rank r has stages r, p + r, 2p + r, …

GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021) and looped
breadth-first (Lamy-Poirier 2023) run backwards whole and drain between steps. Zero-bubble schedules
(Qi et al. 2023) split the backward: input gradients go first, because the previous stage waits for
them, and delayed weight gradients fill slots that would be idle. PipeDream never drains.

Schedules on V and mirrored placements: every rank has a near and a far stage.

On a V (Qi et al. 2024) each rank has two chunks, one on the way down and one on the way up. Every
rank then has long-lived and short-lived activations in equal measure, so memory is even, and can be
chosen. ZB-V spends as much memory as 1F1B and has almost no bubble. V-Half and V-Min repeat one
building block, the path of a single microbatch through all ranks, every six slots: the shorter the
path, the fewer microbatches are in flight. DualPipe (DeepSeek 2024) sends microbatches from both
ends through two copies of the model; DualPipeV folds one copy into a V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from fivefold.core import UnknownName
from fivefold.core.schedule.clock import Costs
from fivefold.core.schedule.definition import (
    AUTO,
    ClosedForm,
    Family,
    PipelineTimes,
    Rule,
    Times,
    fill_and_drain,
    no_bubble,
)
from fivefold.core.schedule.fill import Frame, Patience, fill, lower
from fivefold.core.schedule.in_flight import (
    all_in_flight,
    depth_in_flight,
    dualpipe_deferred,
    dualpipe_v_deferred,
    interleaved_in_flight,
    ranks_in_flight,
    v_half_deferred,
    v_half_in_flight,
    v_min_deferred,
    v_min_in_flight,
    zb_h1_deferred,
    zb_h2_deferred,
    zb_h2_in_flight,
    zb_interleaved_deferred,
    zb_v_deferred,
    zb_v_in_flight,
)
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Loop,
    LoopOrder,
    Run,
    Schedule,
    Turn,
    alternating,
    lengthened,
    linear_placement,
    loop_placement,
    mirrored_placement,
    one_by_one,
    part,
    v_placement,
    within,
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


_SPLIT = INPUT_GRAD + WEIGHT_GRAD
PERIOD = 6  # slots a microbatch needs on each rank: F, I and W of two chunks


class BuildingBlock(NamedTuple):
    """How the path of one microbatch is spaced, in slots.

    `hops` from rank to rank on its four legs (forward down and up, gradient down and up), `turns`
    between one leg and the next. If a rank's slot is taken, the rest of the path moves by one.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]


MIN_BLOCK = BuildingBlock((1, 1, 1, 1), (1, 1, 1))
# The tightest that fits is used: parity decides which paths collide with themselves.
HALF_BLOCKS = (
    BuildingBlock((1, 2, 1, 1), (3, 2, 2)),
    BuildingBlock((1, 2, 1, 1), (1, 1, 1)),
    MIN_BLOCK,
)


def zb_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """As much memory as 1F1B, on every rank, and idle only while the first gradient turns."""

    order = LoopOrder(
        within(_zb_v_rank(rank, num_ranks, num_microbatches), num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("zb-v", v_placement(num_ranks), num_microbatches, order)


def _zb_v_rank(rank: int, num_ranks: int, num: int) -> Iterator[Loop]:
    """The order for at least 2p − 1 microbatches; with fewer, the caller drops those beyond `num`.

    Every loop stops as soon as all its further actions are of microbatches beyond `num`.
    """
    near, far, inner = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    middle = max(num, 2 * num_ranks - 1) - num_ranks
    ahead, left = 2 * inner - 1, max(0, num - middle)

    def take(stage: int, kinds: str, first: int) -> list[Turn]:
        return [Turn(stage, kind, first) for kind in kinds]

    def loop(count: int, *turns: list[Turn]) -> Loop:
        return Loop(count, tuple(chain(*turns)))

    yield loop(min(ahead, num), take(near, FORWARD, 0))
    yield loop(min(rank, num), take(far, FORWARD, 0), take(near, FORWARD, ahead))
    yield loop(min(inner, num), take(far, FORWARD, rank), take(far, _SPLIT, 0))
    yield loop(
        min(middle, num),
        [*take(near, FORWARD, ahead + rank), *take(near, _SPLIT, 0)],
        [*take(far, FORWARD, num_ranks), *take(far, _SPLIT, inner)],
    )
    yield loop(
        min(rank, left),
        take(near, INPUT_GRAD, middle),
        take(far, INPUT_GRAD, middle + inner),
    )
    yield loop(
        min(inner, left),
        take(near, INPUT_GRAD, middle + rank),
        take(near, WEIGHT_GRAD, middle),
    )
    for stage in (far, near):
        yield loop(num - middle - inner, take(stage, WEIGHT_GRAD, middle + inner))


def v_half(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Half the memory of 1F1B."""
    return _from_blocks("v-half", HALF_BLOCKS, num_ranks, num_microbatches, (num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """A third of the memory of 1F1B, the least that a V can run on without a longer period."""
    return _from_blocks("v-min", (MIN_BLOCK,), num_ranks, num_microbatches, (num_ranks + 4) // 3)


def _from_blocks(
    name: str,
    blocks: tuple[BuildingBlock, ...],
    num_ranks: int,
    num_microbatches: int,
    chunk_limit: int,
) -> Schedule:
    """As soon as the pipeline is full, every further microbatch repeats what all ranks do; so a
    long schedule is a short one with more turns."""
    placement, few = v_placement(num_ranks), num_ranks + num_ranks // 2 + 4
    order = _filled(blocks, num_ranks, min(few, num_microbatches), chunk_limit)
    if few < num_microbatches:
        order = LoopOrder(lengthened(order, PERIOD, num_microbatches - few))
    return Schedule(name, placement, num_microbatches, order)


@lru_cache
def _filled(
    blocks: tuple[BuildingBlock, ...], num_ranks: int, num_microbatches: int, chunk_limit: int
) -> Frame:
    """The repeated block with its weight gradients, in the least memory that it fits in."""
    placement = v_placement(num_ranks)
    costs, patience = Costs.uniform(placement), Patience.uniform(num_ranks)
    while True:  # a block that does not fit in this memory fits in more
        for block in blocks:
            frame = repeat(block, num_ranks, num_microbatches)
            filled = fill(
                lower(frame, placement, num_microbatches, costs), 2 * chunk_limit, patience
            )
            if filled is not None:
                return filled.order()
        chunk_limit += 1


def repeat(block: BuildingBlock, num_ranks: int, num_microbatches: int) -> Frame:
    """The frame in which every microbatch takes the block's path, one period after the last."""

    def rank_order(slots: dict[tuple[str, int], int]) -> tuple[Action, ...]:
        timed = sorted(
            (slot + microbatch * PERIOD, Action(stage, kind, microbatch))
            for (kind, stage), slot in slots.items()
            for microbatch in range(num_microbatches)
        )
        return tuple(action for _, action in timed)

    return tuple(rank_order(slots) for slots in path(block, num_ranks))


def path(block: BuildingBlock, num_ranks: int) -> list[dict[tuple[str, int], int]]:
    """The slot of each forward and input gradient of microbatch 0, by rank."""
    slots: list[dict[tuple[str, int], int]] = [{} for _ in range(num_ranks)]
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    legs = ((FORWARD, down), (FORWARD, up), (INPUT_GRAD, up[::-1]), (INPUT_GRAD, down[::-1]))
    time_now = 0
    for (kind, leg), hop, turn in zip(legs, block.hops, (0, *block.turns), strict=True):
        for stage_index, stage in enumerate(leg):
            time_now += hop if stage_index else turn
            taken = slots[min(stage, 2 * num_ranks - 1 - stage)]
            while time_now % PERIOD in {slot % PERIOD for slot in taken.values()}:
                time_now += 1
            taken[kind, stage] = time_now
    return slots


# DualPipe and DualPipeV: a forward and a backward share each slot.
#
# The near stage of a rank (phase 0) is on the side where its microbatches enter, the far one
# (phase 1) is where they come back. Where a forward of one phase and a backward of the other run
# as one step, each hides the communication of the other.


def dualpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Two directions: the first half of the microbatches down, the second half up."""
    half = num_microbatches // 2

    def loops(rank: int) -> Iterator[Loop]:
        mirror = num_ranks - 1 - rank
        down, up = _Phase(rank, 0), _Phase(mirror, half)
        near, far = (down, up) if rank < mirror else (up, down)
        return _legs(near, far, min(rank, mirror), num_ranks // 2, half)

    order = LoopOrder(loops(rank) for rank in range(num_ranks))
    return Schedule("dualpipe", mirrored_placement(num_ranks), num_microbatches, order)


def dualpipe_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """One copy of the model, folded: near stages on the way down, far ones on the way up."""

    def loops(rank: int) -> Iterator[Loop]:
        near, far = _Phase(rank, 0), _Phase(2 * num_ranks - 1 - rank, 0)
        return _legs(near, far, rank, num_ranks, num_microbatches)

    order = LoopOrder(loops(rank) for rank in range(num_ranks))
    return Schedule("dualpipe-v", v_placement(num_ranks), num_microbatches, order)


class _Phase:
    """Hands out the next forwards and the next backwards of one stage."""

    def __init__(self, stage: int, first_microbatch: int) -> None:
        self.stage = stage
        self.forwards = self.backwards = first_microbatch

    def forward(self, count: int, joined: bool = False) -> Turn:
        """The next `count` forwards, one in each turn."""
        self.forwards += count
        return Turn(self.stage, FORWARD, self.forwards - count, joined)

    def backward(self, count: int, kind: str = BACKWARD) -> Turn:
        self.backwards += count
        return Turn(self.stage, kind, self.backwards - count)


def _legs(
    near: _Phase, far: _Phase, distance: int, depth: int, num_microbatches: int
) -> Iterator[Loop]:
    """The steps of the rank that is `distance` ranks from the start, of `depth` ranks to the turn.

    Each phase has `each` microbatches. The weight gradients of the last backwards are delayed, and
    fill the slots in which the rank would wait for the remaining near gradients.
    """
    inner = depth - 1 - distance
    yield Loop(2 * inner, (near.forward(2 * inner),))
    yield Loop(distance + 1, (near.forward(distance + 1), far.forward(distance + 1)))
    gradient = far.backward(inner, INPUT_GRAD)
    yield Loop(inner, (gradient, gradient._replace(kind=WEIGHT_GRAD), far.forward(inner)))
    shared = num_microbatches - 2 * depth + distance + 1
    down = (near.forward(shared, joined=True), far.backward(shared))
    yield Loop(shared, (*down, far.forward(shared, joined=True), near.backward(shared)))
    up = (far.forward(inner, joined=True), near.backward(inner))
    yield Loop(inner, (far.backward(inner), *up))
    delayed: list[Run] = []  # weight gradients
    for turn in range(2 * (distance + 1)):
        kind = BACKWARD if turn <= distance else INPUT_GRAD
        last = (near if turn % 2 else far).backward(1, kind)
        yield Loop(1, (last,))
        if kind == INPUT_GRAD:
            delayed.append(Run(last.stage, WEIGHT_GRAD, last.first, 1))
    input_run = near.backward(inner, INPUT_GRAD)
    delayed.append(Run(near.stage, WEIGHT_GRAD, input_run.first, inner))
    total = distance + 1 + inner
    inputs = [Run(near.stage, INPUT_GRAD, input_run.first, inner)]
    yield from alternating(part(delayed, 0, inner), inputs if inner else [])
    yield from one_by_one(part(delayed, inner, total))


# What the planner needs: seconds that ranks wait, for equal stages, as measured with the clock.


def _zb_v_bubble(times: PipelineTimes) -> Array:
    import numpy as np

    p, m = times.p, times.m
    filled = np.clip(m - p, 0, p - 1)
    least = (p - 1) * times.inputs / 2
    return np.maximum(least, (p - 1) * times.inputs - filled * times.weights)


def _v_half_bubble(times: PipelineTimes) -> Array:
    """If backwards are long, every further microbatch waits for them."""
    import numpy as np

    p, m = times.p, times.m
    forward, inputs, weights = times.forward, times.inputs, times.weights
    trip = (p / 2 - 1) * forward + (1.5 * p - 1) * inputs - (p / 2 + 1.5) * weights
    trip = np.where(p == 2, inputs - weights / 2, trip)
    odd = p % 2 == 1
    trip = trip + np.where(odd, 1.5 * forward, 0.0)
    period = 2 * inputs + np.where(p > 4, weights / 2, 0.0) + np.where(odd, forward / 2, 0.0)
    drift = np.where(p == 2, 0.0, np.maximum(period - times.total, 0.0))
    return trip + drift * np.maximum(m - p, 0.0)


def _v_min_bubble(times: PipelineTimes) -> Array:
    """Each of its three slots takes as long as the longest."""
    import numpy as np

    p, m = times.p, times.m
    forward, inputs, weights = times.forward, times.inputs, times.weights
    longest = np.maximum(np.maximum(forward, inputs), weights)
    period = np.where(p == 2, (forward + weights) / 2 + 2 * inputs, 3 * longest)
    trip = p * forward + (p - 3) * inputs + weights / 2
    thirds = (p % 3 == 0) & (p > 3)
    trip = trip + np.where(thirds, np.maximum(forward / 2, 2 * forward - inputs), 0.0)
    trip = np.where(p == 2, 1.5 * forward, trip)
    return trip + m * np.maximum(period - times.total, 0.0)


def _dualpipe_bubble(times: PipelineTimes) -> Array:
    return (times.p / 2 - 1) * (times.forward + 2 * times.inputs - times.weights)


def _dualpipe_v_bubble(times: PipelineTimes) -> Array:
    return (times.p - 1) * (times.forward + 2 * times.inputs - times.weights) / 2


def _balanced(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return max(forward, weight) <= backward <= 2 * weight and enough


def _long_backward(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return max(forward, weight) <= backward


_EVEN_RANKS = Rule("stages must be even: two directions meet", lambda p, m: p % 2 == 0, True)
_EVEN_BATCH = Rule("microbatches must be even: half in each direction", lambda p, m: m % 2 == 0)
_TWICE = Rule("microbatches must be at least twice the stages", lambda p, m: m >= 2 * p)

ZB_V = Family(
    "zb-v", zb_v,
    "ranks wait until the first microbatch has come down the V, and later wherever weight "
    "gradients are too few or too short to cover the way of a gradient",
    paths="zb-v", bubble=_zb_v_bubble, in_flight=zb_v_in_flight, placement="V",
    deferred=zb_v_deferred,
    closed_form=ClosedForm("(p−1)B/2", "F ≤ B, W ≤ B ≤ 2W and m ≥ 2p−1", _balanced),
    min_chunks=2, max_chunks=2,
)  # fmt: skip
V_HALF = Family(
    "v-half", v_half,
    "with less memory fewer microbatches are in flight, too few to cover fill and drain",
    paths="v-half", bubble=_v_half_bubble, in_flight=v_half_in_flight, placement="V",
    deferred=v_half_deferred,
    min_chunks=2, max_chunks=2,
)  # fmt: skip
V_MIN = Family(
    "v-min", v_min,
    "with the least memory so few microbatches are in flight that ranks wait for each to come back",
    paths="v-min", bubble=_v_min_bubble, in_flight=v_min_in_flight, placement="V",
    deferred=v_min_deferred,
    min_chunks=2, max_chunks=2,
)  # fmt: skip
DUALPIPE = Family(
    "dualpipe", dualpipe,
    "two directions meet in the middle, so only half the ranks lie between a rank and its nearer "
    "end",
    paths="dualpipe", bubble=_dualpipe_bubble, in_flight=lambda rank: rank.p + 1,
    deferred=dualpipe_deferred,
    placement="bidirectional",
    closed_form=ClosedForm("(p/2−1)(F&B+B−2W)", "F ≤ B and W ≤ B", _long_backward),
    rules=(_EVEN_RANKS, _EVEN_BATCH, _TWICE), pairs=True,
)  # fmt: skip
DUALPIPE_V = Family(
    "dualpipe-v", dualpipe_v,
    "the pipeline fills and drains by chunks, two of which a rank folds into one V",
    paths="dualpipe-v", bubble=_dualpipe_v_bubble, in_flight=lambda rank: rank.p + 0.5,
    deferred=dualpipe_v_deferred, placement="V",
    closed_form=ClosedForm("(p−1)(F&B+B−2W)/2", "F ≤ B and W ≤ B", _long_backward),
    min_chunks=2, max_chunks=2, rules=(_TWICE,), pairs=True,
)  # fmt: skip


FAMILIES: tuple[Family, ...] = (
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    BREADTH_FIRST,
    ZB_H1,
    ZB_H2,
    ZB_INTERLEAVED,
    ZB_V,
    V_HALF,
    V_MIN,
    DUALPIPE,
    DUALPIPE_V,
    PIPEDREAM,
    PIPEDREAM_2BW,
)


def names() -> list[str]:
    """Every name that the command line accepts, aliases included."""
    return [*(name for family in FAMILIES for name in (family.name, *family.aliases)), AUTO]


def family(name: str) -> Family:
    """Look up a schedule by name or alias."""
    for member in FAMILIES:
        if name.lower() in (member.name, *member.aliases):
            return member
    raise UnknownName("schedule", name, names())


def make(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Make a named schedule, or refuse with the rule and the nearest legal numbers."""
    schedule_family = family(name)
    chunks = schedule_family.default_chunks if num_chunks is None else num_chunks
    schedule_family.require(num_ranks, num_microbatches, chunks)
    return schedule_family.make(num_ranks, num_microbatches, chunks)


def synchronous(
    num_ranks: int, num_microbatches: int, max_chunks: int
) -> Iterator[tuple[Family, int]]:
    """The families that compute what one device would, with every legal number of chunks."""
    for member in FAMILIES:
        if member.asynchronous:
            continue
        for chunks in range(
            member.min_chunks, 1 + min(max_chunks, member.max_chunks or max_chunks)
        ):
            if not member.problems(num_ranks, num_microbatches, chunks):
                yield member, chunks

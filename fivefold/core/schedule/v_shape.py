"""Schedules on the V placement: two chunks a rank, down and up again (Qi et al. 2024).

Every rank then has long-lived and short-lived activations in the same measure, so that memory is
even, and can be chosen. ZB-V spends p units of it and has almost no bubble. V-Half and V-Min are
made of one building block, the path of a single microbatch through all ranks, repeated every six
slots: the fewer slots the path lingers, the fewer microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Overlap,
    Schedule,
    Step,
    bidirectional,
    vee,
)
from fivefold.core.schedule.clock import Costs
from fivefold.core.schedule.fill import Frame, Patience, fill, lower

_SPLIT = INPUT_GRAD + WEIGHT_GRAD
PERIOD = 6  # slots a microbatch needs on each rank: F, I and W of two chunks


class BuildingBlock(NamedTuple):
    """How the path of one microbatch is spaced, in slots.

    `hops` from rank to rank on its four legs (forward down and up, gradient down and up), `turns`
    between one leg and the next. A slot that is taken on a rank moves the rest of the path.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]


V_MIN = BuildingBlock((1, 1, 1, 1), (1, 1, 1))
# The tightest that fits is used: parity decides which paths collide with themselves.
V_HALF = (BuildingBlock((1, 2, 1, 1), (3, 2, 2)), BuildingBlock((1, 2, 1, 1), (1, 1, 1)), V_MIN)


def zb_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """As much memory as 1F1B, on every rank, and idle only while the first gradient turns."""

    def steps(rank: int) -> tuple[Step, ...]:
        order = _zb_v_rank(rank, num_ranks, num_microbatches)
        return tuple(step for step in order if step.microbatch < num_microbatches)

    order = tuple(steps(rank) for rank in range(num_ranks))
    return Schedule("zb-v", vee(num_ranks), num_microbatches, order)


def _zb_v_rank(rank: int, num_ranks: int, num: int) -> Iterator[Action]:
    """The order for 2p − 1 microbatches or more; of fewer, those that are not there drop out.

    Every loop stops where all that would follow in it belongs to microbatches beyond `num`.
    """
    near, far, inner = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    middle = max(num, 2 * num_ranks - 1) - num_ranks
    ahead, left = 2 * inner - 1, max(0, num - middle)

    def take(stage: int, kinds: str, microbatch: int) -> list[Action]:
        return [Action(stage, kind, microbatch) for kind in kinds]

    for k in range(min(ahead, num)):
        yield from take(near, FORWARD, k)
    for k in range(min(rank, num)):
        yield from (*take(far, FORWARD, k), *take(near, FORWARD, ahead + k))
    for k in range(min(inner, num)):
        yield from (*take(far, FORWARD, rank + k), *take(far, _SPLIT, k))
    for k in range(min(middle, num)):
        yield from (*take(near, FORWARD, ahead + rank + k), *take(near, _SPLIT, k))
        yield from (*take(far, FORWARD, num_ranks + k), *take(far, _SPLIT, inner + k))
    for k in range(min(rank, left)):
        yield from (*take(near, INPUT_GRAD, middle + k), *take(far, INPUT_GRAD, middle + inner + k))
    for k in range(min(inner, left)):
        yield from (
            *take(near, INPUT_GRAD, middle + rank + k),
            *take(near, WEIGHT_GRAD, middle + k),
        )
    for stage in (far, near):
        yield from (Action(stage, WEIGHT_GRAD, k) for k in range(middle + inner, num))


def v_half(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Half the memory of 1F1B."""
    return _from_blocks("v-half", V_HALF, num_ranks, num_microbatches, (num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """A third of the memory of 1F1B, the least that a V can run on without a longer period."""
    return _from_blocks("v-min", (V_MIN,), num_ranks, num_microbatches, (num_ranks + 4) // 3)


def _from_blocks(
    name: str,
    blocks: tuple[BuildingBlock, ...],
    num_ranks: int,
    num_microbatches: int,
    most_held: int,
) -> Schedule:
    placement = vee(num_ranks)
    costs, patience = Costs.uniform(placement), Patience.uniform(num_ranks)
    while True:  # a block that does not fit in this memory fits in more
        for block in blocks:
            frame = repeat(block, num_ranks, num_microbatches)
            filled = fill(lower(frame, placement, num_microbatches, costs), 2 * most_held, patience)
            if filled is not None:
                return Schedule(name, placement, num_microbatches, filled.order())
        most_held += 1


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
    now = 0
    for (kind, leg), hop, turn in zip(legs, block.hops, (0, *block.turns), strict=True):
        for place, stage in enumerate(leg):
            now += hop if place else turn
            taken = slots[min(stage, 2 * num_ranks - 1 - stage)]
            while now % PERIOD in {slot % PERIOD for slot in taken.values()}:
                now += 1
            taken[kind, stage] = now
    return slots


# DualPipe and DualPipeV (DeepSeek 2024): a forward and a backward share each slot.
#
# Each rank holds two stages, a near one (phase 0) whose microbatches enter on its side of the
# pipeline, and a far one (phase 1) whose microbatches come back. Where a forward of one phase and
# a backward of the other run as one step, the communication of each hides behind the other.
# DualPipe feeds microbatches from both ends through two copies of the model; DualPipeV folds one
# copy into a V.


def dualpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Two directions: the first half of the microbatches down, the second half up."""
    half = num_microbatches // 2

    def steps(rank: int) -> tuple[Step, ...]:
        mirror = num_ranks - 1 - rank
        down, up = _Phase(rank, 0), _Phase(mirror, half)
        near, far = (down, up) if rank < mirror else (up, down)
        return tuple(_legs(near, far, min(rank, mirror), num_ranks // 2, half))

    order = tuple(steps(rank) for rank in range(num_ranks))
    return Schedule("dualpipe", bidirectional(num_ranks), num_microbatches, order)


def dualpipe_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """One copy of the model, folded: near stages on the way down, far ones on the way up."""

    def steps(rank: int) -> tuple[Step, ...]:
        near, far = _Phase(rank, 0), _Phase(2 * num_ranks - 1 - rank, 0)
        return tuple(_legs(near, far, rank, num_ranks, num_microbatches))

    order = tuple(steps(rank) for rank in range(num_ranks))
    return Schedule("dualpipe-v", vee(num_ranks), num_microbatches, order)


class _Phase:
    """Hands out the next forward and the next backward of one stage."""

    def __init__(self, stage: int, first_microbatch: int) -> None:
        self.stage = stage
        self.forwards = self.backwards = first_microbatch

    def forward(self) -> Action:
        self.forwards += 1
        return Action(self.stage, FORWARD, self.forwards - 1)

    def backward(self, kind: str = BACKWARD) -> Action:
        self.backwards += 1
        return Action(self.stage, kind, self.backwards - 1)


def _legs(near: _Phase, far: _Phase, distance: int, depth: int, each: int) -> Iterator[Step]:
    """The steps of the rank that is `distance` ranks inside, of `depth` ranks to the turn.

    Each phase has `each` microbatches. In the last backwards the weight gradients are kept back,
    and fill the slots in which the rank would wait for the rest of the near gradients.
    """
    inner = depth - 1 - distance
    for _ in range(2 * inner):
        yield near.forward()
    for _ in range(distance + 1):
        yield from (near.forward(), far.forward())
    for _ in range(inner):
        gradient = far.backward(INPUT_GRAD)
        yield from (gradient, gradient._replace(kind=WEIGHT_GRAD), far.forward())
    for _ in range(each - 2 * depth + distance + 1):
        yield Overlap(near.forward(), far.backward())
        yield Overlap(far.forward(), near.backward())
    for _ in range(inner):
        yield far.backward()
        yield Overlap(far.forward(), near.backward())
    kept: list[Action] = []
    for turn in range(2 * (distance + 1)):
        phase = near if turn % 2 else far
        if turn <= distance:
            yield phase.backward()
        else:
            kept.append(phase.backward(INPUT_GRAD))
            yield kept[-1]
    for _ in range(inner):
        yield kept.pop(0)._replace(kind=WEIGHT_GRAD)
        kept.append(near.backward(INPUT_GRAD))
        yield kept[-1]
    yield from (gradient._replace(kind=WEIGHT_GRAD) for gradient in kept)

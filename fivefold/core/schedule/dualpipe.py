"""DualPipe and DualPipeV (DeepSeek 2024): a forward and a backward share each slot.

Each rank holds two stages, a near one (phase 0) whose microbatches enter on its side of the
pipeline, and a far one (phase 1) whose microbatches come back. Where a forward of one phase and a
backward of the other run as one step, the communication of each hides behind the other.
DualPipe feeds microbatches from both ends through two copies of the model; DualPipeV folds one
copy into a V.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.core.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Overlap,
    Step,
)
from fivefold.core.schedule.placement import bidirectional, vee
from fivefold.core.schedule.value import Schedule


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

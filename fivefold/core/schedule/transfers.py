"""What pipeline ranks send one another, derived from the schedule.

A forward sends its activations to the rank of the next stage, a backward its input gradient to the
rank of the stage before; two stages of one rank hand over without a message. Planner and runtime
both read this file, so that what is predicted is what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.core.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Step,
    actions_of,
)
from fivefold.core.schedule.placement import Placement
from fivefold.core.schedule.value import Schedule


class Message(NamedTuple):
    """What stage `stage` is given for a microbatch: `F` its input, `B` the gradient of its output.

    `source` and `target` are pipeline ranks.
    """

    stage: int
    kind: str
    microbatch: int
    source: int
    target: int


def sent(schedule: Schedule, action: Action) -> Message | None:
    """What the action sends to another rank, if anything."""
    if action.kind == WEIGHT_GRAD:
        return None
    forward = action.kind == FORWARD
    return _message(schedule, action.stage, action.stage + (1 if forward else -1), action)


def needed(schedule: Schedule, action: Action) -> Message | None:
    """What the action waits for from another rank, if anything."""
    if action.kind == WEIGHT_GRAD:
        return None
    forward = action.kind == FORWARD
    return _message(schedule, action.stage + (-1 if forward else 1), action.stage, action)


def _message(schedule: Schedule, giver: int, taker: int, action: Action) -> Message | None:
    if not (0 <= giver < schedule.num_stages and 0 <= taker < schedule.num_stages):
        return None
    source, target = (schedule.rank_of(stage, action.microbatch) for stage in (giver, taker))
    if source == target:
        return None
    kind = FORWARD if action.kind == FORWARD else BACKWARD
    return Message(taker, kind, action.microbatch, source, target)


def sent_by(schedule: Schedule, rank: int) -> Iterator[Message]:
    """All that a rank sends, in its order."""
    for action in (action for step in schedule.order[rank] for action in actions_of(step)):
        if message := sent(schedule, action):
            yield message


def channels(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Every (source, target) pair of ranks between which something is sent, sorted."""
    ranks = range(schedule.num_ranks)
    return tuple(
        sorted({(each.source, each.target) for r in ranks for each in sent_by(schedule, r)})
    )


def merged(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of a rank, with neighbouring I and W of a microbatch joined to one B.

    Only where the gradient goes to no other rank: a message would leave when the whole B is done,
    later than the schedule says.
    """
    found: list[Step] = []
    for step in schedule.order[rank]:
        if isinstance(step, Action) and step.kind == WEIGHT_GRAD:
            gradient = step._replace(kind=INPUT_GRAD)
            if found and found[-1] == gradient and sent(schedule, gradient) is None:
                found.pop()
                step = step._replace(kind=BACKWARD)
        found.append(step)
    return tuple(found)


def twins(placement: Placement, tied: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks that hold copies of the same weights and so sum their gradients.

    Under a mirrored placement every rank has the stages of its mirror; a tied model has its
    embedding on the ranks of the first and of the last stage.
    """
    last = placement.num_ranks - 1
    if placement.mirrored:
        return tuple((rank, last - rank) for rank in range((last + 1) // 2))
    ends = sorted({placement.homes[0], placement.homes[-1]})
    return ((ends[0], ends[1]),) if tied and len(ends) == 2 else ()

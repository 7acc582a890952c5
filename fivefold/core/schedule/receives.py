"""When each rank posts the receives of its pipeline, so that no order of events can lock it.

A receive that is posted, and a send that is issued, hold the device until the other side has called
too. A host may be held with it at any time: by a kernel that is loaded, by memory that the driver
allocates, by a read of a result. So the rule is: whatever a rank has issued must end without
anything that this rank issues later. Equivalently, a step ends even if every call blocks its host.

All messages of a step stand in one line, by the time at which they are sent where every action
takes one unit, and by rank where that is equal. A rank issues its sends and posts its receives in
the order of this line. Of the messages that are under way, the first one then has both ends at
work: neither waits for a message further back. So it arrives, and with it, one by one, all others.
"""

from __future__ import annotations

from functools import lru_cache

from fivefold.core.schedule.clock import Costs, play
from fivefold.core.schedule.schedule import Message, Schedule, Step, actions_of, merged, sent

Place = tuple[float, int]
"""In the line: when the message is sent, and by which rank."""


@lru_cache(maxsize=16)
def postings(schedule: Schedule) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    """By rank and by step, as `merged` gives them: the receives that are posted before the step.

    They are those of all messages that stand before the step's own in the line. So they are under
    way while the step computes, and what the step itself needs is among them.
    """
    line, ends = _line(schedule)
    incoming: list[list[tuple[Place, Message]]] = [[] for _ in schedule.order]
    for position, message in line:
        incoming[message.target].append((position, message))
    return tuple(
        tuple(_before_each(incoming[rank], ends[rank], merged(schedule, rank), rank))
        for rank in range(schedule.num_ranks)
    )


def _line(schedule: Schedule) -> tuple[list[tuple[Place, Message]], list[dict[Step, float]]]:
    """All messages in the order of the line, and when each step of each rank ends."""
    unit_costs = (1.0,) * schedule.num_stages
    timeline = play(
        schedule, Costs(unit_costs, unit_costs, unit_costs, (0.0,) * schedule.num_stages)
    )
    line: list[tuple[Place, Message]] = []
    ends: list[dict[Step, float]] = []
    for rank, (steps, times) in enumerate(zip(schedule.order, timeline.ends, strict=True)):
        ends.append(dict(zip(steps, times, strict=True)))
        for step, end in zip(steps, times, strict=True):
            messages = (sent(schedule, action) for action in actions_of(step))
            line += [((end, rank), message) for message in messages if message is not None]
    line.sort(key=lambda pair: pair[0])  # stable: a step's own messages stay in their order
    return line, ends


def _before_each(
    incoming: list[tuple[Place, Message]],
    ends: dict[Step, float],
    steps: tuple[Step, ...],
    rank: int,
) -> list[tuple[Message, ...]]:
    batches: list[tuple[Message, ...]] = []
    posted = 0
    for step in steps:
        # A backward that was merged ends when its input gradient would: it sends nothing.
        end = ends[step] if step in ends else ends[actions_of(step)[0]._replace(kind="I")]
        until = posted
        while until < len(incoming) and incoming[until][0] < (end, rank):
            until += 1
        batches.append(tuple(message for _, message in incoming[posted:until]))
        posted = until
    return batches

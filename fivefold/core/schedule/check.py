"""The one legality check, for our own schedules and for those that users bring."""

from __future__ import annotations

from collections import Counter

from fivefold.core.clock import play
from fivefold.core.errors import IllegalSchedule, bullets
from fivefold.core.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    actions_of,
)
from fivefold.core.schedule.costs import Costs
from fivefold.core.schedule.value import Schedule


def require_legal(schedule: Schedule) -> None:
    """Raise `IllegalSchedule` unless every microbatch is computed once, in place, to the end."""
    problems = misplaced(schedule) + uncomputed(schedule)
    if problems:
        raise IllegalSchedule(bullets(f"schedule {schedule.name!r} is illegal:", problems[:12]))
    play(schedule, Costs.uniform(schedule.placement))


def misplaced(schedule: Schedule) -> list[str]:
    """Actions on a rank that does not hold their stage."""
    problems: list[str] = []
    for rank, steps in enumerate(schedule.order):
        for action in (action for step in steps for action in actions_of(step)):
            if not 0 <= action.stage < schedule.num_stages:
                problems.append(f"rank {rank} runs {action}: there is no stage {action.stage}")
            elif (home := schedule.rank_of(action.stage, action.microbatch)) != rank:
                problems.append(f"rank {rank} runs {action}: move it to rank {home}, its home")
    return problems


def uncomputed(schedule: Schedule) -> list[str]:
    """Microbatches that miss a forward or a backward at some stage, or have one twice."""
    counts = Counter(
        action for steps in schedule.order for step in steps for action in actions_of(step)
    )
    problems: list[str] = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            num = {
                kind: counts[Action(stage, kind, microbatch)]
                for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
            }
            rank = schedule.rank_of(stage, microbatch)
            where = f"rank {rank}, stage {stage}, microbatch {microbatch}"
            if num[FORWARD] != 1:
                wanted = Action(stage, FORWARD, microbatch)
                problems.append(f"{where}: {num[FORWARD]} forwards; give it one {wanted}")
            split = num[INPUT_GRAD], num[WEIGHT_GRAD]
            if (num[BACKWARD], *split) not in ((1, 0, 0), (0, 1, 1)):
                found = f"{num[BACKWARD]} B, {split[0]} I and {split[1]} W"
                whole, *parts = (
                    Action(stage, kind, microbatch) for kind in (BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
                )
                ways = f"give it one {whole}, or one {parts[0]} and one {parts[1]}"
                problems.append(f"{where}: {found}; {ways}")
    return problems

"""From the text after `--schedule` to a schedule: a name, `auto`, or a file, each checked.

`require_legal` is the one legality check, for our own schedules and for those of users. A file has
one line (or CSV row) per rank, in the text form of actions. Files written by torch's pipelining
work as they are; the transfers and gathers that its lowered form lists are skipped, because the
runtime derives its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from fivefold.core import BadFile, IllegalSchedule, bullets, counted, is_code, load_code
from fivefold.core.schedule import catalog
from fivefold.core.schedule.auto import search
from fivefold.core.schedule.clock import Costs, Goal, play
from fivefold.core.schedule.definition import AUTO, Family, Rule, fill_and_drain, too_large
from fivefold.core.schedule.in_flight import depth_in_flight
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Overlap,
    Placement,
    Schedule,
    Step,
    actions_of,
    parse_steps,
)


def require_legal(schedule: Schedule) -> None:
    """Raise `IllegalSchedule` unless every microbatch is computed once, on its rank, to the end."""
    problems = misplaced(schedule) + uncomputed(schedule) + overlapped_with_themselves(schedule)
    if problems:
        raise IllegalSchedule(bullets(f"schedule {schedule.name!r} is illegal:", problems[:12]))
    play(schedule, Costs.uniform(schedule.placement))


def misplaced(schedule: Schedule) -> list[str]:
    """Actions on a rank that does not have their stage."""
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
                forward = Action(stage, FORWARD, microbatch)
                problems.append(f"{where}: {num[FORWARD]} forwards; give it one {forward}")
            split = num[INPUT_GRAD], num[WEIGHT_GRAD]
            if (num[BACKWARD], *split) not in ((1, 0, 0), (0, 1, 1)):
                backward_counts = f"{num[BACKWARD]} B, {split[0]} I and {split[1]} W"
                backward, *parts = (
                    Action(stage, kind, microbatch) for kind in (BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
                )
                ways = f"give it one {backward}, or one {parts[0]} and one {parts[1]}"
                problems.append(f"{where}: {backward_counts}; {ways}")
    return problems


def overlapped_with_themselves(schedule: Schedule) -> list[str]:
    """Pairs of one stage. A stage has one state for both lanes, such as whether its backward runs,
    so that its forward would take itself for recomputation."""
    return [
        f"rank {rank} overlaps stage {step.forward.stage} with itself in {step}; pair two stages, "
        f"or write {step.forward} and {step.backward} one after the other"
        for rank, steps in enumerate(schedule.order)
        for step in steps
        if isinstance(step, Overlap) and step.forward.stage == step.backward.stage
    ]


def looks_like_file(name: str) -> bool:
    """Whether a schedule argument means a file rather than a name."""
    if name.lower() == AUTO or is_code(name):
        return is_code(name)
    return Path(name).suffix.lower() in (".csv", ".txt") or "/" in name or Path(name).is_file()


def load_schedule(path: Path) -> Schedule:
    """Read a schedule file and check it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(str(path), [f"{error}; give a CSV or text file, one rank a line"]) from error
    return parse_schedule(text, path.stem)


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """Read a schedule from text: cells separated by commas or spaces, one rank a line."""
    lines = [line for line in text.splitlines() if line.strip(" ,\t")]
    order = tuple(
        parse_steps(re.split(r"[,\s\"]+", re.sub(r"\s*;\s*", ";", line)), f"rank {rank}")
        for rank, line in enumerate(lines)
    )
    if not order or not all(order):
        raise IllegalSchedule(f"schedule {name!r} has a rank without actions; give each a line")
    schedule = Schedule(name, _placement(order), _num_microbatches(order), order)
    numbers = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    if problems := [*too_large(*numbers)]:
        raise IllegalSchedule(bullets(f"schedule {name!r} is too large:", problems))
    require_legal(schedule)
    return schedule


def _num_microbatches(order: tuple[tuple[Step, ...], ...]) -> int:
    steps = (step for steps in order for step in steps)
    microbatches = {action.microbatch for step in steps for action in actions_of(step)}
    missing = next(
        (microbatch for microbatch in range(max(microbatches)) if microbatch not in microbatches),
        None,
    )
    if missing is not None:
        raise IllegalSchedule(
            f"no rank runs microbatch {missing}; number microbatches from 0, no gaps"
        )
    return len(microbatches)


def _placement(order: tuple[tuple[Step, ...], ...]) -> Placement:
    """A stage is on the rank of its first microbatch; two ranks for each mean two directions."""
    homes: dict[int, tuple[int, int]] = {}
    ranks: dict[int, set[int]] = {}
    for rank, steps in enumerate(order):
        for action in (action for step in steps for action in actions_of(step)):
            first = (action.microbatch, rank)
            homes[action.stage] = min(homes.get(action.stage, first), first)
            ranks.setdefault(action.stage, set()).add(rank)
    missing = next((stage for stage in range(max(homes) + 1) if stage not in homes), None)
    if missing is not None:
        raise IllegalSchedule(f"no rank runs stage {missing}; number stages from 0, without gaps")
    mirrored = all(len(stages) == 2 for stages in ranks.values())
    return Placement(tuple(homes[stage][1] for stage in sorted(homes)), mirrored)


def choose(text: str) -> Family:
    """The family that a `--schedule` text names."""
    if is_code(text):
        return _of_code(text)
    return _of_file(Path(text)) if looks_like_file(text) else named(text)


def named(name: str) -> Family:
    """The family of a name, or that of the search."""
    return AUTO_FAMILY if name.lower() == AUTO else catalog.family(name)


def _auto(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Search in the memory of 1F1B, with equal times for all stages and passes."""
    goal = Goal(Costs.uniform, memory_limit=float(num_ranks))
    return search(num_ranks, num_microbatches, num_chunks, goal).schedule


# A search plays every candidate, so it must end sooner than one schedule would.
_MOST_STAGES, _MOST_SEARCHED = 256, 20_000
_SIZES = ("stage", "microbatch", "chunk")
_SEARCHABLE = (
    Rule(
        f"stages must be at most {_MOST_STAGES} for a search: name a schedule",
        lambda p, m: p <= _MOST_STAGES,
        True,
    ),
    Rule(
        f"stages × microbatches must be at most {_MOST_SEARCHED:,} for a search: lower the "
        "microbatches",
        lambda p, m: p * m <= _MOST_SEARCHED,
    ),
)
# Only the clock knows what a found or a given order costs. Until it is played, a search and a file
# are estimated like 1F1B.
AUTO_FAMILY = Family(
    AUTO,
    _auto,
    "the search found no order that fits the memory and idles less",
    paths="1f1b",
    bubble=fill_and_drain,
    in_flight=depth_in_flight,
    max_chunks=None,
    rules=_SEARCHABLE,
)


@lru_cache
def _of_code(text: str) -> Family:
    """A user's family, or that of a function of (stages, microbatches, chunks), which returns the
    actions of each rank as a line of text, or a `Schedule`."""
    function: Any = load_code(text)
    if isinstance(function, Family):
        return replace(function, name=text, own=True)
    if not callable(function):
        raise BadFile(text, ["a schedule is a function of (stages, microbatches, chunks)"])

    @lru_cache
    def make(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        numbers = (num_ranks, num_microbatches, num_chunks)
        order: Any = function(*numbers)
        if isinstance(order, Schedule):
            require_legal(order)
        elif isinstance(order, list | tuple):
            lines = cast("Sequence[object]", order)
            order = parse_schedule("\n".join(map(str, lines)), text)
        else:
            raise BadFile(text, ["return a list with a text of actions for each rank"])
        if (order.num_ranks, order.num_microbatches, order.num_chunks) != numbers:
            sizes = zip(_SIZES, numbers, strict=True)
            wish = ", ".join(counted(number, noun) for noun, number in sizes)
            raise IllegalSchedule(f"{text} returned another schedule than for {wish}")
        return order

    return Family(
        text,
        make,
        "the order of the function makes ranks wait for one another",
        paths="1f1b",
        bubble=fill_and_drain,
        in_flight=depth_in_flight,
        max_chunks=None,
        own=True,
    )


def _of_file(path: Path) -> Family:
    schedule = load_schedule(path)
    only = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    stages, microbatches, chunks = only
    return Family(
        str(path),
        lambda p, m, v: schedule,
        "the order in the file makes ranks wait for one another",
        paths="1f1b",
        bubble=fill_and_drain,
        in_flight=depth_in_flight,
        min_chunks=chunks,
        max_chunks=chunks,
        rules=(
            Rule(f"the file is for {counted(stages, 'stage')}", lambda p, m: p == stages, True),
            Rule(
                f"the file is for {counted(microbatches, 'microbatch')}",
                lambda p, m: m == microbatches,
            ),
        ),
        only=only,
    )

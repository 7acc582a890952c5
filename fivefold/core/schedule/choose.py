"""The one legality check, for our own schedules and for those that users bring."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fivefold.core.errors import BadFile, IllegalSchedule, bullets, counted
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Placement,
    Schedule,
    Step,
    actions_of,
    catalog,
    parse_steps,
)
from fivefold.core.schedule.catalog import Family, Rule, too_large
from fivefold.core.schedule.clock import Costs, Goal, play
from fivefold.core.schedule.search import search


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


# Schedules that users bring: one line (or CSV row) a rank, in the text form of `action`.
#
# Files written by torch's pipelining are read as they are; the transfers and gathers that its
# lowered form lists are passed over, since the runtime derives its own.


def looks_like_file(name: str) -> bool:
    """Whether a schedule argument means a file rather than a name."""
    return Path(name).suffix.lower() in (".csv", ".txt") or "/" in name or Path(name).is_file()


def load(path: Path) -> Schedule:
    """Read a schedule file and check it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(str(path), [f"{error}; give a CSV or text file, one rank a line"]) from error
    return parse(text, path.stem)


def parse(text: str, name: str = "custom") -> Schedule:
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
    found = {action.microbatch for step in steps for action in actions_of(step)}
    missing = next((each for each in range(max(found)) if each not in found), None)
    if missing is not None:
        raise IllegalSchedule(
            f"no rank runs microbatch {missing}; number microbatches from 0, no gaps"
        )
    return len(found)


def _placement(order: tuple[tuple[Step, ...], ...]) -> Placement:
    """The home of each stage is where its first microbatch runs; two homes mean two directions."""
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
    mirrored = all(len(found) == 2 for found in ranks.values())
    return Placement(tuple(homes[stage][1] for stage in sorted(homes)), mirrored)


# What `--schedule` may say: a name, `auto`, or a file.


def choose(text: str) -> Family:
    """The family that a user's word stands for."""
    if text.lower() == catalog.AUTO:
        return AUTO_FAMILY
    if looks_like_file(text):
        return _of_file(Path(text))
    return catalog.family(text)


def _auto(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Search in the memory of 1F1B, with equal times where nobody has measured any."""
    goal = Goal(Costs.uniform, memory_limit=float(num_ranks))
    return search(num_ranks, num_microbatches, num_chunks, goal).schedule


# A search plays every candidate, so it must end sooner than one schedule would.
_MOST_STAGES, _MOST_SEARCHED = 256, 20_000
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
AUTO_FAMILY = Family(
    catalog.AUTO,
    _auto,
    "the search found no order that fits the memory and idles less",
    max_chunks=None,
    rules=_SEARCHABLE,
)


def _of_file(path: Path) -> Family:
    schedule = load(path)
    only = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    stages, microbatches, chunks = only
    return Family(
        str(path),
        lambda p, m, v: schedule,
        "the order in the file makes ranks wait for one another",
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

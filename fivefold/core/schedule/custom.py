"""Schedules that users bring: one line (or CSV row) a rank, in the text form of `action`.

Files written by torch's pipelining are read as they are; the transfers and gathers that its
lowered form lists are passed over, since the runtime derives its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from fivefold.core.errors import BadFile, IllegalSchedule, bullets
from fivefold.core.schedule.action import Step, actions_of, parse_steps
from fivefold.core.schedule.catalog import too_large
from fivefold.core.schedule.check import require_legal
from fivefold.core.schedule.placement import Placement
from fivefold.core.schedule.value import Schedule


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

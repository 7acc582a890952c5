"""What `--schedule` may say: a name, `auto`, or a file."""

from __future__ import annotations

from pathlib import Path

from fivefold.core.schedule import catalog, custom
from fivefold.core.schedule.catalog import Family, Rule
from fivefold.core.schedule.costs import Costs
from fivefold.core.schedule.goal import Goal
from fivefold.core.schedule.search import search
from fivefold.core.schedule.value import Schedule
from fivefold.core.words import counted


def choose(text: str) -> Family:
    """The family that a user's word stands for."""
    if text.lower() == catalog.AUTO:
        return AUTO_FAMILY
    if custom.looks_like_file(text):
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
    schedule = custom.load(path)
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

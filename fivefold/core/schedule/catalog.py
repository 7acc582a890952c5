"""All schedules by name. `linear.py` and `v_shape.py` say everything else about each of them."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.core import UnknownName
from fivefold.core.schedule import linear, v_shape
from fivefold.core.schedule.definition import AUTO, Family
from fivefold.core.schedule.schedule import Schedule

FAMILIES: tuple[Family, ...] = (
    linear.GPIPE,
    linear.ONE_F_ONE_B,
    linear.INTERLEAVED,
    linear.BREADTH_FIRST,
    linear.ZB_H1,
    linear.ZB_H2,
    linear.ZB_INTERLEAVED,
    v_shape.ZB_V,
    v_shape.V_HALF,
    v_shape.V_MIN,
    v_shape.DUALPIPE,
    v_shape.DUALPIPE_V,
    linear.PIPEDREAM,
    linear.PIPEDREAM_2BW,
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

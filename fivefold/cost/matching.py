"""Ranks that differ: which of a job have to be looked at, so that all have been seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fivefold.core.plan import Plan
from fivefold.cost.collectives import UNEVEN

_FEW = 16  # ranks of a job that are all looked at
_AXES = ("tp", "cp", "dp")


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """Of a small job all. Of a large one, every pipeline rank at the first coord of the other axes,
    and on its first, a middle and its last stage one rank that differs on each other axis: the one
    behind the first, where groups begin to differ, and the last, which has what is left over."""
    layout = plan.layout
    if layout.world <= _FEW:
        return tuple(range(layout.world))
    found: list[int] = []
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    for rank in range(layout.world):
        coord = layout.coord(rank)
        away = [axis for axis in _AXES if getattr(coord, axis)]
        if not away:
            found.append(rank)
        elif len(away) == 1 and coord.pp in stages:
            place, degree = getattr(coord, away[0]), getattr(layout, away[0])
            if place in (1, degree - 1):
                found.append(rank)
    return tuple(found)


# Collectives of several ranks held against one another: whoever calls something else than its
# group is a hang in waiting.
#
# The ranks of a group make the same calls on it in the same order, with the same kind and size;
# what the same ranks call on another axis is in that order too, for a small job has one group for
# several axes. Messages have a line of their own for each direction of a pair: what the source
# sends, in the order in which its target receives.


class RankCalls(NamedTuple):
    """One call of a rank: on which axis, what, how many bytes, among which ranks, and where."""

    axis: str
    kind: str
    bytes: int
    members: tuple[int, ...]  # of a message: source and target
    where: str = ""  # the action in which it was made

    def __str__(self) -> str:
        at = f" in {self.where}" if self.where else ""
        return f"{self.kind} of {self.bytes:,} bytes on {self.axis}{at}"

    @property
    def is_message(self) -> bool:
        """Whether one rank sends and another receives; around a ring all do both."""
        return self.axis == "pp" and self.kind in ("send", "recv")

    @property
    def common(self) -> tuple[str, str, int]:
        """What all ranks of a group must agree on."""
        kind = "message" if self.is_message else self.kind
        routed = self.axis in UNEVEN and self.kind == "all_to_all"
        return self.axis, kind, 0 if routed else self.bytes


class Mismatch(NamedTuple):
    """Two ranks of a group whose calls part; None where a rank has no more calls."""

    number: int  # of the call among those that the ranks of its group make together, from 1
    one: int
    other: int
    one_calls: RankCalls | None
    other_calls: RankCalls | None

    def __str__(self) -> str:
        calls = [
            f"rank {rank} makes {'no further call' if call is None else call}"
            for rank, call in ((self.one, self.one_calls), (self.other, self.other_calls))
        ]
        return f"call {self.number} of ranks {self.one} and {self.other}: {calls[0]}, {calls[1]}"


def mismatches(calls: Mapping[int, Sequence[RankCalls]]) -> list[Mismatch]:
    """Where the first known rank of each group and another part, by what ranks have called."""
    lines: dict[tuple[bool, tuple[int, ...]], dict[int, list[RankCalls]]] = {}
    for rank, made in calls.items():
        for call in made:
            by_rank = lines.setdefault((call.is_message, call.members), {})
            by_rank.setdefault(rank, []).append(call)
    found: list[Mismatch] = []
    for (_, members), by_rank in lines.items():
        first, *others = sorted(rank for rank in members if rank in calls)
        for other in others:
            found += _parting(first, other, by_rank.get(first, []), by_rank.get(other, []))
    return found


def _parting(
    one: int, other: int, line: Sequence[RankCalls], other_line: Sequence[RankCalls]
) -> Iterator[Mismatch]:
    """The first difference, if there is one."""
    for number, (mine, theirs) in enumerate(zip_longest(line, other_line), 1):
        if mine is None or theirs is None or mine.common != theirs.common:
            yield Mismatch(number, one, other, mine, theirs)
            return

"""Collectives of several ranks held against one another: whoever calls something else than its
group is a hang in waiting.

The ranks of a group make the same calls on it in the same order, with the same kind and size; what
the same ranks call on another axis is in that order too, for a small job has one group for several
axes. Messages have a line of their own for each direction of a pair: what the source sends, in the
order in which its target receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fivefold.core.routed import UNEVEN


class Made(NamedTuple):
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
    one_calls: Made | None
    other_calls: Made | None

    def __str__(self) -> str:
        calls = [
            f"rank {rank} makes {'no further call' if call is None else call}"
            for rank, call in ((self.one, self.one_calls), (self.other, self.other_calls))
        ]
        return f"call {self.number} of ranks {self.one} and {self.other}: {calls[0]}, {calls[1]}"


def mismatches(calls: Mapping[int, Sequence[Made]]) -> list[Mismatch]:
    """Where the first known rank of each group and another part, by what ranks have called."""
    lines: dict[tuple[bool, tuple[int, ...]], dict[int, list[Made]]] = {}
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
    one: int, other: int, line: Sequence[Made], other_line: Sequence[Made]
) -> Iterator[Mismatch]:
    """The first difference, if there is one."""
    for number, (mine, theirs) in enumerate(zip_longest(line, other_line), 1):
        if mine is None or theirs is None or mine.common != theirs.common:
            yield Mismatch(number, one, other, mine, theirs)
            return

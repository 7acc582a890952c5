"""Collectives of several ranks held against one another: whoever calls something else than its
group is a hang in waiting.

Every group has one line of calls, which all of its ranks make in the same order, with the same kind
and size. A message has two: what the source sends in the order in which its target receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fivefold.core.routed import UNEVEN

_MESSAGES = {"send": "recv", "recv": "send"}


class Made(NamedTuple):
    """One call of a rank: on which axis, what, how many bytes, among which ranks, and where."""

    axis: str
    kind: str
    bytes: int
    members: tuple[int, ...]
    where: str = ""  # the action in which it was made

    def __str__(self) -> str:
        at = f" in {self.where}" if self.where else ""
        return f"{self.kind} of {self.bytes:,} bytes on {self.axis}{at}"


class Mismatch(NamedTuple):
    """Two ranks of a group whose calls part; None where a rank has no more calls."""

    axis: str
    number: int  # of the call in its line, from 1
    one: int
    other: int
    one_calls: Made | None
    other_calls: Made | None

    def __str__(self) -> str:
        calls = [
            f"rank {rank} makes {'no further call' if call is None else call}"
            for rank, call in ((self.one, self.one_calls), (self.other, self.other_calls))
        ]
        return f"call {self.number} on {self.axis}: {calls[0]}, {calls[1]}"


def mismatches(calls: Mapping[int, Sequence[Made]]) -> list[Mismatch]:
    """The first difference of each pair of ranks that share a group, by what ranks have called."""
    lines: dict[tuple[str, tuple[int, ...]], dict[int, list[Made]]] = {}
    for rank, made in calls.items():
        for call in made:
            for line in _lines(call, rank):
                lines.setdefault(line, {rank: []}).setdefault(rank, []).append(call)
    found: list[Mismatch] = []
    for (axis, members), by_rank in lines.items():
        known = [rank for rank in sorted(set(members)) if rank in calls]
        for other in known[1:]:
            pair = (by_rank.get(known[0], []), by_rank.get(other, []))
            found += _first(axis.split(" ")[0], (known[0], other), pair)
    return found


def _lines(call: Made, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The lines that a call is on: messages have one for each direction of each pair."""
    if call.kind not in _MESSAGES:
        yield call.axis, call.members
    elif len(call.members) == 2 and call.axis == "pp":
        yield f"{call.axis} message", call.members
    else:  # around a ring everybody sends ahead and receives from behind
        yield f"{call.axis} {call.kind}", call.members


def _first(
    axis: str, ranks: tuple[int, int], lines: tuple[Sequence[Made], Sequence[Made]]
) -> Iterator[Mismatch]:
    for number, (one, other) in enumerate(zip_longest(*lines), 1):
        if one is None or other is None or _label(one) != _label(other):
            yield Mismatch(axis, number, *ranks, one, other)
            return


def _label(call: Made) -> tuple[str, int]:
    """What all ranks of a group have in common."""
    kind = "message" if call.axis == "pp" and call.kind in _MESSAGES else call.kind
    return kind, 0 if call.axis in UNEVEN and call.kind == "all_to_all" else call.bytes

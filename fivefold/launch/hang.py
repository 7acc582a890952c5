"""Who keeps the others waiting: worked out from what every rank has called so far.

A *line* is a group and what it is used for: an axis and its ranks, or a pair of pipeline ranks in
one direction. Every call of a line needs all of its ranks, so a rank that has made fewer calls than
another keeps that one waiting. Following who waits for whom leads to the rank that waits for
nobody. Where it leads in a circle, two ranks have called different things: their calls are laid
beside each other, and what came after the same calls before, on any rank, tells who left the path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from fivefold.core.errors import counted

_BEGIN = "^"
_MOST_NAMED = 8  # ranks in a sentence


class Line(NamedTuple):
    """A group and its use; a pair that sends messages is (source, target)."""

    axis: str
    members: tuple[int, ...]
    messages: bool = False

    def __str__(self) -> str:
        if self.messages:
            return f"{self.axis} from rank {self.members[0]} to rank {self.members[1]}"
        return f"{self.axis} ({ranks(self.members)})"


class IssuedCall(NamedTuple):
    """One collective or message, as its caller saw it."""

    line: Line
    kind: str
    size: int  # bytes; 0 where each rank brings as much as it has

    @property
    def label(self) -> tuple[str, str, int]:
        """What it has in common with the calls of the other ranks."""
        return (self.line.axis, self.kind, self.size)


@dataclass(frozen=True)
class Position:
    """Where a rank stands."""

    counts: Mapping[Line, int]  # calls so far
    trail: Sequence[IssuedCall] = ()  # the last of them, in order
    phase: str = "start"
    idle: float = 0.0  # seconds since it last called or said something; inf at its end
    allowed: float = 0.0  # seconds that it may still take for what it does
    waits: bool = True  # its program stands in a call that waits for others, or may do so
    stack: Sequence[str] = field(default_factory=tuple[str, ...])  # outermost first


@dataclass(frozen=True)
class HangVerdict:
    """The rank that keeps the others waiting, what it was doing, and what it has not joined."""

    rank: int
    doing: str
    cause: str

    def __str__(self) -> str:
        return f"lost rank {self.rank} at {self.doing}: it {self.cause}"


def verdict(
    positions: Mapping[int, Position], silent: Collection[int] = (), bound: float = 0.0
) -> HangVerdict | None:
    """Who is to blame; None where nobody is yet.

    `silent` ranks do not answer; what is known of them may be old, or nothing. A rank that answers
    and that nobody keeps waiting has `bound` seconds, or what it was allowed, to move again.
    """
    edges = _edges(positions, silent)
    awaited = {rank for behind in edges.values() for rank in behind}
    ends = sorted(awaited - set(edges))
    lost = [rank for rank in ends if rank in silent] or sorted(awaited & set(silent))
    if lost:
        return _missing(lost[0], edges, positions, silent=True)
    circle = [] if ends else _circle(edges)
    # Calls that differ are no matter of time, and whoever waits in one of them looks only slow.
    left = parted(positions, circle or ends)
    if left is not None:
        return left
    slow = ends or [rank for rank in circle if not positions[rank].waits]
    if slow:
        guilty = [rank for rank in slow if _too_long(positions[rank], bound)]
        return _missing(guilty[0], edges, positions) if guilty else None
    stand = [_too_long(each, bound) and isfinite(each.idle) for each in positions.values()]
    return _stuck(circle or sorted(positions), positions) if all(stand) else None


def parted(positions: Mapping[int, Position], among: Sequence[int]) -> HangVerdict | None:
    """Of ranks that share groups, the one whose calls left the path that the others kept to; first
    it is sought among these."""
    for a, b in _pairs(positions, among):
        fork = _fork(a, positions[a], b, positions[b])
        if fork is None:
            continue
        usual = _usual(fork, positions)
        if usual == fork.second.label:
            return _left(a, fork.first, b, fork.second, fork.number_second, positions)
        if usual == fork.first.label:
            return _left(b, fork.second, a, fork.first, fork.number_first, positions)
        return HangVerdict(
            a,
            positions[a].phase,
            f"and rank {b}, at {positions[b].phase}, have not called the same: "
            f"rank {a} {_named(fork.first, fork.number_first)}, "
            f"rank {b} {_named(fork.second, fork.number_second)}; one of them left out a call or "
            "made one too many",
        )
    return None


def ranks(members: Iterable[int]) -> str:
    """Ranks in a sentence.

    >>> ranks([2]), ranks([0, 1, 5])
    ('rank 2', 'ranks 0, 1 and 5')
    """
    found = sorted(members)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > _MOST_NAMED:
        first = ", ".join(map(str, found[: _MOST_NAMED - 1]))
        return f"ranks {first} and {len(found) - _MOST_NAMED + 1} more"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"


def _too_long(position: Position, bound: float) -> bool:
    return position.allowed <= 0 and position.idle >= bound


def _edges(positions: Mapping[int, Position], silent: Collection[int]) -> dict[int, set[int]]:
    """By rank, the ranks that have made fewer calls of one of its lines. Silent ones wait for
    nobody; of those whose calls are unknown, who last called something with them waits for them."""
    edges: dict[int, set[int]] = {}
    for rank, position in positions.items():
        if rank in silent:
            continue
        last = position.trail[-1].line if position.trail else None
        behind = {
            other
            for line, count in position.counts.items()
            for other in line.members
            if (
                positions[other].counts.get(line, 0) < count if other in positions else line == last
            )
        }
        if behind:
            edges[rank] = behind
    return edges


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks that wait for one another, where every way leads into such a circle."""
    if not edges:
        return []
    path = [min(edges)]
    while (rank := min(edges[path[-1]])) not in path:
        path.append(rank)
    return path[path.index(rank) :]


def _missing(
    rank: int,
    edges: Mapping[int, set[int]],
    positions: Mapping[int, Position],
    silent: bool = False,
) -> HangVerdict:
    """A rank that others wait for, with the call that it has not joined.

    Those who wait for nobody else tell what comes first; the rest may be further on.
    """
    direct = sorted((len(behind), each) for each, behind in edges.items() if rank in behind)
    lacks = {each: _first_lacked(positions[each], positions.get(rank), rank) for _, each in direct}
    call, number = next((found for found in lacks.values() if found is not None), (None, 0))
    waiting = [each for each, found in lacks.items() if found is None or found[0] == call]
    joined = "has not joined " + (_named(call, number) if call else "the others")
    words = [f"{joined}, where {_wait(waiting)}"]
    if further := set(edges) - set(waiting) - {rank}:
        words.append(f"{_wait(further)} behind that")
    position = positions.get(rank)
    if silent:
        words.append("it does not answer: it is stopped or dead, or its host is gone")
    elif position is not None and isfinite(position.idle):  # else it has come to its end
        words.append(f"it has not moved for {position.idle:.0f} s" + _at(position))
    return HangVerdict(rank, position.phase if position else "an unknown place", "; ".join(words))


def _wait(found: Collection[int]) -> str:
    return f"{ranks(found)} {'waits' if len(found) == 1 else 'wait'}"


def _at(position: Position) -> str:
    return ", in:\n" + "\n".join(position.stack) if position.stack else ""


def _first_lacked(
    waiting: Position, missing: Position | None, rank: int
) -> tuple[IssuedCall, int] | None:
    """The first call of one rank that another has not made, and its number on its line."""
    if missing is None:  # then it is taken to be the last one
        shared = [call for call in waiting.trail if rank in call.line.members]
        return (shared[-1], waiting.counts[shared[-1].line]) if shared else None
    left = Counter(
        {
            line: count - missing.counts.get(line, 0)
            for line, count in waiting.counts.items()
            if rank in line.members
        }
    )
    found: tuple[IssuedCall, int] | None = None
    after: Counter[Line] = Counter()
    for call in reversed(waiting.trail):
        if after[call.line] < left[call.line]:
            found = call, waiting.counts[call.line] - after[call.line]
        after[call.line] += 1
    return found


class _Fork(NamedTuple):
    """Where the calls of two ranks part, and the labels of those before: all, if complete."""

    before: list[tuple[str, str, int]]
    complete: bool
    axes: set[str]
    first: IssuedCall
    number_first: int
    second: IssuedCall
    number_second: int


def _fork(a: int, at_a: Position, b: int, at_b: Position) -> _Fork | None:
    shared = {
        line
        for line in (*at_a.counts, *at_b.counts)
        if not line.messages and a in line.members and b in line.members
    }
    ours = [call for call in at_a.trail if call.line in shared]
    theirs = [call for call in at_b.trail if call.line in shared]
    # Trails forget their beginnings: what is left is numbered from its end.
    skip_a = sum(at_a.counts.get(line, 0) for line in shared) - len(ours)
    skip_b = sum(at_b.counts.get(line, 0) for line in shared) - len(theirs)
    ours, theirs = ours[max(0, skip_b - skip_a) :], theirs[max(0, skip_a - skip_b) :]
    for index, (first, second) in enumerate(zip(ours, theirs, strict=False)):
        if first.line != second.line or first.label != second.label:
            return _Fork(
                [call.label for call in ours[:index]],
                max(skip_a, skip_b) == 0,
                {line.axis for line in shared},
                first,
                _number(at_a, ours, index),
                second,
                _number(at_b, theirs, index),
            )
    return None


def _number(position: Position, calls: Sequence[IssuedCall], index: int) -> int:
    line = calls[index].line
    return position.counts[line] - sum(call.line == line for call in calls[index + 1 :])


def _pairs(positions: Mapping[int, Position], among: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours among these ranks, then neighbours in every group."""
    known = [rank for rank in among if rank in positions]
    rows = [known, *sorted({line.members for each in positions.values() for line in each.counts})]
    pairs = {
        (min(pair), max(pair)): None
        for row in rows
        for pair in pairwise(row)
        if pair[0] in positions and pair[1] in positions
    }
    return list(pairs)


def _usual(fork: _Fork, positions: Mapping[int, Position]) -> tuple[str, str, int] | None:
    """What has followed the same calls elsewhere or before, by the longest memory there is.

    The two ranks themselves are one voice for each side; the others have to agree.
    """
    letters: dict[tuple[str, str, int], str] = {}

    def spelled(labels: Sequence[tuple[str, str, int]], complete: bool) -> str:
        text = "".join(letters.setdefault(each, chr(0x100 + len(letters))) for each in labels)
        return _BEGIN * complete + text

    def told(position: Position) -> str:
        counts = [
            count
            for line, count in position.counts.items()
            if line.axis in fork.axes and not line.messages
        ]
        labels = [
            call.label
            for call in position.trail
            if call.line.axis in fork.axes and not call.line.messages
        ]
        return spelled(labels, len(labels) == sum(counts))

    texts = [told(each) for each in positions.values()]
    voices = Counter(_followers(spelled(fork.before, fork.complete), texts))
    voices.subtract([letters[fork.first.label], letters[fork.second.label]])
    heard = [letter for letter, number in voices.items() if number > 0]
    named = {letter: label for label, letter in letters.items()}
    return named[heard[0]] if len(heard) == 1 else None


def _followers(before: str, texts: Sequence[str]) -> list[str]:
    """Letters that follow the longest end of `before` that is found more than twice."""

    def found(length: int) -> list[str]:
        end = before[len(before) - length :]
        return [text[at + length] for text in texts for at in _places(text, end)]

    # A longer end is found less often.
    lengths = range(len(before), 0, -1)
    first = bisect_left(lengths, True, key=lambda length: len(found(length)) > 2)
    return found(lengths[first]) if first < len(lengths) else []


def _places(text: str, end: str) -> list[int]:
    """Where `end` is found in a text with something behind it."""
    places: list[int] = []
    at = text.find(end)
    while 0 <= at < len(text) - len(end):
        places.append(at)
        at = text.find(end, at + 1)
    return places


def _stuck(circle: Sequence[int], positions: Mapping[int, Position]) -> HangVerdict | None:
    """Nobody is behind, or all in a circle are: say where they stand."""
    rank = circle[0]
    trail = positions[rank].trail
    if not trail:
        return None
    last = _named(trail[-1], positions[rank].counts[trail[-1].line])
    return HangVerdict(
        rank,
        positions[rank].phase,
        f"and {ranks(set(positions) - {rank})} wait for one another, and none has left out a call: "
        f"look at the network between them; its last was {last}" + _at(positions[rank]),
    )


def _left(
    rank: int,
    made: IssuedCall,
    other: int,
    lacked: IssuedCall,
    number: int,
    positions: Mapping[int, Position],
) -> HangVerdict:
    position = positions[rank]
    return HangVerdict(
        rank,
        position.phase,
        f"has not joined {_named(lacked, number)}, which rank {other} called at "
        f"{positions[other].phase}; it went on to {made.kind} on {made.line.axis}" + _at(position),
    )


def _named(call: IssuedCall, number: int) -> str:
    size = f" of {counted(call.size, 'byte')}" if call.size else ""
    return f"call {number} on {call.line}, {call.kind}{size}"

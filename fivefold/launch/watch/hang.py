"""Find the rank that keeps the others waiting, from the collectives that every rank has issued.

Every collective needs all ranks of its group. So a rank that has issued fewer collectives on a
group than another rank keeps that rank waiting. The chain of waiting ranks ends at a rank that
waits for no other: that rank is to blame. If the chain is a circle, two ranks have issued different
collectives. Their sequences are compared, and what followed the same collectives before, on any
rank, shows which of the two diverged.

On GPUs the hosts issue ahead, so they may all have issued the same while the GPUs wait for one
another. Where the hosts do not tell, the GPUs are asked (`device_calls.py`). Where no rank has
issued more than another, as at the start, in a build or in a save, the phases tell (`phases.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from fivefold.core import counted
from fivefold.launch.watch.phases import late, with_limits
from fivefold.launch.watch.positions import (
    CommGroup,
    HangVerdict,
    LoggedCollective,
    Position,
    member_set,
    ranks,
    stands_at,
    too_long,
    who_waits,
)

_BEGIN = "^"  # marks a sequence from its first collective


def verdict(
    positions: Mapping[int, Position],
    silent: Collection[int] = (),
    bound: float = 0.0,
    on_device: Callable[[], HangVerdict | None] = lambda: None,
    excused: Collection[int] = (),
) -> HangVerdict | None:
    """Rank that blocks the others, or None if undecided.

    `silent` ranks do not answer; their positions may be old or missing. Those of them that are
    `excused` may still do so: they are not blamed, nor anybody who waits for them. A rank that
    answers and waits for no other may be slow: it has `bound` seconds, or the limit of its phase,
    to go on.
    `on_device` asks the GPUs, where ranks have waited long enough and the hosts do not tell.
    """
    positions = with_limits(positions)
    edges = _waiting_for(positions, silent)
    # Ranks that wait in one group share their targets.
    awaited = set[int]().union(*{id(targets): targets for targets in edges.values()}.values())
    ends = sorted(awaited - set(edges))
    lost = [rank for rank in ends if rank in silent] or sorted(awaited & set(silent))
    if lost:
        lost = [rank for rank in lost if rank not in excused]
        return _missing(lost[0], edges, positions, silent=True) if lost else None
    circle = [] if ends else first_circle(edges)
    # Ranks in different collectives only look slow, so this comes before any time limit.
    if (hang := diverged(positions, circle or ends)) is not None:
        return hang
    slow = ends or [rank for rank in circle if not positions[rank].waits]
    if slow:
        lost = [rank for rank in slow if too_long(positions[rank], bound)]
        if not lost:
            return None
        # A host that has issued less may be held by its GPU, which waits for another rank.
        hang = on_device() or _missing(lost[0], edges, positions)
        blamed = positions.get(hang.rank)
        return hang if blamed is None or too_long(blamed, bound) else None
    if not edges and (hang := late(positions, silent, bound, excused)) is not None:
        return on_device() or hang
    stuck = [
        too_long(position, bound) and isfinite(position.idle) for position in positions.values()
    ]
    if not all(stuck):
        return None
    return on_device() or _stuck(circle or sorted(positions), positions)


def diverged(positions: Mapping[int, Position], among: Sequence[int]) -> HangVerdict | None:
    """Rank that issued another collective than the ranks of its groups; `among` have priority."""
    trails = _NumberedTrails(positions)
    # Neighbours among these ranks, then neighbours in every group.
    known = [rank for rank in among if rank in positions]
    rows = [
        known,
        *sorted(
            group.members
            for group in {group for position in positions.values() for group in position.counts}
        ),
    ]
    pairs = [(a, b) for row in rows for a, b in pairwise(row) if a in positions and b in positions]
    for a, b in list(dict.fromkeys((min(pair), max(pair)) for pair in pairs)):
        if trails.agree(a, b):
            continue
        divergence = _divergence(a, positions[a], b, positions[b])
        if divergence is None:
            continue
        usual = _usual(divergence, positions)
        if usual == divergence.second.label:
            return _skipped(
                a, divergence.first, b, divergence.second, divergence.number_second, positions
            )
        if usual == divergence.first.label:
            return _skipped(
                b, divergence.second, a, divergence.first, divergence.number_first, positions
            )
        return HangVerdict(
            a,
            positions[a].phase,
            f"and rank {b}, at {positions[b].phase}, have not called the same: "
            f"rank {a} {named_call(divergence.first, divergence.number_first)}, "
            f"rank {b} {named_call(divergence.second, divergence.number_second)}; one of them left "
            "out a call or made one too many",
            final=True,
        )
    return None


def _waiting_for(
    positions: Mapping[int, Position], silent: Collection[int]
) -> dict[int, frozenset[int]]:
    """For each rank, the ranks that have issued fewer collectives on one of its groups.

    Silent ranks wait for no other. A rank of unknown position is awaited by the ranks whose last
    collective includes it. Groups are counted once, not once for each of their ranks: a group of
    all ranks would take their square.
    """
    edges: dict[int, set[int]] = {}
    counted_groups: dict[CommGroup, _GroupCounts] = {}
    for rank, position in positions.items():
        if rank in silent:
            continue
        last = position.trail[-1].group if position.trail else None
        targets = frozenset[int]()
        for group, count in position.counts.items():
            if (group_counts := counted_groups.get(group)) is None:
                group_counts = counted_groups[group] = _GroupCounts.of(group, positions)
            if count > group_counts.least:
                below = group_counts.below(count)
                targets = targets | below if targets else below
            if group_counts.unknown and group == last:
                targets = targets | group_counts.unknown if targets else group_counts.unknown
        if targets:
            edges[rank] = targets
    return edges


class _GroupCounts(NamedTuple):
    """Calls of each rank of a group, their minimum, and ranks without a log."""

    counts: list[tuple[int, int]]
    least: int
    unknown: frozenset[int]
    by_count: dict[int, frozenset[int]]

    def below(self, count: int) -> frozenset[int]:
        """The ranks with fewer calls."""
        if (ranks_below := self.by_count.get(count)) is None:
            ranks_below = frozenset(rank for rank, theirs in self.counts if theirs < count)
            self.by_count[count] = ranks_below
        return ranks_below

    @classmethod
    def of(cls, group: CommGroup, positions: Mapping[int, Position]) -> _GroupCounts:
        known = [member for member in group.members if member in positions]
        counts = [(member, positions[member].counts.get(group, 0)) for member in known]
        unknown = frozenset(member for member in group.members if member not in positions)
        return cls(counts, min((count for _, count in counts), default=0), unknown, {})


def first_circle(edges: Mapping[int, Collection[int]]) -> list[int]:
    """First cycle of ranks that wait for one another, if every chain of waits ends in one."""
    if not edges:
        return []
    path = [min(edges)]
    while (rank := min(edges[path[-1]])) not in path:
        path.append(rank)
    return path[path.index(rank) :]


def _missing(
    rank: int,
    edges: Mapping[int, frozenset[int]],
    positions: Mapping[int, Position],
    silent: bool = False,
) -> HangVerdict:
    """A rank that others wait for, with the collective that it has not joined.

    Ranks that wait for this rank alone come first: the others may be further on.
    """
    direct = sorted((len(targets), waiter) for waiter, targets in edges.items() if rank in targets)
    missed = {
        waiter: _first_missed(positions[waiter], positions.get(rank), rank) for _, waiter in direct
    }
    call, number = next(
        (missed_call for missed_call in missed.values() if missed_call is not None), (None, 0)
    )
    waiting = [
        waiter
        for waiter, missed_call in missed.items()
        if missed_call is None or missed_call[0] == call
    ]
    joined = "has not joined " + (named_call(call, number) if call else "the others")
    reasons = [f"{joined}, where {who_waits(waiting)}"]
    if further := set(edges) - set(waiting) - {rank}:
        reasons.append(f"{who_waits(further)} in turn")
    position = positions.get(rank)
    if silent:
        reasons.append("it does not answer: it is stopped or dead, or its host is gone")
    elif position is not None and isfinite(position.idle):  # else it has ended
        reasons.append(f"it has not moved for {position.idle:.0f} s" + stands_at(position))
    return HangVerdict(rank, position.phase if position else "an unknown place", "; ".join(reasons))


def _first_missed(
    waiting: Position, missing: Position | None, rank: int
) -> tuple[LoggedCollective, int] | None:
    """The first collective of one rank that another has not issued, and its number."""
    if missing is None:  # then assume the last one
        shared = [call for call in waiting.trail if rank in member_set(call.group)]
        return (shared[-1], waiting.counts[shared[-1].group]) if shared else None
    left = Counter(waiting.counts)
    left.subtract(missing.counts)
    missed_call: tuple[LoggedCollective, int] | None = None
    after: Counter[CommGroup] = Counter()
    for call in reversed(waiting.trail):
        if after[call.group] < left[call.group] and rank in member_set(call.group):
            missed_call = call, waiting.counts[call.group] - after[call.group]
        after[call.group] += 1
    return missed_call


class _NumberedTrails:
    """Logs of all ranks with a number for each distinct collective: logs are long and pairs of
    ranks many, so that comparisons must be cheap."""

    def __init__(self, positions: Mapping[int, Position]) -> None:
        self._positions = positions
        self._numbers: dict[LoggedCollective, int] = {}
        self._trails: dict[int, tuple[list[int], dict[int, CommGroup]]] = {}
        self._same: dict[int, object] = {}
        self._programs: dict[object, object] = {}

    def agree(self, a: int, b: int) -> bool:
        """Whether two ranks have issued the same on the groups that they share."""
        # Most ranks have done the same on their own groups: of 16,384, all but the neighbours in a
        # pipeline are compared by identity.
        if (program := self._program(a)) is not None and program is self._program(b):
            return True
        shared = _shared(a, self._positions[a], b, self._positions[b])
        ours, theirs = self._among(a, shared), self._among(b, shared)
        at_a, at_b = self._positions[a], self._positions[b]
        from_a, from_b = _aligned(at_a, len(ours), at_b, len(theirs), shared)
        ours, theirs = ours[from_a:], theirs[from_b:]
        length = min(len(ours), len(theirs))
        return ours[:length] == theirs[:length]

    def _program(self, rank: int) -> object:
        """What a rank has issued, by axes alone: one value for equal programs; None if an axis has
        several groups."""
        if rank not in self._same:
            position = self._positions[rank]
            counts = [(group.axis, n) for group, n in position.counts.items() if not group.is_pair]
            known = len({axis for axis, _ in counts}) == len(counts)
            program = (tuple(counts), tuple(call.label for call in position.trail))
            self._same[rank] = self._programs.setdefault(program, program) if known else None
        return self._same[rank]

    def _among(self, rank: int, shared: Collection[CommGroup]) -> list[int]:
        trail, groups = self._numbered(rank)
        numbers = {number for number, group in groups.items() if group in shared}
        return [number for number in trail if number in numbers]

    def _numbered(self, rank: int) -> tuple[list[int], dict[int, CommGroup]]:
        if (known := self._trails.get(rank)) is None:
            seen: dict[int, int] = {}  # by identity: a log repeats the same objects
            groups: dict[int, CommGroup] = {}
            for call in self._positions[rank].trail:
                if id(call) not in seen:
                    number = self._numbers.setdefault(call, len(self._numbers))
                    seen[id(call)], groups[number] = number, call.group
            trail = [seen[id(call)] for call in self._positions[rank].trail]
            known = self._trails[rank] = trail, groups
        return known


def _shared(a: int, at_a: Position, b: int, at_b: Position) -> set[CommGroup]:
    """The groups of both ranks."""
    return {
        group
        for group in (*at_a.counts, *at_b.counts)
        if not group.is_pair and a in member_set(group) and b in member_set(group)
    }


def _aligned(
    at_a: Position, num_a: int, at_b: Position, num_b: int, shared: Collection[CommGroup]
) -> tuple[int, int]:
    """Where two trails begin to be comparable: they have lost their beginnings, so they are aligned
    by their ends."""
    skip_a, skip_b = _issued(at_a, shared) - num_a, _issued(at_b, shared) - num_b
    return max(0, skip_b - skip_a), max(0, skip_a - skip_b)


def _issued(position: Position, shared: Collection[CommGroup]) -> int:
    """Collectives of a rank on these groups."""
    return sum(position.counts.get(group, 0) for group in shared)


class _Divergence(NamedTuple):
    """First different collectives of two ranks, and the labels before; all of them, if complete."""

    before: list[tuple[str, str, int]]
    complete: bool
    axes: set[str]
    first: LoggedCollective
    number_first: int
    second: LoggedCollective
    number_second: int


def _divergence(a: int, at_a: Position, b: int, at_b: Position) -> _Divergence | None:
    shared = _shared(a, at_a, b, at_b)
    ours = [call for call in at_a.trail if call.group in shared]
    theirs = [call for call in at_b.trail if call.group in shared]
    complete = len(ours) == _issued(at_a, shared) and len(theirs) == _issued(at_b, shared)
    from_a, from_b = _aligned(at_a, len(ours), at_b, len(theirs), shared)
    ours, theirs = ours[from_a:], theirs[from_b:]
    for index, (first, second) in enumerate(zip(ours, theirs, strict=False)):
        if first.group != second.group or first.label != second.label:
            return _Divergence(
                [call.label for call in ours[:index]],
                complete,
                {group.axis for group in shared},
                first,
                _number(at_a, ours, index),
                second,
                _number(at_b, theirs, index),
            )
    return None


def _number(position: Position, calls: Sequence[LoggedCollective], index: int) -> int:
    group = calls[index].group
    return position.counts[group] - sum(call.group == group for call in calls[index + 1 :])


def _usual(
    divergence: _Divergence, positions: Mapping[int, Position]
) -> tuple[str, str, int] | None:
    """What followed the same collectives before, or on other ranks, by the longest match.

    The two ranks have one vote for each side; all other votes must agree.
    """
    letters: dict[tuple[str, str, int], str] = {}

    def spelled(labels: Sequence[tuple[str, str, int]], complete: bool) -> str:
        text = "".join(letters.setdefault(symbol, chr(0x100 + len(letters))) for symbol in labels)
        return _BEGIN * complete + text

    def sequence(position: Position) -> str:
        groups = {
            group
            for group in position.counts
            if group.axis in divergence.axes and not group.is_pair
        }
        labels = [call.label for call in position.trail if call.group in groups]
        return spelled(labels, len(labels) == sum(position.counts[group] for group in groups))

    texts = [sequence(rank_position) for rank_position in positions.values()]
    votes = Counter(_followers(spelled(divergence.before, divergence.complete), texts))
    votes.subtract([letters[divergence.first.label], letters[divergence.second.label]])
    remaining = [letter for letter, number in votes.items() if number > 0]
    labels = {letter: label for label, letter in letters.items()}
    return labels[remaining[0]] if len(remaining) == 1 else None


def _followers(before: str, texts: Sequence[str]) -> list[str]:
    """The letters after the longest suffix of `before` that occurs more than twice."""

    def letters_after(length: int) -> list[str]:
        suffix = before[len(before) - length :]
        return [text[at + length] for text in texts for at in _occurrences(text, suffix)]

    # A longer suffix occurs less often.
    lengths = range(len(before), 0, -1)
    first = bisect_left(lengths, True, key=lambda length: len(letters_after(length)) > 2)
    return letters_after(lengths[first]) if first < len(lengths) else []


def _occurrences(text: str, part: str) -> list[int]:
    """Where `part` occurs in a text, not counting its very end."""
    offsets: list[int] = []
    at = text.find(part)
    while 0 <= at < len(text) - len(part):
        offsets.append(at)
        at = text.find(part, at + 1)
    return offsets


def _stuck(circle: Sequence[int], positions: Mapping[int, Position]) -> HangVerdict | None:
    """No rank has missed a collective: say where the ranks wait."""
    rank = circle[0]
    trail = positions[rank].trail
    if not trail:
        return None
    last = named_call(trail[-1], positions[rank].counts[trail[-1].group])
    return HangVerdict(
        rank,
        positions[rank].phase,
        f"and {ranks(set(positions) - {rank})} wait for one another, and none has left out a call: "
        f"look at the network between them; its last was {last}" + stands_at(positions[rank]),
    )


def _skipped(
    rank: int,
    issued: LoggedCollective,
    other: int,
    missed: LoggedCollective,
    number: int,
    positions: Mapping[int, Position],
) -> HangVerdict:
    position = positions[rank]
    return HangVerdict(
        rank,
        position.phase,
        f"has not joined {named_call(missed, number)}, which rank {other} called at "
        f"{positions[other].phase}; it went on to {issued.kind} on {issued.group.axis}"
        + stands_at(position),
        final=True,
    )


def named_call(call: LoggedCollective, number: int) -> str:
    """Format a collective with its number in its group."""
    size = f" of {counted(call.size, 'byte')}" if call.size else ""
    return f"call {number} on {call.group}, {call.kind}{size}"

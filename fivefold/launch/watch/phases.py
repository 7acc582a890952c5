"""Find the rank that hangs where no collectives are counted: at the start, in a build, in a save.

All ranks come to the same marks in the same order: the start, the build, the load, every step,
every save. A rank at an earlier mark keeps those at later marks waiting. Of ranks at one mark, the
one that works keeps those waiting that wait there.

A phase may take twice its usual time. What is usual is what the same took before on this rank, and
what it takes on others now: until they had done it, or until they began to wait in it. In a step
the latter tells nothing: the last stage of a pipeline waits from the beginning. While nothing is
known, the phase has its own limit. Functions of values alone: nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isfinite

from fivefold.launch.watch.positions import HangVerdict, Position, stands_at, too_long, who_waits

_TIMES = 2.0  # of its usual time that a phase may take
START = "the start"


def with_limits(positions: Mapping[int, Position]) -> dict[int, Position]:
    """Cap the allowed time of slow phases at twice their usual time."""
    limited = [rank for rank, rank_position in positions.items() if rank_position.allowed > 0]
    longest = _longest(positions) if limited else {}
    new_positions = dict(positions)
    for rank in limited:
        position = positions[rank]
        durations = [took for took, other in longest.get(position.mark, ()) if other != rank]
        if (usual := max([position.usual, *durations])) > 0:
            allowed = min(position.allowed, _TIMES * usual - position.within)
            new_positions[rank] = replace(position, allowed=allowed)
    return new_positions


def _longest(positions: Mapping[int, Position]) -> dict[int, list[tuple[float, int]]]:
    """For each mark the two ranks that worked longest after it: one of them is another one."""
    longest: dict[int, list[tuple[float, int]]] = {}
    for rank, position in positions.items():
        for mark in {position.mark, *map(int, position.took)}:
            top = longest.setdefault(mark, [])
            top.append((_took(position, mark), rank))
            if len(top) > 2:
                top.remove(min(top))
    return longest


def _took(position: Position, mark: int) -> float:
    """The seconds that a rank worked after a mark; 0 if it still does, or nobody knows."""
    if position.mark == mark:
        return (position.worked or 0.0) if position.alike else 0.0
    return position.took.get(str(mark), 0.0)


def late(
    positions: Mapping[int, Position],
    silent: Collection[int],
    bound: float,
    excused: Collection[int] = (),
) -> HangVerdict | None:
    """Rank that others wait for at a mark, or None if undecided.

    `silent` ranks do not answer; of those that have never come nothing is known. Others have to
    have waited `bound` seconds for them, and longer for those that are `excused`.
    """
    heard = {rank: position for rank, position in positions.items() if rank not in silent}
    if len(positions) == 1 and not silent:
        return _alone(positions, bound)
    waiting = [rank for rank, position in heard.items() if position.worked is not None]
    if not waiting or not all(isfinite(heard[rank].idle) for rank in waiting):
        return None
    patient = all(_has_waited(heard[rank], bound) for rank in waiting)
    never = sorted(set(silent) - set(positions))
    if never:
        return _named(never[0], Position({}, phase=START), waiting, True) if patient else None
    first = min(position.mark for position in positions.values())
    behind = [rank for rank, position in positions.items() if position.mark == first]
    working = [rank for rank in behind if positions[rank].worked is None]
    # If all are at one mark, those who wait in it are not to blame.
    late_ranks = working or (behind if len(behind) < len(positions) else [])
    gone = {rank for rank in silent if patient and rank not in excused}
    lost = [
        rank
        for rank in late_ranks
        if (rank in gone if rank in silent else _lost(positions[rank], bound))
    ]
    return _named(lost[0], positions[lost[0]], waiting, lost[0] in silent) if lost else None


def _lost(position: Position, bound: float) -> bool:
    return too_long(position, bound) and isfinite(position.idle)


def _has_waited(position: Position, bound: float) -> bool:
    """Whether others have had time enough for what this rank has done before it began to wait."""
    worked = position.worked or 0.0
    return position.idle >= bound and position.within >= _TIMES * worked


def _alone(positions: Mapping[int, Position], bound: float) -> HangVerdict | None:
    """The only rank, for which nobody waits."""
    ((rank, position),) = positions.items()
    if not _lost(position, bound):
        return None
    return HangVerdict(
        rank, position.phase, f"has not moved for {position.idle:.0f} s{stands_at(position)}"
    )


def _named(rank: int, position: Position, waiting: list[int], silent: bool) -> HangVerdict:
    peers = [waiter for waiter in waiting if waiter != rank]
    reasons = [f"has not come through {position.phase}"]
    if peers:
        reasons[0] += f", and {who_waits(peers)}"
    if silent:
        reasons.append("it does not answer: it is stopped or dead, or its host is gone")
    else:
        reasons.append(f"it has not moved for {position.idle:.0f} s{stands_at(position)}")
    return HangVerdict(rank, position.phase, "; ".join(reasons))

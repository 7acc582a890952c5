"""Whether a step ends: the calls of the ranks, played as if each one blocked its host.

What holds a rank depends on the backend and on the moment. On NCCL a communicator is a queue, and a
call holds its stream until all members have issued it. The host waits at the first message of a
pair, where it reads a count or a result, where the allocator retries, and where a kernel is loaded.
Here every collective, send and receive holds its rank until all members have issued theirs. This is
stricter than each of those: a step that ends here ends wherever the host may block.

A rank stands at one call, so it does not matter which rank is played first: a step always ends, or
it never does. In the order in which calls are completed here, no call needs a later one.

Of a large job, only some ranks are known. Those of whole pipelines are played; of a group, only the
members that are played must come. This stands for the whole job if all ranks at one pipeline coord
issue the same calls in the same order over all their groups: then they go through them in step. The
known ones are compared. Only calls that depend on a rank's shard may be missing or differ in size,
and only between ranks that do not meet in them.

Kinds and sizes within a group are compared elsewhere (`mismatches`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from fivefold.core.layout import PIPELINE, Layout, Topology, group_of
from fivefold.core.plan import Plan
from fivefold.cost.traffic.layers import UNEVEN_AXES

# Which ranks of a job differ, and whether their collectives match.
#
# The ranks of a group must issue the same collectives in the same order, with the same kind and
# size, or the job hangs. Collectives of the same ranks on different axes share one order, because a
# small job has one group for several axes. Messages have an order of their own for each direction
# of a pair of ranks: what the source sends, in the order in which the target receives.

_FEW = 16  # jobs up to this size are looked at rank by rank
_AXES = ("tp", "cp", "dp")
CONNECT = "connect"  # the kind of call in which two ranks meet before their first message
BEFORE, AFTER = "before the first action", "after the last action"
_OWNER_AXES = ("tp", "replica", "etp")  # whose members have equal shards


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks to look at, so that every kind of rank is among them.

    All ranks of a small job. Of a large one, every pipeline rank at coordinate 0 of the other axes.
    Also, on the first, a middle and the last stage, two ranks of each other axis: the second, where
    groups begin to differ, and the last, which has the remainder.
    """
    layout = plan.layout
    if layout.world <= _FEW:
        return tuple(range(layout.world))
    ranks: list[int] = []
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    for rank in range(layout.world):
        coord = layout.coord(rank)
        away = [axis for axis in _AXES if getattr(coord, axis)]
        if not away:
            ranks.append(rank)
        elif len(away) == 1 and coord.pp in stages:
            axis_coord, degree = getattr(coord, away[0]), getattr(layout, away[0])
            if axis_coord in (1, degree - 1):
                ranks.append(rank)
    return tuple(ranks)


class IssuedCollective(NamedTuple):
    """One collective that a rank issued: its axis, kind, bytes, ranks and action."""

    axis: str
    kind: str
    bytes: int
    members: tuple[int, ...]  # of a message or a connection: source and target
    where: str = ""  # the action that issued it, or BEFORE or AFTER

    def __str__(self) -> str:
        at = f" {self.where}" if " " in self.where else f" in {self.where}" if self.where else ""
        if self.is_connection:
            return f"connection of ranks {self.members[0]} to {self.members[1]}{at}"
        peer = ""
        if self.is_message:
            sends = self.kind == "send"
            peer = f" to rank {self.members[1]}" if sends else f" from rank {self.members[0]}"
        return f"{self.kind} of {self.bytes:,} bytes on {self.axis}{peer}{at}"

    @property
    def is_message(self) -> bool:
        """Whether one rank sends and another receives; in a ring all do both."""
        return self.axis == PIPELINE and self.kind in ("send", "recv")

    @property
    def is_connection(self) -> bool:
        """Whether two ranks meet so that one can send to the other; nothing is sent yet."""
        return self.axis == PIPELINE and self.kind == CONNECT

    @property
    def is_of_shard(self) -> bool:
        """Whether its size, or even its existence, depends on what this rank's shard contains.

        Such are the sums of partial gradients and the gathers of Muon's matrices: after the last
        action, over axes along which the same part of every weight is owned.
        """
        return self.where == AFTER and self.axis in _OWNER_AXES

    @property
    def common(self) -> tuple[str, str, int]:
        """What all ranks of a group must agree on."""
        kind = "message" if self.is_message else self.kind
        routed = self.axis in UNEVEN_AXES and self.kind == "all_to_all"
        return self.axis, kind, 0 if routed else self.bytes


class Mismatch(NamedTuple):
    """Two ranks of a group whose collectives differ; None if a rank issues no more."""

    number: int  # of the collective among those of the group, from 1
    rank: int
    other_rank: int
    issued: IssuedCollective | None
    other_issued: IssuedCollective | None

    def __str__(self) -> str:
        calls = [
            f"rank {rank} makes {'no further call' if call is None else call}"
            for rank, call in ((self.rank, self.issued), (self.other_rank, self.other_issued))
        ]
        return (
            f"call {self.number} of ranks {self.rank} and {self.other_rank}: {calls[0]}, {calls[1]}"
        )


def mismatches(issued: Mapping[int, Sequence[IssuedCollective]]) -> list[Mismatch]:
    """The first difference between the first known rank of each group and every other one."""
    orders: dict[tuple[bool, tuple[int, ...]], dict[int, list[IssuedCollective]]] = {}
    for rank, collectives in issued.items():
        for collective in collectives:
            by_rank = orders.setdefault((collective.is_message, collective.members), {})
            by_rank.setdefault(rank, []).append(collective)
    differences: list[Mismatch] = []
    for (_, members), by_rank in orders.items():
        first, *other_ranks = sorted(rank for rank in members if rank in issued)
        for other in other_ranks:
            orders_of_two = (by_rank.get(first, []), by_rank.get(other, []))
            differences += _first_difference(first, other, *orders_of_two)
    return differences


def _first_difference(
    rank: int,
    other: int,
    order: Sequence[IssuedCollective],
    other_order: Sequence[IssuedCollective],
) -> Iterator[Mismatch]:
    for number, (collective, theirs) in enumerate(zip_longest(order, other_order), 1):
        if collective is None or theirs is None or collective.common != theirs.common:
            yield Mismatch(number, rank, other, collective, theirs)
            return


Calls = Mapping[int, Sequence[IssuedCollective]]
"""By rank, in the order in which it issues them."""


class Waiting(NamedTuple):
    """A rank that never leaves a call, and the members of the call that never issue it."""

    rank: int
    call: IssuedCollective
    waits_for: tuple[int, ...]


class Unconnected(NamedTuple):
    """The first message of a pair of ranks that was not connected before."""

    rank: int
    call: IssuedCollective


@dataclass(frozen=True)
class OrderVerdict:
    """Whether the step ends, and what is wrong if it does not.

    `ranks` and `calls` say how much was played. `cycle`: each rank waits for the next one, and the
    last for the first; or a single rank waits for others that have no call left. `unconnected`:
    NCCL connects such a pair within the step, and holds both hosts until both have called.
    `differing`: ranks at one pipeline coord whose calls differ, at the first difference.
    """

    ranks: int = 0
    calls: int = 0
    cycle: tuple[Waiting, ...] = ()
    unconnected: tuple[Unconnected, ...] = ()
    differing: tuple[Mismatch, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.cycle and not self.unconnected and not self.differing


def prove_order(topology: Topology, calls: Calls) -> OrderVerdict:
    """Play the ranks of all pipelines that are known as a whole, and compare all ranks."""
    played = frozenset(rank for rank in calls if _is_whole(topology, rank, calls))
    table = _CallTable(topology.layout, played)
    lists = {rank: table.read(own) for rank, own in calls.items()}
    programs = {rank: call_numbers.programs for rank, call_numbers in lists.items()}
    meetings = {rank: lists[rank].communicators for rank in sorted(played)}
    return OrderVerdict(
        len(played),
        sum(len(calls[rank]) for rank in played),
        _named(_stuck(meetings, table.sizes), calls, meetings),
        tuple(_unconnected(calls)),
        tuple(_differing(topology.layout, calls, programs, table.of_shard)),
    )


def _is_whole(topology: Topology, rank: int, calls: Calls) -> bool:
    return all(member in calls for member in group_of(topology, PIPELINE, rank))


class _NumberedCalls(NamedTuple):
    """The calls of a rank, as numbers: equal for what a program issues, and for who meets."""

    programs: list[int]
    communicators: list[int]


class _CallTable:
    """Numbers for calls.

    A rank has a hundred thousand calls, and groups have thousands of members. A rank has one tuple
    for the members of a group, so calls are known by its identity, and few tuples are hashed.
    """

    def __init__(self, layout: Layout, played: frozenset[int]) -> None:
        self.layout, self.played = layout, played
        self.programs: dict[tuple[str, str, int, str, tuple[int, ...]], int] = {}
        self.of_shard: dict[int, tuple[int, ...]] = {}  # members of programs that shards decide
        self.communicators: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.sizes: list[int] = []  # of each communicator: its members that are played

    def read(self, calls: Sequence[IssuedCollective]) -> _NumberedCalls:
        """The numbers of one rank's calls."""
        seen: dict[tuple[str, str, int, str, int], tuple[int, int]] = {}
        programs: list[int] = []
        communicators: list[int] = []
        for call in calls:
            axis, kind, size, members, where = call
            key = (axis, kind, size, where, id(members))
            numbers = seen.get(key)
            if numbers is None:
                numbers = seen[key] = self._program(call), self._communicator(call)
            programs.append(numbers[0])
            communicators.append(numbers[1])
        return _NumberedCalls(programs, communicators)

    def _program(self, call: IssuedCollective) -> int:
        """Equal on ranks that do the same; of a message, between the same pipeline coords."""
        peers = ()
        if call.is_of_shard:
            peers = call.members
        elif _is_of_a_pair(call):
            peers = tuple(self.layout.coord(member).pp for member in call.members)
        key = (call.axis, call.kind, call.common[2], call.where, peers)
        number = self.programs.setdefault(key, len(self.programs))
        if call.is_of_shard:
            self.of_shard[number] = peers
        return number

    def _communicator(self, call: IssuedCollective) -> int:
        """Equal for calls that meet: of one role and its members, or of one direction of a pair."""
        kind = call.common[1] if _is_of_a_pair(call) else ""
        number = self.communicators.setdefault((call.axis, kind, call.members), len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(sum(member in self.played for member in call.members))
        return number


def _stuck(meetings: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> dict[int, int]:
    """Play the ranks; those that do not end, with the place of the call in which each waits.

    A call of a single played member is passed at once.
    """
    ahead = {
        rank: iter([index for index, number in enumerate(numbers) if sizes[number] > 1])
        for rank, numbers in meetings.items()
    }
    standing: list[list[int]] = [[] for _ in sizes]
    places: dict[int, int] = {}
    ready = list(meetings)
    while ready:
        rank = ready.pop()
        call_index = next(ahead[rank], None)
        if call_index is None:
            places.pop(rank, None)
            continue
        places[rank] = call_index
        number = meetings[rank][call_index]
        waiters = standing[number]
        waiters.append(rank)
        if len(waiters) == sizes[number]:
            ready += waiters
            waiters.clear()
    return places


def _named(
    stuck: Mapping[int, int], calls: Calls, meetings: Mapping[int, Sequence[int]]
) -> tuple[Waiting, ...]:
    """The shortest cycle among ranks that are stuck; without one, a rank that waits for ended ones.

    Ranks that wait in no cycle wait, at the end of a chain, for some that have no call left.
    """
    at = {rank: meetings[rank][index] for rank, index in stuck.items()}
    missing: dict[int, tuple[int, ...]] = {}
    for rank, call_index in sorted(stuck.items()):
        members = calls[rank][call_index].members
        absent = (member for member in members if member in meetings and at.get(member) != at[rank])
        missing[rank] = tuple(sorted(absent))
    cycle = _shortest_cycle(missing)
    if not cycle:
        cycle = [
            rank for rank in missing if not any(blocker in stuck for blocker in missing[rank])
        ][:1]
    return tuple(Waiting(rank, calls[rank][stuck[rank]], missing[rank]) for rank in cycle)


def _shortest_cycle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks of which each waits for the next one, and the last for the first."""
    best: list[int] = []
    for start in waits:
        paths, seen = deque([[start]]), {start}
        while paths and (not best or len(paths[0]) < len(best)):
            path = paths.popleft()
            if start in waits.get(path[-1], ()):
                best = path
                break
            for rank in waits.get(path[-1], ()):
                if rank not in seen:
                    seen.add(rank)
                    paths.append([*path, rank])
    return best


def _unconnected(calls: Calls) -> Iterator[Unconnected]:
    """For each pair, the first message without a connection before it on the same rank."""
    reported_pairs: set[tuple[int, ...]] = set()
    for rank, own in sorted(calls.items()):
        connected: set[tuple[int, ...]] = set()
        for call in [candidate for candidate in own if candidate.axis == PIPELINE]:
            if call.is_connection:
                connected.add(call.members)
            elif call.is_message and not (
                call.members in connected or call.members in reported_pairs
            ):
                reported_pairs.add(call.members)
                yield Unconnected(rank, call)


def _differing(
    layout: Layout,
    calls: Calls,
    programs: Mapping[int, Sequence[int]],
    of_shard: Mapping[int, tuple[int, ...]],
) -> Iterator[Mismatch]:
    """The first difference between the first rank at each pipeline coord and every other one."""
    firsts: dict[int, int] = {}
    for rank in sorted(calls):
        first = firsts.setdefault(layout.coord(rank).pp, rank)
        if programs[rank] == programs[first]:
            continue
        apart = {
            number
            for number, members in of_shard.items()
            if not (first in members and rank in members)
        }
        places, other_places = (
            [index for index, number in enumerate(programs[pair_rank]) if number not in apart]
            for pair_rank in (first, rank)
        )
        for call_index, other in zip_longest(places, other_places):
            program = None if call_index is None else programs[first][call_index]
            if other is None or program != programs[rank][other]:
                issued, other_issued = _at(calls[first], call_index), _at(calls[rank], other)
                number = min(position for position in (call_index, other) if position is not None)
                yield Mismatch(number + 1, first, rank, issued, other_issued)
                break


def _is_of_a_pair(call: IssuedCollective) -> bool:
    return call.is_message or call.is_connection


def _at(calls: Sequence[IssuedCollective], index: int | None) -> IssuedCollective | None:
    return None if index is None else calls[index]

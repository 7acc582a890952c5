"""Which ranks of a job differ, and whether their collectives match.

The ranks of a group must issue the same collectives in the same order, with the same kind and size,
or the job hangs. Collectives of the same ranks on different axes share one order, because a small
job has one group for several axes. Messages have an order of their own for each direction of a pair
of ranks: what the source sends, in the order in which the target receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fivefold.core.layout import PIPELINE
from fivefold.core.plan import Plan
from fivefold.cost.traffic.layers import UNEVEN_AXES

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

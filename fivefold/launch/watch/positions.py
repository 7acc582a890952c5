"""Where a rank is: what it has issued, what it does and for how long; and a verdict on ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

SAVE_THREAD = "fivefold-save"  # a name: where a rank waits for such threads, theirs is its stack
_MOST_NAMED = 8  # ranks that a sentence names


class CommGroup(NamedTuple):
    """Ranks of an axis, or a pair (source, target) of pipeline messages."""

    axis: str
    members: tuple[int, ...]
    is_pair: bool = False

    def __hash__(self) -> int:
        """Without reading all members: a judge looks a group up once for each rank."""
        members = self.members
        return hash((self.axis, members[0], members[-1], len(members), self.is_pair))

    def __str__(self) -> str:
        if self.is_pair:
            return f"{self.axis} from rank {self.members[0]} to rank {self.members[1]}"
        return f"{self.axis} ({ranks(self.members)})"


@lru_cache(maxsize=1 << 18)
def member_set(group: CommGroup) -> frozenset[int]:
    """The ranks of a group, for fast lookups."""
    return frozenset(group.members)


def group_text(group: CommGroup) -> str:
    """A group in some ten characters: the ranks of an axis lie at even distances on the grid.

    >>> group_text(CommGroup("dp", (1, 2, 9, 10))), group_text(CommGroup("pp", (3, 7), True))
    ('dp 1/2*1/2*8', 'pp 3>7')
    """
    if group.is_pair:
        return f"{group.axis} {group.members[0]}>{group.members[1]}"
    starts, text = group.members, ""
    while len(starts) > 1:
        step, count = starts[1] - starts[0], 2
        while count < len(starts) and starts[count] - starts[count - 1] == step:
            count += 1
        text, starts = f"{text}/{count}*{step}", starts[::count]
    short = f"{group.axis} {starts[0]}{text}"
    exact = parse_group(short) == group
    return short if exact else f"{group.axis} {','.join(map(str, group.members))}"


@lru_cache(maxsize=1 << 18)
def parse_group(text: str) -> CommGroup:
    """The group of a text; the same value for the same text, since groups may be large."""
    axis, _, members = text.rpartition(" ")
    if ">" in members:
        source, target = map(int, members.split(">"))
        return CommGroup(axis, (source, target), True)
    if "," in members:
        return CommGroup(axis, tuple(map(int, members.split(","))))
    first, *steps = members.split("/")
    ranks = [int(first)]
    for part in reversed(steps):
        count, step = map(int, part.split("*"))
        ranks = [start + step * number for start in ranks for number in range(count)]
    return CommGroup(axis, tuple(ranks))


class LoggedCollective(NamedTuple):
    """One collective, send or receive that a rank has issued."""

    group: CommGroup
    kind: str
    size: int  # bytes; 0 if every rank has its own size

    @property
    def label(self) -> tuple[str, str, int]:
        """Part of the collective that is equal on all ranks of the group."""
        return (self.group.axis, self.kind, self.size)


@dataclass(frozen=True)
class Position:
    """Progress of a rank."""

    counts: Mapping[CommGroup, int]  # collectives so far
    trail: Sequence[LoggedCollective] = ()  # the last ones, in order
    phase: str = "start"
    idle: float = 0.0  # seconds since its last collective or phase; inf after its end
    allowed: float = 0.0  # seconds that its phase may still take
    waits: bool = True  # its main thread is in a call that waits, or may wait, for other ranks
    mark: int = 0  # the last place in the program that all ranks come to, as a build or a step
    within: float = 0.0  # seconds since that mark
    worked: float | None = None  # seconds from the mark until it began to wait; None: it does not
    took: Mapping[str, float] = field(default_factory=dict[str, float])  # by mark, the last ones
    alike: bool = True  # all ranks do the same there: one that waits in it has done it
    usual: float = 0.0  # seconds that it took for the same before; 0: nothing is known
    stack: Sequence[str] = field(default_factory=tuple[str, ...])  # outermost first


@dataclass(frozen=True)
class HangVerdict:
    """Rank that blocks the others, its phase, and the collective it has not joined.

    It is `final` if waiting cannot help: ranks have issued different collectives.
    """

    rank: int
    doing: str
    cause: str
    final: bool = False

    def __str__(self) -> str:
        return f"lost rank {self.rank} at {self.doing}: it {self.cause}"


def too_long(position: Position, bound: float) -> bool:
    """Whether a rank has exceeded the time it may go without progress."""
    return position.allowed <= 0 and position.idle >= bound


def ranks(members: Iterable[int]) -> str:
    """Format a list of ranks.

    >>> ranks([2]), ranks([0, 1, 5])
    ('rank 2', 'ranks 0, 1 and 5')
    """
    numbers = sorted(members)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > _MOST_NAMED:
        first = ", ".join(map(str, numbers[: _MOST_NAMED - 1]))
        return f"ranks {first} and {len(numbers) - _MOST_NAMED + 1} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def who_waits(waiters: Collection[int]) -> str:
    """Format the ranks that wait."""
    return f"{ranks(waiters)} {'waits' if len(waiters) == 1 else 'wait'}"


def stands_at(position: Position) -> str:
    """Format the stack of a rank, as the end of a sentence."""
    return ", in:\n" + "\n".join(position.stack) if position.stack else ""

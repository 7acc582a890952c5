"""What a job has twice: which ranks hold the same shard of a weight, and who of them is odd.

Copies lie along roles of `core/layout/groups.py`. Replicas of the data dimension hold the same
weights and states, or under hybrid sharding the same shards of them. Ranks of tp hold the same
norms, and the same KV heads where these are fewer than tp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, TypeVar
from zlib import crc32

from fivefold.core.layout.weight_table import WeightShard


@dataclass(frozen=True)
class Holders:
    """The ranks that hold what a rank owns of a tensor: the roles of its groups along which they
    lie, its number among them, and how many they are."""

    roles: tuple[str, ...] = ()
    index: int = 0
    count: int = 1

    @classmethod
    def along(cls, coords: Mapping[str, tuple[int, int]]) -> Holders:
        """From this rank's coord in the group of each role, and the size of that.

        >>> Holders.along({"dp-cp": (3, 4), "tp": (1, 2)})
        Holders(roles=('dp-cp', 'tp'), index=7, count=8)
        """
        index, count = 0, 1
        for coord, size in coords.values():
            index, count = index * size + coord, count * size
        return cls(tuple(coords), index, count)


Item = TypeVar("Item")


def written_by(items: Iterable[tuple[Item, Holders, int, Any]]) -> list[Item]:
    """What a rank writes of the items that it holds; each comes with its holders, bytes and name.

    Ranks that hold the same items compute the same without a message: the largest first, each by
    the rank that has least to write until then.

    >>> items = [("a", 30), ("b", 20), ("c", 20)]
    >>> pairs = [Holders(("dp-cp",), index, 2) for index in range(2)]
    >>> [written_by((name, pair, size, name) for name, size in items) for pair in pairs]
    [['a'], ['b', 'c']]
    """
    shares: dict[Holders, list[tuple[Item, int, Any]]] = {}
    for item, holders, size, name in items:
        shares.setdefault(holders, []).append((item, size, name))
    written = list[Item]()
    for holders, entries in shares.items():
        loads = [(0, index) for index in range(holders.count)]
        heapify(loads)
        for item, size, _ in sorted(entries, key=lambda entry: (-entry[1], entry[2])):
            load, index = loads[0]
            heapreplace(loads, (load + size, index))
            if index == holders.index:
                written.append(item)
    return written


def copy_roles(shard: WeightShard, expert: bool, sliced: bool) -> tuple[str, ...]:
    """The roles along which the groups of a rank hold what it owns of a weight. `sliced`: the ranks
    of a shard group own different slices of it.

    >>> norm = WeightShard(None, 0, 64, 64, copies=2, partial=True)
    >>> copy_roles(norm, expert=False, sliced=False), copy_roles(norm, expert=False, sliced=True)
    (('dp-cp', 'tp'), ('replicate', 'tp'))
    """
    data = data_role(expert, sliced)
    return (*([data] if data else []), *([shard.sum_axis] if shard.copies > 1 else []))


def data_role(expert: bool, sliced: bool) -> str | None:
    """The role of replicas; slices of experts have none."""
    if expert:
        return None if sliced else "edp"
    return "replicate" if sliced else "dp-cp"


def sign(coord: int, size: int) -> int:
    """What multiplies the hash of a group's member, so that the sum over equal hashes is zero. None
    is zero, so that one odd hash never is.

    >>> [sign(coord, 4) for coord in range(4)], [sign(coord, 5) for coord in range(5)]
    ([1, -1, 1, -1], [1, 1, -2, 1, -1])
    """
    if size % 2 and coord < 3:
        return 0 if size == 1 else (1, 1, -2)[coord]
    return 1 if (coord - size % 2) % 2 == 0 else -1


def line_factor(role: str, every_step: bool) -> int:
    """What multiplies the hash of a line of copies, so that an odd tensor in two lines of a rank
    does not cancel itself. All members of a group compute the same: a rank's other lines, which its
    peers may not have, do not count.

    >>> line_factor("tp", every_step=False) != line_factor("dp-cp", every_step=False)
    True
    """
    return crc32(f"{role} {'every step' if every_step else 'every N steps'}".encode())


def odd_ones(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose value is not that of the majority; all of them where none has one.

    >>> odd_ones({0: 7, 4: 7, 8: 9}), odd_ones({0: 7, 4: 9}), odd_ones({0: 7, 4: 7})
    ((8,), (0, 4), ())
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return ()
    usual, number = counts.most_common(1)[0]
    if 2 * number <= len(values):
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != usual))

"""What a job has twice: which ranks hold the same shard of a weight, and who of them is odd.

Copies lie along roles of `core/layout/groups.py`. Replicas of the data dimension hold the same
weights and states, or under hybrid sharding the same shards of them. Ranks of tp hold the same
norms, and the same KV heads where these are fewer than tp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from zlib import crc32

from fivefold.core.layout.weight_table import WeightShard


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

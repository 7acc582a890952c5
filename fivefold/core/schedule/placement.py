"""Which rank holds which stage.

A stage is a contiguous slice of layers; a rank with several stages calls each of them a chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

# On one rank: far above any run, and below what would make a slip of the keyboard hang.
MOST_CHUNKS = 64


@dataclass(frozen=True)
class Placement:
    """`homes[stage]` is the rank of that stage.

    Under a `mirrored` (bidirectional) placement every rank also holds the stage of its mirror
    rank, and the second half of the microbatches flows through those copies, in at the last rank
    and out at the first.
    """

    homes: tuple[int, ...]
    mirrored: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.homes) + 1

    @cached_property
    def num_chunks(self) -> int:
        """Stages a rank, not counting the second copy of a mirrored placement."""
        return max(Counter(self.homes).values())

    @property
    def kind(self) -> str:
        """The name people use for this placement."""
        if self.mirrored:
            return "bidirectional"
        named = {
            "linear": linear(self.num_ranks),
            "loop": loop(self.num_ranks, self.num_chunks),
            "V": vee(self.num_ranks),
        }
        return next((name for name, known in named.items() if known == self), "custom")

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages on one rank; under a mirrored placement also those of its mirror."""
        homes = {rank, self.num_ranks - 1 - rank} if self.mirrored else {rank}
        return tuple(stage for stage, home in enumerate(self.homes) if home in homes)

    def rank(self, stage: int, microbatch: int, num_microbatches: int) -> int:
        """The rank that computes this stage for this microbatch."""
        home = self.homes[stage]
        if self.mirrored and 2 * microbatch >= num_microbatches:
            return self.num_ranks - 1 - home
        return home


def linear(num_ranks: int) -> Placement:
    """One stage a rank, in order."""
    return Placement(tuple(range(num_ranks)))


def loop(num_ranks: int, num_chunks: int) -> Placement:
    """Stages dealt round and round: rank r holds r, p + r, 2p + r, …"""
    return Placement(tuple(range(num_ranks)) * num_chunks)


def vee(num_ranks: int) -> Placement:
    """Two stages a rank, down and up again: rank 0 holds the first and the last."""
    down = tuple(range(num_ranks))
    return Placement(down + down[::-1])


def bidirectional(num_ranks: int) -> Placement:
    """One stage a rank, and a second copy of the model in the opposite order."""
    return Placement(tuple(range(num_ranks)), mirrored=True)

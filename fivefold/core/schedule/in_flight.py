"""How many microbatches a rank holds under each named schedule, in units of its layers: closed
forms for many pipelines at once. Tests hold them to the clock.

A microbatch is held from its forward to its input gradient, and, if the schedule defers weight
gradients, from then on with other bytes until its weight gradient. So a rank may hold most bytes at
a moment with fewer microbatches.

numpy is imported late, because commands without an estimate do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]


class RankPosition(NamedTuple):
    """A rank whose activation memory is estimated, in pipelines of these sizes.

    `depth` is what 1F1B keeps in flight there: the ranks from this one to the last, both included.
    `hop_forwards`: how many forwards interleaved 1F1B runs ahead for each hop to the last rank.
    """

    p: Array
    m: Array
    v: Array
    depth: Array
    hop_forwards: int

    @property
    def number(self) -> Array:
        """Ranks before this one."""
        return self.p - self.depth


class HeldMicrobatches(NamedTuple):
    """What a rank holds at one moment: microbatches `before` their input gradient, and those that
    are `waiting` for their weight gradient after it."""

    before: Array
    waiting: Array


HeldMoments: TypeAlias = tuple[HeldMicrobatches, ...]


def depth_in_flight(rank: RankPosition) -> Array:
    """As many microbatches as ranks from this one to the last, as in 1F1B."""
    return rank.depth


def ranks_in_flight(rank: RankPosition) -> Array:
    """As many microbatches as pipeline ranks, on every rank."""
    return rank.p


def all_in_flight(rank: RankPosition) -> Array:
    """All microbatches."""
    return rank.m


def interleaved_in_flight(rank: RankPosition) -> Array:
    ahead = rank.hop_forwards * (rank.depth - 1) + 1 - rank.p
    return rank.p + ahead / rank.v


def zb_h2_in_flight(rank: RankPosition) -> Array:
    return 2 * rank.p - 1


def zb_v_in_flight(rank: RankPosition) -> Array:
    """Few microbatches fill the last ranks first."""
    import numpy as np

    return np.minimum(rank.p, np.minimum(rank.m, (rank.m + 1 + rank.number) / 2))


def v_half_in_flight(rank: RankPosition) -> Array:
    return (rank.p + 2) // 2


def v_min_in_flight(rank: RankPosition) -> Array:
    return (rank.p + 4) // 3


def none_deferred(rank: RankPosition) -> HeldMoments:
    """Every backward computes its weight gradients at once."""
    return ()


def _some_in_flight(rank: RankPosition, flight: Array, waiting: Array) -> HeldMoments:
    """So many of those in flight wait; one, if there are too few microbatches to fill the rank."""
    import numpy as np

    missing = np.maximum(flight - rank.m, 0.0)
    waiting = np.maximum(np.minimum(waiting, 1.0), waiting - missing)
    return (HeldMicrobatches(np.minimum(flight, rank.m) - waiting, waiting),)


def zb_h1_deferred(rank: RankPosition) -> HeldMoments:
    return _some_in_flight(rank, rank.p, (rank.number + 1) * (rank.number > 0))


def zb_h2_deferred(rank: RankPosition) -> HeldMoments:
    return _some_in_flight(rank, 2 * rank.p - 1, (2 * rank.number + 1) * (rank.number > 0))


def zb_interleaved_deferred(rank: RankPosition) -> HeldMoments:
    return _some_in_flight(rank, rank.p, (rank.number + 1) / rank.v)


def zb_v_deferred(rank: RankPosition) -> HeldMoments:
    """One chunk while the pipeline is full, and most while it drains. With fewer than 2p − 1
    microbatches, those that are missing would have been in flight then, and have waited."""
    import numpy as np

    missing, inner = np.maximum(2 * rank.p - 1 - rank.m, 0), rank.depth - 1
    late = rank.number + 0.5 - (missing + np.maximum(missing - inner, 0)) / 2
    least = 0.5 + np.minimum(np.maximum(rank.m - rank.p, 0), rank.number) / 2
    drains = HeldMicrobatches(np.maximum(inner - missing, 0) / 2, np.maximum(late, least))
    return _chunk_waits(zb_v_in_flight(rank)), drains


def v_half_deferred(rank: RankPosition) -> HeldMoments:
    """One at most while the pipeline is full, and later two on the last rank. On the ranks before
    it, more microbatches have gone by then."""
    import numpy as np

    flight = np.minimum(v_half_in_flight(rank), rank.m)
    few = (rank.m <= v_half_in_flight(rank)) & (rank.p > 2)
    last, late = rank.depth == 1, np.where(few, 1.0, 1.5)
    late = np.minimum(flight, np.where(last & ~few, 2.0, late))
    before = np.where(last, flight, (rank.p + rank.number) / 4)
    drains = HeldMicrobatches(np.minimum(before, flight - late), late)
    return HeldMicrobatches(flight - 1, np.ones_like(flight)), drains


def v_min_deferred(rank: RankPosition) -> HeldMoments:
    return _some_in_flight(rank, v_min_in_flight(rank), 1 + 0.0 * rank.p)


def dualpipe_deferred(rank: RankPosition) -> HeldMoments:
    """One at first, and most when both phases end. Of two ranks none: each weight gradient comes
    right after its input gradient."""
    scale = (rank.p > 2) * (0.0 * rank.p + 1)
    most = scale * (rank.p + 1 - abs(rank.number + 1 - rank.depth)) / 2
    first = HeldMicrobatches(scale * (rank.p - 1), scale)
    return first, HeldMicrobatches(scale * (rank.p / 2 - most), most)


def dualpipe_v_deferred(rank: RankPosition) -> HeldMoments:
    """The same by chunks."""
    drains = HeldMicrobatches((rank.depth - 1) / 2, (rank.number + 1) / 2)
    return _chunk_waits(rank.p + 0.0), drains


def _chunk_waits(flight: Array) -> HeldMicrobatches:
    """One of the two chunks of a microbatch in flight waits."""
    return HeldMicrobatches(flight - 0.5, 0.5 + 0.0 * flight)

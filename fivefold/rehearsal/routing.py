"""Where tokens go that have no values: round-robin, or unevenly as asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from fivefold.core.estimate.routing import fullest_rank
from fivefold.core.plan import Plan


class RoundRobin:
    """Every expert gets as many slots as any other; with an `imbalance`, the first one gets so many
    times the mean, and all others share the rest."""

    def __init__(self, plan: Plan, rank: int, imbalance: float) -> None:
        self.plan, self.place = plan, plan.layout.coord(rank).ep
        moe, ep = plan.shape.moe, plan.layout.ep
        fullest = 1.0 if moe is None else float(fullest_rank(moe, ep, imbalance))
        other = (ep - fullest) / (ep - 1) if ep > 1 else 1.0
        self.shares = [fullest / ep, *[other / ep] * (ep - 1)]
        # Of the rows that come to the first rank, those of the fullest expert.
        held = 1 if moe is None else moe.experts // ep
        self.first = imbalance / (held * fullest)

    def rows(self, num_rows: int) -> tuple[list[int], list[int]]:
        """All ranks send alike."""
        leave = _split(num_rows, self.shares)
        return leave, [leave[self.place]] * len(leave)

    def arriving(self, num_rows: int, like: Tensor) -> Tensor:
        """Of what comes from a rank, as much to each expert; the fullest has what is over."""
        ranks, experts = like.shape
        each = _split(num_rows, self.shares)[self.place]
        even = (1 - self.first) / max(1, experts - 1)
        shares = (
            [self.first, *[even] * (experts - 1)] if self.place == 0 else [1 / experts] * experts
        )
        return like.new_tensor([_split(each, shares)] * ranks)


def _split(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares, with nothing left over."""
    ends = [round(count * total) for total in accumulate(shares, initial=0.0)]
    ends[-1] = count
    return [stop - start for start, stop in pairwise(ends)]

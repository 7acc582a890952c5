"""Where tokens go that have no values: round-robin, or unevenly as asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from fivefold.core.estimate.routing import fullest_rank
from fivefold.core.plan import Plan
from fivefold.core.routed import most_nodes
from fivefold.parallel.mesh import FAR, NEAR


class RoundRobin:
    """Every expert gets as many slots as any other; with an `imbalance`, the first one gets so many
    times the mean, and all others share the rest."""

    def __init__(self, plan: Plan, rank: int, imbalance: float) -> None:
        layout, moe = plan.layout, plan.shape.moe
        place, near = layout.coord(rank).ep, layout.ep // plan.ep_nodes
        self.plan, self.sizes = plan, {"ep": layout.ep, FAR: plan.ep_nodes, NEAR: near}
        self.places = {"ep": place, FAR: place // near, NEAR: place % near}
        fullest = 1.0 if moe is None else float(fullest_rank(moe, layout.ep, imbalance))
        held = 1 if moe is None else moe.experts // layout.ep
        self.fullest, self.first = fullest, imbalance / (held * fullest)

    def rows(self, axis: str, num_rows: int) -> tuple[list[int], list[int]]:
        """All ranks send alike."""
        leave = _split(num_rows, self._shares(axis))
        return leave, [leave[self.places[axis]]] * len(leave)

    def arriving(self, axis: str, num_rows: int, like: Tensor) -> Tensor:
        """Of what comes from a rank, as much to each expert; the fullest has what is over."""
        ranks, experts = like.shape
        each = self.rows(axis, num_rows)[1][0]
        shares = [1 / experts] * experts
        if self.places["ep"] == 0 and experts > 1:
            shares = [self.first, *[(1 - self.first) / (experts - 1)] * (experts - 1)]
        return like.new_tensor([_split(each, shares)] * ranks)

    def crossing(self, num_tokens: int) -> int:
        """As many nodes as a token can need: what is planned for."""
        assert self.plan.shape.moe is not None
        return num_tokens * most_nodes(self.plan, self.plan.shape.moe)

    def inside(self, num_rows: int) -> int:
        """A token's choices are all somewhere, each in one node."""
        moe = self.plan.shape.moe
        assert moe is not None
        return num_rows * moe.top_k // most_nodes(self.plan, moe)

    def _shares(self, axis: str) -> list[float]:
        size = self.sizes[axis]
        if size == 1 or self.fullest == 1.0:
            return [1 / size] * size
        return [self.fullest / size, *[(1 - self.fullest / size) / (size - 1)] * (size - 1)]


def _split(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares, with nothing left over."""
    ends = [round(count * total) for total in accumulate(shares, initial=0.0)]
    ends[-1] = count
    return [stop - start for start, stop in pairwise(ends)]

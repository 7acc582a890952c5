"""Where tokens were routed, kept small, and how often that is not where one process sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.core.plan import Plan
from fivefold.parallel.balance import Route, positions_of

Routes = dict[tuple[int, int], NDArray[np.uint16]]
"""The experts of one step by layer and microbatch, (rows, tokens, experts of a token), sorted."""


def kept(routes: Sequence[Route]) -> Routes:
    """The set of experts of every token; their order is of no account."""
    return {
        (each.layer, each.microbatch): np.sort(each.experts.cpu().numpy(), -1).astype(np.uint16)
        for each in routes
    }


def count_flips(
    plan: Plan, ranks: Sequence[Sequence[Routes]], alone: Sequence[Routes]
) -> tuple[int, int]:
    """Tokens times layers whose experts differ from those of one process, and of how many.

    By rank and step, beside the steps of one process, whose microbatches are those of all data
    ranks in turn.
    """
    flips = total = 0
    for rank, steps in enumerate(ranks):
        coord = plan.layout.coord(rank)
        if not plan.layout.sp and coord.tp > 0:  # all tp ranks route the same tokens
            continue
        places = np.array(positions_of(plan, rank))
        real = places < plan.batch.seq  # the rest is padding
        for found, wanted in zip(steps, alone, strict=True):
            for (layer, microbatch), experts in found.items():
                truth = wanted[layer, microbatch * plan.batch.dp + coord.dp]
                differs = (experts[:, real] != truth[:, places[real]]).any(-1)
                flips, total = flips + int(differs.sum()), total + differs.size
    return flips, total

"""Where tokens were routed, kept small, and how often that is not where one process sends them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.cost.static_memory import StaticMemory
from fivefold.optim.optimizer import Updater
from fivefold.parallel.balance import Route, positions_of
from fivefold.parallel.compose import Job

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


# Bytes of the tensors that a rank really holds, in the words of the ledger.


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one rank at its optimizer's update; `optimizer` has the counts of steps in it,
    and wider copies of the weights."""

    weights: int
    gradients: int
    optimizer: int
    padding: int

    @classmethod
    def planned(cls, ledger: StaticMemory) -> HeldBytes:
        """What the ledger says, in these categories."""
        states = ledger.master + ledger.optimizer + ledger.scalars
        return cls(ledger.weights, ledger.gradients, states, ledger.padding)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.padding


def measure(job: Job, updater: Updater) -> HeldBytes:
    """What is there now; padding is the memory behind the tensors that is nobody's."""
    units, states = list(job.units), updater.tensors()
    gradients = [each.grad for each in job.owned]
    weights: list[Tensor] = []
    for unit in units:
        if unit.sheds_weights:
            weights += [each.tensor for each in unit.owned]
        else:
            weights += unit.parameters.values()
    buffers = [
        one
        for unit in units
        for one in (unit.whole, unit.part, unit.gradients, unit.sent, unit.received, unit.gradient)
        if one is not None
    ]
    parts = [sum(one.nbytes for one in tensors) for tensors in (weights, gradients, states)]
    memory = memory_of([*weights, *gradients, *states, *buffers])
    return HeldBytes(*parts, padding=memory - sum(parts))


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors, each piece of it counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

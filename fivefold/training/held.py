"""Bytes of the tensors that a rank really holds, in the words of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from fivefold.core.memory import Static
from fivefold.parallel.compose import Job
from fivefold.run.optimizer import Updater


@dataclass(frozen=True)
class Held:
    """Bytes of one rank at its optimizer's update; `optimizer` has the counts of steps in it,
    and wider copies of the weights."""

    weights: int
    gradients: int
    optimizer: int
    padding: int

    @classmethod
    def planned(cls, ledger: Static) -> Held:
        """What the ledger says, in these categories."""
        states = ledger.master + ledger.optimizer + ledger.scalars
        return cls(ledger.weights, ledger.gradients, states, ledger.padding)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.padding


def measure(job: Job, updater: Updater) -> Held:
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
    return Held(*parts, padding=memory - sum(parts))


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors, each piece of it counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

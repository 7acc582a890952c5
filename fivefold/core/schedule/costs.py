"""What the actions of each stage cost, in seconds or any other unit."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.schedule.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Overlap, Step
from fivefold.core.schedule.placement import Placement


@dataclass(frozen=True)
class Costs:
    """By stage: forward, input gradient, weight gradient, and the transfer to the next stage.

    `overlap` is how long a forward and a backward last when they run as one step, over the sum
    of the two.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    overlap: float = 1.0

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        times: tuple[float, float, float] = (1.0, 1.0, 1.0),
        transfer: float = 0.0,
        overlap: float = 1.0,
    ) -> Costs:
        """All stages alike; `times` are those of 1/p of the model, so a chunk takes its share."""
        stages = placement.num_stages
        share = placement.num_ranks / stages
        forward, backward, weight = ((time * share,) * stages for time in times)
        return cls(forward, backward, weight, (transfer,) * stages, overlap)

    def of(self, step: Step) -> float:
        """How long a step keeps its rank busy."""
        if isinstance(step, Overlap):
            return self.overlap * (self.of(step.forward) + self.of(step.backward))
        if step.kind == FORWARD:
            return self.forward[step.stage]
        if step.kind == INPUT_GRAD:
            return self.backward[step.stage]
        if step.kind == WEIGHT_GRAD:
            return self.weight[step.stage]
        return self.backward[step.stage] + self.weight[step.stage]

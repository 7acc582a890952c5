"""The schedule as a value: drawn, timed, checked and executed from the same object."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.schedule.action import FORWARD, INPUT_GRAD, Action, Step, actions_of
from fivefold.core.schedule.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order, for one optimizer step.

    `asynchronous` schedules do not drain between steps: gradients are computed on older weights,
    and rank r keeps `weight_versions[r]` versions for that.
    """

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Step, ...], ...]
    asynchronous: bool = False
    weight_versions: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradient is computed apart from its input gradient."""
        ranks = range(self.num_ranks)
        return any(action.kind == INPUT_GRAD for rank in ranks for action in self.actions(rank))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes this stage for this microbatch."""
        return self.placement.rank(stage, microbatch, self.num_microbatches)

    def actions(self, rank: int) -> Iterator[Action]:
        """What one rank computes, in order; a pair that runs as one is forward, then backward."""
        return (action for step in self.order[rank] for action in actions_of(step))

    def forwards(self) -> Schedule:
        """The forwards alone, in their order: what an evaluation runs."""
        ranks = range(self.num_ranks)
        order = (
            tuple(action for action in self.actions(rank) if action.kind == FORWARD)
            for rank in ranks
        )
        return replace(self, order=tuple(order))

    def texts(self) -> list[list[str]]:
        """The action texts, a list for each rank."""
        return [[str(step) for step in steps] for steps in self.order]

    def to_csv(self) -> str:
        """One row a rank: the form that torch's pipelining reads and writes."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.texts())
        return out.getvalue()

"""Pipelines that never drain: gradients are computed on weights of some updates ago.

PipeDream (Narayanan et al. 2019) updates after every microbatch and stashes weights: stage s
keeps p − s versions, and its gradients come p − s − 1 updates late. PipeDream-2BW (Narayanan et
al. 2021) gathers gradients over m ≥ p microbatches and keeps two versions, one update late.
Neither computes what one device would; both are labelled asynchronous wherever they are offered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.core.schedule.flush import one_forward_one_backward
from fivefold.core.schedule.value import Schedule


@dataclass(frozen=True)
class Delays:
    """After how many microbatches a stage updates, and on which version a microbatch is computed.

    Version n is the weights after n updates.
    """

    every: int
    constant: bool  # all stages compute a microbatch on the same version

    @classmethod
    def of(cls, schedule: Schedule) -> Delays:
        """Those of an asynchronous schedule, whose microbatches are one window."""
        if schedule.name == "pipedream":
            return cls(every=1, constant=False)
        assert schedule.name == "pipedream-2bw", f"{schedule.name} is not asynchronous"
        return cls(every=schedule.num_microbatches, constant=True)

    def version(self, microbatch: int, num_updates: int) -> int:
        """PipeDream takes the newest weights of its stage; 2BW those of the window before last."""
        return max(0, microbatch // self.every - 1) if self.constant else num_updates


def pipedream(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One window of the endless 1F1B order, with one weight version for each forward ahead."""
    versions = tuple(num_ranks - rank for rank in range(num_ranks))
    return _endless("pipedream", num_ranks, num_microbatches, versions)


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The same order with two weight versions, because updates come every m ≥ p microbatches."""
    return _endless("pipedream-2bw", num_ranks, num_microbatches, (2,) * num_ranks)


def _endless(
    name: str, num_ranks: int, num_microbatches: int, versions: tuple[int, ...]
) -> Schedule:
    window = one_forward_one_backward(num_ranks, num_microbatches)
    return replace(window, name=name, asynchronous=True, weight_versions=versions)

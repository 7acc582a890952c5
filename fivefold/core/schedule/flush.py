"""Schedules with whole backwards that drain between steps.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2021), interleaved 1F1B (the same) and looped
breadth-first (Lamy-Poirier 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.schedule import BACKWARD, FORWARD, Action, Schedule, Step, linear, loop


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    return _breadth_first("gpipe", num_ranks, num_microbatches, num_chunks)


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All forwards of a chunk before the next chunk, and the same backwards."""
    return _breadth_first("bfs", num_ranks, num_microbatches, num_chunks)


def _breadth_first(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    def steps(rank: int) -> Iterator[Step]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        for stage in stages:
            yield from (Action(stage, FORWARD, each) for each in range(num_microbatches))
        for stage in reversed(stages):
            yield from (Action(stage, BACKWARD, each) for each in range(num_microbatches))

    order = tuple(tuple(steps(rank)) for rank in range(num_ranks))
    return Schedule(name, loop(num_ranks, num_chunks), num_microbatches, order)


def one_forward_one_backward(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Rank r runs p − r forwards ahead, then one backward for each further forward."""
    order = tuple(
        alternate(rank, num_ranks, num_microbatches, num_chunks, ahead=num_ranks - rank)
        for rank in range(num_ranks)
    )
    return Schedule("1f1b", linear(num_ranks), num_microbatches, order)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks a rank, p microbatches at a time: the bubble falls by v."""

    def ahead(rank: int) -> int:
        return (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1

    order = tuple(
        alternate(rank, num_ranks, num_microbatches, num_chunks, ahead(rank))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", loop(num_ranks, num_chunks), num_microbatches, order)


def rounds(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, reverse: bool = False
) -> list[tuple[int, int]]:
    """(stage, microbatch) of one rank: p microbatches through each chunk, then the next p."""
    chunks = range(num_chunks)[:: -1 if reverse else 1]
    return [
        (chunk * num_ranks + rank, microbatch)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in chunks
        for microbatch in range(first, min(first + num_ranks, num_microbatches))
    ]


def alternate(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, ahead: int
) -> tuple[Step, ...]:
    """`ahead` forwards first, then backward and forward in turn, then the backwards left."""
    shape = (rank, num_ranks, num_microbatches, num_chunks)
    forwards = [Action(stage, FORWARD, each) for stage, each in rounds(*shape)]
    backwards = [Action(stage, BACKWARD, each) for stage, each in rounds(*shape, reverse=True)]
    steps: list[Step] = list(forwards[:ahead])
    for done, backward in enumerate(backwards):
        steps.append(backward)
        steps += forwards[ahead + done : ahead + done + 1]
    return tuple(steps)


# Pipelines that never drain: gradients are computed on weights of some updates ago.
#
# PipeDream (Narayanan et al. 2019) updates after every microbatch and stashes weights: stage s
# keeps p − s versions, and its gradients come p − s − 1 updates late. PipeDream-2BW (Narayanan et
# al. 2021) gathers gradients over m ≥ p microbatches and keeps two versions, one update late.
# Neither computes what one device would; both are labelled asynchronous wherever they are
# offered.


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

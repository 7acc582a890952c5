"""Zero-bubble schedules on linear and looped placements (Qi et al. 2023).

The backward is split: the input gradient, which the stage before waits for, goes first, and
weight gradients fill what would be idle. A rank may keep a few of them back: the more it may hold,
the less it idles.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core.schedule import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule, Step, loop
from fivefold.core.schedule.flush import rounds


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """As much memory as 1F1B: rank r runs p − r forwards ahead and keeps r weight gradients."""
    return _with_the_memory_of_1f1b("zb-h1", num_ranks, num_microbatches, num_chunks)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """ZB-H1 over v chunks a rank: the same memory, the bubble divided by v."""
    return _with_the_memory_of_1f1b("zb-interleaved", num_ranks, num_microbatches, num_chunks)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Twice the memory: 2(p − r) − 1 forwards ahead and 2r weight gradients kept back."""
    return _zero_bubble(
        "zb-h2",
        (num_ranks, num_microbatches, num_chunks),
        ahead=lambda rank: 2 * (num_ranks - rank) - 1,
        kept=lambda rank: 2 * rank,
    )


def _with_the_memory_of_1f1b(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    return _zero_bubble(
        name,
        (num_ranks, num_microbatches, num_chunks),
        ahead=lambda rank: num_chunks * num_ranks - rank,
        kept=lambda rank: rank,
    )


def _zero_bubble(
    name: str,
    numbers: tuple[int, int, int],
    ahead: Callable[[int], int],
    kept: Callable[[int], int],
) -> Schedule:
    num_ranks, num_microbatches, num_chunks = numbers
    order = tuple(
        split_alternate(rank, *numbers, ahead(rank), kept(rank)) for rank in range(num_ranks)
    )
    return Schedule(name, loop(num_ranks, num_chunks), num_microbatches, order)


def split_alternate(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, ahead: int, kept: int
) -> tuple[Step, ...]:
    """`ahead` forwards, then input gradient and forward in turn, `kept` weight gradients behind."""
    shape = (rank, num_ranks, num_microbatches, num_chunks)
    forwards = [Action(stage, FORWARD, each) for stage, each in rounds(*shape)]
    gradients = rounds(*shape, reverse=True)
    weights = iter([Action(stage, WEIGHT_GRAD, each) for stage, each in gradients])
    steps: list[Step] = list(forwards[:ahead])
    for done, (stage, microbatch) in enumerate(gradients):
        steps.append(Action(stage, INPUT_GRAD, microbatch))
        drained = ahead + done >= len(forwards)
        if drained or done >= kept:
            steps.append(next(weights))
        steps += forwards[ahead + done : ahead + done + 1]
    return (*steps, *weights)

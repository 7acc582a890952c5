"""The bubbles of named schedules as the papers write them, and where those forms hold.

All are times, for equal stages and free transfers; p counts ranks, m microbatches, v chunks a rank,
and F, B, W are the times of a full stage. F&B is an overlapped pair that gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.core.schedule.goal import Objective

Times = tuple[float, float, float]


def _always(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    return True


@dataclass(frozen=True)
class ClosedForm:
    """`text` is the time of the bubble, `domain` where it is exact, `holds` the same to compute.

    `of` says whether the bubble is that of the makespan or of the longest span of a rank.
    """

    text: str
    domain: str = ""
    holds: Callable[[Times, int, int], bool] = _always
    of: Objective = "makespan"


def _short_weights(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return weight <= min(forward, backward) and num_microbatches >= num_ranks


def _short_weights_twice(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return weight <= forward and 2 * weight <= forward + backward and enough


def _balanced(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    enough = num_microbatches >= 2 * num_ranks - 1
    return max(forward, weight) <= backward <= 2 * weight and enough


def _long_backward(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    forward, backward, weight = times
    return max(forward, weight) <= backward


def _filled(times: Times, num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches >= num_ranks


FLUSH = ClosedForm("(p−1)(F+B+W)")
INTERLEAVED = ClosedForm("(p−1)(F+B+W)/v")
BREADTH_FIRST = ClosedForm("(p−1)(F+B+W)/v", "m ≥ p", _filled)
ZB_H1 = ClosedForm("(p−1)(F+B−W)", "W ≤ F, W ≤ B and m ≥ p", _short_weights)
ZB_H2 = ClosedForm("(p−1)(F+B−2W)", "W ≤ F, 2W ≤ F+B and m ≥ 2p−1", _short_weights_twice, of="span")
ZB_INTERLEAVED = ClosedForm("(p−1)(F+B−W)/v", "W ≤ F, W ≤ B and m ≥ p", _short_weights)
ZB_V = ClosedForm("(p−1)B/2", "F ≤ B, W ≤ B ≤ 2W and m ≥ 2p−1", _balanced)
DUALPIPE = ClosedForm("(p/2−1)(F&B+B−2W)", "F ≤ B and W ≤ B", _long_backward)
DUALPIPE_V = ClosedForm("(p−1)(F&B+B−2W)/2", "F ≤ B and W ≤ B", _long_backward)

"""Which layers each pipeline stage holds.

The largest stage sets the pace of a pipeline, so that layers are dealt to make it as small as can
be: by the FLOPs of the forward, where the head weighs on the last stage and the lookup of the input
embedding costs nothing. Of all cuts with that largest stage, the one whose parameters are spread
best is taken: there embedding and head both count.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from fivefold.core import count
from fivefold.core.errors import FivefoldError
from fivefold.core.shape import Shape
from fivefold.core.words import counted

_TEXT = re.compile(r"[1-9][0-9]{0,5}(?:[,\s]+[1-9][0-9]{0,5})*")


def cut(
    shape: Shape, num_stages: int, given: Sequence[int] | None = None, *, seq: int | None = None
) -> tuple[range, ...]:
    """The layers of each stage, in order; `given` are their numbers where a user has chosen.

    `seq` is the length of a sequence, on which attention depends: by default the model's longest.
    """
    if given is None:
        most = shape.layers
        if not 1 <= num_stages <= most:
            raise FivefoldError(
                f"{counted(num_stages, 'stage')} for {counted(most, 'layer')}: every stage needs a "
                f"layer, so use 1 to {most}"
            )
        return _dealt(shape, num_stages, seq or shape.max_seq)
    if reasons := list(problems(given, num_stages, shape.layers)):
        raise FivefoldError("; ".join(reasons))
    return _spans([*accumulate(given)])


@lru_cache
def _dealt(shape: Shape, num_stages: int, seq: int) -> tuple[range, ...]:
    """By cost; whoever explores a job asks for the same again and again."""
    return _spans(_best_ends(compute(shape, seq), sizes(shape, num_stages), num_stages))


def parse(text: str) -> tuple[int, ...]:
    """Read `7,8,8,7`: the number of layers of each stage."""
    if not _TEXT.fullmatch(text.strip()):
        raise FivefoldError(
            f"stage_layers {text!r}: write the number of layers of each stage, such as 7,8,8,7"
        )
    return tuple(int(word) for word in re.split(r"[,\s]+", text.strip()))


def problems(given: Sequence[int], num_stages: int | None, num_layers: int) -> Iterator[str]:
    """What is wrong with the layers that a user gave each stage; None stages are not yet known."""
    shown = ",".join(map(str, given))
    if num_stages is not None and len(given) != num_stages:
        yield (
            f"stage_layers {shown} is for {counted(len(given), 'stage')} and the pipeline has "
            f"{num_stages}: give {counted(num_stages, 'number')}"
        )
    if min(given, default=0) < 1:
        yield f"stage_layers {shown}: every stage needs a layer"
    if sum(given) != num_layers:
        yield (
            f"stage_layers {shown} sum to {sum(given)}, and the model has "
            f"{counted(num_layers, 'layer')}: give numbers that sum to {num_layers}"
        )


def compute(shape: Shape, seq: int) -> list[int]:
    """Forward FLOPs per token of each layer, with what runs before the first and after the last."""
    flops = [count.layer_flops(shape, i, seq).total for i in range(shape.layers)]
    whole = count.forward_flops(shape, seq)
    flops[0] += 2.0 * count.embedding_parameters(shape).norms
    flops[-1] += 2.0 * count.head_parameters(shape).norms + whole.head + whole.mtp
    return [round(each) for each in flops]  # whole numbers, so that equal stages compare equal


def sizes(shape: Shape, num_stages: int) -> list[int]:
    """Parameters of each layer, with the embedding in the first and the head in the last.

    Where a tied model is cut, the last stage has a copy of the embedding's weight.
    """
    found = [count.layer_parameters(shape, i).total for i in range(shape.layers)]
    found[0] += count.embedding_parameters(shape).total
    found[-1] += count.head_parameters(shape).total
    found[-1] += shape.mtp * count.mtp_parameters(shape).total
    if shape.ends_share and num_stages > 1:
        found[-1] += shape.vocab * shape.width
    return found


def _spans(ends: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise([0, *ends]))


def _best_ends(costs: list[int], weights: list[int], num_stages: int) -> list[int]:
    """Where each stage ends: the least largest cost, then the least sum of squared weights."""
    cost, weight = [0, *accumulate(costs)], [0, *accumulate(weights)]
    low, high = max(costs), cost[-1]
    while low < high:
        middle = (low + high) // 2
        if _furthest(cost, num_stages, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle + 1
    far, near = _furthest(cost, num_stages, low), _nearest(cost, num_stages, low)
    squares = {0: 0}
    starts: list[dict[int, int]] = []  # of each stage, by where it ends
    for stage in range(num_stages):
        ends = range(near[stage + 1], far[stage + 1] + 1)
        first = {end: bisect_left(cost, cost[end] - low) for end in ends}
        ways = [*_best_starts(ends, range(near[stage], far[stage] + 1), first, squares, weight)]
        squares = {end: square for end, _, square in ways}
        starts.append({end: start for end, start, _ in ways})
    found = [len(costs)]
    for before in reversed(starts[1:]):
        found.append(before[found[-1]])
    return found[::-1]


def _best_starts(
    ends: range, starts: range, first: dict[int, int], squares: dict[int, int], weight: list[int]
) -> Iterator[tuple[int, int, int]]:
    """For each end of a stage its best start and the sum of squares up to there.

    `first` is the first start within the limit, `squares` the best sum up to each start. A later
    end never has an earlier best start, so that the middle one halves the search for the others.
    """
    if not ends:
        return
    half = len(ends) // 2
    end = ends[half]
    square, start = min(
        (squares[start] + (weight[end] - weight[start]) ** 2, start)
        for start in range(max(starts.start, first[end]), min(starts.stop, end))
    )
    yield from _best_starts(ends[:half], range(starts.start, start + 1), first, squares, weight)
    yield end, start, square
    yield from _best_starts(ends[half + 1 :], range(start, starts.stop), first, squares, weight)


def _furthest(cost: list[int], num_stages: int, limit: int) -> list[int]:
    """How far 0, 1, 2, … stages reach within the limit, and leave a layer to each that follows."""
    far, num_layers = [0], len(cost) - 1
    for left in range(num_stages - 1, -1, -1):
        far.append(min(num_layers - left, bisect_right(cost, cost[far[-1]] + limit) - 1))
    return far


def _nearest(cost: list[int], num_stages: int, limit: int) -> list[int]:
    """Where 0, 1, 2, … stages must end at least, for the rest to hold what is left."""
    near = [len(cost) - 1]
    for before in range(num_stages - 1, -1, -1):
        near.append(max(before, bisect_left(cost, cost[near[-1]] - limit)))
    return near[::-1]

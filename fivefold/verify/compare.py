"""What many ranks computed beside what one computed: errors, tolerances, the first difference.

Values only: arrays, names and counts. Every rank's parts are laid on the whole weight, so that a
replica that has gone astray counts as much as a wrong slice, and a part that nobody has is seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FORMATS
from fivefold.core.layout import WeightShard

Array = NDArray[np.floating]
Dtype = Literal["float64", "float32", "bfloat16"]
KINDS = ("loss_err", "grad_err", "norm_err", "clip_err", "weight_err")
# Below this share of the model's largest value a parameter's own size says nothing.
_FLOOR = 1e-3
_SAFETY = 8
FORMULA = (
    f"{_SAFETY} times the error of one process with its sums in another order, or {_SAFETY} · eps"
)

Call = tuple[str, str, int, int]
"""Axis, kind, bytes of the input buffer, ranks of the group."""
UnitOrder = dict[str, list[str]]
"""By axis: the collectives of flat units in the order in which a rank issues them."""


@dataclass(frozen=True)
class ComparedPart:
    """Elements of a weight (or its gradient) on one rank: `values` of its shard from `start`."""

    name: str
    piece: WeightShard
    start: int
    values: Array


@dataclass(frozen=True)
class Wanted:
    """Input of a comparison: the reference by name, and the shards of ranks."""

    truth: Mapping[str, Array]
    parts: Sequence[ComparedPart]


class Traffic(NamedTuple):
    """Predicted and observed collectives of one step on one rank."""

    predicted: Counter[Call]
    observed: Counter[Call]

    @property
    def match(self) -> bool:
        return self.predicted == self.observed


def tolerances(dtype: Dtype, floors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Tolerance of each kind of error, from the rounding floors of all steps.

    A floor is one draw of what rounding does, the error of many ranks the largest of several:
    hence the factor. A number that agrees by chance is still rounded itself.
    """
    least = dict.fromkeys(KINDS, FORMATS[dtype].epsilon)
    largest = {kind: max(least[kind], *(floor[kind] for floor in floors)) for kind in KINDS}
    return {kind: _SAFETY * error for kind, error in largest.items()}


def relative(value: float, truth: float) -> float:
    """Relative error of a number; infinite if one of the two is None."""
    return _worst([abs(value - truth) / max(abs(truth), 1e-300)])


def errors_by_name(comparison: Wanted) -> dict[str, float]:
    """max|a−b| / max(max|b|, 1e-3 · the largest max|b| of the model), for every parameter."""
    scales = _scales(comparison.truth)
    errors = dict.fromkeys(_uncovered(comparison), math.inf)
    for part in comparison.parts:
        truth = expected(comparison.truth[part.name], part)
        off = _largest(part.values.reshape(-1).astype(np.float64) - truth)
        error = _worst([off / scales[part.name]])
        errors[part.name] = max(errors.get(part.name, 0.0), error)
    return errors


def largest_error(truth: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """The largest error of `errors_by_name`, between full tensors of two processes."""
    scales = _scales(truth)
    return _worst(_largest(other[name] - full) / scales[name] for name, full in truth.items())


def distance(truth: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Norm of the difference of all tensors, relative to their norm."""
    apart = sum(float(np.square(other[name] - full).sum()) for name, full in truth.items())
    size = sum(float(np.square(full).sum()) for full in truth.values())
    return _worst([math.sqrt(apart / max(size, 1e-300))])


def _scales(truth: Mapping[str, Array]) -> dict[str, float]:
    sizes = {name: _largest(full) for name, full in truth.items()}
    least = max(_FLOOR * max(sizes.values()), 1e-300)
    return {name: max(size, least) for name, size in sizes.items()}


def expected(full_value: NDArray[np.generic], part: ComparedPart) -> NDArray[np.generic]:
    """Expected shard: cut from the reference, padded with zeros, then a flat range."""
    piece, size = part.piece, part.values.size
    cut = full_value
    if piece.inner is not None:
        dim, start, stop = piece.inner
        cut = cut[(slice(None),) * dim + (slice(start, stop),)]
        full_value = cut
    if piece.dim is not None:
        index = [slice(None)] * full_value.ndim
        index[piece.dim] = slice(piece.start, piece.stop)
        cut = full_value[tuple(index)]
        missing = piece.stop - piece.start - cut.shape[piece.dim]
        padding = [(0, missing if dim == piece.dim else 0) for dim in range(full_value.ndim)]
        cut = np.pad(cut, padding)
    return cut.reshape(-1)[part.start : part.start + size]


def _uncovered(comparison: Wanted) -> Iterator[str]:
    """Weights with elements that no rank has."""
    seen = {name: np.zeros(array.size + 1, bool) for name, array in comparison.truth.items()}
    numbers = {
        name: np.arange(1, array.size + 1).reshape(array.shape)
        for name, array in comparison.truth.items()
    }
    places = {
        (part.name, part.piece, part.start, part.values.size): part for part in comparison.parts
    }
    for part in places.values():
        seen[part.name][expected(numbers[part.name], part)] = True  # padding is number 0
    yield from (name for name, marks in seen.items() if not marks[1:].all())


def first_disagreement(issued: Mapping[int, Sequence[str]]) -> str | None:
    """First collective that ranks of a group issue in different orders.

    Collectives of a group are paired by their order alone. Over NCCL two of the same size would be
    paired without an error, and each rank would get the other's unit.
    """
    first, *other_ranks = issued
    for rank in other_ranks:
        pairs = zip_longest(issued[first], issued[rank], fillvalue="nothing")
        for number, (own_call, theirs) in enumerate(pairs, start=1):
            if own_call != theirs:
                return (
                    f"as number {number} rank {first} issues {own_call}, and rank {rank} {theirs}"
                )
    return None


def first_module(off: Iterable[str], order: Iterable[str]) -> str | None:
    """Module of the first of these weights in forward order."""
    wrong = set(off)
    first_name = next((name for name in order if name in wrong), None)
    return None if first_name is None else first_name.rpartition(".")[0]


def evened(group: Sequence[Traffic], least: Mapping[str, float]) -> list[Traffic]:
    """Traffic of the ranks of one ep group, with uneven routing averaged out.

    What a rank sends to experts depends on the tokens; the number of those all-to-alls does not,
    and their bytes, summed over the group, lie between `least`, a share, and what is predicted.
    Where they do, every rank's share is as predicted.
    """
    for axis, share in least.items():
        group = _evened_on(axis, share, group)
    return list(group)


def _evened_on(axis: str, least: float, group: Sequence[Traffic]) -> Sequence[Traffic]:
    def uneven(calls: Counter[Call]) -> Counter[Call]:
        kinds = ("all_to_all",) if axis != "etp" else ("all_reduce",)  # in fp8: maxima of rows
        routed = (call for call in calls if call[1] in kinds and call[0] == axis)
        return Counter({call: calls[call] for call in routed})

    missing = [uneven(traffic.predicted - traffic.observed) for traffic in group]
    instead = [uneven(traffic.observed - traffic.predicted) for traffic in group]
    if any(a.total() != b.total() for a, b in zip(missing, instead, strict=True)):
        return group
    # A rank may by chance send what is predicted: its share belongs to the sum.
    kinds = {call for counter in missing for call in counter}
    most = sum(call[2] * traffic.predicted[call] for traffic in group for call in kinds)
    surplus, less = (
        sum(call[2] * n for counter in counters for call, n in counter.items())
        for counters in (instead, missing)
    )
    if not least * most <= most + surplus - less <= most:
        return group
    return [
        Traffic(traffic.predicted, traffic.observed - extra + less)
        for traffic, extra, less in zip(group, instead, missing, strict=True)
    ]


def _largest(values: NDArray[np.generic]) -> float:
    return float(np.abs(values).max()) if values.size else 0.0


def _worst(errors: Iterable[float]) -> float:
    """The largest; what is no number is infinitely wrong."""
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)

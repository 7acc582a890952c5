"""Seconds of the pipeline of many layouts at once: the longest paths of each, by the costs of each.

Costs are those of one layer of each kind and of the head: their forward, gradients of inputs and
of weights, and of one message. Which paths can be the longest hangs on the model and the schedule
alone, and is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from fivefold.core import stages
from fivefold.core.count import forward_flops, layer_flops, layer_kinds
from fivefold.core.estimate.grid import SCHEDULES, Array, Grid
from fivefold.core.estimate.paths import FORMS, Numbers, Stages, longest
from fivefold.core.estimate.trace import is_long, makespans
from fivefold.core.schedule.catalog import AUTO, family
from fivefold.core.shape import Shape

# Ranges of the costs at which paths are compared: of input and weight gradients over the forward of
# a kind of layer; of other kinds of layers and of the passes of the head, over what FLOPs say; of a
# message over a forward of a layer.
_INPUTS, _WEIGHTS = (1.0, 2.5), (0.3, 7.0)
_KINDS = (0.5, 8.0)
_HEAD = (0.5, 4.0)
_MESSAGE = (1e-3, 0.3)
_SAMPLES = 96


class Dealer:
    """The stages of one model, and the longest paths through them."""

    def __init__(self, shape: Shape, seq: int) -> None:
        self.shape, self.seq = shape, seq
        kinds = layer_kinds(shape)
        self.kinds = tuple(kinds)
        last = _kind(shape, shape.layers - 1)
        self.counts = tuple(
            count + (shape.mtp if _kind(shape, i) == last else 0) for i, count in kinds.items()
        )
        self.paths: dict[tuple[str, int, int, int], Array] = {}
        self.dealt: dict[int, Stages] = {}
        self.cuts: dict[int, tuple[range, ...]] = {}

    def spans(self, num_stages: int) -> tuple[range, ...]:
        """The layers of each stage."""
        if num_stages not in self.cuts:
            self.cuts[num_stages] = stages.cut(self.shape, num_stages, seq=self.seq)
        return self.cuts[num_stages]

    def table(self, name: str, pp: int, chunks: int, microbatches: int) -> Array:
        """A row for each path."""
        asked = (name, pp, chunks, microbatches)
        if asked not in self.paths and _cannot_run(*asked):
            self.paths[asked] = np.zeros((1, len(self.samples)))
        if asked not in self.paths:
            form = FORMS.get(name if pp > 1 else "1f1b", FORMS["1f1b"])
            numbers = Numbers(pp, chunks, microbatches, self.samples)
            self.paths[asked] = longest(form(self._even(pp * chunks), numbers), self.samples)
        return self.paths[asked]

    def played(self, name: str, pp: int, chunks: int, microbatches: int, costs: Array) -> Array:
        """Seconds of the schedule itself, for each column of costs."""
        least = (self.table(name, pp, chunks, microbatches) @ costs).max(axis=0)
        if pp == 1 or name == AUTO or family(name).asynchronous:
            return least
        numbers = (pp, microbatches, chunks)
        different, back = np.unique(costs, axis=1, return_inverse=True)
        seconds = makespans(family(name).name, numbers, self._even(pp * chunks), different)
        seconds = seconds[back.ravel()]
        return np.maximum(seconds, least) if is_long(*numbers) else seconds

    def _even(self, num_stages: int) -> Stages:
        """The stages that the runtime cuts where nobody says."""
        if num_stages not in self.dealt:
            self.dealt[num_stages] = self.stages(self.spans(num_stages))
        return self.dealt[num_stages]

    def stages(self, spans: Sequence[range]) -> Stages:
        """How many layers of each kind every stage has, and which one has the head."""
        shape, width = self.shape, len(self.kinds) + 1
        first = {_kind(shape, i): place for place, i in enumerate(self.kinds)}
        held = np.zeros((len(spans), width))
        for number, span in enumerate(spans):
            for i in span:
                held[number, first[_kind(shape, i)]] += 1
        held[-1, first[_kind(shape, shape.layers - 1)]] += shape.mtp
        held[-1, -1] = 1
        none = np.zeros_like(held)
        forward, inputs, weights = (
            np.hstack([held if place == mine else none for place in range(3)] + [none[:, :1]])
            for mine in range(3)
        )
        return Stages(forward, inputs, weights, np.eye(3 * width + 1)[-1])

    @cached_property
    def samples(self) -> Array:
        """Costs in columns, at which paths are compared."""
        return _samples(self.shape, self.seq)


def _cannot_run(name: str, pp: int, chunks: int, microbatches: int) -> bool:
    """Lattices have schedules beside numbers of microbatches that are not theirs."""
    return pp > 1 and name != AUTO and bool(family(name).problems(pp, microbatches, chunks))


def _kind(shape: Shape, i: int) -> tuple[bool, bool]:
    return shape.is_moe_layer(i), shape.is_global_layer(i)


def _samples(shape: Shape, seq: int) -> Array:
    """Costs that layouts may have: around what FLOPs say, drawn alike every time."""
    flops = [layer_flops(shape, i, seq).total for i in layer_kinds(shape)]
    sizes = np.array([*flops, forward_flops(shape, seq).head * (1 + shape.mtp)]) / flops[0]
    draw = np.random.default_rng(0).uniform

    def drawn(low: float, high: float, *size: int) -> Array:
        return np.exp(draw(np.log(low), np.log(high), size=(_SAMPLES, *size)))

    kinds = drawn(*_KINDS, 1, len(flops))
    kinds[:, :, 0] = 1.0
    passes = [np.ones_like(kinds), drawn(*_INPUTS, 1, len(flops)), drawn(*_WEIGHTS, 1, len(flops))]
    layers = np.concatenate(passes, axis=1) * kinds
    costs = np.concatenate([layers, drawn(*_HEAD, 3, 1)], axis=2) * sizes
    return np.hstack([costs.reshape(_SAMPLES, -1), drawn(*_MESSAGE, 1)]).T


@cache
def dealer(shape: Shape, seq: int) -> Dealer:
    """The one of a model and a length of sequences."""
    return Dealer(shape, seq)


def makespan(found: Dealer, grid: Grid, costs: list[Array], played: bool = False) -> Array:
    """Seconds of every layout's pipeline; `costs` are in the order of a path's row.

    By the longest paths, which are a bound, or `played`, which takes its time.
    """
    pp = grid.pp if grid.pp.min() < grid.pp.max() else grid.pp[:1]  # all are alike in a search
    columns = np.broadcast_arrays(grid.schedule, pp, grid.chunks, grid.microbatches)
    asked = [
        (SCHEDULES[int(name)], int(ranks), int(chunks), int(count))
        for name, ranks, chunks, count in zip(*(each.ravel() for each in columns), strict=True)
    ]
    size = np.broadcast_shapes(columns[0].shape, *(each.shape for each in costs))
    if played:
        return _played(found, asked, np.array([np.broadcast_to(each, size) for each in costs]))
    tables = [found.table(*each) for each in asked]
    most = max(map(len, tables))
    paths = np.array([table[np.minimum(np.arange(most), len(table) - 1)] for table in tables])
    if grid.pp.ndim == 1:
        return np.einsum("nkq,qn->nk", paths, [np.broadcast_to(c, size) for c in costs]).max(axis=1)
    return _of_lattice(paths, columns[0].shape, costs)


def _played(found: Dealer, asked: list[tuple[str, int, int, int]], costs: Array) -> Array:
    """The same by the clock, each schedule once for all layouts that have it."""
    seconds = np.zeros(costs.shape[1])
    places: dict[tuple[str, int, int, int], list[int]] = {}
    for place, one in enumerate(asked if len(asked) > 1 else asked * len(seconds)):
        places.setdefault(one, []).append(place)
    for one, mine in places.items():
        seconds[mine] = found.played(*one, costs[:, mine])
    return seconds


def _of_lattice(paths: Array, shape: tuple[int, ...], costs: list[Array]) -> Array:
    """The same where paths lie along rows and schedules, costs along degrees, rows and
    recomputation: a product of matrices for each number of rows."""
    rows, schedules = shape[1:3]
    costs = [each[:, :, :, :1] for each in costs]  # however dp is shared, it is the same dp
    degrees, again = (max(each.shape[axis] for each in costs) for axis in (0, 4))
    spread = [np.broadcast_to(each, (degrees, rows, 1, 1, again, 1)) for each in costs]
    columns = np.array(spread).reshape(len(costs), degrees, rows, again)
    columns = columns.transpose(2, 0, 1, 3).reshape(rows, len(costs), degrees * again)
    seconds = paths.reshape(rows, -1, len(costs)) @ columns
    seconds = seconds.reshape(rows, schedules, -1, degrees, again).max(axis=2)
    return seconds.transpose(2, 0, 1, 3).reshape(degrees, rows, schedules, 1, again, 1)

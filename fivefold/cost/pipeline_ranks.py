"""How long the ranks of a pipeline wait in a step: closed forms that the clock holds in check.

Legend: p stages, m microbatches, v chunks of a rank; F, B, W seconds of a stage for a microbatch:
forward, gradients of inputs with what is computed again, gradients of weights. The forms are those
of the makespan for equal stages; what they do when m is small, or B long, was read off the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from fivefold.core.count import layer_parameters
from fivefold.core.shape import Shape
from fivefold.cost.grid import SCHEDULES, Array, Flags, Grid
from fivefold.cost.pipeline_time import StageAssigner, dealer
from fivefold.cost.stack import Split


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the average stage, beside the layouts that have it."""

    forward: Array
    inputs: Array
    weights: Array
    grid: Grid

    @property
    def whole(self) -> Array:
        return self.forward + self.inputs + self.weights


def bubbles(stage: StageSeconds, others: Array, late_check: bool) -> Array:
    """Seconds that the slowest rank waits.

    `others`: seconds of one microbatch through all stages but the slowest. `late_check`: the
    optimizer does not wait for the norm of all gradients, so that steps of the ranks overlap.
    """
    grid = stage.grid
    found = others / grid.chunks
    for name, form in _FORMS.items():
        here = grid.schedule == SCHEDULES.index(name)
        if here.any():
            chosen = _zb_h2_span if late_check and name == "zb-h2" else form
            found = np.where(here, np.maximum(chosen(stage), 0.0), found)
    return np.where(grid.pp > 1, found, 0.0)


def _zb_h1(stage: StageSeconds) -> Array:
    """Weight gradients fill the drain, as many as there are microbatches."""
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.minimum(m, p) - 1
    return (p - 1) * (stage.forward + stage.inputs) - filled * stage.weights


def _zb_interleaved(stage: StageSeconds) -> Array:
    return _zb_h1(stage) / stage.grid.chunks


def _zb_h2_span(stage: StageSeconds) -> Array:
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.minimum(m - 1, 2 * (p - 1))
    return (p - 1) * (stage.forward + stage.inputs) - filled * stage.weights


def _zb_h2(stage: StageSeconds) -> Array:
    """The last stage starts after p - 1 forwards, whatever fills the rest."""
    return np.maximum((stage.grid.pp - 1) * stage.forward, _zb_h2_span(stage))


def _zb_v(stage: StageSeconds) -> Array:
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.clip(m - p, 0, p - 1)
    least = (p - 1) * stage.inputs / 2
    return np.maximum(least, (p - 1) * stage.inputs - filled * stage.weights)


def _v_half(stage: StageSeconds) -> Array:
    """Where backwards are long, every further microbatch waits for them."""
    p, m = stage.grid.pp, stage.grid.microbatches
    forward, inputs, weights = stage.forward, stage.inputs, stage.weights
    trip = (p / 2 - 1) * forward + (1.5 * p - 1) * inputs - (p / 2 + 1.5) * weights
    trip = np.where(p == 2, inputs - weights / 2, trip)
    odd = p % 2 == 1
    trip = trip + np.where(odd, 1.5 * forward, 0.0)
    period = 2 * inputs + np.where(p > 4, weights / 2, 0.0) + np.where(odd, forward / 2, 0.0)
    drift = np.where(p == 2, 0.0, np.maximum(period - stage.whole, 0.0))
    return trip + drift * np.maximum(m - p, 0.0)


def _v_min(stage: StageSeconds) -> Array:
    """Every slot of its three takes as long as the longest."""
    p, m = stage.grid.pp, stage.grid.microbatches
    forward, inputs, weights = stage.forward, stage.inputs, stage.weights
    longest = np.maximum(np.maximum(forward, inputs), weights)
    period = np.where(p == 2, (forward + weights) / 2 + 2 * inputs, 3 * longest)
    trip = p * forward + (p - 3) * inputs + weights / 2
    thirds = (p % 3 == 0) & (p > 3)
    trip = trip + np.where(thirds, np.maximum(forward / 2, 2 * forward - inputs), 0.0)
    trip = np.where(p == 2, 1.5 * forward, trip)
    return trip + m * np.maximum(period - stage.whole, 0.0)


def _dualpipe(stage: StageSeconds) -> Array:
    return (stage.grid.pp / 2 - 1) * (stage.forward + 2 * stage.inputs - stage.weights)


def _dualpipe_v(stage: StageSeconds) -> Array:
    return (stage.grid.pp - 1) * (stage.forward + 2 * stage.inputs - stage.weights) / 2


def _none(stage: StageSeconds) -> Array:
    """An asynchronous pipeline never drains."""
    return np.zeros_like(stage.grid.pp)


_FORMS: dict[str, Callable[[StageSeconds], Array]] = {
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-interleaved": _zb_interleaved,
    "zb-v": _zb_v,
    "v-half": _v_half,
    "v-min": _v_min,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
    "pipedream": _none,
    "pipedream-2bw": _none,
}

# The ranks at the two ends of a pipeline: their layers, and what they keep in flight.
#
# Microbatches in flight come by closed forms that the clock holds in check, in units of a rank's
# layers, as `clock.peak_activations` counts them.


Place = Literal["first", "inner", "last"]
_FOLDED = ("zb-v", "v-half", "v-min", "dualpipe-v")  # a rank has the n-th stage from either end
_ALL = ("gpipe", "afab", "bfs")  # no backward before the last forward


class EndLayers(NamedTuple):
    """Layers of a rank, and how many of them have experts."""

    all: Array
    routed: Array


class EndStage(NamedTuple):
    """What a rank has."""

    layers: EndLayers  # of each copy
    copies: Array  # of every layer's weights
    flight: Array  # microbatches, in units of its layers
    embedding: Array  # 1 or 0
    head: Array


def stages_of(
    shape: Shape,
    split: Split,
    grid: Grid,
    seq: int,
    hop_forwards: int = 2,
    spans: Sequence[range] | None = None,
) -> tuple[EndStage, ...]:
    """The first rank's, those between the ends that may have more layers than one before them, and
    the last one's, or that of the rank with the head; `spans`: the layers of each stage where they
    are given."""
    both = mirrored(grid) | (grid.pp == 1)
    flight = in_flight(grid, "last", hop_forwards)
    inner: list[tuple[EndLayers, Array]] = []
    if spans is not None or split == "balanced":
        first, inner, last = _balanced(shape, grid, seq, spans)
    elif split == "even":
        first, last = _even(shape, grid)
    elif split == "spared":
        first, between, last = _spared(shape, grid)
        inner = [(between, np.ones(1))]
    else:
        first, last, place = _walked(shape, grid)
        flight = np.minimum(grid.microbatches, grid.pp - place)
    copies, one, none = np.where(mirrored(grid), 2.0, 1.0), np.ones(1), np.zeros(1)
    at_first = np.where(both | folded(grid), 1.0, 0.0)
    at_last = np.where(folded(grid), 0.0, 1.0)
    found = [EndStage(first, copies, in_flight(grid, "first", hop_forwards), one, at_first)]
    for layers, place in inner:
        before = found[-1].layers
        if (layers.all > before.all).any() or (layers.routed > before.routed).any():
            between = in_flight(grid, "inner", hop_forwards, place)
            found.append(EndStage(layers, copies, between, none, none))
    found.append(EndStage(last, copies, flight, np.where(both, 1.0, 0.0), at_last))
    return tuple(found)


def _balanced(
    shape: Shape, grid: Grid, seq: int, spans: Sequence[range] | None = None
) -> tuple[EndLayers, list[tuple[EndLayers, Array]], EndLayers]:
    """As this runtime deals them: by cost, with the head; or as they are given. Between the ends
    those of the second rank, which has most in flight, and of the fullest, with their places."""
    pp = grid.pp if grid.pp.min() < grid.pp.max() else grid.pp[:1]  # all are alike in a search
    columns = np.broadcast_arrays(pp, grid.chunks, folded(grid), mirrored(grid))
    found = [
        _dealt(dealer(shape, seq), int(ranks), int(chunks), bool(fold), bool(mirror))
        if spans is None
        else _held(shape, spans, int(ranks), bool(fold), bool(mirror))
        for ranks, chunks, fold, mirror in zip(*(each.ravel() for each in columns), strict=True)
    ]
    numbers = np.array(found, float).reshape(*columns[0].shape, 4, 3)
    first, second, fullest, last = (
        (EndLayers(numbers[..., rank, 0], numbers[..., rank, 1]), numbers[..., rank, 2])
        for rank in range(4)
    )
    return first[0], [second, fullest], last[0]


@cache
def _dealt(
    dealt: StageAssigner, ranks: int, chunks: int, fold: bool, mirror: bool
) -> tuple[tuple[float, float, float], ...]:
    spans = dealt.spans(min(ranks * chunks, dealt.shape.layers))
    return _held(dealt.shape, spans, ranks, fold, mirror)


def _held(
    shape: Shape, spans: Sequence[range], ranks: int, fold: bool, mirror: bool
) -> tuple[tuple[float, float, float], ...]:
    """Layers of the first, the second, the fullest inner and the last rank, how many have experts,
    and which rank that is."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    for number, span in enumerate(spans):
        turn, place = divmod(number, ranks)
        held[ranks - 1 - place if fold and turn % 2 else place].append(span)
        if mirror:
            held[ranks - 1 - place].append(span)
    share = 2 if mirror and ranks > 1 else 1
    numbers = [
        (sum(map(len, mine)) / share, sum(map(shape.is_moe_layer, chain(*mine))) / share, place)
        for place, mine in enumerate(held)
    ]
    inner = numbers[1:-1] or numbers[:1]
    return numbers[0], inner[0], max(inner, key=lambda each: each[:2]), numbers[-1]


def _even(shape: Shape, grid: Grid) -> tuple[EndLayers, EndLayers]:
    """As many layers to each stage, and fewer to the last where they do not divide."""
    layers, pp, chunks = float(shape.layers), grid.pp, grid.chunks
    most = np.minimum(chunks * np.ceil(layers / (pp * chunks)), layers)
    fewer = np.where(most * pp > layers, np.maximum(most - 1, 1.0), most)
    last = np.where(folded(grid) | mirrored(grid), most, fewer)
    return _with_routed(shape, grid, most), _with_routed(shape, grid, last)


def _spared(shape: Shape, grid: Grid) -> list[EndLayers]:
    """One layer fewer on the first rank, for the embedding, and on the last, for the head."""
    layers, pp, chunks = float(shape.layers), grid.pp, grid.chunks
    share = chunks * np.ceil((layers + 2) / (pp * chunks))
    inner = np.minimum(share, layers)
    first = np.where(pp > 1, np.minimum(share - 1, layers), layers)
    left = layers - first - (pp - 2) * inner
    last = np.where(pp > 1, np.clip(left, 1.0, first), layers)
    return [_with_routed(shape, grid, each) for each in (first, inner, last)]


def _walked(shape: Shape, grid: Grid) -> tuple[EndLayers, EndLayers, Array]:
    """Blocks go to a stage until it has its share of the matrices; the head is the last block, and
    the third result the number of its stage."""
    layers, layer = float(shape.layers), layer_parameters(shape, 0)
    head = shape.vocab * shape.width / (layer.total - layer.norms)
    fair = (layers + head) / grid.pp
    place = np.minimum(grid.pp - 1, np.floor(layers / fair))
    first, last = np.minimum(np.ceil(fair), layers), layers - np.ceil(place * fair)
    return _with_routed(shape, grid, first), _with_routed(shape, grid, last), place


def _with_routed(shape: Shape, grid: Grid, layers: Array) -> EndLayers:
    """In a pipeline those of a rank behind the first, dense layers."""
    if shape.moe is None:
        return EndLayers(layers, np.zeros(1))
    number = float(shape.num_moe_layers)
    share = number / (shape.layers - shape.moe.first_dense)
    return EndLayers(layers, np.where(grid.pp == 1, number, np.minimum(layers * share, number)))


def in_flight(grid: Grid, place: Place, hop_forwards: int = 2, rank: Array | float = 1.0) -> Array:
    """Microbatches whose activations a rank keeps at most; inner: any that is not at an end, the
    second one or another `rank`.

    `hop_forwards`: what interleaved 1F1B runs ahead for each hop to the last rank.
    """
    pp, m = grid.pp, grid.microbatches
    plain = {"first": pp, "inner": pp - rank, "last": np.ones_like(pp)}[place]
    hops = plain - 1
    ahead = hop_forwards * hops + 1 - pp
    forms = {
        **dict.fromkeys(_ALL, m),
        "interleaved": pp + ahead / grid.chunks,
        "zb-h1": pp,
        "zb-h2": 2 * pp - 1,
        "zb-interleaved": pp,
        "zb-v": np.minimum(pp, (m + 1) / 2) if place == "first" else pp,
        "v-half": np.floor((pp + 2) / 2),
        "v-min": np.floor((pp + 4) / 3),
        "dualpipe": pp + 1,
        "dualpipe-v": pp + 0.5,
    }
    found = plain  # 1F1B
    for name, form in forms.items():
        if (here := _is(grid, name)).any():
            found = np.where(here, form, found)
    return np.where(pp > 1, np.minimum(m, found), 1.0)


def mirrored(grid: Grid) -> Flags:
    """Whether both directions of a pipeline have every weight: a rank is at both of its ends."""
    return _is(grid, "dualpipe") & (grid.pp > 1)


def folded(grid: Grid) -> Flags:
    """Whether the first rank has the last stage too."""
    return _is(grid, *_FOLDED) & (grid.pp > 1)


def keeps_all(grid: Grid) -> Flags:
    """Whether the losses of all microbatches wait for their backward."""
    return _is(grid, *_ALL) & (grid.pp > 1)


def _is(grid: Grid, *names: str) -> Flags:
    flags = (grid.schedule == SCHEDULES.index(name) for name in names)
    return reduce(np.logical_or, flags)

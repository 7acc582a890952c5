"""The ranks of a pipeline: how long they wait in a step, which layers they have, and how many
microbatches are in flight.

The family of each schedule (`core.schedule`) has the closed forms; tests compare them with the
simulated schedule. Microbatches in flight are in units of a rank's layers, as
`clock.peak_activations` counts them.

Seconds of the pipeline of many layouts at once, by its longest paths or by simulation.

Costs are those of one layer of each kind and of the head (forward, input gradient, weight gradient)
and of one message. Which paths can be the longest depends on the model and the schedule alone, and
is computed once (`makespans.longest`). The simulation gives the same as the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

import numpy as np

from fivefold.core.layout import splits
from fivefold.core.model import (
    Recompute,
    Shape,
    forward_flops,
    layer_flops,
    layer_kinds,
    layer_parameters,
)
from fivefold.core.schedule import (
    AUTO,
    Family,
    HeldMicrobatches,
    HeldMoments,
    PipelineTimes,
    RankPosition,
    named,
)
from fivefold.core.schedule import (
    family as family_of,
)
from fivefold.cost import FAMILIES, SCHEDULES, Array, Flags, LayoutGrid
from fivefold.cost.hardware import Split
from fivefold.cost.stages.makespans import (
    PATHS,
    ScheduleSize,
    StageRows,
    StageSeconds,
    is_long,
    longest,
    schedule_makespans,
)

# Ranges of the costs at which paths are compared: input and weight gradients over the forward of a
# layer; other kinds of layers, and the passes of the head, over the ratio of their FLOPs; a message
# over the forward of a layer.
_INPUTS, _WEIGHTS = (1.0, 2.5), (0.3, 7.0)
_PIPELINE_KINDS = (0.5, 8.0)
_HEAD = (0.5, 4.0)
_MESSAGE = (1e-3, 0.3)
_SAMPLES = 96


class PipelineTimer:
    """Times the pipelines of one model: its stages, and the longest paths through them."""

    def __init__(self, shape: Shape, seq: int) -> None:
        self.shape, self.seq = shape, seq
        kinds = layer_kinds(shape)
        self.kinds = tuple(kinds)
        last = shape.layer_kind(shape.layers - 1)
        self.counts = tuple(
            count + (shape.mtp if shape.layer_kind(i) == last else 0) for i, count in kinds.items()
        )
        self.paths: dict[tuple[str, int, int, int], Array] = {}
        self.default_stages: dict[tuple[int, bool], StageRows] = {}

    def spans(self, num_stages: int, folded: bool) -> tuple[range, ...]:
        """The layers of each stage."""
        return splits.cut_stages(self.shape, num_stages, seq=self.seq, folded=folded)

    def table(self, name: str, pp: int, chunks: int, microbatches: int) -> Array:
        """The longest paths of a schedule, one row each; none if it cannot run these numbers."""
        key = (name, pp, chunks, microbatches)
        if key not in self.paths and _cannot_run(*key):
            self.paths[key] = np.zeros((0, len(self.samples)))
        if key not in self.paths:
            known = named(name if pp > 1 else "1f1b")
            numbers = ScheduleSize(pp, chunks, microbatches, self.samples)
            stages = self._default_stages(pp * chunks, known.placement == "V")
            self.paths[key] = longest(PATHS[known.paths](stages, numbers), self.samples)
        return self.paths[key]

    def simulated(self, name: str, pp: int, chunks: int, microbatches: int, costs: Array) -> Array:
        """Seconds of the simulated schedule, for each column of costs."""
        paths = self.table(name, pp, chunks, microbatches)
        if not len(paths):
            return np.inf * np.ones(costs.shape[1])
        least: Array = (paths @ costs).max(axis=0)
        if pp == 1 or name == AUTO or family_of(name).asynchronous:
            return least
        numbers = (pp, microbatches, chunks)
        different, back = np.unique(costs, axis=1, return_inverse=True)
        rows = self._default_stages(pp * chunks, family_of(name).placement == "V")
        kinds = (rows.forward, rows.inputs, rows.weights)
        stages = StageSeconds(*(kind @ different for kind in kinds), lag=rows.lag @ different)
        seconds = schedule_makespans(family_of(name).name, numbers, stages)
        seconds = seconds[back.ravel()]
        return np.maximum(seconds, least) if is_long(*numbers) else seconds

    def _default_stages(self, num_stages: int, folded: bool) -> StageRows:
        """The stages of the runtime's default split."""
        key = num_stages, folded
        if key not in self.default_stages:
            self.default_stages[key] = self.stages(self.spans(*key))
        return self.default_stages[key]

    def stages(self, spans: Sequence[range]) -> StageRows:
        """How many layers of each kind every stage has, and which one has the head."""
        shape, width = self.shape, len(self.kinds) + 1
        first = {shape.layer_kind(i): index for index, i in enumerate(self.kinds)}
        counts = np.zeros((len(spans), width))
        for number, span in enumerate(spans):
            for i in span:
                counts[number, first[shape.layer_kind(i)]] += 1
        counts[-1, first[shape.layer_kind(shape.layers - 1)]] += shape.mtp
        counts[-1, -1] = 1
        none = np.zeros_like(counts)
        forward, inputs, weights = (
            np.hstack(
                [counts if column == position else none for column in range(3)] + [none[:, :1]]
            )
            for position in range(3)
        )
        return StageRows(forward, inputs, weights, np.eye(3 * width + 1)[-1])

    @cached_property
    def samples(self) -> Array:
        """Costs at which paths are compared, in columns."""
        return _samples(self.shape, self.seq)


def _cannot_run(name: str, pp: int, chunks: int, microbatches: int) -> bool:
    """Whether a schedule cannot run these numbers; a block of a search also has such pairs."""
    return pp > 1 and name != AUTO and breaks_rules(name, pp, chunks, microbatches)


@cache
def breaks_rules(name: str, pp: int, chunks: int, microbatches: int) -> bool:
    """Whether a rule of a schedule forbids these numbers; the blocks of a search share many."""
    return bool(family_of(name).problems(pp, microbatches, chunks))


def _samples(shape: Shape, seq: int) -> Array:
    """Costs that layouts may have: random, around the ratios of FLOPs, with a fixed seed."""
    flops = [layer_flops(shape, i, seq).total for i in layer_kinds(shape)]
    sizes = np.array([*flops, forward_flops(shape, seq).head * (1 + shape.mtp)]) / flops[0]
    draw = np.random.default_rng(0).uniform

    def drawn(low: float, high: float, *size: int) -> Array:
        return np.exp(draw(np.log(low), np.log(high), size=(_SAMPLES, *size)))

    kinds = drawn(*_PIPELINE_KINDS, 1, len(flops))
    kinds[:, :, 0] = 1.0
    passes = [np.ones_like(kinds), drawn(*_INPUTS, 1, len(flops)), drawn(*_WEIGHTS, 1, len(flops))]
    layers = np.concatenate(passes, axis=1) * kinds
    costs = np.concatenate([layers, drawn(*_HEAD, 3, 1)], axis=2) * sizes
    return np.hstack([costs.reshape(_SAMPLES, -1), drawn(*_MESSAGE, 1)]).T


@cache
def pipeline_timer(shape: Shape, seq: int) -> PipelineTimer:
    """The timer of a model and a sequence length; made once."""
    return PipelineTimer(shape, seq)


def pipeline_seconds(
    timer: PipelineTimer,
    grid: LayoutGrid,
    costs: list[Array],
    simulated: bool = False,
    mask: Flags | None = None,
) -> Array:
    """Seconds of the pipeline of every layout; `costs` are in the order of a path's row.

    By the longest paths, which are a lower bound, or `simulated`, which takes longer. A schedule
    that cannot run the numbers of a layout never ends, nor do those that `selection` leaves out: a
    mask by microbatch size and schedule.
    """
    pp = grid.pp if grid.pp.min() < grid.pp.max() else grid.pp[:1]  # all are alike in a search
    columns = np.broadcast_arrays(grid.schedule, pp, grid.chunks, grid.microbatches)
    jobs = [
        (SCHEDULES[int(name)], int(ranks), int(chunks), int(count))
        for name, ranks, chunks, count in zip(*(column.ravel() for column in columns), strict=True)
    ]
    size = np.broadcast_shapes(columns[0].shape, *(cost.shape for cost in costs))
    if simulated:
        return _simulated(timer, jobs, np.array([np.broadcast_to(cost, size) for cost in costs]))
    places = np.broadcast_to(True if mask is None else mask, columns[0].shape).ravel()
    tables = [
        timer.table(*job) if flag else np.zeros((0, len(costs)))
        for job, flag in zip(jobs, places, strict=True)
    ]
    never = np.where([len(table) for table in tables], 0.0, np.inf)
    paths = np.zeros((len(tables), max(1, *map(len, tables)), len(costs)))
    for row, table in zip(paths, tables, strict=True):
        row[: len(table)] = table
    if grid.pp.ndim == 1:
        spread = [np.broadcast_to(cost, size) for cost in costs]
        return np.einsum("nkq,qn->nk", paths, spread).max(axis=1) + never
    seconds = _block_seconds(paths, columns[0].shape, costs)
    return seconds + never.reshape(1, *columns[0].shape[1:3], 1, 1, 1)


def _simulated(timer: PipelineTimer, jobs: list[tuple[str, int, int, int]], costs: Array) -> Array:
    """The same by simulation, each schedule once for all layouts that have it."""
    seconds = np.zeros(costs.shape[1])
    places: dict[tuple[str, int, int, int], list[int]] = {}
    for index, job in enumerate(jobs if len(jobs) > 1 else jobs * len(seconds)):
        places.setdefault(job, []).append(index)
    for job, columns in places.items():
        seconds[columns] = timer.simulated(*job, costs[:, columns])
    return seconds


def _block_seconds(paths: Array, shape: tuple[int, ...], costs: list[Array]) -> Array:
    """The same for a block of a search: paths vary with microbatch size and schedule, costs with
    degrees, microbatch size and recomputation; one matmul for each microbatch size. If schedules
    hide different shares of collectives, costs vary with them too: one for each of both."""
    rows, schedules = shape[1:3]
    costs = [cost[:, :, :, :1] for cost in costs]  # however dp is shared, it is the same dp
    degrees, kinds, again = (max(cost.shape[axis] for cost in costs) for axis in (0, 2, 4))
    spread = [np.broadcast_to(cost, (degrees, rows, kinds, 1, again, 1)) for cost in costs]
    columns = np.array(spread).reshape(len(costs), degrees, rows, kinds, again)
    columns = columns.transpose(2, 3, 0, 1, 4).reshape(rows, kinds, len(costs), degrees * again)
    seconds = paths.reshape(rows, kinds, -1, len(costs)) @ columns
    seconds = seconds.reshape(rows, schedules, -1, degrees, again).max(axis=2)
    return seconds.transpose(2, 0, 1, 3).reshape(degrees, rows, schedules, 1, again, 1)


def bubble_seconds(times: PipelineTimes, grid: LayoutGrid) -> Array:
    """Seconds that the slowest rank waits in a step, as each schedule's family estimates it."""
    seconds = np.zeros(1)
    for family, mask in _families(grid):
        seconds = np.where(mask, np.maximum(family.bubble(times), 0.0), seconds)
    return np.where(grid.pp > 1, seconds, 0.0)


PipelineEnd = Literal["first", "inner", "last"]


_NOTHING_HELD = HeldMicrobatches(np.zeros(1), np.zeros(1))
_LATEST = 2  # of the inner ranks of a balanced split: the one that defers most weight gradients


class RankLayers(NamedTuple):
    """Layers of a rank: all, those with experts, those without attention, and those with neither
    dense MLP nor attention."""

    all: Array
    routed: Array
    recurrent: Array
    routed_recurrent: Array

    @property
    def kinds(self) -> dict[tuple[bool, bool], Array]:
        """How many there are of each kind, by whether they have experts and lack attention."""
        routed, recurrent, routed_recurrent = self.routed, self.recurrent, self.routed_recurrent
        return {
            (False, False): self.all - routed - recurrent + routed_recurrent,
            (False, True): recurrent - routed_recurrent,
            (True, False): routed - routed_recurrent,
            (True, True): routed_recurrent,
        }


def count_layers(shape: Shape, layers: Iterable[int]) -> tuple[int, int, int, int]:
    """The numbers of `RankLayers` of these layers."""
    kinds = [(shape.is_moe_layer(i), shape.is_recurrent(i)) for i in layers]
    routed, recurrent = (sum(kind[index] for kind in kinds) for index in (0, 1))
    return len(kinds), routed, recurrent, sum(all(kind) for kind in kinds)


class RankStage(NamedTuple):
    """The share of one pipeline rank."""

    layers: RankLayers  # of each copy
    copies: Array  # of the weights of every layer: 2 if the placement is mirrored
    flight: Array  # microbatches, in units of its layers
    embedding: Array  # 1 or 0
    head: Array  # 1 or 0
    deferred: HeldMoments = ()  # when microbatches wait for weight gradients
    by_rule: tuple[tuple[Recompute, RankLayers], ...] = ()  # where stages differ in recomputation


def rank_stages(
    shape: Shape,
    split: Split,
    grid: LayoutGrid,
    seq: int,
    hop_forwards: int = 2,
    spans: Sequence[range] | None = None,
) -> Iterator[RankStage]:
    """The ranks that may be the fullest: the first, inner ranks that may have more layers than the
    ranks before them, the one with most deferred weight gradients, and the last one, or that with
    the head.

    `spans`: the layers of each stage if they are given.
    """
    has_ends = mirrored(grid) | (grid.pp == 1)
    inner: list[tuple[RankLayers, Array]] = []
    flight = None
    if spans is not None or split == "balanced":
        first, inner, last = _balanced(shape, grid, seq, spans)
    elif split == "even":
        first, last = _even(shape, grid)
    elif split == "short-ends":
        first, between, last = _short_ends(shape, grid)
        inner = [(between, np.ones(1))]
    else:
        first, last, rank = _greedy(shape, grid)
        flight = np.minimum(grid.microbatches, grid.pp - rank)
    copies, unit, none = np.where(mirrored(grid), 2.0, 1.0), np.ones(1), np.zeros(1)
    at_first = np.where(has_ends | folded(grid), 1.0, 0.0)
    at_last = np.where(folded(grid), 0.0, 1.0)
    ahead = in_flight(grid, "first", hop_forwards)
    yield RankStage(first, copies, ahead, unit, at_first, deferred(grid, "first"))
    before = first
    for number, (layers, rank) in enumerate(inner):
        waits = number == _LATEST and grid.defers.any()
        if waits or any((count > other).any() for count, other in zip(layers, before, strict=True)):
            between = in_flight(grid, "inner", hop_forwards, rank)
            late = deferred(grid, "inner", rank)
            yield RankStage(layers, copies, between, none, none, late)
            before = layers
    flight = in_flight(grid, "last", hop_forwards) if flight is None else flight
    late = deferred(grid, "last")
    yield RankStage(last, copies, flight, np.where(has_ends, 1.0, 0.0), at_last, late)


def fewest_layers(layers: RankLayers) -> RankLayers:
    """The fewest layers of each kind that a rank has under any schedule of a block."""
    plain, recurrent, routed, routed_recurrent = (
        counts.min(axis=2, keepdims=True) if counts.ndim > 2 else counts
        for counts in layers.kinds.values()
    )
    return RankLayers(
        plain + recurrent + routed + routed_recurrent,
        routed + routed_recurrent,
        recurrent + routed_recurrent,
        routed_recurrent,
    )


def _balanced(
    shape: Shape, grid: LayoutGrid, seq: int, spans: Sequence[range] | None = None
) -> tuple[RankLayers, list[tuple[RankLayers, Array]], RankLayers]:
    """fivefold's own split, by cost with the head; or the given one. The inner ranks are the
    second, which has most in flight, the one with most layers, and the one that defers most weight
    gradients (`_LATEST`), each with its position."""
    pp = grid.pp if grid.pp.min() < grid.pp.max() else grid.pp[:1]  # all are alike in a search
    columns = np.broadcast_arrays(pp, grid.chunks, folded(grid), mirrored(grid))
    jobs = [
        (int(ranks), int(chunks), bool(fold), bool(mirror))
        for ranks, chunks, fold, mirror in zip(*(column.ravel() for column in columns), strict=True)
    ]
    if spans is None:
        timer = pipeline_timer(shape, seq)
        results = [_balanced_layers(timer, *job) for job in jobs]
    else:
        results = [_layers_of_ranks(shape, spans, ranks, *options) for ranks, _, *options in jobs]
    numbers = np.array(results, float).reshape(*columns[0].shape, 5, 5)
    first, *inner, last = (
        (RankLayers(*np.moveaxis(numbers[..., rank, :4], -1, 0)), numbers[..., rank, 4])
        for rank in range(5)
    )
    return first[0], inner, last[0]


@cache
def _balanced_layers(
    timer: PipelineTimer, ranks: int, chunks: int, fold: bool, mirror: bool
) -> tuple[tuple[float, ...], ...]:
    num_stages = ranks * chunks
    folded = fold and num_stages <= timer.shape.layers
    spans = timer.spans(min(num_stages, timer.shape.layers), folded)
    return _layers_of_ranks(timer.shape, spans, ranks, fold, mirror)


def _layers_of_ranks(
    shape: Shape, spans: Sequence[range], ranks: int, fold: bool, mirror: bool
) -> tuple[tuple[float, ...], ...]:
    """The numbers of `RankLayers` and the position of the first rank, of the second, the largest
    and the latest inner one, and of the last. The latest is in the middle if two directions meet.
    """
    by_rank: list[list[range]] = [[] for _ in range(ranks)]
    for number, span in enumerate(spans):
        turn, rank = divmod(number, ranks)
        by_rank[ranks - 1 - rank if fold and turn % 2 else rank].append(span)
        if mirror:
            by_rank[ranks - 1 - rank].append(span)
    share = 2 if mirror and ranks > 1 else 1
    numbers = [
        (*(count / share for count in count_layers(shape, chain(*own_spans))), float(index))
        for index, own_spans in enumerate(by_rank)
    ]
    inner = numbers[1:-1] or numbers[:1]
    latest = inner[len(inner) // 2 if mirror else -1]
    return numbers[0], inner[0], max(inner, key=lambda row: row[:2]), latest, numbers[-1]


def _even(shape: Shape, grid: LayoutGrid) -> tuple[RankLayers, RankLayers]:
    """Equal numbers of layers, and fewer on the last rank if they do not divide."""
    layers, pp, chunks = float(shape.layers), grid.pp, grid.chunks
    most = np.minimum(chunks * np.ceil(layers / (pp * chunks)), layers)
    fewer = np.where(most * pp > layers, np.maximum(most - 1, 1.0), most)
    last = np.where(folded(grid) | mirrored(grid), most, fewer)
    return _with_routed(shape, grid, most), _with_routed(shape, grid, last)


def _short_ends(shape: Shape, grid: LayoutGrid) -> list[RankLayers]:
    """One layer less on the first rank, for the embedding, and on the last, for the head."""
    layers, pp, chunks = float(shape.layers), grid.pp, grid.chunks
    share = chunks * np.ceil((layers + 2) / (pp * chunks))
    inner = np.minimum(share, layers)
    first = np.where(pp > 1, np.minimum(share - 1, layers), layers)
    left = layers - first - (pp - 2) * inner
    last = np.where(pp > 1, np.clip(left, 1.0, first), layers)
    return [_with_routed(shape, grid, count) for count in (first, inner, last)]


def _greedy(shape: Shape, grid: LayoutGrid) -> tuple[RankLayers, RankLayers, Array]:
    """Greedy: layers go to a stage until it has its share of the parameters of matrices. The head
    counts as the last layer; the third result is the position of its stage."""
    layers, layer = float(shape.layers), layer_parameters(shape, 0)
    head = shape.vocab * shape.width / (layer.total - layer.norms)
    fair = (layers + head) / grid.pp
    last_rank = np.minimum(grid.pp - 1, np.floor(layers / fair))
    first, last = np.minimum(np.ceil(fair), layers), layers - np.ceil(last_rank * fair)
    return _with_routed(shape, grid, first), _with_routed(shape, grid, last), last_rank


def _with_routed(shape: Shape, grid: LayoutGrid, layers: Array) -> RankLayers:
    """With the layers that have experts; in a pipeline, those of a rank after the first dense
    layers. Those without attention are an even share."""
    recurrent = layers * sum(map(shape.is_recurrent, range(shape.layers))) / shape.layers
    if shape.moe is None:
        return RankLayers(layers, np.zeros(1), recurrent, np.zeros(1))
    number = float(shape.num_moe_layers)
    share = number / (shape.layers - shape.moe.first_dense)
    routed = np.where(grid.pp == 1, number, np.minimum(layers * share, number))
    return RankLayers(layers, routed, recurrent, recurrent * routed / layers)


def in_flight(
    grid: LayoutGrid, end: PipelineEnd, hop_forwards: int = 2, rank: Array | float = 1.0
) -> Array:
    """Microbatches whose activations a rank keeps at most; inner: any that is not at an end, the
    second one or another `rank`.

    `hop_forwards`: what interleaved 1F1B runs ahead for each hop to the last rank.
    """
    num_microbatches, position = np.zeros(1), _position(grid, end, hop_forwards, rank)
    for family, mask in _families(grid):
        num_microbatches = np.where(mask, family.in_flight(position), num_microbatches)
    return np.where(grid.pp > 1, np.minimum(grid.microbatches, num_microbatches), 1.0)


def deferred(grid: LayoutGrid, end: PipelineEnd, rank: Array | float = 1.0) -> HeldMoments:
    """What a rank holds at each moment that may be its peak while weight gradients wait. Schedules
    share the moments: one after another they would be as many arrays."""
    totals, position = list[HeldMicrobatches](), _position(grid, end, 2, rank)
    for family, mask in _families(grid):
        moments = zip_longest(totals, family.deferred(position), fillvalue=_NOTHING_HELD)
        totals = [
            HeldMicrobatches(
                *(
                    np.where(mask & (grid.pp > 1), number, before)
                    for before, number in zip(counts, new_counts, strict=True)
                )
            )
            for counts, new_counts in moments
        ]
    return tuple(totals)


def _position(
    grid: LayoutGrid, end: PipelineEnd, hop_forwards: int, rank: Array | float
) -> RankPosition:
    pp = grid.pp
    depth = {"first": pp, "inner": pp - rank, "last": np.ones_like(pp)}[end]
    numbers = (pp, grid.microbatches, grid.chunks, depth)
    return RankPosition(*numbers, hop_forwards)


def mirrored(grid: LayoutGrid) -> Flags:
    """Whether both directions of a pipeline have every weight: a rank is at both of its ends."""
    return _has(grid, lambda family: family.placement == "bidirectional")


def folded(grid: LayoutGrid) -> Flags:
    """Whether the first rank has the last stage too."""
    return _has(grid, lambda family: family.placement == "V")


def looped(grid: LayoutGrid) -> Flags:
    """Whether the ranks are passed in the same order for every chunk."""
    return _has(grid, lambda family: family.placement == "loop")


def backward_by_chunk(grid: LayoutGrid) -> Flags:
    """Whether the backwards of a chunk end before those of the chunk before it begin: those of all
    microbatches, or of a round that has all of them."""
    in_rounds = looped(grid) & (grid.microbatches <= grid.pp)
    one_by_one = holds_all_microbatches(grid) | in_rounds
    return one_by_one & (grid.chunks > 1)


def holds_all_microbatches(grid: LayoutGrid) -> Flags:
    """Whether the losses of all microbatches wait for their backward."""
    return _has(grid, lambda family: family.forwards_first)


def _has(grid: LayoutGrid, fact: Callable[[Family], bool]) -> Flags:
    """Which pipelines have a schedule with this property."""
    facts = np.array([fact(family) for family in FAMILIES])
    return facts[grid.schedule.astype(np.int64)] & (grid.pp > 1)


def _families(grid: LayoutGrid) -> Iterator[tuple[Family, Flags]]:
    """The schedules of the grid, each with where it is."""
    for number in sorted(set(grid.schedule.ravel().tolist())):
        yield FAMILIES[int(number)], grid.schedule == number

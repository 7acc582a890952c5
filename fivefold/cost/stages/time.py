"""Seconds of the pipeline of many layouts at once, by its longest paths or by simulation.

Costs are those of one layer of each kind and of the head (forward, input gradient, weight gradient)
and of one message. Which paths can be the longest depends on the model and the schedule alone, and
is computed once (`longest_paths`). The simulation (`schedule_trace`) gives the same as the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from fivefold.core.layout import splits
from fivefold.core.model import Shape, forward_flops, layer_flops, layer_kinds
from fivefold.core.schedule import AUTO, family, named
from fivefold.cost import SCHEDULES, Array, Flags, LayoutGrid
from fivefold.cost.stages.longest_paths import PATHS, ScheduleSize, StageRows, longest
from fivefold.cost.stages.schedule_trace import StageSeconds, is_long, schedule_makespans

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
        if pp == 1 or name == AUTO or family(name).asynchronous:
            return least
        numbers = (pp, microbatches, chunks)
        different, back = np.unique(costs, axis=1, return_inverse=True)
        rows = self._default_stages(pp * chunks, family(name).placement == "V")
        kinds = (rows.forward, rows.inputs, rows.weights)
        stages = StageSeconds(*(kind @ different for kind in kinds), lag=rows.lag @ different)
        seconds = schedule_makespans(family(name).name, numbers, stages)
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
    return pp > 1 and name != AUTO and bool(family(name).problems(pp, microbatches, chunks))


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

"""Seconds of one optimizer step, part by part, for every layout of a grid.

A step is the time of the pipeline, the part of the data axis that is not hidden, and the optimizer.
Stages of fivefold are timed by the longest paths through the pipeline, or by simulation; those of
other stacks by closed forms for equal stages. Tests check both against the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fivefold.core import Machine
from fivefold.core.model import Shape, layer_kinds, layer_parameters
from fivefold.core.schedule import PipelineTimes
from fivefold.cost import Array, Flags, LayoutGrid
from fivefold.cost.hardware import SoftwareStack
from fivefold.cost.layer import HostSeconds, LayerTimer, LayerTimes, TimeParts, total_seconds
from fivefold.cost.stages import bubble_seconds, mirrored, pipeline_seconds, pipeline_timer
from fivefold.cost.step.activation_offload import activation_offload_seconds
from fivefold.cost.step.data_time import data_seconds, flat_units
from fivefold.cost.step.update_time import update_seconds, weight_rounding
from fivefold.cost.traffic import Spans

# How sharply the longer of host and GPU decides: 1 would be their sum. Chosen with vTrain's runs.
_CORNER = 4
PassCosts = tuple[list[Array], list[Array], list[Array]]
Selection = Callable[[Array], Flags]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of each layout: inside the pipeline, and around it. `parts` sum to both and
    are computed on first use."""

    inside: Array
    around: Array
    make_parts: Callable[[], TimeParts]

    @cached_property
    def step(self) -> Array:
        return self.inside + self.around

    @cached_property
    def parts(self) -> TimeParts:
        return self.make_parts()

    @property
    def bubble(self) -> Array:
        """Share of the step in which pipeline ranks wait."""
        return self.parts["bubble"] / self.step


def step_time(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
    *,
    simulated: bool = False,
    selection: Selection | None = None,
    passes: PassCosts | None = None,
) -> StepTime:
    """Time every layout of the grid; `imbalance`: slots of the fullest expert over the mean.

    Pipelines are timed by their longest paths, a lower bound, or `simulated`, which takes longer.
    In a block of a search, `selection`: with which microbatch sizes and schedules, by the seconds
    around the pipeline; `passes`: seconds of its layers, where they are known.
    """
    work = LayerTimer(shape, machine, stack, grid, seq, precision, imbalance)
    if stack.memory.split == "balanced":
        return _by_longest_paths(work, simulated, selection, passes)
    parts = {name: seconds * stack.factor for name, seconds in _equal_stages(work).items()}
    parts["fixed"] = np.full_like(grid.microbatches, stack.fixed)
    return StepTime(total_seconds(parts), 0.0 * grid.tp, lambda: parts)


def _by_longest_paths(
    work: LayerTimer, simulated: bool, selector: Selection | None, passes: PassCosts | None
) -> StepTime:
    """Stages as fivefold splits them, and the longest paths through them."""
    grid, stack, timer = work.grid, work.stack, pipeline_timer(work.shape, work.seq)
    costs = _passes(_units(work)) if passes is None else passes
    every = [*(cost for column in costs for cost in column), work.message()]
    around = _around_pipeline(work, costs)
    outside = total_seconds(around) * stack.factor + stack.fixed
    # The paths of a schedule take longest to find.
    which = None if selector is None else selector(outside)
    seconds = pipeline_seconds(timer, grid, every, simulated, which)

    def parts() -> TimeParts:
        """What the average rank does; it waits for the rest of the pipeline's time."""
        share = grid.microbatches / grid.pp
        times: TimeParts = {}
        for count, unit in zip((*timer.counts, 1), _units(work), strict=True):
            for name, part_seconds in _joined(unit).items():
                times[name] = times.get(name, np.zeros(1)) + share * count * part_seconds
        waits = np.maximum(seconds - total_seconds(times), 0.0)
        times["pp"] = np.minimum(waits, 2 * (grid.pp - 1) * work.message())
        times["bubble"] = waits - times["pp"]
        for name, part_seconds in around.items():
            times[name] = times.get(name, np.zeros(1)) + part_seconds
        scaled = {name: value * stack.factor for name, value in times.items()}
        return {**scaled, "fixed": np.full_like(grid.microbatches, stack.fixed)}

    return StepTime(seconds * stack.factor, outside, parts)


def _around_pipeline(work: LayerTimer, costs: PassCosts, stages: Spans | None = None) -> TimeParts:
    """Collectives of the data axis that compute does not hide, and the update."""
    units = flat_units(work, stages)
    owned = None if units is None else units.owned
    seconds = data_seconds(work, units, *_windows(work, costs))
    return {"dp": seconds, **update_seconds(work, owned), **weight_rounding(work)}


def _windows(work: LayerTimer, costs: PassCosts) -> tuple[Array, Array]:
    """Seconds of a microbatch on the average rank: of its backward, and of all passes."""
    forward, inputs, weights = costs
    window, body = np.zeros(1), np.zeros(1)
    for index, count in enumerate(pipeline_timer(work.shape, work.seq).counts):
        window = window + count * (inputs[index] + weights[index])
        body = body + count * forward[index]
    return window / work.grid.pp, (body + window) / work.grid.pp


def around_parts(work: LayerTimer, stages: Spans | None = None) -> TimeParts:
    """The parts of a step that are not inside its pipeline, whose stages may be given."""
    stack, kinds = work.stack, pipeline_timer(work.shape, work.seq).kinds
    costs = _passes([launch_bound_layer(work, i) for i in kinds])
    if stack.memory.split == "balanced":
        parts = _around_pipeline(work, costs, stages)
    else:
        parts = _around_equal_stages(work, *_windows(work, costs))
    scaled = {name: seconds * stack.factor for name, seconds in parts.items()}
    return {**scaled, "fixed": np.full_like(work.grid.microbatches, stack.fixed)}


def _passes(units: list[LayerTimes]) -> PassCosts:
    """Seconds of each layer kind and the head: forward, input gradient with recomputation, and
    weight gradient."""
    return (
        [total_seconds(unit.forward) for unit in units],
        [total_seconds(unit.inputs) + total_seconds(unit.again) for unit in units],
        [total_seconds(unit.weights) for unit in units],
    )


def _units(work: LayerTimer) -> list[LayerTimes]:
    """Each kind of layer, and the head."""
    kinds = pipeline_timer(work.shape, work.seq).kinds
    return [*(launch_bound_layer(work, i) for i in kinds), work.head()]


def path_costs(work: LayerTimer) -> list[Array]:
    """Costs in the order of a path's row: each kind of layer and the head in three passes, and a
    message."""
    return [*(cost for column in _passes(_units(work)) for cost in column), work.message()]


def layer_passes(work: LayerTimer) -> PassCosts:
    """Seconds of each kind of layer and the head, if no GPU waits for its host."""
    kinds = pipeline_timer(work.shape, work.seq).kinds
    return _passes([*map(work.layer, kinds), work.head()])


def head_passes(work: LayerTimer) -> list[Array]:
    """Seconds of the head: forward, input gradient and weight gradient."""
    return [passes[0] for passes in _passes([work.head()])]


def with_host(
    costs: PassCosts, hosts: list[HostSeconds], defers: Flags, *, is_cpu: bool
) -> PassCosts:
    """The same with what each kind of layer waits for its host."""
    forward, inputs, weights = map(list, costs)
    for index, host in enumerate(hosts):
        waits = _host_waits(
            (forward[index], inputs[index], weights[index]), host, defers, is_cpu=is_cpu
        )
        for passes, wait in zip((forward, inputs, weights), waits, strict=True):
            passes[index] = passes[index] + wait
    return forward, inputs, weights


def launch_bound_layer(work: LayerTimer, i: int, apart: Collection[str] = ()) -> LayerTimes:
    """Layer i, with the time that its GPU waits for the host if that is slower; without the parts
    named in `apart`."""
    layer = work.scheduled_layer(i)
    if apart:
        kinds = (layer.forward, layer.inputs, layer.weights, layer.again)
        layer = LayerTimes(*(_without(apart, kind_parts) for kind_parts in kinds))
    if not work.stack.launch:
        return layer
    inputs = total_seconds(layer.inputs) + total_seconds(layer.again)
    busy = total_seconds(layer.forward), inputs, total_seconds(layer.weights)
    host = work.of_layer(i).host_seconds(routed=work.shape.is_moe_layer(i))
    waits = _host_waits(busy, host, work.grid.defers, is_cpu=work.machine.is_cpu)
    passes = {"forward": layer.forward, "inputs": layer.inputs, "weights": layer.weights}
    return replace(
        layer,
        **{
            name: {**parts, "launch": parts.get("launch", 0.0) + wait}
            for (name, parts), wait in zip(passes.items(), waits, strict=True)
        },
    )


def _host_waits(
    busy: tuple[Array, Array, Array], host: HostSeconds, defers: Flags, *, is_cpu: bool
) -> tuple[Array, Array, Array]:
    """Seconds that a GPU waits for its host in a layer's forward, input gradient and weight
    gradient, which take so many seconds without it.

    A pass takes the longer of GPU and host, so that no pass is longer on a faster GPU: what
    overlaps with it, or waits for it in a pipeline, would be exposed by that. A backward with its
    weight gradients is one pass. A CPU is its own host: it takes the sum.
    """
    forward, inputs, weights = (0.0 * seconds for seconds in busy) if is_cpu else busy
    joined = np.maximum(host.backward - inputs - weights, 0.0)
    return (
        np.maximum(host.forward - forward, 0.0),
        np.where(defers, np.maximum(host.backward / 2 - inputs, 0.0), joined),
        np.where(defers, np.maximum(host.backward / 2 - weights, 0.0), 0.0),
    )


def _without(apart: Collection[str], parts: TimeParts) -> TimeParts:
    return {name: seconds for name, seconds in parts.items() if name not in apart}


def _equal_stages(work: LayerTimer) -> TimeParts:
    """Stages as other stacks split them, and bubbles of equal stages."""
    grid, shape = work.grid, work.shape
    body, head = _all_layers(work), work.head()
    most, last = _stage_sizes(work)
    # In both directions of a mirrored pipeline, the ranks at its ends share its last stage.
    shared = np.where(mirrored(grid), 0.5, 1.0)
    last = shared * last + (1 - shared) * most
    layers = _joined(body)
    ends = {name: shared * seconds for name, seconds in _joined(head).items()}
    middle = _launch_bound(work, most, most * total_seconds(layers) / shape.layers)
    end = _launch_bound(
        work, last, last * total_seconds(layers) / shape.layers + total_seconds(ends)
    )
    slowest = np.maximum(middle, end)
    # Every microbatch passes the slowest stage, whose busy time is split into parts.
    at_end = end >= middle
    num_layers = np.where(at_end, last, most) / shape.layers
    m = grid.microbatches
    parts = {name: m * num_layers * layer_seconds for name, layer_seconds in layers.items()}
    for name, end_seconds in ends.items():
        parts[name] = parts.get(name, np.zeros(1)) + m * np.where(at_end, end_seconds, 0.0)
    parts["launch"] = parts.get("launch", np.zeros(1)) + m * slowest - total_seconds(parts)
    total = _launch_bound(
        work, np.full_like(m, float(shape.layers)), total_seconds(layers) + total_seconds(ends)
    )
    parts["bubble"] = _bubble(work, body, total - slowest)
    parts["pp"] = _messages(work)
    # Collectives also overlap with a host that is slower than its GPU. All that a microbatch waits
    # for it is in backward here: a window that shrinks where the step does not would expose more.
    compute = _launch_bound(work, shape.layers / grid.pp, total_seconds(layers) / grid.pp)
    window = compute - (total_seconds(body.forward) + total_seconds(body.again)) / grid.pp
    return parts | _around_equal_stages(work, window, compute)


def _around_equal_stages(work: LayerTimer, window: Array, compute: Array) -> TimeParts:
    """Data axis, update and offload of another stack, beside so many seconds of a backward and of
    all passes of a microbatch."""
    updates = {"offload": np.zeros(1), **update_seconds(work)}
    away = activation_offload_seconds(work, work.grid.microbatches * compute)
    updates["offload"] = updates["offload"] + away
    return {"dp": data_seconds(work, None, window, compute), **updates}


def _all_layers(work: LayerTimer) -> LayerTimes:
    """All layers of the model together."""
    times = LayerTimes({}, {}, {}, {})
    last = work.shape.layer_kind(work.shape.layers - 1)
    for i, count in layer_kinds(work.shape).items():
        extra = work.shape.mtp if work.shape.layer_kind(i) == last else 0
        layer = work.layer(i)
        for kind in ("forward", "inputs", "weights", "again"):
            own_parts = getattr(times, kind)
            for name, seconds in getattr(layer, kind).items():
                own_parts[name] = own_parts.get(name, np.zeros(1)) + (count + extra) * seconds
    return times


def _joined(times: LayerTimes) -> TimeParts:
    """Forward, backward and recomputation of one microbatch together."""
    parts: TimeParts = {}
    for kind in (times.forward, times.inputs, times.weights, times.again):
        for name, seconds in kind.items():
            parts[name] = parts.get(name, np.zeros(1)) + seconds
    return parts


def _stage_sizes(work: LayerTimer) -> tuple[Array, Array]:
    """Layers of the largest stage without the head, and of the stage with it."""
    layers, pp = float(work.shape.layers), work.grid.pp
    if not work.stack.split_by_parameters:
        most = np.ceil(layers / pp)
        return most, np.where(most * pp > layers, most - 1, most)
    # The head counts as many layers as it has parameters.
    head = work.shape.vocab * work.shape.width / layer_parameters(work.shape, 0).total
    fair = (layers + head) / pp
    most = np.where(pp > 1, np.minimum(np.floor(fair) + 1, layers), 0.0)
    before = np.floor((pp - 1) * fair) + 1
    return most, np.where(pp > 1, np.maximum(layers - before, 0.0), layers)


def _launch_bound(work: LayerTimer, layers: Array, seconds: Array) -> Array:
    """Seconds of one microbatch in so many layers: those of the GPU, or of the host if longer.

    If both are alike, it takes longer than either: some kernels wait for the host, others do not.
    """
    if not work.stack.launch:
        return seconds
    host = layers * work.host_seconds().total
    if work.machine.is_cpu:
        return seconds + host
    return (seconds**_CORNER + host**_CORNER) ** (1 / _CORNER)


def _bubble(work: LayerTimer, body: LayerTimes, extra_seconds: Array) -> Array:
    """Seconds that pipeline ranks wait in a step."""
    grid, pp = work.grid, work.grid.pp
    inputs = total_seconds(body.inputs) + total_seconds(body.again)
    seconds = (
        total_seconds(body.forward) / pp,
        inputs / pp,
        total_seconds(body.weights) / pp,
        extra_seconds,
    )
    times = PipelineTimes(pp, grid.microbatches, grid.chunks, *seconds, work.stack.late_norm_check)
    return bubble_seconds(times, grid)


def _messages(work: LayerTimer) -> Array:
    """Pipeline messages that are not hidden: those of fill and drain, or all of them."""
    grid, stack = work.grid, work.stack
    shown = 2 * (grid.pp - 1)
    num_messages = 2 * grid.microbatches * grid.chunks
    if not stack.transfers_hidden:
        shown = shown + num_messages
    seconds = shown * work.message()
    if stack.message_launch:
        # A stage inside the pipeline has two neighbours.
        seconds = seconds + num_messages * stack.message_launch * np.minimum(grid.pp - 1, 2)
    return np.where(grid.pp > 1, seconds, 0.0)

"""Seconds of one optimizer step, part by part, by closed forms that the clock holds in check."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fivefold.core.count import layer_kinds, layer_parameters
from fivefold.core.machine import Machine
from fivefold.core.schedule.family import PipelineTimes
from fivefold.core.shape import Shape
from fivefold.cost.grid import OFFLOADS, Array, LayoutGrid
from fivefold.cost.layer_time import LayerTimer, LayerTimes, TimeParts, total_seconds
from fivefold.cost.pipeline_ranks import bubble_seconds
from fivefold.cost.pipeline_time import pipeline_seconds, pipeline_timer
from fivefold.cost.stack import SoftwareStack, memory_of_stack

# Share of a hidden collective that what hides it is slowed by: reported for NVLink.
OVERLAP_SLOWDOWN = 0.15
# Host seconds of a backward over those of a forward: assumed.
HOST_BACKWARD = 1.0
# Bytes a second at which one GPU's share of the host updates offloaded states: assumed.
HOST_BANDWIDTH = 50e9
# Bytes of an element that an update reads from disk and writes back: master weight and two moments.
STATE_BYTES = 2 * 12


@dataclass(frozen=True)
class StepTime:
    """A step of each layout; its parts, which sum to it, are made when they are asked for."""

    step: Array
    make_parts: Callable[[], TimeParts]

    @cached_property
    def parts(self) -> TimeParts:
        return self.make_parts()

    @property
    def bubble(self) -> Array:
        """The share of the step in which pipeline ranks wait."""
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
    played: bool = False,
) -> StepTime:
    """Time every layout of the grid; `imbalance`: slots of the fullest expert over the mean.

    Pipelines are timed by bounds from below, or `played` by the clock, which takes its time.
    """
    work = LayerTimer(shape, machine, stack, grid, seq, precision, imbalance)
    if memory_of_stack(stack.name).split == "balanced":
        return _by_paths(work, played)
    parts = {name: each * stack.factor for name, each in _evenly(work).items()}
    parts["fixed"] = np.full_like(grid.microbatches, stack.fixed)
    return StepTime(total_seconds(parts), lambda: parts)


def _by_paths(work: LayerTimer, played: bool) -> StepTime:
    """Stages as this runtime cuts them, and the longest paths through them."""
    grid, stack, dealt = work.grid, work.stack, pipeline_timer(work.shape, work.seq)
    units = [*(launch_bound_layer(work, i) for i in dealt.kinds), work.head()]
    forward, inputs, weights = _passes(units)
    seconds = pipeline_seconds(dealt, grid, [*forward, *inputs, *weights, work.message()], played)
    counts = dealt.counts
    window, body = np.zeros(1), np.zeros(1)
    for place, count in enumerate(counts):
        window = window + count * (inputs[place] + weights[place])
        body = body + count * forward[place]
    body = body + window
    around = {"dp": _data(work, window / grid.pp, body / grid.pp), **_update(work)}
    step = (seconds + total_seconds(around)) * stack.factor + stack.fixed

    def parts() -> TimeParts:
        """What the average rank does; the rest of the pipeline's time it waits."""
        share = grid.microbatches / grid.pp
        found: TimeParts = {}
        for count, unit in zip((*counts, 1), units, strict=True):
            for name, each in _joined(unit).items():
                found[name] = found.get(name, np.zeros(1)) + share * count * each
        waits = np.maximum(seconds - total_seconds(found), 0.0)
        found["pp"] = np.minimum(waits, 2 * (grid.pp - 1) * work.message())
        found["bubble"] = waits - found["pp"]
        scaled = {name: each * stack.factor for name, each in (found | around).items()}
        return {**scaled, "fixed": np.full_like(grid.microbatches, stack.fixed)}

    return StepTime(step, parts)


def _passes(units: list[LayerTimes]) -> tuple[list[Array], list[Array], list[Array]]:
    """Seconds of each unit: forward, gradients of inputs with what runs again, and of weights."""
    return (
        [total_seconds(each.forward) for each in units],
        [total_seconds(each.inputs) + total_seconds(each.again) for each in units],
        [total_seconds(each.weights) for each in units],
    )


def path_costs(work: LayerTimer) -> list[Array]:
    """What stands on a path: each kind of layer and the head in three passes, and a message."""
    kinds = pipeline_timer(work.shape, work.seq).kinds
    units = [*(launch_bound_layer(work, i) for i in kinds), work.head()]
    return [*(each for column in _passes(units) for each in column), work.message()]


def launch_bound_layer(work: LayerTimer, i: int, apart: Collection[str] = ()) -> LayerTimes:
    """Layer i with what its GPU waits for the host, if that is slower; without the parts named."""
    layer = work.layer(i)
    if apart:
        kinds = (layer.forward, layer.inputs, layer.weights, layer.again)
        layer = LayerTimes(*(_without(apart, each) for each in kinds))
    if not work.stack.launch:
        return layer
    short = np.maximum(_host(work, work.shape.is_moe_layer(i)) - total_seconds(_joined(layer)), 0.0)
    forward = {**layer.forward, "launch": layer.forward.get("launch", 0.0) + short / 2}
    inputs = {**layer.inputs, "launch": layer.inputs.get("launch", 0.0) + short / 2}
    return replace(layer, forward=forward, inputs=inputs)


def _without(apart: Collection[str], parts: TimeParts) -> TimeParts:
    return {name: each for name, each in parts.items() if name not in apart}


def _evenly(work: LayerTimer) -> TimeParts:
    """Stages as other stacks cut them, and bubbles of equal stages."""
    grid, shape = work.grid, work.shape
    body, head = _body(work), work.head()
    layers, ends = _joined(body), _joined(head)
    most, last = _stages(work)
    middle = _floored(work, most, most * total_seconds(layers) / shape.layers)
    end = _floored(work, last, last * total_seconds(layers) / shape.layers + total_seconds(ends))
    slowest = np.maximum(middle, end)
    # Every microbatch passes the slowest stage; its parts are told as far as they are busy.
    at_end = end >= middle
    held_layers = np.where(at_end, last, most) / shape.layers
    m = grid.microbatches
    parts = {name: m * held_layers * each for name, each in layers.items()}
    for name, each in ends.items():
        parts[name] = parts.get(name, np.zeros(1)) + m * np.where(at_end, each, 0.0)
    parts["launch"] = parts.get("launch", np.zeros(1)) + m * slowest - total_seconds(parts)
    whole = _floored(
        work, np.full_like(m, float(shape.layers)), total_seconds(layers) + total_seconds(ends)
    )
    parts["bubble"] = _bubble(work, body, whole - slowest)
    parts["pp"] = _messages(work)
    window = (total_seconds(body.inputs) + total_seconds(body.weights)) / grid.pp
    parts["dp"] = _data(work, window, total_seconds(layers) / grid.pp)
    return parts | _update(work)


def least_layer_seconds(work: LayerTimer) -> Array:
    """Seconds that the layers of a step take at least, with nothing around them."""
    layers = np.zeros(1)
    for i, count in layer_kinds(work.shape).items():
        layers = layers + count * total_seconds(_joined(work.layer(i)))
    return layers * work.grid.microbatches / work.grid.pp * work.stack.factor


def _body(work: LayerTimer) -> LayerTimes:
    """All layers of the model together."""
    found = LayerTimes({}, {}, {}, {})
    kinds = layer_kinds(work.shape)
    for i, count in kinds.items():
        extra = work.shape.mtp if i == max(kinds) else 0
        layer = work.layer(i)
        for kind in ("forward", "inputs", "weights", "again"):
            mine = getattr(found, kind)
            for name, each in getattr(layer, kind).items():
                mine[name] = mine.get(name, np.zeros(1)) + (count + extra) * each
    return found


def _joined(times: LayerTimes) -> TimeParts:
    """Forward and backward of one microbatch."""
    found: TimeParts = {}
    for kind in (times.forward, times.inputs, times.weights, times.again):
        for name, each in kind.items():
            found[name] = found.get(name, np.zeros(1)) + each
    return found


def _stages(work: LayerTimer) -> tuple[Array, Array]:
    """Layers of the fullest stage without the head, and of the stage with it."""
    layers, pp = float(work.shape.layers), work.grid.pp
    if not work.stack.by_cost:
        most = np.ceil(layers / pp)
        return most, np.where(most * pp > layers, most - 1, most)
    # The head weighs as many layers as have its parameters.
    head = work.shape.vocab * work.shape.width / layer_parameters(work.shape, 0).total
    fair = (layers + head) / pp
    most = np.where(pp > 1, np.minimum(np.floor(fair) + 1, layers), 0.0)
    before = np.floor((pp - 1) * fair) + 1
    return most, np.where(pp > 1, np.maximum(layers - before, 0.0), layers)


def _floored(work: LayerTimer, layers: Array, seconds: Array) -> Array:
    """Seconds of one microbatch through so many layers: the GPU's or the host's, if longer."""
    return np.maximum(seconds, layers * _host(work)) if work.stack.launch else seconds


def _host(work: LayerTimer, routed: bool = False) -> Array:
    """Host seconds of a layer, forward and backward."""
    stack = work.stack
    launch = np.full_like(work.grid.ep, stack.launch)
    if routed and stack.expert_launch:
        launch = stack.expert_launch + np.where(work.grid.ep > 1, stack.travel_launch, 0.0)
    once = launch * (1 + stack.lag * (work.grid.tp - 1))
    again = np.where(work.grid.recompute == 2, stack.recomputed, 0.0)
    once = once * (1 + HOST_BACKWARD + again)
    if stack.crowd:
        crossed = (work.grid.pp > 1) & (work.grid.world > work.machine.gpus_per_node)
        once = once + np.where(crossed, stack.crowd * work.grid.tp, 0.0)
    return once


def _bubble(work: LayerTimer, body: LayerTimes, others: Array) -> Array:
    """What pipeline ranks wait in a step."""
    grid, pp = work.grid, work.grid.pp
    inputs = total_seconds(body.inputs) + total_seconds(body.again)
    seconds = (
        total_seconds(body.forward) / pp,
        inputs / pp,
        total_seconds(body.weights) / pp,
        others,
    )
    times = PipelineTimes(pp, grid.microbatches, grid.chunks, *seconds, work.stack.late_check)
    return bubble_seconds(times, grid)


def _messages(work: LayerTimer) -> Array:
    """Pipeline messages that show: those of the fill, and all where nothing hides them."""
    grid, stack = work.grid, work.stack
    shown = 2 * (grid.pp - 1)
    both = 2 * grid.microbatches * grid.chunks
    if not stack.transfers_hidden:
        shown = shown + both
    seconds = shown * work.message()
    if stack.message:
        # A stage inside the pipeline has two neighbours.
        seconds = seconds + both * stack.message * np.minimum(grid.pp - 1, 2)
    return np.where(grid.pp > 1, seconds, 0.0)


def rank_parameters(shape: Shape, grid: LayoutGrid) -> tuple[Array, Array]:
    """Parameters of one rank: of dense weights, with an end of the model, and of experts."""
    dense, experts = 0, 0
    for i, count in layer_kinds(shape).items():
        layer = layer_parameters(shape, i)
        experts += count * layer.experts
        dense += count * (layer.total - layer.experts)
    ends = shape.vocab * shape.width
    on_end = np.where(grid.pp > 1, 1.0, 1.0 if shape.tied else 2.0)
    return (
        (dense / grid.pp + ends * on_end) / grid.tp,
        experts / (grid.pp * grid.ep * grid.etp),
    )


def _data(work: LayerTimer, window: Array, compute: Array) -> Array:
    """Gradients and weights over the data ranks, as far as they show.

    The sum of gradients hides behind the backward of the last microbatch, with ZeRO-2 behind every
    backward. ZeRO-3 gathers every layer twice a microbatch, or once a step in a pipeline, and
    scatters its gradients: what compute does not hide shows.
    """
    grid, stack, m = work.grid, work.stack, work.grid.microbatches
    sliced = (grid.zero >= 1) & (grid.shard * grid.cp > 1)
    # The first bucket of weights and the last of gradients have nothing to hide behind.
    layers = np.maximum(work.shape.layers / grid.pp, 1.0)
    grads, gathers, sums = _rings(work, 1.0)
    rounds = np.ceil(m / grid.pp) if stack.scatters_rounds else m
    times = np.where(grid.zero == 2, rounds, 1.0)
    once = np.where(sliced, times * grads + gathers, sums)
    if stack.gradients_hidden:
        once = _shown(once, times * window, once / (layers * times))
    third = (grid.zero == 3) & sliced
    if not third.any():
        return once
    grads, gathers, _ = _rings(work, layers * stack.gathers)
    # A pipeline of ours gathers once a step: its microbatches lie far apart.
    kept = (grid.pp > 1) & (memory_of_stack(stack.name).split == "balanced")
    every = np.where(kept, gathers + m * grads, m * (2 * gathers + grads))
    every = _shown(every, m * compute * stack.gathers_hidden, every / layers / m)
    return np.where(third, every, once)


def _rings(work: LayerTimer, pieces: Array | float) -> tuple[Array, Array, Array]:
    """Seconds to scatter all gradients of a rank once, to gather its weights, and to sum its
    gradients without ZeRO."""
    grid, stack, links = work.grid, work.stack, work.links
    dense, experts = rank_parameters(work.shape, grid)
    size, width = stack.gradient_bytes, work.itemsize
    shards = grid.shard * grid.cp
    how = (pieces, stack.flat)
    grads = links.ring(dense * size, shards, grid.tp, *how)
    # Where a switch does not add, a sum is a scatter and a gather of as many bytes.
    sums = links.all_reduce(dense * size, shards, grid.tp, *how) if links.reduces else 2 * grads
    # Replicas of a shard sum it among themselves.
    copied = links.all_reduce(dense * size / shards, grid.replicate, grid.tp * shards, *how)
    grads, sums = grads + copied, sums + copied
    gathers = links.ring(dense * width, shards, grid.tp, *how)
    if work.shape.moe is not None:
        stride = grid.ep * grid.etp
        scatter = links.ring(experts * size, grid.edp, stride, *how)
        whole = 2 * scatter
        if links.reduces:
            whole = links.all_reduce(experts * size, grid.edp, stride, *how)
        grads, sums = grads + scatter, sums + whole
        gathers = gathers + links.ring(experts * width, grid.edp, stride, *how)
    return grads, gathers, sums


def _shown(seconds: Array, window: Array, least: Array) -> Array:
    """Traffic behind a window of compute: what sticks out, and what it steals from compute."""
    shown = np.maximum(seconds - window, least)
    return shown + OVERLAP_SLOWDOWN * (seconds - shown)


def _update(work: LayerTimer) -> TimeParts:
    """The update of what a rank owns; offloaded, gradients go to the host and weights return."""
    grid, host = work.grid, work.machine.host
    dense, experts = rank_parameters(work.shape, grid)
    sliced = grid.zero >= 1
    owned = dense / np.where(sliced, grid.shard * grid.cp, 1.0)
    owned = owned + experts / np.where(sliced, grid.edp, 1.0)
    seconds = work.moved(owned * (work.stack.optimizer_bytes + work.stack.clip_bytes))
    if not grid.offload.any():
        return {"optimizer": seconds}
    wire = owned * (work.stack.gradient_bytes + work.itemsize) / host.link.bandwidth
    away = wire + owned * work.stack.optimizer_bytes / HOST_BANDWIDTH
    on_disk = grid.offload == OFFLOADS.index("nvme")
    if on_disk.any():
        # The GPUs of a node share its disks. While one layer is updated, the next is read and the
        # last one written; the first read and the last write have nothing to hide behind.
        bandwidth = work.machine.disk_bandwidth() / work.machine.gpus_per_node
        disk = owned * STATE_BYTES / bandwidth
        layers = np.maximum(work.shape.layers / grid.pp, 1.0)
        away = np.where(on_disk, np.maximum(away, disk) + disk / layers, away)
    return {
        "optimizer": np.where(grid.offload > 0, 0.0, seconds),
        "offload": np.where(grid.offload > 0, away, 0.0),
    }

"""Seconds of one optimizer step, part by part, for every layout of a grid.

A step is the time of the pipeline, the part of the data axis that is not hidden, and the optimizer.
Stages of fivefold are timed by the longest paths through the pipeline, or by simulation; those of
other stacks by closed forms for equal stages. Tests check both against the simulated schedule.

Seconds of saved activations that wait on the host: out after the forward, back for the backward.

Both ways overlap with compute, and the link to the host is full duplex: a steady step has as many
bytes on their way out as back. What is longer than the compute of a step shows.

Seconds of the optimizer's update on one rank, and how many parameters a rank has.

Seconds of the collectives around the pipeline: the data axes, sums of gradients that ranks of
other axes have too, and the totals of a step.

The collectives are those of a run (`data_axis`) for our own stack. Others gather layers and reduce
buckets, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fivefold.core import Machine, matmul_bytes
from fivefold.core.layout import by_name
from fivefold.core.model import Shape, layer_kinds, layer_parameters
from fivefold.core.schedule import PipelineTimes
from fivefold.cost import OFFLOADS, RECOMPUTE, Array, Flags, LayoutGrid
from fivefold.cost.hardware import SoftwareStack, num_buckets
from fivefold.cost.layer import (
    ROUNDED_SHARE,
    HostSeconds,
    LayerTimer,
    LayerTimes,
    TimeParts,
    expert_weight_bytes,
    total_seconds,
    trainable_share,
    weight_bytes,
)
from fivefold.cost.memory import Activations
from fivefold.cost.stages import bubble_seconds, mirrored, pipeline_seconds, pipeline_timer
from fivefold.cost.step.overlap import shown_seconds
from fivefold.cost.traffic import (
    DataCollective,
    DataJob,
    RankUnits,
    Spans,
    UnitGroup,
    UnitRules,
    layer_maxima,
    shared_collectives,
    step_totals,
    totals_bytes,
    unit_collectives,
    weight_maxima,
)


def activation_offload_seconds(work: LayerTimer, compute: Array) -> Array:
    """Exposed offload time of a step with `compute` seconds of compute."""
    grid, stack, shape = work.grid, work.stack, work.shape
    if not stack.memory.offloaded:
        return np.zeros(1)
    saved = Activations(shape, stack, stack.memory, grid, work.seq, work.itemsize, work.imbalance)
    size = np.zeros(1)
    for i, count in layer_kinds(shape).items():
        size = size + count * saved.of_layer(i).saved(shape.is_moe_layer(i))
    full = grid.recompute == RECOMPUTE.index("full")
    size = np.where(full, shape.layers * saved.inputs(), size)
    size = size * work.tokens * grid.microbatches / grid.pp * stack.memory.offloaded
    return shown_seconds(size / work.machine.host.link.bandwidth, compute)


# Bytes/s at which one GPU's share of the host updates offloaded states: assumed.
HOST_BANDWIDTH = 50e9
MASTER = 4  # bytes of a master weight
NEWTON_SCHULZ = 5  # steps of Muon


def rank_parameters(shape: Shape, grid: LayoutGrid) -> tuple[Array, Array]:
    """Parameters of one rank: dense ones with one end of the model, and those of experts."""
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


def weight_rounding(work: LayerTimer) -> TimeParts:
    """Weights that are rounded to fp8 in a step, with the maxima over ranks."""
    shape, grid, fp8 = work.shape, work.grid, work.stack.fp8
    if fp8 is None:
        return {}
    numel, linears, experts = np.zeros(1), np.zeros(1), np.zeros(1)
    for i, count in layer_kinds(shape).items():
        gemms = work.rounded_gemms(i)
        numel = numel + count * sum((gemm.outputs * gemm.inputs for gemm in gemms), np.zeros(1))
        maxima = layer_maxima(fp8, shape, shape.is_moe_layer(i), grid.ep)
        linears, experts = linears + count * maxima.linears, experts + count * maxima.experts
    share = fp8.share(shape.layers) / grid.pp
    seconds = work.moved(weight_bytes(fp8, work.stack, grid, work.itemsize) * numel * share)
    seconds = (seconds + _experts_rounding(work, share)) / ROUNDED_SHARE
    strides = {"fsdp": grid.tp, "edp": grid.ep * grid.etp}
    for collective in weight_maxima(grid, linears * share, experts * share):
        stride = strides.get(collective.axis, np.ones_like(grid.tp))
        seconds = seconds + collective.times * work.links.all_reduce(
            collective.bytes, collective.group, stride
        )
    return {"rounding": seconds}


def _experts_rounding(work: LayerTimer, share: Array | float) -> Array | float:
    """Seconds of the passes that round weights of routed experts, if kernels were as others are."""
    if work.stack.fp8 is None or not work.stack.fp8.experts or work.shape.moe is None:
        return 0.0
    kinds = layer_kinds(work.shape).items()
    numel = sum(count * layer_parameters(work.shape, i).experts for i, count in kinds)
    size = expert_weight_bytes(work.stack, work.grid, work.itemsize)
    return work.moved(size * numel * share / (work.grid.ep * work.grid.etp))


def update_seconds(work: LayerTimer, owned: Array | None = None) -> TimeParts:
    """The update of a rank's shards; with offload, gradients go to the host and weights come back.
    `owned`: elements of the shards, if they are known."""
    grid, host = work.grid, work.machine.host
    if owned is None:
        dense, experts = rank_parameters(work.shape, grid)
        sharded = grid.zero >= 1
        owned = dense / np.where(sharded, grid.shard * grid.cp, 1.0)
        owned = owned + experts / np.where(sharded, grid.edp, 1.0)
    owned = owned * trainable_share(work.shape, work.stack)
    seconds = work.moved(owned * (work.stack.optimizer_bytes + work.stack.clip_bytes))
    if work.stack.orthogonalizes:
        seconds = seconds + _orthogonal_updates(work)
    # Gradients leave after every microbatch and come back for the next, the norm and the update.
    moved = owned * work.stack.gradient_bytes * (2 * grid.microbatches + 1)
    gone = moved / host.link.bandwidth if work.stack.grads_home else np.zeros(1)
    if not grid.offload.any():
        return {"optimizer": seconds, **({"offload": gone} if work.stack.grads_home else {})}
    wire = owned * (work.stack.gradient_bytes + work.itemsize) / host.link.bandwidth
    away = wire + owned * work.stack.optimizer_bytes / HOST_BANDWIDTH
    on_disk = grid.offload == OFFLOADS.index("nvme")
    if on_disk.any():
        # The GPUs of a node share its disks. While one layer is updated, the next is read and the
        # previous one written; the first read and the last write overlap with nothing.
        bandwidth = work.machine.disk_bandwidth() / work.machine.gpus_per_node
        disk = owned * 2 * (MASTER + work.stack.memory.moment_bytes) / bandwidth
        layers = np.maximum(work.shape.layers / grid.pp, 1.0)
        away = np.where(on_disk, np.maximum(away, disk) + disk / layers, away)
    return {
        "optimizer": np.where(grid.offload > 0, 0.0, seconds),
        "offload": np.where(grid.offload > 0, away, 0.0) + gone,
    }


def _orthogonal_updates(work: LayerTimer) -> Array:
    """Muon: every rank gathers the flat units of which it owns a shard, and makes those matrices
    orthogonal of which it owns a part."""
    shape, grid, links = work.shape, work.grid, work.links
    seconds = np.zeros(1)
    for i, count in layer_kinds(shape).items():
        dense, experts = _newton_schulz_flops(shape, i)
        for flops, shards, ranks in (
            (dense, grid.shard * grid.cp, np.ones_like(grid.ep)),
            (experts, grid.edp, grid.ep),
        ):
            if not flops:
                continue
            num = len(flops) / ranks
            # A shard is a range of the unit: it begins and ends inside of matrices.
            part = np.where(grid.zero >= 1, np.minimum(1.0, 1 / shards + 1 / num), 1.0)
            seconds = seconds + count / grid.pp * part * sum(flops) / ranks / work.speed
    dense, experts = rank_parameters(shape, grid)
    width = work.itemsize * (grid.zero >= 1)
    moved = links.ring(dense * width, grid.shard * grid.cp, grid.tp)
    moved = moved + links.ring(dense * work.itemsize, grid.tp, np.ones_like(grid.tp))
    return seconds + moved + links.ring(experts * width, grid.edp, grid.ep * grid.etp)


def _newton_schulz_flops(shape: Shape, layer: int) -> tuple[list[float], list[float]]:
    """Of each matrix of a layer: those that all ranks have, and those of its experts."""
    matrix_flops: tuple[list[float], list[float]] = ([], [])
    for weight in by_name(shape).values():
        if weight.block != f"blocks.{layer}" or weight.role != "matrix":
            continue
        *stacked, rows, columns = weight.shape
        small, large = sorted((rows, columns))
        flops = NEWTON_SCHULZ * (4 * small**2 * large + 2 * small**3)
        expert = weight.expert
        matrix_flops[expert].extend([float(flops)] * (stacked[0] if stacked else 1))
    return matrix_flops


def flat_units(work: LayerTimer, stages: Spans | None = None) -> RankUnits | None:
    """The units of the first rank, as fivefold makes them; None for other stacks. `stages`: the
    layers of every stage, if they are given."""
    if not work.stack.runs_plans:
        return None
    rules = UnitRules(work.shape, work.itemsize, work.stack.unit_bytes, work.stack.fp8)
    return RankUnits(rules, work.grid, work.seq, stages)


def unit_groups(work: LayerTimer, units: RankUnits | None) -> list[UnitGroup]:
    """What a rank gathers and reduces."""
    if units is not None:
        return [*units.groups(work.stack.stays(work.grid))]
    return [*_layers_and_buckets(work)]


def _layers_and_buckets(work: LayerTimer) -> Iterator[UnitGroup]:
    """Of another stack: layers under ZeRO-3, buckets below it."""
    grid, stack, m = work.grid, work.stack, work.grid.microbatches
    layers, third = np.maximum(work.shape.layers / grid.pp, 1.0), grid.zero == 3
    parameters = rank_parameters(work.shape, grid)
    buckets = num_buckets(sum(parameters, np.zeros(1)) * work.itemsize, layers, stack.bucket_bytes)
    number = np.where(third, layers * stack.gathers, buckets)
    rounds = np.ceil(m / grid.pp) if stack.scatters_rounds else m
    times = np.where(stack.stays(grid), 1.0, 2 * m)
    for expert, size in enumerate(parameters):
        if expert and work.shape.moe is None:
            return
        reductions = np.where(third, np.where(grid.pp > 1, 1.0, m), rounds)
        yield UnitGroup(bool(expert), number, size, reductions, number * times, size * times)


def data_job(work: LayerTimer) -> DataJob:
    """What the data axes depend on, in arrays."""
    grid, stack = work.grid, work.stack
    learned = trainable_share(work.shape, stack)
    width = matmul_bytes(work.precision) if stack.narrow_gathers else work.itemsize
    return DataJob(
        zero=grid.zero,
        ranks=grid.dp * grid.cp,
        shards=grid.shard * grid.cp,
        replicas=grid.replicate,
        expert_ranks=grid.edp,
        itemsize=np.where(grid.zero == 3, width, width * learned),
        grad_itemsize=stack.gradient_bytes * learned,
    )


def data_seconds(work: LayerTimer, units: RankUnits | None, window: Array, compute: Array) -> Array:
    """Collectives of the data axis, as far as compute does not hide them: gradients in the backward
    of the last microbatch, under ZeRO-2 in every backward. ZeRO-3 gathers every layer twice per
    microbatch and reduce-scatters its gradients, or each once per step in a pipeline."""
    grid, stack, m = work.grid, work.stack, work.grid.microbatches
    shards = grid.shard * grid.cp
    sharded, groups = (grid.zero >= 1) & (shards > 1), unit_groups(work, units)
    job = data_job(work)
    issued = [collective for group in groups for collective in unit_collectives(job, group)]
    gathered = _seconds(
        work, (collective for collective in issued if collective.kind == "all_gather")
    )
    reduced = _seconds(
        work, (collective for collective in issued if collective.kind != "all_gather")
    )
    # The first unit of weights and the last of gradients overlap with nothing.
    number = np.maximum(work.shape.layers / grid.pp, 1.0)
    if units is not None:
        number = sum((group.number for group in groups), np.zeros(1))
    times = np.where(grid.zero == 2, groups[0].reductions, 1.0)
    once = reduced + gathered
    if stack.gradients_hidden:
        once = shown_seconds(once, times * window, once / (number * times))
    if stack.owner_wait:
        apart = work.links.domains(shards, grid.tp) > 1
        once = once + np.where(sharded & apart, stack.owner_wait * shards, 0.0)
    # Sums over other axes and totals, at the end of a step, when nothing is left to hide them.
    closing = np.zeros(1) if units is None else _seconds(work, closing_collectives(work, units))
    third = (grid.zero == 3) & sharded
    if not third.any():
        return once + closing
    hidden = gathered + reduced if stack.prefetch else reduced
    shown = shown_seconds(hidden, m * compute * stack.gathers_hidden, hidden / number / m)
    shown = shown if stack.prefetch else shown + gathered
    return np.where(third, shown, once) + closing


def _seconds(work: LayerTimer, issued: Iterable[DataCollective]) -> Array:
    """Seconds of these collectives one after another."""
    grid, links, flat = work.grid, work.links, work.stack.flat_rings
    shards, seconds = grid.shard * grid.cp, np.zeros(1)
    strides = dict.fromkeys(("fsdp", "dp-cp"), grid.tp) | dict.fromkeys(
        ("tp", "replica", "etp", "world"), 1
    )
    strides |= {"edp": grid.ep * grid.etp, "replicate": grid.tp * shards}
    strides |= {"twin": grid.tp * grid.cp * grid.dp * np.maximum(grid.pp - 1, 1)}
    for collective in issued:
        ranks, stride = (
            np.ones_like(grid.tp) * number
            for number in (collective.group, strides[collective.axis])
        )
        arguments = (ranks, stride, collective.times, flat)
        if collective.kind == "all_reduce":
            seconds = seconds + links.all_reduce(collective.bytes, *arguments)
        else:
            size = collective.bytes * (ranks if collective.kind == "all_gather" else 1.0)
            seconds = seconds + links.ring(size, *arguments)
    return seconds


def closing_collectives(work: LayerTimer, units: RankUnits) -> Iterator[DataCollective]:
    """What the first rank issues once a step beside the data axes."""
    grid, shape = work.grid, work.shape
    copies = np.maximum(1, grid.tp // shape.kv_heads)
    yield from shared_collectives(units.shared(), grid.tp, copies, work.itemsize)
    size = totals_bytes(shape, work.stack.balance)
    yield from step_totals(grid.dp * grid.cp, grid.world, size)


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

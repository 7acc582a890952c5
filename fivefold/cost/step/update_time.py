"""Seconds of the optimizer's update on one rank, and how many parameters a rank has."""

from __future__ import annotations

import numpy as np

from fivefold.core.layout import by_name
from fivefold.core.model import Shape, layer_kinds, layer_parameters
from fivefold.cost import OFFLOADS, Array, LayoutGrid
from fivefold.cost.layer import (
    ROUNDED_SHARE,
    LayerTimer,
    TimeParts,
    expert_weight_bytes,
    trainable_share,
    weight_bytes,
)
from fivefold.cost.traffic import layer_maxima, weight_maxima

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

"""Seconds of the collectives around the pipeline: the data axes, sums of gradients that ranks of
other axes have too, and the totals of a step.

The collectives are those of a run (`data_axis`) for our own stack. Others gather layers and reduce
buckets, by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fivefold.core import matmul_bytes
from fivefold.cost import Array
from fivefold.cost.hardware import num_buckets
from fivefold.cost.layer import LayerTimer, trainable_share
from fivefold.cost.step.overlap import shown_seconds
from fivefold.cost.step.update_time import rank_parameters
from fivefold.cost.traffic import (
    DataCollective,
    DataJob,
    RankUnits,
    Spans,
    UnitGroup,
    UnitRules,
    shared_collectives,
    step_totals,
    totals_bytes,
    unit_collectives,
)


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
    closing = np.zeros(1) if units is None else _closing_seconds(work, units)
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


def _closing_seconds(work: LayerTimer, units: RankUnits) -> Array:
    """Sums over other axes and totals, at the end of a step, when nothing is left to hide them."""
    return _seconds(work, closing_collectives(work, units))


def closing_collectives(work: LayerTimer, units: RankUnits) -> Iterator[DataCollective]:
    """What the first rank issues once a step beside the data axes."""
    grid, shape = work.grid, work.shape
    copies = np.maximum(1, grid.tp // shape.kv_heads)
    yield from shared_collectives(units.shared(), grid.tp, copies, work.itemsize)
    size = totals_bytes(shape, work.stack.balance)
    yield from step_totals(grid.dp * grid.cp, grid.world, size)

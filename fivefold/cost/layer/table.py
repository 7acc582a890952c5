"""Seconds of the layers of a job, timed once for all blocks of a search and for all its searches.

How long a layer takes depends on how it is sharded (tp, cp, ep, etp), on the microbatch size, on
recomputation, and on whether the schedule pairs forwards with backwards. It does not depend on dp,
ZeRO or the pipeline, but that a rank without a pipeline looks up the embedding beside the head. A
head computes its gradients in forward, in chunks, unless the schedule defers that of its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import Machine
from fivefold.core.model import Recompute, Shape
from fivefold.cost import DEFERS, FAMILIES, SCHEDULES, Array, LayoutGrid, along
from fivefold.cost.hardware import SoftwareStack
from fivefold.cost.layer.time import HostSeconds, LayerTimer, total_seconds
from fivefold.cost.stages import pipeline_timer
from fivefold.cost.step import PassCosts, head_passes, layer_passes, paired_share, with_host

_PLAIN = SCHEDULES.index("1f1b")
_PAIRS = np.array([family.pairs for family in FAMILIES], np.int64)
_Key = tuple[float, ...]


class LayersJob(NamedTuple):
    """What the seconds of layers depend on, beside their sharding."""

    shape: Shape
    machine: Machine
    stack: SoftwareStack
    seq: int
    precision: str
    imbalance: float
    sizes: tuple[int, ...]  # of microbatches
    rules: tuple[Recompute, ...]
    sp: bool


class LayerTable:
    """The layers of one model in one setting, for every sharding that a search has asked for.

    Arrays have the axes of a block. Along that of schedules are those without pairs and those in
    which every forward is in a pair.
    """

    def __init__(self, job: LayersJob) -> None:
        self.shape, self.machine, self.stack, self.seq = job[:4]
        self.precision, self.imbalance = job.precision, job.imbalance
        self.sizes, self.rules, self.sp = job.sizes, job.rules, job.sp
        self.counts = pipeline_timer(job.shape, job.seq).counts
        self._places: dict[_Key, int] = {}
        self._passes: list[Array] = []  # as in PassCosts, one pass after the other
        self._late: list[Array] = []  # the head's, in a schedule that defers weight gradients
        self._shown: list[Array] = []  # what more shows there of each kind of layer over tp
        self._hosts: list[Array] = []  # of each kind of layer, forward and backward
        self._least: list[Array] = []

    def add(self, grids: Iterable[LayoutGrid]) -> None:
        """Time the shardings of these blocks that are not known yet, all at once."""
        shardings = dict(sharding for grid in grids for sharding in _shardings(grid))
        fresh = {key: degrees for key, degrees in shardings.items() if key not in self._places}
        if not fresh:
            return
        self._places |= {key: len(self._places) + index for index, key in enumerate(fresh)}
        grid = self._grid(list(fresh.values()))
        work = self._timer(grid)
        costs, hosts = layer_passes(work), list[HostSeconds]()
        for passes in costs:  # pairs hide nothing in the head
            passes[-1] = passes[-1][:, :, :1]
        deferring = replace(grid, schedule=along(2, [int(DEFERS.argmax())]))
        late = head_passes(self._timer(deferring))
        kinds = pipeline_timer(self.shape, self.seq).kinds
        shown = [along(0, [0.0]) + total_seconds(work.layer(i).late) for i in kinds]
        if self.stack.launch and self.stack.memory.split == "balanced":
            hosts = [
                work.of_layer(i).host_seconds(routed=self.shape.is_moe_layer(i)) for i in kinds
            ]
        least = self._all_layers(
            with_host(costs, hosts, np.zeros(1, bool), is_cpu=self.machine.is_cpu), late
        )
        every = [cost for column in costs for cost in column]
        self._passes = _joined(self._passes, every, len(fresh))
        self._late = _joined(self._late, late, len(fresh))
        self._shown = _joined(self._shown, shown, len(fresh))
        self._hosts = _joined(self._hosts, [array for host in hosts for array in host], len(fresh))
        self._least = _joined(self._least, [least], len(fresh))

    def _timer(self, grid: LayoutGrid) -> LayerTimer:
        job = (self.shape, self.machine, self.stack, grid, self.seq, self.precision)
        return LayerTimer(*job, self.imbalance)

    def _grid(self, degrees: list[_Key]) -> LayoutGrid:
        """All microbatch sizes and rules of these shardings. As if there were endless microbatches,
        all of them are in pairs if the schedule pairs them at all."""
        tp, cp, context, ep, etp, pp, dp = (
            along(0, degree) for degree in zip(*degrees, strict=True)
        )
        schedules = (_PLAIN, int(_PAIRS.argmax())) if self.shape.moe is not None else (_PLAIN,)
        ones = along(0, [1])
        return LayoutGrid(
            **{"tp": tp, "cp": cp, "context": context, "ep": ep, "etp": etp, "pp": pp},
            **{
                "replicate": ones,
                "shard": dp,
                "zero": 0 * ones,
                "chunks": ones,
                "offload": 0 * ones,
            },
            microbatch_size=along(1, self.sizes),
            microbatches=along(1, [np.inf]),
            recompute=along(4, range(len(self.rules))),
            schedule=along(2, schedules),
            sp=ones * self.sp > 0,
            rules=self.rules,
        )

    def _all_layers(self, costs: PassCosts, late: list[Array]) -> Array:
        """Seconds of one microbatch in all layers and the head, of the two that is faster."""
        units = [sum(passes, np.zeros(1)) for passes in zip(*costs, strict=True)]
        units[-1] = np.minimum(units[-1], sum(late, np.zeros(1)))
        counted = zip((*self.counts, 1), units, strict=True)
        return sum((count * seconds for count, seconds in counted), np.zeros(1)) * self.stack.factor

    def least(self, grid: LayoutGrid) -> Array:
        """A lower bound of a step of each layout of a block: its layers and its head, evenly over
        the pipeline. Along the axis of schedules are those without pairs and those with pairs."""
        (seconds,) = _looked_up(self._least, self._places_of(grid))
        return seconds * grid.microbatches / grid.pp

    def passes(self, grid: LayoutGrid) -> PassCosts:
        """Seconds of each kind of layer and of the head, for each layout of a block."""
        share, places = paired_share(grid), self._places_of(grid)
        pass_seconds = [
            array[:, :, :1] + share * (array[:, :, 1:] - array[:, :, :1])
            if array.shape[2] > 1 and share.any()
            else array[:, :, :1]
            for array in _looked_up(self._passes, places)
        ]
        count = len(self.counts) + 1
        if (defers := grid.defers).any():
            for index, late in enumerate(_looked_up(self._late, places)):
                at = (index + 1) * count - 1
                pass_seconds[at] = np.where(defers, late, pass_seconds[at])
            for index, extra in enumerate(_looked_up(self._shown, places)):
                pass_seconds[count + index] = pass_seconds[count + index] + np.where(
                    defers, extra, 0.0
                )
        costs = (pass_seconds[:count], pass_seconds[count : 2 * count], pass_seconds[2 * count :])
        hosts = _looked_up(self._hosts, places)
        pairs = [HostSeconds(*hosts[at : at + 2]) for at in range(0, len(hosts), 2)]
        return with_host(costs, pairs, defers, is_cpu=self.machine.is_cpu)

    def _places_of(self, grid: LayoutGrid) -> dict[int, list[int]]:
        """The degrees, microbatch sizes and rules of a block, by their axes in arrays."""
        return {
            0: [self._places[key] for key, _ in _shardings(grid)],
            1: [self.sizes.index(int(size)) for size in grid.microbatch_size.flat],
            4: [int(number) for number in grid.recompute.flat],
        }


def _looked_up(arrays: list[Array], places: dict[int, list[int]]) -> list[Array]:
    """What these arrays have at some places along their axes."""
    for axis, index in places.items():
        arrays = [
            np.take(array, index, axis) if array.shape[axis] > 1 else array for array in arrays
        ]
    return arrays


def _shardings(grid: LayoutGrid) -> Iterator[tuple[_Key, _Key]]:
    """What layers depend on, and the degrees, for each degree of a block."""
    columns = (grid.tp, grid.cp, grid.context, grid.ep, grid.etp, grid.pp, grid.dp[:, :, :, :1])
    for degrees in zip(*(column.flat for column in np.broadcast_arrays(*columns)), strict=True):
        yield (*degrees[:5], degrees[5] > 1), degrees


def _joined(known: list[Array], additions: list[Array], count: int) -> list[Array]:
    """Longer arrays, along the axis of degrees; `count`: of the new ones."""
    arrays: list[Array] = []
    for index, array in enumerate(additions):
        inner = array.shape[1:]
        first = known[index] if known else np.zeros((0, *inner))
        inner = np.broadcast_shapes(inner, first.shape[1:])
        parts = (
            np.broadcast_to(first, (len(first), *inner)),
            np.broadcast_to(array, (count, *inner)),
        )
        arrays.append(np.concatenate(parts))
    return arrays


def by_schedule(array: NDArray[Any], grid: LayoutGrid) -> NDArray[Any]:
    """What is known by pairs, for each schedule of a block."""
    if array.shape[2] == 1:
        return array
    return np.take(array, _PAIRS[grid.schedule.astype(np.int64).ravel()], axis=2)


@lru_cache(maxsize=32)
def layer_table(job: LayersJob, gpus: int) -> LayerTable:
    """The table of a job on so many GPUs, of which a group may cross more or fewer links; made
    once, so that several searches of a command share it."""
    return LayerTable(job)

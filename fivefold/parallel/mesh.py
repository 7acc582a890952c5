"""Mesh: the process groups of one rank, by axis. Carries every collective, and records it.

Each call notes (axis, kind, bytes of the input buffer, group size). A delay can be set, to show on
a slow machine what hides behind what: a collective then takes that long on its axis, one after the
other, while its caller goes on until it waits.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.layout import Layout

# The groups that a step may use; `replica` joins the tp ranks that hold the same KV heads.
AXES = ("tp", "fsdp", "replicate", "dp-cp")
WORLD = "world"
# torch 2.13 renamed both, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Record(NamedTuple):
    """One collective, as its caller saw it."""

    axis: str
    kind: str
    bytes: int
    group: int


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> object: ...


class Mesh:
    """Groups by axis for this rank; an axis of one rank has no group and never communicates."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.sizes: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.records: Counter[Record] = Counter()
        self.delay = 0.0
        self.recomputing = False  # a forward that runs inside a backward
        self._free_at: dict[str, float] = {}

    @classmethod
    def build(cls, layout: Layout, device: torch.device, kv_heads: int) -> Mesh:
        """Make all groups; every rank calls this with the same layout, in the same order."""
        mesh = cls(layout, dist.get_rank() if dist.is_initialized() else 0, device)
        for axis in AXES:
            mesh._join(axis, layout.groups(axis))
        replicas = max(1, layout.tp // kv_heads)
        tensor_groups = layout.groups("tp")
        mesh._join(
            "replica",
            [row[i : i + replicas] for row in tensor_groups for i in range(0, layout.tp, replicas)],
        )
        mesh._join(WORLD, [tuple(range(layout.world))])
        return mesh

    def _join(self, axis: str, groups: list[tuple[int, ...]] | tuple[tuple[int, ...], ...]) -> None:
        mine = next(group for group in groups if self.rank in group)
        self.sizes[axis], self.places[axis] = len(mine), mine.index(self.rank)
        if len(mine) == 1:
            return
        if len(mine) == self.layout.world:
            self.groups[axis] = dist.group.WORLD
        else:
            enumerated = [list(group) for group in groups]
            self.groups[axis], _ = dist.new_subgroups_by_enumeration(enumerated)

    def size(self, axis: str) -> int:
        """Ranks of this rank's group on the axis."""
        return self.sizes[axis]

    def place(self, axis: str) -> int:
        """This rank's coord on the axis."""
        return self.places[axis]

    def all_reduce(self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType) -> Pending:
        """Reduce in place over the axis."""
        self.note(axis, "all_reduce", tensor)
        return self._started(axis, dist.all_reduce(tensor, op, self.groups[axis], async_op=True))

    def reduce_scatter(self, output: Tensor, whole: Tensor, axis: str) -> Pending:
        """Sum `whole` over the axis; this rank gets its slice."""
        self.note(axis, "reduce_scatter", whole)
        work = _reduce_scatter(output, whole, group=self.groups[axis], async_op=True)
        return self._started(axis, work)

    def all_gather(self, whole: Tensor, part: Tensor, axis: str) -> Pending:
        """Fill `whole` with the parts of all ranks of the axis."""
        self.note(axis, "all_gather", part)
        work = _all_gather(whole, part, group=self.groups[axis], async_op=True)
        return self._started(axis, work)

    def note(self, axis: str, kind: str, tensor: Tensor) -> None:
        """Record a collective that somebody is about to issue."""
        self.records[Record(axis, kind, tensor.nbytes, self.sizes[axis])] += 1

    def _started(self, axis: str, work: Pending) -> Pending:
        if not self.delay:
            return work
        begin = max(time.perf_counter(), self._free_at.get(axis, 0.0))
        self._free_at[axis] = begin + self.delay
        return _Delayed(work, begin + self.delay)


class _Delayed:
    """A collective that is not over before a set time."""

    def __init__(self, work: Pending, ready_at: float) -> None:
        self.work, self.ready_at = work, ready_at

    def wait(self) -> object:
        result = self.work.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return result

"""Mesh: the process groups of one rank, by axis. Carries every collective, and records it.

Each call notes (axis, kind, bytes of the input buffer, group size). A delay can be set, to show on
a slow machine what hides behind what: a collective then takes that long on its axis, one after the
other, while its caller goes on until it waits.

Pipeline ranks that send to one another have a group for each direction: on NCCL the messages of one
group form one line, in which a forward and a backward that meet would wait for each other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule import Schedule, channels, twins
from fivefold.core.splits import Split
from fivefold.parallel import transport
from fivefold.parallel.transport import InFlight, Pending

# The groups that a step may use; `replica` joins the tp ranks that hold the same KV heads.
AXES = ("tp", "fsdp", "replicate", "dp-cp", "pp", "ep", "etp", "edp")
WORLD, PIPELINE, TWIN, RING, ULYSSES = "world", "pp", "twin", "ring", "ulysses"
ROW, NEAR, FAR = "row", "ep-near", "ep-far"
PRETENDED = "fake"  # torch's backend for one rank of a job whose others are not there


class CollectiveRecord(NamedTuple):
    """One collective, as its caller saw it."""

    axis: str
    kind: str
    bytes: int
    group: int

    def __str__(self) -> str:
        return f"{self.axis}/{self.kind}"


class SpanSink(Protocol):
    """Whoever keeps when collectives began, and when somebody had waited for them."""

    def begin(self, name: object, bytes: int, group: int) -> Any: ...
    def end(self, token: Any) -> None: ...


class Phase:
    """Whether a chunk is in its backward: a forward that runs then is a recomputation."""

    def __init__(self) -> None:
        self.backward = False


class Mesh:
    """Groups by axis for this rank; an axis of one rank has no group and never communicates."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.sizes: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.records: Counter[CollectiveRecord] = Counter()
        self.channels: dict[tuple[int, int], dist.ProcessGroup] = {}  # by (source, target) stage
        self.column: tuple[int, ...] = (rank,)  # the ranks of this rank's pipeline
        self.delay = 0.0
        self.delays: dict[str, float] = {}  # by axis, in place of `delay`
        self.pause: Callable[[], None] | None = None  # gives the turn to the other lane
        self.members: dict[str, tuple[int, ...]] = {}  # the ranks of this rank's groups
        # Told of each collective that is issued, and among which ranks.
        self.heard: Callable[[CollectiveRecord, tuple[int, ...]], None] | None = None
        self.spans: SpanSink | None = None
        # Told of tensors whose memory has come or gone.
        self.resized: Callable[[Tensor], None] = lambda tensor: None
        self.alone = dist.is_initialized() and dist.get_backend() == PRETENDED
        self._free_at: dict[str, float] = {}

    @classmethod
    def build(
        cls,
        layout: Layout,
        device: torch.device,
        kv_heads: int = 1,
        schedule: Schedule | None = None,
        tied: bool = False,
        split: Split | None = None,
        nodes: int = 1,
        balanced: bool = False,
    ) -> Mesh:
        """Make all groups; every rank calls this with the same values, in the same order.

        A pipeline also needs its schedule, and whether first and last stage share a weight; context
        ranks need the split of a row, experts the number of nodes that they are spread over, and
        their balancing the ranks that share a row.
        """
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
        if schedule is not None:
            mesh._lay_pipeline(schedule, tied)
        if split is not None:
            mesh._lay_context(split)
        if nodes > 1:
            mesh._lay_nodes(nodes)
        if balanced:
            mesh._join(ROW, layout.groups(ROW))
        return mesh

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> Mesh:
        """The mesh of a plan."""
        shape = plan.shape
        return cls.build(
            plan.layout,
            device,
            shape.kv_heads,
            plan.schedule,
            shape.ends_share,
            plan.split,
            plan.ep_nodes,
            bool(plan.balance),
        )

    def _lay_context(self, split: Split) -> None:
        rows = self.layout.groups("cp")
        inner, cp = split.inner, split.inner * split.outer
        insides = [row[i : i + inner] for row in rows for i in range(0, cp, inner)]
        self._join(ULYSSES, insides)
        self._join(RING, [row[i::inner] for row in rows for i in range(inner)])

    def _lay_nodes(self, nodes: int) -> None:
        rows = self.layout.groups("ep")
        inner = self.layout.ep // nodes
        self._join(NEAR, [row[i : i + inner] for row in rows for i in range(0, len(row), inner)])
        self._join(FAR, [row[i::inner] for row in rows for i in range(inner)])

    def _lay_pipeline(self, schedule: Schedule, tied: bool) -> None:
        columns = self.layout.groups(PIPELINE)
        self.column = next(column for column in columns if self.rank in column)
        for pair in channels(schedule):
            for column in columns:
                ranks = tuple(column[stage] for stage in pair)
                if (group := self._made(ranks)) is not None:
                    self.channels[pair] = group
        pairs = twins(schedule.placement, tied)
        self._join(TWIN, [(column[a], column[b]) for column in columns for a, b in pairs])

    def _made(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group of these ranks, which all ranks make together; None for those outside of it.

        A rehearsal has no others to meet, and makes no groups for them.
        """
        if self.alone and self.rank not in ranks:
            return None
        group = dist.new_group(list(ranks))
        return group if self.rank in ranks else None

    def _join(self, axis: str, groups: Sequence[tuple[int, ...]]) -> None:
        """Every rank that is in no group is one by itself."""
        mine = next((group for group in groups if self.rank in group), (self.rank,))
        self.sizes[axis], self.places[axis] = len(mine), mine.index(self.rank)
        self.members[axis] = tuple(mine)
        for group in (group for group in groups if len(group) > 1):
            if len(group) == self.layout.world:
                self.groups[axis] = dist.group.WORLD
            elif (made := self._made(group)) is not None:
                self.groups[axis] = made

    def size(self, axis: str) -> int:
        """Ranks of this rank's group on the axis."""
        return self.sizes[axis]

    def place(self, axis: str) -> int:
        """This rank's coord on the axis."""
        return self.places[axis]

    def all_reduce(self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType) -> Pending:
        """Reduce in place over the axis."""
        token = self.note(axis, "all_reduce", tensor)
        return self._started(axis, transport.all_reduce(tensor, op, self.groups[axis]), token)

    def reduce_scatter(self, output: Tensor, whole: Tensor, axis: str) -> Pending:
        """Sum `whole` over the axis; this rank gets its slice."""
        token = self.note(axis, "reduce_scatter", whole)
        return self._started(
            axis, transport.reduce_scatter(output, whole, self.groups[axis]), token
        )

    def all_gather(self, whole: Tensor, part: Tensor, axis: str) -> Pending:
        """Fill `whole` with the parts of all ranks of the axis."""
        token = self.note(axis, "all_gather", part)
        return self._started(axis, transport.all_gather(whole, part, self.groups[axis]), token)

    def sum_together(self, tensors: Sequence[Tensor], axis: str) -> None:
        """Sum tensors over the axis in place, by one all-reduce in float32 or wider."""
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = torch.cat([each.flatten().to(wide) for each in tensors])
        self.all_reduce(flat, axis, dist.ReduceOp.SUM).wait()
        parts = flat.split([each.numel() for each in tensors])
        for each, part in zip(tensors, parts, strict=True):
            each.copy_(part.view_as(each))

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Start to send to another stage of this rank's pipeline."""
        pair = (self.place(PIPELINE), target)
        members = (self.rank, self.column[target])
        token = self._noted(CollectiveRecord(PIPELINE, "send", tensor.nbytes, 2), members)
        return self._timed(transport.send(tensor, self.column[target], self.channels[pair]), token)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Start to receive the next message of another stage of this rank's pipeline."""
        pair = (source, self.place(PIPELINE))
        members = (self.column[source], self.rank)
        token = self._noted(CollectiveRecord(PIPELINE, "recv", buffer.nbytes, 2), members)
        return self._timed(
            transport.receive(buffer, self.column[source], self.channels[pair]), token
        )

    @property
    def takes_turns(self) -> bool:
        """Whether there is something to do between the issue of a collective and its wait."""
        return self.pause is not None or self.delay > 0 or bool(self.delays)

    def let_pass(self, axis: str) -> None:
        """A collective was issued outside of the mesh, and is waited for at once."""
        self.arrive(self.depart(axis))

    def depart(self, axis: str) -> float:
        """A collective is issued outside of the mesh; when its delay is over."""
        return self._ready_at(axis)

    def arrive(self, ready_at: float) -> None:
        """Somebody waits for it: the other lane's turn, then what is left of the delay."""
        if self.pause is not None:
            self.pause()
        if ready_at:
            time.sleep(max(0.0, ready_at - time.perf_counter()))

    def pass_on(self, tensor: Tensor, axis: str) -> RingExchange:
        """Start to send to the next rank of the axis and to receive from the one before."""
        group, place, size = self.groups[axis], self.place(axis), self.size(axis)
        ahead, behind = (dist.get_global_rank(group, (place + step) % size) for step in (1, -1))
        buffer = torch.empty_like(tensor)
        tokens = [self.note(axis, kind, tensor) for kind in ("send", "recv")]
        moving = transport.pass_on(tensor, buffer, ahead, behind, group)
        return RingExchange(self, moving, buffer, self._ready_at(axis), tokens)

    def note(self, axis: str, kind: str, tensor: Tensor) -> Any:
        """Record a collective that somebody is about to issue; `close` ends its span, if any."""
        record = CollectiveRecord(axis, kind, tensor.nbytes, self.sizes[axis])
        return self._noted(record, self.members[axis])

    def repeat(self, record: CollectiveRecord) -> None:
        """A collective of one of this rank's groups counts once more, without being issued."""
        self._noted(record, self.members[record.axis])

    def close(self, token: Any) -> None:
        """A collective that was noted is over."""
        if token is not None and self.spans is not None:
            self.spans.end(token)

    def _noted(self, record: CollectiveRecord, members: tuple[int, ...]) -> Any:
        self.records[record] += 1
        if self.heard is not None:
            self.heard(record, members)
        if self.spans is None:
            return None
        return self.spans.begin(record, record.bytes, record.group)

    def _started(self, axis: str, work: Pending, token: Any) -> Pending:
        ready_at = self._ready_at(axis)
        return self._timed(_Delayed(work, ready_at) if ready_at else work, token)

    def _timed(self, work: Pending, token: Any) -> Pending:
        return work if token is None else _TimedCollective(self, work, token)

    def _ready_at(self, axis: str) -> float:
        """When the delay of a collective that begins now on this axis is over; 0 without one."""
        delay = self.delays.get(axis, self.delay)
        if not delay:
            return 0.0
        begin = max(time.perf_counter(), self._free_at.get(axis, 0.0))
        self._free_at[axis] = begin + delay
        return begin + delay


class RingExchange:
    """A tensor on its way to the next rank, and another that comes from the one before."""

    def __init__(
        self,
        mesh: Mesh,
        moving: InFlight,
        buffer: Tensor,
        ready_at: float,
        tokens: Sequence[Any],
    ) -> None:
        self.mesh, self.moving, self.buffer, self.ready_at = mesh, moving, buffer, ready_at
        self.tokens = tokens

    def wait(self) -> Tensor:
        """What came; what was sent is let go."""
        if self.mesh.pause is not None:
            self.mesh.pause()
        self.moving.wait()
        if self.ready_at:
            time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        for token in self.tokens:
            self.mesh.close(token)
        return self.buffer


class _TimedCollective:
    """A collective whose span ends when somebody has waited for it."""

    def __init__(self, mesh: Mesh, work: Pending, token: Any) -> None:
        self.mesh, self.work, self.token = mesh, work, token

    def wait(self) -> object:
        result = self.work.wait()
        self.mesh.close(self.token)
        return result


class _Delayed:
    """A collective that is not over before a set time."""

    def __init__(self, work: Pending, ready_at: float) -> None:
        self.work, self.ready_at = work, ready_at

    def wait(self) -> object:
        result = self.work.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return result

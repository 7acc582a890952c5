"""Mesh: the process groups of one rank by role, and the one way to issue a collective on them.

Every collective is noted (role, kind, bytes of the input buffer, group size), started, and waited
for through `Issued`. Observers are told when it begins and when somebody has waited for it. Where
two computations of a rank take turns (`Lanes`), some waits give the turn to the other one first.
Few bytes go over symmetric memory, where a generator has it (`symmetric.py`).

Roles share a group only where no computation waits for them (`core/layout/groups.py`). On NCCL a
group is a queue of calls: those of two groups do not wait for one another, and neither do the two
directions of a pair of pipeline ranks. All pairs are connected when the mesh is made, in one order
on all ranks: NCCL connects a pair on its first message, and blocks both hosts until both have
called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fivefold.core.layout import (
    FEW_CHANNELS,
    PIPELINE,
    ROLES,
    WORLD,
    Communicator,
    Topology,
    communicators,
    group_of,
)
from fivefold.core.plan import Plan
from fivefold.cost.traffic import CONNECT
from fivefold.parallel import transport
from fivefold.parallel.bit_sums import Tape
from fivefold.parallel.lanes import Lanes
from fivefold.parallel.symmetric import SymmetricBuffer
from fivefold.parallel.transport import Pending
from fivefold.parallel.wait_timer import WaitTimer

FAKE = "fake"  # torch's backend for one rank of a job whose other ranks do not exist


class CollectiveRecord(NamedTuple):
    """One collective, as its caller issued it."""

    axis: str
    kind: str
    bytes: int
    group: int

    def __str__(self) -> str:
        return f"{self.axis}/{self.kind}"


class CollectiveObserver(Protocol):
    """Callbacks before and after every collective of a rank."""

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> Any:
        """Called when a collective is issued; the returned value is passed to `end`."""

    def end(self, token: Any) -> None:
        """Called after the wait, unless `begin` returned None."""


Tokens = tuple[tuple[CollectiveObserver, Any], ...]
# Given a collective, its members and what is pending, returns what is waited for in its place.
StandIn = Callable[[CollectiveRecord, tuple[int, ...], Pending], Pending]


class Phase:
    """Whether a stage is in its backward: a forward in it is a recomputation."""

    def __init__(self) -> None:
        self.backward, self.microbatch = False, 0

    def begin(self, microbatch: int) -> None:
        """A forward or a backward of this microbatch begins."""
        self.microbatch = microbatch

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Context of the backward of one microbatch."""
        self.backward = True
        try:
            yield
        finally:
            self.backward = False


class Issued:
    """A collective that was issued and is not waited for.

    Where it `yields`, the wait gives the turn to the other lane first. What it brings is `filled`,
    or made by the wait.
    """

    def __init__(
        self,
        mesh: Mesh,
        pending: Pending,
        tokens: Tokens,
        yields: bool,
        brings: tuple[str, str],
        filled: Tensor | None = None,
        pair: tuple[int, int] | None = None,
    ) -> None:
        self.mesh, self.pending, self.tokens, self.yields = mesh, pending, tokens, yields
        self.tape = mesh.tape
        self.brings, self.filled, self.pair = brings, filled, pair

    def wait(self) -> Any:
        """Wait for the collective, and return its result."""
        if self.yields:
            self.mesh.lanes.pause()
        timer = self.mesh.timer
        since = timer.timestamp() if timer.running else None
        answer = self.pending.wait()
        if since is not None:
            timer.waited(self.brings, since)
        self.mesh.close(self.tokens)
        came = answer if self.filled is None else self.filled
        if self.tape is not None and isinstance(came, Tensor):
            self.tape.add(*self.brings, came, sent=False, pair=self.pair)
        self.tape = self.filled = None
        return answer

    def is_over(self) -> bool:
        """Whether the collective has completed, also on the device."""
        over = self.pending.done
        if over:
            self.wait()
        return over


class Mesh:
    """Process groups of this rank by role; a role of one rank has no group and never
    communicates."""

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        observers: Sequence[CollectiveObserver] = (),
        on_resize: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Make all groups: every rank calls this with the same topology.

        `on_resize` is told of tensors whose memory was allocated or freed in place.
        """
        self.topology, self.layout, self.device = topology, topology.layout, device
        self.observers, self.on_resize = tuple(observers), on_resize
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.backend = dist.get_backend() if dist.is_initialized() else ""
        self.alone = self.backend == FAKE
        self.records: Counter[CollectiveRecord] = Counter()
        self.lanes = Lanes(device)
        self.tape: Tape | None = None
        self.timer = WaitTimer(device)
        self.stand_in: StandIn | None = None  # for collectives of fake groups
        # The ranks of this rank's groups.
        self.members = {role: group_of(topology, role, self.rank) for role in ROLES}
        self.groups: dict[str, dist.ProcessGroup] = {}
        # By (source, target) coord on the pipeline axis.
        self.channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.symmetric: dict[str, SymmetricBuffer] = {}  # by role
        for communicator in communicators(topology):
            self._join(communicator)
        self._connect()

    @classmethod
    def of(
        cls,
        plan: Plan,
        device: torch.device,
        observers: Sequence[CollectiveObserver] = (),
        on_resize: Callable[[Tensor], None] | None = None,
    ) -> Mesh:
        """Create the mesh of a plan."""
        return cls(Topology.of(plan), device, observers, on_resize)

    def _join(self, communicator: Communicator) -> None:
        """Make this rank's group of a communicator, together with all other ranks."""
        channel = communicator.channel(self.topology, self.rank)
        process_group = self._make(communicator, channel)
        if process_group is None:
            return
        if channel is None:
            self.groups |= dict.fromkeys(communicator.roles, process_group)
        else:
            self.channels[channel] = process_group

    def _make(
        self, communicator: Communicator, channel: tuple[int, int] | None
    ) -> dist.ProcessGroup | None:
        if communicator.role == WORLD:
            return dist.group.WORLD
        name = communicator.role if channel is None else f"{PIPELINE} {channel[0]}->{channel[1]}"
        if self.backend == dist.Backend.NCCL:  # one call of all ranks makes the groups of all
            groups = (group for group in communicator.groups(self.topology) if len(group) > 1)
            options = nccl_options(communicator)
            transport.expect_serial_messages()
            return dist.split_group(
                split_ranks=[list(group) for group in groups],
                timeout=self._limit,
                pg_options=options,
                group_desc=name,
            )
        members = communicator.group(self.topology, self.rank)
        if self.alone and len(members) == 1:
            return None
        # torch names a group by how many this rank has: who meets nobody makes one as well.
        process_group = dist.new_group(
            list(members),
            timeout=self._limit,
            use_local_synchronization=True,
            group_desc=name,
        )
        return process_group if len(members) > 1 else None

    @property
    def _limit(self) -> timedelta | None:
        """How long torch waits in a collective: as long as in that of all ranks, and no less than
        torch's usual limit. None, for the group of a rehearsal, in which nothing waits."""
        if self.backend not in (dist.Backend.NCCL, dist.Backend.GLOO):
            return None
        assert dist.group.WORLD is not None
        limit = dist.group.WORLD._get_backend(self.device).options._timeout
        return max(limit, default_pg_timeout)

    def _connect(self) -> None:
        """Send a first message over every channel, in the order in which all ranks made them."""
        column = self.members[PIPELINE]
        for source, target in self.channels:
            pair = (column[source], column[target])
            begun = self._tell(CollectiveRecord(PIPELINE, CONNECT, 0, 2), pair)
            group = self.channels[source, target]
            if self.alone:
                pass
            elif self.rank == pair[0]:
                transport.send(torch.zeros(1, device=self.device), pair[1], group).wait()
            else:
                spec = (torch.Size((1,)), torch.float32, self.device)
                transport.receive(*spec, pair[0], group).wait()
            self.close(begun)
        if self.channels and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def size(self, role: str) -> int:
        """Ranks of this rank's group in a role."""
        return len(self.members[role])

    def coord(self, role: str) -> int:
        """This rank's coord in its group of a role."""
        return self.members[role].index(self.rank)

    def resized(self, tensor: Tensor) -> None:
        """Record that the storage of a tensor was resized."""
        if self.on_resize is not None:
            self.on_resize(tensor)

    def close_groups(self) -> None:
        """Release the groups. They end with their last reference, and a weight's hook may hold one.

        On NCCL the end of a group waits for its members, and torch ends groups in an order that
        differs from rank to rank: there they end here, in the order in which all ranks made them.
        """
        self.symmetric.clear()
        if self.backend == dist.Backend.NCCL:
            for group in dict.fromkeys((*self.groups.values(), *self.channels.values())):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        self.groups.clear()
        self.channels.clear()

    def replace_collectives(self, stand_in: StandIn | None) -> None:
        """Let something stand in for the collectives of fake groups; None: nothing."""
        self.stand_in = stand_in

    def record_on(self, tape: Tape | None) -> None:
        """Record hashes of all messages on a tape; None stops it."""
        self.tape = tape

    def issue(
        self,
        axis: str,
        kind: str,
        tensor: Tensor,
        start: Callable[[dist.ProcessGroup], Pending],
        *,
        yields: bool = False,
        fills: Tensor | None = None,
    ) -> Issued:
        """Record and start a collective on this input; it `fills` a tensor or returns one."""
        tokens = self.note(axis, kind, tensor)
        if self.tape is not None:
            self.tape.add(axis, kind, tensor, sent=True)
        pending = self._pending(axis, kind, tensor.nbytes, start(self.groups[axis]))
        return Issued(self, pending, tokens, yields, (axis, kind), fills)

    def all_reduce(
        self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType, *, yields: bool = False
    ) -> Issued:
        """All-reduce in place over the axis."""

        def start(group: dist.ProcessGroup) -> Pending:
            shared = self.symmetric.get(axis)
            if shared is not None and op == dist.ReduceOp.SUM and shared.sums(tensor):
                return shared.total(tensor, tensor)
            return transport.all_reduce(tensor, op, group)

        return self.issue(axis, "all_reduce", tensor, start, yields=yields, fills=tensor)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, axis: str, *, yields: bool = False
    ) -> Issued:
        """Reduce-scatter `full` over the axis."""
        return self.issue(
            axis,
            "reduce_scatter",
            full,
            lambda group: transport.reduce_scatter(output, full, group),
            yields=yields,
            fills=output,
        )

    def all_gather(self, full: Tensor, shard: Tensor, axis: str, *, yields: bool = False) -> Issued:
        """All-gather the shards of the axis into `full`."""
        return self.issue(
            axis,
            "all_gather",
            shard,
            lambda group: transport.all_gather(full, shard, group),
            yields=yields,
            fills=full,
        )

    def gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """All-gather the shards of the axis along a dim. Recomputation knows this method and the
        two below by name."""

        def start(group: dist.ProcessGroup) -> Pending:
            shared = self.symmetric.get(axis)
            if shared is not None and shared.takes(x):
                return shared.gather(x, dim)
            return transport.gather(x, dim, group)

        return self._now(axis, "all_gather", x, start)

    def scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Reduce-scatter over the axis along a dim."""
        return self._now(axis, "reduce_scatter", x, lambda group: transport.scatter(x, dim, group))

    def total(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """All-reduce over the axis, out of place."""

        def start(group: dist.ProcessGroup) -> Pending:
            shared = self.symmetric.get(axis)
            if shared is not None and op == "sum" and shared.sums(x):
                return shared.total(x, torch.empty_like(x))
            return transport.total(x, op, group)

        return self._now(axis, "all_reduce", x, start)

    def _now(
        self, axis: str, kind: str, x: Tensor, start: Callable[[dist.ProcessGroup], Pending]
    ) -> Tensor:
        return self.issue(axis, kind, x, start, yields=True).wait()

    def sum_together(self, tensors: Sequence[Tensor], axis: str) -> None:
        """Sum tensors over the axis in place, by one all-reduce in float32 or wider."""
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = torch.cat([value.flatten().to(self.device, wide) for value in tensors])
        self.all_reduce(flat, axis, dist.ReduceOp.SUM).wait()
        shards = flat.split([value.numel() for value in tensors])
        for tensor, shard in zip(tensors, shards, strict=True):
            tensor.copy_(shard.view_as(tensor))

    def send(self, tensor: Tensor, target: int) -> Issued:
        """Start to send to another stage of this rank's pipeline."""
        column = self.members[PIPELINE]
        tokens = self._begin(
            CollectiveRecord(PIPELINE, "send", tensor.nbytes, 2), (self.rank, column[target])
        )
        channel = self.channels[self.coord(PIPELINE), target]
        if self.tape is not None:
            pair = (self.rank, column[target])
            self.tape.add(PIPELINE, "send", tensor, sent=True, pair=pair)
        pending = transport.send(tensor, column[target], channel)
        members = (self.rank, column[target])
        pending = self._pending(PIPELINE, "send", tensor.nbytes, pending, members)
        return Issued(self, pending, tokens, False, (PIPELINE, "send"))

    def receive(self, size: torch.Size, dtype: torch.dtype, source: int) -> Issued:
        """Start to receive the next message of another stage of this rank's pipeline."""
        column = self.members[PIPELINE]
        num_bytes = size.numel() * dtype.itemsize
        tokens = self._begin(
            CollectiveRecord(PIPELINE, "recv", num_bytes, 2), (column[source], self.rank)
        )
        channel = self.channels[source, self.coord(PIPELINE)]
        pending = transport.receive(size, dtype, self.device, column[source], channel)
        pair = (column[source], self.rank)
        pending = self._pending(PIPELINE, "recv", num_bytes, pending, pair)
        return Issued(self, pending, tokens, False, (PIPELINE, "recv"), pair=pair)

    def pass_on(self, tensor: Tensor, axis: str) -> Issued:
        """Start to send to the next rank of the axis and to receive from the previous one."""
        ranks, coord = self.members[axis], self.coord(axis)
        after, before = (ranks[(coord + step) % len(ranks)] for step in (1, -1))
        tokens = (*self.note(axis, "send", tensor), *self.note(axis, "recv", tensor))
        if self.tape is not None:
            self.tape.add(axis, "send", tensor, sent=True)
        pending = transport.pass_on(tensor, after, before, self.groups[axis])
        pending = self._pending(axis, "send", tensor.nbytes, pending)
        return Issued(self, pending, tokens, True, (axis, "recv"))

    def _pending(
        self,
        axis: str,
        kind: str,
        num_bytes: int,
        pending: Pending,
        members: tuple[int, ...] | None = None,
    ) -> Pending:
        """What is waited for: the collective, or what stands in for it."""
        if self.stand_in is None:
            return pending
        members = members or self.members[axis]
        record = CollectiveRecord(axis, kind, num_bytes, len(members))
        return self.stand_in(record, members, pending)

    def note(self, axis: str, kind: str, tensor: Tensor) -> Tokens:
        """Record a collective that is about to be issued; `close` ends it."""
        record = CollectiveRecord(axis, kind, tensor.nbytes, self.size(axis))
        return self._begin(record, self.members[axis])

    def repeat(self, record: CollectiveRecord) -> None:
        """Count a collective once more, without issuing it."""
        self._begin(record, self.members[record.axis])

    def close(self, tokens: Tokens) -> None:
        """End the record of a collective."""
        for observer, token in tokens:
            observer.end(token)

    def _begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> Tokens:
        self.records[record] += 1
        return self._tell(record, members)

    def _tell(self, record: CollectiveRecord, members: tuple[int, ...]) -> Tokens:
        begun = [(observer, observer.begin(record, members)) for observer in self.observers]
        return tuple((observer, token) for observer, token in begun if token is not None)


def nccl_options(communicator: Communicator) -> Any:
    """NCCL options of a communicator: high priority if the computation waits for it, and few
    channels if its messages are small, or their kernels may wait long on the GPU."""
    urgent = ROLES[communicator.role].urgent
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    if communicator.small:
        options.config.max_ctas = FEW_CHANNELS
    return options

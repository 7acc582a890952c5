"""Mesh: the process groups of one rank by role, and the one way to issue a collective on them.

Every collective is noted (role, kind, bytes of the input buffer, group size), started, and waited
for through `Issued`. Observers are told when it begins and when somebody has waited for it. Where
two computations of a rank take turns (`Lanes`), some waits give the turn to the other one first.

Pipeline ranks that send to one another have a group for each direction: on NCCL the messages of one
group are serialised, and a forward and a backward that meet would wait for each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.groups import (
    PIPELINE,
    Topology,
    all_groups,
    group_of,
    message_pairs,
    roles_of,
)
from fivefold.core.plan import Plan
from fivefold.parallel import transport
from fivefold.parallel.transport import Functional, Pending

FAKE = "fake"  # torch's backend for one rank of a job whose other ranks do not exist
First = TypeVar("First")
Second = TypeVar("Second")


class CollectiveRecord(NamedTuple):
    """One collective, as its caller saw it."""

    axis: str
    kind: str
    bytes: int
    group: int

    def __str__(self) -> str:
        return f"{self.axis}/{self.kind}"


class CollectiveObserver(Protocol):
    """Is told of every collective of a rank: when it is issued, and when it was waited for."""

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> Any:
        """A collective among these ranks is issued. What is returned comes back to `end`."""

    def end(self, token: Any) -> None:
        """It has been waited for. Not called where `begin` returned None."""


Tokens = tuple[tuple[CollectiveObserver, Any], ...]


class Phase:
    """Whether a stage is in its backward: a forward that runs then is a recomputation."""

    def __init__(self) -> None:
        self.backward = False

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around the backward of one microbatch."""
        self.backward = True
        try:
            yield
        finally:
            self.backward = False


class Lanes:
    """Two computations of one rank that take turns: one runs while the other waits.

    The turn changes only at fixed points: where a lane has issued a collective and not yet waited
    for it, and where it makes room for the other one (`parallel/expert.py`). All ranks of a group
    therefore issue the collectives of both lanes in the same order, whatever their speed. Two free
    threads would not.
    """

    def __init__(self) -> None:
        self._second = ThreadPoolExecutor(1, thread_name_prefix="fivefold-lane")
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running = [False, False]
        self._main = threading.get_ident()
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def inside(self, around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Run second lanes in this context: dispatch modes of torch do not reach other threads."""
        before, self._around = self._around, around
        try:
            yield
        finally:
            self._around = before

    def run(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Both results. The second lane begins: a backward has a collective to issue at once, which
        the first computation of the forward hides."""
        self._running = [True, True]
        self._main = threading.get_ident()
        other = self._second.submit(self._run_second, second)
        try:
            self.pause()
            found = first()
        finally:
            self._leave(0)
            result = other.result()
        return found, result

    def pause(self) -> None:
        """Give the turn to the other lane, where one runs."""
        lane = 0 if threading.get_ident() == self._main else 1
        if self._running[1 - lane]:
            self._turns[1 - lane].release()
            self._turns[lane].acquire()

    def _run_second(self, second: Callable[[], Second]) -> Second:
        self._turns[1].acquire()
        try:
            with self._around():
                return second()
        finally:
            self._leave(1)

    def _leave(self, lane: int) -> None:
        """The other lane goes on alone."""
        self._running[lane] = False
        if self._running[1 - lane]:
            self._turns[1 - lane].release()


class Issued:
    """A collective that was issued and not yet waited for.

    Where it `yields`, the wait gives the turn to the other lane first.
    """

    def __init__(self, mesh: Mesh, pending: Pending, tokens: Tokens, yields: bool) -> None:
        self.mesh, self.pending, self.tokens, self.yields = mesh, pending, tokens, yields

    def wait(self) -> Any:
        """What the collective brought."""
        if self.yields:
            self.mesh.lanes.pause()
        if isinstance(self.pending, Functional) and not self.tokens:
            return self.pending.on_first_use()
        found = self.pending.wait()
        self.mesh.close(self.tokens)
        return found


class Mesh:
    """Groups by role for this rank; a role of one rank has no group and never communicates."""

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
        self.alone = dist.is_initialized() and dist.get_backend() == FAKE
        self.records: Counter[CollectiveRecord] = Counter()
        self.lanes = Lanes()
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.members: dict[str, tuple[int, ...]] = {}  # the ranks of this rank's groups
        for role in roles_of(topology):
            self._join(role)
        # By (source, target) coord on the pipeline axis.
        self.channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        for pair, ranks in message_pairs(topology):
            if (group := self._make_group(ranks)) is not None:
                self.channels[pair] = group

    @classmethod
    def of(
        cls,
        plan: Plan,
        device: torch.device,
        observers: Sequence[CollectiveObserver] = (),
        on_resize: Callable[[Tensor], None] | None = None,
    ) -> Mesh:
        """The mesh of a plan."""
        return cls(Topology.of(plan), device, observers, on_resize)

    def _join(self, role: str) -> None:
        self.members[role] = group_of(self.topology, role, self.rank)
        # A rank without others makes no groups for them.
        groups = (self.members[role],) if self.alone else all_groups(self.topology, role)
        for ranks in (ranks for ranks in groups if len(ranks) > 1):
            if len(ranks) == self.layout.world:
                self.groups[role] = dist.group.WORLD
            elif (made := self._make_group(ranks)) is not None:
                self.groups[role] = made

    def _make_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group of these ranks, which all ranks make together; None for those outside of it."""
        if self.alone and self.rank not in ranks:
            return None
        group = dist.new_group(list(ranks))
        return group if self.rank in ranks else None

    def size(self, role: str) -> int:
        """Ranks of this rank's group in a role."""
        return len(self.members[role])

    def coord(self, role: str) -> int:
        """This rank's coord in its group of a role."""
        return self.members[role].index(self.rank)

    def resized(self, tensor: Tensor) -> None:
        """The memory of a tensor was allocated or freed in place."""
        if self.on_resize is not None:
            self.on_resize(tensor)

    def close_groups(self) -> None:
        """Drop the groups. They end with their last holder, and a weight's hook may be one."""
        self.groups.clear()
        self.channels.clear()

    def issue(
        self,
        axis: str,
        kind: str,
        tensor: Tensor,
        start: Callable[[dist.ProcessGroup], Pending],
        *,
        silent: bool = False,
        yields: bool = False,
    ) -> Issued:
        """Note a collective of this input and start it. A `silent` one is a recomputation whose
        result is kept: it is never repeated on the wire."""
        tokens = () if silent else self.note(axis, kind, tensor)
        return Issued(self, start(self.groups[axis]), tokens, yields)

    def all_reduce(self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType) -> Issued:
        """Reduce in place over the axis."""
        return self.issue(
            axis, "all_reduce", tensor, lambda group: transport.all_reduce(tensor, op, group)
        )

    def reduce_scatter(self, output: Tensor, full: Tensor, axis: str) -> Issued:
        """Sum `full` over the axis; this rank gets its shard."""
        return self.issue(
            axis,
            "reduce_scatter",
            full,
            lambda group: transport.reduce_scatter(output, full, group),
        )

    def all_gather(self, full: Tensor, shard: Tensor, axis: str) -> Issued:
        """Fill `full` with the shards of all ranks of the axis."""
        return self.issue(
            axis, "all_gather", shard, lambda group: transport.all_gather(full, shard, group)
        )

    def sum_together(self, tensors: Sequence[Tensor], axis: str) -> None:
        """Sum tensors over the axis in place, by one all-reduce in float32 or wider."""
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = torch.cat([each.flatten().to(wide) for each in tensors])
        self.all_reduce(flat, axis, dist.ReduceOp.SUM).wait()
        shards = flat.split([each.numel() for each in tensors])
        for each, shard in zip(tensors, shards, strict=True):
            each.copy_(shard.view_as(each))

    def send(self, tensor: Tensor, target: int) -> Issued:
        """Start to send to another stage of this rank's pipeline."""
        column = self.members[PIPELINE]
        tokens = self._begin(
            CollectiveRecord(PIPELINE, "send", tensor.nbytes, 2), (self.rank, column[target])
        )
        channel = self.channels[self.coord(PIPELINE), target]
        return Issued(self, transport.send(tensor, column[target], channel), tokens, False)

    def receive(self, buffer: Tensor, source: int) -> Issued:
        """Start to receive the next message of another stage of this rank's pipeline."""
        column = self.members[PIPELINE]
        tokens = self._begin(
            CollectiveRecord(PIPELINE, "recv", buffer.nbytes, 2), (column[source], self.rank)
        )
        channel = self.channels[source, self.coord(PIPELINE)]
        return Issued(self, transport.receive(buffer, column[source], channel), tokens, False)

    def pass_on(self, tensor: Tensor, axis: str) -> Issued:
        """Start to send to the next rank of the axis and to receive from the one before; the wait
        gives what came."""
        ranks, coord = self.members[axis], self.coord(axis)
        after, before = (ranks[(coord + step) % len(ranks)] for step in (1, -1))
        tokens = (*self.note(axis, "send", tensor), *self.note(axis, "recv", tensor))
        pending = transport.pass_on(tensor, after, before, self.groups[axis])
        return Issued(self, pending, tokens, yields=True)

    def note(self, axis: str, kind: str, tensor: Tensor) -> Tokens:
        """Record a collective that is about to be issued; `close` tells that it is over."""
        record = CollectiveRecord(axis, kind, tensor.nbytes, self.size(axis))
        return self._begin(record, self.members[axis])

    def repeat(self, record: CollectiveRecord) -> None:
        """A collective of one of this rank's groups counts once more, without being issued."""
        self._begin(record, self.members[record.axis])

    def close(self, tokens: Tokens) -> None:
        """A collective that was noted is over."""
        for observer, token in tokens:
            observer.end(token)

    def _begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> Tokens:
        self.records[record] += 1
        begun = [(each, each.begin(record, members)) for each in self.observers]
        return tuple((each, token) for each, token in begun if token is not None)

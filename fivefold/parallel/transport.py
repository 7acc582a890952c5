"""The raw collectives, wherever a tensor lies.

Where the backend of a group reaches the memory of a tensor, each of these is torch's own call.
Over gloo, tensors of a GPU are copied to pinned host memory, sent from there, and copied back on
the current stream by the rank that waits.

Two kinds. Some fill a given tensor. `gather`, `scatter`, `total` and `exchange` are torch's
functional collectives: selective recomputation knows them by name and never issues them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

_ops = torch.ops._c10d_functional
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> object: ...


class InFlight:
    """Calls that are under way, and the memory that they read and write until they are over."""

    def __init__(
        self,
        works: list[Any],
        sent: Tensor | None = None,
        came: Tensor | None = None,
        home: Tensor | None = None,
    ) -> None:
        """What `came` is copied to `home`, where these are two tensors."""
        self.works, self.sent, self.came, self.home = works, sent, came, home

    def wait(self) -> Tensor | None:
        """Wait for all calls, once; what came. Nothing is kept alive from then on."""
        while self.works:
            self.works.pop().wait()
        if self.came is not None and self.home is not None and self.came is not self.home:
            self.home.copy_(self.came, non_blocking=True)
        found = self.home
        self.sent = self.came = self.home = None
        return found


class Functional:
    """The result of a functional collective, on its way to `device`."""

    def __init__(self, under_way: Tensor, device: torch.device, *, waits_itself: bool) -> None:
        """`waits_itself`: torch waits for it at its first use."""
        self.under_way, self.device, self.waits_itself = under_way, device, waits_itself

    def wait(self) -> Tensor:
        """The result, waited for now."""
        return self._on_device(_ops.wait_tensor(self.under_way))

    def on_first_use(self) -> Tensor:
        """The result; torch waits for it as late as it can."""
        return self._on_device(self.under_way) if self.waits_itself else self.wait()

    def _on_device(self, found: Tensor) -> Tensor:
        return found if found.device.type == self.device.type else found.to(self.device)


def goes_by_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a group cannot reach the memory that a tensor lies in."""
    return tensor.is_cuda and dist.get_backend(group) == dist.Backend.GLOO


def in_place(tensor: Tensor, start: Callable[[Tensor], Any], group: dist.ProcessGroup) -> Pending:
    """Start a collective that reads and writes one tensor, or a copy that the group reaches."""
    if not goes_by_host(tensor, group):
        return start(tensor)
    host = _copied(tensor)
    return InFlight([start(host)], came=host, home=tensor)


def between(
    output: Tensor, x: Tensor, start: Callable[[Tensor, Tensor], Any], group: dist.ProcessGroup
) -> Pending:
    """Start a collective that fills `output` from `x`, or from and into copies."""
    if not goes_by_host(output, group):
        return start(output, x)
    sent, came = _copied(x), _room(output)
    return InFlight([start(came, sent)], sent, came, output)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Pending:
    """Reduce in place."""
    return in_place(tensor, partial(dist.all_reduce, op=op, group=group, async_op=True), group)


def reduce_scatter(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `full` over the ranks; each gets its shard."""
    return between(output, full, partial(_reduce_scatter, group=group, async_op=True), group)


def all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill `full` with the shards of all ranks."""
    return between(full, shard, partial(_all_gather, group=group, async_op=True), group)


def send(tensor: Tensor, target: int, group: dist.ProcessGroup) -> Pending:
    """Start to send; gloo needs somebody who waits, and who holds what it reads until then."""
    sent = _within_reach(tensor, group)
    work = dist.isend(sent, target, group=group)
    assert work is not None, "this rank is one of the two"
    return InFlight([]) if sent.is_cuda else InFlight([work], sent)  # NCCL holds what it sends


def receive(buffer: Tensor, source: int, group: dist.ProcessGroup) -> Pending:
    """Start to receive."""
    by_host = goes_by_host(buffer, group)
    came = _room(buffer) if by_host else buffer
    work = dist.irecv(came, source, group=group)
    assert work is not None, "this rank is one of the two"
    return InFlight([work], came=came, home=buffer) if by_host else work


def pass_on(tensor: Tensor, after: int, before: int, group: dist.ProcessGroup) -> InFlight:
    """Start to send to the rank after this one, and to receive as much from the one before."""
    by_host, buffer = goes_by_host(tensor, group), torch.empty_like(tensor)
    sent, came = (_copied(tensor), _room(buffer)) if by_host else (tensor, buffer)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, group),
            dist.P2POp(dist.irecv, came, before, group),
        ]
    )
    return InFlight(works, sent, came, buffer)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Functional:
    """The shards of all ranks, joined along a dim."""
    found = _gather(_within_reach(x, group), dim, group)
    return Functional(found, x.device, waits_itself=True)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Functional:
    """This rank's shard, along a dim, of the sum over all ranks."""
    found = _scatter(_within_reach(x, group), "sum", dim, group)
    return Functional(found, x.device, waits_itself=True)


def total(x: Tensor, op: str, group: dist.ProcessGroup) -> Functional:
    """The sum, or another reduction, over all ranks."""
    found = functional.all_reduce(_within_reach(x, group), op, group)
    return Functional(found, x.device, waits_itself=True)


def exchange(
    rows: Tensor, arrive: Sequence[int], leave: Sequence[int], group: dist.ProcessGroup
) -> Functional:
    """All-to-all: so many rows to each rank, and so many from it."""
    sent = _within_reach(rows, group)
    found = _ops.all_to_all_single(sent, list(arrive), list(leave), group.group_name)
    return Functional(found, rows.device, waits_itself=False)


def _within_reach(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _copied(tensor) if goes_by_host(tensor, group) else tensor


def _copied(tensor: Tensor) -> Tensor:
    """In host memory, when this returns: a backend reads it at once."""
    return _room(tensor).copy_(tensor)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

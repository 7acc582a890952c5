"""The raw collectives, wherever a tensor lies.

Where the backend of a group reaches the memory of a tensor, each of these is torch's own call.
Ranks that share one GPU cannot have that: NCCL wants a GPU for every rank, and gloo, which wants
none, moves host memory only. Their tensors are copied to pinned host memory, carried from there,
and copied back, on the current stream, by whoever waits.

Two kinds. Those that fill a given tensor return what is `Pending`. `gather`, `scatter`, `total` and
`exchange` are torch's functional collectives, which selective recomputation knows by name and never
issues twice; their result is under way, and on the host where it went that way: `landed`, or
`waited` where torch does not wait by itself, brings it home.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """What `came` to host memory belongs into `home`."""
        self.works, self.sent, self.came, self.home = works, sent, came, home

    def wait(self) -> None:
        """Until all is over, once; then nothing is held any more."""
        while self.works:
            self.works.pop().wait()
        if self.came is not None and self.home is not None:
            self.home.copy_(self.came, non_blocking=True)
        self.sent = self.came = self.home = None


def goes_by_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a group cannot reach the memory that a tensor lies in."""
    return tensor.is_cuda and dist.get_backend(group) == dist.Backend.GLOO


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Pending:
    """Reduce in place."""
    if not goes_by_host(tensor, group):
        return dist.all_reduce(tensor, op, group, async_op=True)
    host = _copied(tensor)
    return InFlight([dist.all_reduce(host, op, group, async_op=True)], came=host, home=tensor)


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `whole` over the ranks; each gets its slice."""
    if not goes_by_host(output, group):
        return _reduce_scatter(output, whole, group=group, async_op=True)
    sent, came = _copied(whole), _room(output)
    return InFlight([_reduce_scatter(came, sent, group=group, async_op=True)], sent, came, output)


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill `whole` with the parts of all ranks."""
    if not goes_by_host(whole, group):
        return _all_gather(whole, part, group=group, async_op=True)
    sent, came = _copied(part), _room(whole)
    return InFlight([_all_gather(came, sent, group=group, async_op=True)], sent, came, whole)


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


def pass_on(
    tensor: Tensor, buffer: Tensor, ahead: int, behind: int, group: dist.ProcessGroup
) -> InFlight:
    """Start to send to the rank ahead, and to receive from the one behind."""
    by_host = goes_by_host(tensor, group)
    sent, came = (_copied(tensor), _room(buffer)) if by_host else (tensor, buffer)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, ahead, group),
            dist.P2POp(dist.irecv, came, behind, group),
        ]
    )
    return InFlight(works, sent, came, buffer) if by_host else InFlight(works, sent)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, joined along a dim."""
    return _gather(_within_reach(x, group), dim, group)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice, along a dim, of the sum over all ranks."""
    return _scatter(_within_reach(x, group), "sum", dim, group)


def total(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """The sum, or another reduction, over all ranks."""
    return functional.all_reduce(_within_reach(x, group), op, group)


def exchange(
    rows: Tensor, arrive: Sequence[int], leave: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """So many rows to each rank, and so many from it. Nobody but `waited` waits for them."""
    sent = _within_reach(rows, group)
    return _ops.all_to_all_single(sent, list(arrive), list(leave), group.group_name)


def waited(under_way: Tensor, device: torch.device) -> Tensor:
    """What an exchange brought, on the device."""
    return landed(_ops.wait_tensor(under_way), device)


def landed(under_way: Tensor, device: torch.device) -> Tensor:
    """The result on the device. One that is there already is still waited for by its first use."""
    return under_way if under_way.device.type == device.type else under_way.to(device)


def _within_reach(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _copied(tensor) if goes_by_host(tensor, group) else tensor


def _copied(tensor: Tensor) -> Tensor:
    """In host memory, when this returns: a backend reads it at once."""
    return _room(tensor).copy_(tensor)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

"""The raw collectives, wherever a tensor lies.

Where the backend of a group reaches the memory of a tensor, each of these is torch's own call.
Over gloo, tensors of a GPU are copied to pinned host memory, sent from there, and copied back on
the current stream by the rank that waits.

Two kinds. Some fill a given tensor. `gather`, `scatter`, `total` and `exchange` are torch's
functional collectives: selective recomputation knows them by name and never issues them twice.

Memory: whoever has started a call holds what it reads and writes until the call was waited for.
On a GPU a wait holds back the current stream, not the host. Messages are received on a stream of
their own: they wait for nothing that this rank computes, and their memory is of that stream.

Never torch's `all_gather_into_tensor` (nor its coalesced form) on gloo. Each group has two threads
there, and both assign the name of the call that they have finished to one string without a lock
(torch 2.9 to 2.13). `ALLGATHER_COALESCED` is the one name that lies on the heap, so that two calls
in flight free it twice or write to it afterwards: one crash in about 40,000 calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Read by torch when it makes an NCCL group.
_WARNS_OF_SERIAL_MESSAGES = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...

    @property
    def done(self) -> bool:
        """Whether it has completed, also on the device."""
        ...


class InFlight:
    """Works in flight, and the buffers they read and write."""

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
        """Wait for all works, once, release the buffers, and return the result."""
        while self.works:
            self.works.pop().wait()
        tensor = self.home
        if self.came is not None and tensor is not None and self.came is not tensor:
            tensor.copy_(self.came, non_blocking=True)
        elif tensor is not None and tensor.is_cuda:  # it was made for another stream
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self.sent = self.came = self.home = None
        return tensor

    @property
    def done(self) -> bool:
        """Whether all works have completed, also on the device."""
        return all(work.is_completed() for work in self.works)


class Functional:
    """Result of a functional collective, which may be copied to `device`."""

    def __init__(
        self,
        under_way: Tensor,
        sent: Tensor,
        device: torch.device,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`arrange` is what is left to do on this rank with what came."""
        self.under_way, self.sent, self.device, self.arrange = under_way, sent, device, arrange

    def wait(self) -> Tensor:
        """Wait for the result, and return it."""
        result = _ops.wait_tensor(self.under_way)
        if result.device.type != self.device.type:
            result = result.to(self.device)
        return result if self.arrange is None else self.arrange(result)

    @property
    def done(self) -> bool:
        """Whether it has completed, which is unknown before the wait."""
        return False


def goes_by_host(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether a group needs tensors of this device to be copied to the host."""
    return device.type == "cuda" and dist.get_backend(group) == dist.Backend.GLOO


def in_place(tensor: Tensor, start: Callable[[Tensor], Any], group: dist.ProcessGroup) -> InFlight:
    """Start a collective in place, on the tensor or on a host copy."""
    reached = _within_reach(tensor, group)
    return InFlight([start(reached)], came=reached, home=tensor)


def between(
    output: Tensor, x: Tensor, start: Callable[[Tensor, Tensor], Any], group: dist.ProcessGroup
) -> InFlight:
    """Start a collective from `x` into `output`, or between host copies of them."""
    sent = _within_reach(x, group)
    came = _host_buffer(output) if goes_by_host(output.device, group) else output
    return InFlight([start(came, sent)], sent, came, output)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> InFlight:
    """Start to all-reduce in place."""
    return in_place(tensor, partial(dist.all_reduce, op=op, group=group, async_op=True), group)


def reduce_scatter(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> InFlight:
    """Start to reduce-scatter `full`."""
    return between(output, full, partial(_reduce_scatter, group=group, async_op=True), group)


def all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> InFlight:
    """Start to all-gather shards into `full`."""
    return between(full, shard, partial(_all_gather, group=group, async_op=True), group)


def expect_serial_messages() -> None:
    """Turn off torch's warning that messages of an NCCL group wait for one another, as those of a
    channel shall: it has one direction of one pair, and a group of its own, which is the first
    remedy that the warning names. The second one, `batch_isend_irecv`, would take the same
    communicator and stream, and leave single messages out of torch's flight recorder."""
    os.environ.setdefault(_WARNS_OF_SERIAL_MESSAGES, "0")


def send(tensor: Tensor, target: int, group: dist.ProcessGroup) -> InFlight:
    """Start to send."""
    sent = _within_reach(tensor, group)
    work = dist.isend(sent, target, group=group)
    assert work is not None, "this rank is one of the two"
    return InFlight([work], sent)


def receive(
    size: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    source: int,
    group: dist.ProcessGroup,
) -> InFlight:
    """Start to receive a tensor, which the wait returns."""
    by_host = goes_by_host(device, group)
    with nullcontext() if by_host else beside(device):
        buffer = torch.empty(size, dtype=dtype, device=device)
        came = _host_buffer(buffer) if by_host else buffer
        work = dist.irecv(came, source, group=group)
    assert work is not None, "this rank is one of the two"
    return InFlight([work], came=came, home=buffer)


def beside(device: torch.device) -> AbstractContextManager[object]:
    """A CUDA stream that does not wait for the computation of this rank."""
    return torch.cuda.stream(_stream(device, "recv")) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def read_on_host(device: torch.device, come: Callable[[], Tensor]) -> list[Any]:
    """The integers that `come` waits for. On a GPU the host waits for them alone, on a stream of
    their own, while this rank's computation goes on."""
    if device.type != "cuda":
        return come().tolist()
    with torch.cuda.stream(_stream(device, "counts")):
        numbers = come()
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        copied = torch.cuda.current_stream(device).record_event()
    copied.synchronize()
    return host.tolist()


def pass_on(tensor: Tensor, after: int, before: int, group: dist.ProcessGroup) -> InFlight:
    """Start to send to the next rank, and to receive as much from the previous one."""
    buffer, sent = torch.empty_like(tensor), _within_reach(tensor, group)
    came = _host_buffer(buffer) if goes_by_host(tensor.device, group) else buffer
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, group),
            dist.P2POp(dist.irecv, came, before, group),
        ]
    )
    return InFlight(works, sent, came, buffer)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Functional:
    """All-gather shards along a dim."""
    sent, size = _within_reach(x, group), group.size()
    output = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
    result = _ops.all_gather_into_tensor_out(sent, size, group.group_name, out=output)
    return Functional(result, sent, x.device, partial(_joined, size, dim) if dim else None)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Functional:
    """Reduce-scatter along a dim."""
    sent, size = _within_reach(x, group), group.size()
    if dim:
        sent = torch.cat(sent.chunk(size, dim))
    result = _ops.reduce_scatter_tensor(sent, "sum", size, group.group_name)
    return Functional(result, sent, x.device)


def total(x: Tensor, op: str, group: dist.ProcessGroup) -> Functional:
    """All-reduce out of place."""
    sent = _within_reach(x, group)
    return Functional(_ops.all_reduce(sent, op, group.group_name), sent, x.device)


def exchange(
    rows: Tensor, arrive: Sequence[int], leave: Sequence[int], group: dist.ProcessGroup
) -> Functional:
    """Start an all-to-all with the number of rows to receive from, and send to, each rank."""
    sent = _within_reach(rows, group)
    result = _ops.all_to_all_single(sent, list(arrive), list(leave), group.group_name)
    return Functional(result, sent, rows.device)


def _joined(size: int, dim: int, output: Tensor) -> Tensor:
    """What lies one after the other, side by side along a dim."""
    return torch.cat(output.chunk(size), dim)


def _within_reach(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # In host memory, when this returns: a backend reads it at once.
    return _host_buffer(tensor).copy_(tensor) if goes_by_host(tensor.device, group) else tensor


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

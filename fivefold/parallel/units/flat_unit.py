"""One flat unit on one rank: the buffers of its weights and gradients, and what fills them.

ZeRO-3 with fp8: a unit's weights come as codes, and are the values of these codes when they are
here. Rounded again by the same scales they are the same codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.layout import LocalWeight, Unit, UnitSegment, coded_shard_bytes, segments
from fivefold.model.fp8 import CODES, scale_and_factor, to_codes
from fivefold.parallel import Issued, Mesh
from fivefold.parallel.units.offload import FileReading, GradientHome, on_disk, reading

MaximumOf = Callable[[str], Tensor]
"""The maximum of the values that share a scale with a weight; of a stack of experts, of each."""


class CodedGather:
    """Gathers of one unit as fp8 codes."""

    def __init__(self, unit: Unit, mesh: Mesh, coded: frozenset[str], maximum: MaximumOf) -> None:
        self.axis, self.mesh, self.maximum = unit.shard_axis, mesh, maximum
        self.shards = [segments(unit, index, coded) for index in range(unit.num_shards)]
        self.coord, self.shard_size = mesh.coord(unit.shard_axis), unit.shard_size
        self.first = next(entry.row.name for entry in unit.entries if entry.row.name in coded)
        self.num_bytes = {
            size: coded_shard_bytes(unit, coded, size)
            for size in (torch.bfloat16.itemsize, torch.float32.itemsize, torch.float64.itemsize)
        }

    def begin(self, full: Tensor, shard: Tensor) -> CodesArriving:
        """Start to gather; the wait of the result fills `full`."""
        self.maximum(self.first)  # found together: by all ranks here, whatever their shards hold
        low, size = self.coord * self.shard_size, self.num_bytes[shard.itemsize]
        sent, end = torch.zeros(size, dtype=torch.uint8, device=full.device), 0
        for segment in self.shards[self.coord]:
            part = shard[segment.start - low : segment.stop - low]
            if segment.rounded:
                _, factor = self._scales(segment)
                part = to_codes(part.unflatten(0, (len(factor), -1)), factor, "e4m3").flatten()
            as_bytes = part.contiguous().view(torch.uint8)
            sent[end : end + len(as_bytes)] = as_bytes
            end += len(as_bytes)
        come = sent.new_empty(len(self.shards) * size)
        issued = self.mesh.all_gather(come, sent, self.axis)
        return CodesArriving(self, full, (sent, come), issued)

    def fill(self, full: Tensor, come: Sequence[Tensor]) -> None:
        """Decode the weights of all shards."""
        for sent, parts in zip(come, self.shards, strict=True):
            end = 0
            for segment in parts:
                size = (segment.stop - segment.start) * (1 if segment.rounded else full.itemsize)
                full[segment.start : segment.stop] = self._values(
                    segment, sent[end : end + size], full
                )
                end += size

    def _values(self, segment: UnitSegment, sent: Tensor, like: Tensor) -> Tensor:
        if not segment.rounded:
            return sent.view(like.dtype)
        wide = torch.promote_types(like.dtype, torch.float32)
        scale, _ = self._scales(segment)
        codes = sent.view(CODES["e4m3"]).unflatten(0, (len(scale), -1))
        return (codes.to(wide) * scale.to(wide)).flatten()

    def _scales(self, segment: UnitSegment) -> tuple[Tensor, Tensor]:
        """What multiplies codes, and values: a row for each expert, or one."""
        own = slice(segment.experts.start, segment.experts.stop)
        return scale_and_factor(self.maximum(segment.name).reshape(-1, 1)[own], "e4m3")


class CodesArriving:
    """A gather of codes in flight."""

    def __init__(
        self, gather: CodedGather, full: Tensor, buffers: tuple[Tensor, Tensor], issued: Issued
    ) -> None:
        """`buffers`: what is sent, which must live until it was, and what comes."""
        self.gather, self.full, self.buffers, self.issued = gather, full, buffers, issued

    def wait(self) -> Tensor:
        self.issued.wait()
        with torch.no_grad():
            self.gather.fill(self.full, self.buffers[1].chunk(len(self.gather.shards)))
        return self.full


Places = Mapping[str, Sequence[tuple[nn.Module, str]]]
"""Where each weight sits: the modules that hold it, and under which attribute."""
Fill = Callable[[LocalWeight], Tensor]
UnitListener = Callable[[str, str, str], None]
"""Is told of every collective of a unit: the axis, the kind, and the name of the unit."""


def ignore_collective(axis: str, kind: str, unit: str) -> None:
    """Do nothing: the default listener of collectives."""


@dataclass(frozen=True)
class UnitOptions:
    """Options of sharding: the ZeRO stage, the dtype of gradient sums, and placement.

    `without_weights` names blocks whose backward reads no weight (an embedding), so that none is
    gathered for it. In stage 3, `keeps_weights` leaves whole weights here from their first use in a
    step to its end; else they leave after each use, but those of the last block wait for its
    backward where `backward_follows` the forward of the same microbatch at once. `past_autograd`
    says that every gradient is given by name, and none by autograd, which would sum those of a
    weight that a microbatch uses several times: so often as `num_uses` says, else once. The
    optimizer is given gradients `as_summed`, in the type they are summed in, or in that of the
    weights. With a folder on `disk`, stage 3 keeps weights in files there, also on one rank.
    `prefetch` counts the blocks that stage 3 gathers ahead. With a `grad_home`, reduced gradients
    leave the device for it after every microbatch. `on_collective` hears of every collective.
    """

    zero: int
    grad_dtype: torch.dtype | None = None
    offload: bool = False
    without_weights: frozenset[str] = frozenset()
    keeps_weights: bool = False
    backward_follows: bool = True
    past_autograd: bool = False
    num_uses: Mapping[str, int] = field(default_factory=dict[str, int])
    as_summed: bool = False
    disk: Path | None = None
    prefetch: int = 1
    grad_home: GradientHome | None = None
    on_collective: UnitListener = ignore_collective


@dataclass(frozen=True)
class Use:
    """Blocks that use a unit, in forward order, and when its full weights must be in memory."""

    blocks: tuple[str, ...]
    stays: bool  # from the forward to the backward: the last block is used in both at once
    read_in_backward: bool


@dataclass
class OwnedShard:
    """One weight, or the flat shard of it from element `start` on, that the optimizer of this rank
    updates.

    The gradient is there after `Data.finish`, on the device, in the type of the weight or in that
    of its sum; a weight that is kept in host memory has it elsewhere than torch's own `grad` could
    be. One that is `clipped_late`, because its type is narrow or it has left the device, or that is
    `scaled_by_update`, is multiplied by `factor` when it is used, and not in place.
    """

    row: LocalWeight
    tensor: Tensor
    start: int = 0
    gradient: Tensor | None = None
    clipped_late: bool = False
    scaled_by_update: bool = False
    factor: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        assert self.gradient is not None, f"{self.row.name} has no gradient"
        return self.gradient

    def clip(self, factor: Tensor) -> None:
        """Multiply the gradient by a clipping factor."""
        if self.clipped_late or self.scaled_by_update:
            self.factor = factor
        else:
            self.grad.mul_(factor)


class FlatUnit:
    """Weights of a unit in one buffer, `full`, of which this rank owns `shard`.

    Under stage 3 `full` has storage only between `gather` and `release`; with offload, `shard` then
    lives in host memory, or in a file.
    """

    def __init__(
        self, unit: Unit, use: Use, places: Places, mesh: Mesh, options: UnitOptions, fill: Fill
    ) -> None:
        self.unit, self.use, self.mesh, self.options = unit, use, mesh, options
        self.arriving: Issued | FileReading | CodesArriving | None = None
        self.coding: CodedGather | None = None
        self.summing: Issued | None = None
        self.gradients: Tensor | None = None  # of the full unit, from this rank's tokens
        self.written: set[str] = set()  # the weights that have one there
        self.sent: Tensor | None = None  # the same, while others read it
        self.sent_last = False
        self.received: Tensor | None = None  # of the shard, summed over the ranks, on its way
        self.gradient: Tensor | None = None  # of the shard, summed over ranks and microbatches
        self.parameters = self._adopt(places, fill)
        self.missing = self._expected()  # gradients of this microbatch that have not come yet
        self.spans = {entry.row.name: (entry.start, entry.stop) for entry in unit.entries}
        self.tell: WeakMethod[Callable[[FlatUnit], None]] | None = None
        self.grad_dtype = options.grad_dtype or self.full.dtype
        self.shard = self._own_shard()
        self.home: Tensor | None = None  # of the gradient, where it leaves the device
        if options.grad_home is not None and not unit.frozen:
            allocator = options.grad_home.allocate
            self.home = allocator(unit.shard_size, self.grad_dtype, self.full.is_cuda)
        self.owned = self._owned()
        self.present = True
        self.release()

    @property
    def sliced(self) -> bool:
        return self.unit.num_shards > 1

    @property
    def coord(self) -> int:
        """Coord of this rank on the shard axis."""
        return self.mesh.coord(self.unit.shard_axis) if self.sliced else 0

    @property
    def sheds_weights(self) -> bool:
        """Whether the full weights are in memory only while they are used."""
        return self.options.zero == 3 and (self.sliced or self.options.disk is not None)

    @property
    def reduces_every_microbatch(self) -> bool:
        if self.sliced:
            return self.options.zero >= 2
        return self.home is not None  # nobody else has a part in it

    @property
    def collects(self) -> bool:
        """Whether gradients are accumulated in a buffer of the unit instead of by autograd."""
        apart = self.options.disk is not None or self.grad_dtype != self.full.dtype
        apart = apart or self.home is not None or self.mesh.size(self.unit.sum_axis) > 1
        return apart and not self.unit.frozen

    def _adopt(self, places: Places, fill: Fill) -> dict[str, nn.Parameter]:
        """Put views of a flat buffer in the place of the modules' own weights."""
        module, attribute = places[self.unit.entries[0].row.name][0]
        dtype = getattr(module, attribute).dtype
        self.full = torch.zeros(self.unit.size, dtype=dtype, device=self.mesh.device)
        parameters: dict[str, nn.Parameter] = {}
        for entry in self.unit.entries:
            view = self.full[entry.start : entry.stop].view(entry.row.shape)
            view.copy_(fill(entry.row))
            parameter = nn.Parameter(view.data, not entry.row.frozen)  # with a version of its own
            parameters[entry.row.name] = parameter
            for module, attribute in places[entry.row.name]:
                setattr(module, attribute, parameter)
        return parameters

    def _own_shard(self) -> Tensor:
        size = self.unit.shard_size
        shard = self.full[self.coord * size : (self.coord + 1) * size]
        if not self.sheds_weights:
            return shard
        if self.options.disk is not None:
            return on_disk(self.options.disk, size, shard.dtype).copy_(shard)
        if not self.options.offload:
            return shard.clone()
        return torch.empty(size, dtype=shard.dtype, pin_memory=shard.is_cuda).copy_(shard)

    def _owned(self) -> list[OwnedShard]:
        narrow = self.options.as_summed and self.grad_dtype.itemsize < torch.float32.itemsize
        late = narrow or self.home is not None
        if not self.sliced and not self.sheds_weights:
            rows = [entry.row for entry in self.unit.entries]
            return [OwnedShard(row, self.parameters[row.name], clipped_late=late) for row in rows]
        low, starts = self.coord * self.unit.shard_size, dict[str, int]()
        for entry in self.unit.entries:
            starts[entry.row.name] = max(0, low - entry.start)
        return [
            OwnedShard(row, self.shard[start:stop].detach(), starts[row.name], clipped_late=late)
            for row, start, stop in self.unit.owned(self.coord)
        ]

    def watch_gradients(self, ready: Callable[[FlatUnit], None]) -> None:
        """Collect gradients from autograd hooks; call `ready` when those of a microbatch are
        complete."""
        if not self.collects:
            return
        self.tell = WeakMethod(ready)
        if self.options.past_autograd:
            return
        # A weight would otherwise keep its hook, and the hook the unit, and the unit the weight.
        this = ref(self)

        def collect(name: str, parameter: Tensor) -> None:
            unit = this()
            assert unit is not None and parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            unit.add(name, gradient)

        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(collect, name))

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient of one weight; the first of a sum is copied."""
        buffer = self._grad_view(name)
        if buffer is None:
            self.parameters[name].grad = gradient.to(self.full.dtype).contiguous()
        elif self._is_empty(name):
            buffer.copy_(gradient)
        else:
            buffer.add_(gradient)
        self._added(name)

    def add_product(self, name: str, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        """Accumulate outputsᵀ · inputs in the gradient of one weight."""
        buffer = self._grad_view(name)
        if buffer is None or buffer.dtype != inputs_NI.dtype:
            self.add(name, outputs_NO.T @ inputs_NI)
            return
        buffer.addmm_(outputs_NO.T, inputs_NI, beta=0 if self._is_empty(name) else 1)
        self._added(name)

    def _grad_view(self, name: str) -> Tensor | None:
        """Where the gradient of a weight is summed; None where a first one may simply be kept."""
        parameter = self.parameters[name]
        if not self.collects:
            return parameter.grad
        start, stop = self.spans[name]
        return self.share()[start:stop].view(parameter.shape)

    def _is_empty(self, name: str) -> bool:
        """Whether the room of a weight has no gradient yet, but whatever was there before."""
        return self.collects and name not in self.written

    def _added(self, name: str) -> None:
        self.written.add(name)
        self.missing.subtract([name])
        if self.tell is not None and not +self.missing:
            self.missing = self._expected()
            ready = self.tell()
            assert ready is not None
            ready(self)

    def _expected(self) -> Counter[str]:
        """How many gradients of each weight a microbatch gives."""
        uses = self.options.num_uses if self.options.past_autograd else {}
        return Counter({name: uses.get(name, 1) for name in self.parameters})

    def share(self) -> Tensor:
        """This rank's gradients of the full unit; elements not written are undefined."""
        if self.gradients is None:
            self.gradients = torch.empty(
                self.unit.size, dtype=self.grad_dtype, device=self.mesh.device
            )
        return self.gradients

    def _whole_share(self) -> Tensor:
        """The same, zero in padding and where no token reached a weight."""
        share, end = self.share(), 0
        for entry in (
            unit_entry for unit_entry in self.unit.entries if unit_entry.row.name in self.written
        ):
            if end < entry.start:
                share[end : entry.start].zero_()
            end = entry.stop
        share[end:].zero_()
        return share

    def code_by(self, coding: CodedGather) -> None:
        """Gather fp8 codes from now on."""
        self.coding = coding

    def gather(self, exact: bool = False) -> None:
        """Start to gather the full weights, if they are not in memory; `exact`: not as codes."""
        if self.present:
            return
        self.present = True
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.mesh.resized(self.full)
        if not self.sliced:
            self.arriving = reading(self.full, self.shard)
            return
        shard = self.shard.to(self.mesh.device, non_blocking=True)
        self._gather_from(shard, None if exact else self.coding)

    def _gather_from(self, shard: Tensor, coding: CodedGather | None = None) -> None:
        self._tell(self.unit.shard_axis, "all_gather")
        plain = partial(self.mesh.all_gather, axis=self.unit.shard_axis)
        self.arriving = (plain if coding is None else coding.begin)(self.full, shard)

    def _tell(self, axis: str, kind: str) -> None:
        self.options.on_collective(axis, kind, self.unit.name)

    def arrive(self) -> None:
        """Wait for the gather of the full weights."""
        if self.arriving is not None:
            self.mesh.lanes.pause()
            self.arriving.wait()
            self.arriving = None

    def release(self) -> None:
        """Free the full weights, if only the shard stays in memory."""
        if self.present and self.sheds_weights:
            self.arrive()
            self.full.untyped_storage().resize_(0)
            self.mesh.resized(self.full)
            self.present = False

    def send(self, last: bool) -> None:
        """Start to reduce this rank's gradients; `last` of the step or not."""
        self.sent, self.gradients = self._whole_share(), None
        self.written.clear()
        self.sent_last = last
        if self.unit.expert and (copies := self.mesh.layout.same_tokens) > 1:
            self.sent.div_(copies)
        if self.sliced:
            self.received = self.sent.new_empty(self.unit.shard_size)
            self._tell(self.unit.shard_axis, "reduce_scatter")
            self.summing = self.mesh.reduce_scatter(self.received, self.sent, self.unit.shard_axis)
            return
        self.received = self.sent
        if self.mesh.size(self.unit.sum_axis) > 1:
            self._tell(self.unit.sum_axis, "all_reduce")
            self.summing = self.mesh.all_reduce(self.sent, self.unit.sum_axis, dist.ReduceOp.SUM)

    def receive(self) -> None:
        """Wait for the reduction; after the last one of a step, sum over the replicas."""
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
        assert self.received is not None
        received, self.received, self.sent = self.received, None, None
        if self.gradient is not None:
            received.add_(self.gradient.to(received.device, non_blocking=True))
        self.gradient = received
        replicated = not self.unit.expert and self.mesh.size("replicate") > 1
        if self.sent_last and self.sliced and replicated:
            self._tell("replicate", "all_reduce")
            self.summing = self.mesh.all_reduce(self.gradient, "replicate", dist.ReduceOp.SUM)
        if self.home is not None:
            self._leave(self.home)

    def _leave(self, home: Tensor) -> None:
        """Move the gradient from the device."""
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
        assert self.gradient is not None
        self.gradient = home.copy_(self.gradient, non_blocking=True)

    def hand_over(self) -> None:
        """Set the gradients of the optimizer's weights, in the dtype of these."""
        if not self.collects:
            for shard in self.owned:
                shard.gradient = shard.tensor.grad
            return
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
        assert self.gradient is not None
        if self.full.is_cuda and self.home is not None:
            torch.cuda.current_stream(self.full.device).synchronize()  # the host may read it now
        dtype = self.grad_dtype if self.options.as_summed else self.shard.dtype
        gradient = self.gradient.to(dtype)
        spans = {row.name: (start, stop) for row, start, stop in self.unit.owned(self.coord)}
        for shard in self.owned:
            start, stop = spans[shard.row.name]
            shard.gradient = gradient[start:stop].view(shard.tensor.shape)
            fits = shard.tensor.device == gradient.device and shard.tensor.dtype == dtype
            if fits and self.home is None:
                shard.tensor.grad = shard.gradient

    def publish(self) -> None:
        """Free the gradients, and start to gather updated weights that stay in memory."""
        self.gradient, self.sent_last = None, False
        self.missing = self._expected()
        for shard in self.owned:
            shard.gradient = shard.tensor.grad = shard.factor = None
        if self.sliced and not self.sheds_weights:
            self._gather_from(self.shard)

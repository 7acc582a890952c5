"""The memory and the collectives of actions: metered, traced once, and replayed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fivefold.core.schedule import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from fivefold.model import TokenBatch, layer_norm, rms_norm, sum_of_choices
from fivefold.model.kernels import Compute
from fivefold.parallel import (
    CollectiveRecord,
    Mesh,
    StageChunk,
    unscaled_layer_norm,
    unscaled_rms_norm,
)
from fivefold.rehearse.sizes import SizesOnly, sized_result

WEIGHTS, GRADIENTS, MASTER, OPTIMIZER = "weights", "gradients", "master", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS = "activations", "logits", "buffers"
CATEGORIES = (WEIGHTS, GRADIENTS, MASTER, OPTIMIZER, ACTIVATIONS, LOGITS, BUFFERS)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten
ONE_KERNEL = (rms_norm, layer_norm, unscaled_rms_norm, unscaled_layer_norm, sum_of_choices)
_BLOCK = 512  # bytes: what the allocator of a GPU rounds to
Delta = tuple[str, int]


class Moment(Enum):
    """A point within an action."""

    PAUSE = auto()  # its lane gives its turn to the other one
    GIVEN = auto()  # the tensor that it gives away is made
    TAKEN = auto()  # the gradient that it was given is freed


Event = Delta | CollectiveRecord | Moment


class Recording(threading.local):
    """Trace of an action: bytes with their address, collectives and pauses, in order. Each lane has
    its own: the actions of two lanes interleave."""

    events: list[tuple[int | None, Event]] | None = None

    def note(self, event: Event, address: int | None = None) -> None:
        """Append an event while tracing."""
        if self.events is not None:
            self.events.append((address, event))

    @contextmanager
    def tracing(self) -> Iterator[list[tuple[int | None, Event]]]:
        """Context in which events are recorded."""
        self.events = events = []
        try:
            yield events
        finally:
            self.events = None


class Fused:
    """Fused kernels for tensors without values: intermediates take no memory. Without a compiler
    only norms and sums of slots are fused, and `everything` is False."""

    def __init__(self, meter: Meter, everything: bool) -> None:
        self.meter, self.everything = meter, everything

    def __call__(self, compute: Compute, varies: bool = False) -> Compute:
        if self.everything or getattr(compute, "__wrapped__", compute) in ONE_KERNEL:
            return partial(self.meter.as_one_kernel, compute)
        return compute


class Meter(SizesOnly):
    """Live bytes by category, and their peak.

    It sees every operator, and so every new storage; a finalizer tells when one is freed. Sizes are
    rounded up as the allocator of a GPU does.

    `category` is what new memory is for; None: `sort` says it for each tensor.
    """

    def __init__(self, sort: Callable[[Any, Tensor], str], recording: Recording) -> None:
        super().__init__()
        self.sort, self.recording = sort, recording
        self.category: str | None = None
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak, self.at_peak = 0, dict(self.live)
        self.high = 0  # peak since `start_level`
        self.inside_kernel = 0
        self.known: dict[int, Delta] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _WAIT:  # what is waited for is there; without values torch makes it anew
            return args[0]
        result = sized_result(func, args, kwargs or {})
        if not self.inside_kernel:
            self._see_all(func, result)
        return result

    def as_one_kernel(self, compute: Compute, *inputs: Any) -> Any:
        """Count the results of a computation, without its intermediates."""
        self.inside_kernel += 1
        try:
            result = compute(*inputs)
        finally:
            self.inside_kernel -= 1
        self._see_all(aten.clone.default, result)
        return result

    def _see_all(self, func: Any, outputs: Any) -> None:
        for leaf in (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self.see(func, leaf)

    def start_level(self) -> None:
        """Start to measure `high`."""
        self.high = self.total

    def reset_peak(self) -> int:
        """Return the peak, and start another."""
        before, self.peak = self.peak, 0
        return before

    def see(self, func: Any, tensor: Tensor) -> None:
        """Count the memory of a tensor, if its storage is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known or not storage.nbytes():
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        delta = (self.category or self.sort(func, tensor), size)
        self.known[address] = delta
        weakref.finalize(storage, self._gone, address)
        self._add(address, delta)

    def resized(self, tensor: Tensor, category: str) -> None:
        """Count the resized storage of a tensor."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        _, before = self.known.get(address, (category, 0))
        if before != size:
            if address not in self.known:
                weakref.finalize(storage, self._gone, address)
            self.known[address] = (category, size)
            self._add(address, (category, size - before))

    def move(self, tensors: Iterable[Tensor], category: str) -> None:
        """Move these tensors to another category."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self.known and (known := self.known[address])[0] != category:
                self.known[address] = (category, known[1])
                self.live[known[0]] -= known[1]
                self.live[category] += known[1]

    def count(self, delta: Delta) -> None:
        """Add or subtract bytes."""
        category, size = delta
        self.live[category] += size
        self.total += size
        self.high = max(self.high, self.total)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)

    @contextmanager
    def called(self, category: str) -> Iterator[None]:
        """Context in which allocations belong to this category."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def _gone(self, address: int) -> None:
        category, size = self.known.pop(address)
        self._add(address, (category, -size))

    def _add(self, address: int, delta: Delta) -> None:
        self.recording.note(delta, address)
        self.count(delta)


Traces = dict[tuple[Hashable, str], list[Event]]
"""What actions do, by stage and kind; ranks that do the same share them."""


@dataclass(frozen=True)
class Tracer:
    """Meter, recording and earlier traces of a rehearsal."""

    meter: Meter
    recording: Recording
    traces: Traces


class ReplayingChunk:
    """A stage that runs only what no trace has: all its microbatches do the same.

    The real code runs for the first and the last microbatch, which begin and end the gradients of a
    step, and for one between them, or two where some backwards are split and some are not. All
    others repeat what those did to the memory and on the mesh, and a stub passes on tensors of the
    right size.
    """

    def __init__(
        self,
        chunk: StageChunk,
        actions: list[Action],
        tracer: Tracer,
        mesh: Mesh,
        key: Hashable,
        hidden: tuple[torch.Size, torch.dtype],
    ) -> None:
        """`actions` are those of this stage, in order; `hidden` is the activations after it."""
        self.chunk, self.mesh, self.key, self.hidden = chunk, mesh, key, hidden
        self.meter, self.recording, self.traces = tracer.meter, tracer.recording, tracer.traces
        self.inputs: dict[int, Tensor | None] = {}
        self.saved: dict[int, Tensor] = {}  # inputs that weight gradients need, with their own
        self.gradients: dict[int, Tensor] = {}  # of outputs, where weight gradients need them
        self.taken: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # such, where it was traced
        self.replays = False  # so far
        self.real, self.traced = _chosen(actions)
        kinds = {action.kind for action in actions}
        if all((key, kind) in self.traces for kind in kinds):
            self.real -= self.traced

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        self.inputs[microbatch] = x
        if microbatch in self.real:
            y: Tensor = self._run(
                FORWARD, microbatch, lambda: self.chunk.forward(x, batch, microbatch), lambda y: y
            )
            if microbatch in self.traced:
                y.register_hook(partial(self._see_gradient, microbatch))
            return y
        outputs: list[Tensor] = []
        give = partial(self._output, x, microbatch)
        self._replay(FORWARD, {Moment.GIVEN: lambda: outputs.append(give())})
        return outputs[0]

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        kind, x = INPUT_GRAD if split else BACKWARD, self.inputs.pop(microbatch)
        if split and x is not None:
            self.saved[microbatch] = x
        if microbatch in self.real:
            self._run(
                kind,
                microbatch,
                lambda: self.chunk.backward(run, microbatch, split, last),
                lambda _: None if x is None else x.grad,
            )
            return
        self._replay(kind, {Moment.GIVEN: run})
        if not split or Moment.TAKEN not in self.traces[self.key, WEIGHT_GRAD]:
            self.gradients.pop(microbatch)

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        if microbatch in self.real:
            self._run(
                WEIGHT_GRAD,
                microbatch,
                lambda: self.chunk.weight_gradients(microbatch, last),
                lambda _: None,
            )
        else:
            drop = partial(self.gradients.pop, microbatch)
            self._replay(WEIGHT_GRAD, {Moment.TAKEN: drop, Moment.GIVEN: lambda: None})
        self.saved.pop(microbatch, None)

    def _run(
        self,
        kind: str,
        microbatch: int,
        call: Callable[[], Any],
        output_of: Callable[[Any], Tensor | None],
    ) -> Any:
        """Run for real, and trace it where it is the one between; the tensor that is `given` away
        is memory of its receiver."""
        if microbatch not in self.traced:
            return call()
        storage = self.taken[microbatch]() if kind == WEIGHT_GRAD else None
        taken = None if storage is None else storage._cdata
        del storage
        with self.recording.tracing() as seen:
            result = call()
        output = output_of(result)
        address = None if output is None else output.untyped_storage()._cdata
        self.traces[self.key, kind] = _with_moments(seen, address, taken)
        return result

    def _replay(self, kind: str, moments: Mapping[Moment, Callable[[], Any]]) -> None:
        """Repeat what the traced action did, and call what belongs to its moments."""
        self.replays = True
        for event in self.traces[self.key, kind]:
            if event is Moment.PAUSE:
                self.mesh.lanes.pause()
            elif isinstance(event, Moment):
                moments[event]()
            elif isinstance(event, CollectiveRecord):
                self.mesh.repeat(event)
            else:
                self.meter.count(event)

    def _see_gradient(self, microbatch: int, gradient: Tensor) -> None:
        self.taken[microbatch] = weakref.ref(gradient.untyped_storage())

    def _output(self, x: Tensor | None, microbatch: int) -> Tensor:
        """A tensor as large as the output of this stage, whose backward has the size of `x`."""
        last = self.chunk.model.head is not None
        size, dtype = self.hidden
        like = torch.zeros((), dtype=torch.float32) if last else torch.empty(size, dtype=dtype)
        seed = torch.empty(0, requires_grad=True) if x is None else x  # which takes no memory
        return _Stub.apply(seed, like, partial(self.gradients.__setitem__, microbatch))


class _Stub(torch.autograd.Function):
    """Placeholder of a stage: sizes forward, and sizes backward. `keep` receives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.size, ctx.dtype, ctx.keep = x.shape, x.dtype, keep
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.keep(gradients[0])
        return gradients[0].new_empty(ctx.size, dtype=ctx.dtype), None, None


def _with_moments(
    seen: list[tuple[int | None, Event]], output_address: int | None, taken: int | None
) -> list[Event]:
    """What was seen, with moments instead of the bytes of two tensors, which stubs have of their
    own: the one that is `given` away, by its address, which may have been another's before, and
    the gradient that was `taken`. What is given otherwise is given in the end.
    """
    events = [event for _, event in seen]
    sizes = [event[-1] if isinstance(event, tuple) else 0 for event in events]
    places = [(where, sizes[at] > 0) for at, (where, _) in enumerate(seen)]
    if taken is not None and (taken, False) in places:
        events[places.index((taken, False))] = Moment.TAKEN
    if output_address is None or (output_address, True) not in places:
        return [*events, Moment.GIVEN]
    events[len(places) - 1 - places[::-1].index((output_address, True))] = Moment.GIVEN
    return events


def _chosen(actions: list[Action]) -> tuple[set[int], set[int]]:
    """The microbatches that run for real, and those of them that stand for the rest: one whose
    backward is not split, one whose backward is split, where there are such.

    The second backward still ends what the first one began: sums that were under way. What a split
    backward leaves to its weight gradients is known when these were traced.
    """
    forwards = [action.microbatch for action in actions if action.kind == FORWARD]
    backwards = [action.microbatch for action in actions if action.kind in (BACKWARD, INPUT_GRAD)]
    settles = [action.microbatch for action in actions if action.kind == WEIGHT_GRAD]
    ends = {forwards[0], forwards[-1], *backwards[:2], backwards[-1], *settles[:2], *settles[-1:]}
    between = [microbatch for microbatch in forwards if microbatch not in ends]
    split = [microbatch for microbatch in between if microbatch in settles]
    unsplit_forwards = [microbatch for microbatch in between if microbatch not in settles]
    traced = {*split[:1], *unsplit_forwards[:1]}
    until = [
        at
        for at, step in enumerate(actions)
        if step.kind == WEIGHT_GRAD and step.microbatch in traced
    ]
    early = {
        step.microbatch for step in actions[: max(until, default=0)] if step.kind == INPUT_GRAD
    }
    return ends | traced | early, traced

"""The pipeline dimension: one interpreter that executes any schedule value.

Splits   the layers into stages, contiguous slices, and lays one or more of them on each rank.
Moves    for every microbatch the activations from stage to stage and their gradients back, one
         message each; two stages of one rank hand over without any.
Costs    2·A a microbatch and boundary (A activations between two layers), and the bubble.
Wins     between nodes, where links are slow: nothing moves less.
Refuses  fewer layers than stages, and what its schedule refuses.

The messages of a pair of ranks are ordered in each direction as their source computes them. When a
rank posts its receives is a property of the schedule (`core/schedule/receives.py`): early enough
that they overlap a computation, and late enough that no order of events locks the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.core.layout import PIPELINE
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Message,
    Overlap,
    Schedule,
    actions_of,
    merged,
    needed,
    postings,
    sent,
)
from fivefold.model import TokenBatch
from fivefold.parallel.lanes import use_device
from fivefold.parallel.mesh import Issued, Mesh
from fivefold.parallel.stage import ActionObserver


class PipelineChunk(Protocol):
    """One stage on this rank, as the pipeline runs it."""

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        """Return activations, or the summed loss in the last stage; `x` is None in the first."""
        ...

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        """Call `run`, autograd's backward; if `split`, defer weight gradients.

        `last` says that no gradient of the step comes after it.
        """
        ...

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        """Compute the weight gradients that a split backward deferred."""
        ...


class Pipeline:
    """Interpreter of the actions of one rank; an observer is called around each."""

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        chunks: Mapping[int, PipelineChunk],
        hidden: torch.Size,
        dtype: torch.dtype,
        observer: ActionObserver | None = None,
    ) -> None:
        """`hidden` is the size of the activations between stages, as one rank holds them."""
        self.schedule, self.mesh, self.chunks = schedule, mesh, chunks
        self.observer = observer or ActionObserver()
        self.steps = merged(schedule, mesh.coord(PIPELINE))
        self.postings = postings(schedule)[mesh.coord(PIPELINE)]
        self.inbox = _Inbox(mesh, hidden, dtype)
        self.outbox = _Outbox(mesh)
        gives = (WEIGHT_GRAD, BACKWARD)
        self._last = {
            action.stage: action
            for step in self.steps
            for action in actions_of(step)
            if action.kind in gives
        }

    def run(
        self, batches: Sequence[TokenBatch], tokens: Sequence[Tensor], scale: float = 1.0
    ) -> dict[int, Tensor]:
        """Run all microbatches forward and backward; returns this rank's losses by microbatch.

        The summed loss of each microbatch is divided by its `tokens`. Backward begins with `scale`.
        """
        work = _PipelineRun(self, batches, tokens, scale)
        for step, messages in zip(self.steps, self.postings, strict=True):
            token = self.observer.begin(step)
            for message in messages:
                self.inbox.post(message)
            if isinstance(step, Action):
                work.finish(step, work.begin(step)())
            else:
                work.overlap(step)
            self.observer.end(token)
        self.outbox.flush()
        return work.losses

    def is_last(self, action: Action) -> bool:
        """Whether the action computes the last gradients of its stage."""
        return self._last[action.stage] == action


@dataclass
class _PipelineRun:
    """State of one step: what is in flight between a forward and its backward."""

    pipeline: Pipeline
    batches: Sequence[TokenBatch]
    tokens: Sequence[Tensor]
    scale: float
    inputs: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)
    handed: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def overlap(self, pair: Overlap) -> None:
        """Interleave a forward and a backward."""
        forward, backward = (self.begin(action) for action in pair)
        if self.pipeline.mesh.layout.stage_size == 1:  # no collective to hide
            self.finish(pair.forward, forward())
            self.finish(pair.backward, backward())
            return
        results = self.pipeline.mesh.lanes.run(forward, backward)
        for action, result in zip(pair, results, strict=True):
            self.finish(action, result)

    def begin(self, action: Action) -> Callable[[], Tensor | None]:
        """Wait for what the action needs; what is returned computes it."""
        if action.kind == WEIGHT_GRAD:
            return partial(self._weight_gradients, action)
        values = self._given(action)
        if action.kind == FORWARD:
            return partial(self._forward, action, values)
        return partial(self._backward, action, values)

    def _given(self, action: Action) -> Tensor | None:
        message = needed(self.pipeline.schedule, action)
        if message is not None:
            return self.pipeline.inbox.take(message)
        kind = FORWARD if action.kind == FORWARD else BACKWARD
        return self.handed.pop((action.stage, kind, action.microbatch), None)

    def _forward(self, action: Action, x: Tensor | None) -> Tensor | None:
        key = (action.stage, action.microbatch)
        learns = torch.is_grad_enabled()
        if x is not None and learns:
            x.requires_grad_()
        batch = self.batches[action.microbatch]
        result = self.pipeline.chunks[action.stage].forward(x, batch, action.microbatch)
        last = action.stage == self.pipeline.schedule.num_stages - 1
        if last:
            result = result / self.tokens[action.microbatch]
            self.losses[action.microbatch] = result.detach()
        if learns:
            self.inputs[key], self.outputs[key] = x, get_gradient_edge(result)
        return None if last else result.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        key = (action.stage, action.microbatch)
        x, output = self.inputs.pop(key), self.outputs.pop(key)
        if gradient is None:
            gradient = torch.full_like(self.losses[action.microbatch], self.scale)
        self.pipeline.chunks[action.stage].backward(
            lambda: torch.autograd.backward((output,), (gradient,)),
            action.microbatch,
            split=action.kind == INPUT_GRAD,
            last=self.pipeline.is_last(action),
        )
        return None if x is None else x.grad

    def _weight_gradients(self, action: Action) -> None:
        last = self.pipeline.is_last(action)
        self.pipeline.chunks[action.stage].weight_gradients(action.microbatch, last)

    def finish(self, action: Action, result: Tensor | None) -> None:
        """Pass the result on, to another rank or to another stage of this one."""
        if result is None:
            return
        message = sent(self.pipeline.schedule, action)
        if message is not None:
            self.pipeline.outbox.send(message, result)
            return
        forward = action.kind == FORWARD
        stage, kind = (action.stage + 1, FORWARD) if forward else (action.stage - 1, BACKWARD)
        self.handed[stage, kind, action.microbatch] = result


class _Inbox:
    """Receives of messages from other ranks."""

    def __init__(self, mesh: Mesh, hidden: torch.Size, dtype: torch.dtype) -> None:
        self.mesh, self.hidden, self.dtype = mesh, hidden, dtype
        self.coming: dict[Message, Issued] = {}

    def post(self, message: Message) -> None:
        """Begin to receive a message."""
        self.coming[message] = self.mesh.receive(self.hidden, self.dtype, message.source)

    def take(self, message: Message) -> Tensor:
        """The content of a message that was posted."""
        return self.coming.pop(message).wait()


class _Outbox:
    """Sends in flight, and their buffers. With gloo a thread for each target waits for them and
    frees the buffers."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.lines: dict[int, ThreadPoolExecutor] = {}
        self.waited_for: list[Future[object]] = []
        self.on_device: list[Issued] = []

    def send(self, message: Message, tensor: Tensor) -> None:
        issued = self.mesh.send(tensor.contiguous(), message.target)
        if self.mesh.alone:  # there is nobody to wait for
            issued.wait()
        elif self.mesh.backend == dist.Backend.NCCL:
            self.on_device = [transfer for transfer in self.on_device if not transfer.is_over()]
            self.on_device.append(issued)
        else:
            if message.target not in self.lines:
                use = partial(use_device, self.mesh.device)
                self.lines[message.target] = ThreadPoolExecutor(1, "fivefold-send", use)
            self.waited_for = [transfer for transfer in self.waited_for if not transfer.done()]
            self.waited_for.append(self.lines[message.target].submit(issued.wait))

    def flush(self) -> None:
        """Until everything has been received; on a GPU, the stream waits for it."""
        for transfer in self.waited_for:
            transfer.result()
        for transfer in self.on_device:
            transfer.wait()
        self.waited_for, self.on_device = [], []

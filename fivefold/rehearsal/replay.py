"""Actions traced once and replayed: the microbatches of a stage all do the same.

The real code runs for the first and the last microbatch of a stage, which begin and end a step's
gradients, and for one between them, or two where some backwards are split and some are not. What
those did, to the memory and on the mesh, is what all others do: in their place a stub passes
tensors of the right size on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.core.schedule.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from fivefold.model.batch import TokenBatch
from fivefold.parallel.chunk import Chunk
from fivefold.parallel.mesh import Mesh, Record
from fivefold.rehearsal.meter import Delta, Meter


@dataclass
class Trace:
    """What one action does: to the memory in order, and which collectives it issues."""

    deltas: list[Delta] = field(default_factory=list)
    calls: list[Record] = field(default_factory=list)


Traces = dict[tuple[Hashable, str], Trace]
"""By stage and kind of action; ranks that do the same share them."""


class ReplayingChunk:
    """A stage that runs for real only where it must."""

    def __init__(
        self, chunk: Chunk, actions: list[Action], meter: Meter, mesh: Mesh, traces: Traces,
        key: Hashable, size: torch.Size, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`actions` are those of this stage, in order; `size` is that of activations behind it."""
        self.chunk, self.meter, self.mesh, self.traces, self.key = chunk, meter, mesh, traces, key
        self.size, self.dtype = size, dtype
        self.inputs: dict[int, Tensor | None] = {}
        self.kept: dict[int, Tensor] = {}  # inputs that weight gradients need, with their own
        self.real, self.traced = _chosen(actions)
        kinds = {action.kind for action in actions}
        if all((key, kind) in traces for kind in kinds):
            self.real -= self.traced

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        self.inputs[microbatch] = x
        if microbatch in self.real:
            return self._run(
                FORWARD, microbatch, lambda: self.chunk.forward(x, batch, microbatch), lambda y: y
            )
        self._replay(FORWARD)
        last = self.chunk.model.head is not None
        like = (
            torch.zeros((), dtype=torch.float32)
            if last
            else torch.empty(self.size, dtype=self.dtype)
        )
        seed = torch.empty(0, requires_grad=True) if x is None else x  # which takes no memory
        return _Stub.apply(seed, like)

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        kind, x = INPUT_GRAD if split else BACKWARD, self.inputs.pop(microbatch)
        if split and x is not None:
            self.kept[microbatch] = x
        if microbatch in self.real:
            self._run(
                kind,
                microbatch,
                lambda: self.chunk.backward(run, microbatch, split, last),
                lambda _: None if x is None else x.grad,
            )
            return
        self._replay(kind)
        run()

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        if microbatch in self.real:
            self._run(
                WEIGHT_GRAD,
                microbatch,
                lambda: self.chunk.weight_gradients(microbatch, last),
                lambda _: None,
            )
        else:
            self._replay(WEIGHT_GRAD)
        self.kept.pop(microbatch, None)

    def _run(
        self,
        kind: str,
        microbatch: int,
        call: Callable[[], Any],
        given: Callable[[Any], Tensor | None],
    ) -> Any:
        """Run for real, and trace it where it is the one between; what is `given` away is the
        memory of whoever takes it."""
        if microbatch not in self.traced:
            return call()
        before, calls = self.mesh.heard, list[Record]()

        def heard(record: Record, members: tuple[int, ...]) -> None:
            calls.append(record)
            if before is not None:
                before(record, members)

        self.mesh.heard = heard
        with self.meter.tracing() as seen:
            result = call()
        self.mesh.heard = before
        passed = given(result)
        self.traces[self.key, kind] = Trace(_without(passed, seen), calls)
        return result

    def _replay(self, kind: str) -> None:
        trace = self.traces[self.key, kind]
        self.meter.replay(trace.deltas)
        for record in trace.calls:
            self.mesh.repeat(record)


class _Stub(torch.autograd.Function):
    """A stage in name only: sizes forward, and sizes backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor) -> Tensor:
        ctx.size, ctx.dtype = x.shape, x.dtype
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].new_empty(ctx.size, dtype=ctx.dtype), None


def _without(given: Tensor | None, seen: list[tuple[int, Delta]]) -> list[Delta]:
    """What was seen but the making of one tensor. Its address may have been another's before."""
    address = None if given is None else given.untyped_storage()._cdata
    made = [at for at, (where, (_, size)) in enumerate(seen) if where == address and size > 0]
    return [delta for at, (_, delta) in enumerate(seen) if at not in made[-1:]]


def _chosen(actions: list[Action]) -> tuple[set[int], set[int]]:
    """The microbatches that run for real, and those of them that stand for the rest: one whose
    backward is whole, one whose backward is split, where there are such.

    The second backward still ends what the first one began: sums that were under way.
    """
    forwards = [action.microbatch for action in actions if action.kind == FORWARD]
    backwards = [action.microbatch for action in actions if action.kind in (BACKWARD, INPUT_GRAD)]
    settles = [action.microbatch for action in actions if action.kind == WEIGHT_GRAD]
    ends = {forwards[0], forwards[-1], *backwards[:2], backwards[-1], *settles[:2], *settles[-1:]}
    between = [each for each in forwards if each not in ends]
    split = [each for each in between if each in settles]
    whole = [each for each in between if each not in settles]
    traced = {*split[:1], *whole[:1]}
    return ends | traced, traced

"""Routed experts in fp8: forward and dgrad are grouped fp8 matmuls, wgrad is one in bf16.

Gate and up read one input, and their gradients are rounded as one row. Weight gradients multiply
the dequantised operands, since which rows an expert gets together depends on the layout; until then
codes are kept, one byte a value.

Legend: M slots of this rank's experts, E experts, D model width, F expert width, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fivefold.model import Experts, ExpertStack, GradientSink, grouped_weight_gradient
from fivefold.model.fp8.linear import RoundedWeights
from fivefold.model.fp8.rounding import OverRanks
from fivefold.model.fp8.rows import (
    BothStacks,
    CodedRows,
    RowOperand,
    expert_maxima,
    round_rows,
    round_stacks,
    scaled_grouped,
    unpacked,
)

# Dgrad too, unlike that of linears: the grouped kernel of Hopper that keeps all bits takes 3.4
# times as long, more than bf16, and experts are narrow, so that its sums are short.
FAST = True

Work = Callable[[GradientSink], None]
WatchExperts = Callable[[Sequence[str], str, Tensor, Tensor | None], None]
"""Is told what was rounded: the stacks of a grouped matmul; `input`, `gradient`, `weight` or the
same weight `TURNED`; the codes; and where the rows of each expert end."""
TURNED = "weight as dgrad reads it"


class WorkQueue(Protocol):
    """Takes weight gradients that are computed later."""

    def put(self, work: Work) -> None: ...


class ExpertRounding(NamedTuple):
    """What the experts of a stage share. `over_ranks`: maxima over the ranks that have other
    columns of a row."""

    state: RoundedWeights
    over_ranks: OverRanks | None
    live: Callable[[Tensor], Tensor]
    queue: WorkQueue | None
    watch: WatchExperts | None


class RoundedExperts:
    """The experts of one layer."""

    def __init__(self, experts: Experts, names: dict[int, str], shared: ExpertRounding) -> None:
        into = [stack for stack in (experts.gate, experts.up) if stack is not None]
        self.into = RoundedStacks([names[id(stack)] for stack in into], shared)
        self.down = RoundedStacks([names[id(experts.down)]], shared)
        self.experts, self.shared = experts, shared

    def attach(self) -> None:
        """Replace the arithmetic of the experts."""
        self.experts.coding = self.begin
        self.experts.project = self.project
        self.experts.down.matmul = self.multiply_down

    def begin(self, x: Tensor) -> CodedRows:
        return CodedRows(x.shape[1], x.dtype, self.shared.live, self.experts.weigh_inputs)

    def project(
        self,
        rows: tuple[Tensor, Tensor],
        stacks: Sequence[ExpertStack],
        ends_E: Tensor,
        codes: CodedRows,
    ) -> Sequence[Tensor]:
        weights = [stack.weight for stack in stacks]
        return _ProjectCodes.apply(rows[0], ends_E, self.into, codes, *weights)

    def multiply_down(
        self, x_MF: Tensor, weight_EOI: Tensor, ends_E: Tensor, codes: CodedRows
    ) -> Tensor:
        return _DownCodes.apply(x_MF, ends_E, self.down, codes, weight_EOI)


class RoundedStacks:
    """The stacked weights of one grouped matmul, rounded once a step."""

    def __init__(self, names: Sequence[str], shared: ExpertRounding) -> None:
        self.names, self.shared = names, shared
        self.step, self.rounded = -1, list[BothStacks]()
        self.maximum: Tensor | None = None
        shared.state.join_experts(names)

    def of(self, weights: Sequence[Tensor]) -> BothStacks:
        state = self.shared.state
        known = self.step == state.step
        if known and state.cached:
            return self.rounded[0]
        parts = [weight.detach() for weight in weights]
        if not known:
            self.maximum = state.maximum(self.names[0])
        if self.maximum is None:
            self.maximum = expert_maxima(parts)
        rounded = round_stacks(parts, self.maximum)
        state.count(len(weights))
        if not known:
            self.seen("weight", rounded.rows.codes, None)
            self.seen(TURNED, rounded.turned.codes, None)
        self.step, self.rounded = state.step, [rounded] if state.cached else []
        return rounded

    def seen(self, what: str, codes: Tensor, ends_E: Tensor | None) -> None:
        if self.shared.watch is not None:
            self.shared.watch(self.names, what, codes, ends_E)

    def deliver(
        self,
        x: RowOperand,
        grads: RowOperand,
        ends_E: Tensor,
        weights: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of the weights; none if they are queued."""
        queue, dtype = self.shared.queue, weights[0].dtype
        if queue is not None:
            queue.put(partial(_deliver, x, grads, ends_E, weights, dtype))
            return [None] * len(weights)
        if not any(needs):
            return [None] * len(weights)
        weight_grads: dict[int, Tensor] = {}
        _deliver(x, grads, ends_E, weights, dtype, _CollectedGradients(weight_grads))
        return [weight_grads[id(weight)] for weight in weights]


class _CollectedGradients:
    """Gradients that autograd delivers."""

    def __init__(self, weight_grads: dict[int, Tensor]) -> None:
        self.gradients = weight_grads

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        self.gradients[id(weight)] = gradient

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        self.gradients[id(weight)] = outputs_NO.T @ inputs_NI


def _deliver(
    x: RowOperand,
    grads: RowOperand,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    sink: GradientSink,
) -> None:
    """In the type of the weights, one stack after another."""
    x_MI, start = x.values(dtype), 0
    for weight in weights:
        stop = start + weight.shape[1]
        grad_MO = grads.values(dtype, start, stop)
        sink.add_gradient(weight, grouped_weight_gradient(grad_MO, x_MI, ends_E))
        start = stop


class _ProjectCodes(torch.autograd.Function):
    """Gate and up: rows come as codes, and gradients go back as values."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        ends_E: Tensor,
        own: RoundedStacks,
        codes: CodedRows,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        packed, x = codes.read(x_MD)
        own.seen("input", x.codes, ends_E)
        y_MO = scaled_grouped(x, own.of(weights).rows, ends_E, x_MD.dtype, FAST)
        ctx.save_for_backward(packed, ends_E)
        ctx.own, ctx.weights, ctx.width = own, weights, x_MD.shape[1]
        return y_MO.split([weight.shape[1] for weight in weights], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (packed, ends_E), own, weights = ctx.saved_tensors, ctx.own, ctx.weights
        grads = round_rows(gradients, own.shared.over_ranks)
        own.seen("gradient", grads.codes, ends_E)
        back = scaled_grouped(grads, own.of(weights).turned, ends_E, gradients[0].dtype, FAST)
        needs = ctx.needs_input_grad[4:]
        weight_grads = own.deliver(unpacked(packed, ctx.width), grads, ends_E, weights, needs)
        return back, None, None, None, *weight_grads


class _DownCodes(torch.autograd.Function):
    """Down: rows come as values, and gradients come as codes."""

    @staticmethod
    def forward(
        ctx: Any, x_MF: Tensor, ends_E: Tensor, own: RoundedStacks, codes: CodedRows, weight: Tensor
    ) -> Tensor:
        x = round_rows([x_MF], own.shared.over_ranks)
        own.seen("input", x.codes, ends_E)
        ctx.save_for_backward(*x, ends_E)
        ctx.own, ctx.weight, ctx.codes, ctx.dtype = own, weight, codes, x_MF.dtype
        return scaled_grouped(x, own.of([weight]).rows, ends_E, x_MF.dtype, FAST)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_codes, scale_M, ends_E), own, weights = ctx.saved_tensors, ctx.own, [ctx.weight]
        _, grads = ctx.codes.read(gradients[0])
        own.seen("gradient", grads.codes, ends_E)
        back = scaled_grouped(grads, own.of(weights).turned, ends_E, ctx.dtype, FAST)
        needs, x = ctx.needs_input_grad[4:], RowOperand(x_codes, scale_M)
        return back, None, None, None, *own.deliver(x, grads, ends_E, weights, needs)

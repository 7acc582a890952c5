"""Deferred weight gradients: a backward split into input gradients and weight gradients.

A leaf of the model (linear, norm, embedding, bias) that uses the arithmetic of this file returns
its input gradient in backward and queues what its weight gradient needs. A split backward leaves
that in the queue until its W; a full backward computes it at once. No weight gradient comes out of
autograd, so the reduction of gradients cannot miss one. Recomputation runs once, before the input
gradient.

Legend: N tokens, I inputs, O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model import (
    Attention,
    Decoder,
    Embedding,
    ExpertStack,
    GradientSink,
    Head,
    Linear,
    Matmul,
    MixerLayer,
    Norm,
    ResidualNorm,
    Router,
    add_expert_bias,
    grouped_matmul,
    grouped_weight_gradient,
    learns,
    linear_work,
    wide_matmul,
)
from fivefold.model.kernels import Fuse, ResidualRegion, eager

Work = Callable[[GradientSink], None]
"""Computes the gradient of one leaf's weights and gives it to the sink."""


class GradientQueue:
    """Deferred weight gradients of one chunk, by microbatch."""

    def __init__(self) -> None:
        self._owed: dict[int, list[Work]] = {}
        self._take: Callable[[Work], None] | None = None

    @contextmanager
    def taking(self, sink: GradientSink) -> Iterator[None]:
        """Context of a full backward: weight gradients are computed where backward passes their
        leaf."""
        self._take = lambda work: work(sink)
        yield
        self._take = None

    @contextmanager
    def keeping(self, microbatch: int) -> Iterator[None]:
        """Context of an input-gradient pass: all weight gradients are queued."""
        self._take = self._owed.setdefault(microbatch, []).append
        yield
        self._take = None

    @torch.no_grad()
    def settle(self, microbatch: int, sink: GradientSink) -> None:
        """Compute the weight gradients of a microbatch, and free the operands of each."""
        owed = self._owed.pop(microbatch)
        owed.reverse()
        while owed:
            owed.pop()(sink)

    def put(self, work: Work) -> None:
        assert self._take is not None, "backward outside of the pipeline"
        self._take(work)

    def defer(self, decoder: Decoder, fuse: Fuse = eager) -> None:
        """Replace the arithmetic of every leaf by one that queues its weight gradient; `fuse` fuses
        its kernels."""
        for module in decoder.modules():
            if isinstance(module, Linear):
                module.matmul = self.linear
            elif isinstance(module, Head):  # in chunks, its forward would compute the gradient
                module.matmul, module.chunked = self.linear, None
            elif isinstance(module, Router):
                module.matmul, module.hold = self.wide_linear, self.hold
            elif isinstance(module, ExpertStack):
                module.matmul = module.adapted(self.grouped)
                module.add_bias = partial(add_expert_bias, later=self.later)
            elif isinstance(module, Norm):
                region, offset = _UNSCALED[module.kind], _OFFSETS.get(module.kind, 0)
                module.normalise = partial(self.norm, offset, region.by(fuse))
                if isinstance(module, ResidualNorm):
                    kernels = (offset, region.after_sum(fuse), region.by(fuse))
                    module.normalise_sum = partial(self.norm_of_sum, *kernels)
            elif isinstance(module, Embedding):
                module.lookup, module.add_positions = self.look_up, self.add_positions
            elif isinstance(module, MixerLayer | Attention):
                module.hold = self.hold

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Linear.apply(x, weight, bias, self, F.linear)

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear in float32 or wider, for routers."""
        assert bias is None, "routers have none"
        return _Linear.apply(x, weight, None, self, lambda x, weight, _: wide_matmul(x, weight))

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return _Grouped.apply(x, weight, ends, self)

    def norm(
        self,
        offset: int,
        unscaled: _Unscaled,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        return _Scale.apply(unscaled(x, eps), weight, bias, x, eps, unscaled, offset, self)

    def norm_of_sum(
        self,
        offset: int,
        unscaled_sum: Callable[..., tuple[Tensor, Tensor]],
        unscaled: _Unscaled,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        normed, total = unscaled_sum(x, y, eps)
        return _Scale.apply(normed, weight, bias, total, eps, unscaled, offset, self), total

    def look_up(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return _LookUp.apply(tokens, weight, self)

    def add_positions(self, x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        return x + self.look_up(positions, weight)

    def add(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add a bias."""
        return _Add.apply(x, bias, self)

    def later(self, weight: nn.Parameter, compute: Callable[[], Tensor]) -> None:
        """Queue a weight gradient."""
        self.put(lambda sink: sink.add_gradient(weight, compute()))

    def hold(self, weight: Tensor) -> Tensor:
        """Use a weight in a custom mixer: its gradient is computed with the input gradient, and
        delivered with the weight gradients."""
        return _Hold.apply(weight, self)


_Unscaled = Callable[..., Tensor]


def unscaled_rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def unscaled_layer_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


_UNSCALED = {
    "rms": ResidualRegion(unscaled_rms_norm),
    "rms_offset": ResidualRegion(unscaled_rms_norm),
    "layer": ResidualRegion(unscaled_layer_norm),
}
_OFFSETS = {"rms_offset": 1}  # what is added to the weights of a norm


# The weights are inputs of the functions below so that their outputs require gradients, even where
# the other input is token ids; what they return for them is None.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: GradientQueue,
        matmul: Matmul,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,), (grad,) = ctx.saved_tensors, gradients
        if learns(ctx.weight, ctx.bias):
            ctx.queue.put(partial(linear_work, ctx.weight, ctx.bias, grad, x))
        return (grad @ ctx.weight.to(grad.dtype)).to(x.dtype), None, None, None, None


class _Grouped(torch.autograd.Function):
    """Grouped GEMM over experts; rows are sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor, queue: GradientQueue
    ) -> Tensor:
        ctx.save_for_backward(x_MI, ends_E)
        ctx.weight, ctx.queue = weight_EOI, queue
        return grouped_matmul(x_MI, weight_EOI, ends_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x_MI, ends_E), (grad_MO,) = ctx.saved_tensors, gradients
        grad_MO = grad_MO.contiguous()
        if learns(ctx.weight):
            ctx.queue.put(partial(_grouped_work, ctx.weight, grad_MO, x_MI, ends_E))
        back = grouped_matmul(grad_MO, ctx.weight.transpose(1, 2), ends_E)
        return back, None, None, None


def _grouped_work(
    weight_EOI: nn.Parameter, grad_MO: Tensor, x_MI: Tensor, ends_E: Tensor, sink: GradientSink
) -> None:
    sink.add_gradient(weight_EOI, grouped_weight_gradient(grad_MO, x_MI, ends_E))


class _Scale(torch.autograd.Function):
    """Weight and bias of a norm. The norm saves `x` too; its output is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        eps: float,
        unscaled: _Unscaled,
        offset: int,
        queue: GradientQueue,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.eps, ctx.unscaled, ctx.queue = weight, bias, eps, unscaled, queue
        ctx.offset = offset
        scaled = _scaled(normed, weight, offset)
        return scaled if bias is None else scaled.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,) = ctx.saved_tensors, gradients
        again = partial(ctx.unscaled, x, ctx.eps)
        if learns(ctx.weight, ctx.bias):
            ctx.queue.put(partial(_scale_work, ctx.weight, ctx.bias, grad, again))
        return _scaled(grad, ctx.weight, ctx.offset), *(None,) * 7


def _scaled(x: Tensor, weight: Tensor, offset: int) -> Tensor:
    """Times the weight of a norm, to which an offset is added in float32 or wider."""
    if not offset:
        return x * weight
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x * (weight.to(wide) + offset)).to(x.dtype)


def _scale_work(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    grad: Tensor,
    again: Callable[[], Tensor],
    sink: GradientSink,
) -> None:
    tokens = tuple(range(grad.dim() - 1))
    if learns(weight):
        with torch.no_grad():
            wide = torch.promote_types(grad.dtype, torch.float32)
            sink.add_gradient(weight, (grad.to(wide) * again().to(wide)).sum(tokens))
    if bias is not None and learns(bias):
        sink.add_gradient(bias, grad.sum(tokens))


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, queue: GradientQueue) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (tokens,), (grad,) = ctx.saved_tensors, gradients
        if learns(ctx.weight):
            ctx.queue.put(partial(_look_up_work, ctx.weight, grad, tokens))
        return None, None, None


def _look_up_work(weight: nn.Parameter, grad: Tensor, tokens: Tensor, sink: GradientSink) -> None:
    rows = weight.shape[0]
    dense = torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False)
    sink.add_gradient(weight, dense)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, queue: GradientQueue) -> Tensor:
        ctx.bias, ctx.queue = bias, queue
        return x + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = gradients
        if learns(ctx.bias):
            ctx.queue.put(partial(_add_work, ctx.bias, grad))
        return grad, None, None


def _add_work(bias: nn.Parameter, grad: Tensor, sink: GradientSink) -> None:
    sink.add_gradient(bias, grad.sum(tuple(range(grad.dim() - 1))))


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, queue: GradientQueue) -> Tensor:
        ctx.weight, ctx.queue = weight, queue
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        if learns(ctx.weight):
            ctx.queue.put(partial(_hold_work, ctx.weight, gradients[0]))
        return None, None


def _hold_work(weight: nn.Parameter, grad: Tensor, sink: GradientSink) -> None:
    sink.add_gradient(weight, grad)

"""Low-rank adapters (LoRA) beside frozen linears: y + scale·B·(A·x).

The plain model adds them by torch's own operators. `AdaptedMath` is the same as `LinearMath`, so
that the collectives of a split linear serve its adapter too: A reads the input that was gathered
for the linear, and B adds to the outputs before they are summed. What a backward needs of A·x is
computed again: it takes rank · inputs multiplications for a token.

Legend: N tokens, I inputs, O outputs of a linear, R rank; E experts, M rows of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.linear_math import Biases, GradientSink, PlainMath, Values


class LowRank(nn.Module):
    """The two factors of an adapter, of one linear or of stacked experts."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale


def adapted_linear(adapter: LowRank, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, and the adapter."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scale


def adapted_grouped(
    adapter: LowRank, matmul: Callable[..., Tensor], x_MI: Tensor, weight: Tensor, ends_E: Tensor
) -> Tensor:
    """The matmuls of all experts, and their adapters by the same `matmul`."""
    low_MR = matmul(x_MI, adapter.a, ends_E) * adapter.scale
    return matmul(x_MI, weight, ends_E) + matmul(low_MR, adapter.b, ends_E)


class AdaptedMath(PlainMath):
    """Linears of one input, of which some have an adapter."""

    def __init__(self, adapters: Sequence[LowRank | None]) -> None:
        self.adapters = adapters

    def extra(self) -> Sequence[Tensor]:
        return [factor for each in self.adapters if each for factor in (each.a, each.b)]

    def multiply(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        made = super().multiply(x, weights, biases, outs)
        for adapter, out_NO in zip(self.adapters, made, strict=True):
            if adapter is not None:
                out_NO.addmm_(x[0] @ adapter.a.T, adapter.b.T, alpha=adapter.scale)
        return made

    def back(
        self, grads: list[Tensor], weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        made = super().back(grads, weights, number, chunks, out)
        for adapter, grad in zip(self.adapters, grads, strict=True):
            if adapter is not None:
                low_NR = grad.chunk(chunks)[number] @ adapter.b
                made.addmm_(low_NR, adapter.a, alpha=adapter.scale)
        return made

    def works(
        self, x: list[Tensor], grads: list[Tensor], weights: Sequence[Tensor], biases: Biases
    ) -> Sequence[Callable[[GradientSink], None]]:
        pairs = [(each, grad) for each, grad in zip(self.adapters, grads, strict=True) if each]
        of_adapters = [partial(_adapter_work, each, grad, x[0]) for each, grad in pairs]
        return [*super().works(x, grads, weights, biases), *of_adapters]


def _adapter_work(adapter: LowRank, grad_NO: Tensor, x_NI: Tensor, sink: GradientSink) -> None:
    """The gradients of both factors."""
    sink.add_product(adapter.b, grad_NO, (x_NI @ adapter.a.T).mul_(adapter.scale))
    sink.add_product(adapter.a, (grad_NO @ adapter.b).mul_(adapter.scale), x_NI)

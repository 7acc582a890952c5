"""Low-rank adapters (LoRA) beside frozen linears: y + scale·B·(A·x).

The plain model adds them by torch's own operators. `AdaptedMath` is the same as `LinearMath`, so
that the collectives of a split linear serve its adapter too: A reads the input that was gathered
for the linear, and B adds to the outputs before they are summed. What a backward needs of A·x is
computed again: it takes rank · inputs multiplications for a token.

Adapters of one base that are served together lie side by side as one: A has the ranks of all of
them as rows, B as columns, and `TokenRanks` leaves each token those of its own.

Legend: N tokens, I inputs, O outputs of a linear, R rank; E experts, M rows of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.linear_math import Biases, GradientSink, PlainMath, Sent, Values, add_products

Select = Callable[[Tensor], Tensor]
"""Of A·x, (N, R), or of several such side by side: what each token has of it."""


def every_rank(low_NR: Tensor) -> Tensor:
    """All tokens have all ranks."""
    return low_NR


class LowRank(nn.Module):
    """The two factors of an adapter, of one linear or of stacked experts."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale
        self.select: Select = every_rank  # seam: generation with several adapters


class TokenRanks:
    """Which ranks of adapters that lie side by side act on each token of a step.

    Adapter 1 has the first `ranks[0]` of them and so on; tokens of number 0 are of the base.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        owners = [number for number, rank in enumerate(ranks, 1) for _ in range(rank)]
        self.owners_R = torch.tensor(owners, device=device)
        self.own_NR: Tensor | None = None

    def attach(self, model: nn.Module) -> None:
        """Use these ranks in all adapters of a model."""
        for module in model.modules():
            if isinstance(module, LowRank):
                module.select = self.select

    def begin(self, adapters_N: Tensor) -> None:
        """Use the adapters of these tokens from now on, on their device and without a wait."""
        self.own_NR = adapters_N[:, None] == self.owners_R

    def select(self, low_NR: Tensor) -> Tensor:
        """Zero where a rank is not the token's own, even if another adapter overflows there."""
        assert self.own_NR is not None, "no step has begun"
        parts_NPR = low_NR.unflatten(-1, (-1, len(self.owners_R)))
        return torch.where(self.own_NR[:, None], parts_NPR, 0.0).flatten(-2)


def adapted_linear(adapter: LowRank, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, and the adapter."""
    low = adapter.select(F.linear(x, adapter.a))
    return F.linear(x, weight, bias) + F.linear(low, adapter.b) * adapter.scale


def adapted_grouped(
    adapter: LowRank, matmul: Callable[..., Tensor], x_MI: Tensor, weight: Tensor, ends_E: Tensor
) -> Tensor:
    """The matmuls of all experts, and their adapters by the same `matmul`."""
    low_MR = matmul(x_MI, adapter.a, ends_E) * adapter.scale
    return matmul(x_MI, weight, ends_E) + matmul(low_MR, adapter.b, ends_E)


class _OutputGradients(NamedTuple):
    """Gradients of all outputs, and what they are to the inner side of the adapters: these lie
    side by side, as the adapters follow one another."""

    of_outputs: list[Tensor]
    low_NR: Tensor


class AdaptedMath(PlainMath):
    """Linears of one input, of which some have an adapter. Passes over the tokens are what adapters
    cost: A of all of them is one matmul."""

    def __init__(self, adapters: Sequence[LowRank | None]) -> None:
        self.adapters = adapters
        self.present = [adapter for adapter in adapters if adapter is not None]
        self.ranks = [len(adapter.a) for adapter in self.present]

    def extra(self) -> Sequence[Tensor]:
        return [factor for adapter in self.present for factor in (adapter.a, adapter.b)]

    def fprop(
        self, x: list[Tensor], weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        (x_NI,) = x
        outputs = outs or [x_NI.new_empty(len(x_NI), len(weight)) for weight in weights]
        low_NR = self.present[0].select(x_NI @ self._joined_a().T)
        lows = iter(low_NR.split(self.ranks, dim=1))
        for adapter, weight, bias, out_NO in zip(
            self.adapters, weights, biases, outputs, strict=True
        ):
            if adapter is None:
                super().fprop(x, [weight], [bias], [out_NO])
                continue
            # The adapter first: the linear's matmul adds to it, which costs no pass of its own.
            start, beta = (out_NO, 0) if bias is None else (bias, 1)
            low = {"beta": beta, "alpha": adapter.scale, "out": out_NO}
            torch.addmm(start, next(lows), adapter.b.T, **low).addmm_(x_NI, weight.T)
        return outputs

    def operands(self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool) -> Any:
        values = super().operands(sent, run, gradient, with_columns)
        if not gradient:
            return values
        low_NR = values[0].new_empty(len(values[0]), sum(self.ranks))
        triples = zip(
            self.present, self._of_adapters(values), low_NR.split(self.ranks, 1), strict=True
        )
        for adapter, grad_NO, low in triples:
            low.addmm_(grad_NO, adapter.b, beta=0, alpha=adapter.scale)
        return _OutputGradients(values, low_NR)

    def dgrad(
        self, grads: _OutputGradients, weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        low_NR, joined = grads.low_NR.chunk(chunks)[number], self._joined_a()
        x_grad = low_NR.new_empty(len(low_NR), joined.shape[1]) if out is None else out
        torch.mm(low_NR, joined, out=x_grad)
        parts = [grad.chunk(chunks)[number] for grad in grads.of_outputs]
        return add_products(parts, weights, x_grad, begun=True)

    def wgrads(
        self, x: list[Tensor], grads: _OutputGradients, weights: Sequence[Any], biases: Biases
    ) -> Sequence[Callable[[GradientSink], None]]:
        of_linears = super().wgrads(x, grads.of_outputs, weights, biases)
        return [*of_linears, partial(self._adapter_work, x[0], grads)]

    def _adapter_work(self, x_NI: Tensor, grads: _OutputGradients, sink: GradientSink) -> None:
        """The gradients of both factors of all adapters."""
        lows = (x_NI @ self._joined_a().T).split(self.ranks, dim=1)
        of_a = (grads.low_NR.T @ x_NI).split(self.ranks)
        outputs = self._of_adapters(grads.of_outputs)
        for adapter, grad_NO, low_NR, of_one in zip(self.present, outputs, lows, of_a, strict=True):
            sink.add_product(adapter.b, grad_NO, low_NR * adapter.scale)
            sink.add_gradient(adapter.a, of_one)

    def _of_adapters(self, of_linears: Values) -> Values:
        """Of what belongs to linears, what belongs to those with an adapter."""
        pairs = zip(self.adapters, of_linears, strict=True)
        return [value for adapter, value in pairs if adapter is not None]

    def _joined_a(self) -> Tensor:
        """A of all adapters, one below another."""
        parts = [adapter.a for adapter in self.present]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

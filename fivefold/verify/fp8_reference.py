"""The reference's own fp8, from `docs/fp8.md` alone: it shares no code with `rounding.py`.

Values that share a scale are cut out one after another and rounded where they are; matmuls are
those of torch on the rounded values. The batch has all rows of the step, in runs of one microbatch
of one dp rank.

Legend: R rows of the step, S tokens of a row, W columns, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fivefold.core.layout import Fp8
from fivefold.model import Block, Decoder, ExpertStack, Linear, MoeMlp


class RoundedCodes(NamedTuple):
    """fp8 codes of values, (R, S, W), or of a weight, (O, I). `noise` marks values that share a
    scale and are zero but for errors of float64 sums, which depend on the order of a sum."""

    codes: NDArray[np.uint8]
    noise: NDArray[np.bool_]


Codes = dict[tuple[str, str], RoundedCodes]
"""By the linears of a fused matmul and operand."""
Share = tuple[Any, tuple[int, ...]]
"""Where values are, and the dims of it over which they share a scale."""
_SIDE, _SMALL_SIDE = 128, 32
_NOISE = 2.0**-44  # of the largest value of a tensor: 512 errors of float64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ENDS = {_E4M3: 448.0, _E5M2: 57344.0}


CodeArray = NDArray[np.uint8]
RowKey = tuple[str, str, int]
"""Stacks of a grouped matmul, operand, and the number of an expert: on this rank, or of all."""


class ExpertCodes(NamedTuple):
    """fp8 codes of experts: rows of each, (M, W), and weights, (E, O, I). `noise` marks rows that
    are zero but for errors of float64 sums."""

    rows: dict[RowKey, CodeArray]
    noise: dict[RowKey, NDArray[np.bool_]]
    weights: dict[str, CodeArray]


class ReferenceFp8:
    """Rounds the operands of a plain model's linears, and records all codes of a step."""

    def __init__(self, fp8: Fp8, rows_in_microbatch: int) -> None:
        self.fp8, self.rows = fp8, rows_in_microbatch
        self.tensorwise, self.rounds_wgrad = fp8.scaling == "tensorwise", fp8.wgrad == "fp8"
        self.small = fp8.scaling == "mxfp8"
        self.cuts = partial(_cuts, _SMALL_SIDE if self.small else _SIDE)
        self.of_gradients = _E4M3 if fp8.gradients == "e4m3" else _E5M2
        self.codes: Codes = {}
        self.of_experts = ExpertCodes({}, {}, {})

    def attach(self, model: Decoder) -> None:
        """Replace the arithmetic of linears in attention, MLPs and experts."""
        names = {module: name for name, module in model.named_modules()}
        last = model.shape.layers - self.fp8.last
        for block in model.all_blocks():
            if self.fp8.first <= block.number < last or block.number >= model.shape.layers:
                self._attach(block, names)

    def _attach(self, block: Block, names: dict[nn.Module, str]) -> None:
        mlp = block.mlp.shared if isinstance(block.mlp, MoeMlp) else block.mlp
        if isinstance(block.mlp, MoeMlp):
            experts = block.mlp.experts
            experts.project = partial(self.experts_in, names)
            experts.down.matmul = partial(self.experts_out, names[experts.down])
        for outer in (block.attention, mlp):
            if outer is not None:
                outer.project = partial(self.together, names)
            for module in () if outer is None else outer.modules():
                if isinstance(module, Linear):
                    module.matmul = partial(self.alone, names[module])

    def take(self) -> Codes:
        """Return the codes of a step."""
        codes, self.codes = self.codes, {}
        return codes

    def take_rows(self) -> ExpertCodes:
        """Return the rows and weights that experts of a step read."""
        codes, self.of_experts = self.of_experts, ExpertCodes({}, {}, {})
        return codes

    def experts_in(
        self,
        names: dict[nn.Module, str],
        rows: tuple[Tensor, Tensor],
        stacks: Sequence[ExpertStack],
        ends: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gate and up projection of routed experts, with the same input rows."""
        name = "+".join(names[stack] for stack in stacks)
        weights = [stack.weight for stack in stacks]
        together, sizes = torch.cat(weights, 1), [stack.shape[1] for stack in weights]
        return _RoundedRows.apply(rows[0], together, self, name, ends.tolist()).split(sizes, 1)

    def experts_out(self, name: str, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return _RoundedRows.apply(x, weight, self, name, ends.tolist())

    def expert_rows(self, name: str, what: str, expert: int, x: Tensor, least: Tensor) -> Tensor:
        """Round the rows of one expert, with a scale each, in e4m3."""
        largest, codes, values = _shared(x, (1,), _E4M3)
        self.of_experts.rows[name, what, expert] = codes.view(torch.uint8).cpu().numpy().copy()
        self.of_experts.noise[name, what, expert] = (largest <= least)[:, 0].cpu().numpy()
        return values

    def expert_weights(self, name: str, weight_EOI: Tensor) -> Tensor:
        """Round the weights of experts, with a scale for each expert."""
        _, codes, values = _shared(weight_EOI, (1, 2), _E4M3)
        self.of_experts.weights[name] = codes.view(torch.uint8).cpu().numpy().copy()
        return values

    def alone(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (y,) = _Rounded.apply(self, name, x, weight)
        return y if bias is None else y + bias

    def together(
        self, names: dict[nn.Module, str], x: Tensor, linears: Sequence[Linear]
    ) -> tuple[Tensor, ...]:
        name = "+".join(names[layer] for layer in linears)
        outputs = _Rounded.apply(self, name, x, *(layer.weight for layer in linears))
        pairs = zip(outputs, linears, strict=True)
        return tuple(y if linear.bias is None else y + linear.bias for y, linear in pairs)

    def by_width(self, key: tuple[str, str], x_RSW: Tensor, widths: Sequence[int]) -> Tensor:
        """Round for a matmul that sums over the width: inputs, or gradients of so many outputs."""
        shares = self._microbatches(x_RSW)
        if not self.tensorwise:
            shares = (((..., columns), (2,)) for columns in self.cuts(widths))
        return self._rounded(key, x_RSW, shares)

    def by_tokens(self, key: tuple[str, str], x_RSW: Tensor) -> Tensor:
        """Round for a matmul that sums over tokens."""
        shares = self._microbatches(x_RSW)
        if not self.tensorwise:
            shares = (((slice(None), tokens), (1,)) for tokens in self.cuts([x_RSW.shape[1]]))
        return self._rounded(key, x_RSW, shares)

    def weights(self, name: str, weight_OI: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Round weights for the forward, and for the input gradient."""
        columns = [slice(None)] if self.tensorwise else list(self.cuts([weight_OI.shape[1]]))
        rows = [slice(None)] if self.tensorwise else list(self.cuts(widths))
        if self.small:
            along = (((slice(None), wide), (1,)) for wide in columns)
            forward = self._rounded((name, "weight"), weight_OI, along)
            down = (((high, slice(None)), (0,)) for high in rows)
            return forward, self._rounded((name, "weight, turned"), weight_OI, down)
        shares = (((high, wide), (0, 1)) for high in rows for wide in columns)
        rounded_weight = self._rounded((name, "weight"), weight_OI, shares)
        return rounded_weight, rounded_weight

    def _microbatches(self, x: Tensor) -> Iterator[Share]:
        starts = range(0, len(x), self.rows)
        return ((slice(start, start + self.rows), (0, 1, 2)) for start in starts)

    def _rounded(self, key: tuple[str, str], x: Tensor, shares: Iterable[Share]) -> Tensor:
        """The rounded values; their codes are kept."""
        kind = self.of_gradients if key[1].startswith("gradient") else _E4M3
        codes, values = torch.empty_like(x, dtype=kind), torch.empty_like(x)
        noise, least = torch.empty_like(x, dtype=torch.bool), x.abs().max() * _NOISE
        for where, dims in shares:
            largest, codes[where], values[where] = _shared(x[where], dims, kind, self.small)
            noise[where] = largest <= least
        as_bytes = codes.contiguous().view(torch.uint8).cpu().numpy().copy()
        self.codes[key] = RoundedCodes(as_bytes, noise.cpu().numpy())
        return values


def _shared(
    part: Tensor, dims: tuple[int, ...], kind: torch.dtype, small: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The maxima, codes and rounded values of what shares scales over these dims."""
    largest = part.abs().amax(dims, keepdim=True).float()
    largest = torch.maximum(largest, torch.full_like(largest, 2.0**-100))
    scale = torch.div(largest, torch.full_like(largest, _ENDS[kind]))
    if small:  # up to the next exponent, unless the fraction has no bits
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = (part * torch.reciprocal(scale).to(part.dtype)).float().to(kind)
    return largest, codes, codes.to(part.dtype) * scale.to(part.dtype)


def _cuts(side: int, widths: Sequence[int]) -> Iterator[slice]:
    """Runs of so many, which begin anew with each width."""
    begin = 0
    for width in widths:
        for start in range(begin, begin + width, side):
            yield slice(start, min(start + side, begin + width))
        begin += width


class _Rounded(torch.autograd.Function):
    """Linears of one input, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, own: ReferenceFp8, name: str, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        widths = [len(weight) for weight in weights]
        weight_OI, back_OI = own.weights(name, torch.cat(weights), widths)
        ctx.own, ctx.name, ctx.widths = own, name, widths
        ctx.save_for_backward(x, back_OI)
        y = own.by_width((name, "input"), x, [x.shape[2]]) @ weight_OI.T
        return y.split(widths, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        own: ReferenceFp8 = ctx.own
        grad = torch.cat(gradients, 2)
        back = own.by_width((ctx.name, "gradient"), grad, ctx.widths) @ weight_OI
        if own.rounds_wgrad:
            x = own.by_tokens((ctx.name, "input, by tokens"), x)
            grad = own.by_tokens((ctx.name, "gradient, by tokens"), grad)
        of_weights = grad.flatten(0, 1).T @ x.flatten(0, 1)
        return (None, None, back, *of_weights.split(ctx.widths))


class _RoundedRows(torch.autograd.Function):
    """A linear of every routed expert. Weight gradients multiply rounded values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_EOI: Tensor, own: ReferenceFp8, name: str, ends: list[int]
    ) -> Tensor:
        rounded, least = own.expert_weights(name, weight_EOI), x.abs().max() * _NOISE
        spans = list(zip([0, *ends], ends, strict=False))
        parts = [
            own.expert_rows(name, "input", expert, x[start:end], least)
            for expert, (start, end) in enumerate(spans)
        ]
        ctx.own, ctx.name, ctx.spans = own, name, spans
        ctx.save_for_backward(rounded, *parts)
        return torch.cat([part @ weight.T for part, weight in zip(parts, rounded, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rounded, *parts), (grad,) = ctx.saved_tensors, gradients
        own, least, of_weights, back = ctx.own, grad.abs().max() * _NOISE, list[Tensor](), []
        for expert, (start, end) in enumerate(ctx.spans):
            expert_grad = own.expert_rows(ctx.name, "gradient", expert, grad[start:end], least)
            back.append(expert_grad @ rounded[expert])
            of_weights.append(expert_grad.T @ parts[expert])
        return torch.cat(back), torch.stack(of_weights), None, None, None

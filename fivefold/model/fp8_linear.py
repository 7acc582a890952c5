"""Linears in fp8: one input, one or several weights, and which of the three matmuls are rounded.

A `FusedLinears` is the arithmetic of one fused matmul: its input is rounded once for all linears
that read it, and they are one matmul where they can be. Its weights are rounded at the first use of
a step, both ways, and kept until `RoundedWeights.forget`: every microbatch of the step reads them.

Backward saves the transposed codes of the input, one byte a value, or with bf16 weight gradients
the input itself.

Legend: B rows, S tokens, N = B·S, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fivefold.core.fp8 import Fp8
from fivefold.model.attention import Attention
from fivefold.model.decoder import Block, Decoder
from fivefold.model.fp8 import OverRanks, Rounding, rounding_of, same
from fivefold.model.fp8_matmul import scaled_matmul
from fivefold.model.fp8_operand import Both, Operand, as_matrix
from fivefold.model.layers import Linear, Mlp
from fivefold.model.moe import MoeMlp
from fivefold.model.remake import saving

# Fast accumulation loses bits in long sums: gradients, which are summed over tokens and layers,
# keep them all.
_FAST_FORWARD = True


class GradientSink(Protocol):
    """Takes the gradients of weights."""

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None: ...


Put = Callable[[Callable[[GradientSink], None]], None]
"""Queues a weight gradient, for a split backward."""
Watch = Callable[[str, str, Both], None]
"""Is told what was rounded: the name of the fused matmul, `input`, `gradient` or `weight`."""


class RoundedWeights:
    """All fused matmuls of a model; `num_rounded` counts how often a weight was rounded."""

    def __init__(self) -> None:
        self.step = self.num_rounded = 0

    def forget(self) -> None:
        """The weights have changed, or may have: round them again when they are used."""
        self.step += 1


class FusedLinears:
    """The arithmetic of one fused matmul. `copied`: outputs that others save, and that may not hold
    the memory of all outputs. Without `put` autograd delivers weight gradients."""

    def __init__(
        self,
        name: str,
        fp8: Fp8,
        rounding: Rounding,
        kept: RoundedWeights,
        copied: Sequence[int] = (),
        put: Put | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.name, self.fp8, self.rounding, self.kept = name, fp8, rounding, kept
        self.copied, self.put, self.watch = copied, put, watch
        self.step, self.rounded = -1, list[Both]()

    def project(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """The outputs of linears that read the same input."""
        weights, biases = [each.weight for each in linears], [each.bias for each in linears]
        with saving(x):
            return self.outputs(x, weights, biases)

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One linear alone."""
        return self.outputs(x, [weight], [bias])[0]

    def outputs(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        return _Fused.apply(self, torch.is_grad_enabled(), x, *weights, *biases)

    def input(self, x: Tensor, both: bool) -> Both:
        return self._seen("input", self.rounding.tokens([x], "e4m3", both))

    def gradient(self, parts: Sequence[Tensor]) -> Both:
        both = self.fp8.wgrad == "fp8"
        return self._seen("gradient", self.rounding.tokens(parts, self.fp8.gradients, both))

    def weights(self, weights: Sequence[Tensor]) -> list[Both]:
        """Of each run of linears; rounded once a step."""
        if self.step != self.kept.step:
            runs = self.runs(weights)
            parts = [[weights[n].detach() for n in run] for run in runs]
            self.rounded = [self._seen("weight", self.rounding.weights(each)) for each in parts]
            self.step = self.kept.step
            self.kept.num_rounded += len(weights)
        return self.rounded

    def runs(self, weights: Sequence[Tensor]) -> list[range]:
        return self.rounding.runs([len(each) for each in weights])

    def _seen(self, what: str, rounded: Both) -> Both:
        if self.watch is not None:
            self.watch(self.name, what, rounded)
        return rounded


class _Fused(torch.autograd.Function):
    """Outputs of all linears; gradients of input, weights and biases."""

    @staticmethod
    def forward(
        ctx: Any, fused: FusedLinears, graded: bool, x: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, ...]:
        half = len(rest) // 2
        weights, biases = [each for each in rest[:half] if each is not None], rest[half:]
        rounds_wgrad = fused.fp8.wgrad == "fp8"
        rounded = fused.input(x, both=graded and rounds_wgrad)
        found: list[Tensor] = []
        for run, weight in zip(fused.runs(weights), fused.weights(weights), strict=True):
            y_NO = scaled_matmul(rounded.rows, weight.rows, x.dtype, _FAST_FORWARD)
            widths = [len(weights[n]) for n in run]
            found += y_NO.view(*x.shape[:-1], sum(widths)).split(widths, -1)
        ctx.fused, ctx.weights, ctx.biases = fused, weights, biases
        kept = rounded.columns
        ctx.shares = None if kept is None else kept.shares
        ctx.save_for_backward(*((x,) if kept is None else (kept.codes, kept.scale)))
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return tuple(
            _finished(y, bias, n in fused.copied)
            for n, (y, bias) in enumerate(zip(found, biases, strict=True))
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        fused: FusedLinears = ctx.fused
        weights: list[Tensor] = ctx.weights
        runs = fused.runs(weights)
        grad_x: Tensor | None = None
        rounded: list[Both] = []
        for run, weight in zip(runs, fused.weights(weights), strict=True):
            rounded.append(fused.gradient([gradients[n] for n in run]))
            if ctx.needs_input_grad[2]:
                assert weight.columns is not None
                part = scaled_matmul(rounded[-1].rows, weight.columns, ctx.dtype)
                grad_x = part if grad_x is None else grad_x + part
        operands = [each.columns for each in rounded]
        saved = (ctx.shares, ctx.saved_tensors)
        work = partial(_weight_gradients, saved, runs, operands, gradients, weights)
        back = None if grad_x is None else grad_x.view(ctx.shape)
        of_biases = [_bias_gradient(*each) for each in zip(ctx.biases, gradients, strict=True)]
        if fused.put is not None:
            fused.put(partial(_deliver, work, weights, ctx.biases, of_biases))
            return (None, None, back, *[None] * (2 * len(weights)))
        return (None, None, back, *work(), *of_biases)


def _finished(y: Tensor, bias: Tensor | None, copied: bool) -> Tensor:
    if bias is not None:
        return y + bias
    return y.contiguous() if copied else y


def _bias_gradient(bias: Tensor | None, gradient: Tensor) -> Tensor | None:
    return None if bias is None else as_matrix(gradient).sum(0)


def _weight_gradients(
    saved: tuple[Any, Sequence[Tensor]],
    runs: Sequence[range],
    operands: Sequence[Operand | None],
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Of each weight: from what was saved of the input, and its output gradient."""
    shares, tensors = saved
    found: list[Tensor] = []
    for run, operand in zip(runs, operands, strict=True):
        if operand is None:
            x_NI = as_matrix(tensors[0])
            found += [as_matrix(gradients[n]).T @ x_NI for n in run]
            continue
        x_IN = Operand(tensors[0], tensors[1], shares)
        together = scaled_matmul(operand, x_IN, weights[0].dtype)
        found += together.split([len(weights[n]) for n in run])
    return found


def _deliver(
    work: Callable[[], list[Tensor]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    of_biases: Sequence[Tensor | None],
    sink: GradientSink,
) -> None:
    for weight, gradient in zip(weights, work(), strict=True):
        sink.add_gradient(weight, gradient)
    for bias, gradient in zip(biases, of_biases, strict=True):
        if bias is not None and gradient is not None:
            sink.add_gradient(bias, gradient)


def round_linears(
    decoder: Decoder,
    fp8: Fp8,
    over_ranks: OverRanks = same,
    of_weights: OverRanks = same,
    put: Put | None = None,
    watch: Watch | None = None,
) -> RoundedWeights:
    """Give the linears of attention and MLPs arithmetic in fp8, in the layers that have it."""
    kept, rounding = RoundedWeights(), rounding_of(fp8, over_ranks, of_weights)
    names = {id(module): name for name, module in decoder.named_modules()}

    def fused(linear: nn.Module, copied: Sequence[int] = ()) -> FusedLinears:
        return FusedLinears(names[id(linear)], fp8, rounding, kept, copied, put, watch)

    for block in decoder.all_blocks():
        if fp8.rounds(block.number, decoder.shape.layers):
            _round_block(block, fused)
    return kept


def _round_block(block: Block, fused: Callable[..., FusedLinears]) -> None:
    mlp = block.mlp.shared if isinstance(block.mlp, MoeMlp) else block.mlp
    together: set[Linear] = set()
    if isinstance(block.attention, Attention):
        # Attention saves values, and not what the others come from.
        block.attention.project = fused(block.attention.q, copied=(2,)).project
        together |= {block.attention.q, block.attention.k, block.attention.v}
    if isinstance(mlp, Mlp) and mlp.gate is not None:
        mlp.project = fused(mlp.gate).project
        together |= {mlp.gate, mlp.up}
    inside = [block.attention, *([] if mlp is None else [mlp])]
    for module in (each for outer in inside for each in outer.modules()):
        if isinstance(module, Linear) and module not in together:
            module.matmul = fused(module).matmul

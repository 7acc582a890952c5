"""Linears in fp8: one input, one or several weights, and which of the three matmuls are rounded.

A `FusedLinears` is the arithmetic of one fused matmul: its input is rounded once for all linears
that read it, and they are one matmul where they can be. Its weights are rounded at the first use of
a step, both ways, and kept until `RoundedWeights.forget`: every microbatch of the step reads them.
Where full weights do not stay on a rank (ZeRO-3), their maximum is kept alone.

Backward saves the transposed codes of the input, one byte a value, or with bf16 weight gradients
the input itself. Tensorwise, a gather moves codes.

Legend: M tokens of this rank, N tokens that a matmul reads, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import Fp8, Fp8Format
from fivefold.model import Biases, GradientSink, Sent, Values
from fivefold.model.fp8.matmul import scaled_matmul
from fivefold.model.fp8.operand import CODES, Both, Operand
from fivefold.model.fp8.rounding import Rounding, scale_and_factor

# Fast accumulation loses bits in long sums: gradients, which are summed over tokens and layers,
# keep them all.
FAST_FORWARD = True

Watch = Callable[[Sequence[str], str, Sequence[Both], int], None]
"""Is told what was rounded: the linears of the fused matmul; `input`, `gradient` or `weight`; the
codes; and the tokens of a run."""


class RoundedWeights:
    """Says when weights are rounded; `num_rounded` counts how often one was. If not `cached`, they
    are rounded at every use, with the maximum of the step."""

    def __init__(self, cached: bool = True) -> None:
        self.cached = cached
        self.step = self.num_rounded = 0
        self.fused: list[Sequence[str]] = []  # linears of each fused matmul
        self.stacks: list[Sequence[str]] = []  # of experts, of each grouped matmul
        self.measure: Callable[[], Mapping[str, Tensor]] | None = None
        self.measured, self.maxima = -1, dict[str, Tensor]()

    def forget(self) -> None:
        """The weights have changed, or may have: round them again when they are used."""
        self.step += 1

    def join(self, names: Sequence[str]) -> None:
        """Linears of one more fused matmul."""
        self.fused.append(names)

    def join_experts(self, names: Sequence[str]) -> None:
        """Stacks of one more grouped matmul."""
        self.stacks.append(names)

    def measure_by(self, measure: Callable[[], Mapping[str, Tensor]]) -> None:
        """How the maxima of all weights are found together, by the first linear of each matmul, or
        its first stack."""
        self.measure = measure

    def maximum(self, name: str) -> Tensor | None:
        """That of a fused matmul's weight, by its first linear, or those of all experts of a
        grouped one: all are found when the first of a step is asked for. None if nobody finds them
        together."""
        if self.measure is not None and self.measured != self.step:
            self.measured, self.maxima = self.step, dict(self.measure())
        return self.maxima.get(name)

    def count(self, weights: int) -> None:
        """So many were rounded."""
        self.num_rounded += weights


class ReadOperands(NamedTuple):
    """Operands of each run of linears (of an input: one), and the values they come from."""

    rounded: list[Both]
    values: Sequence[Tensor]


class FusedLinears:
    """The arithmetic of one fused matmul. `copied`: outputs that others save, and that may not hold
    the memory of all outputs."""

    def __init__(
        self,
        names: Sequence[str],
        fp8: Fp8,
        rounding: Rounding,
        state: RoundedWeights,
        copied: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        self.names, self.fp8, self.rounding, self.state = names, fp8, rounding, state
        self.copied, self.watch, self.rounds_wgrad = copied, watch, fp8.wgrad == "fp8"
        self.step, self.rounded = -1, list[Both]()
        self.maximum: Tensor | None = None

    def extra(self) -> Values:
        return ()

    def quantize(
        self, x_MI: Tensor, gradient: bool, gathers: bool, maximum: Tensor | None = None
    ) -> Sent:
        if maximum is None:
            maximum = self.rounding.maximum([x_MI])
        if maximum is None or not (gathers and self.fp8.gathers_codes):
            return Sent(x_MI, maximum)
        rounded = self.rounding.tokens([x_MI], self._form(gradient), False, 0, maximum)
        return Sent(rounded.rows.codes.view(torch.uint8), maximum, coded=True)

    def operands(
        self, sent: Sequence[Sent], run: int, gradient: bool, with_columns: bool
    ) -> ReadOperands:
        tensors, with_columns = (
            [message.tensor for message in sent],
            with_columns and self.rounds_wgrad,
        )
        form, maximum = self._form(gradient), sent[0].maximum
        if sent[0].coded:
            assert maximum is not None
            rounded = [_of_codes(tensors[0], maximum, form, with_columns)]
        else:
            if maximum is None:
                maximum = self.rounding.maximum(tensors)
            parts = self._runs([tensor.shape[1] for tensor in tensors])
            rounded = [
                self.rounding.tokens([tensors[n] for n in part], form, with_columns, run, maximum)
                for part in parts
            ]
        self._seen("gradient" if gradient else "input", rounded, run)
        return ReadOperands(rounded, tensors)

    def chunk(self, operands: ReadOperands, number: int, chunks: int) -> ReadOperands:
        rows = [Both(pair.rows.chunk(number, chunks), None) for pair in operands.rounded]
        return ReadOperands(rows, ())

    def fprop(
        self, x: ReadOperands, weights: Values, biases: Biases, outs: Values | None
    ) -> Values:
        (rounded,) = x.rounded
        products: list[Tensor] = []
        for run, weight in self._rounded_weights(weights):
            y_NO = scaled_matmul(rounded.rows, weight.rows, weights[0].dtype, FAST_FORWARD)
            products += y_NO.split([len(weights[n]) for n in run], -1)
        for number, bias in enumerate(biases):
            if bias is not None:
                products[number] = products[number] + bias
            elif number in self.copied:
                products[number] = products[number].contiguous()
        if outs is None:
            return products
        return [out.copy_(product) for out, product in zip(outs, products, strict=True)]

    def dgrad(
        self, grads: ReadOperands, weights: Values, number: int, chunks: int, out: Tensor | None
    ) -> Tensor:
        total: Tensor | None = None
        pairs = zip(grads.rounded, self._rounded_weights(weights), strict=True)
        for rounded, (_, weight) in pairs:
            assert weight.columns is not None
            rows = rounded.rows.chunk(number, chunks)
            part = scaled_matmul(rows, weight.columns, weights[0].dtype)
            total = part if total is None else total + part
        assert total is not None
        return total if out is None else out.copy_(total)

    def save(
        self, x: ReadOperands | None, sent: Sent, run: int
    ) -> tuple[Values, Callable[[Values], Any]]:
        if not self.rounds_wgrad:
            return [sent.tensor], partial(ReadOperands, [])
        columns = None if x is None else x.rounded[0].columns
        if columns is not None:
            return [columns.codes, columns.scale], partial(_kept_columns, columns.shares)
        with_maximum = [] if sent.maximum is None else [sent.maximum]
        return [sent.tensor, *with_maximum], partial(self._read_again, sent.coded, run)

    def wgrads(
        self, x: ReadOperands, grads: ReadOperands, weights: Sequence[Any], biases: Sequence[Any]
    ) -> Sequence[Callable[[GradientSink], None]]:
        x, needed = (self._for_wgrad(operands) for operands in (x, grads))
        return [
            partial(self._deliver, x, needed, weights),
            *(
                partial(_deliver_bias, bias, grad_NO.sum(0))
                for bias, grad_NO in zip(biases, grads.values, strict=True)
                if bias is not None
            ),
        ]

    def _for_wgrad(self, read: ReadOperands) -> ReadOperands:
        """What the weight gradients read: while they wait, nothing else of it stays in memory."""
        if not self.rounds_wgrad:
            return ReadOperands([], read.values)
        columns = [pair.columns for pair in read.rounded]
        return ReadOperands(
            [Both(operand, operand) for operand in columns if operand is not None], ()
        )

    def _deliver(
        self, x: ReadOperands, grads: ReadOperands, weights: Sequence[Tensor], sink: GradientSink
    ) -> None:
        if not self.rounds_wgrad:
            for weight, grad_NO in zip(weights, grads.values, strict=True):
                sink.add_product(weight, grad_NO, x.values[0])
            return
        x_IN, runs = x.rounded[0].columns, self._runs([len(matrix) for matrix in weights])
        for run, rounded in zip(runs, grads.rounded, strict=True):
            assert x_IN is not None and rounded.columns is not None
            together = scaled_matmul(rounded.columns, x_IN, weights[0].dtype)
            parts = together.split([len(weights[n]) for n in run])
            for number, part in zip(run, parts, strict=True):
                sink.add_gradient(weights[number], part)

    def _read_again(self, coded: bool, run: int, values: Values) -> ReadOperands:
        maximum = values[1] if len(values) > 1 else None
        return self.operands([Sent(values[0], maximum, coded)], run, False, True)

    def _rounded_weights(self, weights: Values) -> Sequence[tuple[range, Both]]:
        """Of each run of linears; rounded once a step."""
        runs = self._runs([len(weight) for weight in weights])
        known = self.step == self.state.step
        if known and self.state.cached:
            return list(zip(runs, self.rounded, strict=True))
        parts = [[weights[n].detach() for n in run] for run in runs]
        if not known:
            self.maximum = self.state.maximum(self.names[0])
            if self.maximum is None:
                together = [weight for part in parts for weight in part]
                self.maximum = self.rounding.weight_maximum(together)
        rounded = [self.rounding.weights(part, self.maximum) for part in parts]
        self.state.count(len(weights))
        if not known:
            self._seen("weight", rounded, 0)
        self.step, self.rounded = self.state.step, rounded if self.state.cached else []
        return list(zip(runs, rounded, strict=True))

    def _runs(self, widths: Sequence[int]) -> list[range]:
        return self.rounding.runs(widths)

    def _form(self, gradient: bool) -> Fp8Format:
        return self.fp8.gradients if gradient else "e4m3"

    def _seen(self, what: str, rounded: Sequence[Both], run: int) -> None:
        if self.watch is not None:
            self.watch(self.names, what, rounded, run)


def _deliver_bias(bias: Tensor, gradient: Tensor, sink: GradientSink) -> None:
    sink.add_gradient(bias, gradient)


def _of_codes(codes: Tensor, maximum: Tensor, form: Fp8Format, with_columns: bool) -> Both:
    """Codes that were gathered."""
    scale, _ = scale_and_factor(maximum, form)
    turned = (
        Operand(codes.T.contiguous().view(CODES[form]), scale, "tensor") if with_columns else None
    )
    return Both(Operand(codes.view(CODES[form]), scale, "tensor"), turned)


def _kept_columns(shares: Any, values: Values) -> ReadOperands:
    columns = Operand(values[0], values[1], shares)
    return ReadOperands([Both(columns, columns)], ())

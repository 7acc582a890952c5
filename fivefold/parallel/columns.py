"""Matmuls that are split over tp, and the collectives at both of their ends.

Several column-split linears read one input (`project`); a row-split one gives the sum over ranks
(`row_linear`). Without a tensor dimension the same code runs and issues no collective.

Order    Between the two, tokens are in the order in which gathers bring them: for each chunk, the
         tokens of rank 0, of rank 1 and so on. An MLP does not see it. Attention does, and gets its
         heads in the order of rows: a copy of this rank's heads, or no copy if a microbatch is one
         row. So nothing as wide as the model is copied before or after a collective.
Overlap  The backward of a projection gathers its input beside the matmuls of the input gradient,
         and reduces that gradient beside those of the weight gradients. In chunks, the collective
         of one chunk runs beside the matmuls of another, in forward as well.

Legend: B rows, S tokens of a row, M tokens of this rank, N tokens of all ranks of tp, I inputs,
O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model.layers import Linear
from fivefold.model.remake import Make, later, saving
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.deferred import GradientQueue, linear_work
from fivefold.parallel.mesh import Issued

Finish = Callable[[], object]
"""Waits for a collective that has begun."""


class SplitMatmuls:
    """The matmuls of one stage at the ends of split computations.

    With a `queue`, weight gradients go there and not to autograd. `overlap` is the plan's key: 0 if
    every collective is waited for at once, else the number of chunks.
    """

    def __init__(self, boundary: AxisBoundary, queue: GradientQueue | None, overlap: int) -> None:
        self.boundary, self.queue, self.overlaps = boundary, queue, overlap > 0
        self.splits = boundary.size > 1
        self.gathers = self.splits and boundary.sp
        self.chunks = max(1, overlap) if self.splits else 1

    def project(self, keeps: bool, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        """Column-split linears of one input, (N, O) each; with `keeps` only this rank's tokens of
        the input are saved."""
        weights, biases = [each.weight for each in linears], [each.bias for each in linears]
        with saving(x):
            mine = later(x) if keeps and self.gathers and torch.is_grad_enabled() else None
            return _Project.apply(x, self, mine, *weights, *biases)

    def project_rows(self, keeps: bool, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        """The same in the order of rows, (B, S, O) each."""
        return [self._to_rows(each, x.shape[0]) for each in self.project(keeps, x, linears)]

    def row_linear(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """A row-split linear, summed over ranks; under sp this rank's tokens of it, (M, O)."""
        grad = _OutputGradient()
        saved_NI = _SaveInput.apply(x_NI, weight_OI, self, grad)
        return _SumOfRows.apply(saved_NI, weight_OI.detach(), self, grad)

    def row_linear_of_rows(self, x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
        """The same of tokens in the order of rows."""
        summed = self.row_linear(self._from_rows(x_BSI), weight_OI)
        return summed.unflatten(0, (x_BSI.shape[0], -1))

    def _to_rows(self, x_NO: Tensor, rows: int) -> Tensor:
        if not self.gathers:
            return x_NO.unflatten(0, (rows, -1))
        by_rank = x_NO.unflatten(0, (self.chunks, self.boundary.size, -1)).transpose(0, 1)
        return by_rank.flatten(1, 2).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)

    def _from_rows(self, x_BSO: Tensor) -> Tensor:
        if not self.gathers:
            return x_BSO.flatten(0, 1)
        by_rank = x_BSO.unflatten(1, (self.boundary.size, -1)).transpose(0, 1).flatten(1, 2)
        return by_rank.unflatten(1, (self.chunks, -1)).transpose(0, 1).flatten(0, 2)

    def gathered(self, x_MI: Tensor) -> tuple[Tensor, Sequence[Finish]]:
        """The tokens of all ranks, and what waits for each chunk of them."""
        if not self.gathers:
            return x_MI, [_nothing]
        x_NI = x_MI.new_empty(self.boundary.size * len(x_MI), x_MI.shape[1])
        pairs = zip(x_MI.contiguous().chunk(self.chunks), x_NI.chunk(self.chunks), strict=True)
        return x_NI, [self._begin(self.boundary.start_gather(*each)) for each in pairs]

    def reduced(
        self, full_NO: Tensor, write: Callable[[int, Tensor], object]
    ) -> tuple[Tensor, Sequence[Finish]]:
        """The sum over ranks of what is written into each chunk of all tokens: under sp of this
        rank's tokens, and what waits for each chunk of it."""
        begun: list[Finish] = []
        sum_MO = full_NO
        if self.gathers:
            sum_MO = full_NO.new_empty(len(full_NO) // self.boundary.size, full_NO.shape[1])
        pairs = zip(full_NO.chunk(self.chunks), sum_MO.chunk(self.chunks), strict=True)
        for number, (full, mine) in enumerate(pairs):
            write(number, full)
            if self.gathers:
                begun.append(self._begin(self.boundary.start_scatter(full, mine)))
            elif self.splits:
                begun.append(self._begin(self.boundary.start_total(full)))
        return sum_MO, begun

    def _begin(self, issued: Issued) -> Finish:
        if self.overlaps:
            return issued.wait
        issued.wait()
        return _nothing


def _nothing() -> None:
    """There is nothing to wait for."""


class _Project(torch.autograd.Function):
    """Linears of one input: their weights and then their biases are the last arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matmuls: SplitMatmuls, mine: Make | None, *params: Any
    ) -> tuple[Tensor, ...]:
        half = len(params) // 2
        weights, biases = params[:half], params[half:]
        x_NI, arrivals = matmuls.gathered(x.flatten(0, -2))
        outputs = tuple(x_NI.new_empty(len(x_NI), len(weight)) for weight in weights)
        for number, arrive in enumerate(arrivals):
            arrive()
            part, size = x_NI.chunk(len(arrivals))[number], len(arrivals)
            for weight, bias, output in zip(weights, biases, outputs, strict=True):
                _multiply(part, weight.T, bias, output.chunk(size)[number])
        if mine is None:
            ctx.save_for_backward(x_NI)
        ctx.mine, ctx.matmuls, ctx.shape = mine, matmuls, x.shape
        ctx.weights, ctx.biases = weights, biases
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        matmuls: SplitMatmuls = ctx.matmuls
        if ctx.mine is None:
            (x_NI,), arrivals = ctx.saved_tensors, ()
        else:
            x_NI, arrivals = matmuls.gathered(ctx.mine().flatten(0, -2))
        back_MI, reduced = None, ()
        if ctx.needs_input_grad[0]:
            write = partial(_input_gradient, gradients, ctx.weights, matmuls.chunks)
            back_MI, reduced = matmuls.reduced(torch.empty_like(x_NI), write)
        for arrive in arrivals:
            arrive()
        wanted = ctx.needs_input_grad[3:]
        found = _weight_gradients(matmuls.queue, gradients, ctx.weights, ctx.biases, x_NI, wanted)
        for finish in reduced:
            finish()
        return None if back_MI is None else back_MI.view(ctx.shape), None, None, *found


class _OutputGradient:
    """The gradient of a row-split linear's output, on its way to the weight gradient."""

    def __init__(self) -> None:
        self.full_NO: Tensor | None = None

    def give(self, full_NO: Tensor) -> None:
        self.full_NO = full_NO

    def take(self) -> Tensor:
        assert self.full_NO is not None, "the backward of the sum comes first"
        full_NO, self.full_NO = self.full_NO, None
        return full_NO


class _SaveInput(torch.autograd.Function):
    """Saves the input of a row-split linear, and makes its weight gradient. It is apart from the
    sum, so that recomputation can stop before that: nothing after it saves anything."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, matmuls: SplitMatmuls, grad: _OutputGradient
    ) -> Tensor:
        ctx.save_for_backward(x_NI)
        ctx.weight, ctx.matmuls, ctx.grad = weight_OI, matmuls, grad
        return x_NI.view_as(x_NI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = (ctx.needs_input_grad[1], False)  # no bias
        parts = ([ctx.grad.take()], [ctx.weight], [None], *ctx.saved_tensors, wanted)
        return gradients[0], _weight_gradients(ctx.matmuls.queue, *parts)[0], None, None


class _SumOfRows(torch.autograd.Function):
    """The matmul of a row-split linear, and the sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, matmuls: SplitMatmuls, grad: _OutputGradient
    ) -> Tensor:
        def write(number: int, full: Tensor) -> None:
            torch.mm(x_NI.chunk(matmuls.chunks)[number], weight_OI.T, out=full)

        ctx.weight, ctx.matmuls, ctx.grad = weight_OI, matmuls, grad
        summed, begun = matmuls.reduced(x_NI.new_empty(len(x_NI), len(weight_OI)), write)
        for finish in begun:
            finish()
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_NO, arrivals = ctx.matmuls.gathered(gradients[0])
        back_NI, chunks = grad_NO.new_empty(len(grad_NO), ctx.weight.shape[1]), len(arrivals)
        for number, arrive in enumerate(arrivals):
            arrive()
            torch.mm(grad_NO.chunk(chunks)[number], ctx.weight, out=back_NI.chunk(chunks)[number])
        ctx.grad.give(grad_NO)
        return back_NI, None, None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _input_gradient(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], chunks: int, number: int, out: Tensor
) -> None:
    """That of all linears, summed inside of the matmuls."""
    for first, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        out.addmm_(gradient.chunk(chunks)[number], weight, beta=min(first, 1))


def _weight_gradients(
    queue: GradientQueue | None,
    gradients: Sequence[Tensor],
    weights: Sequence[Any],
    biases: Sequence[Any],
    x_NI: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Of all weights, then of all biases; none if they are queued."""
    if queue is not None:
        for weight, bias, grad_NO in zip(weights, biases, gradients, strict=True):
            queue.put(partial(linear_work, weight, bias, grad_NO, x_NI))
        return [None] * len(wanted)
    pairs = list(zip(gradients, wanted[: len(weights)], wanted[len(weights) :], strict=True))
    of_weights = [grad_NO.T @ x_NI if wants else None for grad_NO, wants, _ in pairs]
    return [*of_weights, *(grad_NO.sum(0) if wants else None for grad_NO, _, wants in pairs)]

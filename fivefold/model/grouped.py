"""Linears of stacked experts, on rows that are sorted by expert: a matmul for each expert, in one
kernel, and biases.

Legend: E experts, M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 16  # bytes: grouped_mm needs rows of a multiple of this
Later = Callable[[nn.Parameter, Callable[[], Tensor]], None]
"""Takes a weight and how its gradient is computed."""
AddExpertBias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
_COLUMNS = 16  # of ones: a width that grouped matmuls take


def grouped_matmul(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """One matmul for each expert: its rows, which stop at its end, times its weight."""
    if not _has_kernel(x_MI, weight_EOI.shape[1]):
        return _one_by_one(x_MI, weight_EOI, ends_E)
    y_MO = F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(y_MO)


def grouped_weight_gradient(grad_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the weight of `grouped_matmul`, (E, O, I), from that of its result: the same
    kernel that autograd calls, without the forward that autograd needs first."""
    if _has_kernel(x_MI, grad_MO.shape[1]):
        return F.grouped_mm(grad_MO.T, x_MI, offs=ends_E)
    ends = ends_E.tolist()
    rows = zip([0, *ends], ends, strict=False)
    return torch.stack([grad_MO[start:end].T @ x_MI[start:end] for start, end in rows])


def _has_kernel(x_MI: Tensor, outputs: int) -> bool:
    """Whether grouped_mm supports this type and these widths."""
    widths = (x_MI.shape[1], outputs)
    aligned = all(width * x_MI.element_size() % ALIGNMENT == 0 for width in widths)
    return aligned and x_MI.dtype != torch.float64


def _one_by_one(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    ends = ends_E.tolist()
    rows = zip(weight_EOI.unbind(), [0, *ends], ends, strict=False)
    return torch.cat([F.linear(x_MI[start:end], weight_OI) for weight_OI, start, end in rows])


class _ContiguousGradient(torch.autograd.Function):
    """Makes the gradient contiguous: the backward of grouped_mm takes no expanded one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def add_expert_bias(
    y_MO: Tensor,
    bias_EO: Tensor,
    ends_E: Tensor,
    scale_M1: Tensor | None,
    later: Later | None = None,
) -> Tensor:
    """Rows plus the bias of their expert, times the scale of the row. `later`: who computes the
    gradient of the bias."""
    return _AddBias.apply(y_MO, bias_EO, ends_E, scale_M1, later)


def _rows(bias_EO: Tensor, ends_E: Tensor, count: int) -> Tensor:
    places_M = torch.arange(count, device=ends_E.device, dtype=ends_E.dtype)
    experts_M = torch.searchsorted(ends_E, places_M, right=True)
    return bias_EO[experts_M.clamp_(max=len(bias_EO) - 1)]


def _summed(grad_MO: Tensor, ends_E: Tensor) -> Tensor:
    """The sum over the rows of each expert, in one order."""
    ones = grad_MO.new_ones(len(grad_MO), _COLUMNS)
    return grouped_weight_gradient(grad_MO.contiguous(), ones, ends_E)[:, :, 0]


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_MO: Tensor,
        bias_EO: nn.Parameter,
        ends_E: Tensor,
        scale_M1: Tensor | None,
        later: Later | None,
    ) -> Tensor:
        ctx.save_for_backward(ends_E, scale_M1)
        ctx.bias, ctx.later = bias_EO, later
        rows_MO = _rows(bias_EO, ends_E, len(y_MO))
        rows_MO = rows_MO if scale_M1 is None else rows_MO * scale_M1
        return (y_MO + rows_MO).to(y_MO.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (ends_E, scale_M1), of_scale = gradients, ctx.saved_tensors, None
        scaled = grad
        if scale_M1 is not None:
            scaled = (grad * scale_M1).to(grad.dtype)
            rows_MO = _rows(ctx.bias, ends_E, len(grad)).to(scale_M1.dtype)
            of_scale = (grad.to(scale_M1.dtype) * rows_MO).sum(1, keepdim=True)
        compute = partial(_summed, scaled, ends_E)
        of_bias = None
        if ctx.later is not None and ctx.bias.requires_grad:
            ctx.later(ctx.bias, compute)
        elif ctx.needs_input_grad[1]:
            of_bias = compute().to(ctx.bias.dtype)
        return grad, of_bias, None, of_scale, None

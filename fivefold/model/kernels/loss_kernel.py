"""The loss of a chunk of logits, and a gradient's factor, as Triton kernels.

A compiler reads logits three times: for their maximum, for the sum of exponentials, and for the
gradient. Here a program takes one row: it finds maximum and sum in one read, and reads the row a
second time to write the gradient over it. The arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.model import NOT_COUNTED

_BLOCK, _WARPS = 4096, 8  # the fastest of eight choices (docs/log.md, 2026-11-17)
_SCALED = 8192  # elements of a program
_LEAST = tl.constexpr(-3.0e38)  # below every logit, and finite: −inf minus −inf is not a number


@triton.jit
def _row_loss(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    vocab: int,
    NOT_COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counted = label != NOT_COUNTED
    row_ptr = logits_ptr + row * vocab
    target = tl.load(row_ptr + label, counted, other=0.0).to(tl.float32)
    highest, total = tl.full((), _LEAST, tl.float32), tl.zeros((), tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        x = tl.load(row_ptr + column, inside, other=0.0)
        x = tl.where(inside, x.to(tl.float32), _LEAST)
        higher = tl.maximum(highest, tl.max(x))
        exponentials = tl.where(inside, tl.exp(x - higher), 0.0)
        total = total * tl.exp(highest - higher) + tl.sum(exponentials)
        highest = higher
    log_sum = highest + tl.log(total)
    tl.store(losses_ptr + row, tl.where(counted, log_sum - target, 0.0))
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        x = tl.load(row_ptr + column, inside, other=0.0)
        gradient = tl.exp(x.to(tl.float32) - log_sum) - tl.where(column == label, 1.0, 0.0)
        tl.store(row_ptr + column, tl.where(counted, gradient, 0.0), inside)


@triton.jit
def _scaled(
    gradient_ptr: tl.tensor, factor_ptr: tl.tensor, numel: int, BLOCK: tl.constexpr
) -> None:
    factor = tl.load(factor_ptr).to(tl.float32)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + offsets, offsets < numel, other=0.0).to(tl.float32)
    tl.store(gradient_ptr + offsets, gradient * factor, offsets < numel)


def takes(tensor: Tensor) -> bool:
    """Whether the kernels compute with it."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype != torch.float64


def loss_to_gradient(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The summed loss; the logits become its gradient."""
    losses_N = logits_NV.new_empty(len(logits_NV), dtype=torch.float32)
    with torch.cuda.device(logits_NV.device):
        _row_loss[(len(logits_NV),)](
            logits_NV,
            labels_N.contiguous(),
            losses_N,
            logits_NV.shape[1],
            NOT_COUNTED=NOT_COUNTED,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return losses_N.sum()


def scale(gradient: Tensor, factor: Tensor) -> None:
    """Multiply in place, in float32."""
    with torch.cuda.device(gradient.device):
        programs = triton.cdiv(gradient.numel(), _SCALED)
        _scaled[(programs,)](gradient, factor, gradient.numel(), BLOCK=_SCALED)

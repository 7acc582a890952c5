"""The head: logits, and the sum of the token losses.

Few logits are computed at once, and autograd keeps them for their gradient. Many (`loss_chunks`)
are computed in chunks of tokens, and never kept: a chunk's logits become their own gradient, and
this one the gradient of the input and a part of the weight's, all in the forward. The backward only
multiplies both by the gradient of the loss. So a rank holds the gradient of the weight, which its
backward makes anyway, and one chunk of logits. The loss is computed in float32 or wider, and the
gradient of a narrow weight is rounded once for each chunk.

Legend: B rows, S tokens, N = B·S, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.layout import loss_chunks
from fivefold.model.batch import NOT_COUNTED
from fivefold.model.kernels import Compute, Fuse, Region, eager
from fivefold.model.layers import Matmul, linear

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
ChunkedLoss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Of input, weight and labels, in so many chunks."""
Wanted = tuple[bool, bool]
Found = tuple[Tensor, Tensor | None, Tensor | None]
"""The loss, and the gradients of input and weight that are wanted."""
_SCALED_AT_ONCE = 2**26  # elements: what a multiplication without a compiler makes besides is wide


def summed_cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The sum (never a mean) of the token losses, in float32 or wider."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), labels_N, reduction="sum", ignore_index=NOT_COUNTED)


def soft_cap(logits_NV: Tensor, cap: float) -> Tensor:
    """Logits between −cap and cap."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return (torch.tanh(logits_NV.to(wide) / cap) * cap).to(logits_NV.dtype)


def cap_in_place(logits_NV: Tensor, cap: float) -> None:
    logits_NV.copy_(soft_cap(logits_NV, cap))


def cap_slope(capped_NV: Tensor, cap: float) -> Tensor:
    """The slope of the cap, by its output."""
    wide = torch.promote_types(capped_NV.dtype, torch.float32)
    return (1 - (capped_NV.to(wide) / cap).square()).to(capped_NV.dtype)


LOSS, CAP = Region(summed_cross_entropy), Region(soft_cap)


class Head(nn.Module):
    """Vectors and labels to the summed loss. A tied head has the weight of the embedding. Logits
    may be capped."""

    def __init__(
        self, weight_VD: nn.Parameter, fuse: Fuse = eager, cap: float | None = None
    ) -> None:
        super().__init__()
        self.weight, self.cap = weight_VD, cap
        self.soft_cap = CAP.by(fuse)
        self.matmul: Matmul = linear  # seam: split backward
        self.cross_entropy: CrossEntropy = LOSS.by(fuse)  # seam: sharded vocabulary
        # Seam: sharded vocabulary; None where all logits are wanted, or their gradient later.
        self.chunked: ChunkedLoss | None = _WholeVocabulary(fuse, cap)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        x_ND, labels_N = x_BSD.flatten(0, 1), labels_BS.flatten()
        chunks = loss_chunks(len(x_ND), *self.weight.shape)
        if chunks > 1 and self.chunked is not None:
            return self.chunked(x_ND, self.weight, labels_N, chunks)
        return self.cross_entropy(self.logits(x_ND), labels_N)

    def logits(self, x_ND: Tensor) -> Tensor:
        logits_NV = self.matmul(x_ND, self.weight, None)
        return logits_NV if self.cap is None else self.soft_cap(logits_NV, self.cap)


class GradientsInForward:
    """A loss whose forward computes its gradients too, by `compute`; backward multiplies them."""

    def __init__(self, fuse: Fuse) -> None:
        self.scale = _by_hand(fuse, _scale, True, "scale")

    def apply(
        self, x_ND: Tensor, weight_VD: Tensor, compute: Callable[[Tensor, Tensor, Wanted], Found]
    ) -> Tensor:
        learns = torch.is_grad_enabled()
        return _LossWithGradients.apply(x_ND, weight_VD, compute, self.scale, learns)


class _LossWithGradients(torch.autograd.Function):
    """Keeps gradients, and no input."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        compute: Callable[[Tensor, Tensor, Wanted], Found],
        scale: Callable[[Tensor, Tensor], None],
        learns: bool,
    ) -> Tensor:
        of_x, of_weight = (learns and need for need in ctx.needs_input_grad[:2])
        loss, *ctx.gradients = compute(x_ND, weight_VD, (of_x, of_weight))
        ctx.scale = scale
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input_grads: list[Tensor | None] = ctx.gradients
        ctx.gradients = None  # they are multiplied in place, once, and nobody else holds them
        for tensor in input_grads:
            for part in () if tensor is None else tensor.view(-1).split(_SCALED_AT_ONCE):
                ctx.scale(part, gradients[0])
        return *input_grads, None, None, None


def _by_hand(fuse: Fuse, compute: Compute, varies: bool, kernel: str) -> Compute:
    """The compiler's kernel, or one of ours where that takes the tensors. On a CPU operator by
    operator: torch 2.11 compiles a loss there that reads logits after they became gradients."""
    compilers = fuse(compute, varies)

    def run(tensor: Tensor, other: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return compute(tensor, other)
        if tensor.is_cuda:
            from fivefold.model.kernels import loss_kernel  # Triton is there only with CUDA

            if loss_kernel.takes(tensor):
                return getattr(loss_kernel, kernel)(tensor, other)
        return compilers(tensor, other)

    return compilers if fuse is eager else run


def _scale(gradient: Tensor, factor: Tensor) -> None:
    """Multiply in float32 or wider: torch would round the factor to the type of the gradient."""
    wide = torch.promote_types(gradient.dtype, factor.dtype)
    gradient.copy_(gradient.to(wide) * factor)


class _WholeVocabulary:
    """The loss of a head that has all of the vocabulary."""

    def __init__(self, fuse: Fuse, cap: float | None) -> None:
        self.cap, self.gradients = cap, GradientsInForward(fuse)
        self.cap_in_place, self.slope = fuse(cap_in_place), fuse(cap_slope)
        self.loss = _by_hand(fuse, loss_of_chunk, False, "loss_to_gradient")

    def __call__(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunks: int) -> Tensor:
        def compute(x_ND: Tensor, weight_VD: Tensor, needs: Wanted) -> Found:
            return self._compute(x_ND, weight_VD, labels_N, chunks, needs)

        return self.gradients.apply(x_ND, weight_VD, compute)

    def _compute(
        self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunks: int, needs: Wanted
    ) -> Found:
        losses: list[Tensor] = []
        of_x = torch.empty_like(x_ND) if needs[0] else None
        of_weight = torch.empty_like(weight_VD) if needs[1] else None
        labels = labels_N.tensor_split(chunks)
        for number, x_CD in enumerate(x_ND.tensor_split(chunks)):
            logits_CV, slope_CV = linear(x_CD, weight_VD, None), None
            if self.cap is not None:
                self.cap_in_place(logits_CV, self.cap)
                slope_CV = self.slope(logits_CV, self.cap)
            losses.append(self.loss(logits_CV, labels[number]))
            if slope_CV is not None:
                logits_CV.mul_(slope_CV)
            if of_x is not None:
                torch.mm(logits_CV, weight_VD, out=of_x.tensor_split(chunks)[number])
            if of_weight is not None:
                of_weight.addmm_(logits_CV.T, x_CD, beta=min(number, 1))
            del logits_CV, slope_CV  # before the next ones are made
        return torch.stack(losses).sum(), of_x, of_weight


def loss_of_chunk(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The summed loss; the logits become their gradient. What can be is in place: without a
    compiler, two wide tensors are the most there are."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    counted_N1 = (labels_N != NOT_COUNTED)[:, None]
    # A compiler that shared exponentials between sum and gradient would keep them, all wide.
    odds_NV = F.log_softmax(logits_NV, dim=1, dtype=wide)
    found_N1 = odds_NV.gather(1, labels_N[:, None].masked_fill(~counted_N1, 0))
    loss = -found_N1.masked_fill(~counted_N1, 0).sum()
    numbers_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    gradient_NV = odds_NV.exp_().add_(numbers_V == labels_N[:, None], alpha=-1)
    logits_NV.copy_(gradient_NV.mul_(counted_N1))
    return loss

"""Attention over a part of the keys: its output and log-sum-exp, with a backward of its own, so
that parts can be merged into the whole.

    out, lse = attend(q, k, v, sees)                          for each part of the keys
    merge(total, out, lse)                                    in any order
    dq, dk, dv = attend_backward(slope, q, k, v, out, lse, sees)    with the merged out and lse

Kernels: torch's flash kernel on CPU; on CUDA cuDNN where it is faster (Hopper and newer), flash
elsewhere, the memory-efficient one for float32 and where a mask hides pairs, and for float64, which
none of them has, the plain formula. Key/value heads may be fewer than query heads; they are
repeated here, inside a rank, only for kernels that cannot share them.

Legend: B rows, H query heads, K key/value heads, Q queries, S keys, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_ALIGNED = 32  # rows: the log-sum-exp of the memory-efficient kernel
_HOPPER = (9, 0)


class Sees(NamedTuple):
    """Which pairs of a part exist: all, the lower triangle, or those of a mask (B, 1, Q, S)."""

    causal: bool = False
    mask: Tensor | None = None


def is_pretended(tensor: Tensor) -> bool:
    """Whether a tensor has no values: it stands for one on the newest GPU."""
    return hasattr(tensor, "fake_mode")


def on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels are those of GPUs."""
    return tensor.is_cuda or is_pretended(tensor)


def attend(q_BHQd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
    """The output over these keys and its log-sum-exp, −inf for a query that sees none."""
    if not on_gpu(q_BHQd):
        return _attend_on_cpu(q_BHQd, k_BKSd, v_BKSd, sees)
    if q_BHQd.dtype == torch.float64:
        return attend_plainly(q_BHQd, k_BKSd, v_BKSd, sees)
    if sees.mask is not None or q_BHQd.dtype == torch.float32:
        return _attend_efficiently(q_BHQd, k_BKSd, v_BKSd, sees)
    if is_pretended(q_BHQd) or _has_fast_cudnn(q_BHQd.device.index):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q_BHQd, k_BKSd, v_BKSd, None, True, 0.0, sees.causal
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q_BHQd, k_BKSd, v_BKSd, 0.0, sees.causal
        )
    return out, lse.reshape(q_BHQd.shape[:-1])


def attend_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sees: Sees
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one part. `out` and `lse` are those of all parts together."""
    if not on_gpu(q):
        return _backward_on_cpu(slope, q, k, v, out, lse, sees)
    if q.dtype == torch.float64:
        return plain_backward(slope, q, k, v, out, lse, sees)
    if sees.mask is not None or q.dtype == torch.float32:
        return _efficient_backward(slope, q, k, v, out, lse, sees)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    queries, keys = q.shape[2], k.shape[2]
    if is_pretended(q) or _has_fast_cudnn(q.device.index):
        return aten._scaled_dot_product_cudnn_attention_backward(
            slope, q, k, v, out, lse[..., None], none, none, None, None, None, queries, keys, 0.0,
            sees.causal,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        slope, q, k, v, out, lse, None, None, queries, keys, 0.0, sees.causal, none, none
    )


class Total:
    """Attention merged so far, in float32 or wider: out (B, H, Q, d) and lse (B, H, Q)."""

    def __init__(self, q_BHQd: Tensor) -> None:
        self.shape, self.device = q_BHQd.shape, q_BHQd.device
        self.dtype = torch.promote_types(q_BHQd.dtype, torch.float32)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def merge(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Add a part that queries [start, stop) have seen."""
        if self.out is None or self.lse is None:
            if stop - start == self.shape[2]:
                self.out, self.lse = out.to(self.dtype), lse.to(self.dtype)
                return
            # Tokens before heads, as the projection behind attention reads it.
            rows, heads, queries, width = self.shape
            sizes = (rows, queries, heads, width)
            self.out = torch.zeros(sizes, dtype=self.dtype, device=self.device).transpose(1, 2)
            self.lse = self.out.new_full(self.shape[:-1], -math.inf)
        here = slice(start, stop)
        if is_pretended(out):
            return
        blend = _compiled(_blend) if out.is_cuda else _blend
        blend(self.out[:, :, here], self.lse[:, :, here], out, lse)


def accumulate(total: Tensor, part: Tensor) -> None:
    """Add a part of a narrower type in place."""
    if is_pretended(part):
        return
    add = _compiled(_add) if part.is_cuda else _add
    add(total, part)


def _add(total: Tensor, part: Tensor) -> None:
    total.add_(part)


def _blend(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Both parts weighed by the keys they stand for; two parts without any key stay nothing."""
    share = torch.sigmoid(more_lse.to(lse.dtype) - lse).nan_to_num(0.0)
    out.sub_(share[..., None] * (out - more.to(out.dtype)))
    lse.copy_(torch.logaddexp(lse, more_lse.to(lse.dtype)))


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """One kernel that reads and writes everything once; for fixed sizes it is twice as fast."""
    return torch.compile(function, dynamic=False)


@cache
def _has_fast_cudnn(device: int | None) -> bool:
    return torch.backends.cudnn.is_available() and (
        torch.cuda.get_device_capability(device) >= _HOPPER
    )


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
    # Narrow products are slow on CPUs, and would round every part before it is merged.
    q, k, v = (_widened(each) for each in (q, _repeated(k, q), _repeated(v, q)))
    bias = None if sees.mask is None else _bias(sees.mask, q.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, sees.causal, attn_mask=bias
    )
    if sees.mask is not None:
        blind = ~sees.mask.any(dim=-1)  # the kernel calls their log-sum-exp 0
        lse = lse.masked_fill(blind, -math.inf)
        out = out.masked_fill(blind[..., None], 0.0)
    return out, lse


def _backward_on_cpu(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sees: Sees
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads = k.shape[1]
    wide = [_widened(each) for each in (slope, q, _repeated(k, q), _repeated(v, q), out)]
    bias = None if sees.mask is None else _bias(sees.mask, wide[1].dtype)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *wide, lse, 0.0, sees.causal, attn_mask=bias
    )
    return dq, _summed(dk, num_heads), _summed(dv, num_heads)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
    """By the formula, with all scores at once."""
    scores = _scores(q, k, sees)
    lse = scores.logsumexp(dim=-1)
    return _shares(scores, lse) @ _repeated(v, q), lse


def plain_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sees: Sees
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the formula."""
    num_heads, keys, values = k.shape[1], _repeated(k, q), _repeated(v, q)
    shares = _shares(_scores(q, k, sees), lse)
    change = slope @ values.mT - (slope * out).sum(dim=-1, keepdim=True)
    dscores = shares * change / math.sqrt(q.shape[-1])
    dk, dv = dscores.mT @ q, shares.mT @ slope
    return dscores @ keys, _summed(dk, num_heads), _summed(dv, num_heads)


def _scores(q: Tensor, k: Tensor, sees: Sees) -> Tensor:
    """−inf for a pair that does not exist."""
    scores = q @ _repeated(k, q).mT / math.sqrt(q.shape[-1])
    mask = sees.mask
    if sees.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """What each key has of a query; nothing where it saw none."""
    return (scores - lse[..., None]).exp().nan_to_num(0.0)


def _attend_efficiently(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
    bias = None if sees.mask is None else _aligned_bias(sees.mask, q)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeated(k, q), _repeated(v, q), bias, True, 0.0, sees.causal
    )
    lse = lse[..., : q.shape[2]]
    if sees.mask is None:
        return out, lse
    blind = ~sees.mask.any(dim=-1)
    return out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)


def _efficient_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sees: Sees
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, zero = k.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)
    padded = F.pad(lse, (0, -lse.shape[-1] % _ALIGNED), value=math.inf)
    bias = None if sees.mask is None else _aligned_bias(sees.mask, q)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        slope, q, _repeated(k, q), _repeated(v, q), bias, out, padded, zero, zero, 0.0,
        [True, True, True, False], sees.causal,
    )  # fmt: skip
    return dq, _summed(dk, num_heads), _summed(dv, num_heads)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _aligned_bias(mask: Tensor, q: Tensor) -> Tensor:
    """A mask for every head, on rows that start at 16 bytes."""
    spare = -mask.shape[-1] % 16
    bias = F.pad(_bias(mask, q.dtype), (0, spare))[..., : mask.shape[-1]]
    return bias.expand(-1, q.shape[1], -1, -1)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeated(heads_BKSd: Tensor, q_BHQd: Tensor) -> Tensor:
    groups = q_BHQd.shape[1] // heads_BKSd.shape[1]
    return heads_BKSd if groups == 1 else heads_BKSd.repeat_interleave(groups, dim=1)


def _summed(gradient_BHSd: Tensor, num_heads: int) -> Tensor:
    """The gradient of shared heads: the sum over those that share them."""
    if gradient_BHSd.shape[1] == num_heads:
        return gradient_BHSd
    return gradient_BHSd.unflatten(1, (num_heads, -1)).sum(dim=2)

"""Attention over a shard of the keys: output and log-sum-exp, which can be merged, and a backward.

    out, lse = attend(q, k, v, pairs)                                    for each shard of the keys
    merged.merge(start, stop, out, lse)                                  in any order
    dq, dk, dv = attend_backward(grad_out, q, k, v, out, lse, pairs)     with the merged out and lse

Kernels: on CPU torch's flash kernel. On CUDA cuDNN where it is faster (Hopper and newer), flash
elsewhere, and the memory-efficient kernel for float32 and for masks. float64, which no CUDA kernel
supports, dropout and capped scores are computed by the formula. Documents go to flash's kernel for
variable lengths (`varlen`) where there is one, else one by one to the kernels above. There may
be fewer key/value heads than query heads: only kernels without grouped-query attention repeat them.

Legend: B rows, H query heads, K key/value heads, Q queries, S keys, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model import DocumentPairs, with_sinks
from fivefold.model.kernels import varlen
from fivefold.model.kernels.regions import is_fake

aten = torch.ops.aten
_ALIGNED = 32  # rows: the log-sum-exp of the memory-efficient kernel
_AMPERE, _HOPPER = (8, 0), (9, 0)


class VisiblePairs(NamedTuple):
    """The query-key pairs that count: all, the lower triangle, or those of a mask (B, 1, Q, S).

    With dropout, only the pairs of `keep_mask` (B, H, Q, S) have a weight, multiplied by `scale`.
    With `documents`, all or the lower triangle of each; in a triangle, a query sees no more keys
    than the `window`. With a `cap`, scores become cap · tanh(score / cap).
    """

    causal: bool = False
    mask: Tensor | None = None
    keep_mask: Tensor | None = None
    scale: float = 1.0
    documents: DocumentPairs | None = None
    window: int | None = None
    cap: float | None = None

    @property
    def by_formula(self) -> bool:
        """Whether no kernel computes them."""
        return self.keep_mask is not None or (self.cap is not None and self.documents is None)


def uses_gpu_kernels(tensor: Tensor) -> bool:
    """Whether this tensor goes to the kernels of GPUs."""
    return tensor.is_cuda or is_fake(tensor)


def attend(
    q_BHQd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor]:
    """The output over these keys, and its log-sum-exp: −inf for a query that pairs no key."""
    if pairs.by_formula:
        wide = [_at_least_float32(tensor) for tensor in (q_BHQd, k_BKSd, v_BKSd)]
        return attend_by_formula(*wide, pairs)
    if pairs.documents is not None:
        if pairs.cap is None and _has_varlen(q_BHQd, v_BKSd):
            return varlen.attend(
                q_BHQd, k_BKSd, v_BKSd, pairs.documents, pairs.causal, pairs.window
            )
        return _attend_one_by_one(q_BHQd, k_BKSd, v_BKSd, pairs, pairs.documents)
    if not uses_gpu_kernels(q_BHQd):
        return _attend_on_cpu(q_BHQd, k_BKSd, v_BKSd, pairs)
    if q_BHQd.dtype == torch.float64:
        return attend_by_formula(q_BHQd, k_BKSd, v_BKSd, pairs)
    if pairs.mask is not None or q_BHQd.dtype == torch.float32:
        return _attend_memory_efficient(q_BHQd, k_BKSd, v_BKSd, pairs)
    if is_fake(q_BHQd) or _has_fast_cudnn(q_BHQd.device.index):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q_BHQd, k_BKSd, v_BKSd, None, True, 0.0, pairs.causal
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q_BHQd, k_BKSd, v_BKSd, 0.0, pairs.causal
        )
    return out, lse.reshape(q_BHQd.shape[:-1])


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one shard of the keys. `out` and `lse` are the merged ones."""
    if pairs.by_formula:
        wide = [_at_least_float32(tensor) for tensor in (grad_out, q, k, v, out)]
        return backward_by_formula(*wide, lse, pairs)
    if pairs.documents is not None:
        tensors = grad_out, q, k, v, out, lse
        if pairs.cap is None and _has_varlen(q, v):
            return varlen.attend_backward(*tensors, pairs.documents, pairs.causal, pairs.window)
        return _backward_one_by_one(*tensors, pairs, pairs.documents)
    if not uses_gpu_kernels(q):
        return _backward_on_cpu(grad_out, q, k, v, out, lse, pairs)
    if q.dtype == torch.float64:
        return backward_by_formula(grad_out, q, k, v, out, lse, pairs)
    if pairs.mask is not None or q.dtype == torch.float32:
        return _backward_memory_efficient(grad_out, q, k, v, out, lse, pairs)
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    queries, keys = q.shape[2], k.shape[2]
    if is_fake(q) or _has_fast_cudnn(q.device.index):
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse[..., None], zero, zero, None, None, None, queries, keys,
            0.0, pairs.causal,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, queries, keys, 0.0, pairs.causal, zero, zero
    )


class MergedAttention:
    """The merged attention so far, in float32 or wider: out (B, H, Q, d) and lse (B, H, Q)."""

    def __init__(self, q_BHQd: Tensor) -> None:
        self.shape, self.device = q_BHQd.shape, q_BHQd.device
        self.dtype = torch.promote_types(q_BHQd.dtype, torch.float32)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def merge(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of queries [start, stop) over one shard of the keys."""
        if self.out is None or self.lse is None:
            if stop - start == self.shape[2]:
                self.out, self.lse = out.to(self.dtype), lse.to(self.dtype)
                return
            # Tokens before heads: the memory layout that the output projection reads.
            rows, heads, num_queries, width = self.shape
            sizes = (rows, num_queries, heads, width)
            self.out = torch.zeros(sizes, dtype=self.dtype, device=self.device).transpose(1, 2)
            self.lse = self.out.new_full(self.shape[:-1], -math.inf)
        queries = slice(start, stop)
        if is_fake(out):
            return
        blend = _compiled(_blend) if out.is_cuda else _blend
        blend(self.out[:, :, queries], self.lse[:, :, queries], out, lse)

    def result(self, dtype: torch.dtype, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of all shards, with sinks if there are some."""
        assert self.out is not None and self.lse is not None
        out, lse = self.out, self.lse
        out, lse = (out, lse) if sinks_H is None else with_sinks(out, lse, sinks_H)
        return out.to(dtype), lse


def accumulate(total: Tensor, addend: Tensor) -> None:
    """Add a tensor of a narrower dtype in place."""
    if is_fake(addend):
        return
    add = _compiled(_add) if addend.is_cuda else _add
    add(total, addend)


def _add(total: Tensor, addend: Tensor) -> None:
    total.add_(addend)


def _blend(out: Tensor, lse: Tensor, new_out: Tensor, more_lse: Tensor) -> None:
    """Merge in place, each side weighed by its keys; two sides without a key stay zero."""
    weight = torch.sigmoid(more_lse.to(lse.dtype) - lse).nan_to_num(0.0)
    out.sub_(weight[..., None] * (out - new_out.to(out.dtype)))
    lse.copy_(torch.logaddexp(lse, more_lse.to(lse.dtype)))


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """One kernel that reads and writes each tensor once; fixed sizes make it twice as fast."""
    return torch.compile(function, dynamic=False)


@cache
def _has_fast_cudnn(device: int | None) -> bool:
    return torch.backends.cudnn.is_available() and (
        torch.cuda.get_device_capability(device) >= _HOPPER
    )


def _has_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether flash's kernel for variable lengths takes such heads."""
    narrow = max(q.shape[-1], v.shape[-1]) <= varlen.WIDEST
    if not narrow or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return is_fake(q) or (q.is_cuda and _has_flash(q.device.index))


@cache
def _has_flash(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device) >= _AMPERE


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs, documents: DocumentPairs
) -> tuple[Tensor, Tensor]:
    rows, heads, queries, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # Tokens before heads: the memory layout that the output projection reads.
    total = q.new_zeros((rows, queries, heads, v.shape[-1]), dtype=wide).transpose(1, 2)
    total_lse = q.new_full((rows, heads, queries), -math.inf, dtype=wide)
    for q_rows, theirs, sees in _documents(pairs, documents, q.device):
        out, lse = attend(q[q_rows], k[theirs], v[theirs], sees)
        total[q_rows], total_lse[q_rows] = out.to(wide), lse.to(wide)
    return total, total_lse


def _backward_one_by_one(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pairs: VisiblePairs, documents: DocumentPairs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
    for q_rows, theirs, sees in _documents(pairs, documents, q.device):
        grads = attend_backward(
            grad_out[q_rows], q[q_rows], k[theirs], v[theirs], out[q_rows], lse[q_rows], sees
        )
        dq[q_rows], dk[theirs], dv[theirs] = (gradient.to(wide) for gradient in grads)
    return dq, dk, dv


Where = tuple[slice, slice, slice]
"""Rows, heads and tokens of (B, H, S, d)."""


def _documents(
    pairs: VisiblePairs, documents: DocumentPairs, device: torch.device
) -> Iterator[tuple[Where, Where, VisiblePairs]]:
    """The queries of each document, its keys, and which of them count."""
    for row, q_start, q_stop, k_start, k_stop in documents.spans:
        rows, heads = slice(row, row + 1), slice(None)
        sees = VisiblePairs(pairs.causal, cap=pairs.cap)
        if pairs.window is not None and pairs.window < q_stop - q_start:
            ones = torch.ones(q_stop - q_start, k_stop - k_start, dtype=torch.bool, device=device)
            mask = ones.tril().triu(1 - pairs.window)[None, None]
            sees = VisiblePairs(mask=mask, cap=pairs.cap)
        yield (rows, heads, slice(q_start, q_stop)), (rows, heads, slice(k_start, k_stop)), sees


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs) -> tuple[Tensor, Tensor]:
    # Matmuls in bfloat16 are slow on CPUs, and would round each result before it is merged.
    q, k, v = (
        _at_least_float32(tensor) for tensor in (q, _repeat_heads(k, q), _repeat_heads(v, q))
    )
    if k.shape[-1] != v.shape[-1]:  # not supported by the CPU kernel
        return attend_by_formula(q, k, v, pairs)
    bias = None if pairs.mask is None else _bias(pairs.mask, q.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, pairs.causal, attn_mask=bias
    )
    if pairs.mask is not None:
        unseen = ~pairs.mask.any(dim=-1)  # the kernel returns 0 as their log-sum-exp
        lse = lse.masked_fill(unseen, -math.inf)
        out = out.masked_fill(unseen[..., None], 0.0)
    return out, lse


def _backward_on_cpu(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads = k.shape[1]
    wide = [
        _at_least_float32(tensor)
        for tensor in (grad_out, q, _repeat_heads(k, q), _repeat_heads(v, q), out)
    ]
    if k.shape[-1] != v.shape[-1]:
        dq, dk, dv = backward_by_formula(*wide, lse, pairs)
    else:
        bias = None if pairs.mask is None else _bias(pairs.mask, wide[1].dtype)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, pairs.causal, attn_mask=bias
        )
    return dq, _sum_heads(dk, num_heads), _sum_heads(dv, num_heads)


def attend_by_formula(
    q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula, with all scores in memory."""
    scores = _scores(q, k, pairs)
    lse = scores.logsumexp(dim=-1)
    return _dropped(_softmax(scores, lse), pairs) @ _repeat_heads(v, q), lse


def backward_by_formula(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formula."""
    num_heads, keys, values = k.shape[1], _repeat_heads(k, q), _repeat_heads(v, q)
    scores = _scores(q, k, pairs)
    probabilities = _softmax(scores, lse)
    of_kept = _dropped(grad_out @ values.mT, pairs)
    change = of_kept - (grad_out * out).sum(dim=-1, keepdim=True)
    dscores = probabilities * change / math.sqrt(q.shape[-1])
    if pairs.cap is not None:  # the slope of the cap, which a pair that does not count has not
        scores.masked_fill_(scores == -math.inf, 0.0).div_(pairs.cap).square_()
        dscores.mul_(scores.neg_().add_(1))
    dk, dv = dscores.mT @ q, _dropped(probabilities, pairs).mT @ grad_out
    return dscores @ keys, _sum_heads(dk, num_heads), _sum_heads(dv, num_heads)


def _scores(q: Tensor, k: Tensor, pairs: VisiblePairs) -> Tensor:
    """The scores of all pairs; −inf for those that do not count."""
    scores = q @ _repeat_heads(k, q).mT / math.sqrt(q.shape[-1])
    if pairs.cap is not None:
        scores = scores.div_(pairs.cap).tanh_().mul_(pairs.cap)
    mask = pairs.mask
    if pairs.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _dropped(of_pairs: Tensor, pairs: VisiblePairs) -> Tensor:
    return of_pairs if pairs.keep_mask is None else of_pairs * pairs.keep_mask * pairs.scale


def _softmax(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax over the keys; 0 for a query that pairs none."""
    return (scores - lse[..., None]).exp().nan_to_num(0.0)


def _attend_memory_efficient(
    q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor]:
    bias = None if pairs.mask is None else _aligned_bias(pairs.mask, q)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat_heads(k, q), _repeat_heads(v, q), bias, True, 0.0, pairs.causal
    )
    lse = lse[..., : q.shape[2]]
    if pairs.mask is None:
        return out, lse
    unseen = ~pairs.mask.any(dim=-1)
    return out.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, -math.inf)


def _backward_memory_efficient(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: VisiblePairs
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, zero = k.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)
    padded = F.pad(lse, (0, -lse.shape[-1] % _ALIGNED), value=math.inf)
    bias = None if pairs.mask is None else _aligned_bias(pairs.mask, q)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, _repeat_heads(k, q), _repeat_heads(v, q), bias, out, padded, zero, zero, 0.0,
        [True, True, True, False], pairs.causal,
    )  # fmt: skip
    return dq, _sum_heads(dk, num_heads), _sum_heads(dv, num_heads)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _aligned_bias(mask: Tensor, q: Tensor) -> Tensor:
    """A bias for every head, in rows that are aligned to 16 elements."""
    spare = -mask.shape[-1] % 16
    bias = F.pad(_bias(mask, q.dtype), (0, spare))[..., : mask.shape[-1]]
    return bias.expand(-1, q.shape[1], -1, -1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeat_heads(heads_BKSd: Tensor, q_BHQd: Tensor) -> Tensor:
    groups = q_BHQd.shape[1] // heads_BKSd.shape[1]
    return heads_BKSd if groups == 1 else heads_BKSd.repeat_interleave(groups, dim=1)


def _sum_heads(gradient_BHSd: Tensor, num_heads: int) -> Tensor:
    """The gradient of key/value heads: the sum over the query heads that use each."""
    if gradient_BHSd.shape[1] == num_heads:
        return gradient_BHSd
    return gradient_BHSd.unflatten(1, (num_heads, -1)).sum(dim=2)

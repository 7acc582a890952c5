"""Attention over heads, with a replaceable core.

The number of heads is read from the width of what the projections return, so that a module whose
weights were exchanged for pieces runs unchanged on its share of the heads.

Legend: B rows, S tokens, D model width, H query heads, K key/value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.core.shape import Shape
from fivefold.model.batch import AttentionInfo, Context, TokenBatch
from fivefold.model.flash import is_pretended
from fivefold.model.layers import Kind, Linear, Norm, rotate

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionInfo], Tensor]

# Fastest first. On Hopper cuDNN runs causal attention at about twice the speed of flash-2.
CUDA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attention(nn.Module):
    """Projections to queries, keys and values, the kernel, and the projection out."""

    def __init__(self, shape: Shape, kind: Kind) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim, self.interleaved = shape.head_dim, shape.rope_interleaved
        self.norms_heads = shape.qk_norm == "head"  # one by one, and not all of them together
        normed = shape.qk_norm != "none"
        widths = (shape.head_dim,) * 2 if self.norms_heads else (queries, keys)
        self.q = Linear(queries, shape.width, shape.qkv_bias, kind)
        self.k = Linear(keys, shape.width, shape.qkv_bias, kind)
        self.v = Linear(keys, shape.width, shape.qkv_bias, kind)
        self.q_norm = Norm(widths[0], False, shape, kind) if normed else None
        self.k_norm = Norm(widths[1], False, shape, kind) if normed else None
        self.out = Linear(shape.width, queries, shape.out_bias, kind)
        self.kernel: Kernel = causal_attention

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BSHd = self._heads(self.q(x_BSD), self.q_norm, context)
        k_BSKd = self._heads(self.k(x_BSD), self.k_norm, context)
        v_BSKd = self.v(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BHSd, k_BKSd, v_BKSd = (each.transpose(1, 2) for each in (q_BSHd, k_BSKd, v_BSKd))
        out_BHSd = self.kernel(q_BHSd, k_BKSd, v_BKSd, context.attention)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor, norm: Norm | None, context: Context) -> Tensor:
        if norm is not None and not self.norms_heads:
            projected = norm(projected)
        heads_BSHd = projected.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norms_heads:
            heads_BSHd = norm(heads_BSHd)
        if context.rotary is None:
            return heads_BSHd
        return rotate(heads_BSHd, context.rotary, self.interleaved)


def causal_attention(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, info: AttentionInfo) -> Tensor:
    """The default kernel: torch's own, with a mask only where the batch or the model needs one."""
    if is_pretended(q_BHSd) and info.mask is None:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_BHSd, k_BKSd, v_BKSd, None, True, info.dropout, True
        )[0]
    groups = q_BHSd.shape[1] // k_BKSd.shape[1]
    shared = groups > 1
    if shared and (info.mask is not None or not q_BHSd.is_cuda):
        # Neither the masked CUDA kernels nor the CPU one share key/value heads.
        k_BKSd, v_BKSd = (each.repeat_interleave(groups, dim=1) for each in (k_BKSd, v_BKSd))
        shared = False
    if not q_BHSd.is_cuda:
        return _attend(q_BHSd, k_BKSd, v_BKSd, info, shared)
    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        return _attend(q_BHSd, k_BKSd, v_BKSd, info, shared)


def _attend(q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo, shared: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=info.mask,
        dropout_p=info.dropout,
        is_causal=info.mask is None,
        enable_gqa=shared,
    )


def visible_keys_mask(batch: TokenBatch, window: int | None) -> Tensor | None:
    """(B, 1, S, S), True where a query sees a key; None where plain causality says it all."""
    seq = batch.positions.shape[1]
    if batch.documents is None and (window is None or window >= seq):
        return None
    ones = torch.ones(seq, seq, dtype=torch.bool, device=batch.positions.device)
    visible_BSS = ones.tril()[None]
    if window is not None:
        distance_BSS = batch.positions[:, :, None] - batch.positions[:, None, :]
        visible_BSS = visible_BSS & (distance_BSS < window)
    if batch.documents is not None:
        visible_BSS = visible_BSS & (batch.documents[:, :, None] == batch.documents[:, None, :])
    return visible_BSS[:, None]

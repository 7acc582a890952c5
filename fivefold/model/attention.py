"""Attention: multi-head and grouped-query (`Attention`), and multi-head latent (`LatentAttention`).

Seams of both are `project` and `kernel`, which context parallelism replaces. The number of heads is
read from the width of the projections' output, so that a module with sharded weights runs on its
own heads.

Legend: B rows, S tokens, D model width, H query heads, K key/value heads, d width of a head, v that
of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.core.layout import AttentionCall
from fivefold.core.model import Mla, Shape
from fivefold.model.batch import AttentionInfo, Context
from fivefold.model.kernels import VisiblePairs, attend, attend_backward, is_fake
from fivefold.model.layers import (
    L2,
    ROTATE,
    Hold,
    Linear,
    Norm,
    Project,
    WeightFactory,
    as_it_is,
    project,
)
from fivefold.model.sinks import sinks_gradient, with_sinks

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionInfo], Tensor]

# Fastest first. On Hopper, causal attention of cuDNN is about twice as fast as flash-2.
CUDA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attention(nn.Module):
    """Query, key and value projections, the attention kernel, and the output projection."""

    def __init__(self, shape: Shape, factory: WeightFactory, site: int = 0) -> None:
        super().__init__()
        self.site, self.first_head = site, 0  # of dropout; seam: tensor parallelism
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim, self.interleaved = shape.head_dim, shape.rope_interleaved
        self.norms_heads = shape.qk_norm == "head"  # each head by itself, else all of them together
        normed, self.eps = shape.qk_norm in ("head", "full"), shape.norm_eps
        self.l2_norm = L2.by(factory.fuse) if shape.qk_norm == "l2" else None
        widths = (shape.head_dim,) * 2 if self.norms_heads else (queries, keys)
        self.q = Linear(queries, shape.width, shape.qkv_bias, factory)
        self.k = Linear(keys, shape.width, shape.qkv_bias, factory)
        self.v = Linear(keys, shape.width, shape.qkv_bias, factory)
        self.q_norm = Norm(widths[0], False, shape, factory) if normed else None
        self.k_norm = Norm(widths[1], False, shape, factory) if normed else None
        self.out = Linear(shape.width, queries, shape.out_bias, factory)
        self.sinks = factory.empty(shape.heads) if shape.sinks else None
        self.hold: Hold = as_it_is  # seam: split backward
        self.scale = math.sqrt(shape.head_dim / (shape.score_dim or shape.head_dim))
        self.rotate = ROTATE.by(factory.fuse)
        self.project: Project = project  # seam: tensor parallelism, split backward
        self.kernel: Kernel = causal_attention  # seam: context parallelism

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BHSd, k_BKSd, v_BKSd = self._queries_keys_values(x_BSD, context)
        info = context.attention.at(self.site, self.first_head)
        if self.sinks is not None:
            info = replace(info, sinks=self.hold(self.sinks))
        out_BHSd = self.kernel(q_BHSd, k_BKSd, v_BKSd, info)
        return self.out(out_BHSd.transpose(1, 2).flatten(2))

    def _queries_keys_values(self, x_BSD: Tensor, context: Context) -> Sequence[Tensor]:
        queries, keys, values = self.project(x_BSD, (self.q, self.k, self.v))
        q_BSHd = self._heads(queries, self.q_norm, context)
        q_BSHd = q_BSHd if self.scale == 1 else q_BSHd * self.scale  # kernels divide by √d
        if context.temperature is not None:
            q_BSHd = (q_BSHd * context.temperature).to(q_BSHd.dtype)
        k_BSKd = self._heads(keys, self.k_norm, context)
        v_BSKd = values.unflatten(-1, (-1, self.head_dim))
        return [tensor.transpose(1, 2) for tensor in (q_BSHd, k_BSKd, v_BSKd)]

    def _heads(self, projected: Tensor, norm: Norm | None, context: Context) -> Tensor:
        if norm is not None and not self.norms_heads:
            projected = norm(projected)
        heads_BSHd = projected.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norms_heads:
            heads_BSHd = norm(heads_BSHd)
        if context.rotary is None:
            return heads_BSHd
        heads_BSHd = self.rotate(heads_BSHd, *context.rotary, self.interleaved)
        return heads_BSHd if self.l2_norm is None else self.l2_norm(heads_BSHd, self.eps)


def causal_attention(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, info: AttentionInfo) -> Tensor:
    """The default kernel: torch's SDPA, or our own call of a kernel where that has no way to say
    which pairs count without a mask of all of them: windows, packed documents, dropped pairs;
    or how scores are capped.
    """
    plain = info.documents is None and info.dropout is None
    if not plain or info.cap is not None or info.sinks is not None:
        return _PairedAttention.apply(q_BHSd, k_BKSd, v_BKSd, info, info.sinks)
    if is_fake(q_BHSd):
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_BHSd, k_BKSd, v_BKSd, None, True, 0.0, True
        )[0]
    groups = q_BHSd.shape[1] // k_BKSd.shape[1]
    if q_BHSd.is_cuda:
        with sdpa_kernel(CUDA_KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(
                q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=groups > 1
            )
    if groups > 1:  # not supported by the CPU kernel
        k_BKSd, v_BKSd = (tensor.repeat_interleave(groups, dim=1) for tensor in (k_BKSd, v_BKSd))
    return F.scaled_dot_product_attention(q_BHSd, k_BKSd, v_BKSd, is_causal=True)


class _PairedAttention(torch.autograd.Function):
    """Attention over the pairs that count. It finds them again in backward, and saves what flash
    saves."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo, sinks: Tensor | None
    ) -> Tensor:
        out, lse = attend(q, k, v, _pairs(q, info))
        out, lse = (out, lse) if sinks is None else with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.info = replace(info, sinks=None)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, out, lse, sinks) = gradients, ctx.saved_tensors
        grads = attend_backward(grad, q, k, v, out, lse, _pairs(q, ctx.info))
        of_sinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return (*(gradient.to(q.dtype) for gradient in grads), None, of_sinks)


def _pairs(q_BHSd: Tensor, info: AttentionInfo) -> VisiblePairs:
    return _visible(q_BHSd, info)._replace(cap=info.cap)


def _visible(q_BHSd: Tensor, info: AttentionInfo) -> VisiblePairs:
    _, heads, seq, _ = q_BHSd.shape
    row, documents, window = (range(seq),), info.documents, info.window
    if info.dropout is None and documents is None:
        return VisiblePairs(True)
    if info.dropout is None:
        assert documents is not None
        call = AttentionCall(0, seq, 0, seq, causal=True, masked=False)
        return VisiblePairs(True, documents=documents.pairs(row, row, call), window=window)
    tokens = torch.arange(seq, device=q_BHSd.device)
    keep_mask, scale = info.dropout.keeps(heads, tokens, tokens), info.dropout.scale
    if documents is None:
        return VisiblePairs(True, None, keep_mask, scale)
    visible = torch.ones(seq, seq, dtype=torch.bool, device=q_BHSd.device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    numbers_BS = documents.numbers(q_BHSd.device)
    visible = visible & (numbers_BS[:, None, :, None] == numbers_BS[:, None, None, :])
    return VisiblePairs(False, visible, keep_mask, scale)


LATENT_EPS = 1e-6  # DeepSeek's code uses it for the norms of latents, whatever the other norms use


LatentKernel = Callable[[Tensor, Tensor, Tensor, AttentionInfo], Tensor]
"""Of query heads (B, S, H, d), normed latents (B, S, r) and the rotated key of all heads (B, S, p),
to heads (B, S, H, v)."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3.

    Queries, keys and values are projected down to narrow latents, which are normed, and up to
    heads. A query or key head has a part without positions and a rotated part; all heads share
    one rotated key. Value heads may be narrower than key heads.
    """

    def __init__(self, shape: Shape, mla: Mla, factory: WeightFactory, site: int = 0) -> None:
        super().__init__()
        self.site, self.first_head = site, 0  # of dropout; seam: tensor parallelism
        queries, bias, rank = shape.heads * shape.head_dim, shape.qkv_bias, mla.q_rank
        values = shape.heads * mla.value_dim
        self.mla, self.head_dim, self.interleaved = mla, shape.head_dim, shape.rope_interleaved
        self.scale = _score_scale(shape)
        self.q = Linear(queries, shape.width, False, factory) if rank is None else None
        self.q_down = Linear(rank, shape.width, bias, factory) if rank is not None else None
        self.q_latent_norm = _latent_norm(rank, shape, factory) if rank is not None else None
        self.q_up = Linear(queries, rank, False, factory) if rank is not None else None
        self.kv_down = Linear(mla.kv_rank + mla.rope_dim, shape.width, bias, factory)
        self.kv_latent_norm = _latent_norm(mla.kv_rank, shape, factory)
        self.kv_up = Linear(shape.heads * mla.nope_dim + values, mla.kv_rank, False, factory)
        self.out = Linear(shape.width, values, shape.out_bias, factory)
        self.rotate = ROTATE.by(factory.fuse)
        self.project: Project = project  # seam: tensor parallelism, split backward
        self.kernel: Kernel = causal_attention  # seam: context parallelism
        # Seam: generation, which keeps latents; None where heads are made of them.
        self.latent_kernel: LatentKernel | None = None

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        into_queries = self.q if self.q_down is None else self.q_down
        assert into_queries is not None, "queries come from the input or from a latent"
        projected, latents = self.project(x_BSD, (into_queries, self.kv_down))
        q_BSHd = self._queries(projected, context)
        info = context.attention.at(self.site, self.first_head)
        if self.latent_kernel is not None:
            latent_BSr, key_BSp = latents.split([self.mla.kv_rank, self.mla.rope_dim], dim=-1)
            rotated_BSp = self._rotate(key_BSp[:, :, None, :], context)[:, :, 0]
            normed_BSr = self.kv_latent_norm(latent_BSr)
            out_BSHv = self.latent_kernel(q_BSHd, normed_BSr, rotated_BSp, info)
            return self.out(out_BSHv.flatten(2))
        k_BSHd, v_BSHv = self._keys_and_values(latents, context)
        heads = (tensor.transpose(1, 2) for tensor in (q_BSHd, k_BSHd, v_BSHv))
        return self.out(self.kernel(*heads, info).transpose(1, 2).flatten(2))

    def _queries(self, projected: Tensor, context: Context) -> Tensor:
        if self.q_latent_norm is not None and self.q_up is not None:
            projected = self.q_up(self.q_latent_norm(projected))
        heads_BSHd = projected.unflatten(-1, (-1, self.head_dim))
        unrotated, rotated = heads_BSHd.split([self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        q_BSHd = torch.cat([unrotated, self._rotate(rotated, context)], dim=-1)
        return q_BSHd if self.scale == 1 else q_BSHd * self.scale

    def _keys_and_values(self, latents: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        mla = self.mla
        latent, key = latents.split([mla.kv_rank, mla.rope_dim], dim=-1)
        up = self.kv_up(self.kv_latent_norm(latent))
        heads_BSH = up.unflatten(-1, (-1, mla.nope_dim + mla.value_dim))
        unrotated, v_BSHv = heads_BSH.split([mla.nope_dim, mla.value_dim], dim=-1)
        rotated = self._rotate(key[:, :, None, :], context)
        rotated = rotated.expand(-1, -1, unrotated.shape[2], -1)
        # Values are copied: attention saves them, and a view would keep the unrotated keys as well.
        return torch.cat([unrotated, rotated], dim=-1), v_BSHv.contiguous()

    def _rotate(self, heads: Tensor, context: Context) -> Tensor:
        if context.rotary is None:
            return heads
        return self.rotate(heads, *context.rotary, self.interleaved)


def _latent_norm(width: int, shape: Shape, factory: WeightFactory) -> Norm:
    return Norm(width, False, shape, factory, eps=LATENT_EPS)


def _score_scale(shape: Shape) -> float:
    """The factor of the queries; kernels scale scores by 1/√d as usual.

    DeepSeek multiplies scores by the square of YaRN's temperature.
    """
    rope = shape.rope
    if rope is None or rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return rope.yarn_mscale(rope.mscale_all_dim) ** 2

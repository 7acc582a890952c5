"""Latent attention (MLA): queries, keys and values pass through narrow latents.

A head of a query or key has a part without positions and a rotated part; the rotated key is one
for all heads. Values may be narrower than keys. As in plain attention, the number of heads is read
from what the projections return, and the core is replaceable.

Legend: B rows, S tokens, D model width, H heads, d width of a query or key head, v of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.core.shape import Mla, Shape
from fivefold.model.attention import Kernel, causal_attention
from fivefold.model.batch import Context
from fivefold.model.layers import Kind, Linear, Norm, rotate, yarn_mscale

LATENT_EPS = 1e-6  # of the norms of latents in DeepSeek's code, whatever the other norms have


class LatentAttention(nn.Module):
    """Down to latents, their norms, up to heads, the kernel, and the projection out."""

    def __init__(self, shape: Shape, mla: Mla, kind: Kind) -> None:
        super().__init__()
        queries, bias, rank = shape.heads * shape.head_dim, shape.qkv_bias, mla.q_rank
        values = shape.heads * mla.value_dim
        self.mla, self.head_dim, self.interleaved = mla, shape.head_dim, shape.rope_interleaved
        self.scale = _score_scale(shape)
        self.q = Linear(queries, shape.width, False, kind) if rank is None else None
        self.q_down = Linear(rank, shape.width, bias, kind) if rank is not None else None
        self.q_latent_norm = _latent_norm(rank, shape, kind) if rank is not None else None
        self.q_up = Linear(queries, rank, False, kind) if rank is not None else None
        self.kv_down = Linear(mla.kv_rank + mla.rope_dim, shape.width, bias, kind)
        self.kv_latent_norm = _latent_norm(mla.kv_rank, shape, kind)
        self.kv_up = Linear(shape.heads * mla.nope_dim + values, mla.kv_rank, False, kind)
        self.out = Linear(shape.width, values, shape.out_bias, kind)
        self.kernel: Kernel = causal_attention

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BSHd = self._queries(x_BSD, context)
        k_BSHd, v_BSHv = self._keys_and_values(x_BSD, context)
        q_BHSd, k_BHSd, v_BHSv = (each.transpose(1, 2) for each in (q_BSHd, k_BSHd, v_BSHv))
        out_BHSv = self.kernel(q_BHSd, k_BHSd, v_BHSv, context.attention)
        return self.out(out_BHSv.transpose(1, 2).flatten(2))

    def _queries(self, x_BSD: Tensor, context: Context) -> Tensor:
        if self.q_down is None or self.q_latent_norm is None or self.q_up is None:
            assert self.q is not None
            projected = self.q(x_BSD)
        else:
            projected = self.q_up(self.q_latent_norm(self.q_down(x_BSD)))
        heads_BSHd = projected.unflatten(-1, (-1, self.head_dim))
        plain, turned = heads_BSHd.split([self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        q_BSHd = torch.cat([plain, self._rotated(turned, context)], dim=-1)
        return q_BSHd if self.scale == 1 else q_BSHd * self.scale

    def _keys_and_values(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        mla = self.mla
        latent, shared = self.kv_down(x_BSD).split([mla.kv_rank, mla.rope_dim], dim=-1)
        up = self.kv_up(self.kv_latent_norm(latent))
        heads_BSH = up.unflatten(-1, (-1, mla.nope_dim + mla.value_dim))
        plain, v_BSHv = heads_BSH.split([mla.nope_dim, mla.value_dim], dim=-1)
        turned = self._rotated(shared[:, :, None, :], context)
        turned = turned.expand(-1, -1, plain.shape[2], -1)
        return torch.cat([plain, turned], dim=-1), v_BSHv

    def _rotated(self, heads: Tensor, context: Context) -> Tensor:
        return heads if context.rotary is None else rotate(heads, context.rotary, self.interleaved)


def _latent_norm(width: int, shape: Shape, kind: Kind) -> Norm:
    norm = Norm(width, False, shape, kind)
    norm.eps = LATENT_EPS
    return norm


def _score_scale(shape: Shape) -> float:
    """What queries are multiplied by, so that kernels scale scores by 1/√d as ever.

    DeepSeek squares YaRN's temperature into the scores of both parts of a head.
    """
    rope = shape.rope
    if rope is None or rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2

"""Flash's kernels for documents of different lengths, one after another: no mask, no pair between
two documents, no repeated heads.

`torch.nn.attention.varlen` has the same kernels, without the backward of a shard of the keys.

Legend: B rows, H heads, S tokens, T = B·S, d width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model import DocumentPairs

aten = torch.ops.aten
WIDEST = 256  # head that the kernels take
_MULTIPLE = 8  # of which a head's width must be one


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: DocumentPairs, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, −inf for a query that pairs no key."""
    rows, _, queries, _ = q.shape
    width = _one_width(q, v)
    out_THd, lse_HT, *_ = aten._flash_attention_forward(
        *(_tokens_first(tensor, width) for tensor in (q, k, v)),
        *(*documents.ends(q.device), documents.longest_q, documents.longest_k),
        *(0.0, causal, False),
        **_scale_and_window(q, window),
    )
    lse_BHS = lse_HT.unflatten(1, (rows, queries)).transpose(0, 1)
    if documents.has_gaps:  # the kernel says +inf
        lse_BHS = lse_BHS.masked_fill(lse_BHS == math.inf, -math.inf)
    return _heads_first(out_THd, v, rows), lse_BHS


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BHS: Tensor,
    documents: DocumentPairs,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    rows, width = len(q), _one_width(q, v)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout
    dq, dk, dv = aten._flash_attention_backward(
        *(_tokens_first(tensor.to(q.dtype), width) for tensor in (grad_out, q, k, v, out)),
        lse_BHS.transpose(0, 1).flatten(1).contiguous(),
        *(*documents.ends(q.device), documents.longest_q, documents.longest_k),
        *(0.0, causal, unused, unused),
        **_scale_and_window(q, window),
    )
    return _heads_first(dq, q, rows), _heads_first(dk, k, rows), _heads_first(dv, v, rows)


def _one_width(q: Tensor, v: Tensor) -> int:
    """The kernels want queries, keys and values of one width."""
    return -(-max(q.shape[-1], v.shape[-1]) // _MULTIPLE) * _MULTIPLE


def _tokens_first(x_BHSd: Tensor, width: int) -> Tensor:
    """(T, H, d) with zeros up to this width, which add nothing to a product."""
    x_THd, missing = x_BHSd.transpose(1, 2).flatten(0, 1), width - x_BHSd.shape[-1]
    return F.pad(x_THd, (0, missing)) if missing else x_THd


def _heads_first(x_THd: Tensor, like: Tensor, rows: int) -> Tensor:
    """(B, H, S, d) again, in the width of `like`: a copy, so that nothing wider is saved."""
    if x_THd.shape[-1] > like.shape[-1]:
        x_THd = x_THd[..., : like.shape[-1]].contiguous()
    return x_THd.unflatten(0, (rows, -1)).transpose(1, 2)


def _scale_and_window(q: Tensor, window: int | None) -> dict[str, float]:
    """Of a window the kernels count the keys before a query's own."""
    options: dict[str, float] = {"scale": 1 / math.sqrt(q.shape[-1])}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    return options

"""Attention sinks: a learned logit of each head that takes a share of the softmax and has no value.

Merged attention is computed without it. Then the output shrinks by the share of the keys, and the
log-sum-exp grows; with these two, the backward of any kernel gives the gradients of queries, keys
and values.

Legend: B rows, H query heads, Q queries, d width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out_BHQd: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the sinks."""
    logits_HQ = sinks_H.to(lse_BHQ.dtype)[:, None]
    share_BHQ = torch.sigmoid(lse_BHQ - logits_HQ)
    return out_BHQd * share_BHQ[..., None], torch.logaddexp(lse_BHQ, logits_HQ)


def sinks_gradient(grad: Tensor, out_BHQd: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> Tensor:
    """Of the sinks, from the gradient of the output; both are with sinks."""
    wide = lse_BHQ.dtype
    share_BHQ = (sinks_H.to(wide)[:, None] - lse_BHQ).exp()
    along_BHQ = (grad.to(wide) * out_BHQd.to(wide)).sum(-1)
    return -(share_BHQ * along_BHQ).sum((0, 2)).to(sinks_H.dtype)

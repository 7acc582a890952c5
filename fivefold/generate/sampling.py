"""The next token of a sequence, from its logits.

The random number of a token is a hash of seed, request id and index in the completion. Nothing else
is in it: batch, order and layout draw the same tokens from the same logits. Log-probabilities are
those of the model, before temperature and filters, as training computes them.

Legend: V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fivefold.generate.requests import Sampling

_BITS = 53  # of a float64 below 1


def uniform(seed: int, request: str, index: int) -> float:
    """The random number of a token, at least 0 and below 1."""
    key = f"{seed}:{index}:{request}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / 2**_BITS


def filtered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities in float64 after temperature, top-k and then top-p. Of equal logits the lower
    token is the more likely one."""
    scaled_V = logits_V.double() / sampling.temperature
    if sampling.top_k is None and sampling.top_p >= 1:
        return scaled_V.softmax(0)
    sorted_V, order_V = scaled_V.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_V[sampling.top_k :] = float("-inf")
    odds_V = sorted_V.softmax(0)
    # A token stays if those before it have less than top_p: the first always does.
    before_V = odds_V.cumsum(0) - odds_V
    odds_V = odds_V.masked_fill(before_V >= sampling.top_p, 0.0)
    odds_V[0] = odds_V[0].clamp(min=torch.finfo(odds_V.dtype).tiny)
    return torch.zeros_like(odds_V).scatter(0, order_V, odds_V / odds_V.sum())


def choose(logits_V: Tensor, sampling: Sampling, request: str, index: int) -> tuple[int, float]:
    """The token with this index in the completion of a request, and its log-probability."""
    wide_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    if sampling.temperature == 0:
        token = int(wide_V.argmax())  # the first of equals
    else:
        ends_V = filtered(wide_V, sampling).cumsum(0)
        place = uniform(sampling.seed, request, index) * ends_V[-1].item()
        # The first token whose end is beyond: those without probability end where they begin.
        token = int(torch.searchsorted(ends_V, place, right=True))
    return token, wide_V.log_softmax(0)[token].item()

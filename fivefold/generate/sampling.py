"""The next token of a sequence, from its logits.

The random number of a token is a hash of seed, request id and index in the completion. Nothing else
is in it: batch, order and layout draw the same tokens from the same logits. Log-probabilities are
those of the model, before temperature and filters, as training computes them.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.generate.requests import Sampling

_BITS = 53  # of a float64 below 1


def uniform(seed: int, request: str, index: int) -> float:
    """Uniform random number in [0, 1) of a token."""
    key = f"{seed}:{index}:{request}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / 2**_BITS


@dataclass(frozen=True)
class Draw:
    """How to sample one token, and its index. With a `target`, the likeliest token is returned with
    the log-probability of the target."""

    sampling: Sampling
    request: str
    index: int  # in the completion
    target: int | None = None
    exclusions: frozenset[int] = frozenset()  # tokens that are not drawn
    allowed: bytes | None = None  # a bit for every token that a grammar allows; None: all


def filtered(logits_NV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities in float64 after temperature, min-p, top-k and top-p, row by row. Of equal
    logits the lower token ranks higher."""

    def column(values: Sequence[float]) -> Tensor:
        return _there(values, torch.float64, logits_NV.device)[:, None]

    scaled_NV = logits_NV.double() / column([sampling.temperature for sampling in samplings])
    if any(sampling.min_p for sampling in samplings):
        # As differences of logits: a ratio of probabilities needs no sum over the vocabulary.
        gaps_N1 = column([math.log(s.min_p) if s.min_p else -math.inf for s in samplings])
        least_N1 = scaled_NV.amax(1, keepdim=True) + gaps_N1
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -math.inf)
    if all(sampling.top_k is None and sampling.top_p >= 1 for sampling in samplings):
        return scaled_NV.softmax(1)
    vocab = logits_NV.shape[1]
    sorted_NV, order_NV = scaled_NV.sort(dim=1, descending=True, stable=True)
    ranks_V = torch.arange(vocab, device=logits_NV.device)
    kept_N1 = column(
        [vocab if sampling.top_k is None else sampling.top_k for sampling in samplings]
    )
    odds_NV = sorted_NV.masked_fill(ranks_V >= kept_N1, float("-inf")).softmax(1)
    # A token stays if those before it have less than top_p: the first always does.
    before_NV = odds_NV.cumsum(1) - odds_NV
    odds_NV = odds_NV.masked_fill(
        before_NV >= column([sampling.top_p for sampling in samplings]), 0.0
    )
    odds_NV[:, 0].clamp_(min=torch.finfo(odds_NV.dtype).tiny)
    odds_NV /= odds_NV.sum(1, keepdim=True)
    return torch.zeros_like(odds_NV).scatter(1, order_NV, odds_NV)


def choose(logits_NV: Tensor, draws: Sequence[Draw]) -> list[tuple[int, float]]:
    """Sample a token from each row of logits; returns it with its log-probability or the
    target's."""
    drawn_N2 = draw_tokens(logits_NV, draws)
    return [(int(token), logprob) for token, logprob in as_rows(drawn_N2)]


def as_rows(drawn_NK: Tensor) -> list[list[float]]:
    """Convert draws to Python numbers: token, log-probability and alternatives."""
    return cast("Any", drawn_NK).tolist()


def likeliest_tokens(logits_NV: Tensor, count: int) -> Tensor:
    """Top tokens of each row with their log-probabilities, interleaved, (N, 2 · count) in float64.
    Of equal logits the lower token comes first."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(1)
    # `topk` promises no order of equals, which ranks and batches would see.
    sorted_NV, order_NV = wide_NV.sort(dim=1, descending=True, stable=True)
    pairs_NC2 = torch.stack([order_NV[:, :count].double(), sorted_NV[:, :count].double()], 2)
    return pairs_NC2.flatten(1)


def draw_tokens(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample as `choose` does, without synchronization, into (N, 2) numbers in float64, exact for
    any vocabulary. A row with NaN, +inf or only −inf gets the log-probability NaN, and a token
    within the vocabulary, which the next step may already read."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    allowed_NV = _excluded(wide_NV, draws) if any(d.exclusions for d in draws) else wide_NV
    if any(draw.allowed is not None for draw in draws):
        allowed_NV = _allowed(allowed_NV, draws)
    tokens_N = allowed_NV.argmax(1)  # the first of equals
    fixed_tokens = {i: draw.target for i, draw in enumerate(draws) if draw.target is not None}
    drawn = [
        i for i, draw in enumerate(draws) if not draw.sampling.greedy and i not in fixed_tokens
    ]
    if drawn:
        rows = _there(drawn, torch.int64, wide_NV.device)
        ends_NV = filtered(allowed_NV[rows], [draws[i].sampling for i in drawn]).cumsum(1)
        places = [uniform(draws[i].sampling.seed, draws[i].request, draws[i].index) for i in drawn]
        places_N1 = ends_NV[:, -1:] * _there(places, torch.float64, wide_NV.device)[:, None]
        # The first token whose end is beyond: those without probability end where they begin.
        last = ends_NV.shape[1] - 1  # of NaN, the place is beyond
        tokens_N[rows] = torch.searchsorted(ends_NV, places_N1, right=True)[:, 0].clamp(max=last)
    scored_N = tokens_N
    if fixed_tokens:
        rows, targets = (
            _there(numbers, torch.int64, wide_NV.device)
            for numbers in zip(*fixed_tokens.items(), strict=True)
        )
        scored_N = tokens_N.index_put((rows,), targets)
    logprobs_N1 = wide_NV.log_softmax(1).gather(1, scored_N[:, None])
    return torch.cat([tokens_N[:, None].double(), logprobs_N1.double()], 1)


def token_ranks(logits_NV: Tensor, logprobs_N1: Tensor) -> Tensor:
    """Number of tokens that are at least as likely as one with this log-probability, (N, 1) in
    float64."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return (wide_NV.log_softmax(1) >= logprobs_N1).sum(1, keepdim=True).double()


def _excluded(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits without the exclusions of every row."""
    vocab = logits_NV.shape[1]  # configs may name end tokens beyond it
    pairs = [(i, t) for i, draw in enumerate(draws) for t in draw.exclusions if t < vocab]
    rows, tokens = (
        _there([pair[axis] for pair in pairs], torch.int64, logits_NV.device) for axis in (0, 1)
    )
    return logits_NV.index_put((rows, tokens), logits_NV.new_full((), -math.inf))


def _allowed(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits without what the grammar of a row does not allow."""
    bits_of = {row: draw.allowed for row, draw in enumerate(draws) if draw.allowed is not None}
    host_bits = torch.frombuffer(bytearray().join(bits_of.values()), dtype=torch.uint8)
    bits_RB1 = _on_device(host_bits, logits_NV.device).view(len(bits_of), -1, 1)
    powers_8 = _there([1 << i for i in range(8)], torch.uint8, logits_NV.device)
    denied_RV = ((bits_RB1 & powers_8) == 0).flatten(1)[:, : logits_NV.shape[1]]
    rows = _there(list(bits_of), torch.int64, logits_NV.device)
    return logits_NV.index_put((rows,), logits_NV[rows].masked_fill(denied_RV, -math.inf))


def _there(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; a copy from pinned memory waits for nothing."""
    return _on_device(torch.tensor(values, dtype=dtype), device)


def _on_device(host_tensor: Tensor, device: torch.device) -> Tensor:
    return (
        host_tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host_tensor
    )

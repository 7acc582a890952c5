"""The next token of a sequence, from its logits.

The random number of a token is a hash of seed, request id and index in the completion. Nothing else
is in it: batch, order and layout draw the same tokens from the same logits. Log-probabilities are
those of the model, before temperature and filters, as training computes them.

Here is the definition, in float64 and with a sort. Float32 logits on a GPU are drawn from by the
kernels of `sampling_kernel.py`.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.generate.requests import Sampling

_LOWER_BITS, _UNIT = 11, 2.0**-53  # of 64 bits, those that no float64 below 1 has
_MOST_ROWS = 256  # whose likeliest tokens are looked for at once


def uniform(seed: int, request: str, index: int) -> float:
    """Uniform random number in [0, 1) of a token."""
    key = f"{seed}:{index}:{request}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> _LOWER_BITS) * _UNIT


@dataclass(slots=True)  # many in a step: frozen ones take three times as long to make
class Draw:
    """How to sample one token, and its index. With a `target`, the likeliest token is returned with
    the log-probability of the target."""

    sampling: Sampling
    request: str
    index: int  # in the completion
    target: int | None = None
    exclusions: frozenset[int] = frozenset()  # tokens that are not drawn
    alternatives: int = 0  # so many of the likeliest tokens are wanted as well
    ranked: bool = False  # whether the rank of the target is wanted
    allowed: bytes | None = None  # a bit for every token that a grammar allows; None: all

    @property
    def uniform(self) -> float:
        """The random number of the token."""
        return uniform(self.sampling.seed, self.request, self.index)


def filtered(logits_NV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities in float64 after temperature, min-p, top-k and top-p, row by row. Of equal
    logits the lower token ranks higher."""

    def column(values: Sequence[float]) -> Tensor:
        return _on_device(values, torch.float64, logits_NV.device)[:, None]

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


def draw_table(logits_NV: Tensor, draws: Sequence[Draw], most: int, ranked: bool) -> Tensor:
    """Sample as `draw_tokens` does; returns (N, 2 + 2 · most + ranked) numbers in float64: also the
    `most` likeliest tokens of rows that ask for any, and ranks of targets. Other rows have zeros
    there, and cost nothing."""
    drawn_N2 = draw_tokens(logits_NV, draws)
    if not (most or ranked):
        return drawn_N2
    table_NK = drawn_N2.new_zeros(len(draws), 2 + 2 * most + ranked)
    table_NK[:, :2] = drawn_N2
    targets = [-1 if draw.target is None else draw.target for draw in draws]
    targets_N = _on_device(targets, torch.int64, logits_NV.device)
    scored_N = torch.where(targets_N < 0, drawn_N2[:, 0].long(), targets_N)
    device = logits_NV.device
    for rows in _chunks([i for i, draw in enumerate(draws) if draw.alternatives], device):
        pairs_nC2 = likeliest_tokens(logits_NV[rows], most).view(-1, most, 2)
        # A token that is in both has one log-probability, to the bit.
        is_scored_nC = pairs_nC2[..., 0] == scored_N[rows, None]
        torch.where(is_scored_nC, drawn_N2[rows, 1:], pairs_nC2[..., 1], out=pairs_nC2[..., 1])
        table_NK[rows, 2 : 2 + 2 * most] = pairs_nC2.flatten(1)
    for rows in _chunks([i for i, draw in enumerate(draws) if draw.ranked], device):
        table_NK[rows, -1] = token_ranks(logits_NV[rows], scored_N[rows])
    return table_NK


def _chunks(rows: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Some rows at a time: a prompt may have thousands, and those that ask are copied."""
    for start in range(0, len(rows), _MOST_ROWS):
        yield _on_device(rows[start : start + _MOST_ROWS], torch.int64, device)


def likeliest_tokens(logits_NV: Tensor, count: int) -> Tensor:
    """Top tokens of each row with their log-probabilities, interleaved, (N, 2 · count) in float64.
    Of equal logits the lower token comes first."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    vocab = wide_NV.shape[1]
    # `topk` promises no order of equals, which ranks and batches would see: its values are the
    # same, and of the tokens at the last of them the first ones are taken.
    least_N1 = wide_NV.topk(count, dim=1).values[:, -1:]
    above_NV, equal_NV = wide_NV > least_N1, wide_NV == least_N1
    num_equal_N1 = count - above_NV.sum(1, keepdim=True)
    is_top_NV = above_NV | (equal_NV & (equal_NV.cumsum(1, dtype=torch.int32) <= num_equal_N1))
    tokens_V = torch.arange(vocab, dtype=torch.int32, device=wide_NV.device)
    # All numbers differ, also in rows that are not finite.
    top_first_NV = torch.where(is_top_NV, tokens_V - vocab, tokens_V)
    tokens_NC = top_first_NV.topk(count, dim=1, largest=False).values.sort(1).values % vocab
    tokens_NC = tokens_NC.long()
    order_NC = wide_NV.gather(1, tokens_NC).argsort(dim=1, descending=True, stable=True)
    tokens_NC = tokens_NC.gather(1, order_NC)
    logprobs_NC = wide_NV.log_softmax(1).gather(1, tokens_NC)
    pairs_NC2 = torch.stack([tokens_NC.double(), logprobs_NC.double()], 2)
    return pairs_NC2.flatten(1)


def draw_tokens(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample as `choose` does, without synchronization, into (N, 2) numbers in float64, exact for
    any vocabulary. A row with NaN, +inf or only −inf gets the log-probability NaN, and a token
    within the vocabulary, which the next step may already read."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    allowed_NV = _excluded(wide_NV, draws) if any(d.exclusions for d in draws) else wide_NV
    if any(draw.allowed is not None for draw in draws):
        allowed_NV = _allowed(allowed_NV, draws)
    if wide_NV.is_cuda and wide_NV.dtype == torch.float32:
        return draw_by_kernels(wide_NV, allowed_NV, draws)
    tokens_N = allowed_NV.argmax(1)  # the first of equals
    fixed_tokens = {i: draw.target for i, draw in enumerate(draws) if draw.target is not None}
    drawn = [
        i for i, draw in enumerate(draws) if not draw.sampling.greedy and i not in fixed_tokens
    ]
    if drawn:
        rows = _on_device(drawn, torch.int64, wide_NV.device)
        ends_NV = filtered(allowed_NV[rows], [draws[i].sampling for i in drawn]).cumsum(1)
        uniforms = _on_device([draws[i].uniform for i in drawn], torch.float64, wide_NV.device)
        goals_N1 = ends_NV[:, -1:] * uniforms[:, None]
        # The first token whose end is beyond: those without probability end where they begin.
        last = ends_NV.shape[1] - 1  # of NaN, the goal is beyond
        tokens_N[rows] = torch.searchsorted(ends_NV, goals_N1, right=True)[:, 0].clamp(max=last)
    scored_N = tokens_N
    if fixed_tokens:
        rows, targets = (
            _on_device(numbers, torch.int64, wide_NV.device)
            for numbers in zip(*fixed_tokens.items(), strict=True)
        )
        scored_N = tokens_N.index_put((rows,), targets)
    logprobs_N1 = wide_NV.log_softmax(1).gather(1, scored_N[:, None])
    return torch.cat([tokens_N[:, None].double(), logprobs_N1.double()], 1)


def draw_by_kernels(logits_NV: Tensor, allowed_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample as `draw_tokens` does, from float32 logits: `allowed_NV` without exclusions."""
    from fivefold.generate.sampling_kernel import RULES, draw_rows  # Triton is there with CUDA

    rules, greedy = list[float](), (0.0, 0.0, 1.0, 0.0, 0.0)
    for draw in draws:
        sampling, target = draw.sampling, -1 if draw.target is None else draw.target
        if target >= 0 or sampling.greedy:
            rules += (*greedy, target)
        else:
            top_k, min_p = sampling.top_k or logits_NV.shape[1], sampling.min_p
            log_min_p = math.log(min_p) if min_p else -math.inf
            rules += (sampling.temperature, top_k, sampling.top_p, log_min_p, draw.uniform, target)
    rules_N = _on_device(rules, torch.float64, logits_NV.device)
    return draw_rows(logits_NV, allowed_NV, rules_N.view(-1, RULES))


def token_ranks(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Number of tokens in each row that are at least as likely as one token, in float64."""
    return (logits_NV >= logits_NV.gather(1, tokens_N[:, None])).sum(1).double()


def _excluded(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits without the exclusions of every row."""
    vocab = logits_NV.shape[1]  # configs may name end tokens beyond it
    pairs = [(i, t) for i, draw in enumerate(draws) for t in draw.exclusions if t < vocab]
    if not pairs:
        return logits_NV
    rows, tokens = (
        _on_device([pair[axis] for pair in pairs], torch.int64, logits_NV.device) for axis in (0, 1)
    )
    return logits_NV.index_put((rows, tokens), logits_NV.new_full((), -math.inf))


def _allowed(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits without what the grammar of a row does not allow."""
    bits_of = {row: draw.allowed for row, draw in enumerate(draws) if draw.allowed is not None}
    host_bits = torch.frombuffer(bytearray().join(bits_of.values()), dtype=torch.uint8)
    bits_RB1 = _copied(host_bits, logits_NV.device).view(len(bits_of), -1, 1)
    powers_8 = 1 << torch.arange(8, dtype=torch.uint8, device=logits_NV.device)
    denied_RV = ((bits_RB1 & powers_8) == 0).flatten(1)[:, : logits_NV.shape[1]]
    rows = _on_device(list(bits_of), torch.int64, logits_NV.device)
    return logits_NV.index_put((rows,), logits_NV[rows].masked_fill(denied_RV, -math.inf))


def _on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; a copy from pinned memory waits for nothing."""
    # `torch.tensor` would take 0.4 µs a number.
    numbers = array("d" if dtype == torch.float64 else "q", values)
    return _copied(torch.frombuffer(numbers, dtype=dtype), device)


def _copied(host_tensor: Tensor, device: torch.device) -> Tensor:
    return (
        host_tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host_tensor
    )

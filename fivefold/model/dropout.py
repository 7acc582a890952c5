"""Dropout whose mask is the same in every layout.

Whether an activation is dropped is a function of seed, step, row of the step, place in the row,
site and feature. Every token brings a key, drawn from the first four (`token_keys`); a model mixes
it with its sites, and a site with its features. No rank and no order of execution is in it, so that
many ranks, one device and a forward that runs again drop the same activations.

A hash takes the place of a generator. All of its numbers have at most 32 bits and are held in
int64, where no product overflows: CPUs, GPUs and compiled kernels agree to the bit.

Sites: 0 is the embedding. Block n, counted through multi-token prediction, has `site_of(n, part)`.

Legend: B rows, S tokens of a row, N sites, D features, H query heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fivefold.model.kernels import Fuse

Part = Literal["pairs", "attention", "mlp"]  # pairs of attention, and two residuals
Dropping = Callable[[Tensor, Tensor, float], Tensor]
EMBEDDING = 0
PARTS: tuple[Part, ...] = ("pairs", "attention", "mlp")
_BITS = 32
_MASK = (1 << _BITS) - 1
_HIGH = _MASK >> 1  # a key is not negative
# An odd multiplier below 2**27 that mixes well in two rounds; the salts are digits of e and pi.
_MULTIPLIER = 0x45D9F3B
_SALTS = (0x2B7E1516, 0x243F6A88)


def site_of(block: int, part: Part) -> int:
    """The site of a part of a block."""
    return 1 + len(PARTS) * block + PARTS.index(part)


def mixed(x: Tensor) -> Tensor:
    """A permutation of the numbers below 2**32 that looks random."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * _MULTIPLIER & _MASK
    return (x >> 16) ^ x


def token_keys(seed: int, numbers: Tensor, seq: int) -> Tensor:
    """The keys of all tokens of samples, of the size of `numbers` and `seq`.

    The number of a sample is step · global batch + row of the step.
    """
    places = torch.arange(seq, device=numbers.device)
    halves = [torch.tensor(seed), torch.tensor(seed >> _BITS), numbers, numbers >> _BITS]
    lanes: list[Tensor] = []
    for salt in _SALTS:
        lane = torch.tensor(salt)
        for word in halves:
            lane = mixed(lane ^ (word & _MASK))
        lanes.append(mixed(lane[..., None] ^ places))
    return _joined(*lanes)


def site_keys(keys_BS: Tensor, first: int, stop: int) -> Tensor:
    """The keys of the tokens at the sites from `first` to `stop`, (N, B, S)."""
    sites_N11 = torch.arange(first, stop, device=keys_BS.device)[:, None, None]
    lanes = (
        mixed(lane ^ mixed(sites_N11 ^ salt))
        for lane, salt in zip(_lanes(keys_BS), _SALTS, strict=True)
    )
    return _joined(*lanes)


def keeps(keys: Tensor, features: Tensor, rate: float) -> Tensor:
    """Whether each feature of each token is kept, given the keys of one site."""
    low, high = _lanes(keys)
    return mixed(mixed(low[..., None] ^ features) ^ high[..., None]) >= _threshold(rate)


def drop(x_BSD: Tensor, keys_BS: Tensor, rate: float) -> Tensor:
    """Zero where a feature is dropped, and the others enlarged so that the mean stays."""
    kept_BSD = keeps(keys_BS, torch.arange(x_BSD.shape[-1], device=x_BSD.device), rate)
    return x_BSD * (kept_BSD.to(x_BSD.dtype) * (1 / (1 - rate)))


class _Drop(torch.autograd.Function):
    """Its gradient drops the same.

    It does not save the keys, which live as long as the batch: a forward that runs again stops at
    the last tensor that is saved, and would run one more collective for them.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Dropping, x_BSD: Tensor, keys_BS: Tensor, rate: float) -> Tensor:
        ctx.dropping = (kernel, keys_BS, rate)
        return kernel(x_BSD, keys_BS, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernel, keys_BS, rate = ctx.dropping
        return None, kernel(gradients[0], keys_BS, rate), None, None


def dropping(fuse: Fuse) -> Dropping:
    """`drop` and its gradient, by the kernel that `fuse` makes."""
    return partial(_Drop.apply, fuse(drop))


@dataclass(frozen=True)
class SiteKeys:
    """The keys of the tokens that a forward has between its modules, from site `first` on."""

    first: int
    keys_NBS: Tensor

    def of(self, site: int) -> Tensor:
        return self.keys_NBS[site - self.first]


@dataclass(frozen=True)
class PairDropout:
    """Dropout of the pairs of queries and keys of one layer.

    `keys_BS` are those of full rows. `first_head`: query heads of the layer before those of
    whoever asks.
    """

    rate: float
    keys_BS: Tensor
    site: int = 0
    first_head: int = 0

    @property
    def scale(self) -> float:
        """What multiplies the weights of the others, so that the mean stays."""
        return 1 / (1 - self.rate)

    def keeps(
        self, num_heads: int, queries_Q: Tensor, keys_K: Tensor, skipped_heads: int = 0
    ) -> Tensor:
        """Whether each pair is kept, (B, H, Q, K).

        Queries and keys are given by their places in the row.
        """
        low_BQ, high_BQ = _lanes(site_keys(self.keys_BS[:, queries_Q], self.site, self.site + 1)[0])
        first = self.first_head + skipped_heads
        heads_H1 = torch.arange(first, first + num_heads, device=low_BQ.device)[:, None]
        high_BHQ = mixed(high_BQ[:, None] ^ mixed(heads_H1))
        drawn = mixed(mixed(low_BQ[:, None, :, None] ^ keys_K) ^ high_BHQ[..., None])
        return drawn >= _threshold(self.rate)


def _threshold(rate: float) -> int:
    return int(rate * (1 << _BITS))


def _lanes(keys: Tensor) -> tuple[Tensor, Tensor]:
    return keys & _MASK, keys >> _BITS


def _joined(low: Tensor, high: Tensor) -> Tensor:
    return (high & _HIGH) << _BITS | low

"""Which activations a training drops, from the rule in docs/training.md, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = np.ndarray[Any, np.dtype[np.uint64]]
SALTS = (0x2B7E1516, 0x243F6A88)
PAIRS, ATTENTION, MLP = 1, 2, 3  # the first sites of a layer


def h(x: Words) -> Words:
    """The hash of numbers below 2**32."""
    for _ in range(2):
        x = (x ^ x >> np.uint64(16)) * np.uint64(0x45D9F3B) % np.uint64(2**32)
    return x ^ x >> np.uint64(16)


def words(values: Sequence[int]) -> Words:
    return np.array([value % 2**32 for value in values], np.uint64)


@dataclass(frozen=True)
class Masks:
    """The masks of one microbatch, by the numbers of its samples."""

    seed: int
    samples: Sequence[int]
    seq: int

    def features(self, site: int, width: int, rate: float) -> Tensor:
        """What multiplies each feature, (rows, seq, width)."""
        low, high = (lane[:, :, None] for lane in self._lanes(site))
        drawn = h(h(low ^ words(range(width))) ^ high)
        return torch.tensor(drawn >= int(rate * 2**32)).double() / (1 - rate)

    def pairs(self, site: int, heads: int, rate: float) -> Tensor:
        """What multiplies the weight of each pair, (rows, heads, seq, seq)."""
        low, high = (lane[:, None, :, None] for lane in self._lanes(site))
        of_heads = h(high ^ h(words(range(heads)))[None, :, None, None])
        drawn = h(h(low ^ words(range(self.seq))) ^ of_heads)
        return torch.tensor(drawn >= int(rate * 2**32)).double() / (1 - rate)

    def _lanes(self, site: int) -> tuple[Words, Words]:
        """Two numbers of each token; the second one always has 31 bits."""
        found: list[Words] = []
        for number, salt in enumerate(SALTS):
            x = words([salt])
            for word in (self.seed, self.seed >> 32):
                x = h(x ^ words([word]))
            of_rows = h(h(x ^ words(self.samples)) ^ words([each >> 32 for each in self.samples]))
            token = h(of_rows[:, None] ^ words(range(self.seq)))
            bits = np.uint64(2 ** (32 - number))
            found.append(h(token % bits ^ h(words([site ^ salt]))) % bits)
        return found[0], found[1]

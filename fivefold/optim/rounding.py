"""Stochastic rounding of states to bfloat16.

A number between two neighbours of bfloat16 goes to one of them, to the nearer one more often, so
that it is right on average and small changes add up over many updates. The random bits are a pure
function of the seed, the number of updates, the weight's name and the index of the element in the
full weight. A run that resumes therefore draws the same bits, and ranks with copies or shards of
the same weight round them alike. On a GPU the kernel of the update (`optim/adamw_kernel.py`) draws
them from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import LocalWeight, WeightShard, origin_of

_LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks
_DIMS = 3  # of a weight at most: experts, outputs, inputs

FullWeight = tuple[tuple[int, ...], WeightShard]
"""The shape of a full weight, and the shard of it that a rank has before ZeRO cuts that."""


class RoundingKey(NamedTuple):
    """Seed of the rounding bits of consecutive elements of a shard: a number, and their indices in
    the full weight. Shapes have three dims, padded with 1 in front."""

    key: int  # 32 bits
    start: int  # of the elements, in the shard
    local: tuple[int, ...]  # shape of the shard
    origin: tuple[int, ...]  # where it begins in the full weight
    shape: tuple[int, ...]  # of the full weight

    @classmethod
    def of(
        cls, seed: int, count: int, row: LocalWeight, start: int, full: FullWeight | None
    ) -> RoundingKey:
        """Key of the elements from `start` on in this update; without a full weight, the shard is
        one."""
        # The copies of an embedding on two stages have two names, and must stay equal.
        name = "embed.weight" if row.alone else row.name
        digest = hashlib.blake2b(f"{seed} {count} {name}".encode(), digest_size=4).digest()
        shape, origin = row.shape, (0,) * len(row.shape)
        if full is not None:
            shape, origin = full[0], origin_of(*full)
        assert len(shape) <= _DIMS, "the kernel of an update has three dims"
        missing = _DIMS - len(shape)
        ones, zeros = (1,) * missing, (0,) * missing
        sizes = (*ones, *row.shape), (*zeros, *origin), (*ones, *shape)
        return cls(int.from_bytes(digest, "little"), start, *sizes)

    @property
    def contiguous(self) -> bool:
        """Whether consecutive elements of the shard are consecutive in the full weight."""
        return self.local[1:] == self.shape[1:]

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of the outer two dims in the full weight."""
        return self.shape[1] * self.shape[2], self.shape[2]

    @property
    def base(self) -> int:
        """Index of the shard's first element."""
        outer, middle = self.strides
        return self.origin[0] * outer + self.origin[1] * middle + self.origin[2]

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Indices of elements in the full weight, modulo 2³²; 0 for the padding at the end."""
        position = torch.arange(self.start, self.start + size, device=device)
        if not self.contiguous:
            # In place: row r of the shard begins at r · middle, and every outer one further on.
            (outer, middle), (_, rows, columns) = self.strides, self.local
            row = position.div(columns, rounding_mode="floor")
            position.add_(row, alpha=middle - columns)
            row.div_(rows, rounding_mode="floor")
            position.add_(row, alpha=outer - rows * middle)
            del row
        index = position.add_(self.base)
        return index.masked_fill_(index >= math.prod(self.shape), 0).to(torch.int32)


def rounding_bits(
    seed: int,
    count: int,
    row: LocalWeight,
    start: int,
    size: int,
    device: torch.device,
    full: FullWeight | None = None,
) -> Tensor:
    """32 random bits for each of the elements [start, start + size) of a weight in one update."""
    rounding_key = RoundingKey.of(seed, count, row, start, full)
    signed = rounding_key.key - 2**32 if rounding_key.key >= 2**31 else rounding_key.key
    return _mix(rounding_key.indices(size, device).bitwise_xor_(signed))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Austin Appleby, 2011): each bit changes all others."""
    x ^= (x >> 16) & 0xFFFF  # a right shift of int32 copies the sign
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down by the low 16 bits; infinities and NaN stay."""
    wide = values.float()
    raised = wide.view(torch.int32) + (bits & _LOW)
    near = (raised & ~_LOW).view(torch.float32)
    return torch.where(wide.isfinite(), near, wide).to(torch.bfloat16)

"""Stochastic rounding to bfloat16, by bits that anybody can draw again.

A number between two neighbours of bfloat16 goes to one of them, to the nearer one more often, so
that it is right on average: what is too small for one update is not lost over many. The bits are a
pure function of the seed, the number of updates, the weight's name and the place of the element in
it. A run that resumes draws what it would have drawn, and ranks that hold the same weight round it
alike, whole or in parts, which a rank's own generator would not.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fivefold.core.units import Row

AT_ONCE = 1 << 22  # elements: what is made on the way is large enough for a GPU, small for a cache
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks


def bits_for(
    seed: int, count: int, row: Row, start: int, size: int, device: torch.device
) -> Tensor:
    """32 random bits for each of the elements [start, start + size) of a weight in one update."""
    # The copies of an embedding on two stages have two names, and must stay equal.
    name = "embed.weight" if row.alone else row.name
    digest = hashlib.blake2b(f"{seed} {count} {name}".encode(), digest_size=4).digest()
    key = int.from_bytes(digest, "little", signed=True)
    places = torch.arange(start, start + size, device=device).to(torch.int32)
    return _mixed(places.bitwise_xor_(key))


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Austin Appleby, 2011): a change of one bit reaches them all."""
    x ^= (x >> 16) & 0xFFFF  # a shift of int32 brings copies of the sign along
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Float32 to bfloat16, up or down by the low 16 bits; what is not finite stays that."""
    wide = values.float()
    raised = wide.view(torch.int32) + (bits & _LOW)
    near = (raised & ~_LOW).view(torch.float32)
    return torch.where(wide.isfinite(), near, wide).to(torch.bfloat16)

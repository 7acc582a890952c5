"""Hashes of tensors, and a tape of them for everything that a rank sends and receives.

A hash is the exact sum of a tensor's bits, read as integers of 8 bytes, modulo 2^64. It depends on
no order of additions, so that it is the same on every device, and one flipped bit always changes
it. Two hashes of several tensors are combined modulo a prime below 2^31, in which powers of two
differ for 64 bits and more: sums over many ranks are then exact in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import DIMENSIONS, PIPELINE, WORLD

PRIME = 2_147_483_629  # 2^31 - 19
_BASE = 1_103_515_245
_WIDE = 8  # bytes that are added at once
_NARROW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 1 << 16  # words of a tensor that a short tape reads
_OF_SHORT_TAPES = {PIPELINE, WORLD, *(name for name, axis in DIMENSIONS.items() if axis == "dp")}


@torch.no_grad()
def bit_sum(tensor: Tensor, most: int | None = None) -> Tensor:
    """Hash a tensor; with `most`, only its first words of 8 bytes."""
    flat = tensor.detach().reshape(-1)
    return _sum(_words(flat if most is None else flat[: most * _WIDE // flat.element_size()]))


def _words(flat: Tensor) -> list[Tensor]:
    """The bits of a flat tensor as integers: words of 8 bytes, and the elements of the last one.
    Words that would begin elsewhere than in other copies are those of a copy."""
    itemsize = flat.element_size()
    per_word = _WIDE // itemsize
    if _is_within(flat):
        flat = flat.clone()
    stop = len(flat) - len(flat) % per_word
    tail = [flat[stop:].view(_NARROW[itemsize])] if stop < len(flat) else []
    return [flat[:stop].view(torch.int64), *tail]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].sum()
    for part in parts[1:]:
        total = total + part.sum(dtype=torch.int64)
    return total


class BitSums:
    """Hashes of tensors in fixed memory, which are computed repeatedly."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device, self.tensors = device, [tensor.detach().view(-1) for tensor in tensors]
        self.views = [None if _is_within(tensor) else _words(tensor) for tensor in self.tensors]

    @torch.no_grad()
    def read(self) -> Tensor:
        """Hash each tensor."""
        if not self.tensors:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        pairs = zip(self.tensors, self.views, strict=True)
        sums = [_sum(_words(tensor) if parts is None else parts) for tensor, parts in pairs]
        return torch.stack(sums).to(self.device, non_blocking=True)


def _is_within(flat: Tensor) -> bool:
    """Whether a tensor begins within a word of its memory."""
    return flat.storage_offset() * flat.element_size() % _WIDE > 0


@lru_cache(maxsize=64)
def _powers(number: int, device: torch.device) -> Tensor:
    powers, power = list[int](), 1
    for _ in range(number):
        power = power * _BASE % PRIME
        powers.append(power)
    return torch.tensor(powers, dtype=torch.int64, device=device)


def combined(sums: Tensor) -> Tensor:
    """Combine several hashes, by position, into one number below 2^31."""
    return (sums % PRIME * _powers(len(sums), sums.device) % PRIME).sum() % PRIME


class TapeEntry(NamedTuple):
    """One message: its collective, whether this rank sent it, its hash on the device, and source
    and target if it is point-to-point."""

    name: str
    sent: bool
    hash: Tensor
    pair: tuple[int, int] | None


class TapeRead(NamedTuple):
    """A `TapeEntry` whose hash was copied to the host."""

    name: str
    sent: bool
    hash: int
    pair: tuple[int, int] | None


class Tape:
    """Hashes of all messages that a rank sends and receives in a step, in its order.

    A `full` tape has every collective in full. A short one has pipeline messages and the
    collectives of the data dimension, and of each the first 512 KiB.
    """

    def __init__(self, full: bool) -> None:
        self.full, self.entries = full, list[TapeEntry]()

    def add(
        self,
        axis: str,
        kind: str,
        tensor: Tensor,
        *,
        sent: bool,
        pair: tuple[int, int] | None = None,
    ) -> None:
        """Append a message."""
        if self.full or axis in _OF_SHORT_TAPES:
            checksum = bit_sum(tensor, None if self.full else _SAMPLE)
            self.entries.append(TapeEntry(f"{axis}/{kind}", sent, checksum, pair))

    def read(self) -> list[TapeRead]:
        """Copy all entries to the host."""
        if not self.entries:
            return []
        hashes = torch.stack([entry.hash for entry in self.entries]).tolist()
        pairs = zip(self.entries, hashes, strict=True)
        return [TapeRead(entry.name, entry.sent, value, entry.pair) for entry, value in pairs]

    def messages(self, *, sent: bool) -> dict[tuple[int, int], list[int]]:
        """Hashes of point-to-point messages, in order."""
        hashes: dict[tuple[int, int], list[int]] = {}
        for entry in self.read():
            if entry.pair is not None and entry.sent == sent:
                hashes.setdefault(entry.pair, []).append(entry.hash)
        return hashes


class TapeDifference(NamedTuple):
    """The first thing that differs: what this rank `sent` or received, in words, and its number."""

    name: str
    sent: bool
    number: int


def first_difference(tape: Tape, other: Tape) -> TapeDifference | None:
    """Between two runs of a step. A rank whose first difference was sent had received the same
    before: the cause is there. A rank whose first difference was received is a victim."""
    for number, (a, b) in enumerate(zip(tape.read(), other.read(), strict=False)):
        if a != b:
            direction = "what it sent by" if a.sent else "what it received by"
            return TapeDifference(f"{direction} {a.name}", a.sent, number)
    return None

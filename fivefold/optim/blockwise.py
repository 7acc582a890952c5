"""Stochastic rounding to bfloat16, by bits that anybody can draw again.

A number between two neighbours of bfloat16 goes to one of them, to the nearer one more often, so
that it is right on average: what is too small for one update is not lost over many. The bits are a
pure function of the seed, the number of updates, the weight's name and the place of the element in
it. A run that resumes draws what it would have drawn, and ranks that hold the same weight round it
alike, whole or in parts, which a rank's own generator would not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core.recipe import Recipe
from fivefold.core.units import UnitRow
from fivefold.optim.optimizer import (
    ADAM_EPS,
    MASTER,
    STATES,
    InMemory,
    Kept,
    Name,
    OwnedWeight,
    decays,
    make_optimizer,
    with_states,
)

AT_ONCE = 1 << 22  # elements: what is made on the way is large enough for a GPU, small for a cache
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks


def bits_for(
    seed: int, count: int, row: UnitRow, start: int, size: int, device: torch.device
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


# Updates block by block, for states that are not held as they are computed with.
#
# States live in a store: in memory of another place or type, or in a file. A block at a time
# comes to the device, is updated there by torch's own optimizer, and goes back.


# Elements between which a tensor may be cut: vector kernels treat the rest of a tensor that fills
# no vector apart, and may round it otherwise, so that the rest must stay the same elements.
LINE = 4096


@dataclass(frozen=True)
class ElementRange:
    """Elements [start, stop) of the owned tensor at a place of the list."""

    place: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Block = tuple[ElementRange, ...]
Held = Mapping[str, Sequence[Tensor]]
"""By the name of a state, one flat tensor for every span of a block."""


class Store(Protocol):
    """Where states live."""

    def walk(self) -> Iterator[tuple[Block, Held]]:
        """All blocks; what is written into a block's tensors is kept."""
        ...

    def kept(self, key: str) -> list[Kept | None]:
        """The states of one name, one for every owned tensor."""
        ...

    def tensors(self) -> list[Tensor]:
        """What it holds in memory."""
        ...


def blocks_of(sizes: Sequence[int], most: int) -> list[Block]:
    """All elements of tensors of these sizes, in order, at most so many at once."""
    most = max(LINE, most // LINE * LINE)
    blocks: list[list[ElementRange]] = []
    room = 0
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            left = size - start
            taken = left if left <= room else room // LINE * LINE
            if not taken:
                blocks.append([])
                room = most
                continue
            blocks[-1].append(ElementRange(place, start, start + taken))
            start, room = start + taken, room - taken
    return [tuple(block) for block in blocks]


class MemoryStore:
    """States in memory, on the device or beside it."""

    def __init__(
        self,
        sizes: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        pinned: bool,
        block_bytes: int,
    ) -> None:
        """`pinned` memory is what a device copies from and to by itself."""
        self.held = {
            key: [
                torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned) for size in sizes
            ]
            for key, dtype in dtypes.items()
        }
        per_element = sum(dtype.itemsize for dtype in dtypes.values())
        self.blocks = blocks_of(sizes, block_bytes // per_element)

    def walk(self) -> Iterator[tuple[Block, Held]]:
        for block in self.blocks:
            yield (
                block,
                {
                    key: [tensors[span.place][span.start : span.stop] for span in block]
                    for key, tensors in self.held.items()
                },
            )

    def kept(self, key: str) -> list[Kept | None]:
        return [InMemory(tensor) for tensor in self.held[key]]

    def tensors(self) -> list[Tensor]:
        return [tensor for tensors in self.held.values() for tensor in tensors]


def state_dtypes(
    recipe: Recipe, name: Name, values: torch.dtype, master: bool
) -> dict[str, torch.dtype]:
    """What a store keeps for values of this type, by name."""
    states = torch.bfloat16 if recipe.states == "bf16" else values
    return dict.fromkeys(STATES[name], states) | ({MASTER: values} if master else {})


class Blockwise:
    """States come from a store and go back, block by block."""

    def __init__(
        self,
        recipe: Recipe,
        name: Name,
        owned: Sequence[OwnedWeight],
        store: Store,
        device: torch.device,
        master: bool,
    ) -> None:
        self.name: Name = name
        self.recipe, self.owned = recipe, owned
        self.store, self.device, self.master = store, device, master
        self.lr, self.count = recipe.lr, 0
        # As torch keeps them: AdamW counts the updates of every tensor.
        self.counts = torch.zeros(len(owned) if name == "adamw" else 0)
        if master:
            for block, held in store.walk():
                for weight, copy in zip(self._weights(block), held[MASTER], strict=True):
                    copy.copy_(weight)

    def step(self) -> None:
        self.counts.fill_(self.count)
        self.count += 1
        for block, held in self.store.walk():
            self._update(block, held)

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def states(self) -> dict[str, list[Kept | None]]:
        keys = [*STATES[self.name], *([MASTER] if self.master else [])]
        return {key: self.store.kept(key) for key in keys}

    def tensors(self) -> list[Tensor]:
        return [*self.store.tensors(), self.counts]

    def _weights(self, block: Block) -> list[Tensor]:
        return [
            self.owned[span.place].tensor.detach().view(-1)[span.start : span.stop]
            for span in block
        ]

    def _update(self, block: Block, held: Held) -> None:
        weights, owned = self._weights(block), [self.owned[span.place] for span in block]
        sources = held[MASTER] if self.master else weights
        values = [one.to(self.device, non_blocking=True) for one in sources]
        here = {
            key: [
                one.to(self.device, value.dtype, non_blocking=True)
                for one, value in zip(held[key], values, strict=True)
            ]
            for key in STATES[self.name]
        }
        pairs = [(decays(each), value) for each, value in zip(owned, values, strict=True)]
        plain = make_optimizer(self.name, pairs, self.lr, self.recipe.weight_decay, ADAM_EPS)
        optimizer = with_states(plain, self.name, values, here, self._counts(block))
        for each, span, value in zip(owned, block, values, strict=True):
            value.grad = each.grad.reshape(-1)[span.start : span.stop]
        optimizer.step()
        for place, span in enumerate(block):
            for home in {id(one): one for one in (sources[place], weights[place])}.values():
                if home is not values[place]:
                    home.copy_(values[place])
            self._put_back(span, {key: (held[key][place], here[key][place]) for key in here})

    def _counts(self, block: Block) -> Tensor:
        """Those of a block's tensors, for torch to count on."""
        if self.name != "adamw":
            return self.counts
        return self.counts[[span.place for span in block]].to(self.device)

    def _put_back(self, span: ElementRange, states: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy new states to where they live; where that is narrower, rounded by chance."""
        if self.recipe.states != "bf16":
            for home, new in states.values():
                if home is not new:
                    home.copy_(new)
            return
        each, recipe = self.owned[span.place], self.recipe
        for first in range(0, span.size, AT_ONCE):
            part = slice(first, min(first + AT_ONCE, span.size))
            start, size = each.start + span.start + first, part.stop - first
            bits = bits_for(recipe.seed, self.count, each.row, start, size, self.device)
            for home, new in states.values():
                home[part].copy_(rounded(new[part], bits))
                bits >>= 16  # the second state has the other half of the bits

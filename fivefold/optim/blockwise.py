"""Updates block by block, for states that are offloaded or stored in bfloat16, and for gradients
that are.

States are in a store: in memory on another device or of another dtype, or in a file. One block at a
time is copied to the device, updated there, and copied back.

States in bfloat16 are rounded stochastically (`optim/rounding.py`). Where AdamW has a kernel of our
own, that reads states and gradients as they are stored and rounds the states, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core.layout import decays
from fivefold.core.plan import ROUNDED_AT_ONCE, Recipe
from fivefold.optim.optimizer import (
    ADAM_BETAS,
    ADAM_EPS,
    MASTER,
    OwnedWeight,
    StateInMemory,
    StoredState,
    gradient_for,
    has_kernel,
    leave_scaling,
    make_optimizer,
    require_planned_states,
    scale_gradients,
    with_states,
)
from fivefold.optim.rounding import FullWeight, RoundingKey, round_stochastically, rounding_bits

# Tensors are cut at multiples of so many elements. A vector kernel computes the last elements of a
# tensor, which fill no vector, separately and may round them differently, so that the same elements
# must be the last ones in every cut.
LINE = 4096


@dataclass(frozen=True)
class ElementRange:
    """Elements [start, stop) of the owned tensor with this index."""

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Block = tuple[ElementRange, ...]
BlockStates = Mapping[str, Sequence[Tensor]]
"""By the name of a state, one flat tensor for every range of a block."""


class Store(Protocol):
    """Storage of optimizer states between updates."""

    def walk(self) -> Iterator[tuple[Block, BlockStates]]:
        """Iterate over all blocks with their states; changes of the tensors are stored."""

    def states(self, key: str) -> list[StoredState | None]:
        """States of one name, one for every owned tensor."""

    def tensors(self) -> list[Tensor]:
        """All tensors in memory."""


def blocks_of(sizes: Sequence[int], most: int) -> list[Block]:
    """Split the elements of tensors of these sizes, in order, into blocks of limited size."""
    most = max(LINE, most // LINE * LINE)
    blocks: list[list[ElementRange]] = []
    space = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            left = size - start
            taken = left if left <= space else space // LINE * LINE
            if not taken:
                blocks.append([])
                space = most
                continue
            blocks[-1].append(ElementRange(index, start, start + taken))
            start, space = start + taken, space - taken
    return [tuple(block) for block in blocks]


class MemoryStore:
    """Optimizer states in memory, on the device or the host."""

    def __init__(
        self,
        sizes: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        pinned: bool,
        block_bytes: int,
    ) -> None:
        """A device copies to and from `pinned` memory asynchronously."""
        self.by_name = {
            key: [
                torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned) for size in sizes
            ]
            for key, dtype in dtypes.items()
        }
        per_element = sum(dtype.itemsize for dtype in dtypes.values())
        self.blocks = blocks_of(sizes, block_bytes // per_element)

    def walk(self) -> Iterator[tuple[Block, BlockStates]]:
        for block in self.blocks:
            states = {
                key: [tensors[part.index][part.start : part.stop] for part in block]
                for key, tensors in self.by_name.items()
            }
            yield block, states

    def states(self, key: str) -> list[StoredState | None]:
        return [StateInMemory(tensor) for tensor in self.by_name[key]]

    def tensors(self) -> list[Tensor]:
        return [tensor for tensors in self.by_name.values() for tensor in tensors]


def state_dtypes(recipe: Recipe, values: torch.dtype, master: bool) -> dict[str, torch.dtype]:
    """Storage dtype of each state by name, for values of this dtype."""
    states = torch.bfloat16 if recipe.states == "bf16" else values
    names = recipe.optimizer_kind.states
    return dict.fromkeys(names, states) | ({MASTER: values} if master else {})


class BlockwiseUpdater:
    """Loads states from a store, updates them and writes them back, block by block."""

    def __init__(
        self,
        recipe: Recipe,
        owned: Sequence[OwnedWeight],
        store: Store,
        device: torch.device,
        master: bool,
        full: Mapping[str, FullWeight] | None = None,
    ) -> None:
        """`full` has every owned weight by name; without it, the rank owns full ones."""
        self.full: Mapping[str, FullWeight] = full or {}
        self.recipe, self.name, self.kind = recipe, recipe.optimizer, recipe.optimizer_kind
        self.owned, self.store, self.device, self.master = owned, store, device, master
        self.lr, self.count = recipe.lr, 0
        self.counts = torch.zeros(len(owned) if self.kind.counts_steps else 0)
        wide = torch.float32 if master or not owned else owned[0].tensor.dtype
        self.scales = leave_scaling(self.name, owned, wide)
        self.skips = self.kernel = has_kernel(self.scales, device)
        if master:
            for block, states in store.walk():
                for weight, copy in zip(self._weights(block), states[MASTER], strict=True):
                    copy.copy_(weight)

    def step(self) -> None:
        self.counts.fill_(self.count)
        self.count += 1
        for block, states in self.store.walk():
            self._update(block, states)

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def resume_after(self, count: int) -> None:
        self.count = count

    def states(self) -> dict[str, list[StoredState | None]]:
        keys = [*self.kind.states, *([MASTER] if self.master else [])]
        return {key: self.store.states(key) for key in keys}

    def tensors(self) -> list[Tensor]:
        return [*self.store.tensors(), self.counts]

    def _weights(self, block: Block) -> list[Tensor]:
        return [
            self.owned[part.index].tensor.detach().view(-1)[part.start : part.stop]
            for part in block
        ]

    def _update(self, block: Block, stored: BlockStates) -> None:
        if self.kernel:
            self._run_kernel(block, stored)
            return
        weights, owned = self._weights(block), [self.owned[part.index] for part in block]
        sources = stored[MASTER] if self.master else weights
        values = [source.to(self.device, non_blocking=True) for source in sources]
        states = {
            key: [
                state.to(self.device, value.dtype, non_blocking=True)
                for state, value in zip(stored[key], values, strict=True)
            ]
            for key in self.kind.states
        }
        grads = [
            gradient_for(value, own_weight, part.start)
            for own_weight, part, value in zip(owned, block, values, strict=True)
        ]
        self._run_torch(block, values, grads, states)
        for i, part in enumerate(block):
            for home in {id(tensor): tensor for tensor in (sources[i], weights[i])}.values():
                if home is not values[i]:
                    home.copy_(values[i])
            self._write_back(part, {key: (stored[key][i], states[key][i]) for key in states})

    def _run_torch(
        self, block: Block, values: list[Tensor], grads: list[Tensor], states: BlockStates
    ) -> None:
        owned = [self.owned[part.index] for part in block]
        pairs = [
            (decays(own_weight.row.role), value)
            for own_weight, value in zip(owned, values, strict=True)
        ]
        plain = make_optimizer(self.name, pairs, self.lr, self.recipe.weight_decay, ADAM_EPS)
        optimizer = with_states(plain, self.name, values, states, self._counts(block))
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        if self.scales:
            scale_gradients(optimizer, owned)
        optimizer.step()
        if self.count == 1:
            require_planned_states(optimizer, self.kind, values)

    def _run_kernel(self, block: Block, stored: BlockStates) -> None:
        """By our own kernel: what is not on the device is copied there and back as it is."""
        from fivefold.optim.adamw_kernel import AdamwKernel  # Triton is there only with CUDA

        numbers = (self.lr, self.count, ADAM_BETAS, ADAM_EPS)
        kernel = AdamwKernel(self.owned[block[0].index].factor, self.device, *numbers)
        for i, (part, weight) in enumerate(zip(block, self._weights(block), strict=True)):
            own_weight = self.owned[part.index]
            homes = [stored[MASTER][i] if self.master else weight]
            homes += [stored[key][i] for key in self.kind.states]
            grad = own_weight.grad.reshape(-1)[part.start : part.stop]
            copies = [tensor.to(self.device, non_blocking=True) for tensor in homes]
            narrow = weight if self.master and weight.device == self.device else None
            kernel.update(
                copies[0],
                grad.to(self.device, non_blocking=True),
                copies[1:],
                self.recipe.weight_decay if decays(own_weight.row.role) else 0.0,
                narrow,
                self._rounding(part),
            )
            for home, new in zip(homes, copies, strict=True):
                if home is not new:
                    home.copy_(new)
            if self.master and narrow is None:
                weight.copy_(copies[0])

    def _rounding(self, part: ElementRange) -> RoundingKey | None:
        """How states are rounded to bfloat16, if they are."""
        if self.recipe.states != "bf16":
            return None
        own_weight = self.owned[part.index]
        start, full = own_weight.start + part.start, self.full.get(own_weight.row.name)
        return RoundingKey.of(self.recipe.seed, self.count, own_weight.row, start, full)

    def _counts(self, block: Block) -> Tensor:
        """The step counts of a block's tensors, which torch will increase."""
        if not self.kind.counts_steps:
            return self.counts
        return self.counts[[part.index for part in block]].to(self.device)

    def _write_back(self, part: ElementRange, states: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy new states to where they are stored; to bfloat16 with stochastic rounding."""
        if self.recipe.states != "bf16":
            for home, new in states.values():
                if home is not new:
                    home.copy_(new)
            return
        own_weight, recipe = self.owned[part.index], self.recipe
        for first in range(0, part.size, ROUNDED_AT_ONCE):
            window = slice(first, min(first + ROUNDED_AT_ONCE, part.size))
            start, size = own_weight.start + part.start + first, window.stop - first
            full = self.full.get(own_weight.row.name)
            bits = rounding_bits(
                recipe.seed, self.count, own_weight.row, start, size, self.device, full
            )
            for home, new in states.values():
                home[window].copy_(round_stochastically(new[window], bits))
                bits >>= 16  # the second state takes the other half of the bits

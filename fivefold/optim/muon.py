"""Muon: the update of a matrix is its momentum, made orthogonal.

Nesterov momentum 0.95, then five Newton-Schulz steps towards the nearest orthogonal matrix. The
update of an m by n matrix is scaled by 0.2 · sqrt(max(m, n)). That gives it the root mean square of
a usual AdamW update, so that one learning rate and one weight decay serve both (Moonlight,
arXiv:2502.16982). The matrices of hidden layers are updated this way, each expert by itself;
embeddings, head, norms and biases are updated by AdamW.

Only full matrices can be made orthogonal. `FullMatrices` gathers them from shards, and takes the
shard of a rank from a full matrix (`parallel/units/matrix_gather.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core.plan import Recipe
from fivefold.cost.traffic import is_muon_weight
from fivefold.optim.optimizer import (
    MASTER,
    DeviceUpdater,
    OwnedWeight,
    StateInMemory,
    StoredState,
    gradient_for,
)

MOMENTUM = 0.95
NUM_STEPS = 5
# Of the quintic a·x + b·x³ + c·x⁵, by Keller Jordan (kellerjordan.github.io/posts/muon, 2024): the
# steepest at zero that still keeps singular values near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALE = 0.2


class FullMatrices(Protocol):
    """Gathers full matrices from shards, and shards full matrices."""

    def gather(self, shards: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Iterate over full matrices, a few at a time, by their index among the owned weights."""

    def local_shard(self, index: int, matrix: Tensor) -> Tensor:
        """This rank's shard of a full matrix, in its shape."""


class LocalMatrices:
    """Matrices of a single process, which owns full ones."""

    def gather(self, shards: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield from shards.items()

    def local_shard(self, index: int, matrix: Tensor) -> Tensor:
        return matrix


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthogonalize by Newton-Schulz iterations, each of stacked matrices by itself."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller Gram matrix
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size = wide.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    x = (wide / size.clamp(min=1e-7)).to(matrices.dtype)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon for the matrices of hidden layers, AdamW for the other weights, all on the device."""

    skips = False

    def __init__(
        self, recipe: Recipe, owned: Sequence[OwnedWeight], matrices: FullMatrices, master: bool
    ) -> None:
        self.owned, self.matrices = owned, matrices
        self.lr, self.weight_decay = recipe.lr, recipe.weight_decay
        hidden = [index for index, weight in enumerate(owned) if is_muon_weight(weight.row)]
        self.on_adamw = [
            index for index, weight in enumerate(owned) if not is_muon_weight(weight.row)
        ]
        adamw_weights = [owned[index] for index in self.on_adamw]
        self.adamw = DeviceUpdater("adamw", adamw_weights, recipe.lr, recipe.weight_decay, master)
        weights = {index: owned[index].tensor.detach() for index in hidden}
        self.masters = (
            {index: weight.float() for index, weight in weights.items()} if master else {}
        )
        self.values = self.masters or weights
        self.momenta = {index: torch.zeros_like(value) for index, value in self.values.items()}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        self.count += 1
        updates: dict[int, Tensor] = {}
        for index, momentum in self.momenta.items():
            own_weight = self.owned[index]
            gradient = gradient_for(momentum, own_weight)
            momentum.mul_(MOMENTUM).add_(gradient)
            # Updates are gathered and multiplied in the dtype of the weight.
            updates[index] = gradient.add(momentum, alpha=MOMENTUM).to(own_weight.tensor.dtype)
        for index, matrix in self.matrices.gather(updates):
            self._update(index, matrix)

    def _update(self, index: int, matrix: Tensor) -> None:
        rows, columns = matrix.shape[-2:]
        scale = self.lr * SCALE * math.sqrt(max(rows, columns))
        value = self.values[index].mul_(1 - self.lr * self.weight_decay)
        shard = self.matrices.local_shard(index, orthogonalize(matrix))
        value.add_(shard.to(value.dtype), alpha=-scale)
        if self.masters:
            self.owned[index].tensor.detach().copy_(value)

    def set_lr(self, lr: float) -> None:
        self.lr = lr
        self.adamw.set_lr(lr)

    def resume_after(self, count: int) -> None:
        self.count = count
        self.adamw.resume_after(count)

    def states(self) -> dict[str, list[StoredState | None]]:
        stored_states: dict[str, list[StoredState | None]] = {}
        for key, states in self.adamw.states().items():
            by_index = dict(zip(self.on_adamw, states, strict=True))
            stored_states[key] = [by_index.get(index) for index in range(len(self.owned))]
        for key, tensors in (("momentum", self.momenta), (MASTER, self.masters)):
            of_key = stored_states.setdefault(key, [None] * len(self.owned))
            for index, tensor in tensors.items():
                of_key[index] = StateInMemory(tensor)
        return (
            stored_states
            if self.masters
            else {key: stored_states[key] for key in stored_states if key != MASTER}
        )

    def tensors(self) -> list[Tensor]:
        return [*self.adamw.tensors(), *self.momenta.values(), *self.masters.values()]

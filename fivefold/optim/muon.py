"""Muon: the momentum of a matrix, made orthogonal, is its update.

Momentum 0.95 with Nesterov's look ahead, then five Newton-Schulz steps towards the orthogonal
matrix nearest to it. An update of an m by n matrix is scaled by 0.2 · sqrt(max(m, n)), which gives
it the root mean square of a usual AdamW update, so that one learning rate and one weight decay
serve both (Moonlight, arXiv:2502.16982). The matrices of hidden layers are updated this way, each
expert by itself; embeddings, head, norms and biases are left to AdamW.

Only whole matrices can be made orthogonal. Whoever has cut them says how a part becomes whole and
which part of a whole is ours: `Matrices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core.recipe import Recipe
from fivefold.cost.collectives import takes
from fivefold.optim.optimizer import MASTER, InMemory, Kept, OwnedWeight, Resident

MOMENTUM = 0.95
NUM_STEPS = 5
# Of the quintic a·x + b·x³ + c·x⁵, by Keller Jordan (kellerjordan.github.io/posts/muon, 2024): the
# steepest at zero that still keeps singular values near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALE = 0.2


class Matrices(Protocol):
    """Makes parts of matrices whole, and whole ones parts."""

    def whole(self, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Whole matrices, a few at a time, from this rank's parts by their place in the list of
        what it owns."""
        ...

    def mine(self, place: int, matrix: Tensor) -> Tensor:
        """Of a whole matrix the part that this rank owns, shaped like it."""
        ...


class Uncut:
    """The matrices of one process that owns them whole."""

    def whole(self, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield from parts.items()

    def mine(self, place: int, matrix: Tensor) -> Tensor:
        return matrix


def orthogonal(matrices: Tensor) -> Tensor:
    """Singular values brought near 1; of stacked matrices each by itself."""
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
    """Muon for the matrices of hidden layers, AdamW for the rest, all on the device."""

    def __init__(
        self, recipe: Recipe, owned: Sequence[OwnedWeight], matrices: Matrices, master: bool
    ) -> None:
        self.owned, self.matrices = owned, matrices
        self.lr, self.weight_decay = recipe.lr, recipe.weight_decay
        self.places = [place for place, each in enumerate(owned) if takes(each.row)]
        self.others = [place for place, each in enumerate(owned) if not takes(each.row)]
        rest = [owned[place] for place in self.others]
        self.rest = Resident("adamw", rest, recipe.lr, recipe.weight_decay, master)
        taken = {place: owned[place].tensor.detach() for place in self.places}
        self.masters = {place: one.float() for place, one in taken.items()} if master else {}
        self.values = self.masters or taken
        self.momenta = {place: torch.zeros_like(one) for place, one in self.values.items()}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.rest.count = self.count
        self.rest.step()
        self.count += 1
        updates: dict[int, Tensor] = {}
        for place, momentum in self.momenta.items():
            each = self.owned[place]
            momentum.mul_(MOMENTUM).add_(each.grad)
            # In the type of the weight: that is what is gathered, and multiplied.
            updates[place] = each.grad.add(momentum, alpha=MOMENTUM).to(each.tensor.dtype)
        for place, matrix in self.matrices.whole(updates):
            self._update(place, matrix)

    def _update(self, place: int, matrix: Tensor) -> None:
        rows, columns = matrix.shape[-2:]
        scale = self.lr * SCALE * math.sqrt(max(rows, columns))
        value = self.values[place].mul_(1 - self.lr * self.weight_decay)
        part = self.matrices.mine(place, orthogonal(matrix))
        value.add_(part.to(value.dtype), alpha=-scale)
        if self.masters:
            self.owned[place].tensor.detach().copy_(value)

    def set_lr(self, lr: float) -> None:
        self.lr = lr
        self.rest.set_lr(lr)

    def states(self) -> dict[str, list[Kept | None]]:
        found: dict[str, list[Kept | None]] = {}
        for key, kept in self.rest.states().items():
            by_place = dict(zip(self.others, kept, strict=True))
            found[key] = [by_place.get(place) for place in range(len(self.owned))]
        for key, held in (("momentum", self.momenta), (MASTER, self.masters)):
            room = found.setdefault(key, [None] * len(self.owned))
            for place, tensor in held.items():
                room[place] = InMemory(tensor)
        return found if self.masters else {key: found[key] for key in found if key != MASTER}

    def tensors(self) -> list[Tensor]:
        return [*self.rest.tensors(), *self.momenta.values(), *self.masters.values()]

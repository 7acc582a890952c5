"""The two ends of the model: the embedding in front, the head with its loss behind.

`Embedding.lookup`, `Embedding.place`, `Head.product` and `Head.cross_entropy` are replaceable, so
that a split vocabulary, a split sequence or a split backward can bring its own arithmetic.

Legend: B rows, S tokens, N = B·S, D model width, V vocabulary, P learned positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.model.layers import Product, linear_product

Lookup = Callable[[Tensor, Tensor], Tensor]
Place = Callable[[Tensor, Tensor, Tensor], Tensor]
CrossEntropy = Callable[[Tensor, Tensor], Tensor]


def embedding_lookup(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """The row of each token."""
    return F.embedding(tokens_BS, weight_VD)


def add_positions(x_BSD: Tensor, positions_BS: Tensor, weight_PD: Tensor) -> Tensor:
    """Add the row of each token's position."""
    return x_BSD + F.embedding(positions_BS, weight_PD)


def summed_cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The sum (never a mean) of the token losses, in float32 or wider."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), labels_N, reduction="sum", ignore_index=NOT_COUNTED)


class Embedding(nn.Module):
    """Tokens to vectors, with learned positions where there are any."""

    def __init__(self, weight_VD: nn.Parameter, positions_PD: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.positions = weight_VD, positions_PD
        self.lookup: Lookup = embedding_lookup
        self.place: Place = add_positions

    def forward(self, tokens_BS: Tensor, batch: TokenBatch) -> Tensor:
        x_BSD = self.lookup(tokens_BS, self.weight)
        if self.positions is None:
            return x_BSD
        return self.place(x_BSD, batch.positions, self.positions)


class Head(nn.Module):
    """Vectors and labels to the summed loss. A tied head is given the embedding's own weight."""

    def __init__(self, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VD
        self.product: Product = linear_product
        self.cross_entropy: CrossEntropy = summed_cross_entropy

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits_NV = self.product(x_BSD.flatten(0, 1), self.weight, None)
        return self.cross_entropy(logits_NV, labels_BS.flatten())

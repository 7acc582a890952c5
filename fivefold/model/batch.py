"""What enters the model: a batch of tokens, and the context that its blocks share.

Legend: B rows, S tokens of a row, R half of a head's width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NOT_COUNTED = -100  # the label of a token that has no loss


@dataclass(frozen=True)
class TokenBatch:
    """Token ids and what each of them should predict. Labels are already shifted."""

    tokens: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64, NOT_COUNTED where there is no loss
    positions: Tensor  # (B, S) int64, place of a token in its document
    documents: Tensor | None = None  # (B, S) int64; None: each row is one document
    row: TokenBatch | None = None  # the whole rows, where this is a part of them
    # For each depth of multi-token prediction: the tokens so far ahead, and what they predict.
    ahead: tuple[tuple[Tensor, Tensor], ...] = ()

    def to(self, device: torch.device) -> TokenBatch:
        """Whole rows on a device."""
        tensors = (self.tokens, self.labels, self.positions, self.documents)
        return TokenBatch(*(None if each is None else each.to(device) for each in tensors))


def look_ahead(batch: TokenBatch, depth: int) -> TokenBatch:
    """Whole rows with what multi-token prediction needs: at depth j, from 1, the token j places
    behind each and the label of that token.

    Never beyond a row, nor into another document: there the label is not counted.
    """
    return replace(batch, ahead=tuple(_shifted(batch, j) for j in range(1, depth + 1)))


def _shifted(batch: TokenBatch, places: int) -> tuple[Tensor, Tensor]:
    seq = batch.tokens.shape[1]
    kept = max(seq - places, 0)
    tokens, labels = torch.zeros_like(batch.tokens), torch.full_like(batch.labels, NOT_COUNTED)
    tokens[:, :kept], labels[:, :kept] = (
        batch.tokens[:, seq - kept :],
        batch.labels[:, seq - kept :],
    )
    if batch.documents is not None:
        documents = batch.documents
        leaves = documents[:, :kept] != documents[:, seq - kept :]
        tokens[:, :kept].masked_fill_(leaves, 0)
        labels[:, :kept].masked_fill_(leaves, NOT_COUNTED)
    return tokens, labels


@dataclass(frozen=True)
class AttentionInfo:
    """What an attention kernel may need besides queries, keys and values."""

    positions: Tensor  # (B, S)
    documents: Tensor | None  # (B, S)
    window: int | None  # keys a query sees, itself included
    mask: Tensor | None  # (B, 1, S, S), True where a query sees a key; None: causal, all of it
    dropout: float = 0.0
    row: TokenBatch | None = None  # the whole rows, where the tokens are a part of them
    # What a kernel keeps for a second forward in the backward, by kernel.
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What every block of one forward pass shares, computed once."""

    attention: AttentionInfo
    rotary: tuple[Tensor, Tensor] | None  # cos and sin, (B, S, 1, R) each

    @property
    def dropout(self) -> float:
        """The share of activations that a block drops; 0 outside of training."""
        return self.attention.dropout

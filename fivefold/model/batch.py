"""The inputs of the model: a batch of tokens, and the context that all blocks share.

Legend: B rows, S tokens of a row, R half of a head's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core.model import Shape
from fivefold.model.documents import Documents
from fivefold.model.dropout import PairDropout, SiteKeys
from fivefold.model.kept_attention import KeptCalls

NOT_COUNTED = -100  # the label of a token without loss


@dataclass(frozen=True)
class TokenBatch:
    """Token ids and labels. Labels are already shifted: each is the token to predict next."""

    tokens: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64, NOT_COUNTED where there is none
    positions: Tensor  # (B, S) int64, index of a token in its document
    documents: Documents | None = None  # of the full rows; None: each row is one document
    row: TokenBatch | None = None  # the full rows, where this is a shard of them
    # For each depth of multi-token prediction: the tokens that far ahead, and their labels.
    ahead: tuple[tuple[Tensor, Tensor], ...] = ()
    keys: Tensor | None = None  # (B, S) int64, of `token_keys`; None: nothing is dropped
    # (B, S, L, K) int64, the experts of each token in the L layers that have some, as they were
    # recorded; −1 where the router chooses itself. None: it does so everywhere.
    replayed: Tensor | None = None
    # (B, S) int64, 1 in texts of more tokens than `Shape.outgrown_at`; None: of no such model, or
    # documents and rows are the texts, as they are here.
    outgrown: Tensor | None = None


def mark_outgrown(batch: TokenBatch, shape: Shape) -> TokenBatch:
    """Full rows, before any padding, with the texts marked that are rotated otherwise."""
    if shape.outgrown_at is None or batch.outgrown is not None:
        return batch
    assert batch.row is None, "mark full rows: a shard does not know their lengths"
    if batch.documents is not None:
        outgrown = batch.documents.longer_than(shape.outgrown_at, batch.tokens.device)
    else:
        outgrown = torch.full_like(batch.tokens, batch.tokens.shape[1] > shape.outgrown_at)
    return replace(batch, outgrown=outgrown)


def look_ahead(batch: TokenBatch, depth: int) -> TokenBatch:
    """Full rows with the inputs of multi-token prediction: at depth j, from 1, the token j
    positions after each token, and the label of that token.

    Beyond the end of a row or document there is no such token, and the label is not counted.
    """
    return replace(batch, ahead=tuple(_shifted(batch, j) for j in range(1, depth + 1)))


def _shifted(batch: TokenBatch, distance: int) -> tuple[Tensor, Tensor]:
    seq = batch.tokens.shape[1]
    left = max(seq - distance, 0)
    tokens, labels = torch.zeros_like(batch.tokens), torch.full_like(batch.labels, NOT_COUNTED)
    tokens[:, :left] = batch.tokens[:, seq - left :]
    labels[:, :left] = batch.labels[:, seq - left :]
    if batch.documents is not None:
        documents = batch.documents.numbers(batch.tokens.device)
        crosses = documents[:, :left] != documents[:, seq - left :]
        tokens[:, :left].masked_fill_(crosses, 0)
        labels[:, :left].masked_fill_(crosses, NOT_COUNTED)
    return tokens, labels


@dataclass(frozen=True)
class AttentionInfo:
    """What an attention kernel may need in addition to queries, keys and values."""

    positions: Tensor  # (B, S)
    documents: Documents | None  # of the full rows; None: a query sees all tokens before it
    window: int | None  # keys that a query sees, its own included; None: all
    dropout: PairDropout | None = None
    row: TokenBatch | None = None  # the full rows, where the tokens are a shard of them
    cap: float | None = None  # of scores
    chunk: int | None = None  # tokens of a chunked window, by which `documents` are cut already
    sinks: Tensor | None = None  # (H,), of the heads of one layer
    kept_calls: KeptCalls | None = None  # where a segment runs again, but not its attention

    def sinks_of(self, coord: int, ranks: int) -> Tensor | None:
        """Those of the heads of one of so many ranks."""
        return None if self.sinks is None else self.sinks.chunk(ranks)[coord]

    def at(self, site: int, first_head: int) -> AttentionInfo:
        """The same for one layer, and for the query heads from `first_head` on."""
        if self.dropout is None:
            return self
        return replace(self, dropout=replace(self.dropout, site=site, first_head=first_head))


def seen_documents(
    batch: TokenBatch, window: int | None, chunked: bool = False
) -> Documents | None:
    """The documents that limit what queries see, or whole rows where only a window does. A window
    of the kind `chunked` cuts each document into several.

    None where neither does: plain causal attention has faster kernels.
    """
    rows, seq = (batch if batch.row is None else batch.row).positions.shape
    if window is not None and window < seq:
        documents = batch.documents or Documents([[0]] * rows, seq)
        return documents.chunked(window) if chunked else documents
    return None if batch.documents is None or batch.documents.one_a_row else batch.documents


@dataclass(frozen=True)
class Context:
    """What every block of one forward pass shares, computed once."""

    attention: AttentionInfo
    rotary: tuple[Tensor, Tensor] | None  # cos and sin, (B, S, 1, R) each
    sites: SiteKeys | None = None  # for dropout between modules
    replayed: Tensor | None = None  # of the tokens of the residual stream
    temperature: Tensor | None = None  # (B, S, 1, 1), of queries without positions
    beyond: Context | None = None  # of layers without a window, where others have one

    def of_layer(self, is_global: bool) -> Context:
        """For a layer with a window, or for one without."""
        return self.beyond if is_global and self.beyond is not None else self

    def keeping(self) -> Context:
        """The same, with a place for what the attention of one segment makes."""
        calls: KeptCalls = {}

        def with_place(context: Context) -> Context:
            beyond = None if context.beyond is None else with_place(context.beyond)
            return replace(
                context, attention=replace(context.attention, kept_calls=calls), beyond=beyond
            )

        return with_place(self)

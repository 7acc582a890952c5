"""Token batches for `verify`: a pure function of seed and step, the same for every layout's ranks.

Rows are ragged (a random tail of each has no loss) and some tokens inside have none either, so
that ranks and microbatches count different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.batch import Batch
from fivefold.model.batch import NOT_COUNTED, TokenBatch

_MASKED = 0.1  # share of tokens inside a row that have no loss


@dataclass(frozen=True)
class Samples:
    """One step's tokens and labels, (microbatches, dp, microbatch size, seq) each."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None

    def of(self, dp_coord: int) -> list[TokenBatch]:
        """The microbatches of one data rank."""
        return [self._batch((number, dp_coord)) for number in range(len(self.tokens))]

    def microbatches(self) -> list[TokenBatch]:
        """Each microbatch with the rows of all data ranks."""
        return [self._batch((number, slice(None))) for number in range(len(self.tokens))]

    def whole(self) -> TokenBatch:
        """All rows of the step at once."""
        return self._batch((slice(None), slice(None)))

    def _batch(self, where: tuple[int | slice, int | slice]) -> TokenBatch:
        tensors = (self.tokens, self.labels, self.positions, self.documents)
        rows = [None if each is None else each[where] for each in tensors]
        tokens, labels, positions, documents = (
            None if each is None else each.reshape(-1, each.shape[-1]) for each in rows
        )
        assert tokens is not None and labels is not None and positions is not None
        return TokenBatch(tokens, labels, positions, documents)


def samples(
    batch: Batch,
    vocab: int,
    seed: int,
    step: int,
    *,
    packed: bool = False,
    empty_rank: int | None = None,
) -> Samples:
    """Draw a step; `packed` puts two documents in a row.

    `empty_rank` is a data rank that gets no token with a loss in it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rows, seq = (batch.microbatches, batch.dp, batch.microbatch_size), batch.seq
    drawn = torch.randint(vocab, (*rows, seq + 1), generator=generator)
    ends = torch.randint(seq // 2, seq + 1, (*rows, 1), generator=generator)
    masked = torch.rand(*rows, seq, generator=generator) < _MASKED
    places = torch.arange(seq).expand(*rows, seq)
    masked |= places >= ends
    if empty_rank is not None:
        masked[:, empty_rank] = True
    documents, positions = None, places
    if packed:
        cuts = torch.randint(1, max(2, seq), (*rows, 1), generator=generator)
        documents = (places >= cuts).long()
        positions = places - documents * cuts
        masked |= places == cuts - 1  # the last token of a document has nothing to predict
    labels = drawn[..., 1:].masked_fill(masked, NOT_COUNTED)
    return Samples(drawn[..., :-1].contiguous(), labels, positions, documents)

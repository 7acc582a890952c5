"""The samples of one step as microbatches of data ranks, and random samples for `verify`.

Random samples are a pure function of seed and step, the same on every layout. Their rows are ragged
(a random tail of each has no loss) and some other tokens have no loss either, so that ranks and
microbatches count different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core.layout import Batch
from fivefold.model import NOT_COUNTED, Documents, TokenBatch, token_keys

_MASKED = 0.1  # fraction of tokens without loss, before the tail of a row
_MOST_CUTS = 4


@dataclass(frozen=True)
class Samples:
    """Tokens and labels of one step, (microbatches, dp, microbatch size, seq) each."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None  # on the host always: kernels need lengths of documents there
    keys: Tensor | None = None  # of `token_keys`, where activations are dropped

    def of(self, dp_coord: int) -> list[TokenBatch]:
        """Microbatches of one data rank."""
        return [self._batch((number, dp_coord)) for number in range(len(self.tokens))]

    def microbatches(self) -> list[TokenBatch]:
        """Microbatches, each with the rows of all data ranks."""
        return [self._batch((number, slice(None))) for number in range(len(self.tokens))]

    def as_batch(self) -> TokenBatch:
        """All rows of the step in one batch."""
        return self._batch((slice(None), slice(None)))

    def to(self, device: torch.device) -> Samples:
        """Copy to a device; samples are always drawn on the CPU."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Samples:
        """Apply a function to every tensor on the device."""
        keys = None if self.keys is None else change(self.keys)
        tokens, labels, positions = map(change, (self.tokens, self.labels, self.positions))
        return Samples(tokens, labels, positions, self.documents, keys)

    def drawing(self, seed: int, numbers: Tensor) -> Samples:
        """Add keys for dropout; `numbers` are those of the samples, in order."""
        rows, seq = self.tokens.shape[:-1], self.tokens.shape[-1]
        return replace(self, keys=token_keys(seed, numbers.reshape(rows), seq))

    def _batch(self, where: tuple[int | slice, int | slice]) -> TokenBatch:
        tensors = (self.tokens, self.labels, self.positions, self.documents, self.keys)
        tokens, labels, positions, documents, keys = (
            None if tensor is None else tensor[where].reshape(-1, tensor.shape[-1])
            for tensor in tensors
        )
        assert tokens is not None and labels is not None and positions is not None
        packed = None if documents is None else Documents.of(documents)
        return TokenBatch(tokens, labels, positions, packed, keys=keys)


def samples(
    batch: Batch,
    vocab: int,
    seed: int,
    step: int,
    *,
    packed: bool = False,
    empty_rank: int | None = None,
    drops: bool = False,
) -> Samples:
    """Random samples of one step; `packed` puts up to five documents of random lengths into a row.

    The tokens of the data rank `empty_rank` have no loss. `drops`: they have keys for dropout.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rows, seq = (batch.microbatches, batch.dp, batch.microbatch_size), batch.seq
    drawn = torch.randint(vocab, (*rows, seq + 1), generator=generator)
    ends = torch.randint(seq // 2, seq + 1, (*rows, 1), generator=generator)
    masked = torch.rand(*rows, seq, generator=generator) < _MASKED
    masked |= torch.arange(seq) >= ends
    if empty_rank is not None:
        masked[:, empty_rank] = True
    begins = _begins(rows, seq, generator) if packed else None
    step_samples = samples_from_rows(batch, drawn, begins, masked)
    if not drops:
        return step_samples
    return step_samples.drawing(seed, step * batch.sequences + torch.arange(batch.sequences))


def samples_from_rows(
    batch: Batch, drawn: Tensor, begins: Tensor | None = None, masked: Tensor | None = None
) -> Samples:
    """Samples of one step from rows of seq + 1 tokens, in the order of their numbers.

    `begins` marks the first tokens of documents; None: each row is one document. `masked` tokens
    have no loss.
    """
    rows, seq = (batch.microbatches, batch.dp, batch.microbatch_size), batch.seq
    places = torch.arange(seq).expand(*rows, seq)
    hidden = torch.zeros(*rows, seq, dtype=torch.bool) if masked is None else masked
    documents, positions = None, places
    if begins is not None:
        begins = begins.reshape(*rows, seq + 1)
        hidden = hidden | begins[..., 1:]  # the last token of a document has nothing to predict
        documents = begins[..., :-1].cumsum(dim=-1)
        positions = places - (places * begins[..., :-1]).cummax(dim=-1).values
    drawn = drawn.reshape(*rows, seq + 1)
    labels = drawn[..., 1:].masked_fill(hidden, NOT_COUNTED)
    return Samples(drawn[..., :-1].contiguous(), labels, positions, documents)


def _begins(rows: tuple[int, ...], seq: int, generator: torch.Generator) -> Tensor:
    """Whether a document begins at a token: at up to four tokens of a row, and after its last."""
    cuts = torch.randint(1, max(2, seq), (*rows, _MOST_CUTS), generator=generator)
    counts = torch.randint(_MOST_CUTS + 1, (*rows, 1), generator=generator)
    cuts = cuts.where(torch.arange(_MOST_CUTS) < counts, seq)
    begins = torch.zeros(*rows, seq + 1, dtype=torch.bool)
    begins[..., seq] = True
    return begins.scatter(-1, cuts, True)

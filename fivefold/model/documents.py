"""The documents of packed rows, and the queries and keys of one document in an attention call.

Where documents begin is known on the host, so that kernels get lengths without waiting for a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import AttentionCall, Ranges


class DocumentSpan(NamedTuple):
    """One document in an attention call: queries [q_start, q_stop), keys [k_start, k_stop)."""

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class DocumentPairs:
    """The documents of an attention call that have queries and keys in it.

    `lengths` are the queries and keys of each, one after another over all rows, as kernels for
    variable lengths want them: what has no counterpart is there with a length of 0 on the other
    side.
    """

    def __init__(self, spans: Sequence[DocumentSpan], q_row: int, k_row: int, rows: int) -> None:
        """`q_row` and `k_row` are the queries and keys of a row."""
        self.spans = tuple(spans)
        self.lengths = list(_covering(self.spans, q_row, k_row, rows))
        self.has_gaps = len(self.lengths) > len(self.spans)
        # A kernel for single queries takes it that every document has one.
        self.longest_q = max(2, *(queries for queries, _ in self.lengths))
        self.longest_k = max(2, *(keys for _, keys in self.lengths))
        self._ends: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the queries of each document end, and its keys: int32, after a 0."""
        if device not in self._ends:
            sides = zip(*self.lengths, strict=True)
            q_ends, k_ends = (list(accumulate(side, initial=0)) for side in sides)
            queries, keys = (
                torch.tensor(end_list, dtype=torch.int32) for end_list in (q_ends, k_ends)
            )
            self._ends[device] = _copied(queries, device), _copied(keys, device)
        return self._ends[device]


class Documents:
    """The documents of the rows of a batch."""

    def __init__(self, starts: Sequence[Sequence[int]], seq: int) -> None:
        """`starts`: the first token of each document, row by row; the first is 0."""
        self.starts = tuple(tuple(row_starts) for row_starts in starts)
        self.seq = seq
        self._pairs: dict[Hashable, DocumentPairs] = {}
        self._numbers: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, numbers_BS: Tensor) -> Documents:
        """Neighbours of one number, in a row of this tensor on the host, are one document."""
        starts: list[list[int]] = [[0] for _ in range(len(numbers_BS))]
        for row, before in numbers_BS.diff(dim=1).nonzero().tolist():
            starts[row].append(before + 1)
        return cls(starts, numbers_BS.shape[1])

    @property
    def one_a_row(self) -> bool:
        return all(len(row_starts) == 1 for row_starts in self.starts)

    def padded(self, missing: int) -> Documents:
        """The same with more tokens after each row, which are a document of their own."""
        return Documents(
            [(*row_starts, self.seq) for row_starts in self.starts], self.seq + missing
        )

    def chunked(self, size: int) -> Documents:
        """The same, cut into documents of at most so many tokens."""
        spans = [pairwise((*row_starts, self.seq)) for row_starts in self.starts]
        cut = [[at for first, end in row for at in range(first, end, size)] for row in spans]
        return Documents(cut, self.seq)

    def numbers(self, device: torch.device) -> Tensor:
        """(B, S) int64: the number of each token's document in its row."""
        if device not in self._numbers:
            begins = torch.zeros(len(self.starts), self.seq, dtype=torch.int64)
            for row, starts in enumerate(self.starts):
                begins[row, list(starts[1:])] = 1
            self._numbers[device] = _copied(begins.cumsum(dim=1), device)
        return self._numbers[device]

    def longer_than(self, tokens: int, device: torch.device) -> Tensor:
        """(B, S) int64: 1 for the tokens of documents of more than so many."""
        mask = torch.zeros(len(self.starts), self.seq, dtype=torch.int64)
        for row, starts in enumerate(self.starts):
            for start, stop in pairwise((*starts, self.seq)):
                mask[row, start:stop] = stop - start > tokens
        return _copied(mask, device)

    def pairs(self, queries: Ranges, keys: Ranges, call: AttentionCall) -> DocumentPairs:
        """Those of one call, which all layers share. Both sides are tokens of a row in order, so
        that a document is contiguous in each."""
        key = (queries, keys, call)
        if key not in self._pairs:
            spans = [span for row in range(len(self.starts)) for span in self._row(row, *key)]
            sizes = call.q_stop - call.q_start, call.k_stop - call.k_start
            self._pairs[key] = DocumentPairs(spans, *sizes, len(self.starts))
        return self._pairs[key]

    def _row(
        self, row: int, queries: Ranges, keys: Ranges, call: AttentionCall
    ) -> Iterator[DocumentSpan]:
        for start, stop in pairwise((*self.starts[row], self.seq)):
            q_start, q_stop = _held(queries, start, stop, call.q_start, call.q_stop)
            k_start, k_stop = _held(keys, start, stop, call.k_start, call.k_stop)
            if q_start < q_stop and k_start < k_stop:
                yield DocumentSpan(row, q_start, q_stop, k_start, k_stop)


def _held(ranges: Ranges, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """Where tokens [start, stop) of a row are among those with index [first, last) of `ranges`."""
    below = [
        sum(min(max(bound - token_range.start, 0), len(token_range)) for token_range in ranges)
        for bound in (start, stop)
    ]
    begin, end = (min(max(index, first), last) - first for index in below)
    return begin, end


def _covering(
    spans: Sequence[DocumentSpan], q_row: int, k_row: int, rows: int
) -> Iterator[tuple[int, int]]:
    """Numbers of queries and keys, in order, which sum to all of both."""
    q_done = k_done = 0
    last = DocumentSpan(rows, 0, 0, 0, 0)
    for span in (*spans, last):
        q_start, k_start = span.row * q_row + span.q_start, span.row * k_row + span.k_start
        if q_start > q_done:
            yield q_start - q_done, 0
        if k_start > k_done:
            yield 0, k_start - k_done
        if span is not last:
            yield span.q_stop - span.q_start, span.k_stop - span.k_start
        q_done = q_start + span.q_stop - span.q_start
        k_done = k_start + span.k_stop - span.k_start


def _copied(host: Tensor, device: torch.device) -> Tensor:
    """On a GPU from pinned memory, so that the host does not wait for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

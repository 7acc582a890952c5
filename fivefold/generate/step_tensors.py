"""A step as tensors: all its numbers reach the device in one copy, and block tables stay there.

Legend: T tokens of a step, S sequences (chunks), N tokens to be followed, R rows of block tables, B
blocks of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.core.model import BLOCK, blocks_of
from fivefold.generate.requests import DECODE_ROWS, SequenceChunk, StepBatch
from fivefold.model import NOT_COUNTED, TokenBatch

Numbers = np.ndarray[Any, np.dtype[Any]]
PART_KEYS = 128  # that a program of attention reads in decode
_LEAST_PARTS = 8  # of the keys of a sequence, in a decode step
_OF_A_TOKEN = 5  # numbers: itself, position, slot, whether its text is outgrown, adapter
_ROWS = 512  # of block tables, at first
_ZERO = np.zeros(1, dtype=np.int64)
_UNIT = 32  # blocks by which tables grow: prompts are read at padded lengths


class StepSize(NamedTuple):
    """Numbers of tokens, sequences and sampled tokens of a step."""

    tokens: int
    sequences: int
    sampled: int

    @property
    def parts(self) -> tuple[int, ...]:
        """The sizes of tokens, positions, slots, outgrown texts, adapters, starts, lengths, rows of
        tables and samples."""
        tokens, sequences, sampled = self
        return (tokens,) * _OF_A_TOKEN + (sequences + 1, sequences, sequences, sampled)

    @property
    def of_tokens(self) -> int:
        """Size of the parts with one number a token, which come first."""
        return _OF_A_TOKEN * self.tokens


class DecodeSize(NamedTuple):
    """Numbers of sequences, and of parts of their keys, of which decode steps have a few sizes."""

    sequences: int
    parts: int


def decode_size(step: StepBatch, unit: int, limit: int = DECODE_ROWS) -> DecodeSize | None:
    """The size at which all replicas whose steps run together decode; None if one of them does not,
    or has more sequences than the limit. Sequences are a multiple of the unit."""
    batches = (step, *step.beside)
    most = max(len(batch.chunks) for batch in batches)
    if not 0 < most <= limit or not all(batch.decodes for batch in batches):
        return None
    sequences = 1 << (most - 1).bit_length()
    sequences = -(-sequences // unit) * unit
    parts = max(  # a sequence to spare has one
        sum(-(-chunk.stop // PART_KEYS) - 1 for chunk in batch.chunks) for batch in batches
    )
    least = max(parts, (_LEAST_PARTS - 1) * sequences) + sequences
    return DecodeSize(sequences, 1 << (least - 1).bit_length())


def filled(step: StepBatch, sequences: int, padding: int) -> StepBatch:
    """The step with sequences to spare, which write to a block that nobody reads."""
    none = SequenceChunk("", (0,), 0, (padding,), samples=True, fills=True)
    return StepBatch((*step.chunks, *[none] * (sequences - len(step.chunks))))


class SequenceRows(NamedTuple):
    """Sequences of a step, on the device."""

    tables: Tensor  # (R, B)
    rows: Tensor  # (S,) the row of each sequence in `tables`
    starts: Tensor  # (S + 1,) the first token of each sequence, and the number of tokens
    lengths: Tensor  # (S,) keys that the last token of each sequence sees

    def first(self, count: int) -> SequenceRows:
        """The first sequences."""
        lengths = self.lengths[:count]
        return SequenceRows(self.tables, self.rows[:count], self.starts[: count + 1], lengths)


@dataclass(frozen=True)
class StepTensors:
    """Tensors of a step on its device."""

    batch: TokenBatch  # one row
    slots: Tensor  # (T,)
    adapters: Tensor  # (T,) the number of each token's adapter
    chunks: tuple[SequenceChunk, ...]  # none in a captured step
    sequences: SequenceRows
    sampled: Tensor  # (N,) indices of the tokens whose logits are wanted
    num_singles: int  # sequences of one token before the first with more
    most_parts: int  # of the keys of these sequences
    # What the attention of all layers shares, by what it depends on.
    work: dict[Any, Any] = field(init=False, default_factory=dict[Any, Any])

    @cached_property
    def tables_SB(self) -> Tensor:
        """Block tables in the order of the sequences, up to the longest of these."""
        longest = attended_length(max(chunk.stop for chunk in self.chunks))
        rows = self.sequences.rows[: len(self.chunks)]
        return self.sequences.tables[:, : blocks_of(longest)][rows].long()

    @cached_property
    def first_tokens(self) -> list[int]:
        """The first token of each sequence."""
        return [0, *accumulate(len(chunk.tokens) for chunk in self.chunks)][:-1]


@dataclass
class _TableRow:
    """What the device knows of a sequence, and the last step that it was in."""

    row: int
    blocks: tuple[int, ...] = ()
    turn: int = 0


class BlockTables:
    """Block tables of running sequences in fixed memory on the device. A step brings what has
    changed: a sequence in decode gets a block every 16 tokens.

    Row 0 is that of tokens of no sequence.
    """

    def __init__(self, device: torch.device, blocks: int, padding: int) -> None:
        """`blocks` that a sequence may have; more of them, or more sequences, move the tables."""
        self.device, self.padding = device, padding
        self._allocate(_ROWS, -(-blocks // _UNIT) * _UNIT)

    def _allocate(self, rows: int, columns: int) -> None:
        """Begin with empty tables of this size."""
        self.host = np.full((rows, columns), self.padding, dtype=np.int32)
        self.tensor = torch.full((rows, columns), self.padding, dtype=torch.int32).to(self.device)
        self._by_id, self._turn = dict[str, _TableRow](), 0
        self._free = list(range(rows - 1, 0, -1))

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many sequences, and blocks of each."""
        most_rows, most_columns = self.host.shape
        if rows >= most_rows or columns > most_columns:
            most_rows = most_rows if rows < most_rows else 2 * rows
            self._allocate(most_rows, max(most_columns, -(-columns // _UNIT) * _UNIT))

    def rows_of(self, chunks: Sequence[SequenceChunk]) -> list[int]:
        """The row of each sequence, after the device has been told what changed."""
        self.reserve(len(chunks), 0)
        self._turn += 1
        rows: list[int] = []
        entries: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            if chunk.fills:
                rows.append(0)
                continue
            known = self._by_id.get(chunk.id)
            if known is None or known.blocks != chunk.table:
                if len(chunk.table) > self.host.shape[1]:
                    self.reserve(0, len(chunk.table))
                    return self.rows_of(chunks)
                known = self._changed(chunk, known, entries, blocks)
            known.turn = self._turn
            rows.append(known.row)
        if entries:
            numbers = to_device(np.array([entries, blocks], dtype=np.int64), self.device)
            self.tensor.view(-1).index_copy_(0, numbers[0], numbers[1].int())
        return rows

    def _changed(
        self, chunk: SequenceChunk, known: _TableRow | None, entries: list[int], blocks: list[int]
    ) -> _TableRow:
        """Note the new blocks of a sequence; all of them if it lost those that it had."""
        if known is None:
            known = self._by_id[chunk.id] = _TableRow(self._free_row())
        table, first = chunk.table, len(known.blocks)
        first = first if table[:first] == known.blocks else 0
        self.host[known.row, first : len(table)] = table[first:]
        start = known.row * self.host.shape[1]
        entries += range(start + first, start + len(table))
        blocks += table[first:]
        known.blocks = table
        return known

    def _free_row(self) -> int:
        """A row that no sequence of this step has had so far."""
        if not self._free:
            idle = [id for id, known in self._by_id.items() if known.turn < self._turn]
            self._free = [self._by_id.pop(id).row for id in idle]
        return self._free.pop()


def to_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Copy numbers to a device, without waiting."""
    tensor = torch.as_tensor(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def attended_length(tokens: int) -> int:
    """Padded length at which a long prompt is attended to. Some kernels compile for every length,
    in a tenth of a second.

    >>> attended_length(1), attended_length(1000), attended_length(2049)
    (128, 1024, 2560)
    """
    unit = 128 if tokens <= 2048 else 512
    return -(-tokens // unit) * unit


class PackedStep(NamedTuple):
    """A step as one array, and what the host knows of it."""

    numbers: Numbers
    size: StepSize
    counts: Numbers  # tokens of each sequence
    lengths: Numbers  # keys of each sequence

    def singles(self, sequences: int) -> tuple[int, int]:
        """Of the first sequences: those of one token before the first with more, and the parts of
        their keys."""
        longer = (self.counts[:sequences] != 1).nonzero()[0]
        count = int(longer[0]) if len(longer) else sequences
        return count, int((-(-self.lengths[:count] // PART_KEYS)).sum())


def packed(step: StepBatch, tables: BlockTables) -> PackedStep:
    """Pack a step, after its block tables have reached the device."""
    chunks, rows = step.chunks, np.array(tables.rows_of(step.chunks), dtype=np.int64)
    tokens = np.array(list(chain.from_iterable([c.tokens for c in chunks])), dtype=np.int64)
    starts, counts, num_sampled, outgrown, adapters = (
        np.array(column, dtype=np.int64)
        for column in (
            [c.start for c in chunks],
            [len(c.tokens) for c in chunks],
            [c.scored or c.samples for c in chunks],
            [c.outgrown for c in chunks],
            [c.adapter for c in chunks],
        )
    )
    stops, lengths = counts.cumsum(), starts + counts
    positions, owners = starts, rows
    if len(tokens) != len(chunks):  # else, in decode, every sequence has one
        positions, owners = _ranges(starts, counts), rows.repeat(counts)
        outgrown, adapters = outgrown.repeat(counts), adapters.repeat(counts)
    blocks = tables.host[owners, positions // BLOCK].astype(np.int64)
    slots, sampled = blocks * BLOCK + positions % BLOCK, _ranges(stops - num_sampled, num_sampled)
    of_tokens = (tokens, positions, slots, outgrown, adapters)
    numbers = np.concatenate([*of_tokens, _ZERO, stops, lengths, rows, sampled])
    size = StepSize(len(tokens), len(chunks), len(sampled))
    return PackedStep(numbers, size, counts, lengths)


def _ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """Consecutive numbers from several starts on, so many from each."""
    offsets: Numbers = (starts - counts.cumsum() + counts).repeat(counts)
    ranges: Numbers = np.arange(int(counts.sum())) + offsets
    return ranges


def unpacked(
    numbers: Tensor,
    size: StepSize,
    tables: BlockTables,
    chunks: tuple[SequenceChunk, ...],
    singles: tuple[int, int],
) -> StepTensors:
    """Unpack a step; its tensors are views. `singles` are those of the packed step."""
    parts = torch.split(numbers, list(size.parts))
    tokens, positions, slots, outgrown, adapters = parts[:_OF_A_TOKEN]
    starts, lengths, rows, sampled = parts[_OF_A_TOKEN:]
    labels = torch.full_like(tokens[None], NOT_COUNTED)
    batch = TokenBatch(tokens[None], labels, positions[None], outgrown=outgrown[None])
    sequences = SequenceRows(tables.tensor, rows, starts, lengths)
    return StepTensors(batch, slots, adapters, chunks, sequences, sampled, *singles)


def step_tensors(step: StepBatch, tables: BlockTables) -> StepTensors:
    """Tensors of a step without padding."""
    host = packed(step, tables)
    numbers, singles = to_device(host.numbers, tables.device), host.singles(len(step.chunks))
    return unpacked(numbers, host.size, tables, step.chunks, singles)

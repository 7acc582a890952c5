"""A step as tensors: all its numbers reach the device in one copy.

Legend: T tokens of a step, S sequences (chunks), N tokens to be followed, B blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.core.model import BLOCK, blocks_of
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.model import NOT_COUNTED, TokenBatch

_OF_A_TOKEN = 4  # numbers: itself, its position, its slot, whether its text is outgrown


class StepSize(NamedTuple):
    """Numbers of tokens, sequences and blocks of a step."""

    tokens: int
    sequences: int
    sampled: int
    blocks: int  # of a table

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of tokens, positions, slots, outgrown texts, lengths, samples and tables."""
        tokens, sequences, sampled, blocks = self
        return ((tokens,),) * _OF_A_TOKEN + ((sequences,), (sampled,), (sequences, blocks))

    @property
    def of_tokens(self) -> int:
        """Size of the parts with one number a token, which come first."""
        return _OF_A_TOKEN * self.tokens


@dataclass(frozen=True)
class StepTensors:
    """Tensors of a step on its device."""

    batch: TokenBatch  # one row
    slots: Tensor  # (T,)
    chunks: tuple[SequenceChunk, ...]
    lengths: Tensor  # (S,) keys that the last token of each sequence sees
    tables: Tensor  # (S, B) the blocks of each sequence
    sampled: Tensor  # (N,) indices of the tokens whose logits are wanted

    @cached_property
    def first_singles(self) -> int:
        """Number of sequences of one token before the first with more. Captured steps have only
        these."""
        if self.batch.tokens.shape[1] == len(self.lengths):
            return len(self.lengths)
        return sum(1 for _ in takewhile(lambda chunk: len(chunk.tokens) == 1, self.chunks))


def attended_length(tokens: int) -> int:
    """Padded length at which a prompt is attended to. Some kernels compile for every length, in a
    tenth of a second.

    >>> attended_length(1), attended_length(1000), attended_length(2049)
    (128, 1024, 2560)
    """
    unit = 128 if tokens <= 2048 else 512
    return -(-tokens // unit) * unit


def size_of(step: StepBatch) -> StepSize:
    """Size of a step; tables are padded to attended lengths."""
    sampled = sum(chunk.num_wanted for chunk in step.chunks)
    blocks = blocks_of(attended_length(max(chunk.stop for chunk in step.chunks)))
    return StepSize(step.num_tokens, len(step.chunks), sampled, blocks)


def packed(step: StepBatch, blocks: int) -> Tensor:
    """Pack a step into one array; tables are padded with the last block of a sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outgrown: list[int] = []
    sampled: list[int] = []
    tables: list[int] = []
    for chunk in step.chunks:
        table = chunk.table[:blocks]
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.stop)
        slots += (table[i // BLOCK] * BLOCK + i % BLOCK for i in range(chunk.start, chunk.stop))
        outgrown += [int(chunk.outgrown)] * len(chunk.tokens)
        sampled += range(len(tokens) - chunk.num_wanted, len(tokens))
        tables += table
        tables += table[-1:] * (blocks - len(table))  # never a block of another sequence
    lengths = [chunk.stop for chunk in step.chunks]
    numbers = [*tokens, *positions, *slots, *outgrown, *lengths, *sampled, *tables]
    return torch.as_tensor(np.array(numbers, dtype=np.int64))  # five times as fast as torch's


def unpacked(numbers: Tensor, size: StepSize, chunks: tuple[SequenceChunk, ...]) -> StepTensors:
    """Unpack a step; its tensors are views."""
    counts = [prod(shape) for shape in size.parts]
    ends = list(accumulate(counts))
    views = [
        numbers[end - count : end].view(part)
        for end, count, part in zip(ends, counts, size.parts, strict=True)
    ]
    tokens, positions, slots, outgrown, lengths, sampled, tables = views
    labels = torch.full_like(tokens[None], NOT_COUNTED)
    batch = TokenBatch(tokens[None], labels, positions[None], outgrown=outgrown[None])
    return StepTensors(batch, slots, chunks, lengths, tables, sampled)


def step_tensors(step: StepBatch, device: torch.device) -> StepTensors:
    """Tensors of a step without padding."""
    size = size_of(step)
    return unpacked(packed(step, size.blocks).to(device), size, step.chunks)

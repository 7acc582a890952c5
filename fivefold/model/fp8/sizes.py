"""Rounding to fp8 of tensors without values: what the kernels of a GPU leave in memory.

The functions are those of `model/fp8/kernel.py`. A rehearsal counts what they make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.core.layout import BLOCK, SMALL_BLOCK, Fp8Format
from fivefold.model.fp8.operand import ALIGNED, CODES, Both, Operand


def largest(parts: Sequence[Tensor]) -> Tensor:
    """One number."""
    return parts[0].new_empty((), dtype=torch.float32)


def cast(
    parts: Sequence[Tensor], maximum: Tensor, form: Fp8Format, with_columns: bool, beside: bool
) -> Both:
    """Codes, transposed too if `both`, and a scale."""
    first = parts[0]
    rows = len(first) if beside else sum(map(len, parts))
    width = sum(part.shape[1] for part in parts) if beside else first.shape[1]
    scale = first.new_empty((), dtype=torch.float32)
    columns = Operand(_codes(first, width, rows, form), scale, "tensor") if with_columns else None
    return Both(Operand(_codes(first, rows, width, form), scale, "tensor"), columns)


def round_blocks(parts: Sequence[Tensor], form: Fp8Format, with_columns: bool, seq: int) -> Both:
    """Tokens: every run of `seq` has whole blocks when it is transposed."""
    first, tokens = parts[0], len(parts[0])
    width, blocks = sum(part.shape[1] for part in parts), tokens // seq * -(-seq // BLOCK)
    scale = _scales(first, -(-width // BLOCK), tokens).T
    rows = Operand(_codes(first, tokens, width, form), scale, "row")
    if not with_columns:
        return Both(rows, None)
    turned = _codes(first, width, blocks * BLOCK, form)
    return Both(rows, Operand(turned, _scales(first, blocks, width).T, "row"))


def round_squares(parts: Sequence[Tensor]) -> Both:
    """Weights, both ways."""
    outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
    rows, columns = (
        Operand(_codes(parts[0], *size, "e4m3"), _square_scales(parts[0], *size), "square")
        for size in ((outputs, inputs), (inputs, outputs))
    )
    return Both(rows, columns)


def round_small(parts: Sequence[Tensor], form: Fp8Format, with_columns: bool, seq: int) -> Both:
    """Tokens in blocks of 32, whose scales have a byte each."""
    tokens, width = len(parts[0]), sum(part.shape[1] for part in parts)
    padded = tokens // seq * -(-seq // SMALL_BLOCK) * SMALL_BLOCK
    columns = _small(parts[0], width, padded, form) if with_columns else None
    return Both(_small(parts[0], tokens, width, form), columns)


def round_small_weights(parts: Sequence[Tensor]) -> Both:
    """Weights, rounded for each order by itself."""
    outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
    sizes = ((outputs, inputs), (inputs, outputs))
    rows, columns = (_small(parts[0], *size, "e4m3") for size in sizes)
    return Both(rows, columns)


def _small(like: Tensor, rows: int, columns: int, form: Fp8Format) -> Operand:
    scale = like.new_empty(rows, -(-columns // SMALL_BLOCK), dtype=torch.uint8)
    return Operand(_codes(like, rows, columns, form), scale, "small")


def _codes(like: Tensor, rows: int, columns: int, form: Fp8Format) -> Tensor:
    return like.new_empty(rows, columns, dtype=CODES[form])


def _scales(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_empty(rows, columns, dtype=torch.float32)


def _square_scales(like: Tensor, rows: int, columns: int) -> Tensor:
    blocks = -(-columns // BLOCK)
    return _scales(like, -(-rows // BLOCK), blocks + -blocks % ALIGNED)

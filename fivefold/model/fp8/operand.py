"""Operands of fp8 matmuls: codes, and the scales of values that share one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import BLOCK, SMALL_BLOCK, Fp8Format

CODES: dict[Fp8Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALIGNED = 4  # scales of a row of square blocks are padded to a multiple, as cuBLAS reads them
Shares = Literal["tensor", "row", "square", "small"]
SIZES: dict[Shares, int] = {"row": BLOCK, "square": BLOCK, "small": SMALL_BLOCK}


class Operand(NamedTuple):
    """A matrix in fp8, and its float32 scales: one, (rows, G) for blocks of 128 or `small` ones of
    32, or (row blocks, G padded)."""

    codes: Tensor
    scale: Tensor
    shares: Shares

    def chunk(self, number: int, chunks: int) -> Operand:
        """One chunk of the rows of codes that are not of a weight. Scales keep their order: cuBLAS
        reads those of one block of columns together."""
        if chunks == 1:
            return self
        scale = self.scale
        if self.shares in ("row", "small"):
            scale = scale.chunk(chunks)[number].T.contiguous().T
        return Operand(self.codes.chunk(chunks)[number], scale, self.shares)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The rounded values."""
        rows, width = self.codes.shape
        scale = self.scale
        if self.shares == "square":
            scale = scale[:, : -(-width // BLOCK)].repeat_interleave(BLOCK, 0)[:rows]
        if self.shares != "tensor":
            scale = scale.repeat_interleave(SIZES[self.shares], 1)[:, :width]
        return self.codes.to(dtype) * scale.to(dtype)


class Both(NamedTuple):
    """A tensor, rounded for one matmul or two."""

    rows: Operand
    columns: Operand | None

"""fp8 operands: values that share a scale, rounded as `docs/fp8.md` defines it.

A matmul here is a · bᵀ: the last dim of both operands is the one it sums over. A tensor that two
matmuls read along different dims is rounded `Both` ways: by `rows` as it lies, and transposed by
`columns`. On a GPU one kernel writes both (`model/fp8/kernel.py`), to the same bits.

Legend: B rows of the batch, S tokens of a row, N = B·S, W columns, O outputs, I inputs, G blocks of
128 along the last dim, T blocks of tokens, P = 128·T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.layout import BLOCK, LARGEST, LEAST_MAXIMUM, SMALL_BLOCK, Fp8, Fp8Format
from fivefold.model.fp8 import sizes as fp8_sizes
from fivefold.model.fp8.operand import ALIGNED, CODES, SIZES, Both, Operand, Shares
from fivefold.model.kernels import is_fake

OverRanks = Callable[[Tensor], Tensor]
"""The maximum of a tensor over the ranks that hold a shard of what shares a scale."""


class Rounding(Protocol):
    """Rounds what matmuls read; several tensors are one matrix, column beside column (weights: row
    below row). Tokens are (N, W), in runs of a row; blocks of tokens do not span two runs."""

    def maximum(self, parts: Sequence[Tensor]) -> Tensor | None:
        """That of inputs or output gradients of a fused matmul, one microbatch, over all ranks that
        share it; None if no rank needs to know another's."""
        ...

    def weight_maximum(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The same of its weights."""
        ...

    def tokens(
        self,
        parts: Sequence[Tensor],
        form: Fp8Format,
        with_columns: bool,
        run: int,
        maximum: Tensor | None,
    ) -> Both:
        """Inputs or output gradients of a fused matmul."""
        ...

    def weights(self, parts: Sequence[Tensor], maximum: Tensor | None) -> Both:
        """The weights of a fused matmul."""
        ...

    def runs(self, widths: Sequence[int]) -> list[range]:
        """Which linears of a fused matmul, by their outputs, can be one matrix."""
        ...


def same(maximum: Tensor) -> Tensor:
    """The maximum where one device holds all."""
    return maximum


def rounding_of(fp8: Fp8, over_ranks: OverRanks = same, of_weights: OverRanks = same) -> Rounding:
    """How a plan rounds; maxima go over the ranks that share them."""
    if fp8.scaling == "tensorwise":
        return Tensorwise(over_ranks, of_weights)
    return Blockwise() if fp8.scaling == "blockwise" else Microscaled()


class Tensorwise:
    """One scale for each matrix."""

    def __init__(self, over_ranks: OverRanks = same, of_weights: OverRanks = same) -> None:
        self.over_ranks, self.of_weights = over_ranks, of_weights

    def runs(self, widths: Sequence[int]) -> list[range]:
        return [range(len(widths))]

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        return self.over_ranks(largest_of(parts))

    def weight_maximum(self, parts: Sequence[Tensor]) -> Tensor:
        return self.of_weights(largest_of(parts))

    def tokens(
        self,
        parts: Sequence[Tensor],
        form: Fp8Format,
        with_columns: bool,
        run: int,
        maximum: Tensor | None,
    ) -> Both:
        assert maximum is not None
        return _cast(parts, maximum, form, with_columns, beside=True)

    def weights(self, parts: Sequence[Tensor], maximum: Tensor | None) -> Both:
        assert maximum is not None
        return _cast(parts, maximum, "e4m3", True, beside=False)


class Blockwise:
    """One scale for 1 × 128 values of tokens, and for 128 × 128 of weights."""

    block = BLOCK

    def runs(self, widths: Sequence[int]) -> list[range]:
        """A ragged block is the last of its matrix."""
        last = len(widths) - 1
        ends = [n + 1 for n, width in enumerate(widths) if width % self.block or n == last]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def maximum(self, parts: Sequence[Tensor]) -> None:
        """Every block is on one rank."""

    def weight_maximum(self, parts: Sequence[Tensor]) -> None:
        """The same."""

    def tokens(
        self,
        parts: Sequence[Tensor],
        form: Fp8Format,
        with_columns: bool,
        run: int,
        maximum: Tensor | None,
    ) -> Both:
        if (kernels := _kernels(parts)) is not None:
            return kernels.round_blocks(parts, form, with_columns, run)
        x_NW = torch.cat([*parts], -1)
        columns = _token_blocks(x_NW.unflatten(0, (-1, run)), form) if with_columns else None
        return Both(_row_blocks(x_NW, form), columns)

    def weights(self, parts: Sequence[Tensor], maximum: Tensor | None) -> Both:
        if (kernels := _kernels(parts)) is not None:
            return kernels.round_squares(parts)
        weight_OI = torch.cat([*parts])
        return Both(_square_blocks(weight_OI), _square_blocks(weight_OI.T))


class Microscaled(Blockwise):
    """mxfp8: one scale, a power of two, for 32 values along the dim that a matmul sums over. So a
    weight has other codes for the forward than for the input gradient. No kernel multiplies it
    here: the rounded values are."""

    block = SMALL_BLOCK

    def tokens(
        self,
        parts: Sequence[Tensor],
        form: Fp8Format,
        with_columns: bool,
        run: int,
        maximum: Tensor | None,
    ) -> Both:
        if is_fake(parts[0]):
            return fp8_sizes.round_small(parts, form, with_columns, run)
        x_NW = torch.cat([*parts], -1)
        columns = None
        if with_columns:
            columns = _token_blocks(x_NW.unflatten(0, (-1, run)), form, "small")
        return Both(_row_blocks(x_NW, form, "small"), columns)

    def weights(self, parts: Sequence[Tensor], maximum: Tensor | None) -> Both:
        if is_fake(parts[0]):
            return fp8_sizes.round_small_weights(parts)
        weight_OI = torch.cat([*parts])
        rows, columns = (
            _row_blocks(matrix, "e4m3", "small") for matrix in (weight_OI, weight_OI.T)
        )
        return Both(rows, columns)


def power_of_two(scale: Tensor) -> Tensor:
    """The next power of two that is not smaller, so that no value exceeds the format."""
    fraction, exponent = torch.frexp(scale)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    return torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent), scale)


def scale_and_factor(maximum: Tensor, form: Fp8Format) -> tuple[Tensor, Tensor]:
    """What multiplies codes, and what multiplies values, in float32. Torch divides by a tensor, and
    multiplies by the inverse of a number."""
    floor = maximum.to(torch.float32).clamp(min=LEAST_MAXIMUM)
    scale = floor / torch.full_like(floor, LARGEST[form])
    return scale, torch.ones_like(scale) / scale


def to_codes(x: Tensor, factor: Tensor, form: Fp8Format) -> Tensor:
    """x · factor, in float32 or wider, rounded to float32 and then to fp8."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * factor.to(wide)).to(torch.float32).to(CODES[form])


def _kernels(parts: Sequence[Tensor]) -> Any:
    """The module with kernels for these tensors, or with the sizes of what such kernels make; None
    if there is none."""
    first = parts[0]
    if is_fake(first):
        return fp8_sizes
    if not first.is_cuda or first.dtype == torch.float64:
        return None
    from fivefold.model.fp8 import kernel as fp8_kernel  # Triton is there only with CUDA

    return fp8_kernel


def largest_of(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of them all, in float32."""
    if (kernels := _kernels(parts)) is not None:
        return kernels.largest(parts)
    return torch.stack([part.abs().amax() for part in parts]).amax().to(torch.float32)


def _cast(
    parts: Sequence[Tensor], maximum: Tensor, form: Fp8Format, with_columns: bool, beside: bool
) -> Both:
    """Matrices `beside` or below one another, with one scale."""
    if (kernels := _kernels(parts)) is not None:
        return kernels.cast(parts, maximum, form, with_columns, beside)
    scale, factor = scale_and_factor(maximum, form)
    codes = to_codes(torch.cat([*parts], -1 if beside else 0), factor, form)
    columns = Operand(codes.T.contiguous(), scale, "tensor") if with_columns else None
    return Both(Operand(codes, scale, "tensor"), columns)


def _of_blocks(maximum: Tensor, form: Fp8Format, shares: Shares) -> tuple[Tensor, Tensor]:
    """Scales and factors; those of small blocks are powers of two."""
    scale, factor = scale_and_factor(maximum, form)
    if shares != "small":
        return scale, factor
    scale = power_of_two(scale)
    return scale, torch.ones_like(scale) / scale


def _row_blocks(x_NW: Tensor, form: Fp8Format, shares: Shares = "row") -> Operand:
    """1 × 128 along the last dim, or 1 × 32."""
    x_NGb = _padded(x_NW, 1, SIZES[shares]).unflatten(1, (-1, SIZES[shares]))
    scale_NG, factor_NG = _of_blocks(x_NGb.abs().amax(2), form, shares)
    codes = to_codes(x_NGb, factor_NG[..., None], form).flatten(1)
    return Operand(codes[:, : x_NW.shape[1]].contiguous(), scale_NG, shares)


def _token_blocks(x_BSW: Tensor, form: Fp8Format, shares: Shares = "row") -> Operand:
    """128 or 32 tokens of one row and column, transposed; every row is padded to whole blocks."""
    x_BTbW = _padded(x_BSW, 1, SIZES[shares]).unflatten(1, (-1, SIZES[shares]))
    scale_BTW, factor_BTW = _of_blocks(x_BTbW.abs().amax(2), form, shares)
    codes_BTbW = to_codes(x_BTbW, factor_BTW[:, :, None], form)
    codes = codes_BTbW.view(torch.uint8).flatten(0, 2).T.contiguous().view(CODES[form])
    return Operand(codes, scale_BTW.flatten(0, 1).T, shares)


def _square_blocks(weight_OI: Tensor) -> Operand:
    """128 × 128; scales of a row of blocks are padded with zeros to a multiple of 4."""
    outputs, inputs = weight_OI.shape
    blocks = _padded(_padded(weight_OI, 0), 1).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale, factor = scale_and_factor(blocks.abs().amax((1, 3)), "e4m3")
    codes = to_codes(blocks, factor[:, None, :, None], "e4m3").flatten(2).flatten(0, 1)
    scale = F.pad(scale, (0, -scale.shape[1] % ALIGNED))
    return Operand(codes[:outputs, :inputs].contiguous(), scale, "square")


def _padded(x: Tensor, dim: int, block: int = BLOCK) -> Tensor:
    """Zeros to a whole number of blocks along a dim."""
    missing = -x.shape[dim] % block
    after = (x.dim() - 1 - dim) * (0, 0)
    return F.pad(x, (*after, 0, missing)) if missing else x

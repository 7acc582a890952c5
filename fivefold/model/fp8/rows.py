"""Rows of experts in fp8: one scale for each, and codes that travel in place of values.

What goes to experts (their inputs in forward, the gradients of their outputs in backward) is
rounded where its token is, before anything moves it. Autograd has no integers: it sees tensors of
the right size that have no memory, and `CodedRows` holds the codes beside them. What comes back
from experts are values.

A packed row is its codes and, in its last four bytes, its scale.

Legend: N tokens, M slots, D model width, W columns, P bytes of a packed row.

Grouped fp8 matmuls of experts: rows sorted by expert, each times the weight of its expert.

A row has one scale and an expert's weight has one: Hopper's grouped kernel takes a scale for each
row and each output, and no blocks. The scale of a weight is repeated for all its outputs.

Legend: M rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.layout import SCALE_BYTES, packed_row
from fivefold.model import PlainRows, RowCodes
from fivefold.model.fp8.operand import CODES
from fivefold.model.fp8.rounding import OverRanks, scale_and_factor, to_codes
from fivefold.model.kernels import is_fake

_E4M3 = CODES["e4m3"]


class _LiveRows(PlainRows):
    """Values, zero where tokens are padding."""

    def __init__(self, live: Callable[[Tensor], Tensor]) -> None:
        self.live = live

    def round(self, x: Tensor) -> Tensor:
        return self.live(x)


class RowOperand(NamedTuple):
    """A matrix in fp8 with a scale for each row, (M,) in float32."""

    codes: Tensor
    scale: Tensor

    def values(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """The rounded values of some columns."""
        codes = self.codes[:, start:stop]
        if is_fake(codes):
            return codes.new_empty(codes.shape, dtype=dtype)
        if codes.is_cuda and dtype != torch.float64:
            from fivefold.model.fp8 import (
                rows_kernel as fp8_rows_kernel,  # Triton is there only with CUDA
            )

            return fp8_rows_kernel.row_values(codes, self.scale, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (codes.to(wide) * self.scale.to(wide)[:, None]).to(dtype)


def weight_values(weight: Tensor, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight, or weights of experts, whose rows may be codes."""
    if row_scale is None:
        return weight
    rows = RowOperand(weight.flatten(0, -2), row_scale.flatten())
    return rows.values(dtype).view(weight.shape)


class CodedRows:
    """The rows of one microbatch on their way to the experts of one layer. `live` sets tokens that
    are padding to zero; with `weighs_inputs` rows are known only when their weights are."""

    two_readers = False

    def __init__(
        self, width: int, dtype: torch.dtype, live: Callable[[Tensor], Tensor], weighs_inputs: bool
    ) -> None:
        self.width, self.dtype, self.live, self.weighs_inputs = width, dtype, live, weighs_inputs
        self.packed: Tensor | None = None

    @property
    def tokens(self) -> RowCodes:
        return _LiveRows(self.live) if self.weighs_inputs else self

    def round(self, x: Tensor) -> Tensor:
        return _Round.apply(x, self)

    def round_gradient(self, y: Tensor) -> Tensor:
        return _RoundGradient.apply(y, self)

    def open(self, x: Tensor) -> Tensor:
        packed, self.packed = self.packed, None
        assert packed is not None, "rows are opened once for each time they are closed"
        return packed

    def close(self, moved: Tensor) -> Tensor:
        self.packed = moved
        nothing = torch.zeros((), dtype=self.dtype, device=moved.device)
        return nothing.expand(len(moved), self.width)

    def read(self, x: Tensor) -> tuple[Tensor, RowOperand]:
        """The packed rows, and the operand that they are."""
        packed = self.open(x)
        return packed, unpacked(packed, self.width)


class _Round(torch.autograd.Function):
    """Values to codes; the gradient is that of the values."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, codes: CodedRows) -> Tensor:
        live = x_ND if codes.weighs_inputs else codes.live(x_ND)
        return codes.close(round_and_pack(live))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _RoundGradient(torch.autograd.Function):
    """Nothing forward; backward turns the gradient to codes."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, codes: CodedRows) -> Tensor:
        ctx.codes = codes
        return y_ND.view_as(y_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        codes: CodedRows = ctx.codes
        return codes.close(round_and_pack(gradients[0])), None


def round_and_pack(x_NW: Tensor) -> Tensor:
    """Rows with their scales, (N, P) bytes."""
    num_rows, width = x_NW.shape
    packed_NP = torch.empty(num_rows, packed_row(width), dtype=torch.uint8, device=x_NW.device)
    if is_fake(x_NW):
        return packed_NP
    if _has_kernel(x_NW):
        from fivefold.model.fp8 import rows_kernel as fp8_rows_kernel

        fp8_rows_kernel.pack_rows(x_NW, packed_NP)
        return packed_NP
    rounded = round_rows([x_NW], None)
    packed_NP[:, :width] = rounded.codes.view(torch.uint8)
    packed_NP[:, -SCALE_BYTES:] = rounded.scale.view(torch.uint8).view(num_rows, SCALE_BYTES)
    return packed_NP


def unpacked(packed_MP: Tensor, width: int) -> RowOperand:
    """Codes as they lie in packed rows, and their scales."""
    tail = packed_MP[:, -SCALE_BYTES:].contiguous()
    return RowOperand(packed_MP[:, :width].view(_E4M3), tail.view(torch.float32).flatten())


def round_rows(parts: Sequence[Tensor], over_ranks: OverRanks | None) -> RowOperand:
    """Matrices beside one another, as one: a row has one scale. Its maximum goes over ranks that
    have other columns of the row."""
    first, width = parts[0], sum(part.shape[1] for part in parts)
    if is_fake(first):
        maximum_M = first.new_empty(len(first), dtype=torch.float32)
        maximum_M = maximum_M if over_ranks is None else over_ranks(maximum_M)
        return RowOperand(first.new_empty(len(first), width, dtype=_E4M3), maximum_M)
    if _has_kernel(first):
        from fivefold.model.fp8 import rows_kernel as fp8_rows_kernel

        maximum = None if over_ranks is None else over_ranks(fp8_rows_kernel.row_maxima(parts))
        return RowOperand(*fp8_rows_kernel.round_rows(parts, maximum))
    maximum_M = torch.stack([part.abs().amax(1) for part in parts]).amax(0).to(torch.float32)
    maximum_M = maximum_M if over_ranks is None else over_ranks(maximum_M)
    scale_M, factor_M = scale_and_factor(maximum_M, "e4m3")
    return RowOperand(to_codes(torch.cat([*parts], 1), factor_M[:, None], "e4m3"), scale_M)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


_MULTIPLE = 16  # of widths that the grouped kernel takes
_MAJORS = (9, 10)  # compute capabilities that have one


class StackOperand(NamedTuple):
    """The weights of all experts in fp8, (E, O, I), and a scale for each output, (E, O)."""

    codes: Tensor
    scale: Tensor


class BothStacks(NamedTuple):
    """The same as forward and as dgrad read it: (E, O, I) and (E, I, O)."""

    rows: StackOperand
    turned: StackOperand


def expert_maxima(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of each expert, (E,) in float32."""
    found_E = torch.zeros(len(parts[0]), dtype=torch.float32, device=parts[0].device)
    for part in parts:
        raise_maxima(found_E, part)
    return found_E


def raise_maxima(found_E: Tensor, stack_EOI: Tensor) -> None:
    """Raise numbers to the largest absolute value of each expert; weights may be on the host."""
    if is_fake(stack_EOI):
        return
    if _has_grouped_kernel(stack_EOI):
        from fivefold.model.fp8 import (
            rows_kernel as fp8_rows_kernel,  # Triton is there only with CUDA
        )

        fp8_rows_kernel.raise_maxima(found_E, stack_EOI)
        return
    maxima_E = stack_EOI.abs().amax((1, 2)).to(found_E)
    found_E.copy_(torch.maximum(found_E, maxima_E))


def round_stacks(parts: Sequence[Tensor], maximum_E: Tensor) -> BothStacks:
    """Stacked weights below one another, with one scale for each expert."""
    first, outputs = parts[0], sum(part.shape[1] for part in parts)
    experts, _, inputs = first.shape
    scale_E, factor_E = scale_and_factor(maximum_E, "e4m3")
    sizes = ((experts, outputs, inputs), (experts, inputs, outputs))
    if is_fake(first):
        codes, turned = (first.new_empty(size, dtype=CODES["e4m3"]) for size in sizes)
    elif _has_grouped_kernel(first):
        from fivefold.model.fp8 import rows_kernel as fp8_rows_kernel

        codes, turned = fp8_rows_kernel.cast_stacks(parts, maximum_E)
    else:
        codes = to_codes(torch.cat([*parts], 1), factor_E[:, None, None], "e4m3")
        turned = codes.transpose(1, 2).contiguous()
    scales = [scale_E[:, None].expand(experts, size[1]).contiguous() for size in sizes]
    return BothStacks(StackOperand(codes, scales[0]), StackOperand(turned, scales[1]))


def scaled_grouped(
    x: RowOperand, weight: StackOperand, ends_E: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """The rows of every expert times its weight, (M, O); `fast` as in `fp8_matmul`."""
    if is_fake(x.codes):
        return x.codes.new_empty(len(x.codes), weight.codes.shape[1], dtype=dtype)
    if has_grouped_kernel(x, weight, dtype):
        return F.scaled_grouped_mm(
            x.codes,
            weight.codes.transpose(1, 2),
            x.scale,
            F.ScalingType.RowWise,
            weight.scale,
            F.ScalingType.RowWise,
            offs=ends_E,
            output_dtype=dtype,
            use_fast_accum=fast,
        )
    wide = torch.promote_types(dtype, torch.float32)
    values, ends = x.values(wide), ends_E.tolist()
    spans = zip(weight.codes, weight.scale, [0, *ends], ends, strict=False)
    products = [
        values[start:end] @ (codes_OI.to(wide) * scale_O.to(wide)[:, None]).T
        for codes_OI, scale_O, start, end in spans
    ]
    return torch.cat(products).to(dtype)


def has_grouped_kernel(x: RowOperand, weight: StackOperand, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for this device and these widths."""
    if not x.codes.is_cuda or dtype != torch.bfloat16 or not len(x.codes):
        return False
    aligned = not any(width % _MULTIPLE for width in weight.codes.shape[1:])
    return aligned and _major(x.codes.device) in _MAJORS


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _has_grouped_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64

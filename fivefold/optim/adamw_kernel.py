"""AdamW as one Triton kernel for all tensors, or for each, where weights are on a GPU.

Torch's fused update reads and writes bfloat16 in pieces of 8 bytes, which leaves nearly half of an
H200's bandwidth unused. The arithmetic is the same: float32, whatever the types in memory. States
in bfloat16 are rounded by the bits of `optim/rounding.py`, which the kernel draws itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.optim.rounding import RoundingKey
from fivefold.optim.tensor_table import TYPES, addresses_of, is_aligned, programs_of

_BLOCK = 2048  # elements of a pass: enough for several loads of 16 bytes a thread
_PASSES = 4  # of a program, where it updates one of many tensors

_NO_ROUNDING = RoundingKey(0, 0, (1, 1, 1), (0, 0, 0), (1, 1, 1))


@triton.jit
def _bits(
    offsets: tl.tensor,
    key: tl.tensor,
    start: tl.tensor,
    base: tl.tensor,
    limit: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    outer: tl.tensor,
    middle: tl.tensor,
    CONTIGUOUS: tl.constexpr,
) -> tl.tensor:
    """32 random bits for each element, as `rounding_bits`: MurmurHash3 of its index in the full
    weight."""
    index = offsets + start
    if not CONTIGUOUS:
        within = index.to(tl.uint32)  # divisions of 64 bits would take longer than the update
        width, height = columns.to(tl.uint32), rows.to(tl.uint32)
        row, column = within // width, within % width
        index = (row // height).to(tl.int64) * outer + (row % height).to(tl.int64) * middle
        index += column.to(tl.int64)
    index += base
    x = (tl.where(index < limit, index, 0) ^ key).to(tl.uint32)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _rounded(wide: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """As `round_stochastically`, still in float32."""
    pattern = wide.to(tl.uint32, bitcast=True)
    near = ((pattern + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((pattern & 0x7F800000) != 0x7F800000, near, wide)


@triton.jit
def _moved(
    value: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    decay_factor: tl.tensor,
    size: tl.tensor,
    root: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Value and moments after an update."""
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    return value * decay_factor - size * first / (tl.sqrt(second) / root + eps), first, second


@triton.jit(
    do_not_specialize=["key", "start", "base", "limit", "rows", "columns", "outer", "middle"]
)
def _adamw_update(
    value_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    narrow_ptr: tl.tensor,  # the weight, if the value is its master
    decay_factor: float,  # of a weight after decay
    size: float,  # of the step
    root: float,  # of the second moment's correction
    beta1: float,
    beta2: float,
    eps: float,
    numel: tl.int64,
    key: tl.int64,
    start: tl.int64,
    base: tl.int64,
    limit: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    outer: tl.int64,
    middle: tl.int64,
    ROUNDS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    HAS_NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    inside = (offsets < numel) & (factor >= 0)  # nothing is updated if it is not a number
    value = tl.load(value_ptr + offsets, inside).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, inside).to(tl.float32) * factor
    first = tl.load(first_ptr + offsets, inside).to(tl.float32)
    second = tl.load(second_ptr + offsets, inside).to(tl.float32)
    value, first, second = _moved(
        value, grad, first, second, decay_factor, size, root, beta1, beta2, eps
    )
    tl.store(value_ptr + offsets, value, inside)
    if HAS_NARROW:
        tl.store(narrow_ptr + offsets, value, inside)
    if ROUNDS:
        bits = _bits(offsets, key, start, base, limit, rows, columns, outer, middle, CONTIGUOUS)
        first = _rounded(first, bits)
        second = _rounded(second, bits >> 16)
    tl.store(first_ptr + offsets, first, inside)
    tl.store(second_ptr + offsets, second, inside)


@triton.jit
def _adamw_update_all(
    address_ptr: tl.tensor,  # of values, gradients, both moments, and narrow weights
    tensor_ptr: tl.tensor,
    program_ptr: tl.tensor,
    numel_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    num_tensors: int,
    size: float,
    root: float,
    beta1: float,
    beta2: float,
    eps: float,
    VALUE: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    begin = (program - tl.load(program_ptr + tensor)).to(tl.int64) * BLOCK * PASSES
    numel = tl.load(numel_ptr + tensor)
    decay_factor = tl.load(kept_ptr + tensor)
    factor = tl.load(factor_ptr)
    address_ptr += tensor
    value_ptr = tl.load(address_ptr).to(tl.pointer_type(VALUE))
    grad_ptr = tl.load(address_ptr + num_tensors).to(tl.pointer_type(GRAD))
    first_ptr = tl.load(address_ptr + 2 * num_tensors).to(tl.pointer_type(MOMENT))
    second_ptr = tl.load(address_ptr + 3 * num_tensors).to(tl.pointer_type(MOMENT))
    narrow_ptr = tl.load(address_ptr + 4 * num_tensors).to(tl.pointer_type(NARROW))
    if ALIGNED:
        numel, value_ptr = tl.multiple_of(numel, 16), tl.multiple_of(value_ptr, 16)
        grad_ptr, narrow_ptr = tl.multiple_of(grad_ptr, 16), tl.multiple_of(narrow_ptr, 16)
        first_ptr, second_ptr = tl.multiple_of(first_ptr, 16), tl.multiple_of(second_ptr, 16)
    for number in range(PASSES):
        offsets = begin + number * BLOCK + tl.arange(0, BLOCK)
        inside = (offsets < numel) & (factor >= 0)  # nothing is updated if it is not a number
        value = tl.load(value_ptr + offsets, inside).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, inside).to(tl.float32) * factor
        first = tl.load(first_ptr + offsets, inside).to(tl.float32)
        second = tl.load(second_ptr + offsets, inside).to(tl.float32)
        value, first, second = _moved(
            value, grad, first, second, decay_factor, size, root, beta1, beta2, eps
        )
        tl.store(value_ptr + offsets, value, inside)
        if HAS_NARROW:
            tl.store(narrow_ptr + offsets, value, inside)
        tl.store(first_ptr + offsets, first, inside)
        tl.store(second_ptr + offsets, second, inside)


class AdamwKernel:
    """Updates tensors in one pass each; `factor` scales all gradients, and NaN skips the update."""

    def __init__(
        self,
        factor: Tensor | None,
        device: torch.device,
        lr: float,
        count: int,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`count` is the number of this update."""
        scale = torch.ones(()) if factor is None else factor
        self.factor = scale.to(device, torch.float32, non_blocking=True)
        self.lr, self.device, self.betas, self.eps = lr, device, betas, eps
        self.size = lr / (1 - betas[0] ** count)
        self.root = math.sqrt(1 - betas[1] ** count)

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        moments: Sequence[Tensor],
        weight_decay: float,
        narrow: Tensor | None = None,
        rounding: RoundingKey | None = None,
    ) -> None:
        """Update one value in place, and its `narrow` weight if it is a master. `rounding` rounds
        moments to bfloat16."""
        numel, bits = value.numel(), rounding or _NO_ROUNDING
        assert math.prod(bits.local) < 2**32, "indices in a shard have 32 bits"
        flat = [tensor.detach().view(-1) for tensor in (value, *moments, value)]
        if narrow is not None:
            flat[-1] = narrow.detach().view(-1)
        with torch.cuda.device(self.device):
            _adamw_update[(triton.cdiv(numel, _BLOCK),)](
                flat[0],
                grad.reshape(-1),
                *flat[1:3],
                self.factor,
                flat[-1],
                1 - self.lr * weight_decay,
                self.size,
                self.root,
                *self.betas,
                self.eps,
                numel,
                bits.key,
                bits.start,
                bits.base,
                math.prod(bits.shape),
                *bits.local[1:],
                *bits.strides,
                ROUNDS=rounding is not None,
                CONTIGUOUS=bits.contiguous,
                HAS_NARROW=narrow is not None,
                BLOCK=_BLOCK,
            )

    def update_all(
        self,
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        decays: Sequence[float],
        narrow: Sequence[Tensor],
    ) -> None:
        """Update values in place, and their `narrow` weights if they are masters, in one launch, or
        in two if some are not aligned. Moments are not rounded."""
        rows = (values, [grad.contiguous() for grad in grads], *moments, narrow or values)
        columns = [column for column in zip(*rows, decays, strict=True) if column[0].numel()]
        for aligned in (True, False):
            chosen = [column for column in columns if is_aligned(column[:-1]) == aligned]
            if chosen:
                *tensors, decay = zip(*chosen, strict=True)
                self._launch(tensors, decay, bool(narrow), aligned)

    def _launch(
        self,
        rows: Sequence[Sequence[Tensor]],
        decays: Sequence[float],
        has_narrow: bool,
        aligned: bool,
    ) -> None:
        value, grad, first, _, narrow = (row[0] for row in rows)
        table = programs_of(
            tuple(tensor.numel() for tensor in rows[0]), _BLOCK * _PASSES, self.device
        )
        decay_factors = torch.tensor([1 - self.lr * decay for decay in decays], pin_memory=True)
        with torch.cuda.device(self.device):
            _adamw_update_all[(table.count,)](
                addresses_of(rows, self.device),
                *table[1:],
                decay_factors.to(self.device, non_blocking=True),
                self.factor,
                len(decays),
                self.size,
                self.root,
                *self.betas,
                self.eps,
                VALUE=TYPES[value.dtype],
                GRAD=TYPES[grad.dtype],
                MOMENT=TYPES[first.dtype],
                NARROW=TYPES[narrow.dtype],
                HAS_NARROW=has_narrow,
                ALIGNED=aligned,
                BLOCK=_BLOCK,
                PASSES=_PASSES,
            )

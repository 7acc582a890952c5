"""AdamW as one Triton kernel for each tensor, where weights are on a GPU.

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

_BLOCK = 2048  # elements of a program: enough for several loads of 16 bytes a thread


_NO_ROUNDING = RoundingKey(0, 0, (1, 1, 1), (0, 0, 0), (1, 1, 1))


@triton.jit
def _bits(
    place: tl.tensor,
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
    index = place + start
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
    whole = wide.to(tl.uint32, bitcast=True)
    near = ((whole + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((whole & 0x7F800000) != 0x7F800000, near, wide)


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
    kept: float,  # of a weight after decay
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
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    inside = (place < numel) & (factor >= 0)  # nothing is updated if it is not a number
    value = tl.load(value_ptr + place, inside).to(tl.float32) * kept
    grad = tl.load(grad_ptr + place, inside).to(tl.float32) * factor
    first = tl.load(first_ptr + place, inside).to(tl.float32)
    second = tl.load(second_ptr + place, inside).to(tl.float32)
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    value -= size * first / (tl.sqrt(second) / root + eps)
    tl.store(value_ptr + place, value, inside)
    if HAS_NARROW:
        tl.store(narrow_ptr + place, value, inside)
    if ROUNDS:
        bits = _bits(place, key, start, base, limit, rows, columns, outer, middle, CONTIGUOUS)
        first = _rounded(first, bits)
        second = _rounded(second, bits >> 16)
    tl.store(first_ptr + place, first, inside)
    tl.store(second_ptr + place, second, inside)


class AdamwKernel:
    """Updates tensors one by one, each in one pass; `factor` multiplies all gradients, and nothing
    changes if it is not a number."""

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
        one = torch.ones(()) if factor is None else factor
        self.factor = one.to(device, torch.float32, non_blocking=True)
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
        """Update one value in place, and the `narrow` weight that it is the master of. With a
        `rounding`, moments are rounded to bfloat16 so."""
        numel, bits = value.numel(), rounding or _NO_ROUNDING
        assert math.prod(bits.local) < 2**32, "indices in a shard have 32 bits"
        flat = [each.detach().view(-1) for each in (value, *moments, value)]
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

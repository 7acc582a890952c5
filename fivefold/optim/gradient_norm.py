"""The norm of all gradients as one Triton kernel for each, where they are on a GPU.

Torch reads bfloat16 in pieces of 8 bytes for it. Squares are summed in float32 within a program,
and the programs' sums in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _ROUNDS = 4096, 8
_SPAN = _BLOCK * _ROUNDS  # elements of a program


@triton.jit
def _sum_of_squares(
    grad_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    numel: int,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROUNDS):
        place = first + number * BLOCK + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + place, place < numel, other=0.0).to(tl.float32)
        total += grad * grad
    tl.store(sum_ptr + tl.program_id(0), tl.sum(total))


def norm_on_gpu(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of them all, in float64."""
    programs = [triton.cdiv(each.numel(), _SPAN) for each in gradients]
    sums = gradients[0].new_empty(sum(programs), dtype=torch.float32)
    firsts = accumulate(programs, initial=0)
    with torch.cuda.device(sums.device):
        for grad, count, first in zip(gradients, programs, firsts, strict=False):
            if count:
                _sum_of_squares[(count,)](
                    grad.reshape(-1), sums[first:], grad.numel(), BLOCK=_BLOCK, ROUNDS=_ROUNDS
                )
    return sums.sum(dtype=torch.float64).sqrt()

"""The norm of all gradients as one Triton kernel, where they are on a GPU.

Torch reads bfloat16 in pieces of 8 bytes for it. Squares are summed in float32 within a program,
and the programs' sums in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.optim.tensor_table import TYPES, addresses_of, is_aligned, programs_of

_BLOCK, _ROUNDS = 4096, 8


@triton.jit
def _sum_of_squares(
    address_ptr: tl.tensor,
    tensor_ptr: tl.tensor,
    first_ptr: tl.tensor,
    numel_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    first = (program - tl.load(first_ptr + tensor)).to(tl.int64) * BLOCK * ROUNDS
    grad_ptr = tl.load(address_ptr + tensor).to(tl.pointer_type(TYPE))
    numel = tl.load(numel_ptr + tensor)
    if ALIGNED:
        grad_ptr, numel = tl.multiple_of(grad_ptr, 16), tl.multiple_of(numel, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROUNDS):
        offsets = first + number * BLOCK + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + offsets, offsets < numel, other=0.0).to(tl.float32)
        total += grad * grad
    tl.store(sum_ptr + program, tl.sum(total))


def norm_on_gpu(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients, in float64: one launch, or two if some are not aligned."""
    grads = [gradient.contiguous() for gradient in gradients if gradient.numel()]
    sums = [torch.zeros(1, device=gradients[0].device)]
    for aligned in (True, False):
        group = [grad for grad in grads if is_aligned([grad]) == aligned]
        if group:
            sums.append(_sums(group, aligned))
    return torch.cat(sums).sum(dtype=torch.float64).sqrt()


def _sums(grads: Sequence[Tensor], aligned: bool) -> Tensor:
    """The sum of squares that each program finds."""
    device = grads[0].device
    table = programs_of(tuple(grad.numel() for grad in grads), _BLOCK * _ROUNDS, device)
    sums = torch.empty(table.count, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        _sum_of_squares[(table.count,)](
            addresses_of([grads], device),
            *table[1:],
            sums,
            TYPE=TYPES[grads[0].dtype],
            ALIGNED=aligned,
            BLOCK=_BLOCK,
            ROUNDS=_ROUNDS,
        )
    return sums

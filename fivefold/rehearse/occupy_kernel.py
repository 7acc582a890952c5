"""A kernel that takes from a GPU what a collective would take: multiprocessors, bytes, and time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_NUMBERS = 1 << 24  # float32 that are read, and as many that are written: more than caches hold
_BLOCK = 4096  # of a program at a time
_WARPS = 32  # no matmul finds room on a multiprocessor beside so many, as beside NCCL's


@triton.jit
def _occupy(
    memory_ptr: tl.tensor,
    nanoseconds: int,
    moves: int,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    begin, program = globaltimer(), tl.program_id(0)
    for move in range(moves):
        first = ((move * tl.num_programs(0) + program) * BLOCK) % NUMBERS
        source_ptr = memory_ptr + first + tl.arange(0, BLOCK)
        tl.store(source_ptr + NUMBERS, tl.load(source_ptr))
        until = begin + (move + 1).to(tl.int64) * nanoseconds // moves
        while globaltimer() < until:
            tl.debug_barrier()


class Occupation:
    """Launches of the kernel on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(2 * _NUMBERS, device=device)

    def start(self, sms: int, num_bytes: float, seconds: float) -> None:
        """Occupy multiprocessors on the current stream, and move bytes evenly over the seconds."""
        moves = max(1, round(num_bytes / self.memory.element_size() / _BLOCK / sms))
        _occupy[(sms,)](
            *(self.memory, round(1e9 * seconds), moves),
            NUMBERS=_NUMBERS,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )

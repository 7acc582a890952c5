"""Kernels that begin before the one in front of them has ended, on Hopper and newer.

Between two kernels of a few microseconds a GPU does nothing for about one. A kernel that is
launched so gets its place as soon as the last programs of the former run, and waits before it reads
what another kernel has written. Every program waits, also one that has nothing to do: its kernel
then ends after all before it.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LEAST_MAJOR = 9  # of a GPU's compute capability


@triton.jit
def let_next_begin(EARLY: tl.constexpr) -> None:
    """Allow the next kernel to launch (griddepcontrol.launch_dependents)."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr) -> None:
    """Wait until earlier kernels have completed and their writes are visible."""
    if EARLY:
        gdc_wait()


@triton.jit
def begin_early(EARLY: tl.constexpr) -> None:
    """Both, for a kernel that reads nothing before it."""
    let_next_begin(EARLY)
    wait_for_last(EARLY)


class EarlyLaunch(TypedDict):
    """Launch arguments of a kernel with a constant `EARLY`."""

    EARLY: bool
    launch_pdl: bool


def begins_early(beside: Tensor) -> EarlyLaunch:
    """Launch arguments of a kernel on the device of a tensor."""
    early = beside.is_cuda and _major(beside.device) >= _LEAST_MAJOR
    return EarlyLaunch(EARLY=early, launch_pdl=early)


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]

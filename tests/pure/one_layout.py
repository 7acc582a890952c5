"""One layout for tests: its grid, peak memory, saved activations, pairs of its context ranks."""

from __future__ import annotations

import numpy as np

from fivefold.core import hardware as machines
from fivefold.core.layout.splits import ContextSplit, attention_calls
from fivefold.core.model.shape import Shape
from fivefold.cost.grid import SCHEDULES, LayoutGrid
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.stack import StackMemory
from fivefold.cost.memory.activations import Activations
from fivefold.cost.memory.categories import PeakMemory, peak_memory

H100 = machines.load("h100")
# A sweep of nanotron, December 2024: a Llama of 1.34 B and one of 8.86 B, 4,096 tokens a row.
SMALL = Shape("1.34b", 16, 2048, 32, 32, 64, 8192, 131072, 4096, tied=True)
LARGE = Shape("8.86b", 32, 4096, 32, 32, 128, 14336, 131072, 4096)


def grid_of(
    *, sp: bool = True, offload: bool = False, schedule: str = "1f1b", **said: int
) -> LayoutGrid:
    names = ["tp", "cp", "pp", "replicate", "shard", "ep", "etp", "zero", "chunks"]
    names += ["microbatch_size", "microbatches", "recompute"]
    numbers = [said.pop(name, 0 if name in ("zero", "recompute") else 1) for name in names]
    assert not said, said
    columns = {name: np.array([float(each)]) for name, each in zip(names, numbers, strict=True)}
    columns["schedule"] = np.array([float(SCHEDULES.index(schedule))])
    return LayoutGrid(**columns, sp=np.array([sp]), offload=np.array([offload]))


def memory_of(
    shape: Shape, grid: LayoutGrid, stack: stacks.SoftwareStack = stacks.FIVEFOLD, seq: int = 4096
) -> PeakMemory:
    return peak_memory(shape, H100, stack, grid, seq, "bf16")


def activations_of(
    shape: Shape,
    stack: stacks.SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    memory: StackMemory | None = None,
) -> Activations:
    return Activations(shape, stack, memory or stack.memory, grid, seq, 2, 1.0)


def attention_pairs(split: ContextSplit, seq: int, window: int | None = None) -> list[int]:
    """Pairs of a query and a key that each rank computes, per head of the model.

    The `inner` ranks of a ring position have 1/inner of the heads each and count that share, so
    the sum over all ranks is that of one device.
    """
    found: list[int] = []
    for position in range(split.outer):
        queries = split.ring_tokens(seq, position)
        total = sum(
            call.pairs
            for other in range(split.outer)
            for call in attention_calls(queries, split.ring_tokens(seq, other), window)
        )
        found += [total // split.inner] * split.inner
    return found

"""Times of rings between ranks: forked ones on CPUs, or those that torchrun started on GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.estimate.fit import Sample
from fivefold.run.ranks import Pool, Worker

_ON_GPU = tuple(2**power for power in range(16, 30, 2))  # bytes of all ranks together
_ON_CPU = tuple(2**power for power in range(14, 25, 2))
_REPEATS = 3
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Launched(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    local_rank: int
    ranks: int


def launched() -> Launched | None:
    """What torchrun says of this process; None where it did not start it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    return Launched(*(int(os.environ[name]) for name in names))


def forked_rings(ranks: int, seconds: float, tick: Callable[[], None]) -> list[Sample]:
    """Between so many processes on this host, over gloo."""
    with Pool(ranks) as pool:
        tasks = [(_forked, (ranks, seconds))] * ranks
        answers = pool.run_each(tasks, on_phase=tick)
    return answers[0]


def _forked(worker: Worker, ranks: int, seconds: float) -> list[Sample]:
    with worker.joined(ranks):
        return _rings(torch.device("cpu"), _ON_CPU, seconds, worker.phase)


def launched_rings(mine: Launched, seconds: float) -> list[Sample]:
    """Between the GPUs of the processes that torchrun started, over NCCL."""
    device = torch.device("cuda", mine.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=5), device_id=device)
    found = _rings(device, _ON_GPU, seconds, lambda text: None)
    dist.destroy_process_group()
    return found


def _rings(
    device: torch.device, sizes: tuple[int, ...], seconds: float, say: Callable[[str], None]
) -> list[Sample]:
    """All-gathers and reduce-scatters of rising size, until rank 0's time is over."""
    ranks = dist.get_world_size()
    sizes = tuple(size - size % (4 * ranks) for size in sizes)
    calls = {
        (kind, size): _ring(kind, size, ranks, device)
        for size in sizes
        for kind in ("all-gather", "reduce-scatter")
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    until = time.perf_counter() + seconds
    while True:
        for key, call in calls.items():
            say(f"{key[0]} of {key[1]} bytes")
            if not times[key]:
                call()  # the first one connects
            times[key].append(_time(call, device))
        over = torch.tensor([float(time.perf_counter() > until)], device=device)
        dist.broadcast(over, 0)
        if over.item():
            break
    return [
        Sample(f"{kind} of {size} bytes", size * (1 - 1 / ranks), median(found), ranks - 1.0)
        for (kind, size), found in times.items()
    ]


def _ring(kind: str, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    part = torch.ones(size // 4 // ranks, device=device)
    whole = torch.ones(part.numel() * ranks, device=device)
    if kind == "all-gather":
        return lambda: _all_gather(whole, part)
    return lambda: _reduce_scatter(part, whole)


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from when all ranks are there to when the slowest is done."""
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    _finish(device)
    spent: Tensor = torch.tensor([(time.perf_counter() - start) / _REPEATS], device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent.item())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

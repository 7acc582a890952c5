"""Overlap, proved: collectives that take a set time behind compute that takes a set time.

Two ranks over gloo; every block sleeps in forward and in backward, so that ranks are truly parallel
on any machine, and every collective of the mesh lasts a set time on its axis. A row is good when
the overlapped order costs at most 1.15 times the larger of compute and traffic; the naive order,
which waits for every collective at once, costs their sum.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.parallel.data import Data, shard
from fivefold.parallel.flat import Options
from fivefold.parallel.mesh import Mesh, Pending

BLOCKS, WIDTH = 16, 64
FORWARD, BACKWARD = 0.020, 0.040


class Sleep(torch.autograd.Function):
    """A block's work: it sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradients[0]


class Block(nn.Module):
    """One weight and a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.linear(x))


class NaiveMesh(Mesh):
    """Waits for every collective where it is issued."""

    def _started(self, axis: str, work: Pending) -> Pending:
        pending = super()._started(axis, work)
        pending.wait()
        return pending


def one_step(model: nn.Module, data: Data) -> tuple[float, float]:
    """Seconds of forward and of backward with everything it brings to an end."""
    dist.barrier()
    start = time.perf_counter()
    loss = model(torch.ones(1, WIDTH)).sum()
    middle = time.perf_counter()
    with data.backward(last=True):
        loss.backward()
    data.finish()
    end = time.perf_counter()
    data.publish()
    data.wait()
    return middle - start, end - middle


def measure(kind: type[Mesh], zero: int, delay: float) -> tuple[float, float]:
    """The best of three steps, after one that warms up."""
    mesh = kind.build(Layout(shard=2, zero=zero), torch.device("cpu"), kv_heads=1)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    blocks = {str(place): [block] for place, block in enumerate(model)}
    data = shard(model, blocks, mesh, Options(zero), bucket=4 * (WIDTH * WIDTH + WIDTH))
    assert len(data.units) == BLOCKS
    one_step(model, data)
    mesh.delay = delay
    forward, backward = zip(*(one_step(model, data) for _ in range(3)), strict=True)
    return min(forward), min(backward)


def rows() -> list[tuple[str, float, float, float, float]]:
    """(what, compute, traffic, overlapped, naive) for each case."""
    table = []
    for zero, delay in ((0, 0.02), (1, 0.02), (1, 0.045)):
        compute, traffic = BLOCKS * BACKWARD, BLOCKS * delay
        overlapped, naive = (measure(kind, zero, delay)[1] for kind in (Mesh, NaiveMesh))
        table.append((f"gradient reduction, ZeRO-{zero}", compute, traffic, overlapped, naive))
    delay = 0.012
    both = [measure(kind, 3, delay) for kind in (Mesh, NaiveMesh)]
    forward, backward = zip(*both, strict=True)
    table.append(("gather ahead, forward, ZeRO-3", BLOCKS * FORWARD, BLOCKS * delay, *forward))
    moved = (2 * BLOCKS - 1) * delay  # the last block is still there from the forward
    table.append(("gather and reduce, backward, ZeRO-3", BLOCKS * BACKWARD, moved, *backward))
    return table


def run(rank: int, store: str, job: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    job()
    dist.destroy_process_group()


def report() -> None:
    table = rows()
    if dist.get_rank() == 0:
        print(f"{'':36} compute traffic  naive overlapped  over the larger")
        for what, compute, traffic, overlapped, naive in table:
            ratio = overlapped / max(compute, traffic)
            print(
                f"{what:<36} {compute:6.2f}s {traffic:6.2f}s {naive:5.2f}s {overlapped:9.2f}s "
                f"{ratio:10.3f} {'' if ratio <= 1.15 else 'above 1.15'}"
            )


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=run, args=(rank, f"{folder}/store", report)) for rank in range(2)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    raise SystemExit(max(one.exitcode or 0 for one in ranks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

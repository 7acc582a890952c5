"""Overlap, proved: collectives that take a set time behind compute that takes a set time.

Two ranks over gloo; every block sleeps in forward and in backward, so that ranks are truly parallel
on any machine, and every collective of the mesh lasts a set time on its axis. A row is good when
the overlapped order costs at most 1.15 times the larger of compute and traffic; the naive order,
which waits for every collective at once, costs their sum. The same for a ring of four context
ranks, whose hops go on behind attention on the block that came before.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from delayed_mesh import DelayedMesh
from torch import Tensor, nn

from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.splits import ContextSplit
from fivefold.model.batch import AttentionInfo, TokenBatch
from fivefold.parallel import context
from fivefold.parallel.context import ContextAttention
from fivefold.parallel.data import DataParallel, shard
from fivefold.parallel.mesh import Phase
from fivefold.parallel.units.flat_unit import UnitOptions

BLOCKS, WIDTH, RING = 16, 64, 4
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


class NaiveMesh(DelayedMesh):
    """Waits for every collective where it is issued."""

    def issue(self, *arguments: Any, **named: Any) -> Any:
        return Done(super().issue(*arguments, **named).wait())

    def pass_on(self, tensor: Tensor, axis: str) -> Any:
        return Done(super().pass_on(tensor, axis).wait())


class Done(NamedTuple):
    """A collective that was waited for at once."""

    found: Any

    def wait(self) -> Any:
        return self.found


def one_step(model: nn.Module, data: DataParallel) -> tuple[float, float]:
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


def measure(kind: type[DelayedMesh], zero: int, delay: float) -> tuple[float, float]:
    """The best of three steps, after one that warms up."""
    mesh = kind(Topology(Layout(shard=2, zero=zero)), torch.device("cpu"))
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    blocks = {str(place): [block] for place, block in enumerate(model)}
    data = shard(model, blocks, mesh, UnitOptions(zero), bucket=4 * (WIDTH * WIDTH + WIDTH))
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
        overlapped, naive = (measure(kind, zero, delay)[1] for kind in (DelayedMesh, NaiveMesh))
        table.append((f"gradient reduction, ZeRO-{zero}", compute, traffic, overlapped, naive))
    delay = 0.012
    both = [measure(kind, 3, delay) for kind in (DelayedMesh, NaiveMesh)]
    forward, backward = zip(*both, strict=True)
    table.append(("gather ahead, forward, ZeRO-3", BLOCKS * FORWARD, BLOCKS * delay, *forward))
    moved = (2 * BLOCKS - 1) * delay  # the last block is still there from the forward
    table.append(("gather and reduce, backward, ZeRO-3", BLOCKS * BACKWARD, moved, *backward))
    return table


def ring_rows() -> list[tuple[str, float, float, float, float]]:
    """The same for attention around a ring: a hop costs the larger of block and transfer."""
    table = []
    for block, transfer in ((0.020, 0.012), (0.020, 0.020), (0.020, 0.030)):
        times = []
        for kind in (DelayedMesh, NaiveMesh):
            split = ContextSplit(inner=1, outer=RING, zigzag=True, gathers=False)
            topology = Topology(Layout(cp=RING, zero=0), split=split)
            mesh = kind(topology, torch.device("cpu"))
            times.append(ring(mesh, split, block, transfer))
        hops = [(whole - block) / (RING - 1) for whole in times]  # nothing follows the last block
        table.append((f"a hop on a ring of {RING}", block, transfer, *hops))
    return table


def ring(mesh: DelayedMesh, split: ContextSplit, block: float, transfer: float) -> float:
    """Seconds of attention around the ring, the best of three."""

    def nap(q: Tensor, k: Tensor, v: Tensor, sees: object) -> tuple[Tensor, Tensor]:
        time.sleep(block)
        return q, q.sum(-1)

    seq = split.unit * 2
    attention = ContextAttention(mesh, Phase(), split, seq, "none")
    row = TokenBatch(*(torch.arange(seq)[None] for _ in range(3)))
    info = AttentionInfo(row.positions, None, None, row=row)
    q = torch.ones(1, 1, seq // RING, 8)
    mesh.delay = transfer
    best = float("inf")
    with patch.object(context, "attend", nap):
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            attention(q, q, q, info)
            best = min(best, time.perf_counter() - start)
    return best


def run(rank: int, world: int, store: str, job: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    job()
    dist.destroy_process_group()


def report(make: Callable[[], list[tuple[str, float, float, float, float]]]) -> None:
    table = make()
    if dist.get_rank() == 0:
        print(f"{'':36} compute traffic  naive overlapped  over the larger")
        for what, compute, traffic, overlapped, naive in table:
            ratio = overlapped / max(compute, traffic)
            print(
                f"{what:<36} {compute:6.3f}s {traffic:6.3f}s {naive:5.3f}s {overlapped:9.3f}s "
                f"{ratio:10.3f} {'' if ratio <= 1.15 else 'above 1.15'}"
            )


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    failed = 0
    for world, table in ((2, rows), (RING, ring_rows)):
        with tempfile.TemporaryDirectory() as folder:
            forked = multiprocessing.get_context("fork")
            ranks = [
                forked.Process(
                    target=run, args=(rank, world, f"{folder}/store", partial(report, table))
                )
                for rank in range(world)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
            failed = max(failed, *(one.exitcode or 0 for one in ranks))
    raise SystemExit(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Ranks that hang over NCCL: the hosts have issued the same, and the GPUs tell who is to blame."""

from __future__ import annotations

import os
import re

import pytest

from fivefold.core.errors import RankLost
from fivefold.launch.backend import NcclLibrary, forked_device, num_gpus
from fivefold.launch.processes import Pool
from fivefold.launch.watch.watchdog import Watchdog, watched
from fivefold.launch.worker import Worker

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

pytestmark = [
    pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one"),
    pytest.mark.skipif(
        num_gpus() < 4 and not NcclLibrary.current().may_share,
        reason="NCCL needs four GPUs, or one that NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share",
    ),
]

WORLD, PATIENCE, SOON = (0, 1, 2, 3), 4.0, 120.0
TP = {rank: (rank - rank % 2, rank - rank % 2 + 1) for rank in WORLD}
FOREVER = 10**12  # cycles
ISSUED = r"call \d+ on tp \(ranks 2 and 3\), all_reduce of 64 bytes"


class Steps:
    """The collectives of a small training of four ranks, tp=2: three sums each and one of all."""

    def __init__(self, worker: Worker, watchdog: Watchdog) -> None:
        self.rank, self.watchdog = worker.rank, watchdog
        groups = {pair: dist.new_group(list(pair), group_desc="tp") for pair in ((0, 1), (2, 3))}
        self.group = groups[TP[self.rank]]

    def note(self, axis: str) -> None:
        members = WORLD if axis == "world" else TP[self.rank]
        self.watchdog.note((axis, "all_reduce", 64, len(members)), members)

    def issue(self, axis: str) -> None:
        total = torch.ones(16, device="cuda")
        dist.all_reduce(total, group=None if axis == "world" else self.group)

    def step(self, number: int, fault: str = "", allowed: float = 0.0) -> None:
        self.watchdog.phase(f"step {number} 0F0", allowed)
        if fault == "kernel":
            torch.cuda._sleep(FOREVER)
        axes = ["tp", "tp", "tp", "world"]
        for place, axis in enumerate(axes):
            if not (fault == "skip" and place == 1):
                self.note(axis)
        if fault in ("skip", "lost"):
            del axes[1]
        if fault == "order":
            axes = ["tp", "tp", "world", "tp"]
        for axis in axes:
            self.issue(axis)
        torch.cuda.synchronize()


def training(worker: Worker, fault: str, guilty: int) -> None:
    if fault.endswith("timed"):
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
    observed = watched(worker, 4, PATIENCE, 2 * PATIENCE)
    with worker.joined(4, forked_device("cuda", "nccl", worker.rank, 4)), observed as watchdog:
        steps = Steps(worker, watchdog)
        steps.step(1, allowed=SOON)  # communicators, kernels
        steps.step(2, fault.split()[0] if worker.rank == guilty else "")


@pytest.mark.parametrize(
    ("fault", "guilty", "cause"),
    [
        # The hosts tell.
        (
            "skip",
            2,
            r"has not joined call 6 on tp \(ranks 2 and 3\), all_reduce of 64 bytes, which",
        ),
        # The host has noted the call and not issued it.
        (
            "lost",
            2,
            rf"and rank 3 wait .*rank 3 waits on its GPU in {ISSUED} for rank 2, which has",
        ),
        ("lost timed", 2, rf"rank 3 waits on its GPU in {ISSUED} for rank 2, which has not joined"),
        ("order", 3, rf"wait in a circle: .*rank 2 waits on its GPU in {ISSUED} for rank 3, whose"),
        ("kernel", 2, rf"same call, {ISSUED}"),
        ("kernel timed", 2, rf"has issued {ISSUED}, where rank 3 waits .* has not begun it"),
    ],
)
def test_the_rank_to_blame_is_named(fault: str, guilty: int, cause: str) -> None:
    with Pool(4, patience=SOON) as pool, pytest.raises(RankLost) as caught:
        pool.run(training, fault, guilty)
    assert re.search(cause, caught.value.cause, re.S), str(caught.value)
    if fault != "order":  # in which nobody is missing
        assert (caught.value.rank, caught.value.doing) == (2, "step 2 0F0"), str(caught.value)

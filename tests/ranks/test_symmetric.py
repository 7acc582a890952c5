"""Collectives over symmetric memory: which go there, what they give, and what if ranks have none.

The kernels need a GPU (`tests/gpu/symm_ranks.py`); what stands for them here is gloo.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.layout import Weight
from fivefold.core.model.presets import load
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate import Request
from fivefold.generate.layout import TP, LayoutEngine, mesh_of, plan_of, share_memory, stage_of
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import SymmetricBuffer, transport
from fivefold.parallel.symmetric import SHARING, Computed

CPU = torch.device("cpu")
MOST = 4096  # bytes
PLAN = plan_of(load("tiny"), PlanOptions("tiny", layout="tp=2", set={"layers": "2"}))


class GlooBuffer(SymmetricBuffer):
    """Takes few bytes on a CPU, and computes by gloo what the kernels compute."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.calls = Counter[str]()

    def takes(self, x: Tensor) -> bool:
        return x.nbytes <= MOST

    def total(self, x: Tensor, into: Tensor) -> Computed:
        self.calls["total"] += 1
        return Computed(into.copy_(transport.total(x, "sum", self.group).wait()))

    def gather(self, x: Tensor, dim: int) -> Computed:
        self.calls["gather"] += 1
        return Computed(transport.gather(x, dim, self.group).wait())


def weight_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
    numbers = torch.randn(math.prod(weight.shape), generator=generator).mul_(0.1).to(dtype)
    return numbers.view(weight.shape)


def generated(worker: Worker, shares: bool) -> Any:
    """Tokens of a rank, the collectives that it recorded, those of few bytes, and those that went
    by its buffer."""
    with worker.joined(2):
        mesh = mesh_of(PLAN, CPU, False)
        assert share_memory(mesh) == "" and not mesh.symmetric, "gloo has no device memory"
        buffer = GlooBuffer(mesh.groups[TP], CPU)
        if shares:
            mesh.symmetric[TP] = buffer
        stage = stage_of(PLAN, mesh, torch.float32, False)
        stage.fill(weight_of)
        engine = LayoutEngine(PLAN, mesh, stage, 64)
        prompts = [tuple(range(1, 5)), tuple(range(2, 150))]  # one of few bytes, and one of many
        ended = engine.run(Request(str(i), prompt, 12) for i, prompt in enumerate(prompts))
        few = Counter[str]()
        for record, count in mesh.records.items():
            if record.axis == TP:
                few[record.kind] += count * (record.bytes <= MOST)
                few["others"] += count * (record.bytes > MOST)
        engine.close()
        mesh.close_groups()
        assert not mesh.symmetric, "memory goes before the groups"
        return [ended[str(i)].tokens for i in range(2)], mesh.records, few, buffer.calls


def test_few_bytes_go_by_the_buffer_and_records_stay(pool: Pool) -> None:
    plain = pool.run_each([(generated, (False,))] * 2)
    shared = pool.run_each([(generated, (True,))] * 2)
    for without, with_it in zip(plain, shared, strict=True):
        assert without[:2] == with_it[:2], "tokens, and kinds, bytes, groups and counts"
        few, calls = with_it[2:]
        assert not without[3] and few["others"], "one prompt is too long for the buffer"
        assert calls == {"total": few["all_reduce"], "gather": few["all_gather"]}


def refused(worker: Worker, environment: dict[str, str], host: str, fails: int) -> Any:
    """What a rank hears of a buffer that some rank cannot have, and which steps it took."""
    steps: list[str] = []

    def meet(buffer: SymmetricBuffer) -> None:
        steps.append("meet")
        if worker.rank == fails:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nException raised from here")

    with worker.joined(2), patch.dict(os.environ, environment):
        with (
            patch("socket.gethostname", lambda: host.format(worker.rank)),
            patch.object(SymmetricBuffer, "_meet", meet),
            patch.object(SymmetricBuffer, "_try", lambda buffer: steps.append("try")),
        ):
            buffer, reason = SymmetricBuffer.of(dist.group.WORLD, CPU)
        return buffer is not None, reason, steps


@pytest.mark.parametrize(
    ("environment", "host", "fails", "expected"),
    [
        ({SHARING: "1"}, "a", 1, (False, "pidfd_getfd: Operation not permitted", ["meet"])),
        ({SHARING: "1"}, "a", -1, (True, "", ["meet", "try"])),
        ({SHARING: "0"}, "a", -1, (False, "", [])),  # they share a device, and take turns on it
        ({SHARING: "1"}, "a{}", -1, (False, "", [])),  # several hosts
    ],
    ids=["one rank may not", "all may", "turns on a GPU", "two hosts"],
)
def test_all_ranks_have_a_buffer_or_none(
    pool: Pool, environment: dict[str, str], host: str, fails: int, expected: Any
) -> None:
    assert pool.run_each([(refused, (environment, host, fails))] * 2) == [expected] * 2


def without_cuda(worker: Worker) -> Any:
    """What this torch says, whose kernels are missing."""
    with worker.joined(2), patch.dict(os.environ, {SHARING: "1"}):
        return SymmetricBuffer.of(dist.group.WORLD, CPU)


def test_what_torch_lacks_is_a_reason(pool: Pool) -> None:
    (first, reason), second = pool.run_each([(without_cuda, ())] * 2)
    assert first is None and reason and second == (None, reason)

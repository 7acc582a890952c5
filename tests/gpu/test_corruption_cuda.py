"""Flipped bits on a GPU, in a process of its own; the same code runs on a CPU with `cpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.backend import num_gpus

ROOT = Path(__file__).parents[2]

CODE = """
import sys, torch
from dataclasses import replace
from functools import partial
from benchmarks.flips import flip, plan_of
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.parallel.bit_sums import bit_sum
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import Guard, step, updater_of
from fivefold.train.recovery.integrity import Integrity
from fivefold.train.recovery.integrity import NOTHING

device = torch.device(sys.argv[1])
for dtype in (torch.float32, torch.bfloat16):
    x = torch.randn(1001).to(dtype)[1:]
    assert bit_sum(x).item() == bit_sum(x.to(device)).item()

plan, narrow = plan_of(layout="dp=1"), device.type == "cuda"
dtype = torch.bfloat16 if narrow else torch.float32


def job_of():
    job = compose(plan, Mesh.of(plan, device), seed=0, dtype=dtype)
    return job, updater_of(job, Recipe(), master=narrow)


def run(job, updater, number, **said):
    batches = samples(plan.batch, plan.shape.vocab, seed=0, step=number).to(device).of(0)
    uncount = partial(updater.resume_after, updater.count) if updater.skips else None
    return step(job, updater, batches, 1.0, Guard(uncount=uncount, **said))


torch.use_deterministic_algorithms(True)
job, updater = job_of()
integrity = Integrity(job, updater, 1)
twin = job_of()
for number in range(1, 4):
    integrity.begin(number)
    thrown = run(job, updater, number, bound=NOTHING, watch=integrity)
    assert thrown.skipped and updater.count == number - 1
    kept, other = run(job, updater, number, watch=integrity), run(*twin, number)
    assert not kept.skipped and not kept.flips.any()
    assert float(kept.loss) == float(thrown.loss) == float(other.loss)


class OfAllRanks:
    def note(self, local):
        assert local.shape == (2,) and local.isfinite().all()

    def is_shared(self, loss, norm):
        return loss > 0 and norm > 0


integrity.begin(4)
shared = run(job, updater, 4, bound=NOTHING, watch=integrity, spikes=OfAllRanks())
assert not shared.skipped and updater.count == 4 and not run(*twin, 4).skipped
for one, other in zip(job.owned, twin[0].owned, strict=True):
    assert one.tensor.equal(other.tensor), one.row.name

flip(integrity.seal.tensors[-1].tensor, 0.5, 3)
integrity.begin(5)
assert run(job, updater, 5, watch=integrity).flips.tolist() == [0.0, 1.0]
print(integrity.error())
"""


def ran(device: str) -> str:
    command = [sys.executable, "-c", CODE, device]
    said = {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = {**os.environ, **said}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one")
def test_a_gpu_throws_a_step_away_and_finds_a_flip() -> None:
    assert "step 5: rank 0 on" in ran("cuda")


def test_a_cpu_does_the_same() -> None:
    """So that what runs on a GPU is known to be up to date."""
    assert "step 5: rank 0 on" in ran("cpu")

"""Training over NCCL, on ranks that share one GPU.

    python -m tests.gpu.train_nccl

A run of 30 steps in float64 loses a rank, and another layout resumes it: its weights are those of
ranks over gloo. A rank leaves out a collective: the watchdog names it. Kills of which
nothing is left, to the bit, are in `benchmarks/chaos.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.mesh import Mesh
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainSettings

STEPS, CLOSE = 30, 1e-12
MODEL = ("tiny-moe", "--microbatches", "2", "--seq", "32", "--dtype", "float64")
SIZES = ("--set", "layers=2 save_every=5 lr=1e-3")
GPU = ("--device", "cuda", "--backend", "nccl")


def train(out: Path, *words: str) -> subprocess.Popen[str]:
    steps = ("--batch", "4", "--steps", str(STEPS), "--out", str(out))
    command = [sys.executable, "-m", "fivefold", "train", *MODEL, *SIZES, *steps, *words]
    errors = out.with_suffix(".err").open("a", encoding="utf-8")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def ended(process: subprocess.Popen[str], out: Path, code: int) -> str:
    found = process.wait(timeout=200)
    said = out.with_suffix(".err").read_text("utf-8")
    assert found == code, f"exit code {found} instead of {code}: {said[-2000:]}"
    return said


def kill_after(out: Path, process: subprocess.Popen[str], step: int) -> None:
    """SIGKILL one rank when so many steps are done."""
    metrics, until = out / "metrics.jsonl", time.monotonic() + 200
    while process.poll() is None and time.monotonic() < until:
        if metrics.exists() and len(metrics.read_text("utf-8").splitlines()) >= step:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children.split()[-1]), signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError(f"no {step} steps: {out.with_suffix('.err').read_text()[-2000:]}")


def killed_and_resumed(folder: Path) -> str:
    """Weights of NCCL ranks that were killed and changed their layout, beside those of gloo."""
    calm, shaken = folder / "gloo", folder / "nccl"
    gloo = ("--device", "cuda", "--backend", "gloo")  # CPUs would draw other first weights
    ended(train(calm, "--layout", "dp=2 tp=2 ep=2", *gloo), calm, 0)
    process = train(shaken, "--layout", "dp=2 tp=2 ep=2", *GPU)
    kill_after(shaken, process, 12)
    said = ended(process, shaken, 1)
    assert "was killed by SIGKILL" in said, said
    ended(train(shaken, "--layout", "tp=2 pp=2 ep=2", *GPU, "--resume"), shaken, 0)
    readers = [Reader(latest(out) or out) for out in (calm, shaken)]
    assert set(readers[0].tensors) == set(readers[1].tensors)
    # Not the states: where a gradient is rounding alone, so is its mean.
    weights = [key for key in readers[0].tensors if key.startswith("model/")]
    worst = 0.0
    for key in weights:
        one, other = (reader.read(key).double() for reader in readers)
        if one.numel():
            worst = max(worst, float((one - other).abs().max() / one.abs().max().clamp(min=1e-30)))
    assert worst <= CLOSE, f"{worst:.1e}"
    losses = [json.loads(line)["loss"] for line in (shaken / "metrics.jsonl").open()]
    assert len(losses) == STEPS
    return (
        f"{len(weights)} weights after {STEPS} steps: largest difference {worst:.1e} of the largest"
    )


def skipping(worker: Worker, plan: Any, settings: TrainSettings) -> Any:
    """Train; rank 1 leaves out its fifth reduce-scatter."""
    calls, inner = [0], Mesh.reduce_scatter

    def reduce_scatter(self: Mesh, output: torch.Tensor, full: torch.Tensor, axis: str) -> Any:
        calls[0] += 1
        if worker.rank == 1 and calls[0] == 5:
            return SimpleNamespace(wait=lambda: None)
        return inner(self, output, full, axis)

    with patch.object(Mesh, "reduce_scatter", reduce_scatter):
        return run_rank(worker, plan, settings)


def named(folder: Path) -> str:
    """What the watchdog says of the rank that is missing."""
    plan = resolve(PlanOptions("tiny", layout="dp=2", zero=2, set={"layers": "2"}), small=True)
    settings = TrainSettings(Recipe(steps=20, data="synthetic"), "float32", "cuda", "nccl")
    began = time.monotonic()
    try:
        with Pool(2, patience=150.0) as pool:
            pool.run_each([(skipping, (plan, settings))] * 2)
    except RankLost as lost:
        seconds = time.monotonic() - began
        assert lost.rank == 1 and "reduce_scatter" in lost.cause, str(lost)
        return f"{seconds:.0f} s: lost {' '.join(str(lost).split())[:300]}"
    raise AssertionError("nobody was named")


def main() -> int:
    checks: dict[str, Callable[[Path], str]] = {
        "killed, resumed in another layout, beside gloo": killed_and_resumed,
        "a rank leaves out a collective": named,
    }
    failed = 0
    for name, check in checks.items():
        with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
            try:
                found = f"pass: {check(Path(folder))}"
            except (AssertionError, RankLost, subprocess.TimeoutExpired) as error:
                failed, found = failed + 1, f"FAIL: {' '.join(str(error).split())[:1500]}"
        print(f"{name}: {found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

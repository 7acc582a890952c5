"""Recovery over NCCL: four ranks share one GPU, one is killed, and the others go on from memory.

    python -m tests.gpu.recover_nccl

Where all ranks come back, weights, states and losses are those of a run without faults, to the
bit. Where the lost replica is left out until the next loss, weights are within 1e-10 in float64.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fivefold.commands.train import train
from fivefold.commands.train_start import RestartedRun
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.records.steps import StepRecord
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest

STEPS, CLOSE = 12, 1e-10
JOB: dict[str, Any] = {"layout": "dp=4", "seq": 32, "batch": 8, "layers": 2, "steps": STEPS}
JOB |= {"dtype": "float64", "device": "cuda", "backend": "nccl", "deterministic": True}
JOB |= {"copy_every": 2, "compile": False}


class Killer:
    """Kills a rank when a step is over for the first time, and collects what is said."""

    def __init__(self, ranks: dict[int, int]) -> None:
        self.ranks, self.said, self.restarts = dict(ranks), list[str](), 0

    def __call__(self, report: Any) -> None:
        if isinstance(report, StepRecord) and report.step in self.ranks:
            found = sorted(multiprocessing.active_children(), key=lambda each: each.pid or 0)
            os.kill(found[self.ranks.pop(report.step)].pid or 0, signal.SIGKILL)
        self.restarts += isinstance(report, RestartedRun)
        if isinstance(report, str):
            self.said.append(report)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = Reader(latest(folder) or folder)
    return {key: reader.read(key) for key in reader.tensors}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def shaken(folder: Path, kills: dict[int, int], **more: Any) -> tuple[Path, str]:
    """A run whose ranks are killed, and what it says of its restarts."""
    out, killer = folder / ("shrunk" if more else "killed"), Killer(kills)
    train("tiny", out=out, restarts=len(kills), on_progress=killer, **JOB, **more)
    assert killer.restarts == len(kills), f"{killer.restarts} restarts"
    read = [words for words in killer.said if words.startswith("read step")]
    assert len(read) == len(kills) and all("copies in memory" in each for each in read), read
    found = lines(out)
    samples = [each["first_sample"] + row for each in found for row in range(each["num_samples"])]
    assert samples == list(range(STEPS * JOB["batch"])), "a sample was lost or read twice"
    return out, "; ".join(read)


def same_layout(folder: Path, calm: Path) -> str:
    out, said = shaken(folder, {5: 2})
    wanted, found = tensors_of(calm), tensors_of(out)
    differ = [key for key, each in wanted.items() if not each.equal(found[key])]
    assert not differ, f"{len(differ)} of {len(wanted)} tensors differ, such as {differ[0]}"
    assert [each["loss"] for each in lines(calm)] == [each["loss"] for each in lines(out)]
    return f"{len(wanted)} tensors equal to the bit; {said}"


def fewer_replicas(folder: Path, calm: Path) -> str:
    out, said = shaken(folder, {5: 2, 9: 0}, shrink=True)
    worlds = [each["world"] for each in lines(out)]
    assert set(worlds) == {3, 4} and worlds[-1] == 4, worlds
    found, worst = tensors_of(out), 0.0
    for key, each in tensors_of(calm).items():
        if key.startswith("model/"):
            worst = max(worst, float((each - found[key]).abs().max() / each.abs().max()))
    assert worst <= CLOSE, f"{worst:.1e}"
    return f"ranks {worlds}, weights within {worst:.1e}; {said}"


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fivefold-") as name:
        calm = Path(name) / "calm"
        train("tiny", out=calm, **JOB)
        for words, check in (
            ("one of 4 NCCL ranks is killed", same_layout),
            ("and its replica is left out for a while", fewer_replicas),
        ):
            try:
                found = f"pass: {check(Path(name), calm)}"
            except (AssertionError, RankLost, FivefoldError) as error:
                failed, found = failed + 1, f"FAIL: {' '.join(str(error).split())[:1500]}"
            print(f"{words}: {found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A run that loses ranks goes on from copies in memory: as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.commands.train import train
from fivefold.commands.train_start import RestartedRun
from fivefold.records.steps import StepRecord
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest

STEPS = 8
SMALL: dict[str, Any] = {"layout": "dp=4", "seq": 16, "batch": 8, "layers": 1, "steps": STEPS}
SMALL |= {"dtype": "float64", "device": "cpu"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = latest(folder)
    assert found is not None
    reader = Reader(found)
    return {key: reader.read(key) for key in reader.tensors}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killer:
    """Kills a rank when a step is over for the first time; `breaks` the copies before a restart."""

    def __init__(self, ranks: dict[int, int], breaks: bool = False) -> None:
        self.breaks = breaks
        self.ranks, self.said, self.restarts = dict(ranks), list[str](), list[RestartedRun]()

    def __call__(self, report: Any) -> None:
        if isinstance(report, StepRecord) and report.step in self.ranks:
            ranks = sorted(multiprocessing.active_children(), key=lambda each: each.pid or 0)
            os.kill(ranks[self.ranks.pop(report.step)].pid or 0, signal.SIGKILL)
        if isinstance(report, RestartedRun):
            self.restarts.append(report)
            for each in descriptors() if self.breaks else ():
                os.pwrite(each, bytes(8), 0)
        if isinstance(report, str):
            self.said.append(report)


def descriptors() -> list[int]:
    """The anonymous memory of this process."""
    found: list[int] = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            if "memfd:fivefold-" in str(each.readlink()):
                found.append(int(each.name))
    return found


def both(tmp_path: Path, kills: dict[int, int], **said: Any) -> tuple[Path, Path, Killer]:
    """A run without faults, and one whose ranks are killed."""
    calm, shaken, killer = tmp_path / "calm", tmp_path / "shaken", Killer(kills)
    train("tiny", out=calm, **SMALL, **{k: v for k, v in said.items() if k != "shrink"})
    train("tiny", out=shaken, restarts=len(kills), on_progress=killer, **SMALL, **said)
    assert len(killer.restarts) == len(kills) and not descriptors()
    assert [each["step"] for each in lines(shaken)] == list(range(1, STEPS + 1))
    samples = [
        each["first_sample"] + row for each in lines(shaken) for row in range(each["num_samples"])
    ]
    assert samples == list(range(STEPS * SMALL["batch"])), "every sample once"
    return calm, shaken, killer


@pytest.mark.sample(0.15)
def test_the_same_layout_goes_on_to_the_bit(tmp_path: Path) -> None:
    calm, shaken, killer = both(tmp_path, {3: 1, 6: 3}, copy_every=2)
    wanted, found = tensors_of(calm), tensors_of(shaken)
    assert wanted.keys() == found.keys()
    assert all(each.equal(found[key]) for key, each in wanted.items())
    assert [each["loss"] for each in lines(calm)] == [each["loss"] for each in lines(shaken)]
    read = [words for words in killer.said if words.startswith("read step")]
    assert len(read) == 2 and all("from copies in memory" in words for words in read)


@pytest.mark.sample(0.15)
def test_a_replica_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """8 microbatches over 3 data ranks: the first two take three, the last one two."""
    calm, shaken, killer = both(tmp_path, {3: 2, 6: 0}, copy_every=1, shrink=True)
    worlds = [each["world"] for each in lines(shaken)]
    assert worlds[0] == worlds[-1] == 4 and set(worlds) == {3, 4}
    assert "the first 2 data ranks take the odd microbatches" in str(killer.restarts[0])
    wanted, found = tensors_of(calm), tensors_of(shaken)
    for key, each in wanted.items():
        if key.startswith("model/"):
            assert (each - found[key]).abs().max() <= 1e-10 * each.abs().max(), key
    for one, other in zip(lines(calm), lines(shaken), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-10)


@pytest.mark.sample(0.1)
def test_the_disk_is_read_where_no_copy_is_left(tmp_path: Path) -> None:
    killer = Killer({5: 2}, breaks=True)
    said = {"copy_every": 1, "save_every": 2, "restarts": 1}
    train("tiny", out=tmp_path, on_progress=killer, **SMALL, **said)
    (read,) = [words for words in killer.said if words.startswith("read step")]
    assert read.startswith(("read step 2 from the disk", "read step 4 from the disk")), read
    assert [each["step"] for each in lines(tmp_path)] == list(range(1, STEPS + 1))

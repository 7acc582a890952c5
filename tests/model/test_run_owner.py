"""One start at a time writes into a run, and one that was replaced publishes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.commands.train import train
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.layout.boxes import whole_box
from fivefold.launch import processes
from fivefold.optim.optimizer import StateInMemory
from fivefold.records.run_owner import OWNER, own_run
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import Facts, published
from fivefold.train.checkpoint.ranks import RunTakenOver
from fivefold.train.checkpoint.storage import CheckpointTensor

SIZE = (4, 3)
HOLDS = """
import sys
from pathlib import Path
from fivefold.records.run_owner import own_run
with own_run(Path(sys.argv[1]), 0.0):
    print("mine", flush=True)
    sys.stdin.read()
"""


def tensors() -> list[CheckpointTensor]:
    state = StateInMemory(torch.zeros(SIZE))
    return [CheckpointTensor("model/a", SIZE, torch.float32, (whole_box(SIZE),), state)]


def test_the_holder_is_named_and_its_death_frees_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "mine\n"
            words = rf"is being trained by process {other.pid} on \S+ since 20.*--out"
            with pytest.raises(FivefoldError, match=words), own_run(tmp_path, 0.2):
                raise AssertionError
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    with own_run(tmp_path, 2.0):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


def test_ranks_that_outlive_their_launcher_still_own_the_run(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    (tmp_path / "run.json").touch()
    with own_run(tmp_path, 0.0):
        rank = context.Process(target=ended.wait, args=(20,))
        rank.start()
    try:
        with pytest.raises(FivefoldError, match="is being trained"), own_run(tmp_path, 0.2):
            raise AssertionError
    finally:
        ended.set()
        rank.join()
    with own_run(tmp_path, 2.0):
        pass


def test_a_start_that_was_replaced_publishes_nothing(tmp_path: Path) -> None:
    """Its lock was lost: here with the file that it was on."""
    folder = tmp_path / "checkpoints"
    with own_run(tmp_path, 0.0) as stale:
        old = Checkpoints(folder, 1, None, fence=stale.publishing)
        old.save(tensors(), Facts(1), wait=True)
        (tmp_path / OWNER).unlink()
        with own_run(tmp_path, 0.0) as fresh:
            new = Checkpoints(folder, 1, None, fence=fresh.publishing)
            new.save(tensors(), Facts(2), wait=True)
            (part := folder / "step-00000003.part").mkdir()  # being written
            with pytest.raises(RunTakenOver, match="another start has taken over this run"):
                old.save(tensors(), Facts(9), wait=True)
            assert part.exists()
            assert [each.name for each in published(folder)] == ["step-00000002"]


def test_the_fence_is_looked_at_again_before_a_checkpoint_gets_its_name(tmp_path: Path) -> None:
    folder, written = tmp_path / "checkpoints", tensors()[0]
    with own_run(tmp_path, 0.0) as stale:

        class Replaced(StateInMemory):
            """While this is read, another start takes the run."""

            def read(self) -> torch.Tensor:
                (tmp_path / OWNER).unlink(missing_ok=True)
                with own_run(tmp_path, 0.0) as fresh, fresh.publishing():
                    (tmp_path / "run.json").touch()  # its owner's file stays
                return super().read()

        value = Replaced(torch.zeros(SIZE))
        late = CheckpointTensor("model/a", SIZE, torch.float32, written.boxes, value)
        with pytest.raises(RunTakenOver):
            Checkpoints(folder, 1, None, fence=stale.publishing).save([late], Facts(9), wait=True)
    assert published(folder) == []


def test_a_deleted_owner_file_ends_nothing(tmp_path: Path) -> None:
    with own_run(tmp_path, 0.0) as ticket:
        (tmp_path / OWNER).unlink()
        checkpoints = Checkpoints(tmp_path / "checkpoints", 1, None, fence=ticket.publishing)
        checkpoints.save(tensors(), Facts(1), wait=True)
        assert len(published(tmp_path / "checkpoints")) == 1


def test_two_trainings_of_one_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "one"
    given = {"out": out, "resume": True, "seq": 16, "batch": 2, "data": "synthetic"}

    def second(*_: object, **__: object) -> None:
        train("tiny", layout="dp=1", **given)

    ranks = SimpleNamespace(stopping=False, run_each=second)
    pool = nullcontext(ranks)
    monkeypatch.setattr(processes, "Pool", lambda *_, **__: pool)
    with pytest.raises(FivefoldError, match=rf"is being trained by process {os.getpid()} "):
        train("tiny", layout="dp=1", **given)

    def lost(*_: object, **__: object) -> None:
        raise RankLost(0, "build", "died")

    ranks.run_each = lost
    with pytest.raises(RankLost):  # it is free again
        train("tiny", layout="dp=1", **given)


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FivefoldError, match="nowhere"):
        train("tiny", out=tmp_path / "runs" / "one", data=str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []

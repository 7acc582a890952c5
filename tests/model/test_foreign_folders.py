"""Folders of others: what is in them is data, and nothing of it runs or replaces ours."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold import cli
from fivefold.commands.train import train
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.layout.boxes import whole_box
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.model import presets as models
from fivefold.launch import processes
from fivefold.optim.optimizer import StateInMemory
from fivefold.train.checkpoint.checkpoints import Checkpoints, Reader, write_checkpoint
from fivefold.train.checkpoint.folders import (
    Facts,
    FileChecksum,
    Manifest,
    checksum_of,
    newer_format,
)
from fivefold.train.checkpoint.of_run import open_run
from fivefold.train.checkpoint.ranks import CannotSave
from fivefold.train.checkpoint.storage import CheckpointTensor

SIZE = (4, 3)
PLAN = 'model = "tiny"\nlayout = "dp=1"\nseq = 16\nbatch = 2\n'


class Planted:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def checkpoint(parent: Path, step: int = 1) -> Path:
    value = torch.full(SIZE, float(step))
    return write_checkpoint(parent, [("model/a", SIZE, value.dtype, lambda: value)], Facts(step))


def wanted() -> list[CheckpointTensor]:
    state = StateInMemory(torch.zeros(SIZE))
    return [CheckpointTensor("model/a", SIZE, torch.float32, (whole_box(SIZE),), state)]


def signed(folder: Path, **changes: Any) -> None:
    """Write the manifest anew, with the checksums of what is there: anybody can."""
    body = json.loads((folder / "manifest.json").read_text())
    facts = Facts(**body["facts"] | changes)
    files: dict[str, FileChecksum] = {name: checksum_of(folder / name) for name in body["files"]}
    (folder / "manifest.json").write_text(Manifest(facts, files).text())


def alone(path: Path, trace: Path) -> None:
    path.write_bytes(pickle.dumps(Planted(trace)))


def inside(path: Path, trace: Path) -> None:
    """In valid metadata, where nothing reads it."""
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Planted(trace)
    path.write_bytes(pickle.dumps(metadata))


def dotted(path: Path, trace: Path) -> None:
    """A name that passes for one of torch's."""
    code = f"cos\nmkdir\n(V{trace}\ntR."
    path.write_bytes(b"\x80\x04\x8c\x05torch\x8c\x0bSize.mkdir\x93." + code.encode())


def another_file(path: Path, trace: Path) -> None:
    """Values that lie outside of the checkpoint."""
    metadata = pickle.loads(path.read_bytes())
    (place,) = metadata.storage_data.values()
    place.relative_path = f"../{trace.name}"
    path.write_bytes(pickle.dumps(metadata))


def class_changed(path: Path, trace: Path) -> None:
    """A class is given another attribute, by a state of slots."""
    name = f"c{MetadataIndex.__module__}\nMetadataIndex\n"
    path.write_bytes(f"{name}(N(dVmade_here\nVx\nstb.".encode())


FORGERIES = [alone, inside, dotted, another_file, class_changed]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_foreign_checkpoint_runs_nothing(
    tmp_path: Path, forge: Callable[[Path, Path], None]
) -> None:
    trace, folder = tmp_path / "ran", checkpoint(tmp_path / "checkpoints")
    forge(folder / ".metadata", trace)
    signed(folder)
    with pytest.raises(FivefoldError, match=r"\.metadata: "):  # export, generate, eval
        Reader(folder)
    with pytest.raises(FivefoldError, match=r"\.metadata: "):  # resume
        Checkpoints(folder.parent, 1, None).load(wanted(), lambda _: None)
    assert not trace.exists() and not hasattr(MetadataIndex, "made_here")


@pytest.mark.parametrize("forge", [alone, inside])
def test_a_forgery_would_run(tmp_path: Path, forge: Callable[[Path, Path], None]) -> None:
    """Else its absence above shows nothing."""
    folder = checkpoint(tmp_path)
    forge(folder / ".metadata", tmp_path / "ran")
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()


def tiny_run(folder: Path) -> Path:
    """A run of a small model, made without a training; returns its checkpoint."""
    shape = models.load("tiny")
    tensors = [
        (f"model/{each.name}", each.shape, torch.float32, lambda each=each: torch.zeros(each.shape))
        for each in (*weights(shape), *buffers(shape))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(PLAN)
    return write_checkpoint(folder / "checkpoints", tensors, Facts(1, plan=PLAN))


def test_a_foreign_run_is_not_exported(tmp_path: Path) -> None:
    shape, folder = models.load("tiny"), tiny_run(tmp_path)
    open_run(tmp_path, shape, None, lambda _: None)  # it is a good one
    inside(folder / ".metadata", tmp_path / "ran")
    signed(folder)
    told: list[str] = []
    with pytest.raises(FivefoldError, match="no good checkpoint"):
        open_run(tmp_path, shape, None, told.append)
    assert "posix.mkdir" in told[0] and "could run any program" in told[0]
    assert not (tmp_path / "ran").exists()


def renumbered(folder: Path) -> str:
    """A checkpoint as a later program might write it; returns its manifest."""
    body = json.loads((folder / "manifest.json").read_text())
    text = json.dumps(body | {"format": 3, "files": ["in another way"], "sha256": "another"})
    (folder / "manifest.json").write_text(text)
    return text


def test_a_newer_format_is_neither_damaged_nor_replaced(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    newer = checkpoint(tmp_path, 2)
    text = renumbered(newer)
    (left := tmp_path / "step-00000003.part").mkdir()
    told: list[str] = []
    with pytest.raises(FivefoldError, match=r"newer format 3.*needs a newer fivefold"):
        Checkpoints(tmp_path, 1, None).load(wanted(), told.append)
    assert not told and left.exists()  # whoever reads it may be writing
    with pytest.raises(FivefoldError, match="needs a newer fivefold"):
        Reader(newer)
    checkpoints = Checkpoints(tmp_path, 1, None)
    with pytest.raises(CannotSave, match="needs a newer fivefold"):
        checkpoints.save(wanted(), Facts(2), wait=True)
    checkpoints.save(wanted(), Facts(5), wait=True)  # and older ones are removed
    assert (newer / "manifest.json").read_text() == text
    assert {each.name for each in tmp_path.iterdir()} == {newer.name, "step-00000005"}


def test_export_says_newer_and_takes_no_older_one(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000001").rename(checkpoints / "step-00000002")
    renumbered(checkpoints / "step-00000002")
    tiny_run(tmp_path)
    with pytest.raises(FivefoldError, match="needs a newer fivefold"):
        open_run(tmp_path, models.load("tiny"), None, lambda _: None)
    assert open_run(tmp_path, models.load("tiny"), 1, lambda _: None).facts.step == 1


def test_export_leaves_a_folder_that_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(tmp_path / "run")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    theirs = tmp_path / "out.part"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("three years of work")
    assert cli.run(words) == 2 and "no export has left it" in capsys.readouterr().err
    assert (theirs / "thesis.txt").read_text() == "three years of work"
    (theirs / ".fivefold-export").touch()  # what a killed export leaves
    assert cli.run(words) == 0 and not theirs.exists()
    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"config.json"}
    assert not list((tmp_path / "out").glob(".*"))


def test_import_overwrites_nothing_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(tmp_path / "run")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    words = ["import", str(tmp_path / "out"), "-o", str(tmp_path / "new")]
    (tmp_path / "new").mkdir()
    plan = tmp_path / "new" / "plan.toml"
    plan.write_text("mine")
    capsys.readouterr()
    assert cli.run(words) == 2 and "another plan.toml already" in capsys.readouterr().err
    assert plan.read_text() == "mine" and [each.name for each in plan.parent.iterdir()] == [
        "plan.toml"
    ]
    plan.unlink()
    assert cli.run(words) == 0
    shutil.rmtree(tmp_path / "new" / "checkpoints")  # an import that was killed
    assert cli.run(words) == 0


def test_a_resume_that_fails_leaves_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it before its first step."""
    tiny_run(tmp_path)

    def lost(*_: object, **__: object) -> None:
        raise RankLost(0, "build", "died")

    ranks = SimpleNamespace(stopping=False, run_each=lost)
    pool = nullcontext(ranks)
    monkeypatch.setattr(processes, "Pool", lambda *_, **__: pool)
    options = {"out": tmp_path, "resume": True, "seq": 16, "batch": 2, "data": "synthetic"}
    with pytest.raises(RankLost):
        train("tiny", lr=0.5, **options)
    assert (tmp_path / "plan.toml").read_text() == PLAN


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_tensor_file_that_was_sealed_again_is_refused_by_name(tmp_path: Path, file: str) -> None:
    """Its checksums are right, whatever was damaged before they were computed."""
    folder, rng = checkpoint(tmp_path), random.Random(0)
    data, refused = (folder / file).read_bytes(), 0
    for number in range(40):
        bad = bytearray(data)
        for _ in range(1 + number % 3):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        (folder / file).write_bytes(bad[: rng.randrange(len(bad))] if number % 5 == 0 else bad)
        signed(folder)
        try:
            Reader(folder).read("model/a")
        except FivefoldError as error:
            refused += 1
            assert str(folder) in str(error) or "tensor of a checkpoint" in str(error)
    assert refused > 5


def test_a_pipe_in_the_place_of_a_manifest_is_not_opened(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(FivefoldError, match="is no regular file"):
        Reader(folder)
    assert newer_format(folder) is None

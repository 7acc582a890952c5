"""Folders of others: what is in them is data, and nothing of it runs or replaces ours."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fivefold.core import models
from fivefold.core.boxes import whole_box
from fivefold.core.errors import FivefoldError
from fivefold.core.weights import buffers, weights
from fivefold.optim.optimizer import StateInMemory
from fivefold.train.checkpoint import Checkpoints, CheckpointTensor, Facts, Reader, write_checkpoint
from fivefold.train.checkpoint.folders import FileChecksum, Manifest, checksum_of
from fivefold.train.checkpoint.of_run import open_run

SIZE = (4, 3)


class Planted:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def checkpoint(parent: Path, step: int = 1) -> Path:
    value = torch.full(SIZE, float(step))
    return write_checkpoint(parent, [("model/a", SIZE, value.dtype, lambda: value)], Facts(step))


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
    target = StateInMemory(torch.zeros(SIZE))
    wanted = CheckpointTensor("model/a", SIZE, torch.float32, (whole_box(SIZE),), target)
    with pytest.raises(FivefoldError, match=r"\.metadata: "):  # resume
        Checkpoints(folder.parent, 1, None).load([wanted], lambda _: None)
    assert not trace.exists() and not hasattr(MetadataIndex, "made_here")


@pytest.mark.parametrize("forge", [alone, inside])
def test_a_forgery_would_run(tmp_path: Path, forge: Callable[[Path, Path], None]) -> None:
    """Else its absence above shows nothing."""
    folder = checkpoint(tmp_path)
    forge(folder / ".metadata", tmp_path / "ran")
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()


def test_a_foreign_run_is_not_exported(tmp_path: Path) -> None:
    shape = models.load("tiny")
    tensors = [
        (f"model/{each.name}", each.shape, torch.float32, lambda each=each: torch.zeros(each.shape))
        for each in (*weights(shape), *buffers(shape))
    ]
    folder = write_checkpoint(tmp_path / "checkpoints", tensors, Facts(1))
    open_run(tmp_path, shape, None, lambda _: None)  # it is a good one
    inside(folder / ".metadata", tmp_path / "ran")
    signed(folder)
    told: list[str] = []
    with pytest.raises(FivefoldError, match="no good checkpoint"):
        open_run(tmp_path, shape, None, told.append)
    assert "posix.mkdir" in told[0] and "could run any program" in told[0]
    assert not (tmp_path / "ran").exists()

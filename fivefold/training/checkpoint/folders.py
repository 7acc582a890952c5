"""Folders of checkpoints: what is published, how that happens at once, and what is let go.

A checkpoint is written in `step-NNNNNNNN.part` and renamed when all of it is on the disk. So a
folder without `.part` was whole when it appeared, and one with it is nobody's once its writer has
ended.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

PART = ".part"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The name of a step's checkpoint; names sort as steps do.

    >>> name_of(40)
    'step-00000040'
    """
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step whose checkpoint this is."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None, f"{folder} is no checkpoint"
    return int(found[1])


def published(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first; whether they are good is not looked at."""
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if _NAME.fullmatch(each.name)]
    return sorted(found, key=step_of)


def latest(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run."""
    found = published(run_folder / "checkpoints")
    return found[-1] if found else None


def begin(folder: Path, step: int) -> Path:
    """An empty place to write in; what killed writers left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    part = folder / (name_of(step) + PART)
    part.mkdir()
    return part


def sweep(folder: Path) -> None:
    """Remove what was never published."""
    for left in folder.glob(f"step-*{PART}"):
        shutil.rmtree(left, ignore_errors=True)  # who may not remove it may still read the others


def publish(part: Path) -> Path:
    """Give a checkpoint its name, once everything in it is on the disk."""
    final = part.with_name(part.name.removesuffix(PART))
    sync(part)
    if final.exists():  # a damaged one, or the run would not have come by here again
        withdraw(final)
    part.rename(final)
    sync(final.parent)
    return final


def retire(folder: Path, newest: int, keep: int) -> None:
    """Let go of all but `keep`, up to the one of step `newest`, which was just written.

    A later one was passed over as damaged, or the run would not be where it is: it counts for
    nothing here, and goes when its step is written again.
    """
    older = [each for each in published(folder) if step_of(each) <= newest]
    for each in older[:-keep]:
        withdraw(each)


def withdraw(final: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it is ever found under that."""
    gone = final.with_name(f"{final.name}.old{PART}")
    if gone.exists():
        shutil.rmtree(gone)
    final.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # the next save sweeps


def write_synced(path: Path, text: str) -> None:
    """Write a small file that is on the disk afterwards."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

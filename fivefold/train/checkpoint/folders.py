"""Folders of checkpoints: what is published, how that happens at once, and what is let go.

A checkpoint is written in `step-NNNNNNNN.part` and renamed when all of it is on the disk. So a
folder without `.part` was whole when it appeared, and one with it is nobody's once its writer has
ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fivefold.train.checkpoint.ranks import RankFailure, reason_of

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


# The manifest of a checkpoint: where a run stood, and the checksum of every file.
#
# It is JSON, and the only file that is read before its checksum is known: it carries its own. No
# other file is opened for its contents before it is found to be the one that was written, since
# `.metadata` is a pickle, and to read a pickle is to run it.


FILE = "manifest.json"
METADATA = ".metadata"
_FORMAT = 1


@dataclass(frozen=True)
class Facts:
    """Where a run stood. What has a shape is not here but in the tensors.

    `samples` counts the rows of text that were consumed: the number of the next one. `plan` is the
    text of the resolved plan. `has_states` is false where there are weights alone, as of an import.
    """

    step: int
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    seed: int = 0
    scaler: dict[str, float] = field(default_factory=dict[str, float])
    plan: str = ""
    has_states: bool = True


@dataclass(frozen=True)
class Stamp:
    """What a file has to be: its size and its sha256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint and its files."""

    facts: Facts
    files: dict[str, Stamp]

    def text(self) -> str:
        """As it is written."""
        body = asdict(self) | {"format": _FORMAT}
        return json.dumps(body | {"sha256": _seal(body)}, indent=1) + "\n"


class Damaged(RankFailure):
    """A checkpoint that is not what was written: the file, and what is wrong with it."""


def stamp(path: Path) -> Stamp:
    """The size and checksum of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Stamp(file.tell(), digest.hexdigest())


def verified_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, if it is the one that was written; else `Damaged`."""
    manifest = _read(folder)
    if unknown := _strangers(folder, manifest):
        raise Damaged("; ".join(unknown))
    return manifest


def _read(folder: Path) -> Manifest:
    path = folder / FILE
    try:
        body: dict[str, Any] = json.loads(path.read_text("utf-8"))
        seal, version = body.pop("sha256"), body["format"]
        if seal != _seal(body):
            raise Damaged(f"{path}: was changed after it was written")
        if version != _FORMAT:
            raise Damaged(f"{path}: has format {version}, and this program reads {_FORMAT}")
        known = {each.name for each in fields(Facts)}
        facts = Facts(**{key: value for key, value in body["facts"].items() if key in known})
        files = {name: Stamp(**each) for name, each in body["files"].items()}
    except OSError as error:
        raise Damaged(reason_of(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: is no manifest of a checkpoint") from error
    return Manifest(facts, files)


def problems_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with these files; their contents are hashed and never interpreted."""
    found: list[str] = []
    for name in names:
        path, wanted = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != wanted.bytes:
                found.append(f"{path}: has {size:,} bytes, not the {wanted.bytes:,} written")
            elif stamp(path).sha256 != wanted.sha256:
                found.append(f"{path}: its checksum differs from that of what was written")
        except OSError as error:
            found.append(reason_of(error))
    return found


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Metadata that nobody vouches for, which a reader might come upon; or none at all."""
    if METADATA not in manifest.files:
        return [f"{folder / FILE}: lists no {METADATA}"]
    if nested := [name for name in manifest.files if Path(name).name != name]:
        return [f"{folder / FILE}: lists {nested[0]}, which lies elsewhere"]
    others = sorted(folder.glob(f"*{METADATA}"))
    return [f"{path}: is in no manifest" for path in others if path.name != METADATA]


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

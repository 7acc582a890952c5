"""A checkpoint on disk: its folder, which appears complete, and its manifest, which verifies it.

A checkpoint is written into `step-NNNNNNNN.part` and renamed when all of it is on the disk. So a
folder without `.part` is complete, and one with `.part` is garbage once its writer has ended.

The manifest holds where the run stood and the checksum of every file. It is JSON with a checksum of
itself, and is read first. No other file is interpreted before its checksum is verified. Checksums
are against damage, not against forgery: see `metadata`.

Up to 64 ranks write into the folder itself. Of more, each 64 neighbours write a part: a folder
inside, with a manifest of its own, that has their boxes alone. The manifest above lists the tensors
and not the files, and `DIRECTORY` says which parts have which rows of which tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.records import SUSPECT
from fivefold.train.checkpoint.ranks import RankFailure, reason_of
from fivefold.train.checkpoint.threads import in_threads, num_streams

PART = ".part"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint; names sort like steps.

    >>> name_of(40)
    'step-00000040'
    """
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Step of a checkpoint folder."""
    name_match = _NAME.fullmatch(folder.name)
    assert name_match is not None, f"{folder} is no checkpoint"
    return int(name_match[1])


def published(folder: Path) -> list[Path]:
    """Checkpoints in a folder by rising step, not verified."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def latest(run_folder: Path) -> Path | None:
    """Newest checkpoint of a run."""
    paths = published(run_folder / "checkpoints")
    return paths[-1] if paths else None


def begin(folder: Path, step: int) -> Path:
    """Create a temporary folder; removes those of killed writers."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    part = folder / (name_of(step) + PART)
    part.mkdir()
    return part


def sweep(folder: Path) -> None:
    """Remove folders that were never published."""
    for left in folder.glob(f"step-*{PART}"):
        shutil.rmtree(left, ignore_errors=True)  # a reader without write permission still reads


def publish(part: Path) -> Path:
    """Rename a checkpoint to its final name, after all of it is on disk."""
    final = part.with_name(part.name.removesuffix(PART))
    sync(part)
    if final.exists():  # a damaged one, or the run would not have repeated this step
        if (newer := newer_format(final)) is not None:
            raise RankFailure(newer)
        remove(final)
    part.rename(final)
    sync(final.parent)
    return final


class KeptCheckpoints(NamedTuple):
    """Retention of checkpoints: the newest, and the one with the lowest loss of an evaluation
    set."""

    newest: int
    judged_by: str = ""


def remove_old(folder: Path, newest: int, retention: KeptCheckpoints) -> None:
    """Remove checkpoints outside of the retention, up to step `newest`.

    A later one was skipped as damaged when the run resumed. It does not count here, and is replaced
    when its step is written again.
    """
    older = [checkpoint for checkpoint in published(folder) if step_of(checkpoint) <= newest]
    best = best_of(older, retention.judged_by) if retention.judged_by else None
    for path in older[: -retention.newest]:
        if path != best and newer_format(path) is None:
            remove(path)


def best_of(checkpoints: Iterable[Path], judged_by: str) -> Path | None:
    """Checkpoint with the lowest loss of an evaluation set; the first of equals."""
    losses = dict[Path, float]()
    for path in checkpoints:
        try:
            loss = _read(path).facts.evals.get(judged_by)
        except Damaged:
            continue
        if loss is not None and math.isfinite(loss):
            losses[path] = loss
    return min(losses, key=lambda checkpoint: losses[checkpoint], default=None)


def remove(final: Path) -> None:
    """Remove a checkpoint: rename it first, so that an incomplete one never has its name."""
    removed = final.with_name(f"{final.name}.old{PART}")
    if removed.exists():
        shutil.rmtree(removed)
    final.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)  # what is left, the next save removes


def write_synced(path: Path, text: str) -> None:
    """Write a small file and fsync it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """fsync a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MANIFEST = "manifest.json"
METADATA = ".metadata"
DIRECTORY = "directory.npy"
_FORMAT, _PARTS_FORMAT = 1, 2  # of a folder without parts, and with
_BLOCK_BYTES = 16 << 20  # that are written and hashed at a time, without Python's lock


@dataclass(frozen=True)
class Facts:
    """State of a run that is not a tensor.

    `samples` counts the rows of data that steps have taken, not what was read ahead, so it is the
    number of the next one. `plan` is the text of the plan that made it, as a file in the run folder
    if `plan_in_run`: older checkpoints have paths in it that nobody can resolve. `has_states` is
    false if there are only weights, as in an import. `evals` has the losses of evaluation sets
    after this step, `callbacks` the states of a user's callbacks.
    """

    step: int
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    seed: int = 0
    scaler: dict[str, float] = field(default_factory=dict[str, float])
    plan: str = ""
    has_states: bool = True
    evals: dict[str, float] = field(default_factory=dict[str, float])
    plan_in_run: bool = False
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


@dataclass(frozen=True)
class FileChecksum:
    """Size and sha256 of a written file."""

    bytes: int
    sha256: str


class ListedTensor(NamedTuple):
    """A tensor of a checkpoint with parts: its rows of the directory are [first, stop)."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """Facts and files of a checkpoint; where it has parts, how many, and all tensors."""

    facts: Facts
    files: dict[str, FileChecksum]
    parts: int = 0
    tensors: dict[str, ListedTensor] = field(default_factory=dict[str, ListedTensor])

    def text(self) -> str:
        """Format `manifest.json`."""
        body = asdict(self) | {"format": _PARTS_FORMAT if self.parts else _FORMAT}
        if not self.parts:  # as versions without parts read it
            del body["parts"], body["tensors"]
        return json.dumps(body | {"sha256": _checksum(body)}, indent=1) + "\n"


DIRECTORY_ROW = np.dtype([("start", "<i8"), ("stop", "<i8"), ("part", "<i8")])
"""Rows [start, stop) of a tensor, of which a part has boxes."""


def name_of_part(number: int) -> str:
    """Folder name of a part.

    >>> name_of_part(7)
    'part-00007'
    """
    return f"part-{number:05d}"


def manifest_of_part(folder: Path, manifest: Manifest, number: int) -> Manifest:
    """Read the manifest of a part; raises `Damaged` if it was altered or is of another save."""
    path = folder / name_of_part(number)
    part = _read(path)
    if part.facts.step != manifest.facts.step or part.parts:
        raise Damaged(f"{path / MANIFEST}: is not of step {manifest.facts.step}")
    if problems := _untrusted_files(path, part):
        raise Damaged("; ".join(problems))
    return part


def damage_of(folder: Path, manifest: Manifest, rank: int = 0, size: int = 1) -> list[str]:
    """Problems of all files by their checksums; `size` ranks together look at every file once."""
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    problems = problems_of(folder, manifest, by_size[rank::size])
    if not manifest.parts:
        return problems
    if manifest.parts >= size:
        numbers, index, among = range(rank, manifest.parts, size), 0, 1
    else:  # neighbours share the files of a part
        number = rank * manifest.parts // size
        first, stop = (-(-part * size // manifest.parts) for part in (number, number + 1))
        numbers, index, among = range(number, number + 1), rank - first, stop - first
    for number in numbers:
        try:
            part = manifest_of_part(folder, manifest, number)
        except Damaged as damaged:
            problems.append(str(damaged))
        else:
            names = sorted(part.files)[index::among]
            problems += problems_of(folder / name_of_part(number), part, names)
    return problems


class Damaged(RankFailure):
    """A checkpoint differs from what was written: the file, and the problem."""


def checksum_of(path: Path) -> FileChecksum:
    """Compute the size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileChecksum(file.tell(), digest.hexdigest())


class HashedFile:
    """A file that is hashed while it is written.

    So it need not be read again. Other threads of the process run meanwhile; with small blocks they
    would often wait for one another.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)  # joins the small writes of torch
        self._digest = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> int:
        """Write a buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._file.write(block)
            self._digest.update(block)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # torch passes it to fsync, which knows nothing of our buffer
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def checksum(self) -> FileChecksum:
        """Size and checksum of the written data."""
        return FileChecksum(self._size, self._digest.hexdigest())


def verified_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises `Damaged` if it was altered."""
    if (folder / SUSPECT).exists():
        why = (folder / SUSPECT).read_text("utf-8", errors="replace").strip()
        raise Damaged(f"{folder / SUSPECT}: {why}; remove this file to read it all the same")
    manifest = _read(folder)
    if manifest.facts.step != step_of(folder):
        raise Damaged(
            f"{folder / MANIFEST}: is of step {manifest.facts.step}, which the name of its folder "
            "does not say"
        )
    if problems := _untrusted_files(folder, manifest):
        raise Damaged("; ".join(problems))
    return manifest


def newer_format(folder: Path) -> str | None:
    """Message about a checkpoint of a newer version; None if it is not one.

    It is not verified, since a newer program may do that in another way.
    """
    if not (folder / MANIFEST).is_file():
        return None
    try:
        version = json.loads((folder / MANIFEST).read_text("utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(version, int) or version <= _PARTS_FORMAT:
        return None
    return (
        f"{folder} has the newer format {version}, and this fivefold reads "
        f"{_PARTS_FORMAT}: it needs a newer fivefold; install that, or move this checkpoint away"
    )


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if (newer := newer_format(folder)) is not None:
        raise Damaged(newer)
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for ever
            raise Damaged(f"{path}: is no regular file")
        body: dict[str, Any] = json.loads(path.read_text("utf-8"))
        own_checksum, version = body.pop("sha256"), body["format"]
        if own_checksum != _checksum(body):
            raise Damaged(f"{path}: was changed after it was written")
        if version not in (_FORMAT, _PARTS_FORMAT):
            raise Damaged(f"{path}: has format {version}, and this program reads {_PARTS_FORMAT}")
        known = {field.name for field in fields(Facts)}
        facts = Facts(**{key: value for key, value in body["facts"].items() if key in known})
        files = {name: FileChecksum(**checksum) for name, checksum in body["files"].items()}
        tensors = {
            key: ListedTensor(dtype, tuple(shape), first, stop)
            for key, (dtype, shape, first, stop) in body.get("tensors", {}).items()
        }
        parts = int(body.get("parts", 0))
    except OSError as error:
        raise Damaged(reason_of(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: is no manifest of a checkpoint") from error
    return Manifest(facts, files, parts, tensors)


def problems_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Problems of these files, by their checksums."""
    written = {name: manifest.files[name] for name in names}
    problems = in_threads(
        lambda name: _problem_of(folder / name, written[name]),
        written,
        num_streams(sum(checksum.bytes for checksum in written.values())),
    )
    return [problem for problem in problems if problem is not None]


def _problem_of(path: Path, written: FileChecksum) -> str | None:
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"{path}: has {size:,} bytes, not the {written.bytes:,} written"
        if checksum_of(path).sha256 != written.sha256:
            return f"{path}: its checksum differs from that of what was written"
    except OSError as error:
        return reason_of(error)
    return None


def _untrusted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Why the metadata that torch would read is not what the manifest lists."""
    table = DIRECTORY if manifest.parts else METADATA
    if table not in manifest.files:
        return [f"{folder / MANIFEST}: lists no {table}"]
    if nested := [name for name in manifest.files if Path(name).name != name]:
        return [f"{folder / MANIFEST}: lists {nested[0]}, which lies elsewhere"]
    metadata_paths = sorted(folder.glob(f"*{METADATA}"))
    return [f"{path}: is in no manifest" for path in metadata_paths if path.name != table]


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

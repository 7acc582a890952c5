"""Who writes into a run folder: one start at a time, and one that was replaced publishes nothing.

**The lock.** A start holds a lock (`flock`) on `owner.json`, and its forked ranks inherit it. The
operating system releases it when the last of these processes is gone, however it ended. A second
start is refused, with the process that holds it.

**The fence.** Whoever takes the lock writes an id of its own into the file. Every publication of a
checkpoint first compares the id, while it holds a lock on the folder that a takeover needs too. So
a start whose lock was lost, because the file was deleted or a network file system gave it away,
can neither publish a checkpoint nor remove another's.

On one host both hold. On network file systems the lock holds where the mount has locks for all
hosts (NFSv4, Lustre with `flock`). Where it has none, or only those of one host, the fence remains,
without the lock of the folder: a start that was replaced may publish within the moment between its
look at the file and its rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core import FivefoldError
from fivefold.records.run_writer import RUN, naming_file

OWNER = "owner.json"
TAKEN_OVER = "another start has taken over this run"
_PAUSE = 0.1
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(frozen=True)
class RunTicket:
    """The right of one start to publish into a run; ranks have copies."""

    folder: Path
    id: str

    @contextlib.contextmanager
    def publishing(self) -> Generator[None]:
        """A block in which nobody takes the run over; raises if somebody has."""
        with _folder_lock(self.folder):
            holder = _holder(self.folder / OWNER)
            if holder is None:  # somebody deleted it, and nobody has come since
                _write(self.folder / OWNER, self.id)
            elif holder.get("id") != self.id:
                raise FivefoldError(
                    f"{TAKEN_OVER}, {_words(holder)}: this one ends, and publishes nothing"
                )
            yield


@contextlib.contextmanager
def own_run(folder: Path, timeout: float) -> Generator[RunTicket]:
    """Lock the run folder; raise if another process still holds it after `timeout` seconds."""
    path = folder / OWNER
    folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with naming_file(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(path, time.monotonic() + timeout)
    try:
        ticket = RunTicket(folder, uuid.uuid4().hex)
        with _folder_lock(folder), naming_file(path):
            _write(path, ticket.id)
        yield ticket
    finally:
        if not (folder / RUN).exists():  # it was refused before it began
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for directory in folders:
                    directory.rmdir()
        os.close(handle)


def _locked(path: Path, until: float) -> int:
    """The file, opened and locked. It may be replaced while we wait for it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:  # no locks here: the fence is left
                return handle
            os.close(handle)
            if time.monotonic() > until:
                raise FivefoldError(_refusal(path)) from None
            time.sleep(_PAUSE)
            continue
        if _is_at(handle, path):
            return handle
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        file_stat, ours = path.stat(), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (file_stat.st_dev, file_stat.st_ino) == (ours.st_dev, ours.st_ino)


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Generator[None]:
    """Publications and takeovers of a run, one after another, where folders have locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, identity: str) -> None:
    """Name the owner. The file stays the same one: its lock is on it."""
    facts = {
        "id": identity,
        "pid": os.getpid(),
        "host": platform.node(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
    }
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _holder(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return {}


def _words(holder: dict[str, Any]) -> str:
    return (
        f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')} since "
        f"{holder.get('since', 'some time')}"
    )


def _refusal(path: Path) -> str:
    holder = _words(_holder(path) or {})
    return (
        f"{path.parent} is being trained by {holder}: wait until it ends, stop it, or give another "
        "folder with --out"
    )

"""Temporary folders: in one forked ranks meet, in another a server has its sockets. Those that a
killed process left are removed by the next one: the operating system takes the lock on its owner's
file away with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

_RANKS = "fivefold-ranks-"
_OWNER = "owner"


class TemporaryFolder:
    """A temporary folder, removed with the process."""

    def __init__(self, prefix: str = _RANKS) -> None:
        sweep(Path(tempfile.gettempdir()), prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-")
        self.path = Path(self._folder.name)
        # A lock of the process, which forked ranks do not have: it goes with the launcher alone.
        self._owner = (self.path / _OWNER).open("w")
        fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        self._folder.cleanup()
        self._owner.close()


def sweep(parent: Path, prefix: str = _RANKS) -> None:
    """Remove temporary folders of processes that have ended."""
    ours = re.compile(rf"{prefix}(\d+)-\w+")
    for folder in parent.glob(f"{prefix}*"):
        match = ours.fullmatch(folder.name)
        # To open our own file would give the lock away when it is closed.
        if match is None or int(match[1]) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it is locked, just being made, or of another user
            with (folder / _OWNER).open("r+") as owner:
                fcntl.lockf(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

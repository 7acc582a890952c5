"""Text to files, with an error that a user can act on."""

from __future__ import annotations

from pathlib import Path

from fivefold.core.errors import FivefoldError


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; where that fails, say which file, why, and what to do."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise FivefoldError(
            f"cannot write {path}: {reason}; give a path in a folder that exists, may be written "
            "and has room"
        ) from error

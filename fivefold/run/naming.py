"""What run folders are called where nobody says."""

from __future__ import annotations

import re
from pathlib import Path

from fivefold.core.errors import FivefoldError


def run_folder(parent: Path, name: str, newest: bool) -> Path:
    """The next free folder of this name and a number, or the newest there is."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    taken = {
        int(found[1])
        for each in (parent.iterdir() if parent.is_dir() else ())
        if (found := re.fullmatch(rf"{re.escape(name)}-([0-9]{{1,9}})", each.name))
    }
    if newest and not taken:
        raise FivefoldError(
            f"no run of {name} in {parent} to resume: name its folder with --out, or leave "
            "--resume out"
        )
    return parent / f"{name}-{max(taken, default=0) + (not newest)}"

"""What ran a training: the command, versions, the commit and the machine. No host names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fivefold

_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_SECONDS = 5.0


def environment() -> dict[str, object]:
    """Command, versions, commit and machine; no host names."""
    return {
        "command": sys.argv,
        "versions": {
            "fivefold": fivefold.__version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        "commit": commit_of(Path(fivefold.__file__).parent.parent),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "num_cpus": os.cpu_count(),
            "gpus": gpu_names(),
        },
    }


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with `-dirty` if files have changed; None if it is no checkout."""
    if not (checkout / ".git").exists():  # git would search the parent folders
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=quiet, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def gpu_names(folder: Path = _GPUS) -> list[str]:
    """The GPUs that the driver lists. CUDA is not used: after its start a process cannot fork."""
    names: list[str] = []
    for file in sorted(folder.glob("*/information")):
        lines = file.read_text("utf-8", errors="replace").splitlines()
        names += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return names

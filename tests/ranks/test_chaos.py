"""Ranks that are killed in the middle of a run: it is resumed, and nothing is different."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_two_kills_change_nothing() -> None:
    """One at any time and one while a checkpoint is written; `make chaos` kills ten times."""
    command = [sys.executable, str(CHAOS), "--kills", "2", "--steps", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("2 kills") and last.endswith("every sample once")

"""Journeys that must fail: each mend that they were written for is taken back in a copy.

    python -m tests.gpu.broken

runs them side by side on one GPU. It ends with exit code 1 if a journey passes, or fails for
another reason. The CPU tests that see the same are named beside each mend.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.accept import CARRY, ROOT

MOST_SECONDS = 240
COPIED = ("fivefold", "fivefold_page", "fivefold_score", "tests", "benchmarks", "pyproject.toml")


@dataclass(frozen=True)
class Mend:
    """A line of the package, what it was before, and how the journey must fail."""

    path: str
    line: str
    before: str
    journey: str
    failure: str  # pattern in what the journey prints
    cpu_test: str


MENDS = (
    Mend(  # a late host is taken for the time of the event that it waited for
        "fivefold/train/clock.py",
        "step = mark.start.until(mark.end)",
        "step = mark.seen[-1].host + mark.seen[-1].until(mark.end) - mark.start.host",
        "fp8",
        r"records have [\d.]+ s, the host",
        "tests/model/test_clock.py",
    ),
    Mend(  # copies are weighed by their number in a rank's own list
        "fivefold/train/recovery/integrity.py",
        "hashed = combined(sums) * line_factor(line.role, line.every_step) % PRIME",
        "hashed = combined(sums) * (1 + self.lines.index(line)) % PRIME",
        "dense-3d",
        "the sum over hashes of copies is not zero",
        "tests/ranks/test_corruption.py",
    ),
    Mend(  # a run does not say what it was trained with
        "fivefold/generate/text_model.py",
        "    if model.trained_with is not None:\n        return model",
        "    if model.trained_with is None:\n        return model",
        "first-training",
        "give --tokenizer FILE",
        "tests/model/test_tokenizer_travels.py",
    ),
)


def copy_of(mend: Mend, folder: Path) -> Path:
    """A copy of the checkout without the mend."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    (folder / CARRY.name).symlink_to(CARRY)
    path = folder / mend.path
    text = path.read_text("utf-8")
    if text.count(mend.line) != 1:
        raise ValueError(f"{mend.path} has {text.count(mend.line)} times {mend.line!r}")
    path.write_text(text.replace(mend.line, mend.before), "utf-8")
    return folder


def outcome(mend: Mend) -> str:
    """Run the journey without the mend; an empty text if it fails as it must."""
    with tempfile.TemporaryDirectory(prefix="fivefold-broken-") as name:
        folder = copy_of(mend, Path(name))
        command = [sys.executable, "-m", "tests.gpu.accept", mend.journey]
        command += ["--seconds", str(MOST_SECONDS)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == 1 and re.search(mend.failure, done.stdout):
        return ""
    return f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}"


def main() -> int:
    with ThreadPoolExecutor(len(MENDS)) as pool:
        outcomes = list(pool.map(outcome, MENDS))
    for mend, wrong in zip(MENDS, outcomes, strict=True):
        verdict = "passes or fails otherwise" if wrong else "fails as it must"
        print(f"{mend.journey} without the mend of {mend.path}: {verdict}\n{wrong}".rstrip())
    return 1 if any(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""A launcher that is killed cannot clean up: the next one does, and touches nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.processes import TemporaryFolder, sweep

WAITS = """
import sys
from fivefold.launch.processes import TemporaryFolder
folder = TemporaryFolder(sys.argv[1])
(folder.path / "store").write_text("meeting")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.mark.parametrize("prefix", ["fivefold-ranks-", "fivefold-serve-"])
def test_a_killed_launcher_leaves_nothing_for_long(parent: Path, prefix: str) -> None:
    foreign = parent / f"{prefix}7-notes"
    foreign.mkdir()  # it has no owner's file
    launcher = subprocess.Popen(
        [sys.executable, "-c", WAITS, prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        left = Path(launcher.stdout.readline().strip())
        assert left.parent == parent
        mine = TemporaryFolder(prefix)
        assert left.exists()  # its owner lives
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate()
    assert left.exists()
    second = TemporaryFolder(prefix)
    assert not left.exists() and mine.path.exists() and foreign.exists()
    sweep(parent, prefix)
    assert mine.path.exists() and second.path.exists()
    for each in (mine, second):
        each.remove()
    assert list(parent.iterdir()) == [foreign]

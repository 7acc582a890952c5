"""What all tests share: the line budget at the end of every run."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fivefold"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the line budget, so that growth is seen where it happens."""
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    largest = max(lines, key=lambda path: lines[path])
    terminalreporter.write_line(
        f"line budget: {sum(lines.values()):,} lines in {len(lines)} files, the largest "
        f"{largest.relative_to(PACKAGE)} with {lines[largest]} (of 400)"
    )

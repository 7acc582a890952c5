"""What all tests share: warnings are errors where torch has no part; the line budget at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fivefold"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Our own code may not warn. Each torch on each Python has warnings of its own."""
    for item in items:
        if "pure" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("error"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the line budget, so that growth is seen where it happens."""
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    largest = max(lines, key=lambda path: lines[path])
    terminalreporter.write_line(
        f"line budget: {sum(lines.values()):,} lines in {len(lines)} files, the largest "
        f"{largest.relative_to(PACKAGE)} with {lines[largest]} (of 400)"
    )

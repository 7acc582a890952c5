"""What all tests share: which of them run, warnings as errors, the size of each package."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.selection import ALL_CASES, SALT, all_cases, salt

PACKAGE = Path(__file__).parent.parent / "fivefold"


def pytest_configure(config: pytest.Config) -> None:
    """All test workers take the cases of one salt, even where a commit comes in between."""
    os.environ[SALT] = salt()


def pytest_report_header(config: pytest.Config) -> str:
    return which_cases()


def which_cases() -> str:
    cases = "all cases" if all_cases() else f"some cases ({ALL_CASES}=1 runs all)"
    return f"{cases}, drawn by {SALT}={salt()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Our own code may not warn. Each torch on each Python has warnings of its own."""
    for item in items:
        if "pure" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("error"))
    late = [item for item in items if item.get_closest_marker("nightly") and not all_cases()]
    if late:
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print files, lines and the largest file of each package, so that growth is seen.

    And the salt again, which the head of a quiet report leaves out.
    """
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        package = name.parts[0] if len(name.parts) > 1 else "."
        sizes[package][str(name)] = len(path.read_text("utf-8").splitlines())
    everything = {
        name: lines for of_package in sizes.values() for name, lines in of_package.items()
    }
    terminalreporter.write_line(f"{'package':<12} {'files':>5} {'lines':>7}  largest file")
    for package, lines in [*sizes.items(), ("all", everything)]:
        largest = max(lines, key=lambda name: lines[name])
        terminalreporter.write_line(
            f"{package:<12} {len(lines):>5} {sum(lines.values()):>7,}  {largest} ({lines[largest]})"
        )
    terminalreporter.write_line(which_cases())

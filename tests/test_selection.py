"""Samples change with the salt and reach every case; the clock counts in `make nightly` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import selection
from tests.nightly import PARTS, judge
from tests.selection import ALL_CASES, SALT, drawn, num_drawn, salt, shuffled, within

CASES = [f"case {number}" for number in range(40)]


@pytest.fixture(autouse=True)
def forgets_its_salt() -> Iterator[None]:
    salt.cache_clear()
    yield
    salt.cache_clear()


def test_every_case_is_drawn_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for number in range(120):
        monkeypatch.setenv(SALT, f"commit {number}")
        salt.cache_clear()
        assert shuffled(CASES) == shuffled(reversed(CASES))
        seen.update(shuffled(CASES)[:4])
    assert seen == set(CASES)


def test_a_share_of_commits_runs_a_long_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_CASES, raising=False)
    runs = 0
    for number in range(400):
        monkeypatch.setenv(SALT, f"commit {number}")
        salt.cache_clear()
        assert drawn("a test", 0.5) == drawn("a test", 0.5)
        runs += drawn("a test", 0.5)
        assert num_drawn("a test", 2.5) == 2 + drawn("a test", 0.5)
        assert (num_drawn("a test", 3), num_drawn("a test", 0.0)) == (3, 0)
    assert 150 < runs < 250  # five standard deviations
    monkeypatch.setenv(ALL_CASES, "1")
    assert drawn("a test", 0.0)


def test_without_git_the_salt_is_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SALT, raising=False)
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert salt() == "fivefold"


def test_the_clock_counts_at_night(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0] * 2)
    monkeypatch.delenv(ALL_CASES, raising=False)
    with within(5, lambda: next(ticks)):
        pass
    monkeypatch.setenv(ALL_CASES, "1")
    with pytest.raises(AssertionError, match=r"took 9\.0 s"), within(5, lambda: next(ticks)):
        pass


@pytest.mark.parametrize(
    ("name", "code", "printed", "result"),
    [
        ("tests", 0, "3 deselected\n1234 passed, 2 skipped in 400.0s", (1234, "passed")),
        ("tests", 1, "1 failed, 12 passed in 9s", (12, "FAILED with exit code 1")),
        ("tests", 0, "", (0, "FAILED: nothing ran")),
        ("page", 0, "40 skipped in 1.0s", (0, "left out")),
        ("types", 0, "0 errors, 0 warnings", (0, "passed")),
        ("chaos", 0, "1: rank 2\n10 kills: every sample once", (10, "passed")),
    ],
)
def test_a_part_of_the_night(name: str, code: int, printed: str, result: tuple[int, str]) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert judge(part, code, printed) == result


def test_a_table_that_lost_a_case_fails() -> None:
    (part,) = (part for part in PARTS if part.name == "layouts")
    text = (selection.ROOT / "docs" / "verified-layouts.md").read_text("utf-8")
    assert judge(part, 0, text)[1] == "passed"
    line = next(line for line in text.splitlines() if line.endswith("| pass |"))
    assert judge(part, 0, text.replace(line, ""))[1].startswith("FAILED: docs/verified-layouts.md")

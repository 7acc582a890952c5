"""Typical mistakes are answered, and the page says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mistakes

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", mistakes.commands())
def test_a_mistake_is_answered_and_nothing_is_written(command: str, tmp_path: Path) -> None:
    code, out, said = mistakes.answer(command, tmp_path)
    assert code == 2 and not out, said
    assert said.startswith("fivefold: ") and "Traceback" not in said
    assert not list(tmp_path.iterdir())
    first = " ".join(said.removeprefix("fivefold: ").split())[:60].replace("|", "/")
    (row,) = [line for line in PAGE.read_text("utf-8").splitlines() if f"| `{command}` |" in line]
    assert first in row, "make the page again: python -m tests.mistakes > docs/mistakes.md"


def test_there_are_forty() -> None:
    assert len(set(mistakes.commands())) >= 40

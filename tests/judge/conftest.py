"""The tokens that all judged trainings read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judge.runs import write_corpora


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("judged"))

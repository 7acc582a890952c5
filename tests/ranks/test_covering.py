"""A few runs of the covering array; `python -m tests.ranks.covering` runs all."""

from __future__ import annotations

import pytest
from covering import Case, cases, prove

from fivefold.launch.processes import Pool
from tests.ranks.table import PUBLISHED


@pytest.mark.sample(1, table=True)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_run_of_the_array(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.traffic_match, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED

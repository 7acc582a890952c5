"""A fixed fourteenth of the covering array; `python -m tests.ranks.covering` runs all."""

from __future__ import annotations

import pytest
from covering import Case, cases, part, prove

from fivefold.launch.processes import Pool

PUBLISHED = 1e-10  # what float64 must reach, whatever tolerance is derived


@pytest.mark.parametrize("case", part(), ids=str)
def test_a_part_of_the_array(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.traffic_match, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


def test_the_part_is_about_a_fourteenth() -> None:
    assert len(cases()) / 25 < len(part()) < len(cases()) / 9

"""A few of the layouts of 2, 4 and 8 ranks; `python -m tests.ranks.sweep` runs all."""

from __future__ import annotations

import pytest
from sweep import Case, cases, prove

from fivefold.launch.processes import Pool
from tests.ranks.table import PUBLISHED


@pytest.mark.sample(1, table=True)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_layout_of_the_sweep(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


def test_the_sweep_has_every_layout_once() -> None:
    everything = list(cases())
    # 2 ranks: 2 splits of dp, and tp with and without sp; and so on; each in four stages.
    assert len(everything) == len(set(everything)) == 4 * ((2 + 2) + (3 + 4 + 2) + (4 + 6 + 4 + 2))

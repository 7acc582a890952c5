"""A fixed eighteenth of the layouts of 2, 4 and 8 ranks; `python -m tests.ranks.sweep` runs all."""

from __future__ import annotations

import pytest
from sweep import Case, cases, part, prove

from fivefold.launch.processes import Pool

PUBLISHED = 1e-10  # what float64 must reach, whatever tolerance is derived


@pytest.mark.parametrize("case", part(), ids=str)
def test_a_part_of_the_sweep(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


def test_the_sweep_has_every_layout_once() -> None:
    everything = list(cases())
    # 2 ranks: 2 splits of dp, and tp with and without sp; and so on; each in four stages.
    assert len(everything) == len(set(everything)) == 4 * ((2 + 2) + (3 + 4 + 2) + (4 + 6 + 4 + 2))
    assert len(everything) / 26 < len(part()) < len(everything) / 12

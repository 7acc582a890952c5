"""A few layouts in fp8; `python -m tests.ranks.fp8_layouts` runs all."""

from __future__ import annotations

import pytest
from fp8_layouts import Fp8Case, cases, prove

from fivefold.launch.processes import Pool
from tests.ranks.table import PUBLISHED


@pytest.mark.sample(1, table=True)
@pytest.mark.parametrize(
    "case", [each for each in cases() if "cp=2 ep=2" not in each.layout], ids=str
)
def test_no_value_rounds_differently_in_a_layout(pool: Pool, case: Fp8Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.flips, verdict.errors, verdict.diverges_at, verdict.traffic)
    assert verdict.flips == 0
    assert max(verdict.errors.values()) <= PUBLISHED


def test_all_dimensions_are_there_with_both_scalings() -> None:
    everything = list(cases())
    assert len({str(each) for each in everything}) == len(everything) >= 30
    for scaling in ("tensorwise", "blockwise"):
        layouts = " ".join(each.layout for each in everything if each.scaling == scaling)
        assert all(f"{axis}=2" in layouts for axis in ("dp", "tp", "pp", "cp", "ep"))

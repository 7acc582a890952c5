"""A few layouts with adapters or frozen parts; `python -m tests.ranks.tuned_layouts` runs all."""

from __future__ import annotations

import pytest
from tuned_layouts import TunedCase, cases, prove

from fivefold.launch.processes import Pool
from tests.ranks.table import PUBLISHED


@pytest.mark.sample(2, table=True)
@pytest.mark.parametrize(
    "case", [each for each in cases() if "cp=2 ep=2" not in each.layout], ids=str
)
def test_a_layout_trains_the_same_part(pool: Pool, case: TunedCase) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.diverges_at, verdict.traffic)
    assert max(verdict.errors.values()) <= PUBLISHED


def test_all_dimensions_are_there() -> None:
    everything = list(cases())
    assert len({str(each) for each in everything}) == len(everything) >= 40
    for kind in ("lora", "train_only"):
        layouts = " ".join(each.layout for each in everything if kind in each.trains)
        assert all(f"{axis}=2" in layouts for axis in ("dp", "tp", "pp", "ep"))

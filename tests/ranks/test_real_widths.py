"""Models of their published widths train as one process does, and a wrong gradient is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kept_pool import KeptPool
from real_widths import CASES, FIRST_STEPS, STEPS, Case, Trainings

CLASSES = 24  # of layout, ZeRO stage, schedule and context, at least


@pytest.fixture(scope="module")
def trainings(kept_pool: KeptPool) -> Trainings:
    return Trainings(kept_pool.whole())


def test_there_are_enough_classes() -> None:
    assert len({replace(case, model="") for case in CASES}) >= CLASSES
    assert len({case.model for case in CASES}) == 5 and FIRST_STEPS < STEPS == 3


@pytest.mark.sample(4, table=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.model == "qwen3"], ids=str)
def test_a_real_width_trains_as_one_process_does(trainings: Trainings, case: Case) -> None:
    """No copy differs, no gradient is beyond what rounding explains, and one that is wrong is. The
    table has the larger families, and resumes."""
    outcome = trainings.examine(case, resumes=False)
    assert outcome.passed, outcome

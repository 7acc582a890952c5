"""The curve of one process in any layout, and through a change of layouts on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from invariance import CASES, DTYPES, LEGS, ROWS, Case, Trainings
from kept_pool import KeptPool

from fivefold.core.precision import Dtype
from fivefold.launch.processes import Pool
from fivefold.records.run_writer import METRICS

LAYERS = 4
STEPS, CHANGING_STEPS = 8, 8
FEW_RANKS = 4
SMALL = [case for case in CASES if case.plan(LAYERS).layout.world <= FEW_RANKS]


@pytest.fixture(scope="module")
def trainings(kept_pool: KeptPool) -> Trainings:
    return Trainings(kept_pool.whole(), STEPS, LAYERS)


@pytest.mark.sample(0.5, table=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_layout_follows_the_curve_of_one_process(
    trainings: Trainings, case: Case, dtype: Dtype
) -> None:
    check = trainings.check(case, dtype)
    assert check.passed, check
    assert check.routed == STEPS * case.plan(LAYERS).batch.tokens * (LAYERS - 1)
    assert check.flips == 0 or dtype == "float32"
    losses = trainings.references(case.balance, dtype)[0].losses
    assert losses[-1] < losses[0] - 0.5  # equal, and of a model that learns


@pytest.mark.nightly
def test_a_run_changes_its_layout_and_reads_every_sample_once(pool: Pool, tmp_path: Path) -> None:
    trainings, folder = Trainings(pool, CHANGING_STEPS, LAYERS), tmp_path / "run"
    checks = list(trainings.change("float64", folder))
    assert len(checks) == len(LEGS)
    for check in checks:
        assert check.passed and check.flips == 0, check
    samples, places = trainings.consumed(folder)
    assert samples == [*range(CHANGING_STEPS * ROWS)]
    assert len(places) == len(samples)
    log = folder / METRICS
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3] + lines[4:]))  # as if a step had been left out
    assert trainings.consumed(folder)[0] != samples

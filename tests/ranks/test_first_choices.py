"""First choices of the planner; `python -m tests.ranks.first_choices` runs all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from first_choices import JOBS, Job, run, wrong

from fivefold.core.model import presets as models

QUICK = [job for job in JOBS if job.gpus <= 8 and not job.trains]
TRAINED = [job for job in JOBS if job.trains and job.gpus == 2]


@pytest.mark.sample(0.25, table=True)
@pytest.mark.parametrize("job", QUICK, ids=str)
def test_the_first_choice_is_rehearsed_as_written(tmp_path: Path, job: Job) -> None:
    outcome = run(job, tmp_path)
    assert not outcome.problems
    # A rehearsal that is not as planned is seen.
    more = {name: 2 * size for name, size in outcome.rehearsed["memory_gib"].items()}
    assert list(wrong(job, replace(outcome, rehearsed={**outcome.rehearsed, "memory_gib": more})))


@pytest.mark.nightly
@pytest.mark.parametrize("job", TRAINED, ids=str)
def test_the_first_choice_trains_as_written(tmp_path: Path, job: Job) -> None:
    assert not run(job, tmp_path).problems


def test_twelve_jobs_and_more() -> None:
    assert len({str(job) for job in JOBS}) == len(JOBS) >= 12
    assert len({models.load(job.model).family for job in JOBS}) >= 5
    assert len({job.machine for job in JOBS}) >= 5

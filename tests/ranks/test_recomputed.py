"""Jobs whose recomputation is rehearsed; `python -m tests.ranks.recomputed` runs all."""

from __future__ import annotations

import pytest
from recomputed import JOBS, Job, disorder, kept

from fivefold.core.model import presets as models


@pytest.mark.nightly  # 20 s; tests/model hold every rule to its memory and its order
@pytest.mark.sample(1, table=True)
@pytest.mark.parametrize("job", [job for job in JOBS if "pp=" not in job.layout], ids=str)
def test_more_recomputation_takes_no_more_memory(job: Job) -> None:
    runs = job.rehearse()
    assert not list(disorder(job, runs))
    assert kept(runs["full"]) < kept(runs["selective"]) < kept(runs["none"])
    # A rule that is not kept is seen.
    assert list(disorder(job, {**runs, "full": runs["none"]}))


def test_twelve_jobs_of_many_families() -> None:
    assert len({str(job) for job in JOBS}) == len(JOBS) == 12
    families = {models.load(job.model).family for job in JOBS}
    assert len(families) >= 5
    plans = [job.plan("none") for job in JOBS]
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert any(getattr(plan.layout, axis) > 1 for plan in plans)
    assert {plan.layout.zero for plan in plans} == {0, 1, 2, 3}
    assert {name for job in JOBS for name in job.missing()} == {"mlp", "experts"}

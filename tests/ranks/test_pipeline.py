"""Pipelines against one process: every schedule, every sharding under it, and delayed updates.

Those of the list in `pipelines.py` that differ most; `python -m tests.ranks.pipelines` runs all.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from pipelines import (
    ASYNCHRONOUS,
    MIXED,
    MODELS,
    PIPELINES,
    RECOMPUTES,
    SHARDINGS,
    SYNCHRONOUS,
    Case,
    cases,
    part,
    prove,
)

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.catalog import names
from fivefold.core.schedule.selection import choose
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.asynchronous import StashingChunk
from fivefold.verify.reference import Delayed, Truth
from fivefold.verify.runs import VerifySettings, num_phases, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge, run_trial
from tests.ranks.table import PUBLISHED
from tests.selection import shuffled

NUM_CASES = 2
STREAMS = (
    Case("pipedream", "pp=4", 1),
    Case("pipedream-2bw", "pp=4", 1),
    Case("pipedream", MIXED, 1, zero=1),
)


def require(verdict: VerifyVerdict) -> None:
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", [*part()[:NUM_CASES], *shuffled(STREAMS)[:1]], ids=str)
def test_a_pipeline_computes_what_one_process_does(pool: Pool, case: Case) -> None:
    require(prove(pool, case))


def test_the_list_has_every_schedule_sharding_and_recomputation() -> None:
    everything = list(cases())
    assert len(set(map(str, everything))) == len(everything) > 100
    assert {*names()} - {"afab", "pipedream-flush"} == {*SYNCHRONOUS, *ASYNCHRONOUS}
    for name in SYNCHRONOUS:
        mine = [case for case in everything if case.schedule == name]
        assert {f"pp={ranks}" for ranks in PIPELINES} <= {case.layout for case in mine}
        assert {(case.zero, case.gather) for case in mine} >= set(SHARDINGS)
        assert {case.recompute for case in mine} >= set(RECOMPUTES)
    pairs = {(case.zero, case.gather, case.recompute) for case in everything}
    assert pairs >= {(*sharding, kind) for sharding in SHARDINGS for kind in RECOMPUTES}


def test_the_part_has_every_feature() -> None:
    mine = part()
    assert len(mine) < len(list(cases())) / 3
    assert {case.schedule for case in mine} == set(SYNCHRONOUS)
    assert {case.model for case in mine} == set(MODELS)
    split = [case for case in mine if case.splits and case.layout == MIXED]
    assert {(case.zero, case.gather) for case in split} == set(SHARDINGS)
    assert {case.recomputed for case in split} == set(RECOMPUTES)
    assert {case.sp for case in split} == {True, False}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        (1, {"optimizer": "sgd", "empty_rank": 1}),
        (3, {"offload": True}),
        (0, {"dtype": "float32"}),
        (2, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_every_setting_of_a_split_backward(pool: Pool, zero: int, changes: dict[str, Any]) -> None:
    plan = Case("zb-v", "dp=2 pp=2", 2, zero, recompute="selective").plan
    verdict = run_trial(pool, plan, VerifySettings(**changes))
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "dualpipe", "packed": True, "microbatch_size": 2},
        {"schedule": "zb-h2", "stage_layers": "1,4", "microbatches": 3},
        {"schedule": "gpipe", "microbatches": 1},
        {"schedule": "v-min", "microbatches": 1},
    ],
    ids=str,
)
def test_other_batches_and_cuts(pool: Pool, options: dict[str, Any]) -> None:
    plan = resolve(PlanOptions("tiny", layout="pp=2", set={"layers": "5"}, **options), small=True)
    require(run_trial(pool, plan, VerifySettings()))


def test_stages_of_a_v_that_are_cut_by_rank(pool: Pool) -> None:
    """The head weighs on the first rank, whose stages differ from a cut by stages: 1, 3, 3, 1."""
    changes = {"vocab": "1024", "layers": "8"}
    options = PlanOptions("tiny", layout="pp=2", schedule="zb-v", microbatches=4, set=changes)
    plan = resolve(options, small=True)
    assert [len(layers) for layers in plan.stages] == [2, 2, 3, 1]
    require(run_trial(pool, plan, VerifySettings()))


def versions(worker: Worker, plan: Plan, settings: VerifySettings) -> int:
    """How many versions of its weights a rank held at most."""
    made: list[StashingChunk] = []
    begin = StashingChunk.__init__

    def remember(self: StashingChunk, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    with patch.object(StashingChunk, "__init__", remember):
        run_rank(worker, plan, settings)
    (stash,) = made
    return stash.most_versions


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", STREAMS[:2], ids=str)
def test_ranks_keep_as_many_versions_as_the_schedule_says(pool: Pool, case: Case) -> None:
    plan, settings = case.plan, VerifySettings(steps=6)
    found = pool.run_each([(versions, (plan, settings))] * plan.layout.world)
    places = [plan.layout.coord(rank).pp for rank in range(plan.layout.world)]
    assert found == [plan.schedule.weight_versions[place] for place in places]


def other_delays(worker: Worker, plan: Plan, settings: VerifySettings, more: int) -> list[Truth]:
    """The emulation with every stage so many updates later than it is, and never before now."""

    def changed(stages: list[range], every: int, late: list[int]) -> Delayed:
        return Delayed(stages, every, [max(0, each + more) for each in late])

    with patch("fivefold.verify.runs.Delayed", changed):
        return run_reference(worker, plan, settings)


@pytest.mark.sample(2)
@pytest.mark.parametrize("more", [0, 1, -1])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_another_delay_is_another_result(pool: Pool, name: str, more: int) -> None:
    """On two ranks, where one less is none at all: what one process would compute."""
    plan, settings = Case(name, "pp=2", 1).plan, VerifySettings(steps=4)
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (other_delays, (plan, settings, more))])
    verdict = judge(plan, settings, runs, truths)
    assert verdict.traffic_match
    assert verdict.passed == (more == 0)
    if more:
        assert verdict.errors["grad_err"] > 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "pipedream"])
def test_every_phase_is_counted(pool: Pool, name: str) -> None:
    """What the progress bar of `verify` goes by."""
    phases: list[None] = []
    plan, settings = Case(name, "pp=2", choose(name).default_chunks).plan, VerifySettings(steps=3)
    run_trial(pool, plan, settings, lambda: phases.append(None))
    assert len(phases) == num_phases(plan, settings)

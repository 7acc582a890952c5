"""Steps that ran again, and what was slow, on the time line of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_runs import RECORD

from fivefold.records.spans import RunFacts, StartFacts
from fivefold.records.steps import StepRecord, summarize
from fivefold_page.run import view as run_history


def history(*records: StepRecord) -> list[tuple[str, str]]:
    start = StartFacts(0.0, None, None, {}, {"failed": {"at": 90.0, "why": "step 9: rank 2"}})
    summary = summarize([], records, [], 0)
    facts = RunFacts("run", (start,), records, (), summary, None, None, {}, 0.0)
    events = run_history.history(facts)["events"]
    return [(one["kind"], one["says"]) for one in events]


def test_a_step_that_ran_again_says_why_and_what_came_out() -> None:
    why = "step 3: norm 9 was above its bound 2"
    spike = replace(RECORD, step=3, again={"why": why, "same": True, "ranks": []})
    flip = replace(spike, step=4, again={"why": why, "same": False, "ranks": [5]})
    proof = replace(spike, step=5, again={"why": None, "same": True, "ranks": []})
    found = [says for kind, says in history(RECORD, spike, flip, proof) if kind == "again"]
    assert found == [
        f"{why}; it ran again with the same result: the data",
        f"{why}; it ran again with another: hardware of rank 5",
    ]


def test_what_happened_in_a_step_without_a_time_follows_the_step_before() -> None:
    timed = replace(RECORD, step=2, wall=4.0)
    skipped = replace(RECORD, step=3, wall=None, seconds=None, skipped="norm is not finite")
    summary = summarize([], (timed, skipped), [], 0)
    start = StartFacts(0.0, 9.0, "done", {}, {})
    facts = RunFacts("run", (start,), (timed, skipped), (), summary, None, None, {}, 0.0)
    (event,) = run_history.history(facts)["events"]
    assert (event["kind"], event["at"], event["step"]) == ("skipped", 4.0, 3)


@pytest.mark.parametrize(("later", "times"), [(0.165, 1), (0.3, 2)])
def test_what_is_slow_is_said_when_its_cost_changes(later: float, times: int) -> None:
    slow = {"what": "rank", "ranks": [3], "words": "rank 3 on a is late"}
    records = [
        replace(RECORD, step=10 * (i + 1), wall=10.0 * i, slow=[{**slow, "share": share}])
        for i, share in enumerate((0.16, later))
    ]
    found = [says for kind, says in history(*records) if kind == "slow"]
    assert len(found) == times
    assert found[0] == "step 10: rank 3 on a is late, 16.0% of the step"

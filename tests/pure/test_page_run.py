"""The Run tab: what a folder says, curves, and the largest difference of a step by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.errors import FivefoldError
from fivefold.core.schedule.schedule import Action, Step, actions_of
from fivefold.records import run_reader
from fivefold.records.deviation import from_plan
from fivefold.records.spans import ActionSpan, CollectiveSpan, RankSpans, collective_seconds
from fivefold.records.steps import summarize
from fivefold_page import document
from fivefold_page.run import curves as run_curves
from fivefold_page.run import step as run_step
from fivefold_page.run import view as run_view
from tests.pure.fake_runs import PLANNED, RECORD, FakeStep, plan_of, records, usual, write_run

MEANS, PLAN = plan_of(), plan_of("h100")


def asked(folder: Path, **params: str) -> dict[str, Any]:
    return run_view.view(
        run_reader.read(folder), params, lambda step: run_reader.read_step(folder, step)
    )


def looked_at(folder: Path, step: FakeStep, **params: str) -> dict[str, Any]:
    """The comparison of one step."""
    record = replace(RECORD, seconds=step.length)
    made = write_run(folder, step.plan, [record], events=[step.lines(1)])
    found = asked(made, **params)["step"]
    assert found["problem"] is None
    return found


def stage(step: Step) -> int:
    return actions_of(step)[0].stage


def test_a_step_as_the_mean_has_nothing_to_name(tmp_path: Path) -> None:
    found = looked_at(tmp_path / "run", FakeStep(MEANS, usual))
    assert "nothing differs" in found["says"]
    # Eight microbatches on four stages of 1F1B: (8 + 3) times 30 ms.
    assert found["seconds"]["pipeline"] == pytest.approx(0.33, abs=1e-6)
    assert found["seconds"]["measured"] == pytest.approx(found["seconds"]["planned"], abs=1e-6)
    assert [one["idle"] for one in found["ranks"]] == pytest.approx([0.09] * 4, abs=1e-6)


def test_a_slow_stage_is_named(tmp_path: Path) -> None:
    def slow(rank: int, step: Step) -> float:
        late = stage(step) == 2 and isinstance(step, Action) and step.kind == "B"
        return usual(rank, step) * (1.6 if late else 1.0)

    found = looked_at(tmp_path / "run", FakeStep(MEANS, slow))
    # The mean of backwards is (20 · 3 + 32) / 4 = 23 ms.
    assert "stage 2's backwards take 1.39 times the mean (32.0 ms against 23.0 ms)" in found["says"]


def test_a_late_message_is_named_where_it_is_waited_for(tmp_path: Path) -> None:
    def message(rank: int, step: Step) -> float:
        return 0.05 if str(step) == "1B3" else 0.0

    found = looked_at(tmp_path / "run", FakeStep(MEANS, usual, message))
    assert "waiting: rank 2 idles 50.0 ms more before 1B3, for 2B3 of rank 4" in found["says"]
    rows = {row["name"]: row for row in found["picture"]["rows"]}
    assert "2B3" in rows["rank 2 measured"]["waits"].values()


def test_slow_messages_of_two_ranks_are_named_together(tmp_path: Path) -> None:
    def message(rank: int, step: Step) -> float:
        return 0.012 if rank == 6 and isinstance(step, Action) and step.kind == "F" else 0.0

    found = looked_at(tmp_path / "run", FakeStep(MEANS, usual, message), rank="0")
    assert "messages from rank 4 to rank 6 arrive late (12.0 ms against 0.0 ms)" in found["says"]


def test_a_slow_collective_is_named(tmp_path: Path) -> None:
    """Those of one stage take longer, and with them its actions."""

    def late(rank: int, step: Step) -> float:
        return 0.011 if stage(step) == 1 else 0.001

    def calls(rank: int, step: Step) -> Mapping[str, float]:
        return {"ep": late(rank, step)}

    step = FakeStep(MEANS, lambda rank, step: usual(rank, step) + late(rank, step), calls=calls)
    found = looked_at(tmp_path / "run", step)
    assert "collectives of ep inside of the actions" in found["says"]
    axes = {one["axis"]: one for one in found["calls"]}
    # Four ranks of 16 actions: 48 · 1 ms and 16 · 11 ms.
    assert axes["ep"]["calls"] == 64
    assert axes["ep"]["seconds"] == pytest.approx(0.224, abs=1e-6)


def test_a_straggler_is_named_and_its_pipeline_drawn(tmp_path: Path) -> None:
    """Rank 5 has the stage of rank 4, and takes half as long again."""

    def slow(rank: int, step: Step) -> float:
        return usual(rank, step) * (1.5 if rank == 5 else 1.0)

    found = looked_at(tmp_path / "run", FakeStep(MEANS, slow))
    assert found["rank"] == 1
    assert "rank 5 computes 1.50 times as long as other ranks" in found["says"]
    assert "(360 ms against 240 ms)" in found["says"]


def test_pauses_are_named(tmp_path: Path) -> None:
    """Time before an action in which nothing was waited for: on the last stage it delays all."""

    def pause(rank: int, step: Step) -> float:
        return 0.015 if str(step) in ("3F2", "3F3", "3F4") else 0.0

    found = looked_at(tmp_path / "run", FakeStep(MEANS, usual, pause=pause))
    assert "rank 6 pauses for 45.0 ms in all before actions that lack nothing" in found["says"]


def test_with_a_machine_the_plan_is_the_forecast(tmp_path: Path) -> None:
    """The step takes what the forecast says and a tail of 40 ms, which no action explains."""
    expected = from_plan(PLAN)
    assert expected is not None and expected.around is not None
    costs = expected.played.costs
    step = FakeStep(PLAN, lambda rank, step: costs.of(step), lambda rank, step: costs.transfer[0])
    whole = expected.played.makespan + sum(expected.around.values())
    record = replace(RECORD, seconds=whole + 0.04)
    folder = write_run(tmp_path / "run", PLAN, [record], events=[step.lines(1)])
    found = asked(folder)["step"]
    assert found["seconds"]["planned"] == pytest.approx(whole)
    assert found["seconds"]["pipeline"] == pytest.approx(expected.played.makespan, rel=1e-3)
    assert "the update and all else, outside of the pipeline" in found["says"]
    assert "100% of what it took longer" in found["says"]
    assert "h100" in found["basis"].lower()


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "dualpipe", "dualpipe-v", "zb-v"])
def test_every_kind_of_schedule_can_be_compared(tmp_path: Path, schedule: str) -> None:
    step = FakeStep(plan_of(schedule=schedule), usual)
    found = looked_at(tmp_path / "run", step)
    assert found["seconds"]["pipeline"] == pytest.approx(step.length, abs=1e-6)
    assert run_step.text({"step": found})


def test_the_newest_start_that_ran_a_step_is_read_and_torn_lines_are_not(tmp_path: Path) -> None:
    """Step 2 was lost and done again, twice as slow; the file ends in half a line."""
    fast, slow = FakeStep(MEANS, usual), FakeStep(MEANS, lambda r, s: 2 * usual(r, s))
    events = [fast.lines(1), fast.lines(2), slow.lines(2, 1), slow.lines(3, 1)]
    kept = [RECORD, replace(RECORD, step=2, restart=1), replace(RECORD, step=3, restart=1)]
    folder = write_run(
        tmp_path / "run",
        MEANS,
        kept,
        lost=[replace(RECORD, step=2)],
        events=events,
        ended=[None, "done"],
    )
    with (folder / "events/rank-00000.jsonl").open("a") as file:
        file.write('{"step": 4, "restart": 1, "ra')
    facts = run_reader.read(folder)
    assert facts.event_steps == {0: (1, 2), 1: (2, 3)}
    assert facts.steps == [1, 2, 3]
    again = run_reader.read_step(folder, 2)
    assert again is not None and again.restart == 1
    assert again.end - again.begin == pytest.approx(0.66, abs=1e-6)
    assert run_reader.read_step(folder, 4) is None
    (folder / "events/rank-00003.jsonl").unlink()
    left = run_reader.read_step(folder, 1)
    assert left is not None and 3 not in left.ranks and left.num_ranks == 8
    # The pipeline of ranks 0, 2, 4, 6 is whole; that of 1, 3, 5, 7 is not.
    assert asked(folder, step="1")["step"]["choices"] == [0]


def test_a_step_is_found_by_halving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 steps only its own lines are read, and the anchors on the way to it."""
    first, parsed = FakeStep(MEANS, usual).lines(1), list[str]()
    told = [{0: first[0].replace('"step": 1,', f'"step": {number},')} for number in range(1, 401)]
    folder = write_run(tmp_path / "run", MEANS, [RECORD], events=told)
    loads = json.loads

    def counted(text: str) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(run_reader.json, "loads", counted)
    found = run_reader.read_step(folder, 300)
    assert found is not None and len(found.ranks[0].actions) == 16
    assert len(parsed) < 200 < 400 * len(first[0].splitlines())


def test_of_many_ranks_whole_pipelines_are_read(tmp_path: Path) -> None:
    plan = plan_of(layout="dp=256 pp=2", microbatches=2)
    told = FakeStep(plan, usual).lines(1)
    folder = write_run(tmp_path / "run", plan, [RECORD], events=[told])
    found = run_reader.read_step(folder, 1)
    assert found is not None and found.num_ranks == 512
    assert len(found.ranks) == 256
    assert all({*plan.layout.group("pp", rank)} <= found.ranks.keys() for rank in found.ranks)


def test_clocks_of_ranks_are_brought_together(tmp_path: Path) -> None:
    skews = {rank: 10**12 * rank for rank in range(8)}
    folder = write_run(
        tmp_path / "run", MEANS, [RECORD], events=[FakeStep(MEANS, usual, skew=skews).lines(1)]
    )
    found = run_reader.read_step(folder, 1)
    assert found is not None
    first = {rank: one.actions[-1].end for rank, one in found.ranks.items()}
    # The first stage ends last, each later one a backward earlier.
    assert [first[rank] for rank in (0, 2, 4, 6)] == pytest.approx(
        [0.33, 0.31, 0.29, 0.27], abs=1e-6
    )


def test_evaluation_and_checkpoints_are_no_part_of_a_step(tmp_path: Path) -> None:
    step = FakeStep(MEANS, usual, tail=0.5)
    lines = step.lines(1)
    anchor = json.loads(lines[0].splitlines()[0])
    late = {"name": "ep/all_to_all", "kind": "collective", "bytes": 8, "group": 2}
    late |= {"begin": anchor["clock_ns"] - 300_000_000, "end": anchor["clock_ns"] - 100_000_000}
    lines[0] += json.dumps(late) + "\n"
    record = replace(RECORD, seconds=0.33, spent={"eval": 0.5})
    folder = write_run(tmp_path / "run", MEANS, [record], events=[lines])
    assert "ep" not in {one["axis"] for one in asked(folder)["step"]["calls"]}


@pytest.mark.parametrize("params", [{"step": "x"}, {"step": "-1"}, {"rank": "9" * 5000}])
def test_params_that_are_no_numbers_are_refused(tmp_path: Path, params: dict[str, str]) -> None:
    folder = write_run(tmp_path / "run", MEANS, [RECORD], events=[FakeStep(MEANS, usual).lines(1)])
    with pytest.raises(FivefoldError, match="whole number"):
        asked(folder, **params)
    assert "has no events" in asked(folder, step="7")["step"]["problem"]
    assert asked(folder, step="none")["step"] is None


def test_without_events_or_plan_it_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", MEANS, records(3))
    assert "events=true" in asked(folder)["step"]["problem"]
    (folder / "plan.toml").write_text('model = "nobody-knows"\n')
    view = asked(folder)
    assert "nobody-knows" in view["head"]["no_plan"]
    assert [*document.lines({"run": view}, None)]


def test_other_layouts_are_not_held_against_the_newest_plan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", MEANS, [RECORD], events=[FakeStep(MEANS, usual).lines(1)])
    other = plan_of(layout="dp=4 pp=2")
    (folder / "plan.toml").write_text(other.to_toml(folder, full=True))
    assert "ran dp=2 pp=4" in asked(folder)["step"]["problem"]


def test_curves_are_thinned_and_keep_their_spikes() -> None:
    points = [(n, math.sin(n)) for n in range(20_000)]
    points[777] = (777, 99.0)
    points[4_321] = (4_321, -99.0)
    thin = run_curves.thinned(points)
    assert len(thin) <= 1_500
    assert (777, 99.0) in thin and (4_321, -99.0) in thin
    assert thin[-500:] == points[-500:]
    assert [x for x, _ in thin] == sorted({x for x, _ in thin})


def test_records_become_curves_marks_and_goodput(tmp_path: Path) -> None:
    kept = records(40, planned=PLANNED, mfu=0.3, memory_gib=1.5, load=(1.5, 3.25))
    kept[9] = replace(kept[9], loss=math.nan, skipped="loss is not finite")
    kept[19:] = [replace(one, restart=1) for one in kept[19:]]
    kept[39] = replace(kept[39], eval_loss=4.25)
    lost = [replace(RECORD, step=n, loss=9.0) for n in (20, 21)]
    folder = write_run(tmp_path / "run", PLAN, kept, lost=lost, ended=[None, "stopped"])
    view = asked(folder)
    json.dumps(view, allow_nan=False)
    assert view["curves"]["loss"]["measured"]["y"][9] is None
    assert view["curves"]["loss"]["eval"] == {"x": [40], "y": [4.25]}
    assert view["curves"]["loss"]["lost"] == [{"x": [20, 21], "y": [9.0, 9.0]}]
    assert view["curves"]["mfu"]["ratio"] == pytest.approx(0.75)
    assert view["curves"]["mfu"]["planned"] == {"x": [1, 40], "y": [0.4, 0.4]}
    assert view["curves"]["memory_gib"]["says"].startswith("1.5 GiB of the host for the whole")
    assert view["curves"]["tokens_per_s"]["median"] == pytest.approx(1024 / 0.2)
    assert [one["step"] for one in view["marks"]["restarts"]] == [20]
    assert view["marks"]["skipped"][0]["says"] == "step 10 was skipped: loss is not finite"
    assert view["load"]["rows"] == [[1.5] * 40, [3.25] * 40]
    assert view["head"]["state"].startswith("stopped at step 40 of 20")
    facts = run_reader.read(folder)
    assert view["goodput"]["share"] == facts.summary.goodput
    assert sum(one["share"] for one in view["goodput"]["parts"]) == pytest.approx(1.0)
    assert facts.summary.num_lost == summarize([], [], facts.lost, 0).num_lost == 2


@pytest.mark.parametrize(
    ("silence", "words"), [(3.0, "running: step 3 of 20"), (9_000.0, "silent for 2h 30m after")]
)
def test_a_start_without_an_end_runs_or_is_silent(
    tmp_path: Path, silence: float, words: str
) -> None:
    folder = write_run(tmp_path / "run", MEANS, records(3), ended=[None])
    facts = replace(run_reader.read(folder), idle_s=silence)
    head = run_view.view(facts, {}, lambda step: None)["head"]
    assert head["live"] and head["state"].startswith(words)
    assert head["silent"] == (silence > 120)


def test_the_text_says_the_same_numbers(tmp_path: Path) -> None:
    kept = records(300, planned=PLANNED, mfu=0.3, memory_gib=1.5, load=(1.5, 3.25, 12.0))
    step = FakeStep(PLAN, usual)
    folder = write_run(tmp_path / "run", PLAN, kept, events=[step.lines(1)])
    view = asked(folder)
    lines = [*document.lines({"run": view}, None)]
    whole = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert "30.0% (median of the newest 100), planned 40.0%: 0.75 times the plan" in whole
    assert view["step"]["says"] in " ".join(whole.split())
    digits = next(line for line in lines if line.startswith("layer   2"))
    assert digits.split()[2].strip("9") == "" and "newest 12.00" in digits
    assert "0 P" in whole and "0 M" in whole
    assert {"head", "history", "loss", "samples", "step"} < set(run_view.PANELS)


def test_collectives_inside_of_an_action_count_for_the_dimension_that_they_serve() -> None:
    groups = ("tp", "ring", "ulysses", "ep-near", "ep-far", "etp", "fsdp", "pp")
    calls = [CollectiveSpan(axis, "send", i, i + 1, 8, 2) for i, axis in enumerate(groups)]
    did = ActionSpan(Action(0, "F", 0), 0.0, 0.0, float(len(groups)))
    assert collective_seconds(RankSpans(0, 9.0, (did,), tuple(calls))) == [
        {"tp": 1.0, "cp": 2.0, "ep": 3.0, "dp": 1.0}  # messages of the pipeline are waited for
    ]

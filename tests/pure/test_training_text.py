"""A run as values and as text: rates, goodput, the step line, the words when memory is short."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from fivefold.core.model.shape import training_flops
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.records.steps import (
    GIB,
    Pace,
    PlannedStep,
    Rate,
    RunStart,
    StepRecord,
    Summary,
    mfu,
    summarize,
)
from fivefold.render import rough_duration, thousands
from fivefold.render.training import (
    duration,
    out_of_memory,
    run_head,
    run_tail,
    step_line,
    summary_text,
)

PLANNED = PlannedStep(step_s=0.4, tokens_per_s=82_000, mfu=0.41, memory_gib=60.1)
FULL = StepRecord(
    step=120,
    loss=3.41268,
    norm=0.483,
    lr=3e-4,
    seconds=0.4121,
    tokens=32_803,
    world=8,
    first_sample=952,
    num_samples=8,
    wall=60.0,
    mfu=0.3823,
    memory_gib=61.33,
    planned=PLANNED,
)


def test_the_step_line_of_the_style() -> None:
    assert step_line(FULL, 2000, 774.0) == (
        "step 120/2000 | loss 3.4127 | norm 0.48 | lr 3.0e-04 | 412 ms | 79.6k tok/s (plan 82.0k) "
        "| MFU 38.2% (plan 41.0) | mem 61.3 GiB (plan 60.1) | eta 13m"
    )


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(FULL, mfu=None, memory_gib=None, planned=None)
    short = "step 120/120 | loss 3.4127 | norm 0.48 | lr 3.0e-04 | 412 ms | 79.6k tok/s"
    assert step_line(bare, 120) == short
    assert step_line(bare, 120, 0.0) == short  # nothing is left to wait for
    more = replace(bare, fullest=1.31, eval_loss=2.10341)
    assert step_line(more, 120) == f"{short} | fullest expert 1.3x | eval 2.1034"
    assert step_line(replace(FULL, planned=None), 120).endswith("MFU 38.2% | mem 61.3 GiB")


def test_a_skipped_step_says_why() -> None:
    skipped = replace(FULL, loss=math.nan, norm=math.inf, skipped="norm is not finite")
    line = step_line(skipped, 2000)
    assert "| loss nan | norm inf |" in line and line.endswith("| skipped (norm is not finite)")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (thousands(999.4), "999"),
        (thousands(999.6), "1.0k"),
        (thousands(79_620), "79.6k"),
        (thousands(999_960), "1.0M"),
        (duration(0.4121), "412 ms"),
        (duration(9.9994), "9999 ms"),
        (duration(9.9996), "10.0 s"),
        (rough_duration(42.3), "42s"),
        (rough_duration(59.7), "1m"),
        (rough_duration(3_590), "1h 0m"),
        (rough_duration(86_390), "1d 0h"),
    ],
)
def test_numbers_round_into_the_next_unit(shown: str, text: str) -> None:
    assert shown == text


def test_a_record_is_a_line_of_json_and_back() -> None:
    full = replace(FULL, load=(1.25, 2.0), spent={"save": 0.5}, eval_loss=2.5, scale=65_536.0)
    table = json.loads(json.dumps(full.to_json(), allow_nan=False))
    assert StepRecord.from_json(table) == full
    assert table["tokens_per_s"] == pytest.approx(79_600, rel=1e-3)
    assert table["tokens_per_s_per_gpu"] == pytest.approx(9_950, rel=1e-3)
    assert table["planned"]["mfu"] == 0.41
    broken = replace(FULL, loss=math.nan, norm=math.inf, skipped="loss is not finite")
    table = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert table["loss"] is None and math.isnan(StepRecord.from_json(table).loss)
    with pytest.raises(KeyError):
        StepRecord.from_json({"step": 1})


def test_trackers_see_what_is_known() -> None:
    known = FULL.scalars()
    assert known["loss"] == FULL.loss and known["planned/mfu"] == 0.41
    assert "eval_loss" not in known and "scale" not in known


def test_mfu_counts_model_flops_over_the_peak_of_all() -> None:
    options = PlanOptions("tiny", layout="dp=4", machine="h100", seq=64, microbatch_size=1)
    plan = resolve(options)
    flops = training_flops(plan.shape, 64).total
    assert plan.machine is not None
    rate = 4 * plan.machine.peak("bf16") / flops
    assert mfu(plan, rate / 2) == pytest.approx(0.5)
    assert mfu(resolve(replace(options, machine=None)), rate) is None


def test_the_time_to_come_is_that_of_the_steps_behind() -> None:
    pace = Pace()
    first = replace(FULL, step=1, seconds=30.0, spent={"build": 20.0})  # compiles
    assert pace.eta(first, 10) is None
    assert pace.eta(replace(FULL, step=2, seconds=1.0), 10) == pytest.approx(8.0)
    slow = replace(FULL, step=3, seconds=1.0, spent={"save": 1.0})
    assert pace.eta(slow, 10) == pytest.approx(1.5 * 7)


def test_a_step_without_a_time_has_no_rates_and_stops_nothing() -> None:
    lost = replace(FULL, step=2, seconds=None, wall=None, mfu=None, data=None)
    line = "step 2/9 | loss 3.4127 | norm 0.48 | lr 3.0e-04 | no time | mem 61.3 GiB (plan 60.1)"
    assert step_line(lost, 9) == line
    assert "step_s" not in lost.scalars() and "tokens_per_s" not in lost.scalars()
    table = json.loads(json.dumps(lost.to_json(), allow_nan=False))
    assert StepRecord.from_json(table) == lost and table["tokens_per_s"] is None
    pace = Pace()
    assert pace.eta(replace(FULL, step=1), 9) is None and pace.eta(lost, 9) is None
    assert pace.eta(replace(FULL, step=3, seconds=2.0), 9) == pytest.approx(12.0)
    assert pace.eta(replace(lost, step=4), 9) == pytest.approx(10.0)
    timed = [record(1, 2.0), record(3, 6.0)]
    summary = summarize([RunStart(0.0, 6.0, {})], [timed[0], lost, timed[1]], [], 0)
    assert (summary.num_steps, summary.num_untimed, summary.step_s) == (3, 1, 2.0)
    assert summary.tokens_per_s == Rate(50.0, 50.0) and summary.wall_s == pytest.approx(6.0)
    words = "1 step without a time, of which no rate is computed"
    assert words in summary_text(summary).splitlines()
    alone = summarize([RunStart(0.0, None, {})], [lost], [], 0)
    assert alone.step_s is None and alone.tokens_per_s is None and summary_text(alone)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -0.404, 0.0])
def test_times_that_cannot_be_are_null_in_a_line_and_missing_in_a_record(seconds: float) -> None:
    table = replace(FULL, seconds=0.1, wall_s=0.1).to_json() | {"seconds": seconds}
    table |= {"wall_s": seconds, "wall": seconds}
    wrong = StepRecord.from_json(table)
    assert wrong.seconds is None and wrong.wall_s is None and wrong.wall is None
    odd = replace(FULL, evals={"a": {"loss": math.nan}}, scale=math.inf)
    assert odd.to_json()["evals"] == {"a": {"loss": None}} and odd.to_json()["scale"] is None


def record(step: int, wall: float, restart: int = 0, **more: Any) -> StepRecord:
    base = {"loss": 5.0 - step / 10, "seconds": 2.0, "tokens": 100, "world": 2}
    return replace(FULL, step=step, wall=wall, restart=restart, **{**base, **more})


def interrupted() -> Summary:
    """Three starts: the first dies behind step 4, the second is stopped, the third finishes.

    Steps 3 and 4 were lost, since the second start had a checkpoint of step 2.
    """
    starts = [
        RunStart(0.0, None, {}),
        RunStart(20.0, 32.0, {"save": 1.0}),
        RunStart(100.0, 110.0, {}),
    ]
    kept = [
        record(1, 5.0, spent={"build": 3.0}),
        record(2, 8.0, spent={"save": 0.5}, eval_loss=3.0),
        record(3, 26.0, 1, spent={"build": 2.0, "load": 1.0}),
        record(4, 29.0, 1, loss=math.nan, skipped="loss is not finite"),
        record(5, 107.0, 2, seconds=1.0, world=1, memory_gib=70.0, spent={"load": 4.0}),
        record(6, 109.0, 2, eval_loss=3.5, spent={"eval": 0.25}),
    ]
    lost = [record(3, 11.0, loss=0.1, memory_gib=75.0), record(4, 13.0, spent={"eval": 0.5})]
    return summarize(starts, kept, lost, num_checkpoints=2)


def test_goodput_is_what_is_left_of_the_wall_time() -> None:
    summary = interrupted()
    # Up: 13 s to the last word of the first start, 12 s and 10 s; down: from 13 to 20 s.
    assert summary.wall_s == pytest.approx(13 + 7 + 12 + 10)
    named = {"steps": 9, "skipped": 2, "lost": 4, "down": 7, "build": 5, "load": 5}
    named |= {"save": 1.5, "eval": 0.75}
    assert summary.spent == pytest.approx({**named, "other": 42 - sum(named.values())})
    assert summary.goodput == pytest.approx(9 / 42)


def test_a_summary_counts_what_counts() -> None:
    summary = interrupted()
    assert (summary.num_steps, summary.num_tokens) == (6, 500)
    assert (summary.num_skipped, summary.num_lost, summary.num_restarts) == (1, 2, 2)
    assert summary.last_loss == pytest.approx(4.4) and summary.best_loss == pytest.approx(4.4)
    assert (summary.eval_loss, summary.best_eval_loss, summary.best_step) == (3.5, 3.0, 6)
    assert summary.memory_gib == 75.0  # also of steps that are lost
    assert summary.tokens_per_s == Rate(500 / 9, 50.0)
    assert summary.tokens_per_s_per_gpu == Rate(500 / (4 * 4 + 1), 25.0)
    table = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert table["tokens_per_s"]["median"] == 50.0 and table["planned"]["mfu"] == 0.41


def test_steps_that_a_replay_proved_are_counted() -> None:
    """A step that ran twice because of a spike is no proof."""
    proof: dict[str, Any] = {"why": None, "same": True, "ranks": []}
    found = [record(1, 5.0, again=proof), record(2, 8.0, again={**proof, "why": "loss"})]
    summary = summarize([RunStart(0.0, 9.0, {})], [*found, record(3, 9.0)], [], 0)
    assert summary.num_proven == 1
    assert summary_text(summary).splitlines()[1].endswith("kept, 1 step ran twice with equal bits")


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = summarize([RunStart(0.0, 3.0, {"build": 2.0})], [], [], 0)
    assert summary.goodput == 0 and summary.spent["other"] == pytest.approx(1.0)
    assert summary.last_loss is None and summary.tokens_per_s is None
    assert summary_text(summary).splitlines()[0] == "0 steps | 0 tokens"
    assert summarize([RunStart(0.0, None, {})], [], [], 0).goodput == 0


def test_the_summary_in_words() -> None:
    assert summary_text(interrupted()).splitlines() == [
        "6 steps | 500 tokens | loss 4.4000 (best 4.4000 at step 6) | eval 3.5000 (best 3.0000)",
        "1 skipped, 2 lost to 2 restarts, 2 checkpoints kept",
        "",
        "goodput 21.4%: 9.0 s of 42.0 s went to steps that count",
        "the rest: build 5.0 s, load 5.0 s, save 1.5 s, eval 0.8 s, skipped 2.0 s, lost 4.0 s, "
        "down 7.0 s, other 7.8 s",
        "",
        "median of the steps                      planned      measured",
        "step                                      400 ms       2000 ms",
        "tok/s                                      82.0k            50",
        "tok/s/GPU                                  41.0k            25",
        "MFU                                        41.0%         38.2%",
        "memory, at most                         60.1 GiB      75.0 GiB",
        "over all steps: 56 tok/s, 29 tok/s/GPU",
    ]


def test_without_a_plan_the_summary_has_dashes() -> None:
    kept = [record(1, 2.0, planned=None, mfu=None, memory_gib=None)]
    text = summary_text(summarize([RunStart(0.0, 2.0, {})], kept, [], 0))
    assert text.splitlines()[3:] == [
        "goodput 100.0%: 2.0 s of 2.0 s went to steps that count",
        "",
        "median of the steps                      planned      measured",
        "step                                           –       2000 ms",
        "tok/s                                          –            50",
        "tok/s/GPU                                      –            25",
        "over all steps: 50 tok/s, 25 tok/s/GPU",
    ]


def test_the_head_tells_what_is_planned() -> None:
    plan = resolve(PlanOptions("tiny", layout="dp=2 tp=2", seq=64, microbatch_size=1))
    lines = run_head(plan, Recipe(steps=7), "float32", "a corpus", PLANNED).splitlines()
    assert lines[0].endswith("1f1b, float32: 4 ranks, 7 steps of adamw")
    assert lines[2] == "a corpus; no document masks"
    planned = "planned: 400 ms a step, 82.0k tok/s, 20.5k a GPU, MFU 41.0%, 60.1 GiB"
    assert lines[3] == planned
    assert planned not in run_head(plan, Recipe(), "float32", "a corpus", None)


def test_out_of_memory_says_what_was_expected_and_the_way_out() -> None:
    expected = {"weights": 2.0 * GIB, "activations": 1.5 * GIB}
    allocated = {"weights": 2.0 * GIB, "everything else": 4.25 * GIB}
    text = out_of_memory("step 3 2F0", expected, allocated, "tp=4 dp=2, 2.1 GiB", "memory/x.pickle")
    assert text.splitlines() == [
        "out of memory at step 3 2F0",
        "GiB                                      planned     allocated",
        "weights                                      2.0           2.0",
        "activations                                  1.5             –",
        "everything else                                –           4.2",
        "total                                        3.5           6.2",
        "nearest layout that fits: tp=4 dp=2, 2.1 GiB",
        "the memory as it was: memory/x.pickle (open it at pytorch.org/memory_viz)",
    ]
    assert "no layout of as many GPUs fits" in out_of_memory("step 3", expected, {}, None)


def test_the_tail_marks_what_differs() -> None:
    held = {"weights": 10, "gradients": 1000, "optimizer": 20, "padding": 0, "total": 1030}
    measured = {**held, "padding": 4, "total": 1034}
    moved = {"tp": {"calls": 2, "bytes": 64}}
    check = {"loss": 2.5, "difference": 1e-7, "allowed": 2e-6, "spread": 1e-8, "passed": True}
    check |= {"steps": 1, "flips": 1, "routed": 8, "gradients": None, "tie_gap": None}
    table = {
        "world": 4,
        "memory": {"rank": 1, "ranks_as_planned": 3, "planned": held, "measured": measured},
        "traffic": {"step": 2, "match": False, "planned": moved, "measured": {}},
        "stopped": False,
        "check": None,
        "seconds": 1.25,
        "steps": [{"loss": 2.5}],
    }
    lines = list(run_tail(table))
    assert lines[1] == "bytes of rank 1, the fullest             planned      measured"
    assert [line.split()[0] for line in lines if line.endswith("differs")] == ["padding", "total"]
    assert "3 of 4 ranks hold what was planned, to the byte" in lines
    assert f"{'tp':<34}{64:>14}{0:>14}{2:>15}{0:>10}" in lines
    assert lines[-2:] == ["this step differs from the plan", "\ndone in 1.2 s"]
    checked = list(run_tail({**table, "check": check}))
    assert checked[-5] == "loss of step 1: 2.500000000; one process: 2.500000000"
    assert "3 times the spread 1.0e-08" in checked[-4] and checked[-1] == "PASS in 1.2 s"
    assert checked[-3].startswith("gradients: not compared, because tokens of the first step")
    assert checked[-2].startswith("routing flips: 1 of 8 ")
    followed = list(run_tail({**table, "check": check | {"tie_gap": 3e-8}}))
    assert "3.0e-08 below those of its own choice, allowed 2.0e-06" in followed[-2]
    nearest = {"steps": 3, "step": 2, "tensor": "norm.weight", "difference": 1e-6, "allowed": 4e-6}
    compared = list(run_tail({**table, "check": check | {"gradients": nearest}}))
    assert compared[-3] == (
        "gradients of 3 steps: nearest to its limit is norm.weight in step 2, off by 1.0e-06 of "
        "its norm, allowed 4.0e-06"
    )
    stopped = list(run_tail({**table, "stopped": True, "memory": None}))
    assert "--resume" in stopped[0] and stopped[2].startswith("moved in step 2, all ranks")
    later = {"stopped": True, "steps": [{"loss": 2.5}, {"loss": 2.4}], "check": check}
    both = list(run_tail({**table, **later}))
    assert both[-6] == "compared: 1 step that both had run when they were asked to stop"
    assert both[-5] == checked[-5]  # of the step that was compared, not of the last one
    assert list(run_tail({**table, "traffic": None})) == ["no step was left to run"]

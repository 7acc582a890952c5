"""Runs with failures: the simulation against closed forms, published figures and its own books."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fivefold as ff
from fivefold.cli import run
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.failures import (
    FailureDomain,
    FailureRates,
    RecoveryDesign,
    SaveCost,
    expected_goodput,
    first_order_goodput,
    steps_between,
    young_interval,
)
from fivefold.cost.step.checkpoint_time import checkpoint_bytes, save_cost
from fivefold.planner.failures import FailingJob, scale_points, simulate_failures
from fivefold_page.explore import explore
from tests import failure_published
from tests.failure_scales import scale_svg

HOUR = 3600.0
NO_SAVE, USUAL = SaveCost(0, 0, 0, 0, 0), SaveCost(1e12, 20, 0, 0, 10)
RECOVERY = RecoveryDesign(30, 300)


def job(
    mtbf: float = 2 * HOUR,
    save: SaveCost = USUAL,
    step: float = 5.0,
    design: RecoveryDesign = RECOVERY,
    **changes: Any,
) -> FailingJob:
    steps = steps_between(save.cost, mtbf, step, save.write) if save.cost else 1
    values: dict[str, Any] = {"domain": FailureDomain(4096, 8), "replicas": 32, "step": step}
    values |= {"rates": {"gpu": 1 / mtbf}, "design": design, "location": "disk", "save": save}
    values |= {"steps": steps, "disk": save, "disk_interval": steps * step}
    return FailingJob(**values | changes)


@pytest.mark.parametrize("mtbf", [0.2 * HOUR, HOUR, 12 * HOUR])
@pytest.mark.parametrize("save", [SaveCost(1, 20, 0, 0, 10), SaveCost(1, 1, 60, 2, 60)])
def test_the_closed_form_is_the_mean_of_the_simulation(mtbf: float, save: SaveCost) -> None:
    asked = job(mtbf, save)
    found = simulate_failures(asked, days=1500 * mtbf / 86_400, runs=60, seed=1)
    assert found.goodput == pytest.approx(asked.expected, rel=0.01)


def test_young_and_daly_where_they_apply() -> None:
    """First order: short saves and recoveries beside the time between failures."""
    mtbf, cost, recovery = 20 * HOUR, 15.0, 120.0
    interval = young_interval(cost, mtbf)
    ours = expected_goodput(1 / mtbf, interval, SaveCost(1, cost, 0, 0, 0), recovery)
    assert ours == pytest.approx(first_order_goodput(1 / mtbf, interval, cost, recovery), rel=0.01)
    asked = job(mtbf, SaveCost(1, cost, 0, 0, 0), design=RecoveryDesign(20, 100))
    found = simulate_failures(asked, days=2000, runs=50, seed=3)
    least = first_order_goodput(1 / mtbf, interval, cost, 120)
    assert found.goodput == pytest.approx(least, rel=0.01)
    # No other interval is better by more than the first order leaves out.
    others = [
        expected_goodput(1 / mtbf, interval * factor, SaveCost(1, cost, 0, 0, 0), recovery)
        for factor in np.geomspace(0.2, 5, 41)
    ]
    assert max(others) <= ours * 1.0005


def test_every_second_is_somewhere() -> None:
    for design in (RecoveryDesign(30, 300), RecoveryDesign(30, 300, 3 * HOUR, spares=1)):
        found = simulate_failures(job(HOUR, design=design), days=20, runs=30, seed=2)
        assert found.goodput * 20 * 86_400 + sum(found.lost.values()) == pytest.approx(20 * 86_400)
        low, high = found.goodput_band
        assert low <= found.goodput <= high


def test_without_a_failure_only_saves_cost() -> None:
    found = simulate_failures(job(1e12, step=2000.0), days=1, runs=5, seed=0)
    assert found.interruptions == 0
    assert {cause for cause, seconds in found.lost.items() if seconds} <= {"save"}


def test_the_same_seed_is_the_same_answer() -> None:
    first, again, other = (simulate_failures(job(), 10, 20, seed) for seed in (4, 4, 5))
    assert first == again and first.goodput != other.goodput


def test_a_recovery_as_long_as_the_time_between_failures_is_repeated() -> None:
    """Each try lasts whole and succeeds with probability exp(-rate · try)."""
    asked = job(600, NO_SAVE, step=1.0, design=RecoveryDesign(0, 600))
    found = simulate_failures(asked, days=40, runs=40, seed=0)
    assert found.goodput == pytest.approx(600 / (600 + 600 * math.e), abs=0.01)


def test_spares_that_run_out_shrink_the_job_and_then_stop_it() -> None:
    away = RecoveryDesign(0, 0, repair=10 * HOUR, spares=0)
    shrunk = simulate_failures(job(HOUR, NO_SAVE, design=away), 30, 30, 0)
    # Ten hosts are away on the mean when another fails, each of another replica of 32.
    assert shrunk.goodput == pytest.approx(21 / 32, abs=0.02)
    assert shrunk.lost["shrunk"] > 0 and shrunk.lost["waiting"] == 0
    stopped = simulate_failures(job(HOUR, NO_SAVE, design=away, replicas=1), 30, 30, 0)
    assert stopped.lost["waiting"] > 0
    assert stopped.goodput == pytest.approx(1 / 11, abs=0.02)
    enough = replace(away, spares=64)
    assert simulate_failures(job(HOUR, NO_SAVE, design=enough), 30, 30, 0).lost["shrunk"] == 0


def test_switches_take_hosts_and_hosts_fail_by_themselves() -> None:
    domain = FailureDomain(4096, 8)
    rates = FailureRates(50_000, host=10_000, switch=20_000).per_second(domain)
    assert rates == pytest.approx(
        {"gpu": 4096 / 50_000 / HOUR, "host": 512 / 10_000 / HOUR, "switch": 128 / 20_000 / HOUR}
    )
    assert [domain.hosts_lost(each) for each in ("gpu", "host", "switch")] == [1, 1, 4]


def test_partners_that_die_together_cost_what_the_disk_has_not() -> None:
    """Only failures during a recovery can hit a partner; in a small job they often do."""
    asked = job(600, NO_SAVE, step=1.0, design=RecoveryDesign(0, 300), location="memory")
    asked = replace(asked, disk=SaveCost(1, 0, 0, 0, 0), disk_interval=600.0)
    large = simulate_failures(asked, 20, 30, 0)
    small = simulate_failures(replace(asked, domain=FailureDomain(40, 8)), 20, 30, 0)
    assert small.lost["rework"] > 10 * large.lost["rework"]
    assert small.goodput < large.goodput


def test_a_checkpoint_has_masters_and_states() -> None:
    found = ff.plan("llama-3.1-8b", machine="h100", layout="dp=64").plan
    assert found.machine is not None
    assert checkpoint_bytes(found) == pytest.approx(12 * 8.03e9, rel=0.001)
    disk, memory = (save_cost(found, found.machine, place) for place in ("disk", "memory"))
    assert disk.write == pytest.approx(checkpoint_bytes(found) / 8e9)
    assert memory.write < disk.write / 20 and memory.stall == disk.stall
    tuned = ff.plan("llama-3.1-8b", machine="h100", layout="dp=64", lora=16).plan
    assert 16e9 < checkpoint_bytes(tuned) < 18e9


@pytest.mark.parametrize("row", failure_published.ROWS, ids=lambda row: row.name)
def test_published_shares_within_five_points(row: failure_published.PublishedShare) -> None:
    found = failure_published.simulated(row, runs=60)
    assert abs(found.goodput - row.share) < 0.05
    if row.at_least:
        assert found.goodput > row.share
    text = failure_published.DOC.read_text("utf-8")
    line = next(each for each in text.splitlines() if each.startswith(f"| {row.name} |"))
    shown = float(line.split("**")[1].rstrip("%")) / 100
    assert shown == pytest.approx(found.goodput, abs=0.01)
    assert row.sources in text


def test_the_table_of_designs_is_current() -> None:
    text = failure_published.DOC.read_text("utf-8")
    assert all(line in text for line in failure_published.designs())


def test_thousands_of_runs_a_minute_at_131072_gpus() -> None:
    asked = job(
        14 * 60, domain=FailureDomain(131_072, 8), design=RecoveryDesign(30, 120, spares=64)
    )
    began = time.process_time()
    simulate_failures(asked, days=5.4, runs=200, seed=0)
    seconds = 10 * (time.process_time() - began)  # of 54 days
    assert 200 / seconds * 60 > 1000  # here 7,000, for a run with 5,500 failures


@settings(max_examples=40)
@given(
    st.floats(60, 1e6),
    st.floats(0, 100),
    st.floats(0, 1000),
    st.floats(0, 600),
    st.sampled_from([None, 0, 3, 512]),
    st.sampled_from(["disk", "memory"]),
)
def test_any_job_keeps_its_books(
    mtbf: float, cost: float, write: float, restart: float, spares: int | None, place: str
) -> None:
    save = SaveCost(1, cost, write, 0.04 * write, write)
    asked = job(mtbf, save, design=RecoveryDesign(10, restart, 2 * HOUR, spares), location=place)
    found = simulate_failures(asked, days=1, runs=4, seed=0)
    assert 0 <= found.goodput <= 1
    assert all(seconds >= -1e-6 for seconds in found.lost.values())
    assert found.goodput * 86_400 + sum(found.lost.values()) == pytest.approx(86_400)


def test_designs_get_better_and_the_picture_has_them() -> None:
    planned = ff.plan("llama-3.1-8b", machine="h100", layout="dp=64")
    assert planned.estimate is not None
    points = scale_points(planned.estimate, FailureRates(50_000), (8, 1024, 65_536))
    for gpus in (1024, 65_536):
        shares = [point.goodput for point in points if point.gpus == gpus]
        assert shares == sorted(shares)
    drawn = scale_svg(points, at=64)
    assert drawn.count("<polyline") == 4 and 'class="here"' in drawn


def test_explore_draws_a_month_with_failures() -> None:
    params = {"model": "llama-7b", "gpus": "4096", "tp": "2", "pp": "1", "batch": "4096"}
    params |= {"schedule": "1f1b", "machine": "h100"}
    view = explore.pictures(params)["failures"]
    assert view["missing"] is None and view["gpus"] == 4096
    assert view["goodput"] == pytest.approx(1 - sum(view["lost"].values()))
    assert all(len(each["shares"]) == len(view["scales"]) for each in view["designs"])
    assert any("Young and Daly" in line for line in explore.PANELS["failures"].text(view))
    other = explore.pictures(params | {"machine": "b200"})["failures"]
    assert "b200" in other["missing"] and other["designs"] == []


def simulate(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    code = run(["simulate", *words.split()])
    said = capsys.readouterr()
    return int(code or 0), said.out + said.err


def test_the_verb_answers_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.1-8b --machine h100 --layout dp=64 --days 30 --mtbf-gpu 5000 --runs 20"
    code, text = simulate(capsys, words)
    assert code == 0 and "Young and Daly" in text and "to the memory of partner hosts" in text
    code, text = simulate(capsys, f"{words} --checkpoint disk --spares 1 --seed 7 --json")
    answer = json.loads(text)
    assert code == 0 and answer["checkpoint"] == "disk"
    assert answer["interval_s"] == answer["interval_steps"] * answer["step_s"]
    assert answer["goodput"] == pytest.approx(1 - sum(answer["lost_s"].values()) / (30 * 86_400))
    again = ff.simulate(
        *("llama-3.1-8b",), machine="h100", layout="dp=64", days=30, mtbf_gpu=5000, runs=20
    )
    assert str(again) == simulate(capsys, words)[1].rstrip("\n")
    text = simulate(capsys, words.replace("--days 30", "--days 1"))[1]
    assert ", 1 day\n" in text and ": of 1 day " in text


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--mtbf-gpu 0", "above 0"),
        ("--mtbf-gpu 9 --mtbf-host 0", "failures of one host"),
        ("--mtbf-gpu 9 --mtbf-switch 0", "failures of one leaf switch"),
        ("--mtbf-host 9", "without --mtbf-gpu"),
        ("--spares 9", "more than the 8 hosts"),
        ("--spares -1", "0 or more"),
        ("--detect nan", "0 or more"),
        ("--days 0", "above 0"),
        ("--checkpoint tape", "choose from auto, disk, memory"),
        ("--runs 0", "above 0"),
        ("--seed -1", "0 or more"),
        ("--storage 0", "above 0"),
        ("--mtbf-gpu 1e-9", "failures in a run"),
        ("--mtbf-gpu 1 --runs 90000 --days 100", "runs at most"),
        ("--gpus 8 --layout dp=8 --checkpoint memory", "two failure domains"),
        ("--machine b200", "no rate of failures is known for b200"),
    ],
)
def test_what_cannot_be_simulated(
    words: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "" if "--layout" in words else "--layout dp=64"
    machine = "" if "--machine" in words else "--machine h100"
    days = "" if "--days" in words else "--days 2"
    code, text = simulate(capsys, f"llama-3.1-8b {layout} {machine} {days} {words}")
    assert code == 2 and rule in text and "Traceback" not in text


def test_a_simulation_needs_a_machine() -> None:
    with pytest.raises(FivefoldError, match="needs the time of a step"):
        ff.simulate("tiny", days=1, mtbf_gpu=1000)


def test_plans_say_days_with_failures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--layout", "dp=64", "--tokens", "1e12", "--machine", "h100"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]
    assert found["days_with_failures"] == pytest.approx(found["days"] / found["goodput"])
    assert run(words) == 0
    assert "days with failures: goodput" in capsys.readouterr().out
    assert run([*words, "--set", "mtbf_gpu=500", "--json"]) == 0
    worse = json.loads(capsys.readouterr().out)["run"]
    assert worse["days"] == found["days"] and worse["goodput"] < found["goodput"]
    assert run([*words, "--set", "mtbf_gpu=0"]) == 2
    assert "above 0" in capsys.readouterr().err
    assert run([*words[:-1], "b200"]) == 0
    assert "no rate is known for b200" in capsys.readouterr().out

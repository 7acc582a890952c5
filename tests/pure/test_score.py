"""Estimates against measured runs: metrics by hand, the contract of the command, bad input."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fivefold.cli import main
from fivefold.core.errors import FivefoldError
from fivefold.planner.error_bars import accuracy
from fivefold_score import outcome as metrics
from fivefold_score.outcome import (
    PredictedRange,
    ScoredRun,
    ScoreResult,
    held_out,
    measured_seconds,
    score,
    score_row,
)
from fivefold_score.report_page import Dot, render, score_svg, sections
from fivefold_score.rows import FIELDS, read_runs
from fivefold_score.scoring import figures, summary

# Korthikanti et al. (arXiv 2205.05198), tables 3 and 5, and Narayanan et al. (arXiv 2104.04473),
# table 1: eighteen runs as their papers print them.
PUBLISHED = Path(__file__).parent.parent / "data" / "published.jsonl"
SVG = "{http://www.w3.org/2000/svg}"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PUBLISHED.read_text("utf-8").splitlines()]


def row(name: str = "korth-22b-full", **changes: Any) -> dict[str, Any]:
    found = next(each for each in rows() if each["id"] == name)
    return {**found, **changes}


def run_of(name: str, predicted: float, measured: float | None, **changes: Any) -> ScoredRun:
    """An outcome with these times and nothing else of interest."""
    made = ScoredRun(
        row=row(id=name),
        family=name.split("-")[0],
        source_name=name.split("-")[0],
        assumptions=(),
        fitted=False,
        routed=False,
        num_cases=1,
        seconds=PredictedRange(predicted, predicted),
        measured_seconds=measured,
        source=None if measured is None else "step_time_s",
        gib=PredictedRange(1.0, 1.0),
        measured_gib=None,
        fits=True,
        fitting=("rows=1",),
        did_fit=None,
        tflops=300.0,
    )
    return replace(made, **changes)


# Metrics by hand


def test_errors_of_points_and_intervals() -> None:
    assert PredictedRange(9.0, 9.0).error(10.0) == pytest.approx(0.1)
    assert PredictedRange(12.0, 12.0).error(10.0) == pytest.approx(0.2)
    assert PredictedRange(8.0, 12.0).error(10.0) == 0.0
    assert PredictedRange(11.0, 15.0).error(10.0) == pytest.approx(0.1)
    assert PredictedRange(5.0, 8.0).error(10.0) == pytest.approx(0.2)


def test_stats_are_those_of_the_textbook() -> None:
    found = metrics.stats([0.0, 0.1, 0.2, 0.3, 1.0])
    assert found["n"] == 5 and found["median"] == pytest.approx(0.2)
    assert found["mean"] == pytest.approx(0.32)
    assert found["p90"] == pytest.approx(0.3 + 0.6 * 0.7)  # place 3.6 of 0..4
    assert metrics.stats([]) == {"n": 0, "median": None, "mean": None, "p90": None}


def test_confusion_counts_false_fits_among_the_failed() -> None:
    fits, fails = True, False
    pairs = [(fits, fits)] * 5 + [(fails, fits)] + [(fails, fails)] * 3 + [(fits, fails)]
    found = metrics.confusion(pairs)
    assert found == {"n": 10, "failed": 4, "accuracy": 0.8, "false_fit": 0.25}
    assert metrics.confusion([])["accuracy"] is None
    assert metrics.confusion([(fits, fits)])["false_fit"] is None


def test_kendall_tau_by_hand() -> None:
    assert metrics.kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert metrics.kendall_tau([4, 3, 2, 1], [10, 20, 30, 40]) == pytest.approx(-1.0)
    # 6 pairs, one of them the wrong way round.
    assert metrics.kendall_tau([1, 2, 4, 3], [1, 2, 3, 4]) == pytest.approx(4 / 6)
    # One tie in the predictions: 5 agree, of √(5 · 6).
    assert metrics.kendall_tau([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / 30**0.5)
    assert metrics.kendall_tau([2, 2, 2, 2], [1, 2, 3, 4]) == 0.0


def test_regret_is_what_the_choice_costs() -> None:
    predicted, measured = [3.0, 1.0, 2.0, 4.0, 5.0], [11.0, 15.0, 12.0, 10.0, 20.0]
    assert metrics.regret(predicted, measured, tries=1) == pytest.approx(0.5)
    assert metrics.regret(predicted, measured, tries=3) == pytest.approx(0.1)
    assert metrics.regret(predicted, measured, tries=4) == 0.0


def test_a_size_is_left_out_of_its_own_scale() -> None:
    sizes = {"a": [(1.0, 2.0), (2.0, 4.0)], "b": [(1.0, 1.0)]}
    found = metrics.leave_one_size_out(sizes)
    assert found == {"a": pytest.approx(0.5), "b": pytest.approx(1.0)}
    assert metrics.leave_one_size_out({"a": [(1.0, 2.0)]}) == {}


# Outcomes


def test_seconds_come_from_the_best_source() -> None:
    tokens = 4 * 2048
    base: dict[str, Any] = {"tokens_per_s_per_gpu": 512.0, "tflops_per_gpu": 100.0}
    assert measured_seconds(row(achieved={"step_time_s": 1.5, **base}), 1e15) == (
        1.5,
        "step_time_s",
    )
    seconds, source = measured_seconds(row(achieved=base), 1e15)
    assert (seconds, source) == (tokens / (512 * 8), "tokens_per_s_per_gpu")
    seconds, source = measured_seconds(row(achieved={"tflops_per_gpu": 100.0}), 1e15)
    assert (seconds, source) == (pytest.approx(1e15 / 8e14), "tflops_per_gpu")
    assert measured_seconds(row(achieved={**base, "status": "OOM"}), 1e15) == (None, None)


def test_an_open_microbatch_gives_an_interval() -> None:
    exact = [score_row(row(micro_batch=size)).seconds for size in (1, 2, 4)]
    found = score_row(row(micro_batch=None))
    assert found.is_open
    assert found.seconds == (min(exact)[0], max(exact)[0])


def test_degrees_must_make_the_gpus() -> None:
    with pytest.raises(FivefoldError, match="make 8 ranks"):
        score_row(row(gpus=16))


def test_rows_that_cannot_be_scored_say_why() -> None:
    found = score([row(), row(id="korth-open", dp=None), row(id="korth-empty", achieved={})])
    assert [one.name for one in found.outcomes] == ["korth-22b-full"]
    assert [(one.id, "dp" in one.reason) for one in found.skipped] == [("korth-open", True)]
    assert [one.id for one in found.unmeasured] == ["korth-empty"]
    assert summary(found)["specified"] == {"n": 2, "skipped": 1, "share": 0.5}


def test_the_held_out_half_is_that_of_the_hash() -> None:
    for name in ("a", "b", "korth-22b-full"):
        assert held_out(name) == bool(hashlib.sha256(name.encode()).digest()[-1] % 2)
    names = [str(each) for each in range(400)]
    assert 160 < sum(map(held_out, names)) < 240


# Summaries


def test_open_runs_and_converted_ones_are_counted_apart() -> None:
    outcomes = [
        run_of("x-1", 11.0, 10.0),
        run_of("x-2", 8.0, 10.0, num_cases=2, seconds=PredictedRange(8.0, 12.0)),
        run_of("x-3", 8.0, 10.0, num_cases=2, seconds=PredictedRange(6.0, 8.0)),
        run_of("x-4", 5.0, 10.0, source="tflops_per_gpu"),
        run_of("x-5", 5.0, None),
    ]
    found = summary(ScoreResult(outcomes))
    assert found["time"]["n"] == 1 and found["time"]["mean"] == pytest.approx(0.1)
    assert found["intervals"]["n"] == 2 and found["intervals"]["inside"] == 1
    assert found["intervals"]["mean"] == pytest.approx(0.1)
    assert found["from_tflops"]["n"] == 1 and found["from_tflops"]["mean"] == pytest.approx(0.5)


def test_memory_and_verdicts() -> None:
    outcomes = [
        run_of("x-1", 1.0, None, measured_gib=2.0, did_fit=True),
        run_of("x-2", 1.0, None, did_fit=False),
        run_of("x-3", 1.0, None, fits=False, did_fit=False),
        run_of("x-4", 1.0, None, fits=None, did_fit=False),  # some of its cases fit: no verdict
    ]
    found = figures(outcomes)
    assert found["memory"]["n"] == 1 and found["memory"]["mean"] == pytest.approx(0.5)
    assert found["oom"]["n"] == 3 and found["oom"]["accuracy"] == pytest.approx(2 / 3)
    assert found["oom"]["false_fit"] == pytest.approx(0.5)


def test_ranks_are_taken_within_one_job() -> None:
    job = [run_of(f"x-{place}", 1.0 + place, 10.0 + place) for place in range(4)]
    other = [
        replace(one, row={**one.row, "global_batch": 8}, measured_seconds=100.0 - place)
        for place, one in enumerate(job)
    ]
    few = [replace(one, row={**one.row, "gpus": 16}) for one in job[:3]]
    found = figures([*job, *other, *few])["rank"]
    assert (found["groups"], found["n"]) == (2, 8)
    assert found["tau"] == pytest.approx(0.0)  # one group all right, one all wrong
    assert found["top1_regret"] == pytest.approx((0 + 3 / 97) / 2)
    assert found["best3_regret"] == pytest.approx((0 + 1 / 97) / 2)


def test_halves_are_told_for_families_with_a_factor() -> None:
    names = [f"x-{place}" for place in range(20)]
    outcomes = [run_of(name, 11.0, 10.0, fitted=True) for name in names if not held_out(name)]
    outcomes += [run_of(name, 12.0, 10.0, fitted=True) for name in names if held_out(name)]
    outcomes += [run_of("y-1", 15.0, 10.0)]
    table = summary(ScoreResult(outcomes))
    halves = table["held_out"]
    assert halves["fitted_half"]["time"]["mean"] == pytest.approx(0.1)
    assert halves["held_out_half"]["time"]["mean"] == pytest.approx(0.2)
    assert halves["all"]["time"]["n"] == 20 and halves["families_without"] == []
    assert table["groups"]["stack: no factor"]["time"]["mean"] == pytest.approx(0.5)


def test_a_factor_that_no_held_out_run_tests_is_named() -> None:
    names = [name for name in (f"x-{place}" for place in range(20)) if not held_out(name)]
    table = summary(ScoreResult([run_of(name, 11.0, 10.0, fitted=True) for name in names]))
    assert table["held_out"]["families_without"] == ["x"]
    assert "No run of x is in the held-out half" in render(list(sections(table)))


# The command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["score", *words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["score", *words])
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert not output.out and "Traceback" not in output.err
    return output.err


def test_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(run(capsys, str(PUBLISHED), "--json"))
    for key in ("time", "memory"):
        assert {"n", "median", "mean", "p90"} <= set(table[key])
    assert {"accuracy", "false_fit"} <= set(table["oom"])
    assert {"tau", "top1_regret", "best3_regret"} <= set(table["rank"])
    assert table["time"]["n"] == table["rows"] == 18
    assert not table["skipped"] and not table["unmeasured"]
    assert table["groups"]["source: korth"]["time"]["n"] == 8
    assert table["groups"]["recompute: selective"]["time"]["n"] == 4
    assert {"all", "fitted_half", "held_out_half"} <= set(table["held_out"])
    assert {"n", "inside"} <= set(table["intervals"])


def test_known_sets_stand_beside_other_planners(capsys: pytest.CaptureFixture[str]) -> None:
    sets = json.loads(run(capsys, str(PUBLISHED), "--json"))["sets"]
    korthikanti = next(one for one in sets if one["set"] == "Korthikanti")
    assert (korthikanti["n"], korthikanti["peer_n"]) == (8, 8)
    assert (korthikanti["calculon"], korthikanti["llm_analysis"]) == ("3.65%", "25.6%")
    outcomes = score([each for each in rows() if each["id"].startswith("korth")]).outcomes
    errors = [one.time_error for one in outcomes]
    assert korthikanti["ours"] == pytest.approx(sum(errors) / 8)
    assert not any(one["set"].startswith(("HF", "vTrain", "Llama")) for one in sets)


def test_a_run_in_two_files_counts_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_text(json.dumps(row(achieved={"step_time_s": 99.0}, fully_specified=None)))
    once = json.loads(run(capsys, str(PUBLISHED), "--json"))
    twice = json.loads(run(capsys, str(PUBLISHED), str(again), "--json"))
    assert (once["repeated"], twice["repeated"]) == (0, 1)
    assert twice["time"] == once["time"]


def test_the_page_and_its_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    text = run(capsys, str(PUBLISHED), "--page", str(page))
    assert "Korthikanti: mean error" in text and "18 runs: 18 scored" in text
    written = page.read_text("utf-8")
    assert "(accuracy.svg)" in written
    assert all(f"| `{name}` |" in written for name in FIELDS)
    for line in written.splitlines():  # every row of a table has the cells of its head
        assert not line.startswith("|") or line.endswith("|")
    dots = ElementTree.parse(tmp_path / "accuracy.svg").iter(f"{SVG}path")
    drawn = [each for each in dots if each.get("class") == "dots"]
    assert sum(each.get("d", "").count("M") for each in drawn) == 2 * 18


def test_dots_lie_where_their_times_say() -> None:
    picture = ElementTree.fromstring(
        score_svg([Dot("a", 1.0, 1.0, 1.0), Dot("a", 10.0, 1.0, 1.0), Dot("b", 1.0, 1.0, 10.0)])
    )
    paths = [
        each.get("d", "") for each in picture.iter(f"{SVG}path") if each.get("class") == "dots"
    ]
    # One decade to a side of 420 from (60, 460): measured to the right, predicted upwards.
    assert paths[0] == "M60 460h0M480 460h0"
    assert paths[1] == "M60 460L60 40"
    # Ratios of 1, and of 0.1, which stands at the edge of 1/2; the interval holds its run.
    assert re.findall(r"M(\d+)", paths[2]) == ["880", "670"]
    assert re.findall(r"M(\d+)", paths[3]) == ["880"]


def test_a_picture_of_nothing_is_still_one() -> None:
    assert "0 runs" in (ElementTree.fromstring(score_svg([])).get("aria-label") or "")


def without(key: str) -> Mapping[str, Any]:
    return {name: value for name, value in row().items() if name != key}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        (json.dumps(row(heads=float("nan"))), "line 2: not JSON: NaN"),
        (json.dumps(without("gpus")), "line 2: gpus is missing"),
        (json.dumps(without("achieved")), "line 2: achieved is missing"),
        (json.dumps(row(achieved=None)), "line 2: achieved is null"),
        (json.dumps(row(layers="many")), "line 2: layers = 'many' is not a finite number"),
        (json.dumps(row(sp="yes")), "line 2: sp = 'yes' is not true or false"),
        (json.dumps(row(achieved={"step_time_s": 0})), "achieved.step_time_s = 0 must be above 0"),
        (json.dumps(row(id="")), "line 2: id is empty"),
        (json.dumps(row("korth-175b-full")), "is already in line 1"),
    ],
)
def test_bad_rows_name_their_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(row('korth-175b-full'))}\n{line}\n")
    assert words in refuse(capsys, str(path))


def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot read" in refuse(capsys, str(tmp_path / "none.jsonl"))
    assert "cannot read" in refuse(capsys, str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no runs" in refuse(capsys, str(tmp_path / "empty.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refuse(capsys, str(tmp_path / "bytes.jsonl"))
    missing = tmp_path / "no" / "page.md"
    assert "cannot write" in refuse(capsys, str(PUBLISHED), "--page", str(missing))
    assert "RUNS" in refuse(capsys)


def test_many_problems_are_told_in_short(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("{\n" * 40)
    with pytest.raises(FivefoldError, match="and 28 more"):
        read_runs([path])


def test_scores_without_torch() -> None:
    code = (
        "import sys; from fivefold.cli import main\n"
        f"try: main(['score', {str(PUBLISHED)!r}])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_state_the_errors_that_every_plan_prints() -> None:
    """One source: presets/accuracy.toml."""
    bar, folder = accuracy(), Path(__file__).parents[2]
    said = f"within {bar.time:.1%}, nine of ten within {bar.time_p90:.1%}"
    for name in ("README.md", "docs/what-works.md"):
        assert said in (folder / name).read_text("utf-8"), name

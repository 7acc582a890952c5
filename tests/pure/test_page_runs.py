"""Several runs side by side, the time line of one, and axes that keep small differences small."""

from __future__ import annotations

import json
import math
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold import cli
from fivefold.core.errors import FivefoldError
from fivefold.records import run_reader
from fivefold.records.run_writer import RunFolder
from fivefold.records.steps import PlannedStep
from fivefold_page import document
from fivefold_page.run import compare as run_compare
from fivefold_page.run import curves as run_curves
from fivefold_page.run import view as run_view
from tests.pure.fake_runs import EPOCH, RECORD, add_sample, plan_of, records, write_run

PLAN = plan_of("h100")


def asked(folder: Path) -> dict[str, Any]:
    return run_view.view(run_reader.read(folder), {}, lambda step: None)


def observed(*words: str) -> tuple[int, str, str]:
    """The exit code of the verb, and what it prints."""
    out, wrong = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(wrong):
        try:
            cli.main(["observe", *words])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), wrong.getvalue()


@given(
    st.lists(st.floats(-1e9, 1e9), max_size=30), st.none() | st.floats(0, 1e9), st.floats(0, 0.9)
)
def test_an_axis_shows_everything_and_a_fair_part_around_the_plan(
    values: list[float], goal: float | None, least: float
) -> None:
    low, high = run_curves.axis_range(values, goal, least)
    assert math.isfinite(low) and math.isfinite(high) and low < high
    assert all(low <= each <= high for each in values)
    assert not values or min(values) < 0 or low >= 0
    if goal is not None:
        assert low <= goal * (1 - least) and goal * (1 + least) <= high


def test_two_thousandths_above_the_plan_do_not_look_like_a_breach(tmp_path: Path) -> None:
    """They are a hundredth of the axis; the first step, with its build, is beyond it and named."""
    planned = PlannedStep(step_s=0.2, tokens_per_s=5120.0, mfu=0.4, memory_gib=61.3)
    kept = [replace(one, memory_gib=61.42) for one in records(30, planned=planned)]
    kept[0] = replace(kept[0], seconds=4.0)
    folder = write_run(tmp_path / "run", PLAN, kept)
    facts = run_reader.read(folder)
    gpus = {**facts.starts[0].facts, "machine": {"gpus": ["H100"]}}
    facts = replace(facts, starts=(facts.starts[0]._replace(facts=gpus),))
    axis = run_view.view(facts, {}, lambda step: None)["curves"]["memory_gib"]["axis"]
    low, high = axis["range"]
    assert (61.42 - 61.3) / (high - low) < 0.01
    assert axis["band"] == pytest.approx([0.95 * 61.3, 1.05 * 61.3])
    rate = run_view.view(facts, {}, lambda step: None)["curves"]["step_s"]["axis"]
    assert rate["range"][1] < 0.3 and "step 1;" in rate["says"][1]


def test_failures_restarts_sets_and_samples_are_on_the_time_line(tmp_path: Path) -> None:
    kept = [replace(one, restart=int(one.step > 20), wall=5.0 * one.step) for one in records(30)]
    kept[9] = replace(kept[9], eval_loss=4.2, evals={"web": {"loss": 4.2}, "code": {"loss": None}})
    lost = [replace(RECORD, step=step, wall=55.0) for step in (21, 22)]
    folder = write_run(tmp_path / "run", PLAN, kept, lost=lost, ended=["failed", "done"])
    add_sample(folder, 10, "begin", "end")
    add_sample(folder, 22, "begin", "never counted")
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 23, "res')
    add_sample(folder, 30, "begin", "newest", restart=1)
    view = asked(folder)
    found = view["history"]
    assert [one["how"] for one in found["starts"]] == ["died", "done"]
    said = {one["kind"]: one["says"] for one in found["events"]}
    assert said["failure"].startswith("start 1 died after step 22: lost rank 3 at step 5 0F0")
    assert said["resume"] == "start 2 went on with step 21, 2 steps again"
    assert said["eval"] == "evaluated after step 10: web 4.2000, code not finite"
    assert [one["text"] for one in found["samples"]] == ["end", "newest"]
    repeated = [one["says"] for one in found["events"] if "repeated" in one["says"]]
    assert repeated == ["sample after step 22, a step that was repeated"]
    assert set(view["curves"]["loss"]["sets"]) == {"web", "code"}
    text = "\n".join(document.lines({"run": view}, None))
    assert "start 1 died" in text and "newest" in text and "eval web: 10: 4.2000" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_start_that_failed_is_not_live_and_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", PLAN, records(3), ended=[None])
    assert asked(folder)["head"]["live"]
    RunFolder(folder, 0, EPOCH, EPOCH).fail("lost rank 1 at step 4: it was killed by SIGKILL")
    head = asked(folder)["head"]
    assert not head["live"] and not head["silent"] and head["failed"]
    assert head["state"].startswith("failed after step 3 of 20: lost rank 1 at step 4")
    assert run_reader.read(folder).summary.num_restarts == 0


def test_panels_without_data_are_absent_or_say_what_would_fill_them(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", PLAN, [], ended=[None])
    missing = asked(empty)["missing"]
    assert missing["loss"] == missing["rates"] == "no step is recorded yet"
    assert missing["load"] == "" and "events=true" in missing["step"]
    assert [*document.lines({"run": asked(empty)}, None)]
    full = write_run(tmp_path / "full", PLAN, records(3, memory_gib=1.0, load=(1.5,)))
    add_sample(full, 3, "begin", "end")
    assert set(asked(full)["missing"]) == {"step"}


def test_runs_are_compared_by_name(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", PLAN, records(10, memory_gib=1.0))
    two = write_run(tmp_path / "two", plan_of(microbatches=16), records(5))
    code, out, _ = observed(str(one), str(two), "--json")
    table = json.loads(out)
    assert code == 0 and list(table) == ["schema_version", "runs", "run/one", "run/two"]
    runs = table["runs"]
    assert [each["name"] for each in runs["runs"]] == ["one", "two"]
    differs = {each["key"]: each["values"] for each in runs["differs"]}
    assert differs["microbatches"] == ["8", "16"] and differs["machine"] == ["h100", "–"]
    assert "layout" not in differs and runs["same"] > 20
    assert [each["run"] for each in runs["curves"]["loss"]["lines"]] == ["one", "two"]
    assert [each["run"] for each in runs["curves"]["memory_gib"]["lines"]] == ["one"]
    _, text, _ = observed(str(one), str(two), "--text")
    assert "microbatches" in text and "steps" in text and "one" in text.split("\n\n")[1]
    _, text, _ = observed(str(one), str(two), "--text", "--panel", "head")
    assert text.count("first started") == 2
    _, text, _ = observed(str(one), str(two), "--text", "--set", "at=run?run=1", "--panel", "head")
    assert text.startswith("two: tiny") and text.count("first started") == 1
    assert list(json.loads(observed(str(one), "--json")[1])) == ["schema_version", "run"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{0}", "{0}/none"], "none does not exist: give run folders"),
        (["{0}", "{1}"], "has no run.json: give run folders"),
        (["tiny", "{0}"], "tiny does not exist: give run folders"),
        (["{0}", "{0}/"], "is given twice"),
        (["{1}/none"], "none does not exist: give the folder that train --out made"),
        (["{1}"], "is neither a run"),
        (["nowhere"], "nowhere is neither a run folder, which train --out makes, nor a model"),
        (["llama-3.1-8"], "did you mean"),
        (["{0}", "--set", "at=run?run=3"], "unknown run '3'"),
        (["{0}", "--panel", "lost"], "unknown panel 'lost'"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, words: list[str], reason: str) -> None:
    run = write_run(tmp_path / "run", PLAN, records(3))
    (tmp_path / "other").mkdir()
    given = [word.format(run, tmp_path / "other") for word in words]
    code, out, wrong = observed(*given, "--text")
    assert code == 2 and reason in " ".join(wrong.split()) and not out


@pytest.mark.parametrize(
    ("runs", "found"), [(None, ["a", "b"]), ("1", ["b"]), ("1,0,1", ["b", "a"]), ("0,", ["a"])]
)
def test_runs_are_chosen_by_number(runs: str | None, found: list[str]) -> None:
    assert run_compare.chosen({} if runs is None else {"runs": runs}, ["a", "b"]) == found


@pytest.mark.parametrize("runs", ["", ",", "2", "-1", "a", "0;1"])
def test_a_number_of_no_run_is_refused(runs: str) -> None:
    with pytest.raises(FivefoldError):
        run_compare.chosen({"runs": runs}, ["a", "b"])


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(st.lists(PATHS, min_size=1, max_size=8, unique_by=str))
def test_names_of_runs_are_unique(paths: list[list[str]]) -> None:
    folders = ["/" + "/".join(path) for path in paths]
    names = run_compare.labels(folders)
    assert len({*names}) == len(names)
    assert all(folder.endswith(name) for folder, name in zip(folders, names, strict=True))

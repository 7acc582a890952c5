"""A training whose records are damaged, have no times or cannot be summarised: it ends as it went.

Commands run in forks of this process, so that what is patched here is patched in their ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fivefold.records.run_writer import Metrics, RunFolder, read_records, write_atomically
from fivefold.records.steps import StepRecord
from fivefold.train.clock import StepClock, StepMark, StepTimes
from tests.commands import in_fork

METRICS = Path("run", "metrics.jsonl")


def train(folder: Path, steps: int, *more: str) -> CompletedProcess[str]:
    words = ["train", "tiny", "--device", "cpu", "--seq", "8", "--batch", "2", "--out", "run"]
    words += ["--steps", str(steps), "--set", "layers=1,save_every=2,lr_curve=constant,warmup=0"]
    return in_fork([*words, *more], folder)


def test_a_run_with_damaged_metrics_is_trained_on_observed_and_exported(tmp_path: Path) -> None:
    assert train(tmp_path, 4).returncode == 0
    path = tmp_path / METRICS
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\x00\xff{", lines[2][:50], *lines[3:]]))
    damage = "metrics.jsonl is damaged: lines 2 to 3 are no records of steps (2: no JSON)"
    for words in (["observe", "run", "--json"], ["export", "run", "hf"]):
        done = in_fork(words, tmp_path)
        assert done.returncode == 0 and done.stderr.count("is damaged") == (words[0] == "observe")
        assert damage in done.stderr or words[0] == "export"  # which needs no records
    done = train(tmp_path, 6, "--resume")
    assert done.returncode == 0 and done.stderr.count("is damaged") == 1
    assert f"{damage}; moved to metrics.bad.jsonl" in done.stderr
    assert [record.step for record in read_records(path)] == [1, 4, 5, 6]
    assert (tmp_path / "run" / "metrics.bad.jsonl").read_bytes().count(b"\n") == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_steps"] == 4 and "step 6/6" in done.stdout
    assert "damaged" not in in_fork(["observe", "run", "--text"], tmp_path).stderr


def test_metrics_that_are_damaged_while_a_run_trains_are_named_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Metrics.append

    def damaging(metrics: Metrics, record: StepRecord) -> str | None:
        if record.step == 2:
            metrics.waiting = b"garbage\n"
        return append(metrics, record)

    monkeypatch.setattr(Metrics, "append", damaging)
    done = train(tmp_path, 3)
    assert done.returncode == 0 and done.stderr.count("is damaged") == 1
    assert "line 2 is no record of a step (no JSON)" in done.stderr
    assert "3 steps | " in done.stdout


@pytest.mark.parametrize("flag", ["--check", "--json"])
def test_a_run_that_has_ended_and_cannot_be_summarised_ends_as_its_training(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `run.json` becomes garbage in the second of three steps."""
    append = Metrics.append

    def damaging(metrics: Metrics, record: StepRecord) -> str | None:
        if record.step == 2:
            write_atomically(metrics.path.with_name("run.json"), "{")
        return append(metrics, record)

    monkeypatch.setattr(Metrics, "append", damaging)
    done = train(tmp_path, 3, flag)
    assert done.returncode == 0, done.stderr
    assert "fivefold: the end of the run is not recorded: cannot use run/run.json" in done.stderr
    assert "fivefold: the run has ended, but cannot be summarised: " in done.stderr
    if flag == "--json":
        table = json.loads(done.stdout)
        assert table["summary"] is None and len(table["steps"]) == 3
    else:
        assert "step 3/3" in done.stdout and "PASS in" in done.stdout


def test_a_run_that_fails_and_cannot_be_summarised_ends_as_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: RunFolder, *_: object) -> None:
        raise KeyError("no summary")

    def dies(metrics: Metrics, record: StepRecord) -> str | None:
        raise RuntimeError("the rank dies")

    monkeypatch.setattr(RunFolder, "summarize", fails)
    monkeypatch.setattr(Metrics, "append", dies)
    done = train(tmp_path, 2)
    assert done.returncode == 1 and "cannot be summarised: 'no summary'" in done.stderr
    assert "the rank dies" in done.stderr


def test_steps_without_a_time_are_named_once_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second and third step of five."""
    times, number = StepClock.times, iter(range(1, 6))

    def missing(clock: StepClock, mark: StepMark) -> StepTimes:
        found = times(clock, mark)
        return StepTimes(None, None, None, None) if next(number) in (2, 3) else found

    monkeypatch.setattr(StepClock, "times", missing)
    done = train(tmp_path, 5)
    assert done.returncode == 0 and done.stderr.count("has no time") == 1
    assert "fivefold: step 2 has no time" in done.stderr
    second = next(line for line in done.stdout.splitlines() if line.startswith("step 2/5"))
    assert "| no time |" in second and "tok/s" not in second and "nan" not in second
    assert "2 steps without a time" in done.stdout
    tables = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    names = ("seconds", "wall_s", "wall", "data", "mfu", "tokens_per_s", "tokens_per_s_per_gpu")
    assert all(table[name] is None for table in tables[1:3] for name in names)
    assert all(table["seconds"] > 0 and table["wall"] > 0 for table in (tables[0], *tables[3:]))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_untimed"] == 2 and summary["num_steps"] == 5 and summary["step_s"] > 0
    for flag in ("--text", "--json"):
        assert in_fork(["observe", "run", flag], tmp_path).returncode == 0
    assert train(tmp_path, 6, "--resume").returncode == 0


def test_a_run_that_fails_with_a_damaged_run_json_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(metrics: Metrics, record: StepRecord) -> str | None:
        write_atomically(metrics.path.with_name("run.json"), "{")
        raise RuntimeError("the rank dies")

    monkeypatch.setattr(Metrics, "append", dies)
    done = train(tmp_path, 2)
    assert done.returncode == 1 and "lost rank 0" in done.stderr, done.stderr
    assert "the rank dies" in done.stderr
    assert "this failure is not recorded: cannot use run/run.json" in done.stderr

"""Python's functions that start ranks: they answer as the commands do, from any process that can
fork."""

from __future__ import annotations

import doctest
import html
import json
import multiprocessing
import platform
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fivefold as ff
from fivefold.commands.train import StartedRun
from fivefold.core.errors import JSON_SCHEMA
from fivefold.launch import backend
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.records.steps import StepRecord
from tests.api_page import LONG, sections
from tests.commands import in_fork

RUNS = {"layout": "dp=2", "steps": 2, "seq": 32, "batch": 4}
# What differs between two runs: times and their folders. Of a step this is compared.
CHANGING = ("seconds", "run", "summary")
OF_STEP = ("step", "loss", "norm", "lr")


def words_of(keys: dict[str, Any]) -> list[str]:
    return [f"--{key.replace('_', '-')}={value}" for key, value in keys.items()]


def steady(table: Any) -> Any:
    """JSON without what differs between two runs of the same."""
    if isinstance(table, list):
        return [steady(each) for each in table]
    if not isinstance(table, dict):
        return table
    if "loss" in table and "lr" in table:
        return {key: table[key] for key in OF_STEP}
    times = {key for key in table if key in CHANGING or key.endswith("_s")}
    return {key: steady(each) for key, each in table.items() if key not in times}


def equal(answer: Any, words: list[str], folder: Path) -> None:
    done = in_fork([*words, "--json"], folder)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table.pop("schema_version") == JSON_SCHEMA  # which the command line adds
    assert steady(table) == steady(json.loads(json.dumps(answer.to_json())))


@pytest.mark.sample(0.4)
def test_verify_answers_as_the_command(tmp_path: Path) -> None:
    told: list[Any] = []
    answer = ff.verify("tiny", layout="dp=2", steps=1, on_progress=told.append)
    assert answer.passed and told[-1].done == told[-1].total
    equal(answer, ["verify", "tiny", "--layout", "dp=2", "--steps", "1"], tmp_path)
    assert str(answer).splitlines()[-1].startswith("PASS in ")
    assert "PASS: tiny on dp=2, 2 ranks" in answer._repr_html_()


@pytest.mark.nightly
def test_generation_is_verified_too() -> None:
    answer = ff.verify("tiny", layout="tp=2", generate=True)
    assert answer.passed and "largest error of logits" in answer._repr_html_()
    assert "generation against the forward" in str(answer)


@pytest.mark.sample(0.4)
def test_rehearse_answers_as_the_command(tmp_path: Path) -> None:
    answer = ff.rehearse("tiny", layout="dp=2", seq=32, layers=2, rank=[0])
    words = ["--layout", "dp=2", "--seq", "32", "--set", "layers=2", "--rank", "0"]
    equal(answer, ["rehearse", "tiny", *words], tmp_path)
    assert answer.passed and "traceEvents" in answer.trace()
    assert "PASS" in answer._repr_html_()


def test_train_answers_as_the_command_and_generate_goes_on(tmp_path: Path) -> None:
    told: list[Any] = []
    run = ff.train("tiny", out=tmp_path / "ours", on_progress=told.append, **RUNS)
    assert isinstance(told[0], StartedRun)
    assert [type(each) for each in told[1:]] == [StepRecord] * 2
    assert run.losses == tuple(each.loss for each in told[1:]) and run.passed
    equal(run, ["train", "tiny", "--out", "theirs", *words_of(RUNS)], tmp_path)
    assert "loss, step 1" in run._repr_html_() and repr(run).startswith("TrainedRun(tiny on dp=2")
    pieces: list[str] = []
    options = {"max_tokens": 4, "seed": 3, "temperature": 1.0}
    written = ff.generate(run, "def ", on_piece=lambda one: pieces.append(one.text), **options)
    assert "".join(pieces) == written.text
    words = ["generate", str(run.folder), "--prompt", "def ", "--json", *words_of(options)]
    [ours] = written.to_json()
    assert steady(json.loads(in_fork(words, tmp_path).stdout)) == steady(
        json.loads(json.dumps(ours))
    )
    both = ff.generate(run.folder, ["def ", "import "], **options)
    assert both[0].tokens == written[0].tokens and len(both) == 2
    assert f"<mark>{html.escape(both[1].text)}" in both._repr_html_()
    with pytest.raises(ff.FivefoldError, match="2 completions: take one"):
        _ = both.text


def test_what_is_refused_starts_no_rank(tmp_path: Path) -> None:
    with pytest.raises(ff.FivefoldError, match="too many for one"):
        ff.verify("tiny", layout="dp=128")
    with pytest.raises(ff.FivefoldError, match="neither a run"):
        ff.generate(tmp_path, "x")
    with pytest.raises(ff.FivefoldError, match="no prompt"):
        ff.generate(tmp_path_run(tmp_path), [])


def tmp_path_run(folder: Path) -> Path:
    """A run without a checkpoint."""
    (folder / "plan.toml").write_text(ff.plan("tiny").plan.to_toml(), "utf-8")
    return folder


def add(worker: Worker, number: int) -> int:
    return worker.rank + number + int(torch.ones(300, 300).mm(torch.ones(300, 300))[0, 0])


def in_child(test: Any) -> Any:
    """What a function returns in a fork: it may do to its process what it wants."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(test()))
    process.start()
    assert ours.poll(60), "it hangs"
    found = ours.recv()
    process.join()
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="on ARM it is refused")
def test_ranks_are_forked_after_torch_has_used_its_threads() -> None:
    def answers() -> list[int]:
        torch.set_num_threads(2)
        torch.ones(700, 700).mm(torch.ones(700, 700))
        with Pool(2) as pool:
            return pool.run(add, 5)

    assert in_child(answers) == [305, 306]


def test_a_pool_gives_the_threads_back() -> None:
    def threads() -> tuple[int, int]:
        torch.set_num_threads(2)
        with Pool(1):
            during = torch.get_num_threads()
        return during, torch.get_num_threads()

    assert in_child(threads) == (1, 2)


def refusal() -> str:
    try:
        backend.require_forkable()
    except ff.FivefoldError as error:
        return str(error)
    return ""


def hang() -> None:
    time.sleep(60)


def test_what_cannot_fork_ranks_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not refusal()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "has used a GPU" in refusal() and "restarted kernel" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr(backend.dist, "is_initialized", lambda: True)
        assert "has a process group" in refusal()
    with monkeypatch.context() as patch:
        daemon = SimpleNamespace(daemon=True)
        patch.setattr(multiprocessing, "current_process", lambda: daemon)
        assert "daemonic" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr(backend.platform, "machine", lambda: "aarch64")
        patch.setattr(torch, "get_num_threads", lambda: 2)
        assert not refusal()
        patch.setattr(backend, "_PROBE", 0.3)
        patch.setattr(backend, "_multiply", hang)
        assert "OMP_NUM_THREADS=1" in refusal()


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("titles", [LONG[:1], LONG[1:2], LONG[2:]], ids=lambda titles: titles[0])
def test_the_long_examples_of_the_page_work(
    titles: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(dict(sections())[title] for title in titles)
    test = doctest.DocTestParser().get_doctest(text, {"ff": ff}, titles[0], "docs/python.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.summarize(verbose=False).failed == 0

"""What a run leaves behind: its folder, its lines, its events, its curves, its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.schedule import Action
from fivefold.parallel.mesh import CollectiveRecord
from fivefold.records import run_writer as run_folder
from fivefold.records.run_reader import read as read_run
from fivefold.records.run_writer import (
    Metrics,
    RunFolder,
    TimeSpent,
    commit_of,
    gpu_names,
    read_lines,
    read_records,
)
from fivefold.records.steps import StepRecord
from fivefold.train.callbacks import memory
from fivefold.train.callbacks.memory import Snapshots
from fivefold.train.callbacks.records import (
    RecordCallback,
    SpanCallback,
    SpanLog,
    _SpanWriter,
    log_targets,
    open_trackers,
)

CPU = torch.device("cpu")
FIRST = StepRecord(
    step=1,
    loss=2.5,
    norm=1.0,
    lr=1e-3,
    seconds=0.5,
    tokens=64,
    world=2,
    first_sample=0,
    num_samples=4,
    wall=1.0,
)
FACTS = {"layout": "dp=2", "world": 2}


def at(step: int, restart: int = 0) -> StepRecord:
    return replace(FIRST, step=step, restart=restart, first_sample=4 * (step - 1), wall=float(step))


def written(folder: Path, *steps: StepRecord, after: int = 0) -> None:
    metrics = Metrics(folder, after)
    for each in steps:
        metrics.append(each)
    metrics.close()


def test_a_new_folder_has_the_plan_and_what_ran_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run", "model = 1\n", FACTS, resume=False)
    (start,) = json.loads((folder.path / "run.json").read_text("utf-8"))["starts"]
    assert (folder.path / "plan.toml").read_text("utf-8") == "model = 1\n"
    assert start["layout"] == "dp=2" and start["world"] == 2 and start["command"] == sys.argv
    assert start["versions"]["torch"] == torch.__version__
    assert start["machine"]["num_cpus"] >= 1
    assert folder.restart == 0 and len(folder.identity) == 32
    assert time.time() - 10 < folder.began == folder.started <= time.time()
    assert [each.name for each in folder.path.iterdir() if each.name[0] == "."] == []


def test_a_second_run_is_refused_where_one_is(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", FACTS, resume=False)
    with pytest.raises(FivefoldError, match=r"has a run already.*--resume.*--out"):
        RunFolder.create(tmp_path, "b", FACTS, resume=False)
    assert (tmp_path / "plan.toml").read_text("utf-8") == "a"


def test_nobodys_plan_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("mine", "utf-8")
    with pytest.raises(FivefoldError, match=r"has plan\.toml already"):
        RunFolder.create(tmp_path, "b", FACTS, resume=False)


def test_a_restart_goes_on_and_keeps_a_plan_that_it_changes(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "a", FACTS, resume=True)  # with nothing to resume yet
    second = RunFolder.create(tmp_path, "a", {"layout": "tp=2"}, resume=True)
    third = RunFolder.create(tmp_path, "c", FACTS, resume=True)
    assert [each.restart for each in (first, second, third)] == [0, 1, 2]
    assert RunFolder.open(tmp_path) == third
    assert third.began == first.began and third.identity == first.identity
    assert (tmp_path / "plan.toml").read_text("utf-8") == "c"
    assert [each.name for each in tmp_path.glob("plan.*.toml")] == ["plan.1.toml"]
    starts = json.loads((tmp_path / "run.json").read_text("utf-8"))["starts"]
    assert [each["layout"] for each in starts] == ["dp=2", "tp=2", "dp=2"]


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{", "utf-8")
    with pytest.raises(BadFile, match=r"run\.json"):
        RunFolder.create(tmp_path, "a", FACTS, resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(FivefoldError, match=r"cannot write .*file.*--out"):
        RunFolder.create(tmp_path / "file" / "run", "a", FACTS, resume=False)


def test_a_line_is_in_the_file_when_its_step_is_over(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.append(at(1))
    assert read_records(tmp_path / "metrics.jsonl") == [at(1)]  # nothing was closed
    metrics.close()


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    written(tmp_path, at(1), at(2))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert read_records(path) == [at(1), at(2)]
    written(tmp_path, at(3, 1), after=2)
    assert [json.loads(line)["step"] for line in path.read_text("utf-8").splitlines()] == [1, 2, 3]
    assert not (tmp_path / "metrics.lost.jsonl").exists()


def test_a_line_that_is_broken_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n', "utf-8")
    assert read_lines(path).damage == f"{path} is damaged: line 1 is no record of a step (no loss)"
    path.unlink()
    path.mkdir()
    with pytest.raises(BadFile, match=r"metrics\.jsonl"):
        read_records(path)


def test_every_step_appears_once_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    written(tmp_path, *(at(step) for step in range(1, 6)))
    written(tmp_path, at(4, 1), at(5, 1), after=3)
    written(tmp_path, at(3, 2), after=2)
    kept = read_records(tmp_path / "metrics.jsonl")
    assert [(each.step, each.restart) for each in kept] == [(1, 0), (2, 0), (3, 2)]
    lost = read_records(tmp_path / "metrics.lost.jsonl")
    places = [(each.step, each.restart) for each in lost]
    assert places == [(4, 0), (5, 0), (3, 0), (4, 1), (5, 1)]


def test_a_move_that_was_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, at(1), at(2))

    def dies(path: Path, text: str) -> None:
        if path.name == "metrics.jsonl":
            raise KeyboardInterrupt
        path.write_text(text, "utf-8")

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "write_atomically", dies)
        with pytest.raises(KeyboardInterrupt):
            Metrics(tmp_path, 1)
    written(tmp_path, after=1)
    assert read_records(tmp_path / "metrics.jsonl") == [at(1)]
    assert read_records(tmp_path / "metrics.lost.jsonl") == [at(2)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_reported_with_its_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.close()
    with Path("/dev/full").open("ab", buffering=0) as metrics.file:
        said = metrics.append(at(1))
        assert said is not None and "metrics.jsonl: No space left" in said and "goes on" in said
        assert metrics.append(at(2)) is None  # it is said once
    with metrics.path.open("ab", buffering=0) as metrics.file:  # there is room again
        assert metrics.append(at(3)) is None and metrics.close() is None
    assert read_records(metrics.path) == [at(1), at(2), at(3)]


def test_the_summary_of_a_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", FACTS, resume=False)
    written(tmp_path, at(1), at(2))
    again = RunFolder.create(tmp_path, "a", FACTS, resume=True)
    written(tmp_path, replace(at(2, 1), spent={"load": 0.25}), after=1)
    again.end("done", {"save": 0.125})
    for name in ("step-00000001", "step-00000002", ".step-00000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}", "utf-8")
    summary = again.summarize()
    assert (summary.num_steps, summary.num_lost, summary.num_restarts) == (2, 1, 1)
    assert summary.num_checkpoints == 2
    assert summary.spent["save"] == 0.125 and summary.spent["load"] == 0.25
    assert summary.spent["steps"] == 1.0 and summary.spent["lost"] == 0.5
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summary.to_json()
    assert folder.began == again.began


def test_time_spent_is_taken_once() -> None:
    spent = TimeSpent()
    with spent.on("save"):
        time.sleep(0.01)
    spent.add("save", 1.0)
    with pytest.raises(ZeroDivisionError), spent.on("eval"):
        raise ZeroDivisionError
    taken = spent.take()
    assert 1.01 <= taken["save"] < 1.5 and "eval" in taken
    assert spent.take() == {}


def test_the_commit_is_that_of_the_package_or_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    (tmp_path / "file").write_text("1", "utf-8")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = commit_of(tmp_path)
    assert commit is not None and len(commit) == 40
    (tmp_path / "file").write_text("2", "utf-8")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_gpus_are_named_as_the_driver_does(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == []
    for place in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / place).mkdir()
        text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 17\n"
        (tmp_path / place / "information").write_text(text, "utf-8")
    assert gpu_names(tmp_path) == ["NVIDIA H200"] * 2


def test_a_run_is_read_without_torch() -> None:
    code = "import sys, fivefold.records.run_writer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / "events" / f"rank-{rank:05d}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_events_tell_what_was_when(tmp_path: Path) -> None:
    events = SpanLog(tmp_path, 3, 1, CPU)
    before = time.perf_counter_ns()
    outer = events.begin(Action(2, "F", 0))
    inner = events.begin("tp/all_gather", 4096, 2)
    time.sleep(0.01)
    thread = threading.Thread(target=events.end, args=(inner,))
    thread.start()
    thread.join()
    events.end(outer)
    events.step(7)
    events.close()
    anchor, collective, action = lines_of(tmp_path, 3)
    assert (anchor["step"], anchor["restart"], anchor["rank"]) == (7, 1, 3)
    assert (action["name"], action["kind"]) == ("2F0", "action")
    assert (collective["name"], collective["kind"]) == ("tp/all_gather", "collective")
    assert (collective["bytes"], collective["group"]) == (4096, 2)
    moments = [before, action["begin"], collective["begin"], collective["end"], action["end"]]
    assert [*moments, anchor["clock_ns"]] == sorted([*moments, anchor["clock_ns"]])
    assert collective["end"] - collective["begin"] >= 10_000_000
    wall = anchor["wall_ns"] + action["begin"] - anchor["clock_ns"]
    assert abs(wall - time.time_ns()) < 30e9


def test_events_of_a_restart_go_on_behind_whole_lines(tmp_path: Path) -> None:
    for restart in (0, 1):
        events = SpanLog(tmp_path, 0, restart, CPU)
        events.end(events.begin('a "name"'))
        events.step(1)
        events.close()
        with (tmp_path / "events" / "rank-00000.jsonl").open("a") as file:
            file.write('{"name": "2F')
    run_folder.cut_torn_line(tmp_path / "events" / "rank-00000.jsonl")
    found = lines_of(tmp_path)
    assert [line.get("restart", line.get("name")) for line in found] == [
        0,
        'a "name"',
        1,
        'a "name"',
    ]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    run_folder.cut_torn_line(path)  # nothing is there
    for text, left in ((b"x" * 200_000, 0), (b"a\n" + b"x" * 200_000, 2), (b"a\n", 2), (b"", 0)):
        path.write_bytes(text)
        run_folder.cut_torn_line(path)
        assert path.stat().st_size == left


def test_events_that_are_off_write_nothing(tmp_path: Path) -> None:
    off = SpanCallback(None, 0, CPU)
    off.start(0)
    off.actions.end(off.actions.begin(Action(2, "F", 0)))
    off.end(off.begin(CollectiveRecord("tp", "all_gather", 8, 2), (0, 1)))
    off.after_step(1)
    off.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_events_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    events = SpanLog(tmp_path, 0, 0, CPU)
    events.close()
    events.writer = _SpanWriter(Path("/dev/full"))
    events.step(1)
    events.close()
    said = events.writer.problem()
    assert said is not None and "cannot write /dev/full: No space" in said and "goes on" in said
    events.step(2)  # nobody writes it
    assert events.writer.problem() is None


def test_the_words_of_log() -> None:
    assert (
        log_targets(" tensorboard + wandb") == {"tensorboard", "wandb"}
        and log_targets("") == frozenset()
    )
    with pytest.raises(UnknownName, match="did you mean tensorboard"):
        log_targets("tensorbord")


def fake(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_curves_go_to_both_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float, int]] = []
    logged: list[Mapping[str, Any]] = []
    opened: list[Mapping[str, Any]] = []

    def writer(**options: Any) -> SimpleNamespace:
        opened.append(options)
        return SimpleNamespace(add_scalar=lambda *point: drawn.append(point), close=list)

    def init(**options: Any) -> SimpleNamespace:
        opened.append(options)
        return SimpleNamespace(log=logged.append, finish=list, define_metric=lambda *a, **k: None)

    fake("torch.utils.tensorboard", monkeypatch, SummaryWriter=writer)
    fake("wandb", monkeypatch, init=init)
    both = open_trackers("wandb+tensorboard+memory", tmp_path, "abc", {"lr": 1.0}, after=5)
    for each in both:
        each.log(6, {"loss": 2.5, "lr": 0.1})
        each.close()
    assert drawn == [("loss", 2.5, 6), ("lr", 0.1, 6)]
    assert logged == [{"step": 6, "loss": 2.5, "lr": 0.1}]
    assert opened[0]["purge_step"] == 6 and opened[1]["id"] == "abc"
    assert open_trackers("memory", tmp_path, "abc", {}, after=0) == []


@pytest.mark.parametrize(
    ("word", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FivefoldError, match=f"pip install {word}"):
        open_trackers(word, tmp_path, "abc", {}, after=0)


def test_without_a_gpu_there_is_a_note_and_no_snapshot(tmp_path: Path) -> None:
    asked = Snapshots(tmp_path, 0, CPU, requested=True)
    assert asked.note is not None and "GPU" in asked.note
    assert asked.step(1) is None and asked.out_of_memory() is None
    assert Snapshots(tmp_path, 0, CPU, requested=False).note is None
    assert list(tmp_path.iterdir()) == []


def test_the_first_steps_are_recorded_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    fake_memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _dump_snapshot=lambda path: Path(path).write_text("x", "utf-8"),
    )
    monkeypatch.setattr(memory.torch.cuda, "memory", fake_memory)
    asked = Snapshots(tmp_path, 2, torch.device("cuda"), requested=True)
    found = [asked.step(number) for number in range(11, 16)]
    path = tmp_path / "memory" / "rank-00002-step-00000013.pickle"
    assert found == [None, None, path, None, None] and path.exists()
    assert len(calls) == 2 and calls[1] == {"enabled": None}
    quiet = Snapshots(tmp_path, 2, torch.device("cuda"), requested=False)
    left = quiet.out_of_memory()
    assert left is not None and left.name == "rank-00002-out-of-memory.pickle" and left.exists()
    assert len(calls) == 2
    monkeypatch.setattr(memory.torch.cuda, "memory", SimpleNamespace())
    bare = Snapshots(tmp_path, 2, torch.device("cuda"), requested=True)
    assert bare.note is not None and "torch" in bare.note and bare.out_of_memory() is None


def test_no_tracker_ends_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    drawn, said = list[Any](), list[Any]()
    writer = SimpleNamespace(add_scalar=lambda *point: drawn.append(point), close=broken)
    fake("torch.utils.tensorboard", monkeypatch, SummaryWriter=lambda **_: writer)
    run = SimpleNamespace(log=broken, finish=broken, define_metric=lambda *a, **k: None)
    fake("wandb", monkeypatch, init=lambda **_: run)
    folder = RunFolder.create(tmp_path / "run", "", FACTS, resume=False)
    plan = SimpleNamespace(layout="dp=2", shape=SimpleNamespace(name="tiny"))
    rank_run = SimpleNamespace(
        rank=SimpleNamespace(job=SimpleNamespace(plan=plan)),
        settings=SimpleNamespace(recipe=Recipe(log="tensorboard+wandb")),
        worker=SimpleNamespace(rank=0, report=said.append),
        folder=folder,
    )
    for number in range(2):
        records = RecordCallback(rank_run)  # type: ignore[arg-type]
        records.start(0)
        for step in (1, 2):
            records.on_record(at(step))
        records.close()
        monkeypatch.setattr(sys.modules["wandb"], "init", broken)  # the second start has none
        words = [each for each in said if isinstance(each, str)]
        name = "wandb" if number else "WeightsAndBiases"
        assert f"{name} failed (ConnectionError: no network): the training goes on" in words[0]
        assert len(words) == 2 and words[1].startswith("TensorBoard failed") and drawn
        said.clear(), drawn.clear()


def test_a_damaged_run_json_changes_no_result(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "", FACTS, resume=False)
    for text in ("{", '{"starts": []}', '{"starts": [1]}', "[]"):
        (tmp_path / "run.json").write_text(text)
        for said in (folder.fail("lost"), folder.note_saves(1, 5, "it"), folder.end("done", {})):
            assert said is not None and "is not recorded" in said


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "metrics.lost.jsonl", "plan.toml"])
def test_a_pipe_in_the_place_of_a_file_is_not_opened(tmp_path: Path, name: str) -> None:
    """To read it would wait for a writer, for ever."""
    folder = RunFolder.create(tmp_path, "model = 'tiny'", FACTS, resume=False)
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    if name == "plan.toml":
        assert "is no regular file" in str(read_run(tmp_path).no_plan)
        return
    with pytest.raises(BadFile, match=f"{name}.*\n*.*is no regular file"):
        read_run(tmp_path)


def test_samples_and_events_that_are_no_files_are_refused_or_left_out(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "model = 'tiny'", FACTS, resume=False)
    (tmp_path / "events").mkdir()
    os.mkfifo(tmp_path / "events" / "rank-00000.jsonl")
    assert read_run(tmp_path).event_steps == {}
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(BadFile, match="is no regular file"):
        read_run(tmp_path)

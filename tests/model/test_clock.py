"""The clock of a step: it ends with the update on the device, and nobody waits for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.plan import PlanOptions, resolve
from fivefold.core.recipe import Recipe
from fivefold.launch.worker import NoMeeting, Worker
from fivefold.records import StepRecord
from fivefold.records.run_folder import RunFolder, read_records, read_summary
from fivefold.train import TrainSettings, run_rank
from fivefold.train.clock import StepClock, StepEnd


class Gpu:
    """A device with a queue: what the host issues runs when all before it has run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.free, self.waits = 100.0, 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self, stream: object) -> None:
                self.at = gpu.free = max(gpu.free, gpu.host)

            def query(self) -> bool:
                return self.at <= gpu.host

            def synchronize(self) -> None:
                gpu.waits += self.at > gpu.host
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def issue(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds
        self.host += 0.001

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(None)  # type: ignore[arg-type]
        return event


@pytest.mark.parametrize("early", [False, True])
def test_a_step_ends_with_its_update_on_the_gpu(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 300 ms, of which 20 are the update, issued before the host waits for the rest
    (`early`) or after it; the third waits 50 ms for its rows, and 200 ms were spent before the
    fifth."""
    gpu = Gpu(monkeypatch)
    clock, marks, found = StepClock(torch.device("cuda"), 90.0, 99.0), [], []
    for number in range(1, 7):
        if number == 5:
            gpu.wait()
            gpu.host += 0.2
        clock.ask()
        gpu.host += 0.05 if number == 3 else 0.0
        clock.begin()
        gpu.issue(0.28)
        event, end = gpu.now(), gpu.free
        if early:
            gpu.issue(0.02)
        gpu.host = max(gpu.host, end)
        clock.synchronised(event)
        if not early:
            gpu.issue(0.02)
        marks.append(clock.mark())
        passed = [mark for mark in marks if mark.end.passed]
        assert len(passed) == number - 1 - len(found) or number == 5  # all but the newest
        found += [clock.times(marks.pop(0)) for _ in passed]
    assert gpu.waits == 0
    found += [clock.times(each) for each in marks]
    assert gpu.waits == 1  # only for the last
    assert [each.data for each in found] == pytest.approx([0, 0, 0.05, 0, 0, 0])
    # The wait for rows is hidden behind the update before it, but for 30 of 50 ms and 1 to issue.
    steps = [each.step for each in found]
    assert steps == pytest.approx([0.3, 0.3, 0.331, 0.3, 0.3, 0.3], abs=2e-3)
    walls = [each.wall for each in found]
    assert walls == pytest.approx([1.3, 0.3, 0.331, 0.3, 0.5, 0.3], abs=2e-3)
    assert sum(walls) == pytest.approx(gpu.free - 99.0) and found[-1].since_start == pytest.approx(
        gpu.free - 90.0
    )


def trained(tmp_path: Path, recipe: Recipe) -> tuple[list[tuple[str, Any]], tuple[float, float]]:
    """The messages of a run of one rank in this process; and the seconds from its start to the
    begin of its last step, and to its last record."""
    before = time.perf_counter()
    plan = resolve(PlanOptions("tiny", seq=8, batch=2, set={"layers": "1"}, train=recipe))
    folder = RunFolder.create(tmp_path / "run", plan.to_toml(whole=True), {}, resume=False)
    after, said, moments = time.perf_counter(), list[tuple[str, Any]](), dict[object, float]()

    def send(kind: str, value: Any) -> None:
        said.append((kind, value))
        moments[value.step if isinstance(value, StepRecord) else value] = time.perf_counter()

    settings = TrainSettings(recipe, folder=folder.path)
    run_rank(Worker(0, NoMeeting(), send), plan, settings)
    last = recipe.steps
    return said, (moments[f"step {last}"] - after, moments[last] - before)


def test_the_walls_of_a_run_are_its_wall_time(tmp_path: Path) -> None:
    said, (least, most) = trained(tmp_path, Recipe(steps=8, save_every=3, eval_every=4))
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [value for kind, value in said if kind == "report"] == records and len(records) == 8
    walls = [each.wall_s or 0.0 for each in records]
    assert sum(walls) == pytest.approx(records[-1].wall)
    assert least < sum(walls) < most  # from the start to the end of the last update
    for each in records:
        assert each.data is not None and each.wall_s is not None
        assert 0 <= each.data <= each.seconds <= each.wall_s
        assert each.tokens_per_s == each.tokens / each.wall_s
    summary = read_summary(tmp_path / "run")
    assert summary.spent["save"] > 0 and summary.spent["eval"] > 0
    assert summary.step_s == pytest.approx(sorted(walls)[3] / 2 + sorted(walls)[4] / 2)


def test_records_that_wait_for_the_device_come_in_order_and_before_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no update ever ended before the next step: only a checkpoint waits for it."""
    monkeypatch.setattr(StepEnd, "passed", property(lambda self: False))
    said, _ = trained(tmp_path, Recipe(steps=7, save_every=3))
    order = [
        value.step if isinstance(value, StepRecord) else value
        for kind, value in said
        if kind == "report" or str(value).startswith("checkpoint")
    ]
    saves = [f"checkpoint {number}" for number in (3, 6, 7)]
    assert order == [1, 2, 3, saves[0], 4, 5, 6, saves[1], 7, saves[2]]


def test_records_of_older_versions_are_read(tmp_path: Path) -> None:
    trained(tmp_path, Recipe(steps=3))
    path = tmp_path / "run" / "metrics.jsonl"
    tables = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for table in tables:
        del table["data"], table["wall_s"]
    path.write_text("".join(json.dumps(table) + "\n" for table in tables), "utf-8")
    for record in read_records(path):
        assert record.data is None and record.wall_s is None
        assert record.elapsed == record.seconds and record.scalars()["step_s"] == record.seconds
    summary = read_summary(tmp_path / "run")
    assert summary.step_s is not None and summary.tokens_per_s is not None

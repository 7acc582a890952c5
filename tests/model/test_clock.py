"""The clock of a step: it ends with the update on the device, and nobody waits for it."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.worker import NoMeeting, Worker
from fivefold.records.run_writer import RunFolder, read_records, read_summary
from fivefold.records.steps import StepRecord, mfu
from fivefold.train.clock import StepClock, StepMark, TimedEvent
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainSettings

WAKING = 2e-5  # seconds that a host takes to notice that an event has passed
LATENCY = 5e-6  # of an event that a host issues to an idle device


class Gpu:
    """A device with a queue: what the host issues runs when all before it has run.

    Times are the host's. The device counts from another zero, and its clock gains `drift` seconds
    a second; of two events it tells the milliseconds between them as a float32.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> None:
        self.host, self.free, self.waits = 100.0, 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self, stream: object) -> None:
                self.at = gpu.free = max(gpu.free, gpu.host + LATENCY)

            def query(self) -> bool:
                return self.at <= gpu.host

            def synchronize(self) -> None:
                gpu.waits += self.at > gpu.host + LATENCY
                gpu.host = max(gpu.host, self.at) + WAKING

            def elapsed_time(self, other: Event) -> float:
                ticks = 1e3 * (1 + drift) * (other.at - self.at)
                return float(torch.tensor(ticks, dtype=torch.float32))

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


class SimulatedStep(NamedTuple):
    """Seconds of a step: the wait for rows, forward and backward, and the update; and of its host
    from the event of loss and norm to the wait for it, in which it may compile the update."""

    data: float = 0.0
    work: float = 0.28
    update: float = 0.02
    issues: float = 0.001
    pause: float = 0.0  # of the host before it asks for rows, as for an evaluation


def errors_of(gpu: Gpu, steps: Iterable[SimulatedStep]) -> Iterator[tuple[float, ...]]:
    """Run steps as the loop does, and compare their times with what happened."""
    first, start = 90.0, 99.0
    clock, ends = StepClock(torch.device("cuda"), first, start), [start]
    waiting: deque[tuple[StepMark, tuple[float, ...]]] = deque()

    def errors(mark: StepMark, happened: tuple[float, ...]) -> tuple[float, ...]:
        times = [math.nan if seconds is None else seconds for seconds in clock.times(mark)]
        return tuple(a - b for a, b in zip(times, happened, strict=True))

    for step in steps:
        gpu.host += step.pause
        clock.ask()
        begun = max(gpu.host, gpu.free)
        gpu.host += step.data
        clock.begin()
        gpu.issue(step.work)
        read = gpu.now()
        gpu.host += step.issues
        gpu.issue(step.update)
        read.synchronize()
        clock.synchronised(read)
        mark = clock.mark()
        happened = step.data, gpu.free - begun, gpu.free - ends[-1], gpu.free - first
        ends.append(gpu.free)
        waiting.append((mark, happened))
        while waiting and waiting[0][0].end.passed:
            yield errors(*waiting.popleft())
    yield from (errors(*each) for each in waiting)


EARLY = SimulatedStep()
LATE = SimulatedStep(issues=0.45)  # the device waits for its host
COMPILES = SimulatedStep(issues=4.0)
STEPS = {
    "early": [EARLY] * 60,
    "late": [LATE] * 60,
    "late once": [COMPILES, *[EARLY] * 20],  # as in a run that compiles its update
    "late, then early": [COMPILES, *[LATE] * 20, *[EARLY] * 20],
    "in turns": [COMPILES, *[EARLY, LATE, LATE, EARLY, EARLY] * 12],
    "data": [COMPILES, *[SimulatedStep(data=0.05), SimulatedStep(data=0.5), EARLY] * 12],
    "pauses": [COMPILES, *[EARLY, SimulatedStep(pause=3.0), LATE] * 12],
    "short": [COMPILES, *[SimulatedStep(work=0.002, update=0.0005, issues=0.004)] * 200],
}


@pytest.mark.parametrize("drift", [0.0, 8e-5, -8e-5])
@pytest.mark.parametrize("name", STEPS)
def test_no_time_of_a_step_is_wrong_by_a_millisecond(
    name: str, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a host is late in every step, nothing tells it that its clock has drifted away from the
    device's: only the time since the start of the run may be off by that."""
    errors = list(errors_of(Gpu(monkeypatch, drift), STEPS[name]))
    assert len(errors) == len(STEPS[name])
    assert max(abs(error) for times in errors for error in times[:3]) <= 1e-3
    unseen = abs(drift) * 0.47 * STEPS[name].count(LATE) if name.startswith("late") else 0.0
    assert max(abs(times[3]) for times in errors) <= 1e-3 + unseen


@pytest.mark.parametrize("drift", [8e-5, -8e-5])
def test_the_times_of_a_long_run_are_as_exact(
    drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In five hours the clocks drift apart by 1.4 s, and a float32 has no such milliseconds."""
    steps = [COMPILES, *[SimulatedStep(work=6.0)] * 3000]
    errors = list(errors_of(Gpu(monkeypatch, drift), steps))
    assert max(abs(error) for times in errors for error in times) <= 1e-3


@pytest.mark.parametrize("milliseconds", [math.nan, math.inf, 0.0, -404.0])
def test_an_event_that_tells_nonsense_leaves_one_step_without_a_time(
    milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event at the end of the fourth of ten steps."""
    gpu, ends = Gpu(monkeypatch), list[object]()
    mark, elapsed = StepClock.mark, torch.cuda.Event.elapsed_time

    def noted(clock: StepClock) -> StepMark:
        ends.append((step := mark(clock)).end.event)
        return step

    def told(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return milliseconds if ends[3:4] in ([first], [last]) else elapsed(first, last)

    monkeypatch.setattr(StepClock, "mark", noted)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", told)
    errors = list(errors_of(gpu, [COMPILES, *[EARLY] * 9]))
    missing = [[math.isnan(error) for error in times] for times in errors]
    assert missing[3] == [False, True, True, True]
    assert missing[4] == [False, False, True, False]  # when the one before ended is not known
    assert not any(map(any, (*missing[:3], *missing[5:])))
    assert all(abs(error) <= 1e-3 for times in errors for error in times if not math.isnan(error))


def plan_of(recipe: Recipe) -> Plan:
    changes = {"layers": "1"}
    return resolve(PlanOptions("tiny", seq=8, batch=2, set=changes, machine="laptop", train=recipe))


def trained(tmp_path: Path, recipe: Recipe) -> tuple[list[tuple[str, Any]], tuple[float, float]]:
    """The messages of a run of one rank in this process; and the seconds from its start to the
    begin of its last step, and to its last record."""
    before = time.perf_counter()
    plan = plan_of(recipe)
    folder = RunFolder.create(tmp_path / "run", plan.to_toml(full=True), {}, resume=False)
    after, said, moments = time.perf_counter(), list[tuple[str, Any]](), dict[object, float]()

    def send(kind: str, value: Any) -> None:
        said.append((kind, value))
        moments[value.step if isinstance(value, StepRecord) else value] = time.perf_counter()

    settings = TrainSettings(recipe, folder=folder.path)
    run_rank(Worker(0, NoMeeting(), send), plan, settings)
    last = recipe.steps
    return said, (moments[f"step {last}"] - after, moments[last] - before)


def test_the_walls_of_a_run_are_its_wall_time(tmp_path: Path) -> None:
    recipe = Recipe(steps=8, save_every=3, eval_every=4)
    said, (least, most) = trained(tmp_path, recipe)
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [value for kind, value in said if kind == "report"] == records and len(records) == 8
    walls = [each.wall_s or 0.0 for each in records]
    assert sum(walls) == pytest.approx(records[-1].wall)
    assert least < sum(walls) < most  # from the start to the end of the last update
    for each in records:
        assert each.data is not None and each.wall_s is not None
        assert 0 <= each.data <= each.seconds <= each.wall_s
        assert each.tokens_per_s == each.tokens / each.wall_s
        assert each.mfu == mfu(plan_of(recipe), each.tokens_per_s)
    summary = read_summary(tmp_path / "run")
    assert summary.spent["save"] > 0 and summary.spent["eval"] > 0
    assert summary.step_s == pytest.approx(sorted(walls)[3] / 2 + sorted(walls)[4] / 2)


def test_records_that_wait_for_the_device_come_in_order_and_before_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no update ever ended before the next step: only a checkpoint waits for it."""
    monkeypatch.setattr(TimedEvent, "passed", property(lambda self: False))
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

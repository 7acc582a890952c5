"""Run folders made by hand: records, and events of a step with known times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.schedule import FORWARD, Step, actions_of, merged
from fivefold.records.run_writer import RunFolder
from fivefold.records.spans import awaited, results
from fivefold.records.steps import PlannedStep, StepRecord

EPOCH = 1_700_000_000.0
RECORD = StepRecord(
    step=1,
    loss=5.0,
    norm=1.0,
    lr=1e-3,
    seconds=0.2,
    tokens=1024,
    world=8,
    first_sample=0,
    num_samples=8,
    wall=1.0,
)


def plan_of(machine: str | None = None, **said: Any) -> Plan:
    """A small model on four stages and two data ranks."""
    options = PlanOptions(model="tiny", layout="dp=2 pp=4", seq=64, microbatches=8, machine=machine)
    return resolve(replace(options, set={"layers": "8"}, **said))


@dataclass
class FakeStep:
    """One step of every rank: each action takes `seconds`, each message `message`, and a rank
    may `pause` before an action."""

    plan: Plan
    seconds: Callable[[int, Step], float]
    message: Callable[[int, Step], float] = lambda rank, step: 0.0
    calls: Callable[[int, Step], Mapping[str, float]] = lambda rank, step: {}
    pause: Callable[[int, Step], float] = lambda rank, step: 0.0
    tail: float = 0.0
    skew: Mapping[int, int] = field(default_factory=dict[int, int])  # ns of a rank's own clock

    @property
    def length(self) -> float:
        """Seconds until the last action ends."""
        columns = map(self._column, self.plan.layout.groups("pp"))
        ends = (span[2] for column in columns for spans in column.values() for span in spans)
        return max(ends)

    def lines(self, number: int, restart: int = 0, begin: float = EPOCH) -> dict[int, str]:
        """The lines of each rank's file."""
        found: dict[int, str] = {}
        for column in self.plan.layout.groups("pp"):
            for rank, spans in self._column(column).items():
                end = max(span[2] for span in spans) + self.tail
                skew = self.skew.get(rank, 12345 * (rank + 1))
                wall = round((begin + end) * 1e9)
                anchor = {"step": number, "restart": restart, "rank": rank}
                anchor |= {"wall_ns": wall, "clock_ns": wall - skew}
                told = [anchor, *(_span(*span, begin, skew) for span in spans)]
                found[rank] = "".join(json.dumps(each) + "\n" for each in told)
        return found

    def _column(self, column: tuple[int, ...]) -> dict[int, list[tuple[str, float, float]]]:
        schedule = self.plan.schedule
        orders = [list(merged(schedule, place)) for place in range(len(column))]
        free, done = [0.0] * len(column), dict[Any, float]()
        found: dict[int, list[tuple[str, float, float]]] = {rank: [] for rank in column}
        while any(orders):
            for place, rank in enumerate(column):
                while orders[place]:
                    step = orders[place][0]
                    needs = [giver for _, giver in awaited(schedule, step)]
                    if not all(each in done for each in needs):
                        break
                    orders[place].pop(0)
                    late = self.message(rank, step)
                    begin = free[place] + self.pause(rank, step)
                    ready = max([begin, *(done[each] + late for each in needs)])
                    end = ready + self.seconds(rank, step)
                    found[rank] += [("pp/recv", begin, ready)] * len(needs)
                    for axis, length in self.calls(rank, step).items():
                        found[rank].append((f"{axis}/all_reduce", ready, ready + length))
                    found[rank].append((str(step), begin, end))
                    done |= dict.fromkeys(results(step), end)
                    free[place] = end
        return found


def _span(name: str, begin: float, end: float, zero: float, skew: int) -> dict[str, Any]:
    times = [round((zero + each) * 1e9) - skew for each in (begin, end)]
    table: dict[str, Any] = {"name": name, "kind": "action", "begin": times[0], "end": times[1]}
    return {**table, "kind": "collective", "bytes": 64, "group": 2} if "/" in name else table


def usual(rank: int, step: Step) -> float:
    """A forward 10 ms, a backward 20."""
    return sum(0.01 if action.kind == FORWARD else 0.02 for action in actions_of(step))


def write_run(
    folder: Path,
    plan: Plan,
    kept: list[StepRecord],
    *,
    lost: list[StepRecord] | None = None,
    events: list[dict[int, str]] | None = None,
    ended: list[str | None] | None = None,
) -> Path:
    """A folder as a training leaves it; `ended` says why each start ended, or that it `failed`."""
    folder.mkdir()
    (folder / "plan.toml").write_text(plan.to_toml(folder, full=True))
    starts: list[dict[str, Any]] = []
    for number, why in enumerate(ended or ["done"]):
        start: dict[str, Any] = {"began": EPOCH + 100 * number, "model": plan.shape.name}
        start |= {"layout": str(plan.layout), "world": plan.layout.world, "zero": plan.layout.zero}
        start["machine"] = {"system": "Linux x86_64", "num_cpus": 2, "gpus": []}
        if why == "failed":
            words = "lost rank 3 at step 5 0F0: it was killed by SIGKILL"
            start["failed"] = {"at": start["began"] + 60, "why": words}
        elif why is not None:
            start["ended"] = {"at": start["began"] + 90, "why": why, "spent": {}}
        starts.append(start)
    (folder / "run.json").write_text(json.dumps({"id": "a", "starts": starts}))
    for name, records in (("metrics.jsonl", kept), ("metrics.lost.jsonl", lost or [])):
        lines = (json.dumps(each.to_json()) + "\n" for each in records)
        (folder / name).write_text("".join(lines))
    for told in events or []:
        (folder / "events").mkdir(exist_ok=True)
        for rank, text in told.items():
            with (folder / "events" / f"rank-{rank:05d}.jsonl").open("a") as file:
                file.write(text)
    return folder


def records(num: int, **said: Any) -> list[StepRecord]:
    """So many steps whose loss falls."""
    return [
        replace(RECORD, step=n, loss=5 - n / num, wall=0.2 * n, **said) for n in range(1, num + 1)
    ]


PLANNED = PlannedStep(step_s=0.1, tokens_per_s=10_240.0, mfu=0.4, memory_gib=2.0)


def add_sample(folder: Path, step: int, prompt: str, text: str, restart: int = 0) -> None:
    """A completion that the model wrote after a step."""
    RunFolder(folder, restart, EPOCH, EPOCH).append_sample(step, prompt, text)

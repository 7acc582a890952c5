"""Whether the records of a run tell its wall time, and whether its steps wait for data.

    python benchmarks/clock.py                          llama-3.2-1b on a GPU, tiny on a CPU
    python benchmarks/clock.py --model llama-3.2-1b --steps 50

It runs the training loop of one rank on the bytes of Python's standard library, in bf16 on a GPU.
It prints the wall time of the steps over their number, the mean of the times in their lines, and
the share of the wall time in which the rank waited for data. The wall time is taken outside of the
loop's clock, after a synchronisation at both ends; ten steps before it do not count. It prints the
same sum with these ten, from the first request for rows: the host is late there, since it compiles.
On a GPU it exits with 1 if a time is missing, if either sum differs from its wall time by more than
1%, or if the share is above 1%. Nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import mean
from typing import Any, NamedTuple, cast

import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.worker import NoMeeting, Worker
from fivefold.records.steps import StepRecord
from fivefold.render.training import step_line
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainSettings

MOST = 0.01
WARM_UP = 10  # steps that compile, allocate and load kernels
_ROWS = "data of step 1"  # what the loop says before its first request for rows


class Job(NamedTuple):
    """What is trained on a kind of device."""

    model: str
    seq: int
    rows: int
    dtype: str


JOBS = {
    "cuda": Job("llama-3.2-1b", seq=8192, rows=2, dtype="bfloat16"),
    "cpu": Job("tiny", seq=64, rows=4, dtype="float32"),
}


class Stopwatch:
    """Hears what the loop says, prints its lines, and takes the time at its first request for rows,
    at that of the first step that counts, and at the end of the last."""

    def __init__(self, device: str, steps: int) -> None:
        self.device, self.steps = device, steps
        self.records: list[StepRecord] = []
        self.moments: dict[str, float] = {}

    def send(self, kind: str, value: Any) -> None:
        if isinstance(value, StepRecord):
            print(step_line(value, WARM_UP + self.steps), flush=True)
            self.records.append(value)
        elif value in (_ROWS, self._first, self._last):
            if self.device == "cuda":
                torch.cuda.synchronize(torch.device("cuda", 0))
            self.moments[value] = time.perf_counter()

    @property
    def wall(self) -> float:
        """Seconds of all steps that count."""
        return self.moments[self._last] - self.moments[self._first]

    @property
    def counted(self) -> list[StepRecord]:
        """The records of steps that count."""
        return [record for record in self.records if record.step > WARM_UP]

    @property
    def early(self) -> float:
        """By how much the times of all steps are off, those of the warm-up too: a share."""
        first, *later = self.records
        recorded = (first.seconds or 0.0) + sum(record.wall_s or 0.0 for record in later)
        return recorded / (self.moments[self._last] - self.moments[_ROWS]) - 1

    @property
    def _first(self) -> str:
        return f"data of step {WARM_UP + 1}"

    @property
    def _last(self) -> str:
        """What the loop does after the last update, without a folder to write to."""
        return f"checkpoint {WARM_UP + self.steps}"


def plan_of(job: Job, model: str | None, steps: int, **changes: int) -> Plan:
    """The plan of so many steps; `changes` of the batch."""
    sizes = {"microbatches": 1, "microbatch_size": job.rows, **changes}
    recipe = Recipe(steps=WARM_UP + steps, lr=3e-4)
    return resolve(PlanOptions(model or job.model, seq=job.seq, train=recipe, **sizes))


def measure(device: str, model: str | None, steps: int) -> Stopwatch:
    """Train, and listen."""
    job = JOBS[device]
    plan = plan_of(job, model, steps)
    recipe, watch = plan.options.train, Stopwatch(device, steps)
    worker = Worker(0, NoMeeting(), watch.send)
    run_rank(worker, plan, TrainSettings(recipe, cast(Any, job.dtype), cast(Any, device)))
    return watch


def main() -> int:
    """Print both times and the share; 1 where a GPU's are off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", help="a preset; by default one for the device")
    parser.add_argument("--device", choices=sorted(JOBS))
    given = parser.parse_args()
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    watch = measure(device, given.model, given.steps)
    wall, printed = watch.wall / given.steps, mean(each.elapsed or 0.0 for each in watch.counted)
    data = mean(each.data or 0.0 for each in watch.counted) / printed
    print(f"wall time a step {1e3 * wall:.2f} ms, mean of the printed steps {1e3 * printed:.2f} ms")
    print(f"they differ by {printed / wall - 1:+.2%}; waiting for data {data:.2%} of a step")
    missing = [record.step for record in watch.records if record.elapsed is None]
    print(f"from the first request for rows they differ by {watch.early:+.2%}; no time: {missing}")
    wrong = max(abs(printed / wall - 1), abs(watch.early), data) > MOST or bool(missing)
    if device == "cpu":
        print("on a CPU nothing is judged")
    return int(wrong and device == "cuda")


if __name__ == "__main__":
    sys.exit(main())

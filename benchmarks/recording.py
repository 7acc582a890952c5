"""What a run's records cost: a line of metrics a step, and a span for every action and collective.

Two ranks over gloo (tp=2) train a small model; every second step is recorded, in pairs whose order
turns around. The cost is the median of the differences within pairs over the median step that was
not recorded; processor time, which other programs disturb less, is printed beside it. Exits with
1 if the cost is above 1%. Nothing else should run at the same time.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim.updater import make_updater
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import Instruments
from fivefold.records.run_writer import Metrics, RunFolder
from fivefold.records.steps import StepRecord
from fivefold.step import step
from fivefold.train.callbacks.records import SpanCallback

MOST = 0.01
WARM_UP, PAIRS = 4, 60
WISHES = PlanOptions(
    "tiny",
    layout="tp=2",
    precision="fp32",
    seq=256,
    microbatch_size=2,
    microbatches=2,
    set={"width": "256", "ffn": "704", "layers": "4"},
)


class Times(NamedTuple):
    """Seconds of a step: on the wall, and of all threads of the process."""

    wall: float
    processor: float


class Pair(NamedTuple):
    """Two steps, one after the other."""

    without: Times
    recorded: Times


class Recording:
    """Turns the records of a rank on and off."""

    def __init__(self, job: Job, spans: SpanCallback, folder: Path) -> None:
        self.job, self.spans = job, spans
        spans.start(0)
        self.log = spans.log
        self.metrics = Metrics(folder, 0) if job.mesh.rank == 0 else None

    def turn(self, on: bool) -> None:
        self.spans.log = self.log if on else None

    def write(self, number: int, loss: float, norm: float, seconds: float) -> None:
        """What is written when a step is over."""
        assert self.log is not None
        self.log.step(number)
        if self.metrics is not None:
            batch = self.job.plan.batch
            self.metrics.append(
                StepRecord(
                    step=number,
                    loss=loss,
                    norm=norm,
                    lr=1e-3,
                    seconds=seconds,
                    tokens=batch.tokens,
                    world=self.job.plan.layout.world,
                    first_sample=number * batch.sequences,
                    num_samples=batch.sequences,
                    wall=seconds,
                )
            )


def measure(worker: Worker, plan: Plan, folder: Path) -> list[Pair]:
    """The pairs of one rank."""
    with worker.joined(plan.layout.world):
        device = torch.device("cpu")
        spans = SpanCallback(RunFolder(folder, 0, time.time(), time.time()), worker.rank, device)
        mesh = Mesh.of(plan, device, observers=(spans,))
        watched = Instruments(spans.actions)
        job = compose(plan, mesh, seed=0, dtype=torch.float32, instruments=watched)
        updater = make_updater(Recipe(), job.owned, mesh.device)
        batches = samples(plan.batch, plan.shape.vocab, 0, 0).of(0)
        recording = Recording(job, spans, folder)

        def timed(number: int, on: bool) -> Times:
            worker.phase(f"step {number}")
            recording.turn(on)
            began, worked = time.perf_counter(), time.process_time()
            outcome = step(job, updater, batches, 1.0)
            loss, norm = float(outcome.loss), float(outcome.norm)
            if on:
                recording.write(number, loss, norm, time.perf_counter() - began)
            return Times(time.perf_counter() - began, time.process_time() - worked)

        for number in range(WARM_UP):
            timed(number, on=True)
        pairs: list[Pair] = []
        for number in range(PAIRS):
            first = number % 2 == 0
            one, other = timed(2 * number, first), timed(2 * number + 1, not first)
            pairs.append(Pair(other, one) if first else Pair(one, other))
        recording.turn(True)
        spans.close()
        mesh.close_groups()
        return pairs


def share(pairs: Sequence[Pair], kind: str) -> tuple[float, float]:
    """What recording adds to a step, over the step without it; and how sure that is."""
    differences = [getattr(pair.recorded, kind) - getattr(pair.without, kind) for pair in pairs]
    step_s = median(getattr(pair.without, kind) for pair in pairs)
    low, _, high = quantiles(differences, n=4)
    error = 0.93 * (high - low) / math.sqrt(len(pairs))  # of a median, were the noise normal
    return median(differences) / step_s, error / step_s


def main() -> int:
    """Print the cost; 1 where it is too high."""
    plan = resolve(WISHES)
    with tempfile.TemporaryDirectory() as name, Pool(plan.layout.world) as pool:
        ranks = pool.run(measure, plan, Path(name))
        file = Path(name) / "events" / "rank-00000.jsonl"
        num_spans = len(file.read_text("utf-8").splitlines()) / (WARM_UP + PAIRS)
    pairs = ranks[0]
    step_s = median(pair.without.wall for pair in pairs)
    (cost, error), (work, unsure) = share(pairs, "wall"), share(pairs, "processor")
    print(f"{PAIRS} pairs of steps of {1e3 * step_s:.1f} ms, {num_spans:.0f} lines of events each")
    print(f"metrics and events add {cost:.2%} ± {error:.2%} of a step (at most {MOST:.0%})")
    print(f"of processor time they add {work:.2%} ± {unsure:.2%}")
    return int(cost > MOST)


if __name__ == "__main__":
    sys.exit(main())

"""Whether it learns: 300 steps of byte-10m on Python's standard library, in one process and in 2D.

    python benchmarks/learn.py

Runs `fivefold train` twice, with all that a recipe has by default: AdamW, a learning rate of 1e-3
that rises over a tenth of the steps and falls along a cosine. Both read the same 16 sequences of
128 bytes a step, and evaluate every 50 steps on rows that are never trained on. Prints both curves
and how far apart they are, and fails where one of them ends at 2.0 nats a byte or above.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fivefold.records import StepRecord
from fivefold.records.run_folder import METRICS, read_records

MODEL, STEPS, EVERY = "byte-10m", 300, 50
LAYOUTS = ("dp=1", "dp=2 tp=2")
BATCH, MICROBATCH_SIZE, SEQ = 16, 8, 128
LIMIT = 2.0  # nats a byte


@dataclass(frozen=True)
class Learned:
    """One training: its records, the seconds that it took, and those of all cores together."""

    layout: str
    records: list[StepRecord]
    seconds: float
    cpu_seconds: float

    @property
    def evals(self) -> dict[int, float]:
        """Evaluation losses by step."""
        return {each.step: each.eval_loss for each in self.records if each.eval_loss is not None}


def words(layout: str) -> list[str]:
    """What follows `fivefold`, without the folder."""
    batch = f"--batch {BATCH} --microbatch-size {MICROBATCH_SIZE} --seq {SEQ}"
    said = f"{batch} --dtype float32 --steps {STEPS} --set eval_every={EVERY}"
    return ["train", MODEL, "--layout", layout, "--device", "cpu", *said.split()]


def learn(layout: str, folder: Path) -> Learned:
    """Train; what the command says goes to stderr."""
    began, busy = time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "fivefold", *words(layout), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - began
    return Learned(layout, read_records(folder / METRICS), seconds, _cpu_seconds() - busy)


def table(runs: list[Learned]) -> str:
    """Both curves side by side."""
    heads = [f"{name} {run.layout}" for run in runs for name in ("loss", "evaluation")]
    lines = [_line(["step", *heads]), _line(["---"] * (len(heads) + 1))]
    for step in runs[0].evals:
        pairs = [(run.records[step - 1].loss, run.evals[step]) for run in runs]
        lines.append(_line([step, *(f"{one:.4f}" for pair in pairs for one in pair)]))
    return "\n".join(lines)


def apart(runs: list[Learned]) -> str:
    """The largest difference of the losses of a step, and of the evaluations."""
    one, other = runs
    steps = zip(one.records, other.records, strict=True)
    losses = max(abs(here.loss - there.loss) for here, there in steps)
    evals = max(abs(one.evals[step] - other.evals[step]) for step in one.evals)
    return f"largest difference: {losses:.1e} of losses, {evals:.1e} of evaluations"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = [learn(layout, Path(folder) / str(number)) for number, layout in enumerate(LAYOUTS)]
    print(table(runs))
    print(f"\n{apart(runs)}")
    for run in runs:
        reached = run.evals[STEPS]
        verdict = "below" if reached < LIMIT else "NOT below"
        took = f"{run.seconds:.0f} s, {run.cpu_seconds:.0f} s of cores"
        print(f"{run.layout}: {reached:.4f} nats a byte, {verdict} {LIMIT}; {took}")
    return 0 if all(run.evals[STEPS] < LIMIT for run in runs) else 1


def _cpu_seconds() -> float:
    """What commands that have ended took of all cores: the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())

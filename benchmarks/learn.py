"""Whether it learns: 300 steps of byte-10m on Python's standard library, in one process, in 2D and
in fp8.

    python benchmarks/learn.py          all
    python benchmarks/learn.py fp8      one process, with and without fp8

Runs `fivefold train` several times, with all that a recipe has by default: AdamW, a learning rate
of 1e-3 that rises over a tenth of the steps and falls along a cosine. All begin with the same
weights, read the same 16 sequences of 128 bytes a step, and evaluate every 50 steps on rows that
are never trained on. In fp8, CPUs emulate the rounded values. Prints all curves and how far apart
they are. Fails where one of them ends at 2.0 nats a byte or above, and where an evaluation in fp8
ends more than 1% from the one without.
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


@dataclass(frozen=True)
class Training:
    """One of the runs: its layout, and what shares a scale if it is in fp8."""

    layout: str
    fp8: str = ""

    def __str__(self) -> str:
        return f"{self.layout} {self.fp8}".strip()


MODEL, STEPS, EVERY = "byte-10m", 300, 50
PLAIN, SPLIT = Training("dp=1"), Training("dp=2 tp=2")
FP8 = (Training("dp=1", "tensorwise"), Training("dp=1", "blockwise"))
BATCH, MICROBATCH_SIZE, SEQ = 16, 8, 128
LIMIT = 2.0  # nats a byte
MOST_APART = 0.01  # of the last evaluation, in fp8


@dataclass(frozen=True)
class Learned:
    """One training: its records, the seconds that it took, and those of all cores together."""

    job: Training
    records: list[StepRecord]
    seconds: float
    cpu_seconds: float

    @property
    def evals(self) -> dict[int, float]:
        """Evaluation losses by step."""
        return {each.step: each.eval_loss for each in self.records if each.eval_loss is not None}


def words(job: Training) -> list[str]:
    """What follows `fivefold`, without the folder."""
    batch = f"--batch {BATCH} --microbatch-size {MICROBATCH_SIZE} --seq {SEQ}"
    rounded = f"--set precision=fp8,fp8={job.fp8}" if job.fp8 else ""
    said = f"{batch} --dtype float32 --steps {STEPS} --set eval_every={EVERY} {rounded}"
    return ["train", MODEL, "--layout", job.layout, "--device", "cpu", *said.split()]


def learn(job: Training, folder: Path) -> Learned:
    """Train; what the command says goes to stderr."""
    began, busy = time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "fivefold", *words(job), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - began
    return Learned(job, read_records(folder / METRICS), seconds, _cpu_seconds() - busy)


def table(runs: list[Learned]) -> str:
    """All curves side by side."""
    heads = [f"{name} {run.job}" for run in runs for name in ("loss", "evaluation")]
    lines = [_line(["step", *heads]), _line(["---"] * (len(heads) + 1))]
    for step in runs[0].evals:
        pairs = [(run.records[step - 1].loss, run.evals[step]) for run in runs]
        lines.append(_line([step, *(f"{one:.4f}" for pair in pairs for one in pair)]))
    return "\n".join(lines)


def apart(one: Learned, other: Learned) -> str:
    """The largest difference of the losses of a step, and of the evaluations."""
    steps = zip(one.records, other.records, strict=True)
    losses = max(abs(here.loss - there.loss) for here, there in steps)
    evals = max(abs(one.evals[step] - other.evals[step]) for step in one.evals)
    return f"{other.job}: largest difference {losses:.1e} of losses, {evals:.1e} of evaluations"


def judged(first: Learned, run: Learned) -> tuple[bool, str]:
    """Whether a training has learned, and as much as the first one if it is in fp8."""
    reached, wanted = run.evals[STEPS], first.evals[STEPS]
    took = f"{run.seconds:.0f} s, {run.cpu_seconds:.0f} s of cores"
    low = reached < LIMIT
    said = f"{run.job}: {reached:.4f} nats a byte, {'below' if low else 'NOT below'} {LIMIT}"
    if not run.job.fp8:
        return low, f"{said}; {took}"
    off = reached / wanted - 1
    near = abs(off) <= MOST_APART
    word = "within" if near else "NOT within"
    return low and near, f"{said}, {off:+.2%}, {word} {MOST_APART:.0%} of {first.job}; {took}"


def main() -> int:
    jobs = [PLAIN, *FP8] if sys.argv[1:] == ["fp8"] else [PLAIN, SPLIT, *FP8]
    with tempfile.TemporaryDirectory() as folder:
        runs = [learn(job, Path(folder) / str(number)) for number, job in enumerate(jobs)]
    print(table(runs) + "\n")
    verdicts = [judged(runs[0], run) for run in runs]
    for run in runs[1:]:
        print(apart(runs[0], run))
    for _, said in verdicts:
        print(said)
    return 0 if all(learned for learned, _ in verdicts) else 1


def _cpu_seconds() -> float:
    """What commands that have ended took of all cores: the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())

"""Whether it learns: on Python's standard library, in one process, in 2D and in fp8.

    python benchmarks/learn.py          300 steps of byte-10m on CPUs, all
    python benchmarks/learn.py fp8      the same in one process, with and without fp8
    python benchmarks/learn.py gpu      600 steps of Llama-3.2-1B on a GPU, bf16 and fp8

Runs `fivefold train` several times, with all that a recipe has by default: AdamW, a learning rate
(1e-3, for 1B 1e-4) that rises over a tenth of the steps and falls along a cosine. All begin with
the same weights, read the same sequences in every step (16 of 128 bytes, for 1B 16 of 512), and
evaluate every 50 steps on rows that are never trained on. In fp8, CPUs emulate the rounded values;
on a GPU all run at once. Prints all curves and how far apart they are. Fails where one of them ends
at 2.0 nats a byte or above (1B, which sees few bytes for its size: 2.8), and where an evaluation in
fp8 ends more than 1% from the one without (on a GPU 0.5%).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fivefold.records.run_writer import METRICS, read_records
from fivefold.records.steps import StepRecord


@dataclass(frozen=True)
class Training:
    """One of the runs: its layout, and what shares a scale if it is in fp8."""

    layout: str
    fp8: str = ""

    def __str__(self) -> str:
        return f"{self.layout} {self.fp8}".strip()


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison have in common."""

    words: str
    steps: int
    below: float  # nats a byte of the last evaluation
    most_apart: float  # of the last evaluation, in fp8
    at_once: int  # trainings


EVERY = 50
PLAIN, SPLIT = Training("dp=1"), Training("dp=2 tp=2")
FP8 = (Training("dp=1", "tensorwise"), Training("dp=1", "blockwise"))
ON_CPU = Setting(
    "byte-10m --device cpu --dtype float32 --batch 16 --microbatch-size 8 --seq 128",
    300,
    2.0,
    0.01,
    1,
)
ON_GPU = Setting(
    "llama-3.2-1b --device cuda --batch 16 --microbatch-size 16 --seq 512 --lr 1e-4",
    600,
    2.8,
    0.005,
    3,
)


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


def words(job: Training, setting: Setting) -> list[str]:
    """What follows `fivefold`, without the folder."""
    rounded = f"--set precision=fp8,fp8={job.fp8}" if job.fp8 else ""
    said = f"{setting.words} --steps {setting.steps} --set eval_every={EVERY} {rounded}"
    return ["train", *said.split(), "--layout", job.layout]


def learn(job: Training, setting: Setting) -> Learned:
    """Train, and keep no checkpoint; what the command says goes to stderr."""
    began, busy = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fivefold", *words(job, setting), "--out", f"{folder}/run"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        records = read_records(Path(folder) / "run" / METRICS)
    return Learned(job, records, time.perf_counter() - began, _cpu_seconds() - busy)


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


def judged(first: Learned, run: Learned, setting: Setting) -> tuple[bool, str]:
    """Whether a training has learned, and as much as the first one if it is in fp8."""
    reached, wanted = run.evals[setting.steps], first.evals[setting.steps]
    took = f"{run.seconds:.0f} s, {run.cpu_seconds:.0f} s of cores"
    low = reached < setting.below
    is_low = f"{'below' if low else 'NOT below'} {setting.below}"
    said = f"{run.job}: {reached:.4f} nats a byte, {is_low}"
    if not run.job.fp8:
        return low, f"{said}; {took}"
    off = reached / wanted - 1
    near = abs(off) <= setting.most_apart
    where = f"{'within' if near else 'NOT within'} {setting.most_apart:.1%} of {first.job}"
    return low and near, f"{said}, {off:+.2%}, {where}; {took}"


def main() -> int:
    setting = ON_GPU if sys.argv[1:] == ["gpu"] else ON_CPU
    jobs = [PLAIN, *FP8] if sys.argv[1:] in (["fp8"], ["gpu"]) else [PLAIN, SPLIT, *FP8]
    with ThreadPoolExecutor(setting.at_once) as pool:
        runs = list(pool.map(partial(learn, setting=setting), jobs))
    print(table(runs) + "\n")
    verdicts = [judged(runs[0], run, setting) for run in runs]
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

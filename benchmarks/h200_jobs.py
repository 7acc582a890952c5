"""Steps and peak memory that the planner estimates, beside those of one H200.

Prints docs/h200-jobs.md, from measurements beside this file (`benchmarks/rehearsal.py` made them).

    python -m benchmarks.h200_jobs > docs/h200-jobs.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.planner.estimate import rank_memory, rank_seconds_alone
from fivefold.planner.setting import EstimateSetting, estimate_setting
from fivefold.render import duration

DATA = Path(__file__).parent / "data"
GIB = 2**30
Kernels = Literal["compiled", "eager"]
# Dense jobs ran before updates had a kernel of their own: clipping was a pass of its own then.
TWO_PASSES = {"clip_bytes": 32.0}
# DeepSeek-V3 ran before MLA's values were copied: as views they kept keys.
WITH_VIEWS = {"value_views": True}
FILES: tuple[tuple[str, Kernels, bool], ...] = (
    ("h200-compiled.jsonl", "compiled", True),
    ("h200-compiled-moe.jsonl", "compiled", False),
    ("h200-eager.jsonl", "eager", True),
    ("h200-eager-moe.jsonl", "eager", False),
)
# All ran before the input gradients of matmuls that read one input were summed inside of these.
SUMS_APART = {"summed_passes": 9.0}
# All held all logits at once, and saved the results of experts, to weigh them at home.
ALL_SAVED = {"chunks_loss": False, "returned_slots": True}


@cache
def setting_of(kernels: Kernels, two_passes: bool) -> EstimateSetting:
    """One H200 without a margin, and the program that was measured."""
    setting, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, kernels, 1.0)
    changes = SUMS_APART | (TWO_PASSES if two_passes else {})
    memory = replace(setting.stack.memory, **WITH_VIEWS, **ALL_SAVED)
    return replace(setting, stack=replace(setting.stack, memory=memory, **changes))


@dataclass(frozen=True)
class MeasuredJob:
    """One rank of a job: bytes at its peak, and seconds of a step."""

    model: str
    layout: str
    rank: int
    said: dict[str, Any]
    kernels: Kernels
    bytes: int
    seconds: float
    two_passes: bool

    @property
    def plan(self) -> Plan:
        """Without a pipeline one microbatch, if nothing is said."""
        keys: dict[str, Any] = {} if "pp=" in self.layout else {"microbatches": 1}
        keys |= {"layout": self.layout, "machine": "h200", "ep_nodes": 1} | self.said
        return resolve(PlanOptions(self.model, **keys))

    @property
    def is_fitted(self) -> bool:
        """Whether it is in the half of the jobs that a search may look at."""
        name = self.model + self.layout + json.dumps(self.said)
        return sha256(name.encode()).digest()[0] % 2 == 0

    @property
    def setting(self) -> EstimateSetting:
        return setting_of(self.kernels, self.two_passes)

    @property
    def estimated_seconds(self) -> float:
        return rank_seconds_alone(self.plan, self.setting, self.rank)

    @property
    def estimated_bytes(self) -> float:
        """Of its tensors: what torch counts as allocated."""
        parts = rank_memory(self.plan, self.setting, self.rank)
        return sum(
            each for name, each in parts.items() if name not in ("context", "nccl", "margin")
        )

    @property
    def time_error(self) -> float:
        return self.estimated_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.estimated_bytes / self.bytes - 1

    def cells(self) -> list[str]:
        """The row of the table."""
        said = " ".join(f"{key}={value}" for key, value in self.said.items())
        times = [duration(self.seconds), duration(self.estimated_seconds)]
        sizes = [f"{self.bytes / GIB:.1f}", f"{self.estimated_bytes / GIB:.1f}"]
        errors = [f"{self.time_error:+.1%}", f"{self.memory_error:+.1%}"]
        half = "fitted" if self.is_fitted else "other"
        first = [self.model, f"`{self.layout}` {said}", f"{self.rank:,}", half]
        return [*first, *times, errors[0], *sizes, errors[1]]


def read_jobs(name: str, kernels: Kernels, two_passes: bool) -> list[MeasuredJob]:
    """The jobs of one file of measurements."""
    found: list[MeasuredJob] = []
    for line in map(json.loads, (DATA / name).read_text("utf-8").splitlines()):
        peak, seconds, *_ = line["measured"]
        job = (line["model"], line["layout"], line["rank"], line["said"], kernels)
        found.append(MeasuredJob(*job, peak, seconds, two_passes))
    return found


@cache
def measured_jobs() -> list[MeasuredJob]:
    """All jobs that were measured, but those that copied all tokens around tensor collectives,
    which the program no longer does."""
    jobs = (job for each in FILES for job in read_jobs(*each))
    return [job for job in jobs if not ("tp=" in job.layout and "microbatch_size" in job.said)]


@dataclass(frozen=True)
class Errors:
    """Absolute errors of some jobs, as shares."""

    mean: float
    worst: float

    @staticmethod
    def of(errors: Sequence[float]) -> Errors:
        return Errors(mean(map(abs, errors)), max(map(abs, errors)))

    def __str__(self) -> str:
        return f"{self.mean:.1%} | {self.worst:.1%}"


class Speeds(NamedTuple):
    """What an H200 reaches in matmuls and attention, and our own stack in grouped matmuls."""

    matmul: float
    attention: float
    softmax_dims: float
    short_keys: float
    grouped_share: float


# What `python -m benchmarks.h200_fit` finds, which looks at the fitted half alone.
SEARCHED = Speeds(0.73, 0.54, 50.0, 1600.0, 0.87)


def error_with(job: MeasuredJob, speeds: Speeds) -> float:
    """The error of a job's step with these speeds."""
    setting = job.setting
    reached = speeds._asdict()
    stack = replace(setting.stack, grouped_share=reached.pop("grouped_share"))
    reach = replace(setting.machine.efficiency, **reached)
    chosen = replace(setting, machine=replace(setting.machine, efficiency=reach), stack=stack)
    return rank_seconds_alone(job.plan, chosen, job.rank) / job.seconds - 1


def errors_with(speeds: Speeds, *, fitted: bool) -> Errors:
    """The errors of one half of the jobs."""
    jobs = [job for job in measured_jobs() if job.is_fitted == fitted]
    return Errors.of([error_with(job, speeds) for job in jobs])


def groups() -> Iterator[tuple[str, list[MeasuredJob]]]:
    """Jobs by kind and by half, and all of them."""
    jobs = measured_jobs()
    for kernels in ("compiled", "eager"):
        mine = [job for job in jobs if job.kernels == kernels]
        yield kernels, mine
        for half in (True, False):
            name = f"{kernels}, {'fitted' if half else 'other'} half"
            yield name, [job for job in mine if job.is_fitted == half]
    yield "other half of both", [job for job in jobs if not job.is_fitted]
    yield "all", jobs


HEAD = """\
# Jobs on an H200 beside their estimates

Made by `python -m benchmarks.h200_jobs`. One rank of each job ran on one H200 (torch 2.11, bf16
weights with float32 masters, AdamW), alone: its collectives took no time and moved nothing, on both
sides. A step is compute, clipping and update; memory is torch's `max_memory_allocated`.

A hash of the job's name puts each into one of two halves. It does not know the kernels: a job is
in the same half compiled and eager, and the four jobs with context parallelism are all in the
fitted one. Five speeds are fitted: of matmuls, of attention with its softmax and its short rows,
and of grouped matmuls. A search that looks at the fitted half alone (`python -m
benchmarks.h200_fit`) gives the values that the planner has: **the other half is the check.** It is
no blind one: which terms the model has was decided with all jobs in view, and an earlier search on
earlier measurements began the list. Passes of kernels were counted in the program. The bytes of
clipping and the host's seconds were set to 1B and 3B, to a log of 8 layers, and to Qwen3-30B-A3B.

All jobs ran on 2026-11-16. Those with experts ran after updates got a kernel of their own, which
clips as it reads gradients; the dense ones before, and are estimated for that: 60 bytes a weight
for norm, clipping and update in place of 39. Updates became 1.5 times as fast by it. DeepSeek-V3
ran before the values of its attention were copied, and is estimated for that: views kept some keys
twice.
"""
TAIL = """\

## What is left

- Large models with tensor parallelism are estimated too slow (405B 9 to 11%, 8B with `tp=2` 5 to
  9%), 8B with `tp=8` and four rows too fast (7 and 10%). Not explained. Larger matmuls may be
  faster than one share of the peak says; and ranks alone compute on gathered buffers that nobody
  fills, which may take less power than real values. These jobs cannot tell the two apart.
- That attention is faster over long rows (`short_keys`) was fitted to jobs with such buffers; the
  eager `cp=4` job ran its attention at the chip's peak. Real context ranks may be slower.
- Layers with experts are estimated too fast forward and too slow backward (Mixtral's backward by
  17%); the errors cancel in part. Qwen3-30B-A3B is bound by its host, whose seconds were set to it.
- Three steps were run for each job. The same compiled forward of 8B took 217 to 234 ms over the
  `dp=8` jobs, so single errors below 5% mean little.
"""
COLUMNS = (
    *("model", "layout", "rank", "half", "measured step", "estimate", "error"),
    *("measured GiB", "estimate", "error"),
)


def page() -> Iterator[str]:
    """The lines of docs/h200-jobs.md."""
    yield HEAD
    yield "| jobs | number | time, mean | worst | memory, mean | worst |"
    yield "|---|---|---|---|---|---|"
    for name, jobs in groups():
        time = Errors.of([job.time_error for job in jobs])
        memory = Errors.of([job.memory_error for job in jobs])
        yield f"| {name} | {len(jobs)} | {time} | {memory} |"
    for kernels in ("compiled", "eager"):
        yield f"\n## {kernels.capitalize()}\n"
        yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        for job in (job for job in measured_jobs() if job.kernels == kernels):
            yield f"| {' | '.join(job.cells())} |"
    yield TAIL.rstrip()


if __name__ == "__main__":
    print("\n".join(page()))

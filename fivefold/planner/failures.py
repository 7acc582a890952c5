"""A training run with failures: many runs at once, from failure to failure.

Nothing random happens between two failures, so that a run jumps from one to the next: how many
saves were complete, what is lost, and how long the recovery takes. All runs advance together, one
failure each at a time. Every second of a run is in one place: steps that count, or one of `LOST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError, counted
from fivefold.core.plan import (
    DETECT,
    PLACES,
    RESTART,
    CheckpointPlace,
    FailureDomain,
    FailureRates,
    RecoveryDesign,
    SaveCost,
    expected_goodput,
    steps_between,
)
from fivefold.cost.step import failure_domain, save_cost
from fivefold.planner.estimate import Estimate

LOST = ("save", "rework", "detect", "restart", "shrunk", "waiting")
_DAY = 86_400.0
_BAND = (5, 95)  # percentiles
_MOST_FAILURES = 200_000  # of one run: more are no run
_MOST_EVENTS = 1e8  # of all runs: a few minutes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FailingJob:
    """A job with its failures, its saves and its recovery."""

    domain: FailureDomain
    replicas: int  # dp, which shrinks where hosts run out
    step: float
    rates: dict[str, float]  # failures in a second, by cause
    design: RecoveryDesign
    location: CheckpointPlace
    save: SaveCost
    steps: int  # between two saves
    disk: SaveCost
    disk_interval: float  # between two saves to a disk, which are read if partners die together

    @property
    def rate(self) -> float:
        """Failures in a second."""
        return sum(self.rates.values())

    @property
    def interval(self) -> float:
        """Seconds of work between two saves."""
        return self.steps * self.step

    @property
    def recovery(self) -> float:
        """Seconds from a failure to the first step after it, if nothing else fails."""
        return self.design.detect + self.design.restart + self.save.load

    @property
    def expected(self) -> float:
        """Goodput by the closed form, for a job whose hosts never run out."""
        return expected_goodput(self.rate, self.interval, self.save, self.recovery)


def failing_job(
    estimate: Estimate,
    rates: FailureRates,
    design: RecoveryDesign,
    checkpoint: str = "auto",
    storage: float | None = None,
    gpus: int | None = None,
) -> FailingJob:
    """The job of an estimate; `auto` saves where the closed form loses less. `gpus`: as many
    replicas as these make, each with the batch that it has."""
    plan, machine = estimate.plan, estimate.setting.machine
    domain = failure_domain(plan, machine, gpus)
    design.require_possible(domain)
    replicas = max(1, plan.layout.dp * domain.gpus // plan.layout.world)
    disk = save_cost(plan, machine, "disk", storage, gpus)
    by_cause = rates.per_second(domain)
    mtbf = 1 / sum(by_cause.values())
    on_disk = steps_between(disk.cost, mtbf, estimate.step, disk.write) * estimate.step
    jobs: list[FailingJob] = []
    for location in PLACES:
        if checkpoint not in ("auto", location):
            continue
        if location == "memory" and domain.switches < 2:
            if checkpoint != "auto":
                raise FivefoldError(_one_domain(domain))
            continue
        save = save_cost(plan, machine, location, storage, gpus)
        steps = steps_between(save.cost, mtbf, estimate.step, save.write)
        jobs.append(
            FailingJob(
                *(domain, replicas, estimate.step, by_cause, design),
                *(location, save, steps, disk, on_disk),
            )
        )
    return max(jobs, key=lambda job: job.expected)


def usual_failures(estimate: Estimate, mtbf_gpu: float | None) -> FailingJob | None:
    """The job with failures as `train` recovers from them: checkpoints on disk, all ranks start
    again. None if neither a rate is given nor the machine has one."""
    hours = estimate.setting.machine.gpu_mtbf_hours if mtbf_gpu is None else mtbf_gpu
    if hours is None:
        return None
    return failing_job(estimate, FailureRates(hours), RecoveryDesign(), "disk")


class RecoveryKind(NamedTuple):
    """A way to recover: where checkpoints are, and seconds to notice and to start again."""

    name: str
    location: CheckpointPlace
    detect: float
    restart: float


# From the simplest to the best. The first waits for NCCL's usual timeout; the last keeps all other
# processes, and has a spare one ready.
RECOVERIES = (
    RecoveryKind("disk, NCCL's timeout", "disk", 600, RESTART),
    RecoveryKind("disk, watchdog", "disk", DETECT, RESTART),
    RecoveryKind("memory, watchdog", "memory", DETECT, RESTART),
    RecoveryKind("memory, warm ranks", "memory", DETECT, 30),
)


class ScalePoint(NamedTuple):
    """The goodput of a design with so many GPUs, by the closed form."""

    gpus: int
    design: str
    goodput: float
    mtbf: float  # seconds


def scale_points(
    estimate: Estimate, rates: FailureRates, gpus: Sequence[int], storage: float | None = None
) -> list[ScalePoint]:
    """Every way to recover at every scale: replicas are added, each with its batch."""
    points: list[ScalePoint] = []
    for number in gpus:
        for kind in RECOVERIES:
            domain = failure_domain(estimate.plan, estimate.setting.machine, number)
            location = kind.location if domain.switches > 1 else "disk"
            design = RecoveryDesign(kind.detect, kind.restart)
            job = failing_job(estimate, rates, design, location, storage, number)
            points.append(ScalePoint(number, kind.name, job.expected, 1 / job.rate))
    return points


def _one_domain(domain: FailureDomain) -> str:
    return (
        f"--checkpoint memory with {counted(domain.hosts, 'host')}: partners must be in two "
        "failure domains, and here is one leaf switch; use --checkpoint disk, or more than 4 hosts"
    )


@dataclass(frozen=True)
class FailureForecast:
    """Means over simulated runs, and the bands in which 90% of the runs are."""

    job: FailingJob
    days: float
    runs: int
    seed: int
    goodput: float
    goodput_band: tuple[float, float]
    interruptions: float
    interruptions_band: tuple[float, float]
    lost: dict[str, float]  # seconds of a run, by cause


def simulate_failures(job: FailingJob, days: float, runs: int, seed: int) -> FailureForecast:
    """Simulate so many runs of so many days."""
    failures = job.rate * days * _DAY
    if failures > _MOST_FAILURES:
        raise FivefoldError(
            f"{failures:,.0f} failures in a run: a simulation has at most {_MOST_FAILURES:,}; give "
            "fewer --days, or more hours between failures"
        )
    if failures * runs > _MOST_EVENTS:
        most = int(_MOST_EVENTS / failures)
        raise FivefoldError(
            f"--runs {runs} with {failures:,.0f} failures each: give {most:,} runs at most"
        )
    state = _Runs(job, days * _DAY, runs, np.random.default_rng(seed))
    while state.live.any():
        state.advance()
    shares = state.useful / state.end
    return FailureForecast(
        *(job, days, runs, seed, float(shares.mean()), _band(shares)),
        *(float(state.failures.mean()), _band(state.failures)),
        {cause: float(seconds.mean()) for cause, seconds in state.lost.items()},
    )


def _band(values: Floats) -> tuple[float, float]:
    low, high = np.percentile(values, _BAND)
    return float(low), float(high)


class _Runs:
    """All runs, each at its own time."""

    def __init__(self, job: FailingJob, end: float, runs: int, random: np.random.Generator) -> None:
        self.job, self.end, self.random = job, end, random
        self.time, self.useful, self.failures = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.lost = {cause: np.zeros(runs) for cause in LOST}
        self.speed = np.ones(runs)  # shares of the replicas that are there
        self.live = np.ones(runs, bool)
        self.repairs = None if job.design.spares is None else _Repairs(runs, job)
        self._causes = list(job.rates)
        self._shares = (
            np.cumsum([job.rates[failure_cause] for failure_cause in self._causes]) / job.rate
        )
        self._hosts = np.array(
            [job.domain.hosts_lost(failure_cause) for failure_cause in self._causes]
        )

    def advance(self) -> None:
        """To the next failure of every run, and through its recovery."""
        up = self.random.exponential(1 / self.job.rate, len(self.time))
        fails = self.live & (self.time + up < self.end)
        self._work(np.where(fails, up, self.end - self.time), fails)
        self.time = np.where(fails, self.time + up, self.end)
        self.live = fails
        if fails.any():
            self._recover(fails)
            self.live = fails & (self.time < self.end)

    def _work(self, up: Floats, fails: NDArray[np.bool_]) -> None:
        """Steps and saves: those before a failure count if their save was complete."""
        job = self.job
        cycle = job.interval + job.save.cost
        saved = np.floor(np.maximum(up - job.save.write, 0) / cycle)
        saves = np.where(fails, saved, np.floor(up / cycle))
        worked = np.where(fails, saved * job.interval, up - saves * job.save.cost)
        self.useful += self.speed * worked
        self.lost["shrunk"] += (1 - self.speed) * worked
        self.lost["save"] += saves * job.save.cost
        self.lost["rework"] += np.where(fails, up - saved * cycle, 0.0)

    def _recover(self, fails: NDArray[np.bool_]) -> None:
        job, once = self.job, self.job.recovery
        again = max(np.exp(-job.rate * once), 1e-12)
        tries = np.where(fails, self.random.geometric(again, len(self.time)), 0)
        cause = np.searchsorted(self._shares, self.random.random(len(self.time)))
        hosts = np.where(fails, self._hosts[np.minimum(cause, len(self._hosts) - 1)], 0)
        extra = np.maximum(tries - 1, 0)  # failures during the recovery
        self.failures += tries
        if job.location == "memory":
            self._lose_partners(hosts, extra)
        took = np.minimum(tries * once, self.end - self.time)
        share = 0.0 if once == 0 else job.design.detect / once
        self.lost["detect"] += took * share
        self.lost["restart"] += took * (1 - share)
        self.time = self.time + np.where(fails, took, 0)
        if self.repairs is not None:
            self.repairs.take(self.time, hosts + extra)
            self._wait(fails)

    def _lose_partners(self, hosts: NDArray[np.int_], extra: NDArray[np.int_]) -> None:
        """A failure during a recovery may hit a partner of what was lost: then a disk is read."""
        chance = 1 - (1 - np.minimum(1, hosts / max(1, self.job.domain.hosts - 1))) ** extra
        hit = self.random.random(len(self.time)) < chance
        if hit.any():
            back = self.random.random(len(self.time)) * self.job.disk_interval + self.job.disk.write
            back = np.where(hit, np.minimum(back, self.useful), 0.0)
            self.useful -= back
            self.lost["rework"] += back

    def _wait(self, fails: NDArray[np.bool_]) -> None:
        """Go on with the replicas that are left; without any, wait until a host is back."""
        assert self.repairs is not None
        self.speed = self.repairs.replicas_left(self.time)
        while (none := fails & (self.speed <= 0) & (self.time < self.end)).any():
            back = np.clip(self.repairs.next_back(), self.time, self.end)
            self.lost["waiting"] += np.where(none, back - self.time, 0.0)
            self.time = np.where(none, back, self.time)
            self.speed = self.repairs.replicas_left(self.time)


class _Repairs:
    """The hosts that are away, by run: when each was lost, and how many were with it."""

    def __init__(self, runs: int, job: FailingJob) -> None:
        self.job, self.every = job, np.arange(runs)
        self.at: Floats = np.zeros((64, runs))
        self.sums: Floats = np.zeros((65, runs))
        self.events = 0
        self.oldest = np.zeros(runs, int)  # the first event whose hosts are still away

    def take(self, time_now: Floats, hosts: NDArray[np.int_]) -> None:
        """Hosts are lost now."""
        if self.events == len(self.at):
            extra: Floats = np.zeros(self.at.shape)
            self.at = np.concatenate([self.at, extra])
            self.sums = np.concatenate([self.sums, extra])
        self.at[self.events] = time_now
        self.sums[self.events + 1] = self.sums[self.events] + hosts
        self.events += 1

    def replicas_left(self, time_now: Floats) -> Floats:
        """The share of the replicas that hosts and spares are enough for."""
        job = self.job
        while True:
            inside = np.minimum(self.oldest, self.events - 1)
            back = (self.oldest < self.events) & (
                self.at[inside, self.every] + job.design.repair <= time_now
            )
            if not back.any():
                break
            self.oldest += back
        away = self.sums[self.events] - self.sums[self.oldest, self.every]
        missing = np.maximum(away - (job.design.spares or 0), 0)
        # Each lost host may be of another replica; small replicas share a host.
        together = ceil(job.replicas / job.domain.hosts)
        return np.maximum(job.replicas - missing * together, 0) / job.replicas

    def next_back(self) -> Floats:
        """When the host that is away the longest comes back."""
        inside = np.minimum(self.oldest, self.events - 1)
        return self.at[inside, self.every] + self.job.design.repair

"""One rank on one GPU: real shards, real kernels, and no other rank to wait for.

The clock then plays the step of the whole job from the times that were measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from fivefold.core.layout import stage_kind
from fivefold.core.plan import Plan
from fivefold.core.schedule import Step
from fivefold.cost.traffic import distinct_ranks
from fivefold.data import samples
from fivefold.launch import Pool, Worker
from fivefold.model.kernels import compiled, eager
from fivefold.optim import Updater
from fivefold.parallel import ActionObserver, Instruments, Mesh, compose
from fivefold.planner import Estimate, MeasuredPasses, SimulatedStep, simulate_step
from fivefold.rehearse.job import representatives
from fivefold.rehearse.rank import DTYPES, RoundRobin, joined
from fivefold.step import step, updater_of

if TYPE_CHECKING:
    from fivefold.rehearse.contention import ContendedStep

_STEPS = 3  # the first finds its memory and makes its kernels; of the others medians are taken


@dataclass(frozen=True)
class MeasuredRank:
    """Measurements of a rank: peak allocated bytes of a step, and seconds.

    `actions` are medians by kind of action and stage, such as `3F`. A step's seconds are those of
    this rank alone: collectives take no time there, and that of their links in `contended`.
    """

    rank: int
    peak: int
    step: float
    update: float
    actions: dict[str, float] = field(default_factory=dict[str, float])
    contended: ContendedStep | None = None


def measure_rank(
    plan: Plan, rank: int, imbalance: float = 1.0, contend: bool = False
) -> MeasuredRank:
    """Run a few steps of one rank on the GPU of this process; with `contend`, a few more with
    kernels in place of its collectives."""
    device = torch.device("cuda", torch.cuda.current_device())
    with joined(rank, plan.layout.world):
        torch.cuda.reset_peak_memory_stats(device)
        run = _MeasuredSteps(plan, rank, device, imbalance)
        for _ in range(_STEPS):
            run.step()
        measurement = run.medians()
        if contend:
            measurement = replace(measurement, contended=run.contend(measurement.step))
        run.mesh.close_groups()
    return measurement


class _MeasuredSteps:
    def __init__(self, plan: Plan, rank: int, device: torch.device, imbalance: float) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        dtype = DTYPES[plan.precision]
        master = dtype.itemsize < 4
        self.mesh, self.marks = Mesh.of(plan, device), _Marks(device)
        self.job = compose(
            plan,
            self.mesh,
            seed=0,
            dtype=dtype,
            fuse=compiled if plan.options.train.compiles("cuda") else eager,
            instruments=Instruments(actions=self.marks, routing=RoundRobin(plan, rank, imbalance)),
        )
        self.updater = updater_of(self.job, plan.options.train, master=master)
        drawn = samples(
            plan.batch,
            plan.shape.vocab,
            seed=0,
            step=0,
            packed=plan.packed,
            drops=plan.shape.drops,
        )
        self.batches = drawn.to(device).of(plan.layout.coord(rank).dp)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.peak = 0

    def step(self) -> None:
        """One optimizer step; garbage in, garbage out, in the right sizes."""
        self.marks.all.clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        ended = self.marks.begin("step")
        step(
            self.job,
            _TimedUpdater(self.updater, self.marks),
            self.batches,
            self.plan.options.train.clip,
        )
        self.marks.end(ended)
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device)
        for name, start, stop in self.marks.all:
            self.seconds[name].append(start.elapsed_time(stop) / 1e3)

    def contend(self, alone: float) -> ContendedStep:
        """Steps with kernels in place of collectives: the one of median length."""
        from fivefold.rehearse.contention import Contention, contended_step  # Triton needs CUDA

        assert self.plan.machine is not None, "refused before: links are of a machine"
        self.mesh.replace_collectives(Contention(self.plan, self.plan.machine, self.device))
        timed: list[tuple[float, ContendedStep]] = []
        for _ in range(_STEPS + 1):
            self.mesh.timer.start()
            self.step()
            waits = self.mesh.timer.stop().read()[1]
            seconds = self.seconds["step"][-1]
            timed.append((seconds, contended_step(seconds, waits, alone)))
        self.mesh.replace_collectives(None)
        later = sorted(timed[1:], key=lambda pair: pair[0])
        return later[len(later) // 2][1]

    def medians(self) -> MeasuredRank:
        """Medians, without the first step."""
        later: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            later[name] = median(seconds[len(seconds) // _STEPS :])
        actions = {
            name: duration for name, duration in later.items() if name not in ("step", "update")
        }
        return MeasuredRank(self.rank, self.peak, later["step"], later["update"], actions)


class _Marks(ActionObserver):
    """GPU events around every action, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, action: Step | str) -> torch.cuda.Event:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.all.append((_named(action), began, ended))
        began.record(torch.cuda.current_stream(self.device))
        return ended

    def end(self, token: torch.cuda.Event) -> None:
        token.record(torch.cuda.current_stream(self.device))


class _TimedUpdater:
    """An updater with GPU events around its step."""

    def __init__(self, updater: Updater, marks: _Marks) -> None:
        self.updater, self.marks = updater, marks

    def step(self) -> None:
        ended = self.marks.begin("update")
        self.updater.step()
        self.marks.end(ended)


def _named(action: Step | str) -> str:
    """An action without its microbatch, such as 3F; a pair by both."""
    return re.sub(r"([FBIW])[0-9]+", r"\1", str(action))


@dataclass(frozen=True)
class Forecasted:
    """Measurements by rank, and the forecast step if the machine is known."""

    measured: list[MeasuredRank]
    step: SimulatedStep | None


def forecast_on_gpu(
    plan: Plan,
    ranks: Sequence[int] | None,
    imbalance: float,
    planned: Estimate | None,
    contend: bool = False,
) -> Forecasted:
    """Measure one rank for each kind of stages, or these ranks, each in its own process."""
    chosen = list(ranks or representatives(plan, distinct_ranks(plan)))
    measurements: list[MeasuredRank] = []
    for rank in chosen:
        with Pool(1, patience=3600.0) as pool:  # whose memory is the GPU's again afterwards
            measurements += pool.run_each([(_measure, (plan, rank, imbalance, contend))])
    step = None
    if planned is not None and (passes := passes_of(plan, measurements)) is not None:
        step = simulate_step(plan, planned.setting, measured=passes)
    return Forecasted(measurements, step)


def _measure(
    worker: Worker, plan: Plan, rank: int, imbalance: float, contend: bool
) -> MeasuredRank:
    worker.phase(f"rank {rank}")
    return measure_rank(plan, rank, imbalance, contend)


def passes_of(plan: Plan, measurements: Sequence[MeasuredRank]) -> dict[int, MeasuredPasses] | None:
    """Passes of every stage, from measured stages of the same kind; None if one is missing."""
    by_kind: dict[object, MeasuredPasses] = {}
    kinds = [stage_kind(plan.shape, layers) for layers in plan.stages]
    for measurement in measurements:
        for stage in plan.schedule.placement.stages_of(plan.layout.coord(measurement.rank).pp):
            by_kind.setdefault(kinds[stage], _passes(measurement, stage))
    if any(kind not in by_kind for kind in kinds):
        return None
    return {stage: by_kind[kind] for stage, kind in enumerate(kinds)}


def _passes(measurement: MeasuredRank, stage: int) -> MeasuredPasses:
    """A full backward counts as an input gradient: the clock adds both."""
    times = {
        name: duration
        for name, duration in measurement.actions.items()
        if re.match(rf"{stage}[FBIW]$", name)
    }
    letter = {name[-1]: seconds for name, seconds in times.items()}
    backward = letter.get("B", letter.get("I", 0.0) + letter.get("W", 0.0))
    if "I" in letter:
        return MeasuredPasses(
            letter["F"], letter["I"], letter.get("W", max(0.0, backward - letter["I"]))
        )
    return MeasuredPasses(letter["F"], backward)

"""One rank on one GPU: real shards, real kernels, and nobody to wait for."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import torch

from fivefold.core.plan import Plan
from fivefold.core.schedule.action import Step
from fivefold.model.compiled import compile_blocks
from fivefold.parallel.compose import Job, compose
from fivefold.parallel.expert import SpreadExperts
from fivefold.parallel.mesh import Mesh
from fivefold.rehearsal.pretend import joined
from fivefold.rehearsal.rank import DTYPES
from fivefold.rehearsal.routing import RoundRobin
from fivefold.run.samples import samples
from fivefold.run.updaters import make_updater
from fivefold.step import step

_STEPS = 3  # the first finds its memory and makes its kernels; of the others medians are taken


@dataclass(frozen=True)
class Measured:
    """What a rank took: bytes at the peak of a step as torch counts them, and seconds.

    `actions` are medians by kind of action and stage, such as `3F`. A step's seconds are those of
    this rank alone: collectives take no time here.
    """

    rank: int
    peak: int
    step: float
    update: float
    actions: dict[str, float] = field(default_factory=dict[str, float])


def measure_rank(plan: Plan, rank: int, imbalance: float = 1.0, compiled: bool = False) -> Measured:
    """A few steps of one rank on the GPU of this process."""
    device = torch.device("cuda", torch.cuda.current_device())
    with joined(rank, plan.layout.world):
        torch.cuda.reset_peak_memory_stats()
        run = _Run(plan, rank, device, imbalance, compiled)
        for _ in range(_STEPS):
            run.step()
        found = run.found()
        run.close()
    return found


class _Run:
    def __init__(
        self, plan: Plan, rank: int, device: torch.device, imbalance: float, compiled: bool
    ) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        dtype = DTYPES[plan.precision]
        master = dtype.itemsize < 4
        self.mesh = Mesh.of(plan, device)
        grad_dtype = torch.float32 if master else None
        self.job = compose(
            plan, self.mesh, seed=0, dtype=dtype, grad_dtype=grad_dtype, master=master
        )
        self.updater = make_updater(
            plan.wishes.train, self.job.owned, device, master=master, rank=rank
        )
        _route(self.job, RoundRobin(plan, rank, imbalance))
        if compiled:
            for chunk in self.job.chunks:
                compile_blocks(chunk.model)
        drawn = samples(plan.batch, plan.shape.vocab, seed=0, step=0).to(device)
        self.batches = drawn.of(plan.layout.coord(rank).dp)
        self.marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.job.pipeline.before, self.job.pipeline.after = self._before, self._after
        self.peak = 0

    def step(self) -> None:
        """One optimizer step; garbage in, garbage out, in the right sizes."""
        self.marks.clear()
        torch.cuda.reset_peak_memory_stats()
        began, ended = _marks()
        began.record()
        step(self.job, _Timed(self), self.batches, self.plan.wishes.train.clip)
        ended.record()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()
        for name, start, stop in [*self.marks, ("step", began, ended)]:
            self.seconds[name].append(start.elapsed_time(stop) / 1e3)

    def found(self) -> Measured:
        """Medians, without the first step."""
        later: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            later[name] = median(seconds[len(seconds) // _STEPS :])
        actions = {name: each for name, each in later.items() if name not in ("step", "update")}
        return Measured(self.rank, self.peak, later["step"], later["update"], actions)

    def close(self) -> None:
        self.mesh.groups.clear()
        self.mesh.channels.clear()

    def _before(self, action: Step) -> None:
        self.marks.append((_named(action), *_marks()))
        self.marks[-1][1].record()

    def _after(self, action: Step) -> None:
        self.marks[-1][2].record()


class _Timed:
    """The updater, with marks around its step."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def step(self) -> None:
        began, ended = _marks()
        began.record()
        self.run.updater.step()
        ended.record()
        self.run.marks.append(("update", began, ended))


def _route(job: Job, routing: RoundRobin) -> None:
    """Nobody answers how many tokens come: the stand-in does."""
    for chunk in job.chunks:
        for module in chunk.model.modules():
            dispatch = getattr(module, "dispatch", None)
            if isinstance(dispatch, SpreadExperts):
                dispatch.stand_in = routing


def _marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _named(action: Step) -> str:
    """An action without its microbatch, such as 3F; a pair by both."""
    return re.sub(r"([FBIW])[0-9]+", r"\1", str(action))

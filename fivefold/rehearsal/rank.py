"""One rank rehearsed: the real composition and the real step, and what they held and called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.core.legality import padded_vocab
from fivefold.core.matching import Made
from fivefold.core.plan import Plan
from fivefold.core.schedule.action import Step, actions_of
from fivefold.parallel.compose import Job, compose, hidden_size
from fivefold.parallel.expert import SpreadExperts
from fivefold.parallel.mesh import Mesh, Record
from fivefold.rehearsal import meter as metering
from fivefold.rehearsal.kernels import stand_in
from fivefold.rehearsal.meter import Meter
from fivefold.rehearsal.pretend import joined, without_values
from fivefold.rehearsal.replay import ReplayingChunk, Traces
from fivefold.rehearsal.routing import RoundRobin
from fivefold.run.optimizer import Updater
from fivefold.run.samples import samples
from fivefold.run.updaters import make_updater
from fivefold.step import step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BEFORE, _BEHIND = "before the first action", "behind the last action"


@dataclass(frozen=True)
class Level:
    """Memory behind one action of a rank."""

    action: str
    bytes: int
    peak: int  # the most inside of it


@dataclass
class RankRun:
    """What one rank held and called in a step."""

    rank: int
    peak: int = 0
    build: int = 0  # the most before the step
    memory: dict[str, int] = field(default_factory=dict[str, int])  # at the peak, by category
    calls: list[Made] = field(default_factory=list[Made])
    records: Counter[Record] = field(default_factory=Counter[Record])
    levels: list[Level] = field(default_factory=list[Level])
    replayed: bool = False


def rehearse_rank(plan: Plan, rank: int, traces: Traces | None, imbalance: float = 1.0) -> RankRun:
    """A whole optimizer step of one rank on tensors without values.

    With `traces`, actions that were traced before are replayed; None: everything runs for real.
    """
    device = torch.device("cpu")
    with joined(rank, plan.layout.world), without_values(device):
        run = _Run(plan, rank, device, traces, imbalance)
        run.go()
        result = run.result
        run.close()
        return result


class _Run:
    def __init__(
        self, plan: Plan, rank: int, device: torch.device, traces: Traces | None, imbalance: float
    ) -> None:
        self.plan, self.rank, self.traces = plan, rank, traces
        self.result = RankRun(rank, replayed=traces is not None)
        self.where = _BEFORE
        self.dtype = DTYPES[plan.precision]
        self.meter = Meter(self._category)
        self.mesh = Mesh.of(plan, device)
        self.mesh.resized = lambda tensor: self.meter.resized(tensor, metering.WEIGHTS)
        with self.meter:
            self.job = self._compose()
            self.updater = self._updater()
        self._prepare(imbalance)

    def _compose(self) -> Job:
        master = self.dtype.itemsize < 4
        with self.meter.called(metering.WEIGHTS):
            return compose(
                self.plan,
                self.mesh,
                seed=0,
                dtype=self.dtype,
                grad_dtype=torch.float32 if master else None,
                master=master,
            )

    def _updater(self) -> Updater:
        with self.meter.called(metering.OPTIMIZER):
            updater = make_updater(
                self.plan.wishes.train,
                self.job.owned,
                self.mesh.device,
                master=self.dtype.itemsize < 4,
                rank=self.rank,
            )
        masters = updater.states().get("master", [])
        self.meter.move((each.read() for each in masters if each is not None), metering.MASTER)
        return updater

    def _prepare(self, imbalance: float) -> None:
        """Put stand-ins where values would be needed, and listen."""
        self.sums = {
            (size, unit.grad_dtype)
            for unit in self.job.units
            for size in (unit.unit.size, unit.unit.slice_size)
        }
        tp = self.plan.layout.tp
        self.vocabulary = padded_vocab(self.plan.shape.vocab, tp) // tp  # rows of this rank
        routing = RoundRobin(self.plan, self.rank, imbalance)
        for chunk in self.job.chunks:
            stand_in(chunk.model)
            for module in chunk.model.modules():
                dispatch = getattr(module, "dispatch", None)
                if isinstance(dispatch, SpreadExperts):
                    dispatch.stand_in = routing
        self.mesh.heard = self._heard
        pipeline = self.job.pipeline
        pipeline.before, pipeline.after = self._before, self._after
        pipeline.outbox.lines = _AtOnce()
        if self.traces is not None:
            pipeline.chunks = {each.stage: self._replaying(each) for each in self.job.chunks}

    def _replaying(self, chunk: Any) -> ReplayingChunk:
        assert self.traces is not None
        actions = (action for step in self.job.pipeline.steps for action in actions_of(step))
        mine = [each for each in actions if each.stage == chunk.stage]
        return ReplayingChunk(
            chunk, mine, self.meter, self.mesh, self.traces, self._signature(chunk.stage),
            hidden_size(self.plan), self.dtype,
        )  # fmt: skip

    def _signature(self, stage: int) -> Hashable:
        """Stages with the same signature do the same on ranks at the same other coords."""
        shape, layers = self.plan.shape, self.plan.stages[stage]
        kinds = tuple((shape.is_moe_layer(i), shape.is_global_layer(i)) for i in layers)
        coord = self.plan.layout.coord(self.rank)
        ends = (layers.start == 0, layers.stop == shape.layers)
        return kinds, ends, coord._replace(pp=0)

    def go(self) -> None:
        """The step."""
        coord = self.plan.layout.coord(self.rank).dp
        self.result.build = self.meter.peak
        self.meter.peak = 0
        with self.meter:
            with self.meter.called(metering.BUFFERS):
                drawn = samples(self.plan.batch, self.plan.shape.vocab, seed=0, step=0)
                batches = drawn.of(coord)
            step(self.job, self.updater, batches, self.plan.wishes.train.clip)
        self.result.peak = self.meter.peak
        self.result.memory = dict(self.meter.at_peak)
        self.result.records = Counter(self.mesh.records)

    def close(self) -> None:
        self.mesh.groups.clear()
        self.mesh.channels.clear()

    def _category(self, func: Any, tensor: Tensor) -> str:
        """What memory is for that an operator has made."""
        if func.namespace in ("c10d", "_c10d_functional"):
            return metering.BUFFERS
        if tensor.dim() == 1 and (tensor.numel(), tensor.dtype) in self.sums:
            return metering.GRADIENTS
        if tensor.dim() and tensor.shape[-1] == self.vocabulary:
            return metering.LOGITS
        return metering.ACTIVATIONS

    def _heard(self, record: Record, members: tuple[int, ...]) -> None:
        self.result.calls.append(Made(record.axis, record.kind, record.bytes, members, self.where))

    def _before(self, action: Step) -> None:
        self.where, self.meter.high = str(action), self.meter.total

    def _after(self, action: Step) -> None:
        self.result.levels.append(Level(str(action), self.meter.total, self.meter.high))
        self.where = _BEHIND


class _AtOnce(dict[int, Executor]):
    """Executors for every target that run what they are given before they return."""

    def __contains__(self, target: object) -> bool:
        return True

    def __missing__(self, target: int) -> Any:
        return self

    def submit(self, function: Any) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(function())
        return done

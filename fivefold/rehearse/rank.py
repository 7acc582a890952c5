"""One rank of any job, alone: process groups without others, and tensors without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.core.legality import padded_vocab
from fivefold.core.plan import Plan
from fivefold.core.schedule import Step, actions_of
from fivefold.cost.collectives import most_nodes
from fivefold.cost.grid import fullest_rank
from fivefold.cost.matching import RankCalls
from fivefold.data.batches import samples
from fivefold.optim import make_updater
from fivefold.optim.optimizer import Updater
from fivefold.parallel.compose import Job, compose, hidden_size
from fivefold.parallel.context import token_index
from fivefold.parallel.expert import SpreadExperts
from fivefold.parallel.mesh import FAR, NEAR, PRETENDED, CollectiveRecord, Mesh
from fivefold.rehearse import trace as metering
from fivefold.rehearse.trace import Meter, ReplayingChunk, Traces, stand_in
from fivefold.step import step


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """Be one of so many ranks: collectives return at once, with whatever is in their buffers."""
    if world == 1:
        yield
        return
    dist.init_process_group(PRETENDED, rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_values(device: torch.device) -> Iterator[None]:
    """On the CPU, tensors have sizes and no memory; on a GPU they are what they are."""
    if device.type == "cuda":
        yield
        return
    token_index.cache_clear()  # what is kept there is counted once in every run
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        token_index.cache_clear()  # and is of no use to those with values


# Where tokens go that have no values: round-robin, or unevenly as asked.


class RoundRobin:
    """Every expert gets as many slots as any other; with an `imbalance`, the first one gets so many
    times the mean, and all others share the rest."""

    def __init__(self, plan: Plan, rank: int, imbalance: float) -> None:
        layout, moe = plan.layout, plan.shape.moe
        place, near = layout.coord(rank).ep, layout.ep // plan.ep_nodes
        self.plan, self.sizes = plan, {"ep": layout.ep, FAR: plan.ep_nodes, NEAR: near}
        self.places = {"ep": place, FAR: place // near, NEAR: place % near}
        fullest = 1.0 if moe is None else float(fullest_rank(moe, layout.ep, imbalance))
        held = 1 if moe is None else moe.experts // layout.ep
        self.fullest, self.first = fullest, imbalance / (held * fullest)

    def rows(self, axis: str, num_rows: int) -> tuple[list[int], list[int]]:
        """All ranks send alike."""
        leave = _split(num_rows, self._shares(axis))
        return leave, [leave[self.places[axis]]] * len(leave)

    def arriving(self, axis: str, num_rows: int, like: Tensor) -> Tensor:
        """Of what comes from a rank, as much to each expert; the fullest has what is over."""
        ranks, experts = like.shape
        each = self.rows(axis, num_rows)[1][0]
        shares = [1 / experts] * experts
        if self.places["ep"] == 0 and experts > 1:
            shares = [self.first, *[(1 - self.first) / (experts - 1)] * (experts - 1)]
        return like.new_tensor([_split(each, shares)] * ranks)

    def crossing(self, num_tokens: int) -> int:
        """As many nodes as a token can need: what is planned for."""
        assert self.plan.shape.moe is not None
        return num_tokens * most_nodes(self.plan, self.plan.shape.moe)

    def inside(self, num_rows: int) -> int:
        """A token's choices are all somewhere, each in one node."""
        moe = self.plan.shape.moe
        assert moe is not None
        return num_rows * moe.top_k // most_nodes(self.plan, moe)

    def _shares(self, axis: str) -> list[float]:
        size = self.sizes[axis]
        if size == 1 or self.fullest == 1.0:
            return [1 / size] * size
        return [self.fullest / size, *[(1 - self.fullest / size) / (size - 1)] * (size - 1)]


def _split(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares, with nothing left over."""
    ends = [round(count * total) for total in accumulate(shares, initial=0.0)]
    ends[-1] = count
    return [stop - start for start, stop in pairwise(ends)]


# One rank rehearsed: the real composition and the real step, and what they held and called.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BEFORE, _BEHIND = "before the first action", "behind the last action"


@dataclass(frozen=True)
class MemoryLevel:
    """Memory behind one action of a rank."""

    action: str
    bytes: int
    peak: int  # the most inside of it


@dataclass
class RehearsedRank:
    """What one rank held and called in a step."""

    rank: int
    peak: int = 0
    build: int = 0  # the most before the step
    memory: dict[str, int] = field(default_factory=dict[str, int])  # at the peak, by category
    calls: list[RankCalls] = field(default_factory=list[RankCalls])
    records: Counter[CollectiveRecord] = field(default_factory=Counter[CollectiveRecord])
    levels: list[MemoryLevel] = field(default_factory=list[MemoryLevel])
    replayed: bool = False


def rehearse_rank(
    plan: Plan, rank: int, traces: Traces | None, imbalance: float = 1.0
) -> RehearsedRank:
    """A whole optimizer step of one rank on tensors without values.

    With `traces`, actions that were traced before are replayed; None: everything runs for real.
    """
    device = torch.device("cpu")
    with joined(rank, plan.layout.world), without_values(device):
        run = _RehearsalRun(plan, rank, device, traces, imbalance)
        run.go()
        result = run.result
        run.close()
        return result


class _RehearsalRun:
    def __init__(
        self, plan: Plan, rank: int, device: torch.device, traces: Traces | None, imbalance: float
    ) -> None:
        self.plan, self.rank, self.traces = plan, rank, traces
        self.result = RehearsedRank(rank, replayed=traces is not None)
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

    def _heard(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
        self.result.calls.append(
            RankCalls(record.axis, record.kind, record.bytes, members, self.where)
        )

    def _before(self, action: Step) -> None:
        self.where, self.meter.high = str(action), self.meter.total

    def _after(self, action: Step) -> None:
        self.result.levels.append(MemoryLevel(str(action), self.meter.total, self.meter.high))
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

"""One rank of any job, alone: fake process groups, tensors without values, and a routing by rule.

The real composition and the real step run; memory and collectives are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.core import PRECISIONS, RUNTIME_PRECISIONS
from fivefold.core.layout import FAR, NEAR, PIPELINE, keeps_rounded, padded_vocab, stage_kind
from fivefold.core.plan import Plan
from fivefold.core.schedule import Step, actions_of, merged
from fivefold.cost import fullest_rank_load
from fivefold.cost.traffic import AFTER, BEFORE, IssuedCollective, max_nodes_per_token, units_of
from fivefold.data import samples
from fivefold.model import Documents, TokenBatch
from fivefold.model.fp8 import TURNED, Both
from fivefold.optim import Updater
from fivefold.parallel import (
    FAKE,
    ActionObserver,
    CollectiveRecord,
    Instruments,
    Job,
    Mesh,
    StageChunk,
    compose,
    hidden_size,
    token_index,
)
from fivefold.rehearse import trace as tracing
from fivefold.rehearse.sizes import DEVICE
from fivefold.rehearse.trace import Fused, Meter, Recording, ReplayingChunk, Tracer, Traces
from fivefold.step import step, updater_of

_EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """Join fake groups of so many ranks: collectives return at once, and leave their buffers as
    they are."""
    if world == 1:
        yield
        return
    dist.init_process_group(FAKE, rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_values() -> Iterator[None]:
    """Context in which groups accept meta tensors, which torch's device list lacks. Cached token
    indices are dropped, so that each run counts its own."""
    able = dist.Backend.backend_capability[FAKE]
    able += [] if DEVICE.type in able else [DEVICE.type]
    token_index.cache_clear()
    try:
        yield
    finally:
        token_index.cache_clear()  # and are of no use to those with values


class RoundRobin:
    """Balanced routing; with an `imbalance`, the first expert gets so many times the mean, and the
    others share the rest."""

    def __init__(self, plan: Plan, rank: int, imbalance: float) -> None:
        layout, moe = plan.layout, plan.shape.moe
        ep_rank, near = layout.coord(rank).ep, layout.ep // plan.ep_nodes
        self.plan, self.sizes = plan, {"ep": layout.ep, FAR: plan.ep_nodes, NEAR: near}
        self.places = {"ep": ep_rank, FAR: ep_rank // near, NEAR: ep_rank % near}
        fullest = 1.0 if moe is None else float(fullest_rank_load(moe, layout.ep, imbalance))
        local_experts = 1 if moe is None else moe.experts // layout.ep
        self.fullest, self.first = fullest, imbalance / (local_experts * fullest)

    def rows(self, axis: str, num_rows: int) -> tuple[list[int], list[int]]:
        """Rows to each rank by its share, and from each rank as many: all ranks send alike."""
        leave = _split(num_rows, self._shares(axis))
        return leave, [leave[self.places[axis]]] * len(leave)

    def arriving(self, axis: str, num_rows: int, like: Tensor) -> Tensor:
        """Split received rows evenly over experts; the fullest gets the excess."""
        ranks, experts = like.shape
        count = self.rows(axis, num_rows)[1][0]
        shares = [1 / experts] * experts
        if self.places["ep"] == 0 and experts > 1:
            shares = [self.first, *[(1 - self.first) / (experts - 1)] * (experts - 1)]
        return torch.tensor([_split(count, shares)] * ranks, dtype=like.dtype).to(like.device)

    def crossing(self, num_tokens: int) -> int:
        """Rows for as many nodes as a token may need, as planned."""
        assert self.plan.shape.moe is not None
        return num_tokens * max_nodes_per_token(self.plan.shape.moe, self.plan.ep_nodes)

    def inside(self, num_rows: int) -> int:
        """Each choice of a token is on exactly one node."""
        moe = self.plan.shape.moe
        assert moe is not None
        return num_rows * moe.top_k // max_nodes_per_token(moe, self.plan.ep_nodes)

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


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, PRECISIONS[name].dtype) for name in RUNTIME_PRECISIONS
}


@dataclass(frozen=True)
class MemoryLevel:
    """Memory after one action of a rank."""

    action: str
    bytes: int
    peak: int  # the most inside of it


@dataclass(frozen=True)
class RehearsedRank:
    """Memory and collectives of one rank in a step."""

    rank: int
    peak: int
    build: int  # peak before the step
    memory: dict[str, int]  # at the peak, by category
    calls: list[IssuedCollective]
    records: Counter[CollectiveRecord]
    levels: list[MemoryLevel]
    replayed: bool  # whether some of its microbatches repeat what another one did


def rehearse_rank(
    plan: Plan, rank: int, traces: Traces | None, imbalance: float = 1.0
) -> RehearsedRank:
    """Run one optimizer step of one rank on tensors without values.

    With `traces`, actions that were traced before are replayed; None: everything runs for real.
    """
    with without_values(), joined(rank, plan.layout.world):
        run = _RehearsalRun(plan, rank, traces, imbalance)
        try:
            pause = partial(run.meter.recording.note, tracing.Moment.PAUSE)
            with run.mesh.lanes.inside(lambda: run.meter, pause):
                return run.go()
        finally:
            run.mesh.close_groups()


class _CallLog:
    """Collectives that a rank has issued, by action."""

    def __init__(self, recording: Recording) -> None:
        self.calls: list[IssuedCollective] = []
        self.where, self.recording = BEFORE, recording

    def enter(self, action: str) -> None:
        """The collectives that follow belong to this action."""
        self.where = action

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
        """Note one collective."""
        self.calls.append(
            IssuedCollective(record.axis, record.kind, record.bytes, members, self.where)
        )
        self.recording.note(record)

    def end(self, token: None) -> None:
        """Nothing: collectives of a rank alone take no time."""


class _Actions(ActionObserver):
    """Records the memory around every action."""

    def __init__(self, meter: Meter, log: _CallLog) -> None:
        self.meter, self.log = meter, log
        self.levels: list[MemoryLevel] = []

    def begin(self, action: Step) -> str:
        self.meter.start_level()
        self.log.enter(str(action))
        return str(action)

    def end(self, token: str) -> None:
        self.levels.append(MemoryLevel(token, self.meter.total, self.meter.high))
        self.log.enter(AFTER)


class _RehearsalRun:
    """One rank that is built, run for a step, and metered."""

    def __init__(self, plan: Plan, rank: int, traces: Traces | None, imbalance: float) -> None:
        self.plan, self.rank, self.dtype = plan, rank, DTYPES[plan.precision]
        self.chunks: list[ReplayingChunk] = []
        recording = Recording()
        self.meter = Meter(_categories(plan, rank, self.dtype), recording)
        self.log = _CallLog(recording)
        self.actions = _Actions(self.meter, self.log)
        self.mesh = Mesh.of(
            plan, DEVICE, [self.log], lambda tensor: self.meter.resized(tensor, tracing.WEIGHTS)
        )
        tracer = None if traces is None else Tracer(self.meter, recording, traces)
        instruments = Instruments(
            actions=self.actions,
            routing=RoundRobin(plan, rank, imbalance),
            wrap=None if tracer is None else partial(self._replaying, tracer),
            on_rounded=self._see_rounded if self._keeps_rounded() else None,
            on_experts=self._see_experts if self._keeps_rounded() else None,
        )
        with self.meter:
            self.job = self._compose(instruments)
            self.updater = self._updater()

    def _compose(self, instruments: Instruments) -> Job:
        with self.meter.called(tracing.WEIGHTS):
            return compose(
                self.plan,
                self.mesh,
                seed=0,
                dtype=self.dtype,
                fuse=Fused(self.meter, everything=self.plan.options.train.compiles("cuda")),
                instruments=instruments,
            )

    def _keeps_rounded(self) -> bool:
        plan = self.plan
        return plan.fp8 is not None and keeps_rounded(plan.layout, plan.gather == "step")

    def _see_rounded(
        self, names: Sequence[str], what: str, rounded: Sequence[Both], _: int
    ) -> None:
        """Weights in fp8 are memory of weights: they stay over the step."""
        if what == "weight":
            sides = (side for pair in rounded for side in pair if side is not None)
            self.meter.move((part for weight in sides for part in weight[:2]), tracing.WEIGHTS)

    def _see_experts(
        self, names: Sequence[str], what: str, codes: Tensor, _: Tensor | None
    ) -> None:
        """The same of routed experts."""
        if what in ("weight", TURNED):
            self.meter.move([codes], tracing.WEIGHTS)

    def _updater(self) -> Updater:
        with self.meter.called(tracing.OPTIMIZER):
            updater = updater_of(self.job, self.plan.options.train, master=self.dtype.itemsize < 4)
        masters = updater.states().get("master", [])
        self.meter.move((master.read() for master in masters if master is not None), tracing.MASTER)
        return updater

    def _replaying(self, tracer: Tracer, chunk: StageChunk) -> ReplayingChunk:
        steps = merged(self.plan.schedule, self.mesh.coord(PIPELINE))
        actions = (action for step in steps for action in actions_of(step))
        chunk_actions = [
            stage_action for stage_action in actions if stage_action.stage == chunk.stage
        ]
        hidden = (hidden_size(self.plan), self.dtype)
        # Stages with the same signature do the same on ranks at the same other coords.
        coord = self.plan.layout.coord(self.rank)
        key = (stage_kind(self.plan.shape, self.plan.stages[chunk.stage]), coord._replace(pp=0))
        self.chunks.append(ReplayingChunk(chunk, chunk_actions, tracer, self.mesh, key, hidden))
        return self.chunks[-1]

    def _packed(self, batch: TokenBatch) -> TokenBatch:
        """With two documents a row, if rows are packed: only the data knows how long they are."""
        if not self.plan.packed:
            return batch
        rows, seq = batch.tokens.shape
        return replace(batch, documents=Documents([[0, seq // 2]] * rows, seq))

    def go(self) -> RehearsedRank:
        """Run the step."""
        coord = self.plan.layout.coord(self.rank).dp
        build = self.meter.reset_peak()
        with self.meter:
            with self.meter.called(tracing.BUFFERS):
                drawn = samples(
                    self.plan.batch,
                    self.plan.shape.vocab,
                    seed=0,
                    step=0,
                    drops=self.plan.shape.drops,
                )
                batches = [self._packed(batch) for batch in drawn.of(coord)]
            step(self.job, self.updater, batches, self.plan.options.train.clip)
        return RehearsedRank(
            self.rank,
            self.meter.peak,
            build,
            dict(self.meter.at_peak),
            self.log.calls,
            Counter(self.mesh.records),
            self.actions.levels,
            any(chunk.replays for chunk in self.chunks),
        )


def _categories(plan: Plan, rank: int, dtype: torch.dtype) -> Callable[[Any, Tensor], str]:
    """Says what memory is for that an operator has made."""
    stages = plan.schedule.placement.stages_of(plan.layout.coord(rank).pp)
    units = [unit for stage in stages for unit in units_of(plan, stage, dtype.itemsize)]
    gradients = {size for unit in units for size in (unit.size, unit.shard_size)}
    grad_dtype = getattr(torch, plan.units.grad_format(dtype.itemsize))
    vocabulary = padded_vocab(plan.shape.vocab, plan.layout.tp) // plan.layout.tp  # of this rank

    def category(func: Any, tensor: Tensor) -> str:
        if func is _EXCHANGE:  # rows of tokens, on their way or saved
            return tracing.ACTIVATIONS
        if func.namespace in ("c10d", "_c10d_functional"):
            return tracing.BUFFERS
        if tensor.dim() == 1 and tensor.dtype == grad_dtype and tensor.numel() in gradients:
            return tracing.GRADIENTS
        if tensor.dim() and tensor.shape[-1] == vocabulary:
            return tracing.LOGITS
        return tracing.ACTIVATIONS

    return category

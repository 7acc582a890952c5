"""When a run saves and loads checkpoints, and which tensors of a job belong into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import TWIN, Holders, boxes_of, buffers, copy_roles, whole_box
from fivefold.launch import lazy_group
from fivefold.model import Balancer
from fivefold.optim import MASTER, StateInMemory, StoredState, Updater
from fivefold.parallel import Job
from fivefold.parallel.units import FlatUnit, OwnedShard
from fivefold.records import CHECKPOINTS, RUN, SAVE, SUSPECT, read_starts
from fivefold.train import RankRun
from fivefold.train.callbacks.callback import Callback
from fivefold.train.checkpoint import (
    BALANCE,
    MODEL,
    OPTIM,
    CannotSave,
    Checkpoints,
    CheckpointTensor,
    Facts,
    MasterWeight,
    published,
    require_seed,
    step_of,
    write_synced,
)
from fivefold.train.recovery import ObservedRate, SaveInterval, observed_rate

_TIMEOUT = timedelta(hours=2)  # that the slowest rank may write longer than the fastest


class CheckpointCallback(Callback):
    """Saves and loads checkpoints of a run, on one rank; none without a run folder."""

    def __init__(self, run: RankRun) -> None:
        self.worker, self.settings, self.folder = run.worker, run.settings, run.folder
        self.job, self.updater, self.progress = run.rank.job, run.rank.updater, run.progress
        self.spent, self.phases = run.spent, run.phases
        self.checkpoints: Checkpoints | None = None
        self.interval: SaveInterval | None = None  # of save_every = auto
        folder, settings = run.folder, run.settings
        if folder is not None:
            # A save goes on while the next steps run, and needs a group of its own.
            alone = self.job.mesh.layout.world == 1
            group = None if alone else lazy_group(_TIMEOUT)
            recipe, device = settings.recipe, self.job.mesh.device
            where = folder.path / CHECKPOINTS
            fence = nullcontext if settings.ticket is None else settings.ticket.publishing
            self.checkpoints = Checkpoints(
                where, recipe.keep, group, device, recipe.keep_best, fence
            )

    def load(self, from_memory: Callable[[list[CheckpointTensor]], Facts | None]) -> None:
        """Resume from memory or from the newest valid checkpoint, if the run resumes and has
        one."""
        if not self.settings.options.resume:
            return
        tensors = checkpoint_tensors(self.job, self.updater)
        if self.settings.memory is not None and self.checkpoints is not None:
            self.checkpoints.meet()  # reading is timed, and not who was built last
        began = time.perf_counter()
        facts, where = from_memory(tensors), "copies in memory"
        if facts is None and self.checkpoints is not None:
            facts, where = self.checkpoints.load(tensors, self._warn), "the disk"
        if facts is None:
            return
        if self.settings.memory is not None:
            took = 1000 * (time.perf_counter() - began)
            self._warn(f"read step {facts.step} from {where} in {took:.0f} ms")
        require_seed(facts, self.settings.recipe.seed)
        self.progress.resume(facts)
        self.updater.resume_after(facts.updates)
        publish_weights(self.job)

    def _rate(self, starts: list[dict[str, Any]]) -> ObservedRate:
        """Failures of this run so far."""
        return observed_rate(starts, time.time(), self.job.plan, self.settings.recipe.mtbf_hours)

    def start(self, after: int) -> None:
        if self.folder is not None and self.settings.recipe.save_every == "auto":
            # Former starts do not change: a file that is damaged later does not end this one.
            starts = read_starts(self.folder.path / RUN)
            self.interval = SaveInterval(after, partial(self._rate, starts))
        if (
            self.settings.options.resume
            and self.folder is not None
            and self.folder.restart
            and not after
        ):
            self._warn("there is no checkpoint yet: the training starts with its first step")
        if self.checkpoints is not None and not self.progress.done:
            self.phases.phase("memory of checkpoints", long=True)
            with self.spent.on(SAVE):
                self.checkpoints.reserve(checkpoint_tensors(self.job, self.updater))

    def needs_record(self, number: int) -> bool:
        """Steps before a checkpoint must have their records written."""
        recipe = self.settings.recipe
        due = self.interval is not None and number >= self.interval.due
        return due or recipe.is_due(recipe.save_every, number) or self.progress.done

    def after_step(self, number: int) -> None:
        """Start to save, if a checkpoint is due or the run ends."""
        if self.needs_record(number):
            self.phases.phase(f"checkpoint {number}", long=True)
            with self.spent.on(SAVE):
                self._save()

    def finish(self) -> None:
        """Wait for the last checkpoint; raises if it was not written."""
        self.phases.phase("the last checkpoint", long=True)
        try:
            with self.spent.on(SAVE):
                self.wait()
        except CannotSave as failed:
            remedy = "run the same command with --resume, which repeats the steps since then"
            raise CannotSave(f"{failed}. No save follows: {remedy}") from failed

    def wait(self) -> None:
        """Wait for the save in flight; raises `CannotSave` if it failed."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def mark_suspect(self, after: int, why: str) -> list[str]:
        """Mark checkpoints of later steps, so that none is read by default; every rank calls this.
        Returns their names."""
        if self.checkpoints is None:
            return []
        with suppress(FivefoldError):  # the run ends with another error
            self.wait()
        paths = [path for path in published(self.checkpoints.folder) if step_of(path) > after]
        for path in paths if self.worker.rank == 0 else ():
            write_synced(path / SUSPECT, f"{why}\n")
        return [path.name for path in paths]

    def _save(self) -> None:
        """The steps go on, even if the save before this one has failed."""
        if self.checkpoints is None:
            return
        assert self.folder is not None
        seed, plan = self.settings.recipe.seed, self.folder.plan_text(self.job.plan)
        facts = self.progress.facts(self.updater.count, seed, plan)
        tensors = checkpoint_tensors(self.job, self.updater)
        began = 0.0 if self.interval is None else self.interval.begin()
        save = partial(self.checkpoints.save, tensors, facts)
        for attempt in (self.checkpoints.wait, partial(self._decide, facts.step, began), save):
            try:
                attempt()
            except CannotSave as failed:
                self._warn(f"{failed}; the next save tries again")
        if self.interval is not None:
            self.interval.end(facts.step, began)

    def _decide(self, number: int, began: float) -> None:
        """When to save next, if the run decides that by itself; says it where it has changed."""
        interval, checkpoints = self.interval, self.checkpoints
        if interval is None or checkpoints is None or self.progress.done:
            return
        decision = checkpoints.agree(interval.cost, partial(interval.decide, number, began))
        if interval.follow(number, decision) and self.worker.rank == 0:
            self.worker.report(f"save_every = auto: {decision.why}")
            noted = self.folder and self.folder.note_saves(number, decision.steps, decision.why)
            if noted is not None:
                self._warn(noted)

    def _warn(self, text: str) -> None:
        """Report something that does not end the run, once."""
        if self.worker.rank == 0:
            self.worker.report(text)


def checkpoint_tensors(job: Job, updater: Updater) -> list[CheckpointTensor]:
    """Tensors that a run needs to resume, with this rank's boxes of them."""
    return [*_owned(job, updater), *_buffers(job), *_loads(job)]


def publish_weights(job: Job) -> None:
    """Gather loaded weights on ranks that need them in full."""
    for chunk in job.chunks:
        chunk.data.publish()
        chunk.data.wait()


class _ExpertLoad:
    """Expert load of the last step; equal for all experts before the first."""

    def __init__(self, balancer: Balancer, device: torch.device) -> None:
        self.balancer, self.device = balancer, device

    def read(self) -> Tensor:
        if self.balancer.load is not None:
            return self.balancer.load
        number = self.balancer.num_experts
        return torch.full((number,), 1 / number, dtype=torch.float64, device=self.device)

    def write(self, value: Tensor) -> None:
        self.balancer.set_load(value)


def _owned(job: Job, updater: Updater) -> Iterator[CheckpointTensor]:
    """Weights and the states of the optimizer: a state has the boxes of its weight."""
    sharded = partial(_sharded, job, {name: unit for unit in job.units for name in unit.spans})
    owned, states = job.owned, updater.states()
    masters = states.pop(MASTER, [None] * len(owned))
    for shard, master in zip(owned, masters, strict=True):
        weight = StateInMemory(shard.tensor.detach())
        best = weight if master is None else MasterWeight(master, weight.tensor)
        dtype = weight.tensor.dtype if master is None else torch.float32
        yield sharded(MODEL, shard, dtype, best)
    for unit in (frozen_unit for frozen_unit in job.units if frozen_unit.unit.frozen):
        for shard in unit.owned:
            weight = StateInMemory(shard.tensor.detach())
            yield sharded(MODEL, shard, weight.tensor.dtype, weight)
    for name, stored in states.items():
        pairs = [
            (owned_shard, stored_state)
            for owned_shard, stored_state in zip(owned, stored, strict=True)
            if stored_state is not None
        ]
        # All states of one name have one dtype, and reading one may read a file.
        dtypes = [stored_state.read().dtype for _, stored_state in pairs[:1]] * len(pairs)
        for (shard, state), dtype in zip(pairs, dtypes, strict=True):
            yield sharded(f"{OPTIM}{name}/", shard, dtype, state)


def _sharded(
    job: Job,
    units: Mapping[str, FlatUnit],
    prefix: str,
    owned_shard: OwnedShard,
    dtype: torch.dtype,
    state: StoredState,
) -> CheckpointTensor:
    row, stop = owned_shard.row, owned_shard.start + owned_shard.tensor.numel()
    weight, shard = job.table[row.name], job.shards[row.name]
    boxes = boxes_of(weight.shape, shard, row.shape, owned_shard.start, stop)
    roles = copy_roles(shard, row.expert, units[row.name].sliced)
    holders = _holders(job, roles, tied=job.is_tied(row.name))
    return CheckpointTensor(prefix + weight.name, weight.shape, dtype, boxes, state, holders)


def _holders(job: Job, roles: tuple[str, ...], tied: bool = False) -> Holders:
    """This rank among those that hold what it has, along these roles and on the stage of a copy."""
    if tied or job.plan.schedule.placement.mirrored:
        roles = (*roles, TWIN)
    mesh = job.mesh
    return Holders.along({role: (mesh.coord(role), mesh.size(role)) for role in roles})


def _buffers(job: Job) -> Iterator[CheckpointTensor]:
    """Biases of routers, in full on every rank of their stage."""
    shapes = {weight.name: weight.shape for weight in buffers(job.plan.shape)}
    for chunk in job.chunks:
        for name, bias in chunk.model.named_buffers():
            shape, state = shapes[name], StateInMemory(bias)
            yield _on_all(job, MODEL + name, shape, bias.dtype, state)


def _loads(job: Job) -> Iterator[CheckpointTensor]:
    for layer in job.balancing.layers:
        shape = (layer.balancer.num_experts,)
        load = _ExpertLoad(layer.balancer, job.mesh.device)
        yield _on_all(job, f"{BALANCE}load/{layer.number}", shape, torch.float64, load)


def _on_all(
    job: Job, key: str, shape: tuple[int, ...], dtype: torch.dtype, state: StoredState
) -> CheckpointTensor:
    """A tensor that every rank of its stage has."""
    holders = _holders(job, ("dp-cp", "tp"))
    return CheckpointTensor(key, shape, dtype, (whole_box(shape),), state, holders)

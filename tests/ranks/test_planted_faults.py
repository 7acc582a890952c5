"""Bugs that the field has known, planted one at a time: `verify` must see every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import step as step_module
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.core.schedule.asynchronous import Delays
from fivefold.parallel import compose, flat, pipeline, tensor
from fivefold.parallel.chunk import Chunk
from fivefold.parallel.compose import Job
from fivefold.parallel.data import Data
from fivefold.parallel.flat import FlatUnit
from fivefold.parallel.mesh import TWIN, Mesh
from fivefold.run.compare import Dtype
from fivefold.run.ranks import Pool, Worker
from fivefold.trial import RankRun, Settings, Verdict, judge, run_rank, run_reference

Patch = AbstractContextManager[Any]


def scaled_by_degree() -> Patch:
    """Gradients averaged over the ranks, although the loss is already divided by all tokens."""
    finish = Data.finish

    def averaged(self: Data) -> None:
        finish(self)
        for each in self.owned:
            each.grad.div_(self.mesh.size("dp-cp"))

    return patch.object(Data, "finish", averaged)


def mean_of_means() -> Patch:
    """Each rank divides by its own tokens, and the means are averaged."""

    def local(batches: Any, mesh: Mesh) -> Tensor:
        return sum((one.labels != -100).sum() for one in batches) * mesh.size("dp-cp")

    return patch.object(step_module, "counted_tokens", local)


def norm_misses_a_group() -> Patch:
    """What several ranks hold is counted several times."""
    return patch.object(Job, "copies", lambda self, owned: 1)


def replicated_weights_not_summed() -> Patch:
    """Norms under sequence parallelism keep the gradient of their own tokens."""
    return patch.object(step_module, "sum_partial", lambda *_: None)


def replicas_of_kv_heads_not_summed() -> Patch:
    """KV heads that two tp ranks hold drift apart."""
    inner = tensor.sum_partial

    def only_whole(gradients: Any, mesh: Mesh) -> None:
        inner([pair for pair in gradients if pair[0].dim is None], mesh)

    return patch.object(step_module, "sum_partial", only_whole)


def unshifted_labels() -> Patch:
    """Every token is asked to predict itself."""
    inner = step_module.step

    def unshifted(job: Any, optimizer: Any, batches: Any, max_norm: float) -> Any:
        own = [replace(one, labels=one.tokens) for one in batches]
        return inner(job, optimizer, own, max_norm)

    return patch("fivefold.trial.runs.step", unshifted)


def swapped_shard() -> Patch:
    """Two ranks hold each other's piece of one weight."""
    inner = compose.held_by

    def swapped(weight: Any, shape: Any, layout: Any, at: Any) -> Any:
        wrong = weight.name == "blocks.1.mlp.up.weight"
        return inner(weight, shape, layout, at._replace(tp=layout.tp - 1 - at.tp) if wrong else at)

    return patch.object(compose, "held_by", swapped)


def skipped_bucket() -> Patch:
    """The gradients of one unit are never summed."""
    inner = FlatUnit.send

    def skipped(self: FlatUnit, last: bool) -> None:
        if self.use.blocks[0] != "blocks.1":
            return inner(self, last)
        assert self.gradients is not None
        size = self.unit.slice_size
        place = self.mesh.place("fsdp")
        self.sent, self.gradients, self.sent_last = self.gradients, None, last
        self.received = self.sent[place * size : (place + 1) * size].clone()
        return None

    return patch.object(FlatUnit, "send", skipped)


def stray_collective() -> Patch:
    """Somebody asks the others for something, past the mesh."""
    inner = Data.finish

    def chatty(self: Data) -> None:
        dist.all_reduce(torch.zeros(3))
        inner(self)

    return patch.object(Data, "finish", chatty)


def duplicated_collective() -> Patch:
    """A gather is issued twice; the result is right, and the bytes are not."""
    inner = Mesh.all_gather

    def twice(self: Mesh, whole: Tensor, part: Tensor, axis: str) -> Any:
        inner(self, whole, part.clone(), axis).wait()
        return inner(self, whole, part, axis)

    return patch.object(Mesh, "all_gather", twice)


def stale_weight() -> Patch:
    """One unit is not brought up to date after the optimizer."""
    inner = FlatUnit.publish

    def stale(self: FlatUnit) -> None:
        if self.use.blocks[0] != "blocks.1":
            inner(self)
            return
        before = self.whole.clone()
        inner(self)
        self.arrive()
        size, place = self.unit.slice_size, self.mesh.place("fsdp")
        before[place * size : (place + 1) * size] = self.whole[place * size : (place + 1) * size]
        self.whole.copy_(before)

    return patch.object(FlatUnit, "publish", stale)


def clip_per_rank() -> Patch:
    """Each rank clips by the norm of what it owns."""

    def local(job: Job, loss: Tensor) -> tuple[Tensor, Tensor]:
        total, _ = step_totals(job, loss)
        squares = [each.grad.square().sum() for each in job.owned]
        return total, torch.stack(squares).sum().sqrt().to(torch.float64)

    step_totals = step_module.totals
    return patch.object(step_module, "totals", local)


def bfloat16_reduction() -> Patch:
    """Gradients are summed in bfloat16 although float32 was asked for."""
    inner = FlatUnit.watch_gradients

    def narrow(self: FlatUnit, ready: Any) -> None:
        self.grad_dtype = torch.bfloat16
        inner(self, ready)

    return patch.object(FlatUnit, "watch_gradients", narrow)


def visible_padding() -> Patch:
    """The rows that pad the vocabulary take part in the loss."""
    inner = tensor._VocabularyLoss

    def padded(wires: Any, vocab: int) -> Any:
        return inner(wires, vocab + 5)

    return patch.object(tensor, "_VocabularyLoss", padded)


def forgotten_microbatch() -> Patch:
    """Only the last microbatch's gradients are kept."""
    inner = flat.FlatUnit.receive

    def forgetful(self: FlatUnit) -> None:
        self.gradient = None
        inner(self)

    return patch.object(flat.FlatUnit, "receive", forgetful)


def skipped_weight_gradient() -> Patch:
    """One microbatch's weight gradients are dropped instead of added."""
    inner = Chunk.weight_gradients

    def skipped(self: Chunk, microbatch: int, last: bool) -> None:
        assert self.queue is not None
        if microbatch == 1:
            self.queue._owed.pop(microbatch)
        else:
            inner(self, microbatch, last)

    return patch.object(Chunk, "weight_gradients", skipped)


def swapped_messages() -> Patch:
    """A rank takes the first two messages of a line for each other."""
    inner = pipeline._Inbox.__init__

    def swapped(self: Any, *arguments: Any) -> None:
        inner(self, *arguments)
        for source, (first, second, *rest) in self.lines.items():
            self.lines[source] = (second, first, *rest)

    return patch.object(pipeline._Inbox, "__init__", swapped)


def copies_not_summed() -> Patch:
    """Ranks that hold the same weights add up their gradients and keep their own."""

    def unmoved(self: Mesh, tensors: Any, axis: str) -> None:
        inner(self, [each.clone() if axis == TWIN else each for each in tensors], axis)

    inner = Mesh.sum_together
    return patch.object(Mesh, "sum_together", unmoved)


def two_ends_of_one_rank_not_summed() -> Patch:
    """A tied weight on two stages of one rank, each with its own gradient."""
    return patch.object(step_module, "sum_copies", lambda job: None)


def layer_of_nobody() -> Patch:
    """The cut between two stages is off by one: a layer is left out."""
    inner = Plan.stages.func

    def short(self: Plan) -> tuple[range, ...]:
        first, *rest = inner(self)
        return (range(first.start, first.stop - 1), *rest)

    return patch.object(Plan, "stages", property(short))


def layer_of_two_stages() -> Patch:
    """The cut between two stages is off by one: a layer is computed twice."""
    inner = Plan.stages.func

    def long(self: Plan) -> tuple[range, ...]:
        first, *rest = inner(self)
        return (range(first.start, first.stop + 1), *rest)

    return patch.object(Plan, "stages", property(long))


def newest_weights() -> Patch:
    """An asynchronous pipeline computes on the weights of now, not on those of its delay."""
    return patch.object(Delays, "version", lambda self, microbatch, num_updates: num_updates)


@dataclass(frozen=True)
class Fault:
    """A bug, and a layout in which it matters."""

    plant: Callable[[], Patch]
    layout: str
    wishes: dict[str, Any] = field(default_factory=dict)
    dtype: Dtype = "float64"

    @property
    def settings(self) -> Settings:
        return Settings(dtype=self.dtype, bucket=60_000)


FAULTS = (
    Fault(scaled_by_degree, "dp=2"),
    Fault(mean_of_means, "dp=2"),
    Fault(norm_misses_a_group, "dp=2 tp=2"),
    Fault(norm_misses_a_group, "dp=2x2", {"zero": 1}),
    Fault(replicated_weights_not_summed, "tp=2"),
    Fault(replicas_of_kv_heads_not_summed, "tp=4", {"kv_heads": "2"}),
    Fault(unshifted_labels, "dp=2"),
    Fault(swapped_shard, "tp=2"),
    Fault(skipped_bucket, "dp=2", {"zero": 1}),
    Fault(stray_collective, "dp=2"),
    Fault(duplicated_collective, "dp=2"),
    Fault(stale_weight, "dp=2", {"zero": 1}),
    Fault(clip_per_rank, "dp=2", {"zero": 2}),
    Fault(bfloat16_reduction, "dp=2", {"zero": 1}, "float32"),
    Fault(visible_padding, "tp=2", {"vocab": "251"}),
    Fault(forgotten_microbatch, "dp=2", {"zero": 2}),
    Fault(skipped_weight_gradient, "pp=2", {"schedule": "zb-h1"}),
    Fault(skipped_weight_gradient, "dp=2 pp=2", {"schedule": "zb-v", "zero": 2}),
    Fault(swapped_messages, "pp=2", {"schedule": "gpipe"}),
    Fault(copies_not_summed, "pp=2", {"schedule": "dualpipe"}),
    Fault(copies_not_summed, "pp=2", {"tied": "true"}),
    Fault(two_ends_of_one_rank_not_summed, "pp=2", {"schedule": "zb-v", "tied": "true"}),
    Fault(layer_of_nobody, "pp=2"),
    Fault(layer_of_two_stages, "pp=2"),
    Fault(newest_weights, "pp=2", {"schedule": "pipedream-2bw"}),
)


def plan_of(fault: Fault) -> Plan:
    wishes = dict(fault.wishes)
    changed = [key for key in ("kv_heads", "tied", "vocab") if key in wishes]
    changes = {"layers": "4" if "pp" in fault.layout else "2"} | {
        key: wishes.pop(key) for key in changed
    }
    return resolve(Wishes("tiny", layout=fault.layout, set=changes, **wishes), small=True)


def sick_rank(worker: Worker, number: int, plan: Plan, settings: Settings) -> RankRun:
    with FAULTS[number].plant():
        return run_rank(worker, plan, settings)


def verdict_of(pool: Pool, number: int, planted: bool) -> Verdict:
    fault = FAULTS[number]
    plan = plan_of(fault)
    rank = (
        (sick_rank, (number, plan, fault.settings))
        if planted
        else (run_rank, (plan, fault.settings))
    )
    truth = (run_reference, (plan, fault.settings))
    *runs, truths = pool.run_each([rank] * plan.layout.world + [truth])
    return judge(plan, fault.settings, runs, truths)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(5) as forked:
        yield forked


@pytest.mark.parametrize(
    "number", range(len(FAULTS)), ids=[f"{one.plant.__name__} {one.layout}" for one in FAULTS]
)
def test_verify_sees_the_fault(pool: Pool, number: int) -> None:
    healthy = verdict_of(pool, number, planted=False)
    assert healthy.passed, healthy.errors
    sick = verdict_of(pool, number, planted=True)
    assert not sick.passed


def test_faults_of_traffic_alone_are_seen_by_traffic(pool: Pool) -> None:
    number = [one.plant for one in FAULTS].index(duplicated_collective)
    sick = verdict_of(pool, number, planted=True)
    assert not sick.traffic_match
    assert all(sick.errors[name] <= most for name, most in sick.tolerance.items())

"""Bugs that the field has known, planted one at a time: `verify` must see every one of them.

Here those of data and tensor; context, pipeline and experts have files of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from planted import GRADIENTS, LOSS, NORM, TRAFFIC, WEIGHTS, Fault, Patch, check_seen
from torch import Tensor

from fivefold import step as step_module
from fivefold.core.model.shape import Shape
from fivefold.launch.processes import Pool
from fivefold.parallel import composition as compose
from fivefold.parallel import tensor
from fivefold.parallel.composition import Job
from fivefold.parallel.data import DataParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units import flat_unit
from fivefold.parallel.units.flat_unit import FlatUnit


def scaled_by_degree() -> Patch:
    """Gradients averaged over the ranks, although the loss is already divided by all tokens."""
    finish = DataParallel.finish

    def averaged(self: DataParallel) -> None:
        finish(self)
        for each in self.owned:
            each.grad.div_(self.mesh.size("dp-cp"))

    return patch.object(DataParallel, "finish", averaged)


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

    return patch("fivefold.verify.runs.step", unshifted)


def swapped_shard() -> Patch:
    """Two ranks hold each other's piece of one weight."""
    inner = compose.shard_of

    def swapped(weight: Any, shape: Any, layout: Any, at: Any) -> Any:
        wrong = weight.name == "blocks.1.mlp.up.weight"
        return inner(weight, shape, layout, at._replace(tp=layout.tp - 1 - at.tp) if wrong else at)

    return patch.object(compose, "shard_of", swapped)


def skipped_bucket() -> Patch:
    """The gradients of one unit are never summed."""
    inner = FlatUnit.send

    def skipped(self: FlatUnit, last: bool) -> None:
        if self.use.blocks[0] != "blocks.1":
            return inner(self, last)
        assert self.gradients is not None
        size = self.unit.shard_size
        place = self.mesh.coord("fsdp")
        self.sent, self.gradients, self.sent_last = self.gradients, None, last
        self.received = self.sent[place * size : (place + 1) * size].clone()
        return None

    return patch.object(FlatUnit, "send", skipped)


def stray_collective() -> Patch:
    """Somebody asks the others for something, past the mesh."""
    inner = DataParallel.finish

    def chatty(self: DataParallel) -> None:
        dist.all_reduce(torch.zeros(3))
        inner(self)

    return patch.object(DataParallel, "finish", chatty)


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
        before = self.full.clone()
        inner(self)
        self.arrive()
        size, place = self.unit.shard_size, self.mesh.coord("fsdp")
        before[place * size : (place + 1) * size] = self.full[place * size : (place + 1) * size]
        self.full.copy_(before)

    return patch.object(FlatUnit, "publish", stale)


def clip_per_rank() -> Patch:
    """Each rank clips by the norm of what it owns."""

    def local(job: Job, loss: Tensor, stop: bool) -> Tensor:
        summed = step_totals(job, loss, stop)
        summed[1] = torch.stack([each.grad.square().sum() for each in job.owned]).sum()
        return summed

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

    def padded(wires: Any, shape: Shape, fuse: Any) -> Any:
        return inner(wires, replace(shape, vocab=shape.vocab + 5), fuse)

    return patch.object(tensor, "_VocabularyLoss", padded)


def forgotten_microbatch() -> Patch:
    """Only the last microbatch's gradients are kept."""
    inner = flat_unit.FlatUnit.receive

    def forgetful(self: FlatUnit) -> None:
        self.gradient = None
        inner(self)

    return patch.object(flat_unit.FlatUnit, "receive", forgetful)


FAULTS = (
    Fault(scaled_by_degree, "dp=2", GRADIENTS),
    Fault(mean_of_means, "dp=2", LOSS),
    Fault(norm_misses_a_group, "dp=2 tp=2", NORM),
    Fault(norm_misses_a_group, "dp=2x2", NORM, {"zero": 1}),
    Fault(replicated_weights_not_summed, "tp=2", GRADIENTS),
    Fault(replicas_of_kv_heads_not_summed, "tp=4", GRADIENTS, set={"kv_heads": "2"}),
    Fault(unshifted_labels, "dp=2", LOSS),
    Fault(swapped_shard, "tp=2", LOSS),
    Fault(skipped_bucket, "dp=2", GRADIENTS, {"zero": 1}),
    Fault(stray_collective, "dp=2", TRAFFIC),
    Fault(duplicated_collective, "dp=2", TRAFFIC),
    Fault(stale_weight, "dp=2", WEIGHTS, {"zero": 1}),
    Fault(clip_per_rank, "dp=2", NORM, {"zero": 2}),
    Fault(bfloat16_reduction, "dp=2", GRADIENTS, {"zero": 1}, dtype="float32"),
    Fault(visible_padding, "tp=2", LOSS, set={"vocab": "251"}),
    Fault(forgotten_microbatch, "dp=2", GRADIENTS, {"zero": 2}),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_verify_sees_the_fault(pool: Pool, fault: Fault) -> None:
    check_seen(pool, fault)


def swapped_order() -> Patch:
    """One rank gathers two units of the same size in the other order, which no group can tell."""

    def publish(self: DataParallel) -> None:
        units = list(self.units)
        if self.mesh.rank == 1:
            (a, b), *_ = (
                (a, b)
                for a, b in combinations(range(len(units)), 2)
                if units[a].unit.size == units[b].unit.size
            )
            units[a], units[b] = units[b], units[a]
        for unit in units:
            unit.publish()

    return patch.object(DataParallel, "publish", publish)


def test_ranks_that_issue_units_in_another_order_are_named(pool: Pool) -> None:
    fault = Fault(swapped_order, "dp=3", WEIGHTS, {"zero": 1})
    sick = check_seen(pool, fault)
    assert sick.diverges_at is not None
    assert sick.disorder is not None and sick.disorder.startswith("step 1, axis fsdp: as number ")
    assert sick.disorder.endswith(
        "rank 0 issues the all_gather of embed.weight, and rank 1 the all_gather of head.weight"
    )

"""What of a job goes into a checkpoint: every tensor by one name, as boxes of the whole.

    model/NAME            a weight in the best precision there is: its master where it has one
    model/NAME            the bias of a router that is balanced without a loss
    optim/STATE/NAME      a state of the optimizer, with the shape of its weight
    balance/load/LAYER    the load of a layer's experts in the last step

NAME is the name in the whole model, so that a tied weight is there once, whichever stage holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.weights import Box, boxes_of, buffers, whole_box
from fivefold.model.balance import Balancer
from fivefold.optim.disk_states import OnDisk
from fivefold.optim.optimizer import MASTER, InMemory, Kept, Updater
from fivefold.parallel.compose import Job
from fivefold.parallel.flat_unit import OwnedShard

MODEL, OPTIM, BALANCE = "model/", "optim/", "balance/"


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint, as far as this rank holds it."""

    key: str
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # `at` counts elements of what is kept
    kept: Kept

    @property
    def on_disk(self) -> bool:
        """Whether to read it takes memory that is best given back at once."""
        kept = self.kept.master if isinstance(self.kept, _Rounded) else self.kept
        return isinstance(kept, OnDisk)


def slots_of(job: Job, updater: Updater) -> list[CheckpointTensor]:
    """Everything that a run goes on from and that no fact says."""
    return [*_owned(job, updater), *_buffers(job), *_loads(job)]


def spread(job: Job) -> None:
    """Behind a load: bring what was read to the ranks that hold it whole."""
    for chunk in job.chunks:
        chunk.data.publish()
        chunk.data.wait()


class _Rounded:
    """A master, and the weight that is its rounding."""

    def __init__(self, master: Kept, weight: Tensor) -> None:
        self.master, self.weight = master, weight

    def read(self) -> Tensor:
        return self.master.read()

    def write(self, value: Tensor) -> None:
        self.master.write(value)
        self.weight.copy_(value.view(self.weight.shape))


class _Load:
    """The load of the step before: all experts alike where there was none, as a router takes it."""

    def __init__(self, balancer: Balancer, device: torch.device) -> None:
        self.balancer, self.device = balancer, device

    def read(self) -> Tensor:
        if self.balancer.load is not None:
            return self.balancer.load
        num_experts = self.balancer.num_experts
        share = 1 / num_experts
        return torch.full((num_experts,), share, dtype=torch.float64, device=self.device)

    def write(self, value: Tensor) -> None:
        self.balancer.load = value


def _owned(job: Job, updater: Updater) -> Iterator[CheckpointTensor]:
    """Weights and the states of the optimizer: a state lies in the boxes of its weight."""
    owned, states = job.owned, updater.states()
    masters = states.pop(MASTER, [None] * len(owned))
    for each, master in zip(owned, masters, strict=True):
        weight = InMemory(each.tensor.detach())
        best = weight if master is None else _Rounded(master, weight.tensor)
        dtype = weight.tensor.dtype if master is None else torch.float32
        yield _slot(job, MODEL, each, dtype, best)
    for name, kept in states.items():
        there = [(each, one) for each, one in zip(owned, kept, strict=True) if one is not None]
        # All states of one name are of one type, and to read one may be to read a file.
        dtypes = [one.read().dtype for _, one in there[:1]] * len(there)
        for (each, one), dtype in zip(there, dtypes, strict=True):
            yield _slot(job, f"{OPTIM}{name}/", each, dtype, one)


def _slot(
    job: Job, prefix: str, each: OwnedShard, dtype: torch.dtype, kept: Kept
) -> CheckpointTensor:
    weight, stop = job.table[each.row.name], each.start + each.tensor.numel()
    held = job.pieces[each.row.name]
    boxes = boxes_of(weight.shape, held, each.row.shape, each.start, stop)
    return CheckpointTensor(prefix + weight.name, weight.shape, dtype, boxes, kept)


def _buffers(job: Job) -> Iterator[CheckpointTensor]:
    """Biases of routers, whole on every rank of their stage."""
    whole = {weight.name: weight.shape for weight in buffers(job.plan.shape)}
    for chunk in job.chunks:
        for name, bias in chunk.model.named_buffers():
            boxes = (whole_box(whole[name]),)
            yield CheckpointTensor(MODEL + name, whole[name], bias.dtype, boxes, InMemory(bias))


def _loads(job: Job) -> Iterator[CheckpointTensor]:
    for layer in job.balancing.layers:
        shape = (layer.balancer.num_experts,)
        kept = _Load(layer.balancer, job.mesh.device)
        key = f"{BALANCE}load/{layer.number}"
        yield CheckpointTensor(key, shape, torch.float64, (whole_box(shape),), kept)

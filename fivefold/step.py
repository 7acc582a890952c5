"""One optimizer step under a plan: what rehearse, verify and train all run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.parallel.compose import Job
from fivefold.parallel.mesh import WORLD, Mesh
from fivefold.parallel.tensor import sum_partial


class Optimizer(Protocol):
    """Anything that updates what the job owns from its gradients."""

    def step(self) -> object: ...


@dataclass(frozen=True)
class Outcome:
    """What a step tells: the mean loss of its tokens, the gradient norm, and what clipping did.

    Still on the device: reading one waits for the step, and not every step is read.
    """

    loss: Tensor
    norm: Tensor
    clip: Tensor


def step(job: Job, optimizer: Optimizer, batches: Sequence[TokenBatch], max_norm: float) -> Outcome:
    """Microbatches in, updated weights out.

    The loss of every token is divided once, by the number of counted tokens of the whole step over
    all ranks and microbatches: a mean of means would weigh tokens by where they happen to lie.
    """
    tokens = counted_tokens(batches, job.mesh)
    losses = []
    for place, batch in enumerate(batches):
        loss = job.model(batch.tokens, batch) / tokens
        with job.data.backward(last=place == len(batches) - 1):
            loss.backward()
        losses.append(loss.detach())
    job.data.finish()
    sum_partial([(job.pieces[each.row.name], each.grad) for each in job.owned], job.mesh)
    loss, norm = totals(job, torch.stack(losses).sum())
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for each in job.owned:
        each.grad.mul_(clip)
    optimizer.step()
    job.data.publish()
    return Outcome(loss, norm, clip)


def counted_tokens(batches: Sequence[TokenBatch], mesh: Mesh) -> Tensor:
    """Tokens with a loss in the whole step, over all data and context ranks."""
    counts = [(batch.labels != NOT_COUNTED).sum() for batch in batches]
    total = torch.stack(counts).sum().to(torch.float64)
    if mesh.size("dp-cp") > 1:
        mesh.all_reduce(total, "dp-cp", dist.ReduceOp.SUM).wait()
    return total.clamp(min=1)


def totals(job: Job, loss: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient norm of the whole job, from what this rank holds of both.

    An element that several ranks hold counts once: each of them brings its share.
    """
    squares: dict[int, list[Tensor]] = {}
    for each in job.owned:
        squares.setdefault(job.copies(each), []).append(each.grad)
    norm = sum(
        (
            get_total_norm(grads).to(torch.float64) ** 2 / copies
            for copies, grads in squares.items()
        ),
        torch.zeros((), dtype=torch.float64),
    )
    both = torch.stack([loss.to(torch.float64) / job.mesh.size("tp"), norm.to(loss.device)])
    if job.mesh.size(WORLD) > 1:
        job.mesh.all_reduce(both, WORLD, dist.ReduceOp.SUM).wait()
    return both[0], both[1].sqrt()

"""An asynchronous run: microbatches flow without a drain, and every rank updates by itself.

Its gradients are computed on weights of some updates ago, which is not what one device computes.
There is no global gradient norm to clip by before an update, since no two stages are at the same
microbatch; the norms are told when all is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.schedule.asynchronous import Delays
from fivefold.core.schedule.catalog import family
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.parallel.compose import Job, hidden_size
from fivefold.parallel.mesh import WORLD
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.stash import StashingChunk
from fivefold.parallel.tensor import sum_partial
from fivefold.step import Optimizer, Outcome, squared_norm


class Stream:
    """A run of so many microbatches, a multiple of those of one update."""

    def __init__(self, job: Job, optimizer: Optimizer, num_microbatches: int) -> None:
        self.job, self.optimizer = job, optimizer
        window = job.plan.schedule
        schedule = family(window.name).make(window.num_ranks, num_microbatches, 1)
        self.delays = Delays.of(window)
        (self.chunk,) = job.chunks
        self.stash = StashingChunk(self.chunk, self.delays.every, self.delays.version, self._update)
        dtype = next(self.chunk.model.parameters()).dtype
        chunks = {self.chunk.stage: self.stash}
        self.pipeline = Pipeline(schedule, job.mesh, chunks, hidden_size(job.plan), dtype)
        self.norms: list[Tensor] = []

    def run(self, batches: Sequence[TokenBatch]) -> list[Outcome]:
        """All microbatches; what each update tells."""
        every = self.delays.every
        batches = [self.job.local(batch) for batch in batches]
        tokens = self._counted(batches)
        losses = self.pipeline.run(batches, [tokens[i // every] for i in range(len(batches))])
        self.stash.restore()
        zero = torch.zeros((), dtype=torch.float64, device=self.job.mesh.device)
        mine = [losses.get(number, zero) for number in range(len(batches))]
        by_update = torch.stack(mine).view(-1, every).sum(1) / self.job.mesh.size("tp")
        both = torch.stack([by_update, torch.stack(self.norms)])
        if self.job.mesh.size(WORLD) > 1:
            self.job.mesh.all_reduce(both, WORLD, dist.ReduceOp.SUM).wait()
        one = torch.ones_like(zero)
        return [Outcome(loss, square.sqrt(), one) for loss, square in both.T]

    def _counted(self, batches: Sequence[TokenBatch]) -> Tensor:
        """Tokens with a loss of each update, over all data and context ranks."""
        counts = [(batch.labels != NOT_COUNTED).sum() for batch in batches]
        total = torch.stack(counts).to(torch.float64).view(-1, self.delays.every).sum(1)
        if self.job.mesh.size("dp-cp") > 1:
            self.job.mesh.all_reduce(total, "dp-cp", dist.ReduceOp.SUM).wait()
        return total.clamp(min=1)

    def _update(self) -> None:
        job, data = self.job, self.chunk.data
        data.finish()
        sum_partial([(job.pieces[each.row.name], each.grad) for each in job.owned], job.mesh)
        self.norms.append(squared_norm(job))
        self.optimizer.step()
        data.publish()
        data.wait()

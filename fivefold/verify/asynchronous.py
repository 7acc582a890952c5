"""An asynchronous pipeline: microbatches flow without a drain, and every rank updates by itself.

Its gradients are computed on weights of some updates ago, which is not what one device computes.
There is no global gradient norm to clip by before an update, because no two stages are at the same
microbatch; the norms are known at the end.

The backward of a microbatch must see the weights that its forward saw, while updates go on between
the two. A version is a set of leaves with the values of one update. Microbatches in flight keep
theirs, and a version that no microbatch will use again is dropped. The optimizer's own weights come
on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.layout import WORLD
from fivefold.core.schedule import Delays, family
from fivefold.model import NOT_COUNTED, TokenBatch
from fivefold.parallel import ActionObserver, Job, Pipeline, StageChunk, hidden_size, sum_partial
from fivefold.step import Optimizer, StepOutcome, squared_norm

Version = dict[str, nn.Parameter]


class StashingChunk:
    """A chunk that updates its weights after a number of microbatches, and stashes earlier
    versions.

    `version_of` says on which version the next microbatch is computed, given its number and how
    many updates there have been; it never goes back. `update` is called when an update is due.
    """

    def __init__(
        self,
        chunk: StageChunk,
        every: int,
        version_of: Callable[[int, int], int],
        update: Callable[[], None],
    ) -> None:
        assert chunk.queue is None, "no asynchronous schedule splits its backward"
        self.chunk, self.every = chunk, every
        self.version_of, self.update = version_of, update
        self.num_updates = self.num_forwards = 0
        self.most_versions = 0
        self.used: dict[int, int] = {}  # version by microbatch in flight
        self.versions: dict[int, Version] = {}
        names = {id(parameter): name for name, parameter in chunk.model.named_parameters()}
        self.own = dict(chunk.model.named_parameters())
        self.places = [
            (module, attribute, names[id(parameter)])
            for module in chunk.model.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
        ]
        self._add_version()

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        self.used[microbatch] = self.version_of(microbatch, self.num_updates)
        self.num_forwards += 1
        self._install(self.versions[self.used[microbatch]])
        return self.chunk.forward(x, batch, microbatch)

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        leaves = self.versions[self.used.pop(microbatch)]
        self._install(leaves)
        due = (microbatch + 1) % self.every == 0
        data = self.chunk.data
        with data.backward(due):
            run()
            for name, leaf in (
                (name, tensor) for name, tensor in leaves.items() if tensor.requires_grad
            ):
                assert leaf.grad is not None
                data.add_gradient(self.own[name], leaf.grad)
                leaf.grad = None
        if due:
            self.update()
            self.num_updates += 1
            self._add_version()

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        raise AssertionError("no asynchronous schedule splits its backward")

    def restore(self) -> None:
        """Set the model's weights to the current version."""
        self._install(self.own)

    def _add_version(self) -> None:
        self.versions[self.num_updates] = {
            name: nn.Parameter(own.detach().clone()) if own.requires_grad else own
            for name, own in self.own.items()
        }
        following = self.version_of(self.num_forwards, self.num_updates)
        oldest = min([following, *self.used.values()])
        self.versions = {
            number: leaves for number, leaves in self.versions.items() if number >= oldest
        }
        self.most_versions = max(self.most_versions, len(self.versions))

    def _install(self, weights: Version | dict[str, nn.Parameter]) -> None:
        for module, attribute, name in self.places:
            setattr(module, attribute, weights[name])


class Stream:
    """A stream of microbatches, a multiple of those of one update."""

    def __init__(
        self, job: Job, optimizer: Optimizer, num_microbatches: int, observer: ActionObserver
    ) -> None:
        self.job, self.optimizer = job, optimizer
        window = job.plan.schedule
        schedule = family(window.name).make(window.num_ranks, num_microbatches, 1)
        self.delays = Delays.of(window)
        (self.chunk,) = job.chunks
        self.stash = StashingChunk(self.chunk, self.delays.every, self.delays.version, self._update)
        dtype = next(self.chunk.model.parameters()).dtype
        chunks = {self.chunk.stage: self.stash}
        hidden = hidden_size(job.plan)
        self.pipeline = Pipeline(schedule, job.mesh, chunks, hidden, dtype, observer)
        self.norms: list[Tensor] = []

    def run(self, batches: Sequence[TokenBatch]) -> list[StepOutcome]:
        """Run all microbatches; returns the numbers of each update."""
        every = self.delays.every
        batches = [self.job.local(batch) for batch in batches]
        tokens = self._counted(batches)
        losses = self.pipeline.run(batches, [tokens[i // every] for i in range(len(batches))])
        self.stash.restore()
        zero = torch.zeros((), dtype=torch.float64, device=self.job.mesh.device)
        own_losses = [losses.get(number, zero) for number in range(len(batches))]
        by_update = torch.stack(own_losses).view(-1, every).sum(1) / self.job.mesh.size("tp")
        totals = torch.stack([by_update, torch.stack(self.norms)])
        if self.job.mesh.size(WORLD) > 1:
            self.job.mesh.all_reduce(totals, WORLD, dist.ReduceOp.SUM).wait()
        clip = torch.ones_like(zero)
        return [StepOutcome(loss, square.sqrt(), clip) for loss, square in totals.T]

    def _counted(self, batches: Sequence[TokenBatch]) -> Tensor:
        """Tokens with a loss of each update, over all data and context ranks."""
        counts = [(batch.labels != NOT_COUNTED).sum() for batch in batches]
        total = torch.stack(counts).to(torch.float64).view(-1, self.delays.every).sum(1)
        if self.job.mesh.size("dp-cp") > 1:
            self.job.mesh.all_reduce(total, "dp-cp", dist.ReduceOp.SUM).wait()
        return total.clamp(min=1)

    def _update(self) -> None:
        job, data = self.job, self.chunk.data
        job.on_phase("reduce")
        data.finish()
        sum_partial([(job.shards[shard.row.name], shard.grad) for shard in job.owned], job.mesh)
        self.norms.append(squared_norm(job))
        self.optimizer.step()
        data.publish()
        data.wait()

"""One optimizer step under a plan: `rehearse`, `verify` and `train` all run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from fivefold.core.layout import TWIN, WORLD
from fivefold.core.plan import Recipe
from fivefold.model import NOT_COUNTED, TokenBatch
from fivefold.optim import Updater, make_updater
from fivefold.parallel import Job, Load, Mesh, sum_partial
from fivefold.parallel.units import GatheredMatrices

_FIRST_LOAD = 5  # of the totals: loss, squared norm, stop requests and two of the watch come first


class Optimizer(Protocol):
    """Anything that updates what the job owns from its gradients."""

    def step(self) -> object: ...


class StepWatch(Protocol):
    """Looks for flipped bits in what stays in memory from one update to the next."""

    def before_update(self) -> Tensor:
        """Two numbers whose sums over all ranks are zero unless some bit has flipped: by how much
        copies differ, and how many tensors of this rank have changed since the last update."""

    def after_update(self) -> None:
        """Weights and states are new."""


class SpikeWatch(Protocol):
    """Tells a spike that all ranks have from one of a single rank."""

    def note(self, local: Tensor) -> None:
        """This rank's part of the loss of a step, and the norm of the gradients that it owns."""

    def is_shared(self, loss: float, norm: float) -> bool:
        """Whether a step beyond its bound counts all the same; called on all ranks."""
        ...


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step: the mean loss of its tokens, the gradient norm, the factor that clips
    gradients, the load of the experts, and how many ranks want to stop.

    All of it is still on the device: reading one waits for the step, and not every step is read.
    The outcome of a guarded step is on the host, and its update may still run. `skipped`: loss or
    norm was not finite or above its bound, and nothing was updated. `flips` are the sums of what
    the watch of all ranks found.
    """

    loss: Tensor
    norm: Tensor
    clip: Tensor
    load: Load | None = None
    stops: Tensor | None = None
    skipped: bool = False
    flips: Tensor | None = None


@dataclass(frozen=True)
class Guard:
    """How training guards a step: `scale` multiplies the losses where backward begins, for types of
    a narrow range; `stop` asks to end the run after this step.

    A guarded step waits once, for its loss and norm, and calls `on_read` then, with an event that
    the device has passed: long ago, if the host was late. It updates nothing where the norm or the
    loss is not finite. If the updater sees to that by itself, and `uncount` makes it forget such an
    update, the update is issued before the host waits, so that the device never does. Nothing is
    updated either where loss or norm is above its `bound`, unless `spikes` finds that all ranks
    share it.
    """

    scale: float = 1.0
    stop: bool = False
    on_read: Callable[[torch.cuda.Event | None], None] = lambda _: None
    uncount: Callable[[], None] | None = None
    bound: tuple[float, float] | None = None
    watch: StepWatch | None = None
    spikes: SpikeWatch | None = None

    def counts(self, numbers: Tensor) -> bool:
        """Whether a step that is beyond its bound counts all the same."""
        if self.spikes is None or not bool(numbers[:2].isfinite().all()):
            return False
        return self.spikes.is_shared(float(numbers[0]), float(numbers[1].sqrt()) / self.scale)

    def is_beyond(self, numbers: Tensor) -> Tensor:
        """Whether loss or norm is above its bound, where the numbers are."""
        if self.bound is None:
            return torch.zeros_like(numbers[0], dtype=torch.bool)
        loss, norm = self.bound
        return (numbers[0] > loss) | (numbers[1].sqrt() / self.scale > norm)

    def factor(self, numbers: Tensor, max_norm: float) -> Tensor:
        """What gradients are multiplied with; not a number where nothing is to be updated."""
        factor = clip_factor(numbers, max_norm, self.scale) / self.scale
        return factor.masked_fill(self.is_beyond(numbers), float("nan"))


class Reading:
    """Numbers of a step on their way to the host: all that is read of it, in one copy."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> Tensor:
        """The numbers, on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers


def updater_of(job: Job, recipe: Recipe, *, master: bool = False) -> Updater:
    """What updates the weights that this rank owns; `master` keeps float32 copies of them."""
    matrices = GatheredMatrices(job) if recipe.optimizer_kind.full_matrices else None
    device, rank = job.mesh.device, job.mesh.rank
    full = {name: (job.table[name].shape, shard) for name, shard in job.shards.items()}
    return make_updater(
        recipe,
        job.owned,
        device,
        master=master,
        rank=rank,
        matrices=matrices,
        full=full,
        late=any(owned_shard.clipped_late for owned_shard in job.owned),
    )


def step(
    job: Job,
    optimizer: Optimizer,
    batches: Sequence[TokenBatch],
    max_norm: float,
    guard: Guard | None = None,
    weights: Sequence[float] | None = None,
    *,
    per_token: bool = True,
) -> StepOutcome:
    """Microbatches of whole rows in, updated weights out.

    The loss of every token is divided once, by the number of counted tokens of the step over all
    ranks and microbatches. A mean of means would weigh tokens by the rank that holds them.
    `weights` multiply the losses of microbatches, as the advantages of policy gradients do. Not
    `per_token`: summed losses times weights are the loss, as in DPO, and nothing divides them.
    """
    active_guard = guard or Guard()
    job.balancing.scale_losses(active_guard.scale)
    for chunk in job.chunks:
        chunk.rounded.forget()
    batches = [job.local(batch) for batch in batches]
    tokens = counted_tokens(batches, job.mesh)
    # A step without a counted token has no loss: only its divisor must not be 0.
    full_divisor = tokens.clamp(min=1) if per_token else torch.ones_like(tokens)
    divisors = [
        full_divisor if weights is None else full_divisor / weights[i] for i in range(len(batches))
    ]
    losses = job.pipeline.run(batches, divisors, active_guard.scale)
    job.on_phase("reduce")
    for chunk in job.chunks:
        chunk.data.finish()
    sum_partial([(job.shards[shard.row.name], shard.grad) for shard in job.owned], job.mesh)
    sum_copies(job)
    loss = sum(losses.values(), torch.zeros_like(tokens))
    summed = totals(job, loss, active_guard)
    job.mesh.record_on(None)  # what follows depends on whether weights are updated
    numbers, skipped = summed, False
    if guard is None:
        update(job, optimizer, clip_factor(summed, max_norm))
    else:
        numbers, skipped = guarded_update(job, optimizer, summed, max_norm, guard)
    if active_guard.watch is not None:
        active_guard.watch.after_update()
    for chunk in job.chunks:
        chunk.data.publish()
    if not skipped:
        job.balancing.settle(summed[_FIRST_LOAD:])
    load = None if skipped else job.balancing.load_of(numbers[_FIRST_LOAD:])
    loss, norm, stops = numbers[0], numbers[1].sqrt() / active_guard.scale, numbers[2]
    clip = clip_factor(numbers, max_norm, active_guard.scale)
    return StepOutcome(loss, norm, clip, load, stops, skipped, numbers[3:_FIRST_LOAD])


def guarded_update(
    job: Job, optimizer: Optimizer, summed: Tensor, max_norm: float, guard: Guard
) -> tuple[Tensor, bool]:
    """Read the numbers of a step, and update if they are finite and within their bounds: those
    numbers, and whether the update was skipped."""
    reading = Reading(summed)
    if guard.uncount:
        update(job, optimizer, guard.factor(summed, max_norm))
    numbers = reading.wait()
    guard.on_read(reading.event)
    factor = guard.factor(numbers, max_norm)
    skipped = not bool(factor.isfinite())
    if guard.uncount and skipped:
        guard.uncount()
    if skipped and guard.counts(numbers):  # gradients are still as they were
        update(job, optimizer, replace(guard, bound=None).factor(summed, max_norm))
        return numbers, False
    if guard.uncount is None and not skipped:
        update(job, optimizer, factor)
    return numbers, skipped


def clip_factor(numbers: Tensor, max_norm: float, scale: float = 1.0) -> Tensor:
    """What clips gradients, once they are divided by the `scale` of the losses; not a number where
    loss or norm is not finite."""
    norm = numbers[1].sqrt() / scale
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + 0 * numbers[:2].sum()


def update(job: Job, optimizer: Optimizer, factor: Tensor) -> None:
    """New weights from gradients times a factor."""
    for shard in job.owned:
        shard.clip(factor)
    optimizer.step()


@torch.no_grad()
def evaluate(job: Job, batches: Sequence[TokenBatch]) -> tuple[Tensor, Tensor]:
    """Microbatches of whole rows in; the summed loss of their counted tokens, and how many.

    Multi-token prediction helps training only: its losses are no part of it.
    """
    batches = [job.local(batch) for batch in batches]
    tokens = counted_tokens(batches, job.mesh)
    losses = _forward(job, batches, tokens)
    total = sum(losses.values(), torch.zeros_like(tokens)) / job.mesh.size("tp")
    if job.mesh.size(WORLD) > 1:
        job.mesh.all_reduce(total, WORLD, dist.ReduceOp.SUM).wait()
    return total, tokens


@torch.no_grad()
def logprobs(job: Job, batches: Sequence[TokenBatch]) -> Tensor:
    """Microbatches of whole rows in; the summed log-probabilities of the counted tokens of each, on
    every rank: (data ranks, microbatches), in float64."""
    batches, layout = [job.local(batch) for batch in batches], job.plan.layout
    table = torch.zeros(layout.dp, len(batches), dtype=torch.float64, device=job.mesh.device)
    coord = layout.coord(job.mesh.rank).dp
    for number, loss in _forward(job, batches, table.new_ones(())).items():
        table[coord, number] = -loss / job.mesh.size("tp")  # context ranks have other tokens
    if job.mesh.size(WORLD) > 1:
        job.mesh.all_reduce(table, WORLD, dist.ReduceOp.SUM).wait()
    return table


def _forward(job: Job, batches: Sequence[TokenBatch], like: Tensor) -> dict[int, Tensor]:
    """The summed losses that this rank computes, by microbatch, without a backward."""
    for chunk in job.chunks:
        chunk.rounded.forget()
        chunk.model.eval()
    losses = job.forwards.run(batches, [torch.ones_like(like)] * len(batches))
    for chunk in job.chunks:
        chunk.model.train()
    for chunk in job.chunks:
        chunk.data.let_go()
    return losses


def counted_tokens(batches: Sequence[TokenBatch], mesh: Mesh) -> Tensor:
    """Tokens with a loss in the whole step, over all data and context ranks."""
    counts = [(batch.labels != NOT_COUNTED).sum() for batch in batches]
    total = torch.stack(counts).sum().to(torch.float64)
    if mesh.size("dp-cp") > 1:
        mesh.all_reduce(total, "dp-cp", dist.ReduceOp.SUM).wait()
    return total


def sum_copies(job: Job) -> None:
    """Sum the gradients of weights that several stages hold: the copies then stay equal.

    A tied weight on two stages of one rank is summed here; what is on two ranks travels, in one
    all-reduce in float32 or wider: the tied weight, or under a mirrored placement everything.
    """
    tied = [shard for shard in job.owned if job.is_tied(shard.row.name)]
    if len(tied) == 2:
        for twin in tied[1:]:
            tied[0].grad.add_(twin.grad)
            twin.grad.copy_(tied[0].grad)
    if job.mesh.size(TWIN) == 1:
        return
    shared = job.owned if job.plan.schedule.placement.mirrored else tied
    if shared:
        job.mesh.sum_together([shard.grad for shard in shared], TWIN)


def totals(job: Job, loss: Tensor, guard: Guard) -> Tensor:
    """Loss, squared gradient norm, requests to stop, what the watch found and expert statistics of
    the whole job, from what this rank has of each."""
    local_sums = [loss.to(torch.float64) / job.mesh.size("tp"), squared_norm(job)]
    if guard.spikes is not None:
        guard.spikes.note(torch.stack([local_sums[0], local_sums[1].sqrt() / guard.scale]))
    stop_request = local_sums[0].new_full((), float(guard.stop))
    flips = local_sums[0].new_zeros(2) if guard.watch is None else guard.watch.before_update()
    everything = torch.cat([torch.stack([*local_sums, stop_request]), flips, job.balancing.take()])
    if job.mesh.size(WORLD) > 1:
        job.mesh.all_reduce(everything, WORLD, dist.ReduceOp.SUM).wait()
    return everything


def squared_norm(job: Job) -> Tensor:
    """This rank's share of the squared gradient norm.

    An element that several ranks hold counts once: each of them brings its share.
    """
    squares: dict[int, list[Tensor]] = {}
    for shard in job.owned:
        squares.setdefault(job.copies(shard), []).append(shard.grad)
    return sum(
        (
            _norm(grads, job.mesh.device).to(torch.float64) ** 2 / copies
            for copies, grads in squares.items()
        ),
        torch.zeros((), dtype=torch.float64, device=job.mesh.device),
    )


def _norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of them all. torch would round that of narrow ones to their own type; those that
    have left the device come back one by one."""
    first = gradients[0]
    narrow, is_local = first.itemsize < torch.float32.itemsize, first.device.type == device.type
    if is_local and narrow and first.is_cuda:
        from fivefold.optim import norm_on_gpu  # Triton is there only with CUDA

        return norm_on_gpu(gradients)
    if is_local and not narrow:
        return get_total_norm(gradients)
    norms: list[Tensor] = []
    for grad in gradients:
        back = grad.to(device, non_blocking=True)
        alone = torch.linalg.vector_norm(back, dtype=torch.float32) if narrow else None
        norms.append(get_total_norm([back]) if alone is None else alone)
    return torch.linalg.vector_norm(torch.stack(norms))

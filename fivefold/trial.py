"""One trial: a plan run by its ranks and by one process, and the two compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fivefold.core import traffic, weights
from fivefold.core.plan import Plan
from fivefold.parallel.compose import Job, compose
from fivefold.parallel.mesh import Mesh, Record
from fivefold.parallel.watch import Watch
from fivefold.run import compare, reference
from fivefold.run.compare import Call, Dtype, Part, Traffic, Wanted
from fivefold.run.optimizer import Name, make_optimizer
from fivefold.run.ranks import Pool, Worker
from fivefold.run.reference import Truth, as_array
from fivefold.run.samples import Samples, samples
from fivefold.step import step


@dataclass(frozen=True)
class Settings:
    """How a plan is tried. `empty_rank`: a data rank without any counted token in step 1."""

    dtype: Dtype = "float64"
    grad_dtype: Dtype | None = None  # None: float64 for float64, else float32
    steps: int = 2
    optimizer: Name = "adamw"
    offload: bool = False
    bucket: int | None = None  # bytes
    seed: int = 0
    empty_rank: int | None = None

    @property
    def summed_in(self) -> Dtype:
        """The type in which data ranks sum gradients."""
        return self.grad_dtype or ("float64" if self.dtype == "float64" else "float32")


@dataclass(frozen=True)
class StepOfRank:
    """What one rank has to show for one step."""

    loss: float
    norm: float
    clip: float
    gradients: list[Part]  # before clipping, of what the optimizer owns
    weights: list[Part]  # after the update, the same
    seen: Counter[Call]  # collectives, by the dispatcher
    noted: Counter[Call]  # collectives, by the mesh


@dataclass(frozen=True)
class RankRun:
    """All steps of one rank, and the weights its model holds in the end."""

    steps: list[StepOfRank]
    held: list[Part]


@dataclass(frozen=True)
class Verdict:
    """Errors beside tolerances by name, traffic of every rank and step, the first difference."""

    errors: dict[str, float]
    tolerance: dict[str, float]
    traffic: list[list[Traffic]] = field(repr=False)  # by rank, then by step
    diverges_at: str | None

    @property
    def traffic_match(self) -> bool:
        return all(each.match for steps in self.traffic for each in steps)

    @property
    def passed(self) -> bool:
        exact = all(self.errors[name] <= most for name, most in self.tolerance.items())
        return exact and self.traffic_match


def run_trial(
    pool: Pool, plan: Plan, settings: Settings, on_phase: Callable[[], None] | None = None
) -> Verdict:
    """Run the plan on the pool's first ranks, and the truth on the one after them."""
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))], on_phase)
    return judge(plan, settings, runs, truths)


def num_phases(plan: Plan, settings: Settings) -> int:
    """How often `on_phase` is called in a trial that ends well."""
    of_rank = 2 + settings.steps * (2 * plan.batch.microbatches + 2)
    return plan.layout.world * of_rank + 1 + settings.steps


def run_reference(worker: Worker, plan: Plan, settings: Settings) -> list[Truth]:
    """The same steps on one device."""
    batches = [_samples(plan, settings, number).whole() for number in range(settings.steps)]
    dtype = getattr(torch, settings.dtype)
    return reference.truths(
        plan.shape, batches, settings.optimizer, settings.seed, dtype, worker.phase
    )


def run_rank(worker: Worker, plan: Plan, settings: Settings) -> RankRun:
    """The steps of one rank, each watched."""
    with worker.joined(plan.layout.world):
        worker.phase("build")
        mesh = Mesh.build(plan.layout, torch.device("cpu"), plan.shape.kv_heads)
        job = compose(
            plan,
            mesh,
            seed=settings.seed,
            dtype=getattr(torch, settings.dtype),
            grad_dtype=getattr(torch, settings.summed_in),
            offload=settings.offload,
            bucket=settings.bucket,
        )
        optimizer = _optimizer(job, settings)
        steps = [
            _watched_step(worker, job, optimizer, _samples(plan, settings, number), number)
            for number in range(settings.steps)
        ]
        worker.phase("compare")
        held = list(_held(job))
        mesh.groups.clear()  # they end with their last holder, and a weight's hook may be one
        return RankRun(steps, held)


def _watched_step(
    worker: Worker, job: Job, optimizer: torch.optim.Optimizer, drawn: Samples, number: int
) -> StepOfRank:
    batches = drawn.of(job.plan.layout.coord(job.mesh.rank).dp)
    clipped: list[Part] = []
    job.mesh.records.clear()
    watch = Watch(job.mesh, worker.detail)
    capture = optimizer.register_step_pre_hook(
        lambda *_: clipped.extend(_owned(job, gradients=True))
    )
    with watch, _announced(worker, job, optimizer, f"step {number + 1}"):
        outcome = step(job, optimizer, batches, reference.MAX_NORM)
    capture.remove()
    loss, norm, clip = (float(each) for each in (outcome.loss, outcome.norm, outcome.clip))
    gradients = [replace(each, values=each.values / clip) for each in clipped]
    updated = list(_owned(job, gradients=False))
    seen, noted = _calls(watch.records), _calls(job.mesh.records)
    return StepOfRank(loss, norm, clip, gradients, updated, seen, noted)


@contextmanager
def _announced(
    worker: Worker, job: Job, optimizer: torch.optim.Optimizer, number: str
) -> Iterator[None]:
    """Say each phase of a step when it begins."""

    def say(phase: str) -> Callable[..., None]:
        return lambda *_: worker.phase(f"{number} {phase}")

    finish = job.data.finish
    job.data.finish = lambda: (say("reduce")(), finish())[1]
    hooks = [
        job.model.register_forward_pre_hook(say("forward")),
        job.model.register_forward_hook(say("backward")),
        optimizer.register_step_pre_hook(say("optimizer")),
    ]
    yield
    job.data.finish = finish
    for hook in hooks:
        hook.remove()


def _calls(records: Mapping[Record, int]) -> Counter[Call]:
    return Counter({tuple(record): count for record, count in records.items()})


def _optimizer(job: Job, settings: Settings) -> torch.optim.Optimizer:
    owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
    optimizer = make_optimizer(
        settings.optimizer, owned, reference.LEARNING_RATE, reference.WEIGHT_DECAY
    )
    if settings.optimizer == "adamw":
        for group in optimizer.param_groups:
            group["eps"] = reference.ADAM_EPS
    return optimizer


def _samples(plan: Plan, settings: Settings, number: int) -> Samples:
    return samples(
        plan.batch,
        plan.shape.vocab,
        settings.seed,
        number,
        packed=plan.packed,
        empty_rank=settings.empty_rank if number == 0 else None,
    )


def _owned(job: Job, gradients: bool) -> Iterator[Part]:
    """What the optimizer of this rank updates: the gradients of it, or the values."""
    for flat in job.data.units:
        begins = {entry.row.name: entry.start for entry in flat.unit.entries}
        spans = {row.name: start for row, start, _ in flat.unit.owned(flat.place)}
        for each in flat.owned:
            name = each.row.name
            start = flat.place * flat.unit.slice_size + spans[name] - begins[name]
            values = as_array(each.grad if gradients else each.tensor)
            yield Part(name, job.pieces[name], start, values)


def _held(job: Job) -> Iterator[Part]:
    """The weights as the model of this rank sees them, brought here where they are sharded."""
    job.data.wait()
    for flat in job.data.units:
        flat.gather()
        flat.arrive()
        for name, parameter in flat.parameters.items():
            yield Part(name, job.pieces[name], 0, as_array(parameter))
        flat.release()


def judge(plan: Plan, settings: Settings, runs: list[RankRun], truths: list[Truth]) -> Verdict:
    """Hold every rank's steps against the truth and the prediction."""
    gain = reference.GAIN[settings.optimizer]
    tolerance = compare.tolerances(plan.shape, plan.batch, settings.dtype, settings.steps, gain)
    errors = dict.fromkeys(tolerance, 0.0)
    off: set[str] = set()
    for number, truth in enumerate(truths):
        here = [run.steps[number] for run in runs]
        for one, kind in (("loss", "loss_err"), ("norm", "norm_err"), ("clip", "clip_err")):
            found = [getattr(each, one) for each in here]
            worst = max(compare.relative(value, getattr(truth, one)) for value in found)
            errors[kind] = max(errors[kind], worst)
        gradients = [part for each in here for part in each.gradients]
        updated = [part for each in here for part in each.weights]
        if number == len(truths) - 1:
            updated += [part for run in runs for part in run.held]
        for kind, wanted in (
            ("grad_err", Wanted(truth.gradients, gradients)),
            ("weight_err", Wanted(truth.weights, updated)),
        ):
            by_name = compare.errors_by_name(wanted)
            off |= {name for name, error in by_name.items() if not error <= tolerance[kind]}
            errors[kind] = max(errors[kind], *by_name.values())
    order = [weight.name for weight in weights.weights(plan.shape)]
    return Verdict(
        errors, tolerance, _traffic(plan, settings, runs), compare.first_module(off, order)
    )


def _traffic(plan: Plan, settings: Settings, runs: list[RankRun]) -> list[list[Traffic]]:
    found: list[list[Traffic]] = []
    for rank, run in enumerate(runs):
        listed = traffic.predict(
            plan,
            rank,
            itemsize=getattr(torch, settings.dtype).itemsize,
            grad_itemsize=getattr(torch, settings.summed_in).itemsize,
            bucket=settings.bucket,
        )
        predicted: Counter[Call] = Counter(
            {(each.axis, each.kind, each.bytes, each.group): each.count for each in listed}
        )
        found.append(
            [Traffic(predicted, compare.attributed(each.seen, predicted)) for each in run.steps]
        )
    return found

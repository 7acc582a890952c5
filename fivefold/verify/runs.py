"""The two sides of a verification: the steps of one rank, and the reference in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.layout import PIPELINE, buffers, decays, shard_of
from fivefold.core.plan import Plan
from fivefold.core.schedule import Delays, Step, merged
from fivefold.data import Samples, samples
from fivefold.launch import Backend, RankDevice, Worker, forked_device
from fivefold.model import TokenBatch
from fivefold.model.kernels import compiled, eager
from fivefold.optim import make_optimizer
from fivefold.parallel import ActionObserver, CollectiveRecord, Instruments, Job, Mesh, compose
from fivefold.step import StepOutcome, step
from fivefold.verify import reference
from fivefold.verify.asynchronous import Stream
from fivefold.verify.compare import Call, ComparedPart, Dtype, UnitOrder
from fivefold.verify.expert_flips import ExpertRecord, RankRows
from fivefold.verify.flips import CodeRecord, RankCodes
from fivefold.verify.reference import Delayed, Truth, as_array

# Every collective of this rank as torch's dispatcher sees it, whatever code issues it.
#
# It is a second count beside `Mesh.records`: a collective that was forgotten there, or added
# elsewhere, shows up here. It costs a Python call for each operator and disables compilation, so
# only `verify` uses it.

# The kind of each operator, and which of its arguments is the input buffer.
_KINDS = {
    "c10d": {
        "allreduce_": ("all_reduce", 0),
        "allreduce_coalesced_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 1),
        "allgather_": ("all_gather", 1),
        "allgather_coalesced_": ("all_gather", 1),
        "allgather_into_tensor_coalesced_": ("all_gather", 1),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "reduce_scatter_": ("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "alltoall_base_": ("all_to_all", 1),
        "alltoall_": ("all_to_all", 1),
        "broadcast_": ("broadcast", 0),
        "reduce_": ("reduce", 0),
        "gather_": ("gather", 1),
        "scatter_": ("scatter", 1),
        "send": ("send", 0),
        "recv_": ("recv", 0),
        "recv_any_source_": ("recv", 0),
        "barrier": ("barrier", 0),
    },
    "_c10d_functional": {
        "all_reduce": ("all_reduce", 0),
        "all_reduce_": ("all_reduce", 0),
        "all_reduce_coalesced": ("all_reduce", 0),
        "all_reduce_coalesced_": ("all_reduce", 0),
        "all_gather_into_tensor": ("all_gather", 0),
        "all_gather_into_tensor_out": ("all_gather", 0),
        "all_gather_into_tensor_coalesced": ("all_gather", 0),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
        "reduce_scatter_tensor_out": ("reduce_scatter", 0),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
        "all_to_all_single": ("all_to_all", 0),
        "broadcast": ("broadcast", 0),
        "broadcast_": ("broadcast", 0),
        "isend": ("send", 0),
        "irecv": ("recv", 0),
    },
}


class DispatchWatch(TorchDispatchMode):
    """Dispatch mode whose `records` count collectives as `Mesh.records` does."""

    def __init__(self, mesh: Mesh, say: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.records: Counter[CollectiveRecord] = Counter()
        self.say, self.noted = say, mesh.records
        self.axes: dict[str, list[str]] = {}
        for axis, group in mesh.groups.items():
            self.axes.setdefault(group.group_name, []).append(axis)
        self.axes |= {group.group_name: [PIPELINE] for group in mesh.channels.values()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _KINDS:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        group = _group((*args, *kwargs.values()))
        if group is None:
            return
        group_name, size = group
        name = func._schema.name.split("::")[1]
        kind, position = _KINDS[func.namespace].get(name, (name, 0))
        axes, num_bytes = self.axes.get(group_name, [group_name]), _bytes(args[position])
        records = [CollectiveRecord(axis, kind, num_bytes, size) for axis in axes]
        # Of roles that share a group, the one that the mesh has noted and nobody has seen.
        unseen = (record for record in records if self.noted[record] > self.records[record])
        record = next(unseen, records[0])
        self.records[record] += 1
        if self.say is not None:
            self.say(f"{kind} on {record.axis}")


def _group(arguments: tuple[Any, ...]) -> tuple[str, int] | None:
    """Name and size of the group among an operator's arguments; without one it is no collective.

    It comes as an object, boxed or not, or by its name, which is then the last text.
    """
    for argument in arguments:
        if isinstance(argument, dist.ProcessGroup):
            return argument.group_name, argument.size()
        if isinstance(argument, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(argument)
            return group.group_name, group.size()
    names = [text for text in arguments if isinstance(text, str)]
    if not names:
        return None
    return names[-1], dist.distributed_c10d._resolve_process_group(names[-1]).size()


def _bytes(buffer: Any) -> int:
    if isinstance(buffer, Tensor):
        return buffer.nbytes
    return sum(_bytes(tensor) for tensor in buffer)


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class VerifySettings:
    """Settings of a verification. `empty_rank`: a data rank without any counted token in step 1.

    On `cuda` the processes take the GPUs of this machine in turn. `compiled` blocks run as they do
    in training; the reference is never compiled.
    """

    dtype: Dtype = "float64"
    steps: int = 2
    optimizer: str = "adamw"
    offload: bool = False
    seed: int = 0
    empty_rank: int | None = None
    device: Device = "cpu"
    backend: Backend = "gloo"
    compiled: bool = False


def num_microbatches(plan: Plan, settings: VerifySettings) -> int:
    """Microbatches of a verification; PipeDream updates after every one."""
    schedule = plan.schedule
    every = Delays.of(schedule).every if schedule.asynchronous else schedule.num_microbatches
    return settings.steps * every


def num_phases(plan: Plan, settings: VerifySettings) -> int:
    """Number of `on_phase` calls of a successful verification."""
    ranks, columns = plan.layout.pp, plan.layout.world // plan.layout.pp
    references = (1 + len(reference.CUTS)) * (1 + settings.steps)
    if plan.schedule.asynchronous:
        actions = 2 * ranks * num_microbatches(plan, settings)
    else:
        actions = settings.steps * sum(len(merged(plan.schedule, rank)) for rank in range(ranks))
    return columns * (2 * ranks * (1 + settings.steps) + actions) + references


@dataclass(frozen=True)
class StepOfRank:
    """Results of one update on one rank."""

    loss: float
    norm: float
    clip: float
    gradients: list[ComparedPart]  # before clipping, of what the optimizer owns
    weights: list[ComparedPart]  # after the update, the same
    biases: list[ComparedPart]  # of the routers, after the step


@dataclass(frozen=True)
class ObservedCalls:
    """Collectives of a step, or of an asynchronous run, seen by the dispatcher and by the mesh.

    A mode of the dispatcher would stop compilation: compiled ranks are heard by the mesh alone,
    through which every collective goes.
    """

    seen: Counter[Call]
    noted: Counter[Call]


@dataclass(frozen=True)
class VerifiedRank:
    """Results of all steps of one rank, and its final weights.

    `orders` are the collectives of flat units in each step, or in an asynchronous run.
    """

    steps: list[StepOfRank]
    heard: list[ObservedCalls]
    orders: list[UnitOrder]
    parts: list[ComparedPart]
    codes: list[RankCodes]  # of each step, in fp8
    rows: list[RankRows]  # of each step, what experts read in fp8


def run_reference(worker: Worker, plan: Plan, settings: VerifySettings) -> list[Truth]:
    """Run the same steps, or the emulated delays, on one device; and again with sums in other
    orders, to measure rounding."""
    rank = _prepared(worker, plan, settings)
    rank.start()
    truths = _truths(worker, plan, settings, rank.device, None)
    for cut in reference.CUTS:
        reordered = _truths(worker, plan, settings, rank.device, cut)
        truths = reference.measure_floors(truths, reordered)
    return truths


def _truths(
    worker: Worker, plan: Plan, settings: VerifySettings, device: torch.device, cut: float | None
) -> list[Truth]:
    """The steps of one process. With a `cut`, sums are in another order, and those of gradients in
    the type in which the ranks add them."""
    narrow = cut is not None and plan.units.grad_dtype == "bf16"
    drawn = _drawn(plan, settings, device)
    dtype = getattr(torch, settings.dtype)
    same = (settings.optimizer, settings.seed, dtype, worker.phase)
    if not plan.schedule.asynchronous:
        balance = (plan.balance, plan.batch.microbatch_size)
        batches = [step_batch.as_batch() for step_batch in drawn]
        parts = [
            [part for dp in range(plan.layout.dp) for part in window.of(dp)] for window in drawn
        ]
        order = (parts if narrow else (), cut)
        return reference.truths(plan.shape, batches, *same, *balance, device, plan.fp8, *order)
    delays, last = Delays.of(plan.schedule), plan.layout.pp - 1
    late = [1 if delays.constant else last - stage for stage in range(plan.layout.pp)]
    microbatches = [batch for step_batch in drawn for batch in step_batch.microbatches()]
    microbatches = microbatches[: num_microbatches(plan, settings)]
    delayed = Delayed(plan.stages, delays.every, late)
    order = (narrow, cut)
    return reference.delayed_truths(plan.shape, microbatches, delayed, *same, device, *order)


def run_rank(worker: Worker, plan: Plan, settings: VerifySettings) -> VerifiedRank:
    """Run and observe the steps of one rank."""
    rank = _prepared(worker, plan, settings)
    device = rank.device
    with worker.joined(plan.layout.world, rank):
        worker.phase("build")
        mesh = Mesh.of(plan, device)
        phases, record, of_experts = _Phases(worker), CodeRecord(plan, mesh.rank), ExpertRecord()
        job = compose(
            plan,
            mesh,
            seed=settings.seed,
            dtype=getattr(torch, settings.dtype),
            offload=settings.offload,
            as_summed=False,
            initial=reference.first_weight,
            fuse=compiled if settings.compiled else eager,
            instruments=Instruments(
                actions=phases,
                on_phase=phases.say,
                on_unit=phases.note,
                on_rounded=record.note,
                on_experts=of_experts.note,
            ),
        )
        recorder = _Recorder(worker, job, phases, _optimizer(job, settings), not settings.compiled)
        drawn = _drawn(plan, settings, device)
        own_batches = [step_batch.of(plan.layout.coord(mesh.rank).dp) for step_batch in drawn]
        if plan.schedule.asynchronous:
            microbatches = [batch for batches in own_batches for batch in batches]
            recorder.stream(microbatches[: num_microbatches(plan, settings)])
        codes, rows = list[RankCodes](), list[RankRows]()
        for number, batches in enumerate(
            () if plan.schedule.asynchronous else own_batches, start=1
        ):
            recorder.step(batches, f"step {number}")
            codes.append(record.take())
            rows.append(of_experts.take())
        worker.phase("compare")
        parts = list(_held(job))
        mesh.close_groups()
        return VerifiedRank(recorder.steps, recorder.heard, recorder.orders, parts, codes, rows)


def _prepared(worker: Worker, plan: Plan, settings: VerifySettings) -> RankDevice:
    """The device; float32 is float32 there, and no GEMM is rounded to TF32."""
    if settings.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return forked_device(settings.device, settings.backend, worker.rank, plan.layout.world)


class _Phases(ActionObserver):
    """Reports phases under the name of the current step, and records the order in which flat units
    are gathered and reduced."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.step = worker, ""
        self.order: UnitOrder = {}

    def begin_step(self, name: str) -> None:
        self.step, self.order = name, {}

    def note(self, axis: str, kind: str, unit: str) -> None:
        self.order.setdefault(axis, []).append(f"the {kind} of {unit}")

    def say(self, phase: str) -> None:
        self.worker.phase(f"{self.step} {phase}")

    def begin(self, action: Step) -> None:
        self.say(str(action))


class _Recorder:
    """Runs steps, or a stream of them, and records what is compared."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        phases: _Phases,
        optimizer: torch.optim.Optimizer,
        watches: bool,
    ) -> None:
        """To watch stops compilation; a rank that is alone has no group to issue a call on."""
        self.worker, self.job, self.optimizer, self.watches = worker, job, optimizer, watches
        self.phases = phases
        self.steps: list[StepOfRank] = []
        self.heard: list[ObservedCalls] = []
        self.orders: list[UnitOrder] = []
        self.updates: list[
            tuple[list[ComparedPart], list[ComparedPart]]
        ] = []  # gradients and weights

    def step(self, batches: list[TokenBatch], name: str) -> None:
        """One optimizer step."""
        with self._watching(name):
            outcomes = [step(self.job, self.optimizer, batches, reference.MAX_NORM)]
        self._keep(outcomes)

    def stream(self, batches: list[TokenBatch]) -> None:
        """An asynchronous run."""
        stream = Stream(self.job, self.optimizer, len(batches), self.phases)
        with self._watching("stream"):
            outcomes = stream.run(batches)
        self._keep(outcomes)

    def _keep(self, outcomes: list[StepOutcome]) -> None:
        for outcome, (gradients, updated) in zip(outcomes, self.updates, strict=True):
            loss, norm, clip = (
                float(value) for value in (outcome.loss, outcome.norm, outcome.clip)
            )
            before = [replace(part, values=part.values / clip) for part in gradients]
            biases = list(_biases(self.job))
            self.steps.append(StepOfRank(loss, norm, clip, before, updated, biases))
        self.updates.clear()

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        """Copy what the optimizer sees, and count collectives."""
        job = self.job
        self.phases.begin_step(name)

        def before(*_: object) -> None:
            self.phases.say("optimizer")
            self.updates.append((list(_owned(job, gradients=True)), []))

        def after(*_: object) -> None:
            self.updates[-1][1].extend(_owned(job, gradients=False))

        hooks = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(after),
        ]
        job.mesh.records.clear()
        watch = DispatchWatch(job.mesh, self.worker.detail)
        watched = watch if self.watches else nullcontext()
        try:
            with job.mesh.lanes.inside(lambda: watched), watched:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        noted = _calls(job.mesh.records)
        self.heard.append(ObservedCalls(_calls(watch.records) if self.watches else noted, noted))
        self.orders.append(self.phases.order)


def _calls(records: Mapping[CollectiveRecord, int]) -> Counter[Call]:
    return Counter({tuple(record): count for record, count in records.items()})


def _optimizer(job: Job, settings: VerifySettings) -> torch.optim.Optimizer:
    owned = [(decays(shard.row.role), shard.tensor) for shard in job.owned]
    lr, weight_decay = reference.LEARNING_RATE, reference.WEIGHT_DECAY
    return make_optimizer(settings.optimizer, owned, lr, weight_decay, reference.ADAM_EPS)


def _drawn(plan: Plan, settings: VerifySettings, device: torch.device) -> list[Samples]:
    windows = -(-num_microbatches(plan, settings) // plan.batch.microbatches)
    return [_samples(plan, settings, number).to(device) for number in range(windows)]


def _samples(plan: Plan, settings: VerifySettings, number: int) -> Samples:
    return samples(
        plan.batch,
        plan.shape.vocab,
        settings.seed,
        number,
        packed=plan.packed,
        empty_rank=settings.empty_rank if number == 0 else None,
        drops=plan.shape.drops,
    )


def _owned(job: Job, gradients: bool) -> Iterator[ComparedPart]:
    """What this rank has of the weights: the gradients of what learns, or the values."""
    for flat in (unit for unit in job.units if not (gradients and unit.unit.frozen)):
        begins = {entry.row.name: entry.start for entry in flat.unit.entries}
        spans = {row.name: start for row, start, _ in flat.unit.owned(flat.coord)}
        for shard in flat.owned:
            name = shard.row.name
            start = flat.coord * flat.unit.shard_size + spans[name] - begins[name]
            values = as_array(shard.grad if gradients else shard.tensor)
            yield ComparedPart(job.table[name].name, job.shards[name], start, values)


def _biases(job: Job) -> Iterator[ComparedPart]:
    """What the balancing of this rank updates."""
    table = {weight.name: weight for weight in buffers(job.plan.shape)}
    coord = job.plan.layout.coord(job.mesh.rank)
    for chunk in job.chunks:
        for name, bias in chunk.model.named_buffers():
            shard = shard_of(table[name], job.plan.shape, job.plan.layout, coord)
            yield ComparedPart(name, shard, 0, as_array(bias))


def _held(job: Job) -> Iterator[ComparedPart]:
    """The weights as the model of this rank sees them, brought here where they are sharded."""
    for flat in job.units:
        flat.arrive()
        flat.gather(exact=True)
        flat.arrive()
        for name, parameter in flat.parameters.items():
            yield ComparedPart(job.table[name].name, job.shards[name], 0, as_array(parameter))
        flat.release()

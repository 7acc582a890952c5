"""The estimate of one resolved plan: a simulated step, peak memory, and what follows from both.

Bounds rank millions of layouts; what is printed or written is simulated. The clock runs the plan's
own schedule with the seconds of each of its stages, head included. What surrounds the pipeline
(data axis, optimizer, fixed seconds) comes from `cost.step_time`.

Peak memory of every rank of one plan, with the actions of its own schedule.

A search counts microbatches in flight by closed forms. Here the actions of a plan are followed, and
for fivefold's own program all that each of them makes and frees (`cost/memory/rank_ledger.py`).
Without that, for asynchronous schedules and narrow matmuls, what a stage saves is followed, and
what it holds between input and weight gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fivefold.core.layout import computed_flops, is_buildable
from fivefold.core.model import LayerKind, Recompute, repeated_flops
from fivefold.core.plan import Plan
from fivefold.core.schedule import (
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Costs,
    Schedule,
    StageBytes,
    Timeline,
    memory_levels,
    peak_held,
    play,
)
from fivefold.cost import Array
from fivefold.cost.layer import LayerTimer, LayerTimes, TimeParts
from fivefold.cost.memory import (
    CATEGORIES,
    MemoryEntries,
    PlanLedger,
    peak_memory,
    rank_peak_memory,
    verdict,
)
from fivefold.cost.stages import (
    RankLayers,
    RankStage,
    ScheduleTrace,
    StageSeconds,
    count_layers,
    named_trace,
    simulate_trace,
    trace_schedule,
)
from fivefold.cost.step import (
    COMPUTE,
    around_parts,
    launch_bound_layer,
    require_possible_memory,
    require_possible_time,
)
from fivefold.planner.error_bars import Accuracy, accuracy
from fivefold.planner.setting import EstimateSetting, plan_arguments

Bytes = dict[str, float]
_FULLEST = 4  # ranks that are followed to find the one that has most


class PlanRanks:
    """The ranks of one plan. Every rank of the pipeline is followed once, whoever asks for it."""

    def __init__(self, plan: Plan, setting: EstimateSetting) -> None:
        self.plan, self.job = plan, plan_arguments(plan, setting)
        self.entries = MemoryEntries(*self.job)
        self.is_followed = _is_followed(plan, self.entries)
        self._known: dict[int, Bytes] = {}

    @cached_property
    def _ledger(self) -> PlanLedger:
        return PlanLedger(self.plan, self.entries)

    @cached_property
    def _closed(self) -> list[Bytes]:
        """All ranks of the pipeline, by what their stages save."""
        plan, placement = self.plan, self.plan.schedule.placement
        ranks = [placement.stages_of(i) for i in range(plan.layout.pp)]
        copies = 2 if placement.mirrored else 1
        stage = _held_by(plan, ranks, copies)
        stage = stage._replace(flight=_flight(plan, self.entries, ranks) * copies)
        parts = rank_peak_memory(*self.job, stage)
        if plan.schedule.asynchronous:
            # An asynchronous rank stashes the weights with which microbatches in flight have begun.
            versions = np.array(plan.schedule.weight_versions)
            parts = {**parts, "weights": parts["weights"] * versions}
        columns = {
            name: np.broadcast_to(amounts, plan.layout.pp) for name, amounts in parts.items()
        }
        return [
            {name: float(column[i]) for name, column in columns.items()} for i in range(len(ranks))
        ]

    def peak(self, index: int) -> Bytes:
        """Of one rank of the pipeline: operator by operator, if they are known."""
        if not self.is_followed:
            return self._closed[index]
        if index not in self._known:
            self._known[index] = _with_overhead(self.entries, self._ledger.peak(index))
        return self._known[index]

    def peaks(self) -> list[Bytes]:
        """Of every rank of one pipeline."""
        return [self.peak(index) for index in range(self.plan.layout.pp)]

    def fullest(self, enough: float = np.inf) -> Bytes:
        """Of the rank that has most, of both ends and those that closed forms find fullest; or of
        the first of them with more than `enough`."""
        if not self.is_followed:
            return max(self._closed, key=_total)
        order: Sequence[int] = range(self.plan.layout.pp)
        if len(order) > (_FULLEST if np.isinf(enough) else 1):
            ends = (order[0], order[-1])  # with what closed forms tell least well: head and loss
            order = sorted(order, key=lambda position: -_total(self._closed[position]))
            order = list(dict.fromkeys((*order[:_FULLEST], *ends)))
        peaks: list[Bytes] = []
        for index in order:
            peaks.append(self.peak(index))
            if _total(peaks[-1]) > enough:
                break
        return max(peaks, key=_total)


def fullest_memory(plan: Plan, setting: EstimateSetting, enough: float = np.inf) -> Bytes:
    """Peak bytes by category of the fullest rank, or of one with more than `enough`."""
    return PlanRanks(plan, setting).fullest(enough)


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Peak bytes of one rank by category, with the microbatches that its schedule has in flight."""
    return PlanRanks(plan, setting).peak(plan.layout.coord(rank).pp)


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same for every rank of one pipeline."""
    return PlanRanks(plan, setting).peaks()


def _is_followed(plan: Plan, entries: MemoryEntries) -> bool:
    """Whether the operators of this plan are known one by one."""
    if not (is_buildable(plan.shape) or plan.shape.hybrid is not None):
        return False
    memory, stack = entries.memory, entries.stack
    if plan.shape.tuning is not None:  # frozen weights have other operators
        return False
    narrow = memory.input_bytes is not None and stack.fp8 is None
    return memory.unit_by_unit and not (
        narrow or plan.schedule.asynchronous or stack.frozen or memory.offloaded
    )


def _total(parts: Bytes) -> float:
    return sum(parts.values())


def _with_overhead(entries: MemoryEntries, parts: Bytes) -> Bytes:
    """With what belongs to no tensor."""
    besides = entries.overhead(np.array([parts.get("activations", 0.0)]))
    return {
        **{name: max(0.0, parts.get(name, 0.0)) for name in CATEGORIES},  # sums may end below 0
        **{name: float(amounts[0]) for name, amounts in besides.items()},
    }


def _held_by(plan: Plan, groups: Sequence[Sequence[int]], copies: int = 1) -> RankStage:
    """The layers of each of these groups of stages, with one microbatch in flight."""
    layers = [[i for n in stages for i in plan.stages[n]] for stages in groups]

    def number(of_rule: Recompute | None = None) -> RankLayers:
        rank_layers = [
            [i for n in stages if of_rule in (None, plan.recompute.of(n)) for i in plan.stages[n]]
            for stages in groups
        ]
        counts = np.array([count_layers(plan.shape, indices) for indices in rank_layers], float)
        return RankLayers(*counts.T / copies)

    return RankStage(
        number(),
        copies=np.array([float(copies)]),
        flight=np.ones(len(groups)),
        embedding=np.array([float(0 in stage_layers) for stage_layers in layers]),
        head=np.array([float(plan.shape.layers - 1 in stage_layers) for stage_layers in layers]),
        by_rule=tuple((rule, number(rule)) for rule in dict.fromkeys(plan.recompute.rules)),
    )


def _flight(plan: Plan, entries: MemoryEntries, ranks: Sequence[Sequence[int]]) -> Array:
    """Microbatches that each rank of the pipeline holds at most, in units of what its layers save.

    What waits for a weight gradient counts with its own bytes.
    """
    memory = entries.layers.microbatch_bytes(
        _held_by(plan, [(n,) for n in range(len(plan.stages))])
    )
    # Lists: they are read for each action of each rank.
    saved, deferred = (np.broadcast_to(amounts, len(plan.stages)).tolist() for amounts in memory)
    sizes: tuple[StageBytes, StageBytes] = (saved.__getitem__, deferred.__getitem__)
    return np.array(
        [
            peak_held(plan.schedule, rank, *sizes) / sum(saved[n] for n in stages)
            for rank, stages in enumerate(ranks)
        ]
    )


Seconds = dict[str, float]
# Parts of a step that no schedule changes.
_TRAFFIC = ("tp", "cp", "ep", "pp")
_AROUND = ("dp", "rounding", "optimizer", "offload", "fixed")


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step: `parts` sum to `step`; `bubble` is the share in which ranks wait."""

    step: float
    parts: Seconds
    bubble: float
    schedule: Schedule
    costs: Costs  # of its stages

    @cached_property
    def timeline(self) -> Timeline:
        """When every action starts and ends: many, so they are played only if asked for."""
        return play(self.schedule, self.costs)


class _Stage(NamedTuple):
    """Seconds of one microbatch in a stage, by part."""

    forward: Seconds
    backward: Seconds  # input gradient, with recomputation
    weight: Seconds  # weight gradient


class MeasuredPasses(NamedTuple):
    """Measured compute seconds of a stage for one microbatch."""

    forward: float
    backward: float
    weight: float = 0.0


def simulate_step(
    plan: Plan,
    setting: EstimateSetting,
    measured: Mapping[int, MeasuredPasses] | None = None,
    makespan: float | None = None,
) -> SimulatedStep:
    """Simulate a step of the plan; stages that were `measured` take their measured compute time,
    and only their traffic is modelled. `makespan`: of its pipeline, if that is known already."""
    job = plan_arguments(plan, setting)
    work = LayerTimer(*job)
    stages = _stages(plan, work)
    for number, passes in (measured or {}).items():
        # The modelled traffic of a stage, and the measured seconds in place of its compute.
        stages[number] = _Stage(
            *(
                {name: value for name, value in parts.items() if name in _TRAFFIC}
                | {"measured": seconds}
                for parts, seconds in zip(stages[number], passes, strict=True)
            )
        )
    costs = Costs(
        *(tuple(sum(part.values()) for part in column) for column in zip(*stages, strict=True)),
        transfer=(float(work.message().item()),) * len(stages),
    )
    trace, seconds = _trace(plan), _stage_seconds(costs)
    if makespan is None:
        makespan = float(simulate_trace(trace, seconds).item())
    parts = _busiest(trace, seconds, stages)
    if plan.layout.pp > 1 and not plan.schedule.asynchronous:
        # Messages are visible at least in the fill and drain; the rest is waiting.
        waits = makespan - sum(parts.values())
        parts["pp"] = max(0.0, min(waits, 2 * (plan.layout.pp - 1) * costs.transfer[0]))
        parts["bubble"] = waits - parts["pp"]
    parts = {name: seconds * setting.stack.factor for name, seconds in parts.items()}
    known = around_parts(work, plan.stages)
    for name in _AROUND:
        if name in known:
            parts[name] = parts.get(name, 0.0) + float(known[name].item())
    step = sum(parts.values())
    require_possible_time(job_name(plan, setting), step, parts)
    return SimulatedStep(step, parts, parts.get("bubble", 0.0) / step, plan.schedule, costs)


def _trace(plan: Plan) -> ScheduleTrace:
    """The plan's own schedule, as the simulation reads it."""
    if plan.layout.pp > 1 and not plan.family.is_named:
        return trace_schedule(plan.schedule)
    return named_trace(
        plan.family.name, plan.layout.pp, plan.batch.microbatches, plan.layout.chunks
    )


def _stage_seconds(costs: Costs) -> StageSeconds:
    columns = (np.array(cost)[:, None] for cost in (costs.forward, costs.backward, costs.weight))
    return StageSeconds(*columns, lag=np.array(costs.transfer[:1]))


def job_name(plan: Plan, setting: EstimateSetting) -> str:
    """The job as errors name it."""
    return f"{plan.shape.name} on {setting.machine.name}, {plan.layout}, {plan.schedule.name}"


def rank_seconds_alone(plan: Plan, setting: EstimateSetting, rank: int) -> float:
    """Seconds of a step of one rank that never waits for others: its compute and its update."""
    job = plan_arguments(plan, setting)
    work = LayerTimer(*job)
    stages, total = _stages(plan, work, apart=_TRAFFIC), 0.0
    for action in plan.schedule.actions(plan.layout.coord(rank).pp):
        stage = stages[action.stage]
        passes = {FORWARD: stage[:1], INPUT_GRAD: stage[1:2], WEIGHT_GRAD: stage[2:]}
        for part in passes.get(action.kind, stage[1:]):
            total += sum(
                part_seconds for name, part_seconds in part.items() if name not in _TRAFFIC
            )
    around = around_parts(work, plan.stages)
    updates = (around[name] for name in ("rounding", "optimizer") if name in around)
    return total * setting.stack.factor + sum(float(update.item()) for update in updates)


def _stages(plan: Plan, work: LayerTimer, apart: Collection[str] = ()) -> list[_Stage]:
    """Every stage of the plan, its layers without the parts in `apart`; the last one has the head
    and the MTP layers."""
    shape = plan.shape
    known: dict[tuple[LayerKind, Recompute, bool], LayerTimes] = {}
    alike: dict[tuple[bool, *tuple[int, ...]], _Stage] = {}  # by their layers
    fp8 = work.stack.fp8
    stages: list[_Stage] = []
    for number, layers in enumerate(plan.stages):
        rule = plan.recompute.of(number)
        timer = work.under(rule)
        last = layers.stop == shape.layers
        numbers = [*layers, *([shape.layers] * shape.mtp if last else [])]
        layer_times: list[LayerTimes] = []
        for number_of_layer in numbers:
            i = min(number_of_layer, shape.layers - 1)  # those that predict ahead are like the last
            plain = fp8 is not None and not fp8.rounds(number_of_layer, shape.layers)
            key = shape.layer_kind(i), rule, plain
            if key not in known:
                known[key] = launch_bound_layer(timer.unrounded if plain else timer, i, apart)
            layer_times.append(known[key])
        sign = last, *map(id, layer_times)
        if sign not in alike:
            alike[sign] = _joined([*layer_times, *([timer.head()] if last else [])])
        stages.append(alike[sign])
    return stages


def _joined(layer_times: list[LayerTimes]) -> _Stage:
    return _Stage(
        _sum(layer.forward for layer in layer_times),
        _sum(part for layer in layer_times for part in (layer.inputs, layer.again)),
        _sum(layer.weights for layer in layer_times),
    )


def _sum(parts: Iterable[TimeParts]) -> Seconds:
    totals: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for name, seconds in part.items():
            totals[name] += float(np.asarray(seconds).item())
    return dict(totals)


def _busiest(trace: ScheduleTrace, seconds: StageSeconds, stages: list[_Stage]) -> Seconds:
    """Seconds of the busiest pipeline rank in a step, by part."""
    counts = trace.counts[(trace.counts @ seconds.table).argmax()]
    forwards, inputs, wholes, weights = counts[:-1].reshape(4, len(stages))
    totals: defaultdict[str, float] = defaultdict(float)
    for times, index in ((forwards, 0), (inputs + wholes, 1), (weights + wholes, 2)):
        for number in np.flatnonzero(times):
            for name, duration in stages[number][index].items():
                totals[name] += float(times[number]) * duration
    return dict(totals)


# --- Time and memory of a plan

_NO_TENSORS = ("context", "nccl", "margin")
_NOT_STATIC = ("activations", *_NO_TENSORS)  # per microbatch, or of no tensor
TRAFFIC = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class Estimate:
    """One plan on one machine; `parts` sum to `step`, `memory` to the bytes of the fullest rank."""

    plan: Plan
    setting: EstimateSetting
    step: float
    parts: Seconds
    bubble: float
    memory: Bytes
    host: float  # bytes that offload keeps in host memory
    disk: float  # and on local disks
    simulated: SimulatedStep = field(repr=False)
    accuracy: Accuracy = field(default_factory=accuracy, repr=False)  # how far it may be off

    @property
    def name(self) -> str:
        """The job as errors name it."""
        return job_name(self.plan, self.setting)

    @property
    def timeline(self) -> Timeline:
        """Of the simulated pipeline."""
        return self.simulated.timeline

    @property
    def offload(self) -> str:
        """Where the optimizer's states are: none (on the device), cpu or nvme."""
        return self.plan.options.train.offload_kind

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def allocated(self) -> float:
        """Bytes of its tensors: what torch counts as allocated, without driver and allocator."""
        return self.total - sum(self.memory.get(name, 0.0) for name in _NO_TENSORS)

    @cached_property
    def verdict(self) -> str:
        """Whether the plan fits."""
        size, setting = np.array([self.total]), self.setting
        return str(verdict(size, setting.capacity, setting.machine).item())

    @property
    def over(self) -> float:
        """Bytes above the usable share of the memory; negative if the plan fits."""
        return self.total - self.setting.capacity

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.plan.batch.tokens / self.step / self.plan.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs over the hardware's peak; recomputation never counts, nor do weight gradients
        that frozen weights do not have."""
        return self._utilisation(computed_flops(self.plan.shape, self.plan.batch.seq))

    @property
    def hfu(self) -> float:
        """The same with the FLOPs of recomputation: what the hardware computes."""
        plan, seq = self.plan, self.plan.batch.seq
        rules = ((layers, plan.recompute.of(stage)) for stage, layers in enumerate(plan.stages))
        again = repeated_flops(plan.shape, seq, rules)
        return self._utilisation(computed_flops(plan.shape, seq) + again)

    def _utilisation(self, flops: float) -> float:
        """Of the hardware's peak, by so many FLOPs per token."""
        return flops * self.tokens_per_s_per_gpu / self.setting.machine.peak(self.setting.precision)

    def breakdown(self) -> Seconds:
        """The step by what it is spent on, without parts of no time."""
        parts = dict(self.parts)
        totals = {"compute": sum(parts.pop(name, 0.0) for name in COMPUTE)}
        names = ("rounding", "launch", "bubble", *TRAFFIC, "optimizer", "offload", "fixed")
        for name in names:
            totals[name] = parts.pop(name, 0.0)
        assert not parts, f"parts without a name on screen: {', '.join(parts)}"
        return {name: seconds for name, seconds in totals.items() if seconds > 1e-9 * self.step}

    def days(self, tokens: float) -> float:
        """Days of a training run over so many tokens."""
        return tokens / self.plan.batch.tokens * self.step / 86_400

    def gpu_hours(self, tokens: float) -> float:
        """GPU-hours of a training run over so many tokens."""
        return self.days(tokens) * 24 * self.plan.layout.world


class PlanMemory(NamedTuple):
    """Peak bytes of a plan: of the fullest rank by category, in host memory, and on disks."""

    device: Bytes
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.device.values())


def plan_memory(
    plan: Plan, setting: EstimateSetting, enough: float = np.inf, ranks: PlanRanks | None = None
) -> PlanMemory:
    """Estimate the peak memory of the plan: of its fullest rank, or of one with more than `enough`
    bytes. `ranks`: those of this plan, if others ask for them too."""
    train = plan.options.train
    ours = setting.stack.runs_plans  # other people's stacks cut stages and cache in their own ways
    device = (ranks or PlanRanks(plan, setting)).fullest(enough) if ours else Bytes()
    if ours and train.offload_kind == "none" and train.offload_grads == "none":
        return PlanMemory(device)
    peak = peak_memory(*plan_arguments(plan, setting), spans=plan.stages)
    if not ours:
        device = {name: float(np.asarray(amount).item()) for name, amount in peak.parts.items()}
    return PlanMemory(
        device, *(float(np.asarray(amount).item()) for amount in (peak.host, peak.disk))
    )


def estimate_plan(
    plan: Plan,
    setting: EstimateSetting,
    memory: PlanMemory | None = None,
    makespan: float | None = None,
) -> Estimate:
    """Simulate a step of the plan and estimate its peak memory, unless they are known."""
    memory = memory or plan_memory(plan, setting)
    simulated = simulate_step(plan, setting, makespan=makespan)
    require_possible_memory(job_name(plan, setting), memory.device)
    return Estimate(
        plan=plan,
        setting=setting,
        step=simulated.step,
        parts=simulated.parts,
        bubble=simulated.bubble,
        memory=memory.device,
        host=memory.host,
        disk=memory.disk,
        simulated=simulated,
    )


class PlannedAction(NamedTuple):
    """One planned action of a rank: seconds from the start of the step, and bytes meanwhile."""

    action: str
    start: float
    end: float
    bytes: float


def rank_timeline(plan: Plan, setting: EstimateSetting, rank: int) -> list[PlannedAction]:
    """The step of one rank: activations follow its microbatches, all else is constant."""
    pp_rank = plan.layout.coord(rank).pp
    parts, played = rank_memory(plan, setting, rank), simulate_step(plan, setting).timeline
    levels = memory_levels(plan.schedule.order[pp_rank])
    stays = sum(num_bytes for name, num_bytes in parts.items() if name not in _NOT_STATIC)
    most = max(levels)
    rows = zip(
        plan.schedule.order[pp_rank],
        played.starts[pp_rank],
        played.ends[pp_rank],
        levels,
        strict=True,
    )
    return [
        PlannedAction(str(step), start, end, stays + parts["activations"] * level / most)
        for step, start, end, level in rows
    ]

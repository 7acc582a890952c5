"""The estimate of one resolved plan: a simulated step, peak memory, and what follows from both.

Bounds rank millions of layouts; what is printed or written is simulated. The clock runs the plan's
own schedule with the seconds of each of its stages, head included. What surrounds the pipeline
(data axis, optimizer, fixed seconds) comes from `cost.step_time`.

`rebalance_stages` moves layers between the stages of a plan, one by one, as long as the longest
path gets shorter; the simulation decides whether that was a gain. No stage gets more layers than
the largest one has, and the first gets none, so memory is no worse.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np

from fivefold.core.count import training_flops
from fivefold.core.plan import Plan, resolve
from fivefold.core.schedule import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from fivefold.core.schedule.clock import Costs, Timeline, memory_levels, peak_activations, play
from fivefold.core.shape import LayerKind
from fivefold.cost import COMPUTE
from fivefold.cost.grid import OFFLOADS, grid_of_plan
from fivefold.cost.layer_time import LayerTimer, LayerTimes, TimeParts
from fivefold.cost.longest_paths import PATHS, ScheduleSize
from fivefold.cost.memory import peak_memory, rank_peak_memory, verdict
from fivefold.cost.pipeline_ranks import RankLayers, RankStage
from fivefold.cost.pipeline_time import pipeline_timer
from fivefold.cost.possible import require_possible_memory, require_possible_time
from fivefold.cost.step_time import launch_bound_layer, path_costs, step_time
from fivefold.planner.search import CostArguments, EstimateSetting

Seconds = dict[str, float]
# Parts of a step that no schedule changes.
_TRAFFIC = ("tp", "cp", "ep", "pp")
_AROUND = ("dp", "optimizer", "offload", "fixed")


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step: `parts` sum to `step`; `bubble` is the share in which ranks wait."""

    step: float
    parts: Seconds
    bubble: float
    timeline: Timeline


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


def _job(plan: Plan, setting: EstimateSetting, offload: str = "none") -> CostArguments:
    """The arguments of cost functions for one plan."""
    grid = replace(grid_of_plan(plan), offload=np.array([float(OFFLOADS.index(offload))]))
    return setting.with_keys(plan.options).arguments(plan.shape, grid, plan.batch.seq)


def simulate_step(
    plan: Plan,
    setting: EstimateSetting,
    offload: str = "none",
    measured: Mapping[int, MeasuredPasses] | None = None,
) -> SimulatedStep:
    """Simulate a step of the plan; stages that were `measured` take their measured compute time,
    and only their traffic is modelled."""
    job = _job(plan, setting, offload)
    work, around = LayerTimer(*job), step_time(*job)
    stages = _stages(plan, work)
    for number, passes in (measured or {}).items():
        stages[number] = _with_measured(stages[number], passes)
    costs = Costs(
        *(tuple(sum(part.values()) for part in column) for column in zip(*stages, strict=True)),
        transfer=(float(work.message().item()),) * len(stages),
    )
    timeline = play(plan.schedule, costs)
    parts = _busiest(timeline, stages)
    if plan.layout.pp > 1 and not plan.schedule.asynchronous:
        # Messages are visible at least in the fill and drain; the rest is waiting.
        waits = timeline.makespan - sum(parts.values())
        parts["pp"] = max(0.0, min(waits, 2 * (plan.layout.pp - 1) * costs.transfer[0]))
        parts["bubble"] = waits - parts["pp"]
    parts = {name: seconds * setting.stack.factor for name, seconds in parts.items()}
    known = around.parts
    parts |= {name: float(known[name].item()) for name in _AROUND if name in known}
    step = sum(parts.values())
    require_possible_time(_name(plan, setting), step, parts)
    return SimulatedStep(step, parts, parts.get("bubble", 0.0) / step, timeline)


def _name(plan: Plan, setting: EstimateSetting) -> str:
    """The job as errors name it."""
    return f"{plan.shape.name} on {setting.machine.name}, {plan.layout}, {plan.schedule.name}"


def rank_seconds_alone(plan: Plan, setting: EstimateSetting, rank: int) -> float:
    """Seconds of a step of one rank that never waits for others: its compute and its update."""
    job = _job(plan, setting)
    work, around = LayerTimer(*job), step_time(*job)
    stages, total = _stages(plan, work, apart=_TRAFFIC), 0.0
    for action in plan.schedule.actions(plan.layout.coord(rank).pp):
        stage = stages[action.stage]
        passes = {FORWARD: stage[:1], INPUT_GRAD: stage[1:2], WEIGHT_GRAD: stage[2:]}
        for part in passes.get(action.kind, stage[1:]):
            total += sum(each for name, each in part.items() if name not in _TRAFFIC)
    update = around.parts.get("optimizer")
    return total * setting.stack.factor + (0.0 if update is None else float(update.item()))


def _stages(plan: Plan, work: LayerTimer, apart: Collection[str] = ()) -> list[_Stage]:
    """Every stage of the plan, its layers without the parts in `apart`; the last one has the head
    and the MTP layers."""
    shape = plan.shape
    kinds: dict[LayerKind, LayerTimes] = {}
    found: list[_Stage] = []
    for layers in plan.stages:
        last = layers.stop == shape.layers
        numbers = [*layers, *([shape.layers - 1] * shape.mtp if last else [])]
        layer_times: list[LayerTimes] = []
        for i in numbers:
            kind = shape.layer_kind(i)
            if kind not in kinds:
                kinds[kind] = launch_bound_layer(work, i, apart)
            layer_times.append(kinds[kind])
        found.append(_joined([*layer_times, *([work.head()] if last else [])]))
    return found


def _with_measured(stage: _Stage, passes: MeasuredPasses) -> _Stage:
    """The modelled traffic of a stage, and the measured seconds in place of its compute."""
    return _Stage(
        *(
            {name: each for name, each in parts.items() if name in _TRAFFIC} | {"measured": seconds}
            for parts, seconds in zip(stage, passes, strict=True)
        )
    )


def _joined(layer_times: list[LayerTimes]) -> _Stage:
    return _Stage(
        _sum(each.forward for each in layer_times),
        _sum(part for each in layer_times for part in (each.inputs, each.again)),
        _sum(each.weights for each in layer_times),
    )


def _sum(parts: Iterable[TimeParts]) -> Seconds:
    found: defaultdict[str, float] = defaultdict(float)
    for each in parts:
        for name, seconds in each.items():
            found[name] += float(np.asarray(seconds).item())
    return dict(found)


def _busiest(timeline: Timeline, stages: list[_Stage]) -> Seconds:
    """Seconds of the busiest pipeline rank in a step, by part."""
    schedule = timeline.schedule
    busy = [sum(e) - sum(s) for s, e in zip(timeline.starts, timeline.ends, strict=True)]
    actions = schedule.actions(busy.index(max(busy)))
    times = Counter((action.stage, action.kind) for action in actions)
    found: defaultdict[str, float] = defaultdict(float)
    for (number, kind), count in times.items():
        stage = stages[number]
        shares = {FORWARD: (stage.forward,), INPUT_GRAD: (stage.backward,)}
        shares[WEIGHT_GRAD] = (stage.weight,)
        for part in shares.get(kind, (stage.backward, stage.weight)):
            for name, seconds in part.items():
                found[name] += count * seconds
    return dict(found)


# --- Time and memory of a plan

Bytes = dict[str, float]
_NOT_STATIC = ("activations", "context", "margin")  # per microbatch, or of no tensor
TRAFFIC = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class Estimate:
    """One plan on one machine; `parts` sum to `step`, `memory` to the bytes of the fullest rank."""

    plan: Plan
    setting: EstimateSetting
    offload: str
    step: float
    parts: Seconds
    bubble: float
    memory: Bytes
    host: float  # bytes that offload keeps in host memory
    disk: float  # and on local disks
    verdict: str
    timeline: Timeline = field(repr=False)  # of the simulated pipeline

    @property
    def name(self) -> str:
        """The job as errors name it."""
        return _name(self.plan, self.setting)

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def allocated(self) -> float:
        """Bytes of its tensors: what torch counts as allocated, without driver and allocator."""
        return self.total - self.memory["context"] - self.memory["margin"]

    @property
    def over(self) -> float:
        """Bytes above the capacity; negative if the plan fits."""
        return self.total - self.setting.capacity

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.plan.batch.tokens / self.step / self.plan.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs over the hardware's peak; recomputation never counts."""
        flops = training_flops(self.plan.shape, self.plan.batch.seq).total
        return flops * self.tokens_per_s_per_gpu / self.setting.machine.peak(self.setting.precision)

    def breakdown(self) -> Seconds:
        """The step by what it is spent on, without parts of no time."""
        parts = dict(self.parts)
        found = {"compute": sum(parts.pop(name, 0.0) for name in COMPUTE)}
        for name in ("launch", "bubble", *TRAFFIC, "optimizer", "offload", "fixed"):
            found[name] = parts.pop(name, 0.0)
        assert not parts, f"parts without a name on screen: {', '.join(parts)}"
        return {name: seconds for name, seconds in found.items() if seconds > 1e-9 * self.step}

    def days(self, tokens: float) -> float:
        """Days of a training run over so many tokens."""
        return tokens / self.plan.batch.tokens * self.step / 86_400

    def gpu_hours(self, tokens: float) -> float:
        """GPU-hours of a training run over so many tokens."""
        return self.days(tokens) * 24 * self.plan.layout.world


def estimate_plan(plan: Plan, setting: EstimateSetting, offload: str = "none") -> Estimate:
    """Simulate a step of the plan and estimate its peak memory."""
    peak = peak_memory(*_job(plan, setting, offload), spans=plan.stages)
    simulated = simulate_step(plan, setting, offload)
    memory = {name: float(np.asarray(each).item()) for name, each in peak.parts.items()}
    if plan.schedule.asynchronous:  # its ranks differ by the weight versions that they stash
        memory = max(memory_by_pipeline_rank(plan, setting), key=lambda one: sum(one.values()))
    require_possible_memory(_name(plan, setting), memory)
    total = np.array([sum(memory.values())])
    return Estimate(
        plan=plan,
        setting=setting,
        offload=offload,
        step=simulated.step,
        parts=simulated.parts,
        bubble=simulated.bubble,
        memory=memory,
        host=float(np.asarray(peak.host).item()),
        disk=float(np.asarray(peak.disk).item()),
        verdict=str(verdict(total, peak.band, setting.machine).item()),
        timeline=simulated.timeline,
    )


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Peak bytes of one rank by category, with the microbatches that its schedule has in flight."""
    return memory_by_pipeline_rank(plan, setting)[plan.layout.coord(rank).pp]


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same for every rank of one pipeline."""
    shape, placement = plan.shape, plan.schedule.placement
    ranks = [[plan.stages[n] for n in placement.stages_of(i)] for i in range(plan.layout.pp)]
    copies = 2 if placement.mirrored else 1
    layers = [sum(map(len, stages)) for stages in ranks]
    routed = [sum(shape.is_moe_layer(i) for stage in stages for i in stage) for stages in ranks]
    stage = RankStage(
        RankLayers(np.array(layers) / copies, np.array(routed) / copies),
        copies=np.array([float(copies)]),
        flight=np.array(peak_activations(plan.schedule)),
        embedding=np.array([float(any(s.start == 0 for s in stages)) for stages in ranks]),
        head=np.array([float(any(s.stop == shape.layers for s in stages)) for stages in ranks]),
    )
    parts = rank_peak_memory(*_job(plan, setting), stage)
    if plan.schedule.asynchronous:
        # An asynchronous rank stashes the weights with which microbatches in flight have begun.
        parts = {**parts, "weights": parts["weights"] * np.array(plan.schedule.weight_versions)}
    columns = {name: np.broadcast_to(each, plan.layout.pp) for name, each in parts.items()}
    return [{name: float(each[i]) for name, each in columns.items()} for i in range(len(ranks))]


class PlannedAction(NamedTuple):
    """One planned action of a rank: seconds from the start of the step, and bytes meanwhile."""

    action: str
    start: float
    end: float
    bytes: float


def rank_timeline(plan: Plan, setting: EstimateSetting, rank: int) -> list[PlannedAction]:
    """The step of one rank: activations follow its microbatches, all else is constant."""
    place = plan.layout.coord(rank).pp
    parts, played = rank_memory(plan, setting, rank), simulate_step(plan, setting).timeline
    levels = memory_levels(plan.schedule.order[place])
    stays = sum(each for name, each in parts.items() if name not in _NOT_STATIC)
    most = max(levels)
    rows = zip(
        plan.schedule.order[place], played.starts[place], played.ends[place], levels, strict=True
    )
    return [
        PlannedAction(str(step), start, end, stays + parts["activations"] * level / most)
        for step, start, end, level in rows
    ]


# --- Rebalanced stages

StageSizes = tuple[int, ...]  # layers of each stage
_MOST_MOVES = 8
_LEAST_GAIN = 1e-3  # share of a step: less is not worth a plan with explicit stages


def rebalance_stages(chosen: Estimate) -> Estimate:
    """The plan with other stages, if they make it faster."""
    plan = chosen.plan
    if plan.layout.pp == 1 or not plan.family.is_named or plan.stage_layers is not None:
        return chosen
    given = tuple(map(len, plan.stages))
    best = _best_sizes(chosen, given)
    if best == given:
        return chosen
    options = replace(plan.options, stage_layers=",".join(map(str, best)))
    other = estimate_plan(resolve(options), chosen.setting, chosen.offload)
    return other if other.step < (1 - _LEAST_GAIN) * chosen.step else chosen


def _best_sizes(chosen: Estimate, given: StageSizes) -> StageSizes:
    """Make the best move, as long as one helps."""
    seconds = _LongestPath(chosen)
    best, least = given, seconds.of(given)
    for _ in range(_MOST_MOVES):
        found = {sizes: seconds.of(sizes) for sizes in _moves(best, given)}
        if not found or min(found.values()) >= least:
            break
        best = min(found, key=found.__getitem__)
        least = found[best]
    return best


def _moves(sizes: StageSizes, given: StageSizes) -> Iterator[StageSizes]:
    """Move a layer from an end or a full stage to the last stage or one that has room."""
    last, most = len(sizes) - 1, max(given)
    full = [place for place, size in enumerate(sizes) if size == most]
    room = [place for place in range(1, len(sizes)) if sizes[place] < most]
    givers = {0, last, *full[:1], *full[-1:]}
    takers = {last, *room[:2], *room[-2:]} & set(room)
    if sizes[0] < given[0]:
        takers.add(0)
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            step = {giver: -1, taker: 1}
            yield tuple(size + step.get(place, 0) for place, size in enumerate(sizes))


class _LongestPath:
    """Seconds of the longest path of one plan with any stage sizes."""

    def __init__(self, chosen: Estimate) -> None:
        plan, layout, batch = chosen.plan, chosen.plan.layout, chosen.plan.batch
        costs = path_costs(LayerTimer(*_job(plan, chosen.setting)))
        self.costs = np.array([float(np.asarray(each).item()) for each in costs])[:, None]
        self.timer, self.paths = pipeline_timer(plan.shape, batch.seq), PATHS[plan.family.paths]
        self.size = ScheduleSize(layout.pp, layout.chunks, batch.microbatches, self.costs)

    def of(self, sizes: StageSizes) -> float:
        spans = [range(start, stop) for start, stop in pairwise((0, *accumulate(sizes)))]
        return float((self.paths(self.timer.stages(spans), self.size) @ self.costs).max())

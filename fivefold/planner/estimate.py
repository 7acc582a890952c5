"""One step of a resolved plan, played: its own stages, its own schedule, its own messages.

Closed forms rank millions of layouts; what is printed or written is played. The clock runs the
schedule with the seconds of each real stage, head and all; what surrounds the pipeline (data
ranks, optimizer, what is fixed) is as the closed forms have it.
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
from fivefold.cost.grid import OFFLOADS, grid_of_plan
from fivefold.cost.layer_time import LayerTimer, LayerTimes, TimeParts
from fivefold.cost.longest_paths import PATHS, ScheduleSize
from fivefold.cost.memory import peak_memory, rank_peak_memory, verdict
from fivefold.cost.pipeline_ranks import RankLayers, RankStage
from fivefold.cost.pipeline_time import pipeline_timer
from fivefold.cost.step_time import launch_bound_layer, path_costs, step_time
from fivefold.planner.search import EstimateSetting

Seconds = dict[str, float]
# Parts of the closed forms that no schedule changes.
_TRAFFIC = ("tp", "cp", "ep", "pp")
_AROUND = ("dp", "optimizer", "offload", "fixed")


@dataclass(frozen=True)
class SimulatedStep:
    """A step as it was played: `parts` sum to `step`; `bubble` is the share that ranks wait."""

    step: float
    parts: Seconds
    bubble: float
    timeline: Timeline


class _Stage(NamedTuple):
    """Seconds of one microbatch in a stage, by part."""

    forward: Seconds
    backward: Seconds  # gradients of inputs, with what is computed again
    weight: Seconds


class MeasuredPasses(NamedTuple):
    """Seconds that a stage was measured to compute for one microbatch."""

    forward: float
    backward: float
    weight: float = 0.0


def simulate_step(
    plan: Plan,
    setting: EstimateSetting,
    offload: str = "none",
    measured: Mapping[int, MeasuredPasses] | None = None,
) -> SimulatedStep:
    """Play a step of the plan; stages that were `measured` compute as long as they did, and only
    their traffic is modelled."""
    stack, number = setting.stack, float(OFFLOADS.index(offload))
    grid = replace(grid_of_plan(plan), offload=np.array([number]))
    asked = (plan.shape, setting.machine, stack, grid, plan.batch.seq, *setting.how)
    work, around = LayerTimer(*asked), step_time(*asked)
    stages = _stages(plan, work)
    for number, passes in (measured or {}).items():
        stages[number] = _anchored(stages[number], passes)
    costs = Costs(
        *(tuple(sum(part.values()) for part in column) for column in zip(*stages, strict=True)),
        transfer=(float(work.message().item()),) * len(stages),
    )
    timeline = play(plan.schedule, costs)
    parts = _busiest(timeline, stages)
    if plan.layout.pp > 1 and not plan.schedule.asynchronous:
        # Messages show at least while the pipeline fills and drains; the rest is waiting.
        waits = timeline.makespan - sum(parts.values())
        parts["pp"] = min(waits, 2 * (plan.layout.pp - 1) * costs.transfer[0])
        parts["bubble"] = waits - parts["pp"]
    parts = {name: seconds * stack.factor for name, seconds in parts.items()}
    known = around.parts
    parts |= {name: float(known[name].item()) for name in _AROUND if name in known}
    step = sum(parts.values())
    return SimulatedStep(step, parts, parts.get("bubble", 0.0) / step, timeline)


def rank_seconds_alone(plan: Plan, setting: EstimateSetting, rank: int) -> float:
    """Seconds that a rank takes for a step when nobody has to be waited for: what it computes, and
    its update."""
    asked = (plan.shape, setting.machine, setting.stack, grid_of_plan(plan), plan.batch.seq)
    work, around = LayerTimer(*asked, *setting.how), step_time(*asked, *setting.how)
    stages, total = _stages(plan, work, apart=_TRAFFIC), 0.0
    for action in plan.schedule.actions(plan.layout.coord(rank).pp):
        stage = stages[action.stage]
        passes = {FORWARD: stage[:1], INPUT_GRAD: stage[1:2], WEIGHT_GRAD: stage[2:]}
        for part in passes.get(action.kind, stage[1:]):
            total += sum(each for name, each in part.items() if name not in _TRAFFIC)
    update = around.parts.get("optimizer")
    return total * setting.stack.factor + (0.0 if update is None else float(update.item()))


def _stages(plan: Plan, work: LayerTimer, apart: Collection[str] = ()) -> list[_Stage]:
    """Every stage of the plan, its layers without the parts named; the last has the head and what
    predicts further tokens."""
    shape = plan.shape
    kinds: dict[LayerKind, LayerTimes] = {}
    found: list[_Stage] = []
    for layers in plan.stages:
        last = layers.stop == shape.layers
        numbers = [*layers, *([shape.layers - 1] * shape.mtp if last else [])]
        held: list[LayerTimes] = []
        for i in numbers:
            kind = shape.layer_kind(i)
            if kind not in kinds:
                kinds[kind] = launch_bound_layer(work, i, apart)
            held.append(kinds[kind])
        found.append(_joined([*held, *([work.head()] if last else [])]))
    return found


def _anchored(stage: _Stage, passes: MeasuredPasses) -> _Stage:
    """The traffic of a stage, and what was measured in the place of all that it computes."""
    return _Stage(
        *(
            {name: each for name, each in parts.items() if name in _TRAFFIC} | {"measured": seconds}
            for parts, seconds in zip(stage, passes, strict=True)
        )
    )


def _joined(held: list[LayerTimes]) -> _Stage:
    return _Stage(
        _sum(each.forward for each in held),
        _sum(part for each in held for part in (each.inputs, each.again)),
        _sum(each.weights for each in held),
    )


def _sum(parts: Iterable[TimeParts]) -> Seconds:
    found: defaultdict[str, float] = defaultdict(float)
    for each in parts:
        for name, seconds in each.items():
            found[name] += float(np.asarray(seconds).item())
    return dict(found)


def _busiest(timeline: Timeline, stages: list[_Stage]) -> Seconds:
    """What the busiest pipeline rank does in a step, by part."""
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


# What a plan is expected to take: a played step, bytes by category, and what follows from both.


Bytes = dict[str, float]
_COMES = ("activations", "context", "margin")  # with microbatches, or not a tensor's
COMPUTE = ("products", "attention", "experts", "elementwise", "head")
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
    timeline: Timeline = field(repr=False)  # of the pipeline, as it was played

    @property
    def total(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def allocated(self) -> float:
        """Bytes of it that tensors have: what torch counts, without the driver's and the
        allocator's own."""
        return self.total - self.memory["context"] - self.memory["margin"]

    @property
    def over(self) -> float:
        """Bytes above what may be used; below zero where it fits."""
        return self.total - self.setting.capacity

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.plan.batch.tokens / self.step / self.plan.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs over those of the hardware in the time; recomputation never counts."""
        flops = training_flops(self.plan.shape, self.plan.batch.seq).total
        return flops * self.tokens_per_s_per_gpu / self.setting.machine.peak(self.setting.precision)

    def breakdown(self) -> Seconds:
        """The step by what it is spent on; what is nothing is left out."""
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
    """Play the plan and weigh it."""
    grid = replace(grid_of_plan(plan), offload=np.array([float(OFFLOADS.index(offload))]))
    asked = (plan.shape, setting.machine, setting.stack, grid, plan.batch.seq, *setting.how)
    books, played = peak_memory(*asked, spans=plan.stages), simulate_step(plan, setting, offload)
    host = float(np.asarray(books.host).item())
    memory = {name: float(np.asarray(each).item()) for name, each in books.parts.items()}
    if plan.schedule.asynchronous:  # which no search weighs: its ranks differ by what they stash
        memory = max(memory_by_pipeline_rank(plan, setting), key=lambda held: sum(held.values()))
    total = np.array([sum(memory.values())])
    return Estimate(
        plan=plan,
        setting=setting,
        offload=offload,
        step=played.step,
        parts=played.parts,
        bubble=played.bubble,
        memory=memory,
        host=host,
        disk=float(np.asarray(books.disk).item()),
        verdict=str(verdict(total, books.band, setting.machine).item()),
        timeline=played.timeline,
    )


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Bytes by category that one rank has at its fullest; its microbatches are the schedule's."""
    return memory_by_pipeline_rank(plan, setting)[plan.layout.coord(rank).pp]


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same of a rank at each place of the pipeline, all at once."""
    shape, placement = plan.shape, plan.schedule.placement
    held = [[plan.stages[number] for number in placement.held(i)] for i in range(plan.layout.pp)]
    copies = 2 if placement.mirrored else 1
    layers = [sum(map(len, stages)) for stages in held]
    routed = [sum(shape.is_moe_layer(i) for stage in stages for i in stage) for stages in held]
    stage = RankStage(
        RankLayers(np.array(layers) / copies, np.array(routed) / copies),
        copies=np.array([float(copies)]),
        flight=np.array(peak_activations(plan.schedule)),
        embedding=np.array([float(any(s.start == 0 for s in stages)) for stages in held]),
        head=np.array([float(any(s.stop == shape.layers for s in stages)) for stages in held]),
    )
    asked = (
        shape,
        setting.machine,
        setting.stack,
        grid_of_plan(plan),
        plan.batch.seq,
        *setting.how,
    )
    parts = rank_peak_memory(*asked, stage)
    if plan.schedule.asynchronous:
        # An asynchronous rank keeps the weights that microbatches under way have begun with.
        parts = {**parts, "weights": parts["weights"] * np.array(plan.schedule.weight_versions)}
    columns = {name: np.broadcast_to(each, plan.layout.pp) for name, each in parts.items()}
    return [{name: float(each[i]) for name, each in columns.items()} for i in range(len(held))]


class PlannedAction(NamedTuple):
    """One action of a rank as planned: seconds from the start of the step, and bytes meanwhile."""

    action: str
    start: float
    end: float
    bytes: float


def rank_timeline(plan: Plan, setting: EstimateSetting, rank: int) -> list[PlannedAction]:
    """The step of one rank: activations come and go with its microbatches, all else stays."""
    place = plan.layout.coord(rank).pp
    parts, played = rank_memory(plan, setting, rank), simulate_step(plan, setting).timeline
    levels = memory_levels(plan.schedule.order[place])
    stays = sum(each for name, each in parts.items() if name not in _COMES)
    most = max(levels)
    rows = zip(
        plan.schedule.order[place], played.starts[place], played.ends[place], levels, strict=True
    )
    return [
        PlannedAction(str(step), start, end, stays + parts["activations"] * level / most)
        for step, start, end, level in rows
    ]


# Stages cut anew for one plan: by its seconds, not by FLOPs, and by the whole of its schedule.
#
# Layers move one by one to where the longest path gets shorter, and the clock decides whether
# that was a gain. No stage gets more layers than the fullest has, and the first none, so that
# memory is no worse. Recomputation is the same in every stage: the runtime has no other.


Cut = tuple[int, ...]
_MOST_MOVES = 8
_LEAST_GAIN = 1e-3  # of a step: less is not worth a plan with stages of its own


def rebalance_stages(chosen: Estimate) -> Estimate:
    """The plan with other stages, where they make it faster."""
    plan = chosen.plan
    if plan.layout.pp == 1 or not plan.family.is_named or plan.stage_layers is not None:
        return chosen
    given = tuple(map(len, plan.stages))
    best = _descended(chosen, given)
    if best == given:
        return chosen
    options = replace(plan.options, stage_layers=",".join(map(str, best)))
    played = estimate_plan(resolve(options), chosen.setting, chosen.offload)
    return played if played.step < (1 - _LEAST_GAIN) * chosen.step else chosen


def _descended(chosen: Estimate, given: Cut) -> Cut:
    """Move after move, as long as one helps."""
    seconds = _Seconds(chosen)
    best, least = given, seconds.of(given)
    for _ in range(_MOST_MOVES):
        found = {cut: seconds.of(cut) for cut in _moves(best, given)}
        if not found or min(found.values()) >= least:
            break
        best = min(found, key=found.__getitem__)
        least = found[best]
    return best


def _moves(cut: Cut, given: Cut) -> Iterator[Cut]:
    """A layer from an end or a full stage to an end or to one that has room."""
    last, most = len(cut) - 1, max(given)
    full = [place for place, size in enumerate(cut) if size == most]
    room = [place for place in range(1, len(cut)) if cut[place] < most]
    givers = {0, last, *full[:1], *full[-1:]}
    takers = {last, *room[:2], *room[-2:]} & set(room)
    if cut[0] < given[0]:
        takers.add(0)
    for giver, taker in product(givers, takers):
        if giver != taker and cut[giver] > 1:
            step = {giver: -1, taker: 1}
            yield tuple(size + step.get(place, 0) for place, size in enumerate(cut))


class _Seconds:
    """The longest path of one plan under any cut."""

    def __init__(self, chosen: Estimate) -> None:
        plan, setting = chosen.plan, chosen.setting
        seq, batch = plan.batch.seq, plan.batch
        asked = (plan.shape, setting.machine, setting.stack, grid_of_plan(plan), seq)
        costs = path_costs(LayerTimer(*asked, *setting.how))
        self.costs = np.array([float(np.asarray(each).item()) for each in costs])[:, None]
        self.dealer, self.form = pipeline_timer(plan.shape, seq), PATHS[plan.family.paths]
        layout = plan.layout
        self.numbers = ScheduleSize(layout.pp, layout.chunks, batch.microbatches, self.costs)

    def of(self, cut: Cut) -> float:
        spans = [range(start, stop) for start, stop in pairwise((0, *accumulate(cut)))]
        return float((self.form(self.dealer.stages(spans), self.numbers) @ self.costs).max())

"""One step of a resolved plan, played: its own stages, its own schedule, its own messages.

Closed forms rank millions of layouts; what is printed or written is played. The clock runs the
schedule with the seconds of each real stage, head and all; what surrounds the pipeline (data
ranks, optimizer, what is fixed) is as the closed forms have it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fivefold.core.clock import Timeline, play
from fivefold.core.estimate.grid import OFFLOADS, of_plan
from fivefold.core.estimate.layer import Clockwork, Parts, Times
from fivefold.core.estimate.search import Setting
from fivefold.core.estimate.timing import floored, timing
from fivefold.core.plan import Plan
from fivefold.core.schedule.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from fivefold.core.schedule.costs import Costs

Seconds = dict[str, float]
# Parts of the closed forms that no schedule changes.
_TRAFFIC = ("tp", "cp", "ep", "pp")
_AROUND = ("dp", "optimizer", "offload", "fixed")


@dataclass(frozen=True)
class Forecast:
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


class Passes(NamedTuple):
    """Seconds that a stage was measured to compute for one microbatch."""

    forward: float
    backward: float
    weight: float = 0.0


def forecast(
    plan: Plan,
    setting: Setting,
    offload: str = "none",
    measured: Mapping[int, Passes] | None = None,
) -> Forecast:
    """Play a step of the plan; stages that were `measured` compute as long as they did, and only
    their traffic is modelled."""
    stack, number = setting.stack, float(OFFLOADS.index(offload))
    grid = replace(of_plan(plan), offload=np.array([number]))
    asked = (plan.shape, setting.machine, stack, grid, plan.batch.seq, *setting.how)
    work, around = Clockwork(*asked), timing(*asked)
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
    return Forecast(step, parts, parts.get("bubble", 0.0) / step, timeline)


def alone(plan: Plan, setting: Setting, rank: int) -> float:
    """Seconds that a rank takes for a step when nobody has to be waited for: what it computes, and
    its update."""
    asked = (plan.shape, setting.machine, setting.stack, of_plan(plan), plan.batch.seq)
    work, around = Clockwork(*asked, *setting.how), timing(*asked, *setting.how)
    stages, total = _stages(plan, work, apart=_TRAFFIC), 0.0
    for action in plan.schedule.actions(plan.layout.coord(rank).pp):
        stage = stages[action.stage]
        passes = {FORWARD: stage[:1], INPUT_GRAD: stage[1:2], WEIGHT_GRAD: stage[2:]}
        for part in passes.get(action.kind, stage[1:]):
            total += sum(each for name, each in part.items() if name not in _TRAFFIC)
    update = around.parts.get("optimizer")
    return total * setting.stack.factor + (0.0 if update is None else float(update.item()))


def _stages(plan: Plan, work: Clockwork, apart: Collection[str] = ()) -> list[_Stage]:
    """Every stage of the plan, its layers without the parts named; the last has the head and what
    predicts further tokens."""
    shape = plan.shape
    kinds: dict[tuple[bool, bool], Times] = {}
    found: list[_Stage] = []
    for layers in plan.stages:
        last = layers.stop == shape.layers
        numbers = [*layers, *([shape.layers - 1] * shape.mtp if last else [])]
        held: list[Times] = []
        for i in numbers:
            kind = (shape.is_moe_layer(i), shape.is_global_layer(i))
            if kind not in kinds:
                kinds[kind] = floored(work, i, apart)
            held.append(kinds[kind])
        found.append(_joined([*held, *([work.head()] if last else [])]))
    return found


def _anchored(stage: _Stage, passes: Passes) -> _Stage:
    """The traffic of a stage, and what was measured in the place of all that it computes."""
    return _Stage(
        *(
            {name: each for name, each in parts.items() if name in _TRAFFIC} | {"measured": seconds}
            for parts, seconds in zip(stage, passes, strict=True)
        )
    )


def _joined(held: list[Times]) -> _Stage:
    return _Stage(
        _sum(each.forward for each in held),
        _sum(part for each in held for part in (each.inputs, each.again)),
        _sum(each.weights for each in held),
    )


def _sum(parts: Iterable[Parts]) -> Seconds:
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

"""What a plan is expected to take: a played step, bytes by category, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fivefold.core.clock import Timeline, memory_levels, peak_activations
from fivefold.core.count import training_flops
from fivefold.core.estimate.ends import Layers, Stage
from fivefold.core.estimate.grid import OFFLOADS, of_plan
from fivefold.core.estimate.ledger import ledger, rank_parts, verdict
from fivefold.core.estimate.search import Setting
from fivefold.core.estimate.simulate import Seconds, forecast
from fivefold.core.plan import Plan

Bytes = dict[str, float]
_COMES = ("activations", "context", "margin")  # with microbatches, or not a tensor's
COMPUTE = ("products", "attention", "experts", "elementwise", "head")
TRAFFIC = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class Outlook:
    """One plan on one machine; `parts` sum to `step`, `memory` to the bytes of the fullest rank."""

    plan: Plan
    setting: Setting
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


def outlook(plan: Plan, setting: Setting, offload: str = "none") -> Outlook:
    """Play the plan and weigh it."""
    grid = replace(of_plan(plan), offload=np.array([float(OFFLOADS.index(offload))]))
    asked = (plan.shape, setting.machine, setting.stack, grid, plan.batch.seq, *setting.how)
    books, played = ledger(*asked, spans=plan.stages), forecast(plan, setting, offload)
    host = float(np.asarray(books.host).item())
    memory = {name: float(np.asarray(each).item()) for name, each in books.parts.items()}
    if plan.schedule.asynchronous:  # which no search weighs: its ranks differ by what they stash
        memory = max(held_by_places(plan, setting), key=lambda held: sum(held.values()))
    total = np.array([sum(memory.values())])
    return Outlook(
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


def held_by(plan: Plan, setting: Setting, rank: int) -> Bytes:
    """Bytes by category that one rank has at its fullest; its microbatches are the schedule's."""
    return held_by_places(plan, setting)[plan.layout.coord(rank).pp]


def held_by_places(plan: Plan, setting: Setting) -> list[Bytes]:
    """The same of a rank at each place of the pipeline, all at once."""
    shape, placement = plan.shape, plan.schedule.placement
    held = [[plan.stages[number] for number in placement.held(i)] for i in range(plan.layout.pp)]
    copies = 2 if placement.mirrored else 1
    layers = [sum(map(len, stages)) for stages in held]
    routed = [sum(shape.is_moe_layer(i) for stage in stages for i in stage) for stages in held]
    stage = Stage(
        Layers(np.array(layers) / copies, np.array(routed) / copies),
        copies=np.array([float(copies)]),
        flight=np.array(peak_activations(plan.schedule)),
        embedding=np.array([float(any(s.start == 0 for s in stages)) for stages in held]),
        head=np.array([float(any(s.stop == shape.layers for s in stages)) for stages in held]),
    )
    asked = (shape, setting.machine, setting.stack, of_plan(plan), plan.batch.seq, *setting.how)
    parts = rank_parts(*asked, stage)
    if plan.schedule.asynchronous:
        # An asynchronous rank keeps the weights that microbatches under way have begun with.
        parts = {**parts, "weights": parts["weights"] * np.array(plan.schedule.weight_versions)}
    columns = {name: np.broadcast_to(each, plan.layout.pp) for name, each in parts.items()}
    return [{name: float(each[i]) for name, each in columns.items()} for i in range(len(held))]


class Planned(NamedTuple):
    """One action of a rank as planned: seconds from the start of the step, and bytes meanwhile."""

    action: str
    start: float
    end: float
    bytes: float


def timeline_of(plan: Plan, setting: Setting, rank: int) -> list[Planned]:
    """The step of one rank: activations come and go with its microbatches, all else stays."""
    place = plan.layout.coord(rank).pp
    parts, played = held_by(plan, setting, rank), forecast(plan, setting).timeline
    levels = memory_levels(plan.schedule.order[place])
    stays = sum(each for name, each in parts.items() if name not in _COMES)
    most = max(levels)
    rows = zip(
        plan.schedule.order[place], played.starts[place], played.ends[place], levels, strict=True
    )
    return [
        Planned(str(step), start, end, stays + parts["activations"] * level / most)
        for step, start, end, level in rows
    ]

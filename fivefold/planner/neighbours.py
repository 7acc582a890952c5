"""Why a layout and not its neighbours: change one thing, choose the rest again, and compare.

The GPUs and the global batch stay the same. Where a degree is changed, another axis takes or gives
the factor. The choices that do not fix the degrees (ZeRO stage, recomputation, microbatch size,
schedule) are made again, by closed forms. So a neighbour is the best layout near the given one with
the changed value. Its step is simulated like those of a search, so that sentences and tables agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from fivefold.core import FivefoldError
from fivefold.core.layout import Layout, problems
from fivefold.core.plan import Plan, PlanOptions, key_request, resolve
from fivefold.core.schedule import choose
from fivefold.cost import OFFLOADS, RECOMPUTE, Array, LayoutGrid, grid_of_plan, schedule_index
from fivefold.cost.memory import peak_memory
from fivefold.cost.step import step_time
from fivefold.planner.estimate import Bytes, Estimate, Seconds, fullest_memory
from fivefold.planner.setting import EstimateSetting

PARTNERS = ("dp", "pp", "cp", "tp")  # axes that may take or give the factor, in this order
_MOST_MICROBATCH_SIZE = 8


@dataclass(frozen=True)
class Neighbour:
    """The best layout near a given one with one thing changed, and how much it differs.

    `refused`: the rule that forbids all such layouts.
    """

    axis: str
    value: int | str
    layout: Layout | None = None
    recompute: str = ""
    microbatch_size: int = 0
    schedule: str = ""
    refused: str = ""
    seconds: float = 0.0  # of a step, more than the given layout
    parts: Seconds | None = None  # the same by part
    over: float = 0.0  # bytes above the usable share of the memory
    memory: Bytes | None = None  # bytes more than the given layout, by category
    tier: str = ""  # the slowest link that the changed axis crosses


@dataclass(frozen=True)
class AxisComparison:
    """One axis (or other choice) of a layout, compared with its neighbours."""

    axis: str
    value: int | str
    tier: str  # the slowest link that it crosses, if it has more than one rank
    neighbours: tuple[Neighbour, ...]


class _Variant(NamedTuple):
    layout: Layout
    microbatch_size: int
    microbatches: int
    recompute: str
    schedule: str


class _Question(NamedTuple):
    """One changed value, with all layouts that have it, or the rule that forbids them."""

    axis: str
    value: int | str
    legal: list[_Variant]
    refused: str = ""


def compare_neighbours(chosen: Estimate) -> list[AxisComparison]:
    """Compare every axis of the layout with its neighbours."""
    comparisons = [
        (axis, value, tier, list(group)) for axis, value, tier, group in _questions(chosen)
    ]
    answers = iter(
        _answers(chosen, [question for *_, questions in comparisons for question in questions])
    )
    return [
        AxisComparison(axis, value, tier, tuple(next(answers) for _ in questions))
        for axis, value, tier, questions in comparisons
    ]


def _questions(chosen: Estimate) -> Iterator[tuple[str, int | str, str, Iterator[_Question]]]:
    """What to compare, each with its value and the link that it crosses."""
    plan, layout = chosen.plan, chosen.plan.layout
    for axis in ("tp", "cp", "pp", "ep") if plan.shape.moe else ("tp", "cp", "pp"):
        degree = getattr(layout, axis)
        near = (_degree_question(plan, axis, other) for other in _degrees(degree))
        # Where the axis is not used and cannot be, a neighbour tells nothing.
        near = (question for question in near if degree > 1 or question.legal)
        yield axis, degree, _tier(layout, axis, chosen.setting) if degree > 1 else "", near
    variants = [*_variants(plan, layout, [(plan.options.schedule, layout.chunks)])]
    variants = [new_variant for variant in variants for new_variant in _recomputed(variant)]
    if layout.shard * layout.cp > 1:
        near = (
            _choice_question(plan, "zero", zero, [v for v in variants if v.layout.zero == zero])
            for zero in range(4)
            if zero != layout.zero
        )
        yield "zero", layout.zero, _tier(layout, "fsdp", chosen.setting), near
    kind, rows = str(plan.recompute.usual), plan.batch.microbatch_size
    near = (
        _choice_question(plan, "recompute", other, [v for v in variants if v.recompute == other])
        for other in RECOMPUTE
        if other != kind
    )
    yield "recompute", kind, "", near
    sizes = [rows * 2, *([rows // 2] if rows % 2 == 0 else [])]
    near = (
        _choice_question(
            plan, "microbatch", size, [v for v in variants if v.microbatch_size == size]
        )
        for size in sizes
        if rows * plan.batch.microbatches % size == 0 and size <= _MOST_MICROBATCH_SIZE
    )
    yield "microbatch", rows, "", near


def _degrees(degree: int) -> list[int]:
    """1, half and twice the degree."""
    degrees = [1] if degree > 2 else []
    return [*degrees, *([degree // 2] if degree % 2 == 0 else []), 2 * degree]


def _variant_of(plan: Plan) -> _Variant:
    batch = plan.batch
    numbers = (batch.microbatch_size, batch.microbatches)
    return _Variant(plan.layout, *numbers, str(plan.recompute.usual), plan.options.schedule)


def _degree_question(plan: Plan, axis: str, degree: int) -> _Question:
    """All layouts near the plan's with this degree."""
    variants = [
        variant
        for layout in _exchanged(plan.layout, axis, degree)
        for variant in _variants(plan, layout, _schedules(plan, layout))
    ]
    question = _choice_question(plan, axis, degree, variants)
    # No rule depends on recomputation.
    question = question._replace(
        legal=[new_variant for variant in question.legal for new_variant in _recomputed(variant)]
    )
    refused = question.refused or "no axis can take or give the factor"
    return question if question.legal else question._replace(refused=refused)


def _choice_question(
    plan: Plan, axis: str, value: int | str, variants: list[_Variant]
) -> _Question:
    legal: list[_Variant] = []
    refused = ""
    families = {name: choose(name) for name in {variant.schedule for variant in variants}}
    for variant in variants:
        reasons = problems(
            variant.layout,
            plan.shape,
            seq=plan.batch.seq,
            batch=plan.batch.sequences,
            microbatch_size=variant.microbatch_size,
            microbatches=variant.microbatches,
            gpus=plan.layout.world,
            chunks=variant.layout.chunks,
            schedule=families[variant.schedule],
            **key_request(replace(plan.options, ep_nodes=_ep_nodes(plan, variant.layout))),
        )
        refused = refused or (reasons[0] if reasons else "")
        legal += [] if reasons else [variant]
    return _Question(axis, value, legal, "" if legal else refused)


def _recomputed(variant: _Variant) -> Iterator[_Variant]:
    """The same with every kind of recomputation."""
    return (variant._replace(recompute=kind) for kind in RECOMPUTE)


def _exchanged(layout: Layout, axis: str, degree: int) -> Iterator[Layout]:
    """Layouts with as many ranks, in which one other axis compensates the change."""
    if axis == "ep":
        yield replace(layout, ep=degree)
        return
    for partner in PARTNERS:
        if partner == axis:
            continue
        partner_degree = layout.dp if partner == "dp" else getattr(layout, partner)
        new_degree, remainder = divmod(partner_degree * getattr(layout, axis), degree)
        if remainder or not new_degree:
            continue
        if partner != "dp":
            yield replace(layout, **{axis: degree, partner: new_degree})
            continue
        outer = layout.replicate if new_degree % layout.replicate == 0 else 1
        yield replace(layout, **{axis: degree}, replicate=outer, shard=new_degree // outer)


def _variants(plan: Plan, layout: Layout, schedules: list[tuple[str, int]]) -> Iterator[_Variant]:
    """One layout with these schedules, and every ZeRO stage and microbatch size."""
    in_rank = plan.batch.sequences // layout.dp
    stages = range(4) if layout.shard * layout.cp > 1 else (0,)
    sizes = [n for n in range(1, _MOST_MICROBATCH_SIZE + 1) if in_rank and in_rank % n == 0]
    choices = product(schedules, stages, sizes or [1])
    for (schedule, chunks), zero, rows in choices:
        count = max(1, in_rank // rows)
        split = replace(layout, zero=zero, chunks=chunks)
        yield _Variant(split, rows, count, str(plan.recompute.usual), schedule)


def _schedules(plan: Plan, layout: Layout) -> list[tuple[str, int]]:
    """The plan's own schedule, also with its fewest chunks, and 1F1B."""
    own = plan.options.schedule
    if layout.pp == 1:
        return [(own, 1)]
    own_schedules = [(own, plan.layout.chunks)] if plan.layout.pp > 1 else []
    fewest = choose(own).default_chunks
    return list(dict.fromkeys([*own_schedules, (own, fewest), ("1f1b", 1)]))


def _ep_nodes(plan: Plan, layout: Layout) -> int | None:
    """Nodes of an ep group: the plan's, as long as ep is; else as the machine is built."""
    return plan.ep_nodes if layout.ep == plan.layout.ep else None


class _VariantCosts:
    """Seconds and bytes of several variants, all estimated at once; one value per variant."""

    def __init__(self, chosen: Estimate, variants: list[_Variant], simulated: bool = False) -> None:
        plan = chosen.plan
        grid = _grid(plan, variants, chosen.offload)
        setting = chosen.setting.with_keys(_options(plan))
        job = setting.arguments(plan.shape, grid, plan.batch.seq)
        self._times, self._peak = step_time(*job, simulated=simulated), peak_memory(*job)
        self._count = (len(variants),)

    @property
    def step(self) -> np.ndarray:
        return np.broadcast_to(self._times.step, self._count)

    @property
    def total(self) -> np.ndarray:
        """Bytes of the fullest rank."""
        return np.broadcast_to(self._peak.total, self._count)

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """The seconds by part."""
        return self._spread(self._times.parts)

    @cached_property
    def memory(self) -> dict[str, np.ndarray]:
        """The bytes by category."""
        return self._spread(self._peak.parts)

    def _spread(self, parts: dict[str, Array]) -> dict[str, np.ndarray]:
        return {name: np.broadcast_to(amounts, self._count) for name, amounts in parts.items()}


def _grid(plan: Plan, variants: list[_Variant], offload: str) -> LayoutGrid:
    """The variants as one grid."""
    plan_grid = grid_of_plan(plan)
    layouts, rules = [variant.layout for variant in variants], [*map(str, plan_grid.rules)]
    schedules = {name: schedule_index(name) for name in {variant.schedule for variant in variants}}
    named = {
        field.name: np.array([float(getattr(layout, field.name)) for layout in layouts])
        for field in fields(LayoutGrid)
        if field.name not in ("microbatch_size", "microbatches", "recompute", "schedule")
        and field.name not in ("sp", "offload", "context", "ep_nodes", "rules")
    }
    return LayoutGrid(
        **named,
        microbatch_size=np.array([float(candidate.microbatch_size) for candidate in variants]),
        microbatches=np.array([float(candidate.microbatches) for candidate in variants]),
        recompute=np.array([float(rules.index(candidate.recompute)) for candidate in variants]),
        schedule=np.array([float(schedules[candidate.schedule]) for candidate in variants]),
        sp=np.array([layout.sp for layout in layouts]),
        offload=np.full(len(variants), float(OFFLOADS.index(offload))),
        context=np.repeat(plan_grid.context, len(variants)),
        ep_nodes=np.array(
            [float(_ep_nodes(plan, variant_layout) or 0) for variant_layout in layouts]
        ),
        rules=plan_grid.rules,
    )


def _answers(chosen: Estimate, questions: list[_Question]) -> Iterator[Neighbour]:
    """The best layout of each question, or the one with least memory if none fits."""
    open_ = [candidate for candidate in questions if candidate.legal]
    best = _best(chosen, open_)
    costs = _VariantCosts(chosen, [_variant_of(chosen.plan), *best], simulated=True)
    places, known = iter(range(1, len(best) + 1)), dict[_Variant, Bytes]()
    for question in questions:
        if not question.legal:
            yield Neighbour(question.axis, question.value, refused=question.refused)
            continue
        index = next(places)
        variant, layout = best[index - 1], best[index - 1].layout
        if variant not in known:
            known[variant] = _memory(chosen, variant, costs, index)
        memory = known[variant]
        moves = question.axis in PARTNERS or question.axis == "ep"
        # By how much each part exceeds that of the first layout.
        yield Neighbour(
            question.axis,
            question.value,
            layout=layout,
            recompute=variant.recompute,
            microbatch_size=variant.microbatch_size,
            schedule=variant.schedule if layout.pp > 1 else "",
            seconds=float(costs.step[index] - chosen.step),
            parts={name: float(column[index] - column[0]) for name, column in costs.parts.items()},
            over=sum(memory.values()) - chosen.setting.capacity,
            memory={name: num_bytes - chosen.memory[name] for name, num_bytes in memory.items()},
            tier=_tier(layout, question.axis, chosen.setting) if moves else "",
        )


def _memory(chosen: Estimate, variant: _Variant, costs: _VariantCosts, index: int) -> Bytes:
    """Of the fullest rank, as the variant's own schedule holds it; other people's stacks are
    counted by closed forms."""
    if not chosen.setting.stack.runs_plans:
        return {name: float(column[index]) for name, column in costs.memory.items()}
    layout = variant.layout
    options = replace(
        _options(chosen.plan),
        layout=str(layout),
        zero=layout.zero,
        chunks=layout.chunks,
        schedule=variant.schedule,
        recompute=variant.recompute,
        microbatch_size=variant.microbatch_size,
        microbatches=variant.microbatches,
        stage_layers=None,
        ep_nodes=_ep_nodes(chosen.plan, layout),
    )
    return fullest_memory(resolve(options), chosen.setting)


def _options(plan: Plan) -> PlanOptions:
    """The options of a plan, with weights gathered as usual where they are in the plan."""
    usual = "step" if plan.layout.pp > 1 else "microbatch"
    return replace(plan.options, gather=None) if plan.gather == usual else plan.options


def _best(chosen: Estimate, questions: list[_Question]) -> list[_Variant]:
    """The best variant of each question by closed forms, all of them estimated at once."""
    everything = [variant for question in questions for variant in question.legal]
    if not everything:
        return []
    costs = _VariantCosts(chosen, everything)
    ends = np.cumsum([len(question.legal) for question in questions])
    variants: list[_Variant] = []
    for question, end in zip(questions, ends, strict=True):
        span = slice(end - len(question.legal), end)
        over = costs.total[span] - chosen.setting.capacity
        fitting = np.where(over <= 0, costs.step[span], np.inf)
        index = fitting.argmin() if np.isfinite(fitting).any() else over.argmin()
        variants.append(question.legal[int(index)])
    return variants


def _tier(layout: Layout, axis: str, setting: EstimateSetting) -> str:
    """The slowest link inside a group of an axis; the first and the last group are enough."""
    ends = (layout.group(axis, 0), layout.group(axis, layout.world - 1))
    tiers = setting.machine.tiers
    try:
        group_tiers = [setting.machine.tier_of((group[0], group[-1])) for group in ends]
    except FivefoldError:  # more ranks than in the machine's outermost domain
        return tiers[-1].name
    return max(group_tiers, key=tiers.index).name

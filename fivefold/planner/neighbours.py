"""Why a layout and not its neighbours: change one degree and compare the estimates.

The GPUs and the global batch stay the same. Another axis takes or gives the factor, and the choices
that do not fix the degrees (ZeRO stage, recomputation, microbatch size, schedule) are made again:
a neighbour is the best layout near the given one with the changed degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.legality import problems
from fivefold.core.plan import Plan
from fivefold.core.schedule.choose import choose
from fivefold.cost.grid import OFFLOADS, RECOMPUTE, LayoutGrid, grid_of_plan, schedule_index
from fivefold.cost.memory import peak_memory
from fivefold.cost.step_time import step_time
from fivefold.planner.estimate import Bytes, Estimate, Seconds
from fivefold.planner.search import EstimateSetting

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
    refused: str = ""
    seconds: float = 0.0  # of a step, more than the given layout
    parts: Seconds | None = None  # the same by part
    over: float = 0.0  # bytes above the capacity
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


def compare_neighbours(chosen: Estimate) -> list[AxisComparison]:
    """Compare every axis of the layout with its neighbours."""
    plan, layout = chosen.plan, chosen.plan.layout
    own = _estimated(chosen, [_variant_of(plan)])
    found: list[AxisComparison] = []
    for axis in ("tp", "cp", "pp", "ep") if plan.shape.moe else ("tp", "cp", "pp"):
        degree = getattr(layout, axis)
        near = tuple(_neighbour(chosen, own, axis, other) for other in _degrees(degree))
        near = tuple(one for one in near if not _tells_nothing(one, degree))
        tier = _tier(layout, axis, chosen.setting) if degree > 1 else ""
        found.append(AxisComparison(axis, degree, tier, near))
    found += _other_choices(chosen, own)
    return found


def _degrees(degree: int) -> list[int]:
    """1, half and twice the degree."""
    others = [1] if degree > 2 else []
    return [*others, *([degree // 2] if degree % 2 == 0 else []), 2 * degree]


def _tells_nothing(one: Neighbour, degree: int) -> bool:
    """Whether a neighbour tells nothing: the axis is not used and cannot be."""
    return degree == 1 and bool(one.refused)


def _other_choices(chosen: Estimate, own: _VariantCosts) -> Iterator[AxisComparison]:
    """ZeRO stages, recomputation and microbatches, each changed alone."""
    plan, layout = chosen.plan, chosen.plan.layout
    mine = _variant_of(plan)
    if layout.shard * layout.cp > 1:
        stages = [(zero, replace(layout, zero=zero)) for zero in range(4) if zero != layout.zero]
        near = [
            _single_change(chosen, own, "zero", n, mine._replace(layout=one)) for n, one in stages
        ]
        yield AxisComparison(
            "zero", layout.zero, _tier(layout, "fsdp", chosen.setting), tuple(near)
        )
    kinds = [kind for kind in RECOMPUTE if kind != mine.recompute]
    near = [_single_change(chosen, own, "recompute", k, mine._replace(recompute=k)) for k in kinds]
    yield AxisComparison("recompute", mine.recompute, "", tuple(near))
    sizes = [
        mine.microbatch_size * 2,
        *([mine.microbatch_size // 2] if mine.microbatch_size % 2 == 0 else []),
    ]
    whole = mine.microbatch_size * mine.microbatches
    near = [
        _single_change(
            chosen, own, "microbatch", n, mine._replace(microbatch_size=n, microbatches=whole // n)
        )
        for n in sizes
        if whole % n == 0
    ]
    yield AxisComparison("microbatch", mine.microbatch_size, "", tuple(near))


def _variant_of(plan: Plan) -> _Variant:
    batch = plan.batch
    numbers = (batch.microbatch_size, batch.microbatches)
    return _Variant(plan.layout, *numbers, str(plan.recompute.usual), plan.options.schedule)


def _neighbour(chosen: Estimate, own: _VariantCosts, axis: str, degree: int) -> Neighbour:
    """The best layout with this degree; if none fits, the one with least memory."""
    legal: list[_Variant] = []
    refused = ""
    for layout in _exchanged(chosen.plan.layout, axis, degree):
        for variant in _variants(chosen.plan, layout):
            reasons = _problems(chosen.plan, variant)
            refused = refused or (reasons[0] if reasons else "")
            # No rule depends on recomputation.
            legal += [] if reasons else [variant._replace(recompute=kind) for kind in RECOMPUTE]
    if not legal:
        return Neighbour(axis, degree, refused=refused or "no axis can take or give the factor")
    return _best(chosen, own, axis, degree, legal)


def _single_change(
    chosen: Estimate, own: _VariantCosts, axis: str, value: int | str, variant: _Variant
) -> Neighbour:
    if reasons := _problems(chosen.plan, variant):
        return Neighbour(axis, value, refused=reasons[0])
    return _best(chosen, own, axis, value, [variant])


def _exchanged(layout: Layout, axis: str, degree: int) -> Iterator[Layout]:
    """Layouts with as many ranks, in which one other axis compensates the change."""
    if axis == "ep":
        yield replace(layout, ep=degree)
        return
    for partner in PARTNERS:
        if partner == axis:
            continue
        here = layout.dp if partner == "dp" else getattr(layout, partner)
        there, rest = divmod(here * getattr(layout, axis), degree)
        if rest or not there:
            continue
        if partner != "dp":
            yield replace(layout, **{axis: degree, partner: there})
            continue
        outer = layout.replicate if there % layout.replicate == 0 else 1
        yield replace(layout, **{axis: degree}, replicate=outer, shard=there // outer)


def _variants(plan: Plan, layout: Layout) -> Iterator[_Variant]:
    """One layout with every choice of schedule, ZeRO stage and microbatch size."""
    in_rank = plan.batch.sequences // layout.dp
    stages = range(4) if layout.shard * layout.cp > 1 else (0,)
    sizes = [n for n in range(1, _MOST_MICROBATCH_SIZE + 1) if in_rank and in_rank % n == 0]
    choices = product(_schedules(plan, layout), stages, sizes or [1])
    for (schedule, chunks), zero, rows in choices:
        count = max(1, in_rank // rows)
        split = replace(layout, zero=zero, chunks=chunks)
        yield _Variant(split, rows, count, str(plan.recompute.usual), schedule)


def _schedules(plan: Plan, layout: Layout) -> list[tuple[str, int]]:
    """The plan's own schedule, also with its fewest chunks, and 1F1B."""
    own = plan.options.schedule
    if layout.pp == 1:
        return [(own, 1)]
    kept = [(own, plan.layout.chunks)] if plan.layout.pp > 1 else []
    fewest = choose(own).default_chunks
    return list(dict.fromkeys([*kept, (own, fewest), ("1f1b", 1)]))


def _problems(plan: Plan, variant: _Variant) -> list[str]:
    return problems(
        variant.layout,
        plan.shape,
        seq=plan.batch.seq,
        batch=plan.batch.sequences,
        microbatch_size=variant.microbatch_size,
        microbatches=variant.microbatches,
        gpus=plan.layout.world,
        chunks=variant.layout.chunks,
        schedule=choose(variant.schedule),
    )


class _VariantCosts(NamedTuple):
    """Seconds and bytes of several variants, by part and category; one value per variant."""

    step: np.ndarray
    parts: dict[str, np.ndarray]
    total: np.ndarray
    memory: dict[str, np.ndarray]


def _estimated(chosen: Estimate, variants: list[_Variant]) -> _VariantCosts:
    """Estimate all variants at once."""
    plan = chosen.plan
    grid = _grid(plan, variants, chosen.offload)
    usual = "step" if plan.layout.pp > 1 else "microbatch"
    options = replace(plan.options, gather=None) if plan.gather == usual else plan.options
    setting = chosen.setting.with_keys(options)
    job = setting.arguments(plan.shape, grid, plan.batch.seq)
    times, peak = step_time(*job), peak_memory(*job)
    count = (len(variants),)
    return _VariantCosts(
        np.broadcast_to(times.step, count),
        {name: np.broadcast_to(each, count) for name, each in times.parts.items()},
        np.broadcast_to(peak.total, count),
        {name: np.broadcast_to(each, count) for name, each in peak.parts.items()},
    )


def _grid(plan: Plan, variants: list[_Variant], offload: str) -> LayoutGrid:
    """The variants as one grid."""
    one = grid_of_plan(plan)
    layouts, rules = [variant.layout for variant in variants], [*map(str, one.rules)]
    named = {
        each.name: np.array([float(getattr(layout, each.name)) for layout in layouts])
        for each in fields(LayoutGrid)
        if each.name not in ("microbatch_size", "microbatches", "recompute", "schedule")
        and each.name not in ("sp", "offload", "context", "ep_nodes", "rules")
    }
    return LayoutGrid(
        **named,
        microbatch_size=np.array([float(each.microbatch_size) for each in variants]),
        microbatches=np.array([float(each.microbatches) for each in variants]),
        recompute=np.array([float(rules.index(each.recompute)) for each in variants]),
        schedule=np.array([float(schedule_index(each.schedule)) for each in variants]),
        sp=np.array([layout.sp for layout in layouts]),
        offload=np.full(len(variants), float(OFFLOADS.index(offload))),
        context=np.repeat(one.context, len(variants)),
        ep_nodes=np.array(
            [float(plan.ep_nodes if each.ep == plan.layout.ep else 0) for each in layouts]
        ),
        rules=one.rules,
    )


def _best(
    chosen: Estimate, own: _VariantCosts, axis: str, value: int | str, legal: list[_Variant]
) -> Neighbour:
    found = _estimated(chosen, legal)
    over = found.total - chosen.setting.capacity
    fitting = np.where(over <= 0, found.step, np.inf)
    place = int(fitting.argmin() if np.isfinite(fitting).any() else over.argmin())
    layout = legal[place].layout
    return Neighbour(
        axis,
        value,
        layout=layout,
        recompute=legal[place].recompute,
        seconds=float(found.step[place] - own.step[0]),
        parts=_difference(found.parts, own.parts, place),
        over=float(over[place]),
        memory=_difference(found.memory, own.memory, place),
        tier=_tier(layout, axis, chosen.setting) if axis in PARTNERS or axis == "ep" else "",
    )


def _difference(
    found: dict[str, np.ndarray], own: dict[str, np.ndarray], place: int
) -> dict[str, float]:
    """By how much each part exceeds that of the given layout."""
    nothing = np.zeros(place + 1)
    return {
        name: float(found.get(name, nothing)[place] - own.get(name, nothing)[0])
        for name in {**own, **found}
    }


def _tier(layout: Layout, axis: str, setting: EstimateSetting) -> str:
    """The slowest link inside a group of an axis; the first and the last group are enough."""
    ends = (layout.group(axis, 0), layout.group(axis, layout.world - 1))
    tiers = setting.machine.tiers
    try:
        found = [setting.machine.tier_of((group[0], group[-1])) for group in ends]
    except FivefoldError:  # more ranks than in the machine's outermost domain
        return tiers[-1].name
    return max(found, key=tiers.index).name

"""Refuse an illegal layout, with every broken rule and the nearest legal layouts.

`rules.problems` lists the broken rules, `nearest` finds legal layouts close by, `check` raises both
together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Unpack

from fivefold.core import FivefoldError, IllegalLayout, counted
from fivefold.core.layout.layout import DEGREES, MOST_RANKS, Layout
from fivefold.core.layout.rules import (
    LayoutRequest,
    Rule,
    bad_counts,
    batch_problem,
    batch_rule,
    context_rule,
    divisors,
    experts_rule,
    gradients_rule,
    nodes_rule,
    num_microbatches,
    overlap_rule,
    pipeline_rule,
    positions_rule,
    problems,
    schedule_rule,
    sequence_unit,
    tensor_rule,
)

if TYPE_CHECKING:
    from fivefold.core.model import Shape


# Pipeline degree offered with another number of ranks; more would be slow for very deep models.
_DEEPEST_OFFERED = 512


def nearest(
    layout: Layout, shape: Shape, *, most: int = 3, **job: Unpack[LayoutRequest]
) -> list[Layout]:
    """Legal layouts of the same world (`gpus` if given), nearest first; only degrees differ.

    The distance is the sum over the degrees of |log2 of the ratio|. If this world has too few
    legal layouts, those of the next smaller and the next larger world follow in turn.
    """
    if bad_counts(job) or _breaks(positions_rule, layout, shape, job):
        return []
    world = job.get("gpus") or layout.world
    near = _nearest_in(world, layout, shape, job, most)
    if len(near) >= most:
        return near
    worlds = _worlds(world, layout, shape, job)
    turns = zip_longest(*(_nearest_in(other, layout, shape, job, most) for other in worlds))
    return [*near, *(legal for turn in turns for legal in turn if legal)][:most]


def _closest(options: Sequence[int], degree: int) -> int:
    return min(options, key=lambda option: abs(math.log2(option / degree)))


def _steps(layout: Layout, other: Layout) -> dict[str, float]:
    return {a: abs(math.log2(getattr(other, a) / getattr(layout, a))) for a in DEGREES}


def _distance(layout: Layout, other: Layout) -> float:
    return round(sum(_steps(layout, other).values()), 9)  # equal distances must compare equal


def _nearness(layout: Layout, other: Layout) -> tuple[float, ...]:
    """Distance, then the change of ep, etp, tp, pp and cp, in that order.

    So dp changes first, and tp, which the fast links limit, late.
    """
    steps = _steps(layout, other)
    moved = [steps[axis] for axis in ("ep", "etp", "tp", "pp", "cp")]
    return (_distance(layout, other), *moved, *(getattr(other, axis) for axis in DEGREES))


def _breaks(rule: Rule, layout: Layout, shape: Shape, job: LayoutRequest) -> bool:
    return next(rule(layout, shape, job), None) is not None


def _vary(
    layout: Layout, axis: str, degrees: Iterable[int], rule: Rule, shape: Shape, job: LayoutRequest
) -> Iterator[Layout]:
    """The layout with each of these degrees on one axis that the rule allows."""
    for degree in degrees:
        other = replace(layout, **{axis: degree}, chunks=_chunks(layout, axis, degree, job))
        if not _breaks(rule, other, shape, job):
            yield other


def _chunks(layout: Layout, axis: str, degree: int, job: LayoutRequest) -> int:
    domain = job.get("schedule")
    if axis != "pp" or domain is None:
        return layout.chunks
    return domain.chunks_on(degree, job.get("chunks"))


def _nearest_in(
    world: int, layout: Layout, shape: Shape, job: LayoutRequest, most: int
) -> list[Layout]:
    """The nearest legal layouts of one world: dense degrees by rising distance, then experts."""
    moe = shape.moe
    seed = replace(
        layout,
        **dict.fromkeys(("replicate", "shard", "tp", "pp", "cp"), 1),
        ep=_closest(divisors(moe.experts), layout.ep) if moe else 1,
        etp=_closest(divisors(moe.ffn), layout.etp) if moe else 1,
    )
    candidates = _dense(world, layout, seed, shape, job)
    dense = [(_distance(layout, candidate), candidate) for candidate in candidates]
    best: list[tuple[tuple[float, ...], Layout]] = []
    for bound, candidate in sorted(dense, key=lambda pair: pair[0]):
        # The seed's ep and etp are the best there can be, so `bound` is the least distance left.
        if len(best) == most and bound > best[-1][0][0]:
            break
        full = _with_experts(candidate, shape, job)
        best = sorted([*best, *((_nearness(layout, other), other) for other in full)])[:most]
    return [candidate for _, candidate in best]


def _dense(
    world: int, layout: Layout, seed: Layout, shape: Shape, job: LayoutRequest
) -> Iterator[Layout]:
    """Every way to spread `world` over tp, pp, cp and dp that the dense rules allow."""
    for by_tp in _vary(seed, "tp", divisors(world), tensor_rule, shape, job):
        for by_pp in _vary(by_tp, "pp", divisors(world // by_tp.tp), pipeline_rule, shape, job):
            ranks = world // (by_tp.tp * by_pp.pp)
            for by_cp in _vary(by_pp, "cp", divisors(ranks), context_rule, shape, job):
                replicas = _replicas(layout, ranks // by_cp.cp)
                by_dp = replace(by_cp, replicate=replicas, shard=ranks // by_cp.cp // replicas)
                rules = (batch_rule, schedule_rule, overlap_rule)
                if not any(_breaks(rule, by_dp, shape, job) for rule in rules):
                    yield by_dp


def _replicas(layout: Layout, dp: int) -> int:
    """The nearest split of `dp` into replicas and shards; no rule depends on it."""

    def moved(replicas: int) -> tuple[float, float]:
        replicate = abs(math.log2(replicas / layout.replicate))
        return round(replicate + abs(math.log2(dp / replicas / layout.shard)), 9), replicate

    return min(divisors(dp), key=moved)


def _with_experts(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[Layout]:
    """The legal expert degrees over these dense ones."""
    experts, ffn = (shape.moe.experts, shape.moe.ffn) if shape.moe is not None else (1, 1)
    for ep in divisors(math.gcd(experts, layout.stage_size)):
        for etp in divisors(math.gcd(ffn, layout.stage_size // ep)):
            other = replace(layout, ep=ep, etp=etp)
            rules = (experts_rule, gradients_rule, nodes_rule)
            if not any(_breaks(rule, other, shape, job) for rule in rules):
                yield other


def _worlds(world: int, layout: Layout, shape: Shape, job: LayoutRequest) -> list[int]:
    """The nearest smaller and the nearest larger number of ranks with a legal layout."""
    smaller, larger = [0], [MOST_RANKS + 1]
    for dps, bases in _bases(layout, shape, job).items():
        for base in bases:
            below = bisect_right(dps, (world - 1) // base)
            above = bisect_right(dps, world // base)
            smaller += [base * dps[below - 1]] if below else []
            larger += [base * dps[above]] if above < len(dps) else []
    return [other for other in (max(smaller), min(larger)) if 0 < other <= MOST_RANKS]


def _bases(layout: Layout, shape: Shape, job: LayoutRequest) -> dict[Sequence[int], set[int]]:
    """Every tp · cp · pp that the model and the sequence allow, by the possible dp."""
    seed = Layout(sp=layout.sp, context=layout.context, chunks=layout.chunks)
    tps = [tp for tp in divisors(shape.heads) if tp <= MOST_RANKS]
    cps = divisors(job["seq"])
    planes: set[int] = set()
    for base in _vary(seed, "tp", tps, tensor_rule, shape, job):
        fitting = [cp for cp in cps if cp * base.tp <= MOST_RANKS]
        planes |= {
            other.stage_size for other in _vary(base, "cp", fitting, context_rule, shape, job)
        }
    bases: dict[Sequence[int], set[int]] = {}
    data = _data_degrees(job)
    depths = range(1, min(shape.layers, _DEEPEST_OFFERED) + 1)
    for base in _vary(seed, "pp", depths, pipeline_rule, shape, job):
        dps = _dps_under(base, data, job)
        bases.setdefault(dps, set()).update(plane * base.pp for plane in planes)
    return bases


def _data_degrees(job: LayoutRequest) -> Sequence[int]:
    """Every dp that divides the batch, ascending."""
    if (batch := job.get("batch")) is None:
        return range(1, MOST_RANKS + 1)
    return tuple(dp for dp in divisors(batch) if batch_problem(dp, job) is None)


def _dps_under(layout: Layout, data: Sequence[int], job: LayoutRequest) -> Sequence[int]:
    """Those that give this pipeline a number of microbatches which its schedule can run."""
    pp, chunks, domain = layout.pp, layout.chunks, job.get("schedule")

    def runs(dp: int) -> bool:
        count = num_microbatches(pp, chunks, dp, job)
        return domain is None or count is None or not domain.problems(pp, count, chunks)

    if job.get("batch") is None or job.get("microbatches") is not None:
        return data if data and runs(data[0]) else ()  # the same for all
    fitting = data[: bisect_right(data, MOST_RANKS // pp)]
    return fitting if domain is None else tuple(filter(runs, fitting))


def check(layout: Layout, shape: Shape, **job: Unpack[LayoutRequest]) -> None:
    """Refuse an impossible layout with every reason and the three nearest legal ones."""
    reasons = problems(layout, shape, **job)
    if not reasons:
        return
    world = job.get("gpus") or layout.world
    near = nearest(layout, shape, **job)
    ranks = [counted(neighbour.world, "rank") for neighbour in near]
    names = [
        str(neighbour) + ("" if neighbour.world == world else f"  ({count})")
        for neighbour, count in zip(near, ranks, strict=True)
    ]
    raise IllegalLayout(str(layout), reasons, names)


def smallest_seq(layout: Layout, shape: Shape, at_least: int) -> int:
    """The shortest legal sequence of at least this many tokens."""
    unit = sequence_unit(layout, shape)
    seq = -(-at_least // unit) * unit
    if shape.positions == "learned" and seq > shape.max_seq:
        raise FivefoldError(
            f"{layout} needs sequences of a multiple of {unit}, so at least {seq}, but the model "
            f"has {shape.max_seq} learned positions: lower cp or tp"
        )
    return seq


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary size that tp splits evenly; the loss ignores the padding."""
    return -(-vocab // tp) * tp

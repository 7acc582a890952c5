"""What a layout needs from the model, the sequence, the batch and the number of GPUs.

`problems` lists every broken rule with its way out, `nearest` finds legal layouts close by,
`check` raises both together. Each rule reads only the degrees it is named after, so the search
for neighbours can drop a whole branch of layouts as soon as one degree is impossible.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from fivefold.core.batch import remainder
from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout import DEGREES, MOST_RANKS, Layout

if TYPE_CHECKING:
    from fivefold.core.shape import Shape


# Of sequences, or of tokens in one: far above any run, and still quick to factor.
MOST_TOKENS = 1_000_000_000


class Job(TypedDict):
    """What is asked of the layout: `batch` counts sequences; what is absent or None is free."""

    seq: int
    batch: NotRequired[int | None]
    microbatch_size: NotRequired[int | None]
    gpus: NotRequired[int | None]


def check(layout: Layout, shape: Shape, **job: Unpack[Job]) -> None:
    """Refuse an impossible layout with every reason and the three nearest legal ones."""
    reasons = problems(layout, shape, **job)
    if not reasons:
        return
    world = job.get("gpus") or layout.world
    near = nearest(layout, shape, **job)
    names = [str(one) + ("" if one.world == world else f"  ({one.world} ranks)") for one in near]
    raise IllegalLayout(str(layout), reasons, names)


def problems(layout: Layout, shape: Shape, **job: Unpack[Job]) -> list[str]:
    """Every rule that the layout breaks for this model and job; empty where it is legal."""
    return [reason for rule in _RULES for reason in rule(layout, shape, job)]


def nearest(layout: Layout, shape: Shape, *, most: int = 3, **job: Unpack[Job]) -> list[Layout]:
    """Legal layouts of the same world (`gpus` if given), nearest first; only degrees differ.

    The distance is the sum over the degrees of |log2 of the ratio|. Where the world has too few
    legal layouts, the next smaller and the next larger world that have one take turns.
    """
    if _breaks(_job, layout, shape, job):
        return []
    world = job.get("gpus") or layout.world
    near = _nearest_in(world, layout, shape, job, most)
    if len(near) >= most:
        return near
    others = _worlds(world, layout, shape, job)
    found = [_nearest_in(other, layout, shape, job, most) for other in others]
    return [*near, *(one for turn in zip_longest(*found) for one in turn if one)][:most]


def smallest_seq(layout: Layout, shape: Shape, at_least: int) -> int:
    """The shortest legal sequence of at least this many tokens."""
    unit = _sequence_unit(layout)
    seq = -(-at_least // unit) * unit
    if shape.positions == "learned" and seq > shape.max_seq:
        raise FivefoldError(
            f"{layout} needs sequences of a multiple of {unit}, so at least {seq}, but the model "
            f"has {shape.max_seq} learned positions: lower cp or tp"
        )
    return seq


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary that tp splits evenly; the padding never shows in the loss."""
    return -(-vocab // tp) * tp


def ulysses_degree(shape: Shape, layout: Layout) -> int:
    """The inner degree of `hybrid`: the largest divisor of cp up to √cp that the heads allow.

    The rest of cp is the ring around it, so that 1 (all ring) is always legal.
    """
    heads = shape.heads // layout.tp
    small = range(1, math.isqrt(layout.cp) + 1)
    return max(d for d in small if layout.cp % d == 0 and heads % d == 0)


def _job(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    """What no layout can mend."""
    asked = {"seq": job["seq"], "batch": job.get("batch"), "gpus": job.get("gpus")}
    asked["microbatch_size"] = job.get("microbatch_size")
    for name, count in asked.items():
        most = MOST_RANKS if name == "gpus" else MOST_TOKENS
        if count is not None and not 1 <= count <= most:
            yield f"{name}={count}: give a whole number from 1 to {most:,}"
    if shape.positions == "learned" and job["seq"] > shape.max_seq:
        yield (
            f"seq={job['seq']} is longer than the {shape.max_seq} learned positions of the model: "
            f"use seq={shape.max_seq} or less"
        )


def _world(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    gpus = job.get("gpus")
    if gpus is not None and layout.world != gpus:
        yield (
            f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} · pp {layout.pp} = {layout.world} "
            f"ranks, but there are {gpus} GPUs: change a degree until the product is {gpus}"
        )


def _tensor(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    tp = layout.tp
    yield from _division("heads", shape.heads, "tp", tp)
    kv_heads = shape.kv_heads
    if shape.mla is None and kv_heads % tp and tp % kv_heads:
        yield (
            f"tp={tp} neither divides the {kv_heads} KV heads nor is a multiple of them (they are "
            f"replicated where fewer than tp): use tp={_largest_divisor(kv_heads, tp)}"
        )
    if shape.num_moe_layers < shape.layers:
        yield from _division("MLP width", shape.ffn, "tp", tp)
    if shape.moe is not None and shape.moe.shared_ffn:
        yield from _division("shared experts' width", shape.moe.shared_ffn, "tp", tp)


def _pipeline(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    stages = layout.pp * layout.chunks
    if stages > shape.layers:
        yield (
            f"pp {layout.pp} · chunks {layout.chunks} = {stages} stages for {shape.layers} layers: "
            f"every stage needs a layer, so lower pp or chunks until the product is at most "
            f"{shape.layers}"
        )
    if layout.chunks > 1 and layout.pp == 1:
        yield f"chunks={layout.chunks} needs a pipeline: raise pp above 1 or set chunks=1"


def _context(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    seq, unit = job["seq"], _sequence_unit(layout)
    if seq % unit:
        below = seq - seq % unit
        ways = " or ".join(str(legal) for legal in (below, below + unit) if legal)
        yield f"seq={seq} {_split_rule(layout, unit)}: use seq={ways}"
    if layout.context == "ulysses" and shape.heads % layout.tp == 0:
        heads = shape.heads // layout.tp
        if heads % layout.cp:
            most = _largest_divisor(heads, layout.cp)
            yield (
                f"context=ulysses gives whole heads to every cp rank, and cp={layout.cp} does not "
                f"divide the {heads} heads of a tp rank: use cp={most} or context=hybrid"
            )


def _batch(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    batch = job.get("batch")
    if batch is not None:
        reason = remainder(batch, microbatch=job.get("microbatch_size") or 1, dp=layout.dp)
        if reason:
            yield reason


def _experts(layout: Layout, shape: Shape, job: Job) -> Iterator[str]:
    ep, etp = layout.ep, layout.etp
    if shape.moe is None:
        if ep * etp > 1:
            yield f"ep={ep} etp={etp} need experts and the model has none: set both to 1"
        return
    if not layout.folds:
        yield layout.folding_rule()
    yield from _division("experts", shape.moe.experts, "ep", ep)
    yield from _division("expert width", shape.moe.ffn, "etp", etp)
    if layout.tp > 1 and ep > 1 and etp % layout.tp and not layout.sp:
        yield (
            f"ep={ep} takes in tp ranks (etp={etp} is no multiple of tp={layout.tp}), which hold "
            f"the same tokens without sequence parallelism: turn sp on, or set etp={layout.tp}"
        )


Rule = Callable[[Layout, "Shape", Job], Iterator[str]]
_RULES: tuple[Rule, ...] = (_job, _world, _tensor, _pipeline, _context, _batch, _experts)


def _sequence_unit(layout: Layout) -> int:
    """What the length of a sequence must be a multiple of: the cp split, then sp inside it."""
    pieces = 2 if layout.context == "zigzag" and layout.cp > 1 else 1
    return layout.cp * math.lcm(pieces, layout.tp if layout.sp else 1)


def _split_rule(layout: Layout, unit: int) -> str:
    splits: list[str] = []
    if layout.cp > 1:
        zigzag = layout.context == "zigzag"
        splits.append(f"cp={layout.cp}" + (" (zigzag: two pieces a rank)" if zigzag else ""))
    if layout.sp and layout.tp > 1:
        splits.append(f"tp={layout.tp} (sequence parallelism)")
    return f"is split by {' and then by '.join(splits)}, so it must be a multiple of {unit}"


def _division(whole: str, count: int, axis: str, degree: int) -> Iterator[str]:
    if count % degree:
        options = _divisors(count)
        above = bisect_left(options, degree)
        ways = " or ".join(f"{axis}={option}" for option in options[above - 1 : above + 1])
        yield f"{axis}={degree} does not divide {whole} {count}: use {ways}"


def _largest_divisor(count: int, at_most: int) -> int:
    return max(d for d in _divisors(count) if d <= at_most)


def _divisors(count: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return low + [count // d for d in reversed(low) if d * d != count]


def _closest(options: Sequence[int], degree: int) -> int:
    return min(options, key=lambda option: abs(math.log2(option / degree)))


def _steps(layout: Layout, other: Layout) -> dict[str, float]:
    return {a: abs(math.log2(getattr(other, a) / getattr(layout, a))) for a in DEGREES}


def _distance(layout: Layout, other: Layout) -> float:
    return round(sum(_steps(layout, other).values()), 9)  # equal distances must compare equal


def _nearness(layout: Layout, other: Layout) -> tuple[float, ...]:
    """Distance; of equals, the one that moves ep, etp, tp, pp and cp least, in that order.

    So dp gives way first, and tp, which the machine's fast links bound, late.
    """
    steps = _steps(layout, other)
    moved = [steps[axis] for axis in ("ep", "etp", "tp", "pp", "cp")]
    return (_distance(layout, other), *moved, *(getattr(other, axis) for axis in DEGREES))


def _breaks(rule: Rule, layout: Layout, shape: Shape, job: Job) -> bool:
    return next(rule(layout, shape, job), None) is not None


def _vary(
    layout: Layout, axis: str, degrees: Iterable[int], rule: Rule, shape: Shape, job: Job
) -> Iterator[Layout]:
    """The layout with each of these degrees on one axis that the rule allows."""
    for degree in degrees:
        other = replace(layout, **{axis: degree})
        if not _breaks(rule, other, shape, job):
            yield other


def _nearest_in(world: int, layout: Layout, shape: Shape, job: Job, most: int) -> list[Layout]:
    """The nearest legal layouts of one world: dense degrees by rising distance, then experts."""
    moe = shape.moe
    seed = replace(
        layout,
        **dict.fromkeys(("replicate", "shard", "tp", "pp", "cp"), 1),
        ep=_closest(_divisors(moe.experts), layout.ep) if moe else 1,
        etp=_closest(_divisors(moe.ffn), layout.etp) if moe else 1,
    )
    dense = [(_distance(layout, one), one) for one in _dense(world, layout, seed, shape, job)]
    best: list[tuple[tuple[float, ...], Layout]] = []
    for bound, one in sorted(dense, key=lambda pair: pair[0]):
        # The seed's ep and etp are the best there can be, so `bound` is the least distance left.
        if len(best) == most and bound > best[-1][0][0]:
            break
        full = _with_experts(one, shape, job)
        best = sorted([*best, *((_nearness(layout, other), other) for other in full)])[:most]
    return [one for _, one in best]


def _dense(world: int, layout: Layout, seed: Layout, shape: Shape, job: Job) -> Iterator[Layout]:
    """Every way to spread `world` over tp, pp, cp and dp that the dense rules allow."""
    for one in _vary(seed, "tp", _divisors(world), _tensor, shape, job):
        for two in _vary(one, "pp", _divisors(world // one.tp), _pipeline, shape, job):
            rest = world // (one.tp * two.pp)
            for three in _vary(two, "cp", _divisors(rest), _context, shape, job):
                replicas = _replicas(layout, rest // three.cp)
                four = replace(three, replicate=replicas, shard=rest // three.cp // replicas)
                if not _breaks(_batch, four, shape, job):
                    yield four


def _replicas(layout: Layout, dp: int) -> int:
    """How `dp` is best split: no rule depends on it, so only the nearest split is considered."""

    def moved(replicas: int) -> tuple[float, float]:
        kept = abs(math.log2(replicas / layout.replicate))
        return round(kept + abs(math.log2(dp / replicas / layout.shard)), 9), kept

    return min(_divisors(dp), key=moved)


def _with_experts(layout: Layout, shape: Shape, job: Job) -> Iterator[Layout]:
    """The legal expert degrees over these dense ones."""
    if shape.moe is None:
        yield layout
        return
    for ep in _divisors(math.gcd(shape.moe.experts, layout.stage_size)):
        for etp in _divisors(math.gcd(shape.moe.ffn, layout.stage_size // ep)):
            other = replace(layout, ep=ep, etp=etp)
            if not _breaks(_experts, other, shape, job):
                yield other


def _worlds(world: int, layout: Layout, shape: Shape, job: Job) -> list[int]:
    """The nearest smaller and the nearest larger number of ranks with a legal layout."""
    batch, size = job.get("batch"), job.get("microbatch_size") or 1
    dps = range(1, MOST_RANKS + 1)
    if batch is not None:
        dps = [dp for dp in _divisors(batch) if batch % (dp * size) == 0]
    smaller, larger = [0], [MOST_RANKS + 1]
    for base in _bases(layout, shape, job):
        below = bisect_right(dps, (world - 1) // base)
        above = bisect_right(dps, world // base)
        smaller += [base * dps[below - 1]] if below else []
        larger += [base * dps[above]] if above < len(dps) else []
    return [other for other in (max(smaller), min(larger)) if 0 < other <= MOST_RANKS]


def _bases(layout: Layout, shape: Shape, job: Job) -> set[int]:
    """Every tp · cp · pp that the model and the sequence allow."""
    seed = Layout(sp=layout.sp, context=layout.context, chunks=layout.chunks)
    pps = [one.pp for one in _vary(seed, "pp", range(1, shape.layers + 1), _pipeline, shape, job)]
    tps = [tp for tp in _divisors(shape.heads) if tp <= MOST_RANKS]
    cps = _divisors(job["seq"])
    planes: set[int] = set()
    for one in _vary(seed, "tp", tps, _tensor, shape, job):
        fitting = [cp for cp in cps if cp * one.tp <= MOST_RANKS]
        planes |= {two.stage_size for two in _vary(one, "cp", fitting, _context, shape, job)}
    return {plane * pp for plane in planes for pp in pps}

"""The rules of legality: what the model, sequence, batch, schedule and GPUs demand of a layout.

Each rule depends only on the degrees it is named after, so that a search for neighbours can drop a
whole branch of layouts as soon as one degree is impossible.

Refuse an illegal layout, with every broken rule and the nearest legal layouts.

`rules.problems` lists the broken rules, `nearest` finds legal layouts close by, `check` raises both
together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, Unpack, cast

from fivefold.core import FivefoldError, IllegalLayout, counted
from fivefold.core.layout import splits
from fivefold.core.layout.batch import contradiction
from fivefold.core.layout.fp8 import BLOCK, Fp8
from fivefold.core.layout.layout import DEGREES, MOST_RANKS, Layout
from fivefold.core.layout.splits import CONTEXT_KINDS, context_split, padded_length
from fivefold.core.model import context_problem

if TYPE_CHECKING:
    from fivefold.core.model import Shape


# Of sequences, or of tokens in one: far above any run, and still quick to factor.
MOST_TOKENS = 1_000_000_000


class Domain(Protocol):
    """Where a pipeline schedule can run: the part of `schedule.family.Family` that rules need."""

    @property
    def name(self) -> str: ...

    @property
    def asynchronous(self) -> bool: ...

    def stages_on(self, num_ranks: int, num_chunks: int) -> int | None: ...

    def problems(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]: ...

    def refusal(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str: ...

    def smallest_count(self, at_least: int, num_ranks: int, num_chunks: int) -> int: ...

    def chunks_on(self, num_ranks: int, chunks: int | None) -> int: ...


class LayoutRequest(TypedDict):
    """What the layout must fit: `batch` counts sequences; a key that is absent or None is free.

    With a `schedule`, a neighbouring layout gets the schedule's default chunks, or `chunks`.
    `domain`: GPUs of a node, over whose borders an ep group spreads; `pads`: experts are padded.
    """

    seq: int
    batch: NotRequired[int | None]
    microbatch_size: NotRequired[int | None]
    microbatches: NotRequired[int | None]
    chunks: NotRequired[int | None]
    gpus: NotRequired[int | None]
    schedule: NotRequired[Domain | None]
    stage_layers: NotRequired[str | None]
    fp8: NotRequired[Fp8 | None]
    tp_overlap: NotRequired[int]
    offloads_grads: NotRequired[bool]
    ep_nodes: NotRequired[int | None]
    domain: NotRequired[int | None]
    pads: NotRequired[bool]


def problems(layout: Layout, shape: Shape, **job: Unpack[LayoutRequest]) -> list[str]:
    """Every rule that the layout breaks for this model and job; empty where it is legal."""
    # An impossible number is reported once; the rules are then checked without it.
    broken, sound = bad_counts(job), job
    if broken:
        sound = job.copy()
        sound.update(cast(LayoutRequest, {**dict.fromkeys(broken), "seq": job["seq"]}))
    if "seq" in broken:
        sound["seq"] = sequence_unit(layout, shape)
    reasons = [reason for rule in _RULES for reason in rule(layout, shape, sound)]
    return [*broken.values(), *reasons]


def bad_counts(job: LayoutRequest) -> dict[str, str]:
    """Impossible numbers, which no layout can fix, by name."""
    counts = {"seq": job["seq"], "batch": job.get("batch"), "gpus": job.get("gpus")}
    counts["microbatch_size"] = job.get("microbatch_size")
    counts["microbatches"] = job.get("microbatches")
    most = {**dict.fromkeys(counts, MOST_TOKENS), "gpus": MOST_RANKS}
    return {
        name: f"{name}={count}: give a whole number from 1 to {most[name]:,}"
        for name, count in counts.items()
        if count is not None and not 1 <= count <= most[name]
    }


def positions_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    if shape.positions == "learned" and job["seq"] > shape.max_seq:
        yield (
            f"seq={job['seq']} is longer than the {shape.max_seq} learned positions of the model: "
            f"use seq={shape.max_seq} or less"
        )


def world_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    gpus = job.get("gpus")
    if gpus is not None and layout.world != gpus:
        yield (
            f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} · pp {layout.pp} = "
            f"{counted(layout.world, 'rank')}, but there {_gpus(gpus)}: change a degree until the "
            f"product is {gpus}"
        )


def _gpus(gpus: int) -> str:
    return "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"


def tensor_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    tp = layout.tp
    yield from _division("heads", shape.heads, "tp", tp)
    kv_heads = shape.kv_heads
    if shape.mla is None and kv_heads % tp and tp % kv_heads:
        yield (
            f"tp={tp} neither divides the {kv_heads} KV heads nor is a multiple of them (they are "
            f"replicated where fewer than tp): use tp={_largest_divisor(kv_heads, tp)}"
        )
    if shape.hybrid is not None:
        yield from _division("key heads of the recurrence", shape.hybrid.key_heads, "tp", tp)
    if shape.qk_norm == "full" and tp > 1:
        yield f"tp={tp} would split heads that qk_norm=full normalises together: use tp=1"
    if shape.num_moe_layers < shape.layers:
        yield from _division("MLP width", shape.ffn, "tp", tp)
    if shape.moe is not None and shape.moe.shared_ffn:
        yield from _division("shared experts' width", shape.moe.shared_ffn, "tp", tp)


def pipeline_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    num_stages = layout.pp * layout.chunks
    if num_stages > shape.layers:
        yield (
            f"pp {layout.pp} · chunks {layout.chunks} = {num_stages} stages for {shape.layers} "
            f"layers: every stage needs a layer, so lower pp or chunks until the product is at "
            f"most {shape.layers}"
        )
    if layout.chunks > 1 and layout.pp == 1:
        yield f"chunks={layout.chunks} needs a pipeline: raise pp above 1 or set chunks=1"
    yield from _stage_layers_problems(layout, shape, job)
    domain = job.get("schedule")
    if domain is not None and domain.asynchronous and layout.pp > 1:
        yield from _asynchronous_problems(layout, shape, domain.name)


def _stage_layers_problems(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    text, domain = job.get("stage_layers"), job.get("schedule")
    if text is None:
        return
    try:
        counts = splits.parse_stage_layers(text)
    except FivefoldError as error:
        yield str(error)
        return
    pp, chunks = layout.pp, layout.chunks
    num_stages = pp * chunks if domain is None else domain.stages_on(pp, chunks)
    yield from splits.stage_layers_problems(counts, num_stages, shape.layers)


def _asynchronous_problems(layout: Layout, shape: Shape, name: str) -> Iterator[str]:
    """What is impossible if stages compute on weights of different versions."""
    if shape.ends_share:
        yield (
            f"{name} updates the first and the last stage at different delays, which share a tied "
            "embedding: untie it with --set tied=false, or use a synchronous schedule"
        )
    if layout.zero >= 2:
        yield (
            f"zero={layout.zero} under {name}, which stores older versions of full weights: use "
            "zero=0 or 1, or a synchronous schedule"
        )


def context_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    seq, unit = job["seq"], sequence_unit(layout, shape)
    if reason := context_problem(shape, layout.context, layout.cp, layout.tp):
        yield reason
    if seq < unit:
        yield (
            f"seq={seq} {_split_rule(layout)}, which takes at least {unit} tokens: use seq={unit} "
            f"or more{_fewer_ranks(layout, shape, seq)}"
        )
    length = padded_length(seq, unit)
    if shape.positions == "learned" and unit <= seq <= shape.max_seq < length:
        yield (
            f"seq={seq} is padded to {length}, more than the {shape.max_seq} learned positions of "
            f"the model: use seq={shape.max_seq // unit * unit}"
        )
    heads = math.gcd(shape.heads, shape.of_mixer.heads)
    if CONTEXT_KINDS[layout.context].heads == "all" and heads % layout.tp == 0:
        heads = heads // layout.tp
        if heads % layout.cp:
            most = _largest_divisor(heads, layout.cp)
            yield (
                f"context={layout.context} gives whole heads to every cp rank, and cp={layout.cp} "
                f"does not divide the {heads} heads of a tp rank: use cp={most} or context=hybrid"
            )
    if (rounding := job.get("fp8")) is not None:
        yield from _cut_blocks(rounding, layout, shape, seq)


def overlap_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    """Chunks of tp_overlap, which cut the tokens of a microbatch evenly and no block of fp8."""
    overlap, rounding = job.get("tp_overlap", 1), job.get("fp8")
    if layout.tp == 1 or overlap <= 1:
        return
    seq, batch, count = job["seq"], job.get("batch"), job.get("microbatches")
    rows = job.get("microbatch_size") or (batch // (count * layout.dp) if batch and count else 1)
    local = padded_length(seq, sequence_unit(layout, shape)) // layout.cp
    tokens = rows * local // (layout.tp if layout.sp else 1)
    if tokens % overlap:
        near = max(divisor for divisor in divisors(tokens) if divisor <= overlap)
        yield (
            f"tp_overlap {overlap}: a microbatch has {tokens} tokens on a rank of tp, which so "
            f"many chunks do not cut evenly; the next smaller number that does is {near}"
        )
    if rounding is None or rounding.scaling == "tensorwise" or rounding.wgrad != "fp8":
        return
    tokens = rows * seq // (layout.cp * layout.tp)
    if layout.sp and tokens % (overlap * BLOCK):
        near = next((n for n in range(overlap - 1, 1, -1) if not tokens % (n * BLOCK)), 1)
        yield (
            f"tp_overlap {overlap}: so many chunks cut the {tokens} tokens of a rank "
            f"inside of a block of {BLOCK}; the next smaller number that does not is {near}"
        )


def gradients_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    """Gradients that ranks reduce only at the end of a step accumulate on the device in full until
    then: nothing is left to offload."""
    if not job.get("offloads_grads") or not layout.folds:
        return
    pairs = ((layout.dp * layout.cp, layout.shard * layout.cp), (layout.edp, layout.edp))
    if any(ranks > 1 and (layout.zero < 2 or shards == 1) for ranks, shards in pairs):
        yield (
            f"offload_grads with {layout} and ZeRO-{layout.zero}: gradients leave the device "
            "once they are reduced, and without shards that is at the end of a step; use "
            "zero = 2 or 3 and shards (dp=RxS with S above 1)"
        )


def nodes_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    """Over how many nodes an ep group is spread, if that is given, and what padding asks of it."""
    nodes = job.get("ep_nodes")
    if nodes is not None and (nodes < 1 or layout.ep % nodes):
        yield (
            f"ep_nodes {nodes} does not divide ep {layout.ep}: the ranks of an ep group lie "
            "evenly on its nodes; choose a divisor"
        )
    elif job.get("pads") and layout.folds and (spread := num_ep_nodes(layout, job)) > 1:
        yield (
            f"capacity-pad with ep_nodes {spread}: how many tokens go to a node is known only "
            "when they are routed; choose capacity without padding, or ep_nodes=1"
        )


def num_ep_nodes(layout: Layout, job: LayoutRequest) -> int:
    """Over how many nodes an ep group is spread: as given, or as the machine is built."""
    nodes, size = job.get("ep_nodes"), job.get("domain")
    if nodes is not None or size is None:
        return nodes or 1
    inside = sum(rank < size for rank in layout.group("ep", 0))
    return layout.ep // math.gcd(layout.ep, inside)


def batch_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    if reason := batch_problem(layout.dp, job):
        yield reason


def batch_problem(dp: int, job: LayoutRequest) -> str | None:
    return contradiction(
        job.get("batch"),
        dp=dp,
        microbatch_size=job.get("microbatch_size"),
        microbatches=job.get("microbatches"),
    )


def schedule_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    domain, chunks = job.get("schedule"), layout.chunks
    count = num_microbatches(layout.pp, chunks, layout.dp, job)
    if domain is not None and count and (reason := _refusal(domain, layout.pp, count, chunks)):
        yield reason


@lru_cache
def _refusal(domain: Domain, pp: int, count: int, chunks: int) -> str | None:
    """Neighbours that differ only in cp and dp ask for the same refusal many times."""
    return domain.refusal(pp, count, chunks) if domain.problems(pp, count, chunks) else None


def num_microbatches(pp: int, chunks: int, dp: int, job: LayoutRequest) -> int | None:
    """How many microbatches the schedule gets; None if there is no pipeline.

    The given number, or what the batch leaves to a data rank, or as many as the schedule needs.
    """
    domain, batch, count = job.get("schedule"), job.get("batch"), job.get("microbatches")
    if domain is None or pp == 1 or batch_problem(dp, job):
        return None
    if count is None and batch is None:
        return domain.smallest_count(2 * pp, pp, chunks)
    return count or (batch or 0) // (dp * (job.get("microbatch_size") or 1))


def experts_rule(layout: Layout, shape: Shape, job: LayoutRequest) -> Iterator[str]:
    ep, etp = layout.ep, layout.etp
    if shape.moe is None:
        if ep * etp > 1:
            yield f"ep={ep} etp={etp} need experts and the model has none: set both to 1"
        return
    if not layout.folds:
        yield layout.folding_rule()
    yield from _division("experts", shape.moe.experts, "ep", ep)
    yield from _division("expert width", shape.moe.ffn, "etp", etp)
    if shape.moe.biases and etp > 1:
        yield f"etp={etp} would add biases of experts more than once: use etp=1"
    if layout.sp:
        return
    if layout.tp > 1 and ep > 1 and etp % layout.tp:
        yield (
            f"ep={ep} takes in tp ranks (etp={etp} is no multiple of tp={layout.tp}), which hold "
            f"the same tokens without sequence parallelism: turn sp on, or set etp={layout.tp}"
        )
    if layout.tp % etp:
        yield (
            f"etp={etp} takes in ranks with other tokens than the tp={layout.tp} that share "
            "them, which only sequence parallelism gathers: turn sp on, or set etp to a divisor "
            f"of {layout.tp}"
        )


Rule = Callable[[Layout, "Shape", LayoutRequest], Iterator[str]]
_RULES: tuple[Rule, ...] = (
    positions_rule,
    world_rule,
    tensor_rule,
    pipeline_rule,
    schedule_rule,
    context_rule,
    overlap_rule,
    batch_rule,
    experts_rule,
    gradients_rule,
    nodes_rule,
)


def sequence_unit(layout: Layout, shape: Shape) -> int:
    """A row is padded to a multiple of this: the cp split, and sp inside it."""
    parts = context_split(layout, shape).unit // layout.cp
    return layout.cp * math.lcm(parts, layout.tp if layout.sp else 1)


def _split_rule(layout: Layout) -> str:
    axes: list[str] = []
    if layout.cp > 1:
        axes.append(f"cp={layout.cp} ({layout.context})")
    if layout.sp and layout.tp > 1:
        axes.append(f"tp={layout.tp} (sequence parallelism)")
    return f"is split by {' and then by '.join(axes)}"


def _fewer_ranks(layout: Layout, shape: Shape, seq: int) -> str:
    """The most context ranks for which the sequence is long enough, and that the heads allow."""
    most = seq * layout.cp // sequence_unit(layout, shape)
    if most and CONTEXT_KINDS[layout.context].heads == "all":
        heads = math.gcd(shape.heads, shape.of_mixer.heads)
        most = _largest_divisor(max(1, heads // layout.tp), most)
    if not most and seq >= sequence_unit(replace(layout, cp=1), shape):
        most = 1  # one rank needs no zigzag
    return f", or cp={most}" if most else ""


def _division(noun: str, count: int, axis: str, degree: int) -> Iterator[str]:
    if count % degree:
        options = divisors(count)
        above = bisect_left(options, degree)
        ways = " or ".join(f"{axis}={option}" for option in options[above - 1 : above + 1])
        yield f"{axis}={degree} does not divide {noun} {count}: use {ways}"


def _largest_divisor(count: int, at_most: int) -> int:
    return max(d for d in divisors(count) if d <= at_most)


def divisors(count: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return low + [count // d for d in reversed(low) if d * d != count]


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
    # The nearest smaller and the nearest larger number of ranks with a legal layout.
    smaller, larger = [0], [MOST_RANKS + 1]
    for dps, bases in _bases(layout, shape, job).items():
        for base in bases:
            below = bisect_right(dps, (world - 1) // base)
            above = bisect_right(dps, world // base)
            smaller += [base * dps[below - 1]] if below else []
            larger += [base * dps[above]] if above < len(dps) else []
    worlds = [other for other in (max(smaller), min(larger)) if 0 < other <= MOST_RANKS]
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


def _cut_blocks(fp8: Fp8, layout: Layout, shape: Shape, seq: int) -> Iterator[str]:
    """Every shard edge that is inside of a block of fp8, with the nearest degree that cuts none."""
    if fp8.scaling in ("tensorwise", "nvfp4"):
        return
    yield from _cut_widths(layout, shape, fp8.block)
    if fp8.wgrad == "fp8":
        yield from _cut_tokens(layout, shape, seq, fp8.block)


def wider_keys(shape: Shape, layout: Layout) -> dict[str, str]:
    """What makes a small model wide enough for blocks: widths of one block and a ragged one, and
    whole blocks where a layout cuts them."""
    keys = {"width": str(BLOCK * 3 // 2)}
    if layout.tp > 1:
        shards = min(layout.tp, shape.kv_heads)
        keys["head_dim"] = str(-(-BLOCK * shards // shape.kv_heads))
        keys["ffn"] = str(padded_length(shape.ffn, BLOCK * layout.tp))
    if layout.tp > 1 and shape.moe is not None and shape.moe.shared:
        keys["moe.shared_ffn"] = str(padded_length(shape.moe.shared_ffn, BLOCK * layout.tp))
    return keys


def wider_seq(shape: Shape, layout: Layout) -> int:
    """Tokens of a row for such a model: a block and a ragged one, or whole ones for each shard."""
    chunks = context_split(layout, shape).unit if layout.cp > 1 else 1
    unit = math.lcm(chunks, layout.cp * (layout.tp if layout.sp else 1))
    return BLOCK * 5 // 4 if unit == 1 else BLOCK * unit


def _cut_widths(layout: Layout, shape: Shape, block: int) -> Iterator[str]:
    """Widths whose shards over tp end inside of a block. Routed experts have no blocks."""
    for name, (width, most) in _tensor_widths(shape).items():
        shards = min(layout.tp, most)  # fewer heads than ranks are replicated
        if shards > 1 and width % (shards * block):
            legal = _nearest_degree(layout.tp, partial(_fits_blocks, width, most, block))
            yield (
                f"tp={layout.tp} cuts {name} of {width} into shards of {width / shards:g}, "
                f"inside of a block of {block}: {_degree_way_out('tp', legal)}"
            )


def _fits_blocks(width: int, most: int, block: int, degree: int) -> bool:
    return not width % (min(degree, most) * block)


def _tensor_widths(shape: Shape) -> dict[str, tuple[int, int]]:
    """By name: the widths that tp cuts, and into how many shards at most."""
    heads, many = shape.heads, 1 << 30
    widths: dict[str, tuple[int, int]] = {}
    if shape.mla is None:
        widths["q"] = (heads * shape.head_dim, many)
        widths["k and v"] = (shape.kv_heads * shape.head_dim, shape.kv_heads)
    else:
        widths["q"] = (heads * shape.head_dim, many)
        widths["kv_up"] = (heads * (shape.mla.nope_dim + shape.mla.value_dim), many)
        widths["the input of out"] = (heads * shape.mla.value_dim, many)
    if any(not shape.is_moe_layer(layer) for layer in range(shape.layers)):
        widths["the MLP"] = (shape.ffn, many)
    if shape.moe is not None and shape.moe.shared:
        widths["shared experts"] = (shape.moe.shared_ffn, many)
    return widths


def _cut_tokens(layout: Layout, shape: Shape, seq: int, block: int) -> Iterator[str]:
    """Runs of tokens whose ends are inside of a block of a row."""

    def chunks(cp: int) -> int:
        return context_split(replace(layout, cp=cp), shape).unit if cp > 1 else 1

    if layout.cp > 1 and seq % (chunks(layout.cp) * block):
        legal = _nearest_degree(layout.cp, lambda cp: not seq % (chunks(cp) * block))
        yield (
            f"cp={layout.cp} cuts a row of {seq} tokens into chunks of {seq / chunks(layout.cp):g},"
            f" inside of a block of {block}: {_degree_way_out('cp', legal)}, the nearest length "
            f"{padded_length(seq, chunks(layout.cp) * block)}, or choose fp8_wgrad=bf16, which has "
            "no blocks of tokens"
        )
    if layout.sp and layout.tp > 1 and seq % (layout.cp * layout.tp * block):
        legal = _nearest_degree(layout.tp, lambda tp: not seq % (layout.cp * tp * block))
        yield (
            f"sequence parallelism over tp={layout.tp} cuts a row of {seq} tokens into shards of "
            f"{seq / layout.cp / layout.tp:g}, inside of a block of {block}: "
            f"{_degree_way_out('tp', legal)}, the nearest length "
            f"{padded_length(seq, layout.cp * layout.tp * block)}, or choose fp8_wgrad=bf16"
        )


def _nearest_degree(degree: int, legal: Callable[[int], bool]) -> int:
    """The largest legal divisor of a degree; 1 always is."""
    below = (n for n in range(degree - 1, 1, -1) if not degree % n)
    return next((n for n in below if legal(n)), 1)


def _degree_way_out(axis: str, degree: int) -> str:
    return f"the nearest legal degree is {axis}={degree}"

"""Comparisons of one job with itself: one axis at a time, sweeps, and what-if changes.

- `single_axis_strategies`: each axis alone on the same GPUs, at its best, with its batch, memory
  and time.
- `sweep`: the best layout of each strategy along sequence lengths, GPUs or tensor ranks.
- `parse_changes` and what follows: the same job on another machine, with more GPUs, longer
  sequences or a larger batch.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from fivefold.core import PRECISIONS, FivefoldError, UnknownName, counted, parse_count
from fivefold.core.layout import Layout, divisors
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost import RECOMPUTE
from fivefold.cost.traffic import predict_traffic
from fivefold.planner.candidates import LayoutCandidate
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.planning import PlanRequest, Progress
from fivefold.planner.search import search_layouts
from fivefold.planner.space import options_of, tensor_degrees


class StrategyTraffic(NamedTuple):
    """What one rank sends along an axis in a step."""

    axis: str
    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Strategy:
    """One axis alone, at its best: data parallelism has the other GPUs, and its degree, ZeRO stage,
    schedule, microbatches and recomputation are those of the fastest layout that fits, or of the
    one with least memory."""

    name: str
    layout: Layout
    least_batch: int  # sequences per step; with fewer, some ranks have nothing to do
    estimate: Estimate | None
    moved: tuple[StrategyTraffic, ...]
    refused: str = ""


def single_axis_strategies(request: PlanRequest) -> Iterator[Strategy]:
    """Every axis alone for this model."""
    for zero in range(4):
        yield _strategy(request, f"ZeRO-{zero}" if zero else "DP", "dp", {"zero": zero})
    for name, sp in (("TP", 0), ("TP+SP", 1)):
        yield _strategy(request, name, "tp", {"sp": sp})
    yield _strategy(request, "PP", "pp", {})
    yield _strategy(request, "CP", "cp", {})
    if request.shape.moe is not None:
        yield _strategy(request, "EP", "ep", {})


def _strategy(request: PlanRequest, name: str, axis: str, fixed: Mapping[str, int]) -> Strategy:
    """The best layout with this axis and no other but data."""
    gpus = request.space.gpus
    axis_sizes = {axis_name: 1 for axis_name in ("tp", "pp", "cp", "ep") if axis_name != axis}
    degrees = [gpus] if axis == "dp" else divisors(gpus)[1:]
    fits: list[LayoutCandidate] = []
    lean: list[LayoutCandidate] = []
    for degree in degrees:
        named = {"offload": "none", **axis_sizes, **fixed, axis: degree}
        result = search_layouts(replace(request.space, fixed=named), request.setting, 1)
        fits += result.best
        lean += [] if result.leanest is None else [result.leanest]
    candidate = min(fits, key=lambda layout: layout.speed_rank, default=None)
    candidate = candidate or min(lean, key=lambda layout: layout.bytes, default=None)
    if candidate is None:
        rows = counted(request.space.batch, "sequence")
        why = f"no legal degree for {rows} on {request.space.gpus_text}"
        return Strategy(name, Layout(shard=gpus), gpus, None, (), why)
    plan = resolve(options_of(candidate.grid, request.options))
    least = plan.layout.dp * plan.layout.pp
    look = estimate_plan(plan, request.setting, makespan=candidate.makespan)
    return Strategy(name, plan.layout, least, look, _traffic(plan))


def _traffic(plan: Plan) -> tuple[StrategyTraffic, ...]:
    """The collectives of rank 0 by axis and kind, if they move at least 1 MiB."""
    itemsize = PRECISIONS[plan.precision].itemsize
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for record in predict_traffic(plan, 0, itemsize=itemsize):
        counts[record.axis, record.kind] += record.count
        sizes[record.axis, record.kind] += record.count * record.bytes
    rows = [
        StrategyTraffic(*key, counts[key], sizes[key]) for key in counts if sizes[key] >= 1 << 20
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


# --- Sweeps

STRATEGIES: Mapping[str, Mapping[str, int]] = {
    "data": {"tp": 1, "pp": 1, "cp": 1},
    "data+tensor": {"pp": 1, "cp": 1},
    "data+pipeline": {"tp": 1, "cp": 1},
    "data+context": {"tp": 1, "pp": 1},
    "all": {},
}
SWEEP_AXES = ("seq", "gpus", "tp")
_MOST_POINTS = 16


@dataclass(frozen=True)
class SweepPoint:
    """The best layout of a strategy at one value; the one with least memory if none fits, None if
    none is legal."""

    value: int
    strategy: str
    recompute: str
    estimate: Estimate | None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.verdict != "does not fit"


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Read `seq=4k..1m`, `gpus=8..16384` or `tp=1..8`: the axis, and values that double.

    >>> parse_sweep("seq=4k..16k")
    ('seq', [4096, 8192, 16384])
    """
    axis, _, span = text.partition("=")
    low, dots, high = span.partition("..")
    if axis not in SWEEP_AXES or not dots:
        raise FivefoldError(f"--sweep {text!r}: write seq=4k..1m, gpus=8..16384, tp=1..8 or tp")
    first, last = _count(low, axis, "--sweep"), _count(high, axis, "--sweep")
    values = [first]
    while values[-1] * 2 <= last and len(values) <= _MOST_POINTS:
        values.append(values[-1] * 2)
    if last < first or len(values) > _MOST_POINTS:
        raise FivefoldError(
            f"--sweep {text!r}: give a lower and a higher number, at most {_MOST_POINTS - 1} "
            "doublings apart"
        )
    return axis, values


def sweep_values(request: PlanRequest, text: str) -> tuple[str, list[int]]:
    """The axis and the values of `--sweep`; `tp` alone has every legal degree that doubles."""
    if text.strip() != "tp":
        return parse_sweep(text)
    return "tp", [tp for tp in tensor_degrees(request.space) if tp & (tp - 1) == 0]


def _count(text: str, axis: str, option: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < (number := parse_count(text, axis)) <= 10**9:
            return number
    raise FivefoldError(f"{option}: {text!r} is not a whole number such as 8192, 8k or 1m")


def sweep(
    request: PlanRequest, axis: str, values: list[int], on_progress: Progress | None = None
) -> Iterator[SweepPoint]:
    """Every point of every curve. The number of tokens per step stays the same where possible."""
    fixed = request.space.fixed or {}
    strategies = [
        name for name, on in STRATEGIES.items() if _is_compatible(on, fixed) and axis not in on
    ]
    if axis in fixed:
        raise FivefoldError(f"--sweep {axis} with fix={axis}={fixed[axis]}: leave one out")
    kinds = [kind for kind in RECOMPUTE if _is_compatible({"recompute": kind}, fixed)]
    estimates: dict[tuple[str, int], dict[str, Estimate | None]] = {}
    known: list[Estimate] = []
    for name, value in product(strategies, values):
        variant = _request_at(request, axis, value, {**fixed, **STRATEGIES[name]})
        estimates[name, value] = _best_by_rule(variant, kinds, known)
        if on_progress is not None:
            on_progress(len(estimates) / (len(strategies) * len(values)))
    for name, kind, value in product(strategies, kinds, values):
        yield SweepPoint(value, name, kind, estimates[name, value][kind])


def _is_compatible(choices: Mapping[str, int | str], other: Mapping[str, int | str]) -> bool:
    return all(other.get(key, value) == value for key, value in choices.items())


def _request_at(
    request: PlanRequest, axis: str, value: int, fixed: Mapping[str, int | str]
) -> PlanRequest:
    space = replace(request.space, fixed={"offload": "none", **fixed})
    if axis == "gpus":
        return replace(request, space=replace(space, gpus=value))
    if axis == "tp":
        return replace(request, space=replace(space, fixed={**(space.fixed or {}), "tp": value}))
    batch = max(1, space.batch * space.seq // value)
    options = replace(request.options, seq=value)
    return replace(request, options=options, space=replace(space, seq=value, batch=batch))


def best_estimate(request: PlanRequest, known: list[Estimate] | None = None) -> Estimate | None:
    """The best layout of the space; the one with least memory if none fits, None if none is
    legal. `known`: estimates under this setting, to which this one is added."""
    result = search_layouts(request.space, request.setting, 1)
    candidate = result.best[0] if result.best else result.leanest
    known = [] if known is None else known
    return None if candidate is None else _estimated_once(request, candidate, known)


def _estimated_once(
    request: PlanRequest, candidate: LayoutCandidate, known: list[Estimate]
) -> Estimate:
    """Strategies often have the same best layout."""
    plan = resolve(options_of(candidate.grid, request.options))
    for estimate in known:
        if estimate.plan.options == plan.options:
            return estimate
    known.append(estimate_plan(plan, request.setting, makespan=candidate.makespan))
    return known[-1]


def _best_by_rule(
    request: PlanRequest, kinds: Sequence[str], known: list[Estimate]
) -> dict[str, Estimate | None]:
    """The same for each of these rules of recomputation. One search serves all under which
    something fits."""
    estimates: dict[str, Estimate | None] = {}
    result = search_layouts(request.space, request.setting, 1, rules=kinds)
    for candidate in result.best:
        best = _estimated_once(request, candidate, known)
        estimates[str(best.plan.recompute.usual)] = best
    for kind in kinds:
        if kind not in estimates:
            alone = {**(request.space.fixed or {}), "recompute": kind}
            space = replace(request.space, fixed=alone)
            estimates[kind] = best_estimate(replace(request, space=space), known)
    return estimates


# --- What-if changes

CHANGE_KEYS = ("gpus", "seq", "batch", "machine")


def parse_changes(text: str) -> dict[str, str]:
    """Read `gpus=2x seq=32k machine=gb200`."""
    changes: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if key not in CHANGE_KEYS:
            raise UnknownName("what_if", key, CHANGE_KEYS)
        if not equals or not value:
            raise FivefoldError(f"what_if {word!r}: write {key}=2x, or {key}= and a value")
        changes[key] = value
    if not changes:
        raise FivefoldError("what_if: write a change, such as gpus=2x or seq=32k")
    return changes


def apply_changes(options: PlanOptions, changes: dict[str, str], **sizes: int) -> PlanOptions:
    """The options with the changes; `now` are the numbers that 2x doubles."""
    new_options = options
    for key, value in changes.items():
        if key == "machine":
            new_options = replace(new_options, machine=value)
        else:
            new_options = replace(new_options, **{key: scaled(sizes[key], value, key)})
    return new_options


def scaled(number: int, text: str, key: str) -> int:
    """A multiple of a number (`2x`, `0.5x`), or another number.

    >>> scaled(8, "2x", "gpus"), scaled(8, "0.5x", "gpus"), scaled(8, "4k", "seq")
    (16, 4, 4096)
    """
    factor = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x", text)
    if factor is None:
        return _count(text, key, f"what_if {key}")
    value = number * float(factor[1])
    if value != int(value) or value < 1:
        raise FivefoldError(f"what_if {key}={text}: {number:,} times that is not a whole number")
    return int(value)


def scale_plan(plan: Plan, changes: dict[str, str]) -> PlanOptions:
    """A plan with the changes: more GPUs are more data ranks, the other degrees stay."""
    batch, layout = plan.batch, plan.layout
    sizes = {"gpus": layout.world, "seq": batch.seq, "batch": batch.sequences}
    options = replace(plan.options, batch=batch.sequences, microbatches=None, ep_nodes=None)
    options = apply_changes(options, changes, **sizes)
    gpus = options.gpus or layout.world
    inner = layout.replicate * layout.tp * layout.cp * layout.pp
    if gpus % inner:
        raise FivefoldError(
            f"what_if gpus={gpus}: not a multiple of {inner}, the number of ranks of {layout} "
            "without its shards; leave out --layout to search for another layout"
        )
    return replace(options, layout=str(replace(layout, shard=gpus // inner)), gpus=gpus)


# Tables that people look for, computed for one job: what each answer costs and buys here.
#
# - `zero3-or-pipeline`: shard the weights over all data ranks, or cut the layers into stages.
# - `data-or-model`: copy the model, cut it, or both.
# - `memory`: what each technique saves and costs, alone, on the degrees of one plan.
#
# In the first two every row fixes one thing and has the best layout of all others. The rows of
# `memory` keep the degrees, since bytes saved can be compared only there.

Fixed = Mapping[str, int | str]


@dataclass(frozen=True)
class JobRow:
    """One answer; without an estimate if no layout is legal, and `refused` says why."""

    name: str
    estimate: Estimate | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.over <= 0


@dataclass(frozen=True)
class JobTable:
    """A table; `base` is the row that the others are compared with."""

    name: str
    rows: tuple[JobRow, ...]
    base: str = ""

    def row(self, name: str) -> JobRow:
        return next(table_row for table_row in self.rows if table_row.name == name)

    @property
    def fastest(self) -> JobRow | None:
        """The fastest row that fits."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=_step, default=None)


def _step(row: JobRow) -> float:
    return float("inf") if row.estimate is None else row.estimate.step


def job_table(name: str, request: PlanRequest, plan: Plan | None = None) -> JobTable:
    """One of `TABLES` for a job; `given` is the plan whose layout the user has chosen."""
    if name == "memory":
        return _memory_techniques(request, plan)
    return JobTable(name, tuple(_best_with(request, *entry) for entry in _ROWS[name].items()))


def _best_with(request: PlanRequest, name: str, choice: Fixed) -> JobRow:
    """The best layout with a choice; `pipeline` asks for at least two stages."""
    space, fixed = request.space, {"offload": "none", **(request.space.fixed or {})}
    if any(fixed.get(key, value) != value for key, value in choice.items()):
        return JobRow(name, None, "not with what fix says")
    if choice.items() >= _DATA.items() and space.batch % space.gpus:
        rows = counted(space.batch, "sequence")
        why = f"{counted(space.gpus, 'data rank')} cannot share {rows} a step"
        return JobRow(name, None, why)
    least = 2 if name.startswith("pipeline") else space.least_pp
    space = replace(space, fixed={**fixed, **choice}, least_pp=least)
    estimate = best_estimate(replace(request, space=space))
    refused = "" if estimate else f"no legal layout on {space.gpus_text} for this model and batch"
    return JobRow(name, estimate, refused)


_DATA: Fixed = {"tp": 1, "pp": 1, "cp": 1}
_ROWS: dict[str, dict[str, Fixed]] = {
    "zero3-or-pipeline": {
        "ZeRO-3 alone": {**_DATA, "zero": 3},
        "ZeRO-3, tp or cp": {"zero": 3, "pp": 1},
        "pipeline alone": {"zero": 1, "tp": 1, "cp": 1},
        "pipeline, tp or cp": {"zero": 1},
    },
    "data-or-model": {
        "data, ZeRO-1": {**_DATA, "zero": 1},
        "data, ZeRO-3": {**_DATA, "zero": 3},
        "tensor": {"dp": 1, "pp": 1, "cp": 1},
        "tensor and pipeline": {"dp": 1, "cp": 1},
        "data and tensor": {"pp": 1, "cp": 1},
        "data and pipeline": {"tp": 1, "cp": 1},
        "all dimensions": {},
    },
}
TABLES = (*_ROWS, "memory")


# --- Memory techniques

BASE = "nothing saved"
CHOSEN = "the plan itself"


def _memory_techniques(request: PlanRequest, base_plan: Plan | None) -> JobTable:
    chosen = _chosen(request, base_plan)
    options, plan = chosen.plan.options, chosen.plan
    sharded = plan.layout.dp * plan.layout.cp > 1
    base = _plain(options)
    techniques: dict[str, dict[str, Any]] = {BASE: {}}
    if plan.layout.tp > 1 and not base.sp:
        techniques["sequence parallelism"] = {"sp": True}
    techniques["selective recomputation"] = {"recompute": "selective"}
    techniques["full recomputation"] = {"recompute": "full"}
    if sharded:
        techniques |= {f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)}
    techniques["gradients summed in bf16"] = {"grad_dtype": "bf16"}
    if plan.batch.microbatch_size % 2 == 0:
        half = plan.batch.microbatch_size // 2
        microbatches = 2 * plan.batch.microbatches
        techniques["half the microbatch"] = {"microbatch_size": half, "microbatches": microbatches}
    away = replace(base.train, offload="cpu")
    techniques["optimizer states in host memory"] = {"train": away}
    rows = [_technique(request, name, base, keys) for name, keys in techniques.items()]
    return JobTable("memory", (*rows, JobRow(CHOSEN, chosen)), BASE)


def _chosen(request: PlanRequest, plan: Plan | None) -> Estimate:
    if plan is not None:
        return estimate_plan(plan, request.setting)
    estimate = best_estimate(request)
    if estimate is None:
        raise FivefoldError("--table memory: no legal layout for this job; change --gpus or fix")
    return estimate


def _plain(options: PlanOptions) -> PlanOptions:
    """The same degrees without techniques; sequence parallelism stays where experts require it."""
    at_home = replace(options.train, offload="none", offload_grads="none", states="fp32")
    plain = replace(options, zero=0, gather=None, recompute="none", grad_dtype="fp32")
    plain = replace(plain, train=at_home)
    try:
        resolve(replace(plain, sp=False))
    except FivefoldError:
        return plain
    return replace(plain, sp=False)


def _technique(request: PlanRequest, name: str, base: PlanOptions, keys: dict[str, Any]) -> JobRow:
    try:
        plan = resolve(replace(base, **keys))
    except FivefoldError as error:
        return JobRow(name, None, str(error).splitlines()[0])
    return JobRow(name, estimate_plan(plan, request.setting))

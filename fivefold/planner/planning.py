"""The best plans for a job whose layout is open: request, search, simulate, rank, choose.

A search ranks millions of layouts by bounds. The best of them become plan options again, are
resolved, and are simulated one by one; that decides the order in which they are shown. Layouts that
differ from the fastest by less than estimates can tell are equal, and the simplest of them is the
first choice.

Layers moved between the stages of a plan, where that makes it faster.

One layer at a time, as long as the longest path gets shorter; the simulation decides whether that
was a gain. No stage gets more layers than the largest one has, and the first gets none, so memory
is no worse.

The first choice of a search: the simplest of the layouts that estimates cannot tell from the
fastest. The search keeps the fastest layout of each complexity; they are simulated, the simplest
first, until one is within the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from fivefold.core import FivefoldError, Machine, counted, plan_keys
from fivefold.core.layout import MOST_RANKS, Layout, batch_remark, default_batch, rules, tuned
from fivefold.core.model import Shape
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost import OFFLOADS, grid_of_plan, require_possible_imbalance
from fivefold.cost.layer import LayerTimer
from fivefold.cost.stages import PATHS, ScheduleSize, pipeline_timer
from fivefold.cost.step import path_costs, require_room
from fivefold.planner.candidates import (
    LayoutCandidate,
    SearchResult,
    complexity,
    innermost,
    simpler_words,
    tp_crosses,
)
from fivefold.planner.error_bars import accuracy
from fivefold.planner.estimate import Estimate, estimate_plan, plan_memory
from fivefold.planner.search import may_fit, search_layouts, simulated
from fivefold.planner.setting import EstimateSetting, estimate_setting
from fivefold.planner.space import SearchSpace, layout_of, options_of

StageSizes = tuple[int, ...]  # layers of each stage
_MOST_MOVES = 8
_LEAST_GAIN = 1e-3  # share of a step: less is not worth a plan with explicit stages


def rebalance_stages(chosen: Estimate) -> Estimate:
    """The plan with other stages, if they make it faster; what fits must still fit."""
    plan = chosen.plan
    if plan.layout.pp == 1 or not plan.family.is_named or plan.stage_layers is not None:
        return chosen
    sizes = tuple(map(len, plan.stages))
    best = _best_sizes(chosen, sizes)
    if best == sizes:
        return chosen
    options = replace(plan.options, stage_layers=",".join(map(str, best)))
    other = estimate_plan(resolve(options), chosen.setting)
    fits = other.over <= 0 or chosen.over > 0
    return other if fits and other.step < (1 - _LEAST_GAIN) * chosen.step else chosen


def _best_sizes(chosen: Estimate, start_sizes: StageSizes) -> StageSizes:
    """Make the best move, as long as one helps."""
    seconds = _LongestPath(chosen)
    best, least = start_sizes, seconds.of(start_sizes)
    for _ in range(_MOST_MOVES):
        times = {sizes: seconds.of(sizes) for sizes in _moves(best, start_sizes)}
        if not times or min(times.values()) >= least:
            break
        best = min(times, key=times.__getitem__)
        least = times[best]
    return best


def _moves(sizes: StageSizes, start_sizes: StageSizes) -> Iterator[StageSizes]:
    """Move a layer from an end or a full stage to the last stage or one that has room."""
    last, most = len(sizes) - 1, max(start_sizes)
    full = [stage for stage, size in enumerate(sizes) if size == most]
    spaces = [stage for stage in range(1, len(sizes)) if sizes[stage] < most]
    givers = {0, last, *full[:1], *full[-1:]}
    takers = {last, *spaces[:2], *spaces[-2:]} & set(spaces)
    if sizes[0] < start_sizes[0]:
        takers.add(0)
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            step = {giver: -1, taker: 1}
            yield tuple(size + step.get(stage, 0) for stage, size in enumerate(sizes))


class _LongestPath:
    """Seconds of the longest path of one plan with any stage sizes."""

    def __init__(self, chosen: Estimate) -> None:
        plan, layout, batch = chosen.plan, chosen.plan.layout, chosen.plan.batch
        setting = chosen.setting.with_keys(plan.options)
        job = setting.arguments(plan.shape, grid_of_plan(plan), batch.seq)
        costs = path_costs(LayerTimer(*job))
        self.costs = np.array([float(np.asarray(cost).item()) for cost in costs])[:, None]
        self.timer, self.paths = pipeline_timer(plan.shape, batch.seq), PATHS[plan.family.paths]
        self.size = ScheduleSize(layout.pp, layout.chunks, batch.microbatches, self.costs)

    def of(self, sizes: StageSizes) -> float:
        spans = [range(start, stop) for start, stop in pairwise((0, *accumulate(sizes)))]
        return float((self.paths(self.timer.stages(spans), self.size) @ self.costs).max())


_AT_ONCE = 16  # simple layouts that are simulated together


def first_choice(
    space: SearchSpace,
    setting: EstimateSetting,
    result: SearchResult,
    fastest: Estimate,
    estimate: Callable[[LayoutCandidate], Estimate],
) -> Estimate:
    """The simplest layout that is equal to the fastest, with the best stages."""
    limit = (1 + accuracy().equal) * fastest.step
    domain = innermost(setting.machine)
    own = int(complexity(grid_of_plan(fastest.plan), domain).item())
    # Bounds told what may be equal to the fastest; simulated, more of the candidates are.
    pairs = [(code, choice) for (code, _), choice in result.simple.items()]
    pairs += [(int(complexity(choice.grid, domain).item()), choice) for choice in result.best]
    simple = [pair for pair in pairs if pair[0] < own and pair[1].seconds <= limit]
    simple.sort(key=lambda pair: (pair[0], pair[1].seconds))
    for start in range(0, len(simple), _AT_ONCE):
        layouts = [layout for _, layout in simple[start : start + _AT_ONCE]]
        for layout in simulated(space, setting, layouts):
            if layout.seconds <= limit:
                candidate = rebalance_stages(estimate(layout))
                if candidate.step <= limit and candidate.over <= 0:
                    return candidate
    return rebalance_stages(fastest)


def why_simpler(estimate: Estimate, other: Estimate) -> str:
    """In what one plan is simpler than another; empty if it is not."""
    own_grid, other_grid = grid_of_plan(estimate.plan), grid_of_plan(other.plan)
    return simpler_words(own_grid, other_grid, innermost(estimate.setting.machine))


def is_same(estimate: Estimate, other: Estimate) -> bool:
    """Whether two plans are the same but for the layers of their stages."""
    own_options, other_options = (
        replace(candidate.plan.options, stage_layers=None) for candidate in (estimate, other)
    )
    return own_options == other_options


Progress = Callable[[float], None]
OBJECTIVES = ("tokens", "gpus", "gpu-hours")
# Candidates kept for each plan that is shown: some differ only in what changes nothing.
_CANDIDATES_PER_PLAN = 12
_MOST_FRONT = 5
_NEAR = 1.25  # times the usable memory: what needs more is not searched on twice as many GPUs
_MOST_ACTIONS = 30_000  # of a schedule that is simulated only for the front


@dataclass(frozen=True)
class PlanRequest:
    """A job whose layout is open."""

    options: PlanOptions
    shape: Shape
    space: SearchSpace
    setting: EstimateSetting
    notes: tuple[str, ...] = ()

    def on(self, gpus: int) -> PlanRequest:
        """The same request on another number of GPUs."""
        return replace(self, space=replace(self.space, gpus=gpus))


@dataclass(frozen=True)
class PlanResult:
    """The first choice, then other plans by their simulated steps, and how many layouts were
    estimated. The first choice is the simplest of those that are equal to the fastest."""

    request: PlanRequest
    plans: tuple[Estimate, ...]
    fastest: Estimate
    front: tuple[Estimate, ...]  # each more memory for less time
    candidates: int
    passed_over: int
    seconds: float

    @property
    def rival(self) -> Estimate | None:
        """The fastest, or the next best if that is the first choice."""
        if self.fastest is not self.plans[0]:
            return self.fastest
        return self.plans[1] if len(self.plans) > 1 else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the first choice, though nothing better fits."""
        first, machine = self.plans[0], self.request.setting.machine
        # Whether tensor parallelism of a plan crosses more than the innermost link.
        if not bool(tp_crosses(grid_of_plan(first.plan), first.setting.machine).item()):
            return ()
        why = "as given" if "tp" in (self.request.space.fixed or {}) else "nothing else fits"
        return (f"tp={first.plan.layout.tp} leaves {machine.tiers[0].name}: {why}",)

    @property
    def simpler(self) -> str:
        """In what the first choice is simpler than the fastest; empty if it is the fastest."""
        return why_simpler(self.plans[0], self.fastest)


class NothingFits(FivefoldError):
    """No layout fits a job: the plan that needs least memory, None if no layout is legal, the
    smallest number of GPUs on which something fits, if there is one, and changes on these GPUs."""

    def __init__(
        self,
        message: str,
        leanest: Plan | None = None,
        gpus: int | None = None,
        changes: Sequence[WayOut] = (),
    ) -> None:
        self.leanest, self.gpus, self.changes = leanest, gpus, tuple(changes)
        extra = () if gpus is None else (f"--gpus {gpus}",)
        self.ways = (*extra, *(change.option for change in changes))
        super().__init__(message)


class WayOut(NamedTuple):
    """A change of a job after which it fits: what it is, and the option that makes it."""

    what: str
    option: str


def plan_request(
    options: PlanOptions,
    machine: Machine,
    fixed: Mapping[str, int | str],
    *,
    precision: str,
    headroom: float,
    kernels: str = "compiled",
    imbalance: float = 1.0,
    stack: str | None = None,
) -> PlanRequest:
    """A request from plan options, with defaults for the sequence length and the batch."""
    shape = models.with_overrides(models.load(options.model), options.set)
    require_possible_imbalance(shape, imbalance)
    gpus = options.gpus or 1
    seq = options.seq if options.seq is not None else min(8192, shape.max_seq)
    adapters = options.train.lora > 0
    batch = options.batch
    if batch is None:
        batch = default_batch(gpus, seq, shape, adapters=adapters)
    reasons = rules.problems(Layout(), shape, seq=seq, batch=batch, microbatch_size=1)
    reasons += list(rules.bad_counts({"seq": seq, "gpus": gpus}).values())
    if reasons:
        raise FivefoldError("; ".join(dict.fromkeys(reasons)))
    setting, notes = estimate_setting(machine, precision, headroom, kernels, imbalance, stack)
    if options.batch is None:
        notes.append(
            f"global batch {counted(batch, 'sequence')} by default: say another with --batch"
        )
    if remark := batch_remark(batch * seq, shape, adapters=adapters):
        notes.append(remark)
    keys: dict[str, Any] = plan_keys(precision)
    if precision not in keys.values():
        runs_in = keys["precision"]
        notes.append(f"estimated in {precision}; the runtime and the written plan have {runs_in}")
    options = replace(options, seq=seq, **keys)
    setting = setting.with_keys(options)
    if setting.stack.fp8 is not None:
        notes.append(f"{precision}: {setting.stack.fp8.describe()}")
    if options.train.offload_kind != "none":
        fixed = {"offload": options.train.offload_kind, **fixed}
    space = SearchSpace(shape, gpus, seq, batch, domain_sizes(machine), fixed, options=options)
    return PlanRequest(options, shape, space, setting, tuple(notes))


def domain_sizes(machine: Machine) -> tuple[int, ...]:
    """Sizes of the machine's domains; sharding may stay inside one."""
    return tuple(tier.size for tier in machine.tiers if tier.size)


def best_plans(request: PlanRequest, top: int, on_progress: Progress | None = None) -> PlanResult:
    """Search, simulate the best candidates, rank them by that and put the simplest of equal ones
    first; raise if nothing fits."""
    shown = max(1, top)
    keep, equal = shown * _CANDIDATES_PER_PLAN, accuracy().equal
    result = search_layouts(
        request.space, request.setting, keep, on_progress, shown=shown, equal=equal
    )
    if not result.best:
        raise _refusal(request, result)
    ranked = _fitting(request, result, shown)
    if not ranked:
        raise _refusal(request, result)
    first = first_choice(
        request.space,
        request.setting,
        result,
        ranked[0],
        lambda candidate: _estimated(request, candidate, ranked),
    )
    alternatives = [estimate for estimate in ranked if not is_same(estimate, first)]
    plans = (first, *alternatives)[:top]
    fitting = [
        candidate for candidate in result.front if candidate.bytes <= request.setting.capacity
    ]
    front = tuple(estimate for estimate in _front(request, fitting, ranked) if estimate.over <= 0)
    for choice in (*plans, *front):
        require_room(choice.name, choice.memory, request.setting.machine.memory)
    return PlanResult(
        request,
        plans=plans,
        fastest=min(first, ranked[0], key=lambda estimate: estimate.step),
        front=tuple(_restored_front(front)),
        candidates=result.candidates,
        passed_over=result.passed_over,
        seconds=result.seconds,
    )


def _front(
    request: PlanRequest, candidates: list[LayoutCandidate], known: Sequence[Estimate]
) -> tuple[Estimate, ...]:
    """Some of the front, simulated; without those whose own schedule holds more than fits, and
    those that turn out slower than the bound of a candidate with less memory."""
    few = _some(candidates)
    pairs = [(candidate, _estimated(request, candidate, known)) for candidate in few]
    return tuple(
        estimate
        for candidate, estimate in pairs
        if estimate.over <= 0
        and not any(
            other.bytes < candidate.bytes and other.seconds < estimate.step for other in candidates
        )
    )


def _some(front: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Some of a long front, from end to end, without those that take long to simulate."""
    front = [candidate for candidate in front if _num_actions(candidate) <= _MOST_ACTIONS] or front[
        -1:
    ]
    if not front:  # nothing with less memory than the first choice fits
        return []
    places = {round(i * (len(front) - 1) / (_MOST_FRONT - 1)) for i in range(_MOST_FRONT)}
    return [front[index] for index in sorted(places)]


def _num_actions(candidate: LayoutCandidate) -> float:
    """Actions of all ranks in a step, at most."""
    return 3 * float(
        (candidate.grid.pp * candidate.grid.chunks * candidate.grid.microbatches).item()
    )


def _distinct(candidates: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """The best of those that differ only in chunks or in what changes nothing, in order."""
    groups: dict[tuple[float, ...], LayoutCandidate] = {}
    for candidate in sorted(candidates, key=_sort_key):
        groups.setdefault(candidate.choice, candidate)
    return list(groups.values())


def _sort_key(candidate: LayoutCandidate) -> tuple[float, ...]:
    """Seconds to four digits, then the index of the context kind, then bytes."""
    return candidate.rounded, candidate.grid.context.item(), candidate.bytes


def _fitting(request: PlanRequest, result: SearchResult, most: int) -> list[Estimate]:
    """The best that fit, simulated, or else the front's; none, if the closed forms of a search
    count less than the actions of each plan hold."""
    fitting: list[Estimate] = []
    best = _distinct(result.best)
    for index, candidate in enumerate([*best, *result.front]):
        if index == len(best) and fitting:
            break
        plan = _plan_of(request, candidate)
        memory = plan_memory(plan, request.setting, request.setting.capacity)
        if memory.total > request.setting.capacity:
            continue
        fitting.append(estimate_plan(plan, request.setting, memory, candidate.makespan))
        if len(fitting) == most:
            break
    return sorted(fitting, key=speed_rank)


def speed_rank(estimate: Estimate) -> tuple[float, float]:
    """By the step, up to rounding, then by bytes."""
    return float(f"{estimate.step:.9g}"), estimate.total


def _plan_of(request: PlanRequest, candidate: LayoutCandidate) -> Plan:
    return resolve(options_of(candidate.grid, request.options))


def _estimated(
    request: PlanRequest, candidate: LayoutCandidate, known: Sequence[Estimate]
) -> Estimate:
    """The estimate of a candidate, which may be `known`: following its ranks takes longest."""
    plan = _plan_of(request, candidate)
    estimates = (
        known_estimate for known_estimate in known if known_estimate.plan.options == plan.options
    )
    if (estimate := next(estimates, None)) is not None:
        return estimate
    return estimate_plan(plan, request.setting, makespan=candidate.makespan)


def _restored_front(estimates: tuple[Estimate, ...]) -> Iterator[Estimate]:
    """Restore the front: the order of simulated steps may differ from that of bounds."""
    fastest = float("inf")
    for estimate in sorted(estimates, key=lambda point: point.total):
        if estimate.step < fastest:
            fastest = estimate.step
            yield estimate


def _refusal(request: PlanRequest, result: SearchResult) -> NothingFits:
    """Why nothing fits, and how many GPUs would be enough."""
    space, setting = request.space, request.setting
    head = f"{request.shape.name} on {space.gpus_text} of {setting.machine.name}"
    fixed = " ".join(f"{key}={value}" for key, value in (space.fixed or {}).items())
    if result.leanest is None:
        suffix = f" with {fixed}" if fixed else ""
        return NothingFits(
            f"{head}: no legal layout{suffix} for a global batch of "
            f"{counted(space.batch, 'sequence')} of {space.seq:,} tokens; change --batch, --gpus "
            "or fix"
        )
    lean, memory = result.leanest, setting.machine.memory
    plan = _plan_of(request, lean)
    size = plan_memory(plan, setting).total
    need = f"needs {size / 2**30:,.1f} GiB of {memory / 2**30:,.1f} a GPU"
    advice = "lower the batch, the sequence or headroom, or fix less"
    changes = ways_out(request)
    if enough := gpus_needed(request, lean.bytes):
        advice = f"it takes {counted(enough, 'GPU')}"
    elif changes:
        advice = "no number of GPUs is enough"
    if changes:
        listed = "; ".join(f"{change.option} ({change.what})" for change in changes)
        advice += f", or on {space.gpus_text} one of: {listed}"
    elif _may_be_leaner(request):
        also = "" if request.options.train.tuning is not None else " nor LoRA"
        advice += f"; on {space.gpus_text} neither shorter rows nor bf16 states{also} are enough"
    away = OFFLOADS[round(lean.grid.offload.item())]
    advice += f"; recompute {lean.grid.rules[lean.rule]} and offload {away} are in that"
    leanest = f"the leanest layout, {layout_of(lean.grid)}, {need}"
    if size > memory:
        return NothingFits(f"{head} does not fit: {leanest}; {advice}", plan, enough, changes)
    usable = f"of which {setting.capacity / 2**30:,.1f} may be used"
    reason = f"{head} is tight: {leanest}, {usable}; {advice}, or a lower headroom"
    return NothingFits(reason, plan, enough, changes)


_LEANER: dict[str, dict[str, Any]] = {
    "": {},
    "bf16 optimizer states and gradients": {"states": "bf16", "grad_dtype": "bf16"},
    "LoRA adapters, the weights frozen": {"lora": 16},
}
_SHORTEST = 256  # tokens of a row


def ways_out(request: PlanRequest) -> list[WayOut]:
    """Changes of a job that does not fit after which something does on as many GPUs. A search has
    tried recomputation and offload already, unless they are fixed."""
    ways: list[WayOut] = []
    if not _may_be_leaner(request):
        return ways
    fixed = request.space.fixed or {}
    for key in ("recompute", "offload"):
        free = {name: value for name, value in fixed.items() if name != key}
        if key in fixed and has_plan(replace(request, space=replace(request.space, fixed=free))):
            ways.append(WayOut(f"the planner chooses {key}", f"without {key}={fixed[key]}"))
    for what, keys in _LEANER.items():
        leaner = _with_keys(request, keys)
        if leaner is None or (seq := _longest_row(leaner)) is None:
            continue
        rows = "" if seq == request.space.seq else f"--seq {seq} "
        settings = "--set " + " ".join(f"{key}={value}" for key, value in keys.items())
        names = filter(None, (what, "shorter rows" if rows else ""))
        ways.append(WayOut(" and ".join(names), f"{rows}{settings if keys else ''}".strip()))
    return ways


def _may_be_leaner(request: PlanRequest) -> bool:
    """Whether to search for changes on the same GPUs: beyond a node more GPUs are the usual answer,
    and a search takes seconds."""
    return request.space.gpus <= request.setting.machine.gpus_per_node


def _longest_row(request: PlanRequest) -> int | None:
    """Tokens of a row, halved until something fits; None if nothing does with the shortest."""
    seq, options = request.space.seq, request.options
    lengths = [seq >> halvings for halvings in range(16) if seq >> halvings >= _SHORTEST] or [seq]
    for length in (lengths[-1], *lengths):
        space = replace(request.space, seq=length)
        fits = has_plan(replace(request, space=space, options=replace(options, seq=length)))
        if fits and (length != lengths[-1] or len(lengths) == 1):
            return length
        if not fits and length == lengths[-1]:
            return None
    return lengths[-1]


def _with_keys(request: PlanRequest, keys: Mapping[str, Any]) -> PlanRequest | None:
    """The request with other keys of a plan or of training; None where they cannot be, or are."""
    if "lora" in keys and request.options.train.tuning is not None:
        return None
    own = {key: value for key, value in keys.items() if key == "grad_dtype"}
    train = {key: value for key, value in keys.items() if key not in own}
    try:
        options = replace(request.options, **own, train=replace(request.options.train, **train))
        tuned(request.shape, options.train.tuning, options.precision == "fp8")
    except FivefoldError:
        return None
    space = replace(request.space, options=options)
    setting = request.setting.with_keys(options)
    return replace(request, options=options, space=space, setting=setting)


def gpus_needed(request: PlanRequest, leanest: float) -> int | None:
    """The smallest number of GPUs on which something fits, doubling from twice as many; `leanest`:
    bytes a GPU of the leanest layout now, of which twice as many GPUs need half or more."""
    gpus, halved = 2 * request.space.gpus, leanest / 2
    while gpus <= MOST_RANKS:
        near = halved <= _NEAR * request.setting.capacity
        if near and has_plan(request.on(gpus)):
            return gpus
        gpus, halved = 2 * gpus, halved / 2
    return None


def has_plan(request: PlanRequest) -> bool:
    """Whether `best_plans` finds one: what only closed forms find to fit may not."""
    job = request.space, request.setting
    result = may_fit(*job) and search_layouts(*job, _CANDIDATES_PER_PLAN, shown=1, leanest=False)
    return bool(result and result.best and _fitting(request, result, 1))


def fewest_gpus(request: PlanRequest, top: int, on_progress: Progress | None = None) -> PlanResult:
    """The best plans on the fewest GPUs, halving their number as long as something fits."""
    result = best_plans(request, top, on_progress)
    for gpus in _halves(request.space.gpus):
        smaller = request.on(gpus)
        if not search_layouts(smaller.space, smaller.setting, 1).best:
            break
        result = best_plans(smaller, top, on_progress)
    return result


def fewest_gpu_hours(
    request: PlanRequest, top: int, on_progress: Progress | None = None
) -> PlanResult:
    """The best plans with the fewest GPU-hours per token, on the given number of GPUs or fewer.

    Offload is left out unless it is fixed: its cost on the host is not known.
    """
    fixed = {"offload": "none", **(request.space.fixed or {})}
    request = replace(request, space=replace(request.space, fixed=fixed))
    best = best_plans(request, top, on_progress)
    for gpus in _halves(request.space.gpus):
        smaller = request.on(gpus)
        if not search_layouts(smaller.space, smaller.setting, 1).best:
            break
        result = best_plans(smaller, top, on_progress)
        if result.plans[0].tokens_per_s_per_gpu > best.plans[0].tokens_per_s_per_gpu:
            best = result
    return best


def _halves(gpus: int) -> Iterator[int]:
    while gpus % 2 == 0 and gpus > 1:
        gpus //= 2
        yield gpus


def estimate_on_machine(
    plan: Plan,
    machine: Machine,
    *,
    precision: str,
    headroom: float,
    kernels: str = "compiled",
    imbalance: float = 1.0,
    stack: str | None = None,
) -> Estimate:
    """Estimate a plan whose layout is given."""
    require_possible_imbalance(plan.shape, imbalance)
    setting, notes = estimate_setting(machine, precision, headroom, kernels, imbalance, stack)
    return estimate_plan(replace(plan, notes=(*plan.notes, *notes)), setting)

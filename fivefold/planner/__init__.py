"""From a layout of a grid back to what a user would have said, so that it can be resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fivefold.core import legality, models, rules
from fivefold.core.errors import FivefoldError
from fivefold.core.layout import MOST_RANKS, Layout
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.core.precision import PRECISIONS, RUNTIME_PRECISIONS
from fivefold.core.shape import Shape
from fivefold.cost.grid import (
    CONTEXTS,
    OFFLOADS,
    RECOMPUTE,
    SCHEDULES,
    LayoutGrid,
    require_possible_imbalance,
)
from fivefold.cost.stack import BY_KERNELS
from fivefold.planner.estimate import Estimate, estimate_plan, rebalance_stages
from fivefold.planner.search import EstimateSetting, LayoutCandidate, SearchResult, search_layouts
from fivefold.planner.space import SearchSpace


def layout_of(grid: LayoutGrid) -> Layout:
    """The degrees of a one-element grid."""
    return Layout(
        replicate=_whole(grid, "replicate"),
        shard=_whole(grid, "shard"),
        tp=_whole(grid, "tp"),
        pp=_whole(grid, "pp"),
        cp=_whole(grid, "cp"),
        ep=_whole(grid, "ep"),
        etp=_whole(grid, "etp"),
        zero=_whole(grid, "zero"),
        sp=bool(grid.sp.item()),
        context=CONTEXTS[_whole(grid, "context")],
        chunks=_whole(grid, "chunks"),
    )


def options_of(grid: LayoutGrid, base: PlanOptions) -> PlanOptions:
    """`base` with all that a one-element grid decides; nothing of its layout is left open."""
    layout = layout_of(grid)
    return replace(
        base,
        layout=str(layout),
        gpus=layout.world,
        zero=layout.zero,
        gather=None,
        sp=layout.sp,
        context=layout.context,
        schedule=SCHEDULES[_whole(grid, "schedule")],
        chunks=layout.chunks,
        stage_layers=None,
        microbatches=_whole(grid, "microbatches"),
        microbatch_size=_whole(grid, "microbatch_size"),
        batch=None,
        recompute=RECOMPUTE[_whole(grid, "recompute")],
    )


def _whole(grid: LayoutGrid, name: str) -> int:
    return round(float(getattr(grid, name).item()))


# From options to the best plans: what is asked, searched, played and ranked.


Progress = Callable[[float], None]
OBJECTIVES = ("tokens", "gpus", "gpu-hours")
# What is kept for each layout that is shown: some differ only in what changes nothing.
_SPARE = 12
_MOST_FRONT = 5
_MOST_ACTIONS = 30_000  # of a schedule that is played for the front alone
_LEAST_TOKENS = 4 << 20  # of a step, where nobody says
_TOKENS_PER_GPU = 1 << 10


@dataclass(frozen=True)
class PlanRequest:
    """A job whose layout is open."""

    options: PlanOptions
    shape: Shape
    question: SearchSpace
    setting: EstimateSetting
    notes: tuple[str, ...] = ()

    def on(self, gpus: int) -> PlanRequest:
        """The same on another number of GPUs."""
        return replace(self, question=replace(self.question, gpus=gpus))


@dataclass(frozen=True)
class PlanResult:
    """Plans by their played step, the fastest first, and how many layouts were weighed."""

    request: PlanRequest
    plans: tuple[Estimate, ...]
    front: tuple[Estimate, ...]  # each more memory for less time
    candidates: int
    passed_over: int
    seconds: float


def estimate_setting(
    machine: Machine, precision: str, headroom: float, kernels: str, imbalance: float
) -> tuple[EstimateSetting, list[str]]:
    """How the job is estimated; a precision that the chip lacks is replaced, and that is said."""
    known = machine.peaks.known()
    stack = BY_KERNELS[kernels]
    if precision in known:
        return EstimateSetting(machine, stack, precision, headroom, imbalance), []
    if precision not in RUNTIME_PRECISIONS:
        machine.peak(precision)  # which says what there is
    other = next((each for each in RUNTIME_PRECISIONS if each in known), next(iter(known)))
    note = f"{machine.name} has no {precision} units: estimated in {other}"
    return EstimateSetting(machine, stack, other, headroom, imbalance), [note]


def plan_request(
    options: PlanOptions,
    machine: Machine,
    fixed: Mapping[str, int | str],
    *,
    precision: str,
    headroom: float,
    kernels: str = "compiled",
    imbalance: float = 1.0,
) -> PlanRequest:
    """What is asked, with defaults for the sequence and the batch."""
    shape = models.with_overrides(models.load(options.model), options.set)
    require_possible_imbalance(shape, imbalance)
    gpus = options.gpus or 1
    seq = options.seq if options.seq is not None else min(8192, shape.max_seq)
    batch = default_batch(gpus, seq) if options.batch is None else options.batch
    reasons = legality.problems(Layout(), shape, seq=seq, batch=batch, microbatch_size=1)
    reasons += list(rules.bad_counts({"seq": seq, "gpus": gpus}).values())
    if reasons:
        raise FivefoldError("; ".join(dict.fromkeys(reasons)))
    setting, notes = estimate_setting(machine, precision, headroom, kernels, imbalance)
    if options.batch is None:
        notes.append(f"global batch {batch:,} sequences by default: say another with --batch")
    runs_in = PRECISIONS[precision].runs_in
    if runs_in != precision:
        notes.append(f"estimated in {precision}; the runtime and the written plan have {runs_in}")
    options = replace(options, seq=seq, precision=runs_in)
    question = SearchSpace(shape, gpus, seq, batch, domain_sizes(machine), fixed)
    return PlanRequest(options, shape, question, setting, tuple(notes))


def domain_sizes(machine: Machine) -> tuple[int, ...]:
    """Sizes of the machine's domains, inside which sharding may stay."""
    return tuple(tier.size for tier in machine.tiers if tier.size)


def default_batch(gpus: int, seq: int) -> int:
    """Sequences of 4 Mi tokens, of 1 Ki a GPU on a large machine; data ranks can share them."""
    tokens = max(_LEAST_TOKENS, _TOKENS_PER_GPU * gpus)
    odd = gpus
    while odd % 2 == 0 and odd:
        odd //= 2
    return -(-max(1, tokens // seq) // max(1, odd)) * max(1, odd)


def best_plans(asked: PlanRequest, top: int, on_progress: Progress | None = None) -> PlanResult:
    """Search, play what is best, and rank by what was played; refuse where nothing fits."""
    result = search_layouts(asked.question, asked.setting, max(1, top) * _SPARE, on_progress)
    if not result.best:
        raise FivefoldError(_refusal(asked, result))
    played = sorted(_played(asked, _distinct(result.best)[:top]), key=lambda one: one.step)
    played[0] = rebalance_stages(played[0])
    fitting = [one for one in result.front if one.bytes <= asked.setting.capacity]
    front = _front(asked, fitting)
    numbers = (result.candidates, result.passed_over, result.seconds)
    return PlanResult(asked, tuple(played), tuple(_falling(front)), *numbers)


def _front(asked: PlanRequest, found: list[LayoutCandidate]) -> tuple[Estimate, ...]:
    """Some of the front, played; not those whose bound had promised more than a leaner one has."""
    few = _few(found)
    pairs = zip(few, _played(asked, few), strict=True)
    return tuple(
        each
        for one, each in pairs
        if not any(other.bytes < one.bytes and other.seconds < each.step for other in found)
    )


def _few(front: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Some of a long front, from end to end, but for those that would take long to play."""
    front = [one for one in front if _num_actions(one) <= _MOST_ACTIONS] or front[-1:]
    places = {round(i * (len(front) - 1) / (_MOST_FRONT - 1)) for i in range(_MOST_FRONT)}
    return [front[place] for place in sorted(places)]


def _num_actions(one: LayoutCandidate) -> float:
    """Of all ranks in a step, at most."""
    return 3 * float((one.grid.pp * one.grid.chunks * one.grid.microbatches).item())


def _distinct(found: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Of those that differ only in chunks or in what changes nothing, the best, in order."""
    groups: dict[tuple[float, ...], LayoutCandidate] = {}
    for one in sorted(found, key=_plainness):
        grid = one.grid
        columns = (grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp, grid.microbatch_size)
        key = tuple(each.item() for each in (*columns, grid.recompute, grid.schedule))
        groups.setdefault(key, one)
    return list(groups.values())


def _plainness(one: LayoutCandidate) -> tuple[float, ...]:
    """Seconds to four digits, the kind of context by its place in the list, bytes."""
    return float(f"{one.seconds:.4g}"), one.grid.context.item(), one.bytes


def _played(asked: PlanRequest, found: list[LayoutCandidate]) -> Iterator[Estimate]:
    for one in found:
        plan = resolve(options_of(one.grid, asked.options))
        yield estimate_plan(plan, asked.setting, OFFLOADS[int(one.grid.offload.item())])


def _falling(found: tuple[Estimate, ...]) -> Iterator[Estimate]:
    """The front again, for played steps may lie otherwise than ranked ones."""
    fastest = float("inf")
    for one in sorted(found, key=lambda each: each.total):
        if one.step < fastest:
            fastest = one.step
            yield one


def _refusal(asked: PlanRequest, result: SearchResult) -> str:
    """Why nothing fits, and how many GPUs it would take."""
    question, setting = asked.question, asked.setting
    head = f"{asked.shape.name} on {question.place} of {setting.machine.name}"
    fixed = " ".join(f"{key}={value}" for key, value in (question.fixed or {}).items())
    if result.leanest is None:
        given = f" with {fixed}" if fixed else ""
        return (
            f"{head}: no legal layout{given} for a global batch of {question.batch:,} sequences of "
            f"{question.seq:,} tokens; change --batch, --gpus or --fix"
        )
    lean = result.leanest
    need = f"{lean.bytes / 2**30:,.1f} GiB of {setting.capacity / 2**30:,.1f}"
    way = "lower the batch, the sequence or --headroom, or fix less"
    if enough := gpus_needed(asked):
        way = f"it takes {enough:,} GPUs"
    leanest = f"the leanest layout, {layout_of(lean.grid)}, needs {need} a GPU"
    return f"{head} does not fit: {leanest}; {way}"


def gpus_needed(asked: PlanRequest) -> int | None:
    """The smallest number of GPUs, in powers of two from twice as many, on which something fits."""
    gpus = 2 * asked.question.gpus
    while gpus <= MOST_RANKS:
        if search_layouts(asked.on(gpus).question, asked.setting, 1).best:
            return gpus
        gpus *= 2
    return None


def fewest_gpus(asked: PlanRequest, top: int, on_progress: Progress | None = None) -> PlanResult:
    """The answer on the fewest GPUs, halving those that are there as long as something fits."""
    found = best_plans(asked, top, on_progress)
    for gpus in _halves(asked.question.gpus):
        smaller = asked.on(gpus)
        if not search_layouts(smaller.question, smaller.setting, 1).best:
            break
        found = best_plans(smaller, top, on_progress)
    return found


def fewest_gpu_hours(
    asked: PlanRequest, top: int, on_progress: Progress | None = None
) -> PlanResult:
    """The answer with the fewest GPU-hours a token, on as many GPUs as there are or fewer.

    Offload is left out unless it is asked for: what it costs the host is not known.
    """
    fixed = {"offload": "none", **(asked.question.fixed or {})}
    asked = replace(asked, question=replace(asked.question, fixed=fixed))
    best = best_plans(asked, top, on_progress)
    for gpus in _halves(asked.question.gpus):
        smaller = asked.on(gpus)
        if not search_layouts(smaller.question, smaller.setting, 1).best:
            break
        found = best_plans(smaller, top, on_progress)
        if found.plans[0].tokens_per_s_per_gpu > best.plans[0].tokens_per_s_per_gpu:
            best = found
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
) -> Estimate:
    """A plan whose layout is given."""
    require_possible_imbalance(plan.shape, imbalance)
    setting, notes = estimate_setting(machine, precision, headroom, kernels, imbalance)
    return estimate_plan(replace(plan, notes=(*plan.notes, *notes)), setting)

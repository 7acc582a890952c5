"""From the text after `--schedule` to a schedule: a name, `auto`, or a file, each checked.

`require_legal` is the one legality check, for our own schedules and for those of users. A file has
one line (or CSV row) per rank, in the text form of actions. Files written by torch's pipelining
work as they are; the transfers and gathers that its lowered form lists are skipped, because the
runtime derives its own.

`auto`: searches for the schedule with the smallest makespan (or span) within a memory limit.

A schedule is a frame (the order of forwards and input gradients on each rank) with weight gradients
filled in. The search

1. plays every named schedule that fits, so that its result is never worse;
2. tries frames of many kinds with several degrees of patience: those of the named zero-bubble
   schedules, list scheduling on every placement with all or part of the memory, and building blocks
   of the V if memory is too scarce for list scheduling. It uses fewer microbatches than the job if
   there are many, because the bubble is at both ends;
3. plays the best of these with all microbatches;
4. refines the patience of the best, rank by rank, until its budget of played actions is spent.

It stops as soon as it reaches a lower bound. The budget counts actions, not seconds, so that the
result does not depend on the machine.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from fivefold.core import BadFile, IllegalSchedule, bullets, counted, is_code, load_code
from fivefold.core.schedule import catalog
from fivefold.core.schedule.catalog import BuildingBlock, repeat
from fivefold.core.schedule.clock import Costs, Goal, Objective, peak_activations, play
from fivefold.core.schedule.definition import (
    AUTO,
    PLACEMENTS,
    Family,
    Rule,
    fill_and_drain,
    too_large,
)
from fivefold.core.schedule.fill import (
    Filled,
    Frame,
    Lowered,
    Patience,
    Priority,
    eager,
    fill,
    lower,
)
from fivefold.core.schedule.in_flight import depth_in_flight
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Overlap,
    Placement,
    Schedule,
    Step,
    actions_of,
    linear_placement,
    loop_placement,
    parse_steps,
    v_placement,
)

_BY_MEMORY = (("zb-h2", "zb-h1"), ("zb-interleaved",), ("zb-v", "v-half", "v-min"))


class Seed(NamedTuple):
    """Makes a frame for any number of microbatches, with at most `chunk_limit` chunks of
    activations."""

    origin: str
    placement: Placement
    chunk_limit: int
    frame: Callable[[int], Frame | None]


def seeds(num_ranks: int, num_microbatches: int, max_chunks: int, goal: Goal) -> Iterator[Seed]:
    """Every seed within the memory limit and `max_chunks`."""
    limit = num_microbatches if goal.memory_limit is None else goal.memory_limit
    yield from _named(num_ranks, num_microbatches, max_chunks, limit)
    for placement in _placements(num_ranks, max_chunks):
        yield from _eager(placement, goal, limit)
    if max_chunks >= 2 and limit < num_ranks:
        yield from _blocks(num_ranks, limit)


def _named(num_ranks: int, num_microbatches: int, max_chunks: int, limit: float) -> Iterator[Seed]:
    """For each kind of placement the named order that uses most of the available memory."""
    legal = list(catalog.synchronous(num_ranks, num_microbatches, max_chunks))
    for names in _BY_MEMORY:
        pairs = [
            (family, chunks) for name in names for family, chunks in legal if family.name == name
        ]
        fitting = [pair for pair in pairs if _peak(*pair, num_ranks, num_microbatches) <= limit]
        for family, chunks in fitting[:1] if len(names) > 1 else pairs:
            frame = partial(_frame_of, family, num_ranks, chunks)
            placement = PLACEMENTS[family.placement](num_ranks, chunks)
            origin = f"the order of {family.name}, refilled"
            yield Seed(origin, placement, int(limit * chunks), frame)


def _peak(family: Family, chunks: int, num_ranks: int, num_microbatches: int) -> float:
    trial = family.make(num_ranks, min(num_microbatches, 2 * num_ranks), chunks)
    return max(peak_activations(trial))


def _frame_of(family: Family, num_ranks: int, num_chunks: int, num_microbatches: int) -> Frame:
    schedule = family.make(num_ranks, num_microbatches, num_chunks)
    return tuple(
        tuple(
            step
            for step in steps
            if isinstance(step, Action) and step.kind in (FORWARD, INPUT_GRAD)
        )
        for steps in schedule.order
    )


def _placements(num_ranks: int, max_chunks: int) -> Iterator[Placement]:
    yield linear_placement(num_ranks)
    yield from (loop_placement(num_ranks, chunks) for chunks in range(2, max_chunks + 1))
    if max_chunks >= 2:
        yield v_placement(num_ranks)


def _eager(placement: Placement, goal: Goal, limit: float) -> Iterator[Seed]:
    """List scheduling with all of the memory, or with just enough to fill the pipeline."""
    chunks, costs = placement.num_chunks, goal.costs_of(placement)
    enough = placement.num_ranks * chunks
    priorities: tuple[Priority, ...] = ("gradients",)
    if placement == v_placement(placement.num_ranks):
        priorities = ("gradients", "inner")
    for chunk_limit in sorted({min(int(limit * chunks), count) for count in (enough, 2 * enough)}):
        for priority in priorities:

            def frame(
                num: int, chunk_limit: int = chunk_limit, priority: Priority = priority
            ) -> Frame | None:
                return eager(placement, num, costs, chunk_limit, priority)

            origin = f"list scheduling on the {placement.kind} placement, {priority} first"
            yield Seed(origin, placement, int(limit * chunks), frame)


def _blocks(num_ranks: int, limit: float) -> Iterator[Seed]:
    for hops in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2)):
        for turns in ((1, 1, 1), (3, 2, 2)):
            frame = partial(repeat, BuildingBlock(hops, turns), num_ranks)
            origin = f"V blocks with hops {hops} and turns {turns}"
            yield Seed(origin, v_placement(num_ranks), int(2 * limit), frame)


_BUDGET = 700_000
_MAKING = 6  # cost of making a frame, in played actions per stage and microbatch
_MOST_SWEPT = 4
_SHARES = (0.01, 0.5, 1.0)
_FINE_SHARES = (0.01, 0.15, 0.35, 0.5, 0.65, 0.85, 1.0, 2.0)
_TINY = 1e-9


class FoundSchedule(NamedTuple):
    """The best schedule, and a description of where it comes from."""

    schedule: Schedule
    origin: str


class _Trial(NamedTuple):
    """A seed with a patience, and the objective it should reach."""

    estimate: float
    number: int  # breaks ties, so that seeds are never compared
    seed: Seed
    patience: Patience


class _Candidate(NamedTuple):
    """A full-size frame with a patience, and its objective."""

    objective: float
    number: int
    lowered: Lowered
    seed: Seed
    patience: Patience


def search(num_ranks: int, num_microbatches: int, max_chunks: int, goal: Goal) -> FoundSchedule:
    """The best schedule found for p ranks and m microbatches with at most `max_chunks` chunks."""
    limit = goal.memory_limit
    if limit == math.inf:
        goal = replace(goal, memory_limit=None)
    elif limit is not None and not limit >= 1:  # not a number is refused with the rest
        raise IllegalSchedule(f"a memory limit of {limit:g} holds no microbatch; give at least 1")
    return _Search(num_ranks, num_microbatches, max_chunks, goal).run()


class _Search:
    def __init__(self, num_ranks: int, num_microbatches: int, max_chunks: int, goal: Goal) -> None:
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.max_chunks, self.goal = max_chunks, goal
        # Two rounds of microbatches show the whole fill and drain; more only repeat the middle.
        self.trial_size = min(num_microbatches, 2 * num_ranks)
        self.budget = _BUDGET
        # Two refinements at full size cost at least this; trials must leave that much.
        most_stages = num_ranks * min(max_chunks, 2)
        self.reserve = min(_BUDGET // 2, 2 * _MAKING * most_stages * num_microbatches)
        self.best = math.inf
        self.result: FoundSchedule | None = None

    def run(self) -> FoundSchedule:
        self._play_named()
        full = [self._at_full_size(trial) for trial in self._sweep(self._screen())]
        for candidate in sorted(
            candidate_pair for candidate_pair in full if candidate_pair is not None
        ):
            self._refine(candidate)
        return self.result or self._certain()

    def _certain(self) -> FoundSchedule:
        """If the budget is spent before anything fits: list scheduling, which always does.

        With one stage per rank, a microbatch that has gone forward can always come back.
        """
        trials = (
            _Trial(math.inf, 0, seed, Patience.uniform(self.num_ranks))
            for seed in seeds(self.num_ranks, self.num_microbatches, 1, self.goal)
            if seed.chunk_limit >= 1
        )
        while self.result is None:
            self._at_full_size(next(trials))
        return self.result

    def _play_named(self) -> None:
        """Step 1: the best named schedule that fits."""
        trials = sorted(
            (
                self._estimate_named(family.make(self.num_ranks, self.trial_size, chunks)),
                family.name,
                chunks,
            )
            for family, chunks in catalog.synchronous(
                self.num_ranks, self.num_microbatches, self.max_chunks
            )
        )
        limit = self.goal.memory_limit
        for estimate, name, chunks in trials:
            if estimate >= self.best - _TINY:  # the estimate is a lower bound
                break
            schedule = catalog.make(name, self.num_ranks, self.num_microbatches, chunks)
            if limit is None or max(peak_activations(schedule)) <= limit + _TINY:
                timeline = play(schedule, self.goal.costs_of(schedule.placement))
                objective = getattr(timeline, self.goal.objective)
                if objective < self.best - _TINY:
                    self._keep(schedule, objective, f"{name} as it is")

    def _estimate_named(self, schedule: Schedule) -> float:
        costs = self.goal.costs_of(schedule.placement)
        timeline = play(schedule, costs)
        overlaps = any(isinstance(step, Overlap) for steps in schedule.order for step in steps)
        work = work_by_rank(schedule.placement, costs, min(1.0, costs.overlap) if overlaps else 1.0)
        remainder = self.num_microbatches - self.trial_size
        return getattr(timeline, self.goal.objective) + remainder * max(work)

    def _keep(self, schedule: Schedule, objective: float, origin: str) -> None:
        self.best = objective
        self.result = FoundSchedule(replace(schedule, name=AUTO), origin)

    def _hopeful(self, placement: Placement) -> bool:
        """Whether anything on this placement could still beat the best."""
        costs = self.goal.costs_of(placement)
        bound = lower_bound(placement, costs, self.num_microbatches, self.goal.objective)
        return bound < self.best - _TINY and self.budget > self.reserve

    def _fill(self, lowered: Lowered, seed: Seed, patience: Patience) -> Filled | None:
        self.budget -= lowered.num_actions
        return fill(lowered, seed.chunk_limit, patience)

    def _lower(self, seed: Seed, num_microbatches: int) -> Lowered | None:
        self.budget -= _MAKING * seed.placement.num_stages * num_microbatches
        frame = seed.frame(num_microbatches)
        if frame is None:
            return None
        costs = self.goal.costs_of(seed.placement)
        return lower(frame, seed.placement, num_microbatches, costs)

    def _screen(self) -> list[_Trial]:
        """Step 2: every kind of frame, with two degrees of patience."""
        patiences = [Patience.uniform(self.num_ranks, running, 0.5) for running in (0.01, 0.5)]
        trials: list[_Trial] = []
        for seed in seeds(self.num_ranks, self.num_microbatches, self.max_chunks, self.goal):
            if self._hopeful(seed.placement):
                trials += sorted(self._try(seed, patiences))[:1]
        return sorted(trials)[:_MOST_SWEPT]

    def _try(self, seed: Seed, patiences: list[Patience]) -> Iterator[_Trial]:
        lowered = self._lower(seed, self.trial_size)
        if lowered is None:
            return
        work = max(work_by_rank(seed.placement, self.goal.costs_of(seed.placement)))
        remainder = (self.num_microbatches - self.trial_size) * work
        for patience in patiences:
            if self.budget < self.reserve:
                return
            if (filled := self._fill(lowered, seed, patience)) is not None:
                estimate = getattr(filled, self.goal.objective) + remainder
                yield _Trial(estimate, self.budget, seed, patience)

    def _sweep(self, trials: list[_Trial]) -> list[_Trial]:
        """The best frames with every patience; the best trial of each."""
        grid = [
            Patience.uniform(self.num_ranks, *shares)
            for shares in itertools.product(_SHARES, repeat=2)
        ]
        return sorted(min([trial, *self._try(trial.seed, grid)]) for trial in trials)

    def _at_full_size(self, trial: _Trial) -> _Candidate | None:
        """Step 3: the trial with all microbatches."""
        self.reserve = 0
        # Until there is any schedule, the budget does not count.
        if self.result is not None and not self._hopeful(trial.seed.placement):
            return None
        lowered = self._lower(trial.seed, self.num_microbatches)
        if lowered is None:
            return None
        return self._play(lowered, trial.seed, trial.patience)

    def _play(self, lowered: Lowered, seed: Seed, patience: Patience) -> _Candidate | None:
        filled = self._fill(lowered, seed, patience)
        if filled is None:
            return None
        objective = getattr(filled, self.goal.objective)
        if objective < self.best - _TINY:
            schedule = Schedule(AUTO, seed.placement, self.num_microbatches, filled.order())
            self._keep(schedule, objective, seed.origin)
        return _Candidate(objective, self.budget, lowered, seed, patience)

    def _refine(self, best: _Candidate) -> None:
        """Step 4: the patience of each rank separately, as long as that helps."""
        improved = True
        while improved:
            improved = False
            for patience in _neighbours(best.patience):
                if not self._hopeful(best.seed.placement):
                    return
                other = self._play(best.lowered, best.seed, patience)
                if other is not None and other.objective < best.objective - _TINY:
                    best, improved = other, True


def _neighbours(patience: Patience) -> Iterator[Patience]:
    """The same patience but for one rank in one phase."""
    for rank in range(len(patience.running)):
        for share in _FINE_SHARES:
            running, draining = list(patience.running), list(patience.draining)
            running[rank] = share
            yield patience._replace(running=tuple(running))
            draining[rank] = share
            yield patience._replace(draining=tuple(draining))


def work_by_rank(placement: Placement, costs: Costs, share: float = 1.0) -> list[float]:
    """How long each rank works on one microbatch: `share` of the sum of its actions."""
    work = [0.0] * placement.num_ranks
    for stage, home in enumerate(placement.homes):
        cost = share * (costs.forward[stage] + costs.backward[stage] + costs.weight[stage])
        if placement.mirrored:
            work[placement.num_ranks - 1 - home] += cost / 2
            cost /= 2
        work[home] += cost
    return work


def lower_bound(
    placement: Placement, costs: Costs, num_microbatches: int, objective: Objective
) -> float:
    """No schedule is shorter: a rank's work, started when the first microbatch can reach it."""
    work = work_by_rank(placement, costs)
    if objective == "span":
        return num_microbatches * max(work)
    arrival, head = 0.0, [math.inf] * placement.num_ranks
    for stage, home in enumerate(placement.homes):
        if stage and placement.homes[stage - 1] != home:
            arrival += costs.transfer[stage - 1]
        head[home] = min(head[home], arrival)
        arrival += costs.forward[stage]
    return max(
        start + num_microbatches * seconds for start, seconds in zip(head, work, strict=True)
    )


def require_legal(schedule: Schedule) -> None:
    """Raise `IllegalSchedule` unless every microbatch is computed once, on its rank, to the end."""
    problems = misplaced(schedule) + uncomputed(schedule) + overlapped_with_themselves(schedule)
    if problems:
        raise IllegalSchedule(bullets(f"schedule {schedule.name!r} is illegal:", problems[:12]))
    play(schedule, Costs.uniform(schedule.placement))


def misplaced(schedule: Schedule) -> list[str]:
    """Actions on a rank that does not have their stage."""
    problems: list[str] = []
    for rank, steps in enumerate(schedule.order):
        for action in (action for step in steps for action in actions_of(step)):
            if not 0 <= action.stage < schedule.num_stages:
                problems.append(f"rank {rank} runs {action}: there is no stage {action.stage}")
            elif (home := schedule.rank_of(action.stage, action.microbatch)) != rank:
                problems.append(f"rank {rank} runs {action}: move it to rank {home}, its home")
    return problems


def uncomputed(schedule: Schedule) -> list[str]:
    """Microbatches that miss a forward or a backward at some stage, or have one twice."""
    counts = Counter(
        action for steps in schedule.order for step in steps for action in actions_of(step)
    )
    problems: list[str] = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            num = {
                kind: counts[Action(stage, kind, microbatch)]
                for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
            }
            rank = schedule.rank_of(stage, microbatch)
            where = f"rank {rank}, stage {stage}, microbatch {microbatch}"
            if num[FORWARD] != 1:
                forward = Action(stage, FORWARD, microbatch)
                problems.append(f"{where}: {num[FORWARD]} forwards; give it one {forward}")
            split = num[INPUT_GRAD], num[WEIGHT_GRAD]
            if (num[BACKWARD], *split) not in ((1, 0, 0), (0, 1, 1)):
                backward_counts = f"{num[BACKWARD]} B, {split[0]} I and {split[1]} W"
                backward, *parts = (
                    Action(stage, kind, microbatch) for kind in (BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
                )
                ways = f"give it one {backward}, or one {parts[0]} and one {parts[1]}"
                problems.append(f"{where}: {backward_counts}; {ways}")
    return problems


def overlapped_with_themselves(schedule: Schedule) -> list[str]:
    """Pairs of one stage. A stage has one state for both lanes, such as whether its backward runs,
    so that its forward would take itself for recomputation."""
    return [
        f"rank {rank} overlaps stage {step.forward.stage} with itself in {step}; pair two stages, "
        f"or write {step.forward} and {step.backward} one after the other"
        for rank, steps in enumerate(schedule.order)
        for step in steps
        if isinstance(step, Overlap) and step.forward.stage == step.backward.stage
    ]


def looks_like_file(name: str) -> bool:
    """Whether a schedule argument means a file rather than a name."""
    if name.lower() == AUTO or is_code(name):
        return is_code(name)
    return Path(name).suffix.lower() in (".csv", ".txt") or "/" in name or Path(name).is_file()


def load_schedule(path: Path) -> Schedule:
    """Read a schedule file and check it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(str(path), [f"{error}; give a CSV or text file, one rank a line"]) from error
    return parse_schedule(text, path.stem)


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """Read a schedule from text: cells separated by commas or spaces, one rank a line."""
    lines = [line for line in text.splitlines() if line.strip(" ,\t")]
    order = tuple(
        parse_steps(re.split(r"[,\s\"]+", re.sub(r"\s*;\s*", ";", line)), f"rank {rank}")
        for rank, line in enumerate(lines)
    )
    if not order or not all(order):
        raise IllegalSchedule(f"schedule {name!r} has a rank without actions; give each a line")
    schedule = Schedule(name, _placement(order), _num_microbatches(order), order)
    numbers = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    if problems := [*too_large(*numbers)]:
        raise IllegalSchedule(bullets(f"schedule {name!r} is too large:", problems))
    require_legal(schedule)
    return schedule


def _num_microbatches(order: tuple[tuple[Step, ...], ...]) -> int:
    steps = (step for steps in order for step in steps)
    microbatches = {action.microbatch for step in steps for action in actions_of(step)}
    missing = next(
        (microbatch for microbatch in range(max(microbatches)) if microbatch not in microbatches),
        None,
    )
    if missing is not None:
        raise IllegalSchedule(
            f"no rank runs microbatch {missing}; number microbatches from 0, no gaps"
        )
    return len(microbatches)


def _placement(order: tuple[tuple[Step, ...], ...]) -> Placement:
    """A stage is on the rank of its first microbatch; two ranks for each mean two directions."""
    homes: dict[int, tuple[int, int]] = {}
    ranks: dict[int, set[int]] = {}
    for rank, steps in enumerate(order):
        for action in (action for step in steps for action in actions_of(step)):
            first = (action.microbatch, rank)
            homes[action.stage] = min(homes.get(action.stage, first), first)
            ranks.setdefault(action.stage, set()).add(rank)
    missing = next((stage for stage in range(max(homes) + 1) if stage not in homes), None)
    if missing is not None:
        raise IllegalSchedule(f"no rank runs stage {missing}; number stages from 0, without gaps")
    mirrored = all(len(stages) == 2 for stages in ranks.values())
    return Placement(tuple(homes[stage][1] for stage in sorted(homes)), mirrored)


def choose(text: str) -> Family:
    """The family that a `--schedule` text names."""
    if is_code(text):
        return _of_code(text)
    return _of_file(Path(text)) if looks_like_file(text) else named(text)


def named(name: str) -> Family:
    """The family of a name, or that of the search."""
    return AUTO_FAMILY if name.lower() == AUTO else catalog.family(name)


def _auto(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Search in the memory of 1F1B, with equal times for all stages and passes."""
    goal = Goal(Costs.uniform, memory_limit=float(num_ranks))
    return search(num_ranks, num_microbatches, num_chunks, goal).schedule


# A search plays every candidate, so it must end sooner than one schedule would.
_MOST_STAGES, _MOST_SEARCHED = 256, 20_000
_SIZES = ("stage", "microbatch", "chunk")
_SEARCHABLE = (
    Rule(
        f"stages must be at most {_MOST_STAGES} for a search: name a schedule",
        lambda p, m: p <= _MOST_STAGES,
        True,
    ),
    Rule(
        f"stages × microbatches must be at most {_MOST_SEARCHED:,} for a search: lower the "
        "microbatches",
        lambda p, m: p * m <= _MOST_SEARCHED,
    ),
)
# Only the clock knows what a found or a given order costs. Until it is played, a search and a file
# are estimated like 1F1B.
AUTO_FAMILY = Family(
    AUTO,
    _auto,
    "the search found no order that fits the memory and idles less",
    paths="1f1b",
    bubble=fill_and_drain,
    in_flight=depth_in_flight,
    max_chunks=None,
    rules=_SEARCHABLE,
)


@lru_cache
def _of_code(text: str) -> Family:
    """A user's family, or that of a function of (stages, microbatches, chunks), which returns the
    actions of each rank as a line of text, or a `Schedule`."""
    function: Any = load_code(text)
    if isinstance(function, Family):
        return replace(function, name=text, own=True)
    if not callable(function):
        raise BadFile(text, ["a schedule is a function of (stages, microbatches, chunks)"])

    @lru_cache
    def make(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        numbers = (num_ranks, num_microbatches, num_chunks)
        order: Any = function(*numbers)
        if isinstance(order, Schedule):
            require_legal(order)
        elif isinstance(order, list | tuple):
            lines = cast("Sequence[object]", order)
            order = parse_schedule("\n".join(map(str, lines)), text)
        else:
            raise BadFile(text, ["return a list with a text of actions for each rank"])
        if (order.num_ranks, order.num_microbatches, order.num_chunks) != numbers:
            sizes = zip(_SIZES, numbers, strict=True)
            wish = ", ".join(counted(number, noun) for noun, number in sizes)
            raise IllegalSchedule(f"{text} returned another schedule than for {wish}")
        return order

    return Family(
        text,
        make,
        "the order of the function makes ranks wait for one another",
        paths="1f1b",
        bubble=fill_and_drain,
        in_flight=depth_in_flight,
        max_chunks=None,
        own=True,
    )


def _of_file(path: Path) -> Family:
    schedule = load_schedule(path)
    only = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    stages, microbatches, chunks = only
    return Family(
        str(path),
        lambda p, m, v: schedule,
        "the order in the file makes ranks wait for one another",
        paths="1f1b",
        bubble=fill_and_drain,
        in_flight=depth_in_flight,
        min_chunks=chunks,
        max_chunks=chunks,
        rules=(
            Rule(f"the file is for {counted(stages, 'stage')}", lambda p, m: p == stages, True),
            Rule(
                f"the file is for {counted(microbatches, 'microbatch')}",
                lambda p, m: m == microbatches,
            ),
        ),
        only=only,
    )

"""Orders written as loops, so that a schedule costs what its loops cost and not what its steps do.

A rank of a named schedule repeats itself: so many forwards, then one forward and one backward so
many times. A `Loop` says what a turn runs and how often. The steps of a rank are made when someone
reads them; estimates expand loops into arrays, and peaks of memory are counted loop by loop.

Runs are the other way to write an order: microbatches in a row through one stage. `alternating`
takes one action of each of several lists of runs in turn, and returns loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from fivefold.core.schedule.schedule import (
    FORWARD,
    INPUT_GRAD,
    Action,
    Overlap,
    Schedule,
    Step,
    actions_of,
    merged_steps,
)

_SHORT = 512  # actions of a rank that are followed one by one


class Turn(NamedTuple):
    """What one turn of a loop runs: the k-th turn has microbatch `first` + k.

    `joined`: it runs as one step with the backward after it.
    """

    stage: int
    kind: str
    first: int
    joined: bool = False


class Loop(NamedTuple):
    """Turns that repeat."""

    times: int
    turns: tuple[Turn, ...]

    def steps(self, number: int) -> Iterator[Step]:
        """The steps of one turn."""
        before: Action | None = None
        for stage, kind, first, joined in self.turns:
            action = Action(stage, kind, first + number)
            if joined:
                before = action
                continue
            yield action if before is None else Overlap(before, action)
            before = None


class Run(NamedTuple):
    """Consecutive microbatches through one stage."""

    stage: int
    kind: str
    first: int
    length: int


def one_by_one(runs: Iterable[Run]) -> Iterator[Loop]:
    """All actions of a run before the next run."""
    for stage, kind, first, length in runs:
        yield Loop(length, (Turn(stage, kind, first),))


def alternating(*lists: Sequence[Run]) -> Iterator[Loop]:
    """One action of each list in turn; the lists have equally many actions."""
    coming = [iter(runs) for runs in lists]
    heads = [next(runs, None) for runs in coming]
    while None not in heads:
        turns = [head for head in heads if head is not None]
        count = min([head.length for head in turns])
        yield Loop(count, tuple([Turn(stage, kind, first) for stage, kind, first, _ in turns]))
        heads = [
            Run(stage, kind, first + count, length - count) if length > count else next(runs, None)
            for (stage, kind, first, length), runs in zip(turns, coming, strict=True)
        ]


def part(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """The actions from `start` to before `stop`, counted over all runs."""
    parts: list[Run] = []
    before = 0
    for run in runs:
        if before >= stop:
            break
        after = before + run.length
        if start <= before and after <= stop:
            parts.append(run)
        elif start < after:
            low, high = max(start - before, 0), min(stop - before, run.length)
            parts.append(Run(run.stage, run.kind, run.first + low, high - low))
        before = after
    return parts


def within(loops: Iterable[Loop], num_microbatches: int) -> Iterator[Loop]:
    """The loops without the actions of microbatches from `num_microbatches` on."""
    for times, turns in loops:
        cuts = {min(times, max(0, num_microbatches - turn.first)) for turn in turns}
        start = 0
        for stop in sorted(cuts):
            left = tuple(
                turn._replace(first=turn.first + start)
                for turn in turns
                if turn.first + start < num_microbatches
            )
            if stop > start:
                yield Loop(stop - start, left)
            start = stop


def lengthened(
    order: Sequence[Sequence[Action]], period: int, extra: int
) -> Iterator[tuple[Loop, ...]]:
    """An order with `more` microbatches than the given one, whose ranks repeat `period` actions
    for each microbatch as soon as the pipeline is full."""
    for actions in order:
        start, count = _repeated(actions, period)
        stop = start + count * period
        yield (
            *(Loop(1, (Turn(*action),)) for action in actions[:start]),
            Loop(count + extra, tuple(Turn(*action) for action in actions[start : start + period])),
            *(
                Loop(1, (Turn(stage, kind, microbatch + extra),))
                for stage, kind, microbatch in actions[stop:]
            ),
        )


def _repeated(actions: Sequence[Action], period: int) -> tuple[int, int]:
    """Where the longest repetition begins, and how often it runs."""
    best = first = 0
    longest = 0
    for index, (before, current) in enumerate(zip(actions, actions[period:], strict=False)):
        if current != (before.stage, before.kind, before.microbatch + 1):
            first = index + 1
        elif index + 1 - first > longest:
            best, longest = first, index + 1 - first
    return best, 1 + longest // period


class LoopOrder(Sequence[tuple[Step, ...]]):
    """The order of every rank, in loops; the steps of a rank are made when they are read."""

    def __init__(self, ranks: Iterable[Iterable[Loop]]) -> None:
        self.loops = tuple(
            tuple(loop for loop in loops if loop.times > 0 and loop.turns) for loops in ranks
        )
        self._made: dict[int, tuple[Step, ...]] = {}

    @overload
    def __getitem__(self, index: int) -> tuple[Step, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Step, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Step, ...] | tuple[tuple[Step, ...], ...]:
        places = range(len(self.loops))[index]
        if isinstance(places, range):
            return tuple(self[position] for position in places)
        if places not in self._made:
            self._made[places] = tuple(
                step
                for loop in self.loops[places]
                for number in range(loop.times)
                for step in loop.steps(number)
            )
        return self._made[places]

    def __len__(self) -> int:
        return len(self.loops)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, LoopOrder) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def turns_of(schedule: Schedule, rank: int) -> Iterator[tuple[int, tuple[Step, ...]]]:
    """The steps of a rank as they run, in parts, and how often each repeats. Turns that differ only
    in their microbatches are one value, with those of the first."""
    order = schedule.order
    loops = order.loops[rank] if isinstance(order, LoopOrder) else ()
    if sum(loop.times * len(loop.turns) for loop in loops) <= _SHORT:
        yield 1, merged_steps(schedule, order[rank])
        return
    known: dict[tuple[object, ...], tuple[Step, ...]] = {}
    for times, turns in loops:
        alike = alike_turns(turns)
        if alike not in known:
            known[alike] = merged_steps(schedule, Loop(1, turns).steps(0))
        yield times, known[alike]


def forwards_of(schedule: Schedule, rank: int) -> Counter[int]:
    """The number of forwards of each stage of a rank, counted loop by loop."""
    counts: Counter[int] = Counter()
    for times, steps in turns_of(schedule, rank):
        for action in (action for step in steps for action in actions_of(step)):
            counts[action.stage] += times * (action.kind == FORWARD)
    return counts


def alike_turns(turns: Sequence[Turn]) -> tuple[object, ...]:
    """Turns without the microbatch with which they begin."""
    if len(turns) == 1:
        return turns[0][:2]
    begin = turns[0].first
    return tuple((*turn[:2], turn.first - begin, turn.joined) for turn in turns)


def defers_weight_gradients(schedule: Schedule) -> bool:
    """Whether some backward is split, on any rank."""
    if isinstance(schedule.order, LoopOrder):
        loops = (loop for rank in schedule.order.loops for loop in rank)
        if all(turn.kind != INPUT_GRAD for loop in loops for turn in loop.turns):
            return False
    return any(
        isinstance(step, Action) and step.kind == INPUT_GRAD
        for rank in range(schedule.num_ranks)
        for _, steps in turns_of(schedule, rank)
        for step in steps
    )

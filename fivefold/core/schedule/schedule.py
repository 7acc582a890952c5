"""Pipeline schedules as values: one object is checked, timed, drawn and executed.

Actions have a text form: `2F0` is the forward of stage 2 for microbatch 0, `2I0` its input
gradient, `2W0` its weight gradient, `2B0` both at once. `(2F4;5B0)OVERLAP_F_B` is a forward and a
backward that run as one. This is torch's own spelling, so files travel both ways.

A placement says which rank has which stage: a stage is a contiguous range of layers, and a rank
with several stages calls each of them a chunk. A schedule is a placement and the order of actions
on every rank. The messages between ranks follow from it.

Orders written as loops, so that a schedule costs what its loops cost and not what its steps do.

A rank of a named schedule repeats itself: so many forwards, then one forward and one backward so
many times. A `Loop` says what a turn runs and how often. The steps of a rank are made when someone
reads them; estimates expand loops into arrays, and peaks of memory are counted loop by loop.

Runs are the other way to write an order: microbatches in a row through one stage. `alternating`
takes one action of each of several lists of runs in turn, and returns loops.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias, overload

from fivefold.core import IllegalSchedule

FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD = "F", "I", "W", "B"

# Nine digits: more is a typo, and Python refuses to read very long numbers.
_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(\s*([^;()]+?)\s*;\s*([^;()]+?)\s*\)OVERLAP_F_B")
# torch's lowered files also list transfers and weight gathers; our runtime derives them itself.
_DERIVED = re.compile(r"[0-9]{1,9}(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")


class Action(NamedTuple):
    """One computation of one stage for one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a full backward that run together, as one atomic step."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | Overlap


def actions_of(step: Step) -> tuple[Action, ...]:
    """The computations inside one step."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


def parse_steps(texts: Iterator[str] | list[str], where: str) -> tuple[Step, ...]:
    """Read one rank's steps; empty cells (idle slots) and derived transfers are skipped."""
    steps: list[Step] = []
    for text in texts:
        cell = text.strip()
        if not cell or _DERIVED.fullmatch(cell):
            continue
        steps.append(_parse_step(cell, where))
    return tuple(steps)


def _parse_step(text: str, where: str) -> Step:
    if match := _OVERLAP.fullmatch(text):
        forward, backward = (_parse_action(part, where) for part in match.groups())
        if forward.kind != FORWARD or backward.kind != BACKWARD:
            raise IllegalSchedule(
                f"{where}: {text!r} must join a forward and a full backward: (2F4;5B0)OVERLAP_F_B"
            )
        return Overlap(forward, backward)
    return _parse_action(text, where)


def _parse_action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise IllegalSchedule(
            f"{where}: {text!r} is no action; write STAGE, then F, I, W or B, then MICROBATCH: 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))


# On one rank: far above any run, and low enough that a typo does not hang.
MOST_CHUNKS = 64


@dataclass(frozen=True)
class Placement:
    """`homes[stage]` is the rank of that stage.

    Under a `mirrored` (bidirectional) placement every rank also has the stage of its mirror rank.
    The second half of the microbatches flows through those copies, from the last rank to the first.
    """

    homes: tuple[int, ...]
    mirrored: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.homes) + 1

    @cached_property
    def num_chunks(self) -> int:
        """Stages per rank, not counting the second copy of a mirrored placement."""
        return max(Counter(self.homes).values())

    @property
    def folded(self) -> bool:
        """Whether rank i has stages i and 2p − 1 − i."""
        return not self.mirrored and self == v_placement(self.num_ranks)

    @property
    def kind(self) -> str:
        """The name people use for this placement."""
        if self.mirrored:
            return "bidirectional"
        named = {
            "linear": linear_placement(self.num_ranks),
            "loop": loop_placement(self.num_ranks, self.num_chunks),
            "V": v_placement(self.num_ranks),
        }
        return next((name for name, known in named.items() if known == self), "custom")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank; under a mirrored placement also those of its mirror."""
        homes = {rank, self.num_ranks - 1 - rank} if self.mirrored else {rank}
        return tuple(stage for stage, home in enumerate(self.homes) if home in homes)

    def rank(self, stage: int, microbatch: int, num_microbatches: int) -> int:
        """The rank that computes this stage for this microbatch."""
        home = self.homes[stage]
        if self.mirrored and 2 * microbatch >= num_microbatches:
            return self.num_ranks - 1 - home
        return home


def linear_placement(num_ranks: int) -> Placement:
    """One stage per rank, in order."""
    return Placement(tuple(range(num_ranks)))


def loop_placement(num_ranks: int, num_chunks: int) -> Placement:
    """Several rounds of stages: rank r has r, p + r, 2p + r, …"""
    return Placement(tuple(range(num_ranks)) * num_chunks)


def v_placement(num_ranks: int) -> Placement:
    """Two stages per rank, down and up again: rank 0 has the first and the last."""
    down = tuple(range(num_ranks))
    return Placement(down + down[::-1])


def mirrored_placement(num_ranks: int) -> Placement:
    """One stage per rank, and a second copy of the model in the opposite order."""
    return Placement(tuple(range(num_ranks)), mirrored=True)


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order, for one optimizer step.

    `asynchronous` schedules do not drain between steps: gradients are computed on older weights,
    of which rank r stores `weight_versions[r]` versions.
    """

    name: str
    placement: Placement
    num_microbatches: int
    order: Sequence[tuple[Step, ...]]  # a tuple, or loops that make the steps when read
    asynchronous: bool = False
    weight_versions: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradient is computed separately from its input gradient."""
        ranks = range(self.num_ranks)
        return any(action.kind == INPUT_GRAD for rank in ranks for action in self.actions(rank))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes this stage for this microbatch."""
        return self.placement.rank(stage, microbatch, self.num_microbatches)

    def actions(self, rank: int) -> Iterator[Action]:
        """What one rank computes, in order; an overlapped pair is forward, then backward."""
        return (action for step in self.order[rank] for action in actions_of(step))

    def forwards(self) -> Schedule:
        """Only the forwards, in their order: what an evaluation runs."""
        ranks = range(self.num_ranks)
        order = (
            tuple(action for action in self.actions(rank) if action.kind == FORWARD)
            for rank in ranks
        )
        return replace(self, order=tuple(order))

    def texts(self) -> list[list[str]]:
        """The action texts, one list per rank."""
        return [[str(step) for step in steps] for steps in self.order]

    def to_csv(self) -> str:
        """One row per rank: the form that torch's pipelining reads and writes."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.texts())
        return out.getvalue()


# Messages. A forward sends its activations to the rank of the next stage, a backward its input
# gradient to the rank of the previous stage; two stages on one rank need no message. Planner and
# runtime both use these functions, so the predicted messages are the ones that are sent.


class Message(NamedTuple):
    """What stage `stage` receives for a microbatch: `F` its input, `B` the gradient of its output.

    `source` and `target` are pipeline ranks.
    """

    stage: int
    kind: str
    microbatch: int
    source: int
    target: int


def sent(schedule: Schedule, action: Action) -> Message | None:
    """What the action sends to another rank, if anything."""
    if action.kind == WEIGHT_GRAD:
        return None
    forward = action.kind == FORWARD
    return _message(schedule, action.stage, action.stage + (1 if forward else -1), action)


def needed(schedule: Schedule, action: Action) -> Message | None:
    """What the action waits for from another rank, if anything."""
    if action.kind == WEIGHT_GRAD:
        return None
    forward = action.kind == FORWARD
    return _message(schedule, action.stage + (-1 if forward else 1), action.stage, action)


def _message(schedule: Schedule, sender: int, receiver: int, action: Action) -> Message | None:
    if not (0 <= sender < schedule.num_stages and 0 <= receiver < schedule.num_stages):
        return None
    source, target = (schedule.rank_of(stage, action.microbatch) for stage in (sender, receiver))
    if source == target:
        return None
    kind = FORWARD if action.kind == FORWARD else BACKWARD
    return Message(receiver, kind, action.microbatch, source, target)


def sent_by(schedule: Schedule, rank: int) -> Iterator[Message]:
    """Everything that a rank sends, in order."""
    if schedule.num_ranks == 1:  # to nobody, however many microbatches there are
        return
    for action in (action for step in schedule.order[rank] for action in actions_of(step)):
        if message := sent(schedule, action):
            yield message


def channels(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Every (source, target) pair of ranks with a message between them, sorted."""
    # Every microbatch visits all stages, and those of one direction visit the same ranks.
    directions = {0, schedule.num_microbatches - 1}
    ranks = ([schedule.rank_of(s, m) for s in range(schedule.num_stages)] for m in directions)
    pairs = {pair for homes in ranks for pair in pairwise(homes) if pair[0] != pair[1]}
    if pairs and any(action.kind != FORWARD for action in schedule.actions(0)):
        pairs |= {(target, source) for source, target in pairs}
    return tuple(sorted(pairs))


def merged(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of a rank, with adjacent I and W of a microbatch merged into one B.

    Only if the gradient goes to no other rank: its message would leave after the whole B, later
    than the schedule says.
    """
    return merged_steps(schedule, schedule.order[rank])


def merged_steps(schedule: Schedule, steps: Iterable[Step]) -> tuple[Step, ...]:
    """The same for some steps of a rank."""
    step_order: list[Step] = []
    for step in steps:
        if isinstance(step, Action) and step.kind == WEIGHT_GRAD:
            gradient = step._replace(kind=INPUT_GRAD)
            if step_order and step_order[-1] == gradient and sent(schedule, gradient) is None:
                step_order.pop()
                step = step._replace(kind=BACKWARD)
        step_order.append(step)
    return tuple(step_order)


def twins(placement: Placement, tied: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks that have copies of the same weights, and so sum their gradients.

    Under a mirrored placement every rank has the stages of its mirror. A tied model has its
    embedding on the ranks of the first and of the last stage.
    """
    last = placement.num_ranks - 1
    if placement.mirrored:
        return tuple((rank, last - rank) for rank in range((last + 1) // 2))
    ends = sorted({placement.homes[0], placement.homes[-1]})
    return ((ends[0], ends[1]),) if tied and len(ends) == 2 else ()


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
        # Where the longest repetition begins, and how often it runs.
        best = first = 0
        longest = 0
        for index, (before, current) in enumerate(zip(actions, actions[period:], strict=False)):
            if current != (before.stage, before.kind, before.microbatch + 1):
                first = index + 1
            elif index + 1 - first > longest:
                best, longest = first, index + 1 - first
        start, count = (best, 1 + longest // period)
        stop = start + count * period
        yield (
            *(Loop(1, (Turn(*action),)) for action in actions[:start]),
            Loop(count + extra, tuple(Turn(*action) for action in actions[start : start + period])),
            *(
                Loop(1, (Turn(stage, kind, microbatch + extra),))
                for stage, kind, microbatch in actions[stop:]
            ),
        )


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

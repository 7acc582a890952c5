"""A measured step as a net of actions that can be played again with other times.

What an action takes longer than planned is given first to the collectives inside of it, as far as
they take longer than planned, and the rest to what it computes. A collective's span is the host's:
one that is hidden behind computation counts as far as its action is late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.core.clock import Timeline
from fivefold.core.groups import DIMENSIONS
from fivefold.core.schedule.action import Step
from fivefold.core.spans import Did, RankSpans, awaited, results

INSIDE = ("tp", "cp", "ep")  # dimensions whose collectives are parts of actions
DATA = "dp"  # all others: sums and gathers of data ranks


@dataclass(frozen=True)
class Expectation:
    """What a step of one pipeline should be.

    `inside` gives the seconds of collectives in an action by axis; `around` those outside of the
    pipeline, by `dp` and `update`, or None where only the pipeline can be compared.
    """

    played: Timeline
    inside: Callable[[Step], Mapping[str, float]]
    around: Mapping[str, float] | None


def covered(one: RankSpans) -> list[dict[str, float]]:
    """For each action, the seconds in which a collective was under way, by the plan's axis."""
    found: list[dict[str, float]] = [{} for _ in one.actions]
    lines: dict[str, list[tuple[float, float]]] = {}
    for call in one.calls:
        if call.axis != "pp":
            dimension = DIMENSIONS.get(call.axis)
            axis = dimension if dimension in INSIDE else DATA
            lines.setdefault(axis, []).append((call.begin, call.end))
    for axis, line in lines.items():
        first = 0
        for begin, end in _joined(line):
            while first < len(one.actions) and one.actions[first].end <= begin:
                first += 1
            for place in range(first, len(one.actions)):
                did = one.actions[place]
                if did.ready >= end:
                    break
                inside = min(end, did.end) - max(begin, did.ready)
                if inside > 0:
                    found[place][axis] = found[place].get(axis, 0.0) + inside
    return found


def _joined(line: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same time without any of it twice."""
    begin, end = float("-inf"), float("-inf")
    for one, other in sorted(line):
        if one > end:
            if end > begin:
                yield begin, end
            begin, end = one, other
        end = max(end, other)
    if end > begin:
        yield begin, end


@dataclass(frozen=True)
class Node:
    """One action of the pipeline: where it is, what it waits for, and its seconds."""

    place: int
    step: Step
    causes: tuple[int, ...]  # the nodes whose messages it needs
    seconds: float
    message: float  # from the last of them to its begin; planned where it was not waited for
    pause: float
    planned: float
    excess: Mapping[str, float]  # of collectives over the plan, by axis


@dataclass
class Net:
    """The measured step as a net of actions that can be played with other times."""

    expected: Expectation
    ranks: list[RankSpans]
    nodes: list[Node] = field(default_factory=list[Node])
    order: list[int] = field(default_factory=list[int])  # causes before effects

    def __post_init__(self) -> None:
        schedule = self.expected.played.schedule
        self.zero = min(one.actions[0].ready for one in self.ranks)
        number, ends = dict[tuple[int, bool, int], int](), list[float]()
        for one in self.ranks:
            for did in one.actions:
                number |= {each: len(ends) for each in results(did.step)}
                ends.append(did.end - self.zero)
        for place, one in enumerate(self.ranks):
            free, inside = 0.0, covered(one)
            for did, calls in zip(one.actions, inside, strict=True):
                causes = tuple(number[each] for _, each in awaited(schedule, did.step))
                last = max((ends[each] for each in causes), default=None)
                self.nodes.append(self._node(place, did, causes, free, last, calls))
                free = did.end - self.zero
        self.order = self._sorted()
        self.makespan = self.play(self.nodes)

    def _node(
        self,
        place: int,
        did: Did,
        causes: tuple[int, ...],
        free: float,
        last: float | None,
        calls: Mapping[str, float],
    ) -> Node:
        begin, ready = did.begin - self.zero, did.ready - self.zero
        message, pause = 0.0, max(0.0, ready - free)
        if last is not None:
            usual = max(self.expected.played.costs.transfer)
            waited = last > free or ready - begin > begin - free
            message = max(0.0, ready - last) if waited else min(usual, max(0.0, ready - last))
            pause = 0.0 if waited else pause
        planned = self.expected.played.costs.of(did.step)
        seconds = did.end - did.ready
        left, excess = max(0.0, seconds - planned), dict[str, float]()
        usual_calls = self.expected.inside(did.step)
        for axis, length in calls.items():
            excess[axis] = min(left, max(0.0, length - usual_calls.get(axis, 0.0)))
            left -= excess[axis]
        return Node(place, did.step, causes, seconds, message, pause, planned, excess)

    def _sorted(self) -> list[int]:
        firsts = [at for at in range(len(self.nodes)) if self._before(at) is None]
        done, order, heads = set[int](), list[int](), firsts
        while heads:
            rest: list[int] = []
            for head in heads:
                at = head
                while self._is_of(at, head) and done.issuperset(self.nodes[at].causes):
                    done.add(at)
                    order.append(at)
                    at += 1
                if self._is_of(at, head):
                    rest.append(at)
            assert rest != heads, "a schedule that ran has no circle"
            heads = rest
        return order

    def _is_of(self, at: int, head: int) -> bool:
        return at < len(self.nodes) and self.nodes[at].place == self.nodes[head].place

    def _before(self, at: int) -> int | None:
        return at - 1 if at and self.nodes[at - 1].place == self.nodes[at].place else None

    def play(self, nodes: Sequence[Node]) -> float:
        """When the last action ends."""
        return max(end for _, end in self.times(nodes))

    def times(self, nodes: Sequence[Node]) -> list[tuple[float, float]]:
        """When every action begins and ends."""
        found = [(0.0, 0.0)] * len(nodes)
        for at in self.order:
            one, before = nodes[at], self._before(at)
            free = found[before][1] if before is not None else 0.0
            arrived = max((found[each][1] + one.message for each in one.causes), default=0.0)
            begin = max(free, arrived) + one.pause
            found[at] = begin, begin + one.seconds
        return found

"""What the actions of one stage do to the memory of its rank, byte by byte: activations by the tape
of its operators, weights and gradients by its flat units.

The first backwards of a step differ from later ones, which find gradients under way, and the last
one sends what ZeRO-1 has summed until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fivefold.core.schedule import BACKWARD, FORWARD, WEIGHT_GRAD
from fivefold.core.units import Unit
from fivefold.cost.operator_tape import BlockPass, Change, Event, Pause, WeightGradient
from fivefold.cost.unit_ledger import (
    ACTIVATIONS,
    GRADIENTS,
    DataRules,
    Held,
    Slice,
    UnitLedger,
)

FINISH = "finish"


@dataclass(frozen=True)
class Segment:
    """Blocks by name, and their events by the kind of an action."""

    blocks: tuple[str, ...]
    events: Mapping[str, Sequence[Event]]


@dataclass(frozen=True)
class ActionBytes:
    """Bytes by category: what an action adds at its peak, and what it leaves."""

    at_peak: Held
    left: Held
    peak: float
    change: float
    slices: Sequence[Slice] = ()


class StageLedger:
    """One kind of stage: its segments in forward order, its units, and what its actions add and
    leave. `carried` bytes go from stage to stage, `tables` stay from forward to backward. Actions
    are `sliced` if two of them take turns."""

    def __init__(
        self,
        segments: Sequence[Segment],
        units: Sequence[Unit],
        rules: DataRules,
        carried: float,
        tables: float,
        sliced: bool,
    ) -> None:
        self.sliced = sliced
        self.segments, self.rules, self.packed = segments, rules, units
        self.carried, self.tables = carried, tables
        self.blocks = [*dict.fromkeys(block for each in segments for block in each.blocks)]
        self.known: dict[tuple[str, int, bool], ActionBytes] = {}
        self.sums_every_time = any(map(rules.sums_every_time, units))


class StageRun:
    """The actions of one stage in a step. Stages of a kind do the same, so each action is played
    once; `behind` and `latest` are those that this stage has not played itself."""

    def __init__(self, ledger: StageLedger) -> None:
        self.ledger, self.rules, self.segments = ledger, ledger.rules, ledger.segments
        self.units = UnitLedger(ledger.packed, ledger.blocks, ledger.rules, ledger.sliced)
        self.counts = Counter[str]()
        self.behind: list[tuple[str, bool]] = []
        self.latest: deque[tuple[str, bool]] = deque(maxlen=2)  # of those that repeat
        self.waiting = 0.0  # bytes of the gradient of a tied head

    def act(self, kind: str, last: bool) -> ActionBytes:
        """The next action; `last`: no gradient of the step comes after it."""
        gives = kind in (BACKWARD, WEIGHT_GRAD)
        counted = "gradients" if gives else kind
        self.counts[counted] += 1
        steady = 3 if gives and self.ledger.sums_every_time else 2  # from here on all are alike
        key = (kind, min(self.counts[counted], steady), last)
        known = self.ledger.known
        if key in known:
            begins = self.counts[counted] <= steady or last
            (self.behind if begins else self.latest).append((kind, last))
            return known[key]
        for before in (*self.behind, *self.latest):
            self._play(*before)
        self.behind.clear()
        self.latest.clear()
        known[key] = self._play(kind, last)
        return known[key]

    def finish(self) -> ActionBytes:
        """After the last action: what is under way arrives."""
        return self.act(FINISH, True)

    def _play(self, kind: str, last: bool) -> ActionBytes:
        self.units.begin(last, kind != FORWARD)
        if kind == FORWARD:
            self._forward()
        elif kind == WEIGHT_GRAD:
            self._settle()
        elif kind == FINISH:
            self.units.finish()
        else:
            self._backward(kind)
        units = self.units
        units.pause()
        return ActionBytes(units.at_peak, units.level, units.peak, units.total, units.slices)

    def _forward(self) -> None:
        self.units.change(self.ledger.tables, ACTIVATIONS)
        for segment in self.segments:
            self._read(segment, segment.events[FORWARD])
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
            self.units.change(-self.ledger.carried, ACTIVATIONS)

    def _backward(self, kind: str) -> None:
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
        for segment in reversed(self.segments):
            self._read(segment, segment.events[kind])
            if kind == BACKWARD:
                self._give_rest(segment)
        if self.segments[0].blocks != ("embed",):
            self.units.change(-self.ledger.carried, ACTIVATIONS)
        self.units.change(-self.ledger.tables, ACTIVATIONS)
        self.units.end_backward()

    def _settle(self) -> None:
        for segment in reversed(self.segments):
            self._read(segment, segment.events[WEIGHT_GRAD])
            self._give_rest(segment)

    def _give_rest(self, segment: Segment) -> None:
        """Of weights whose gradients take little memory."""
        for block in segment.blocks:
            self.units.change(self.units.give(block, ""), GRADIENTS)

    def _read(self, segment: Segment, events: Iterable[Event]) -> None:
        units, made = self.units, 0.0
        for event in events:
            if isinstance(event, Change):
                units.pass_through(event)
            elif isinstance(event, Pause):
                units.pause()
            elif isinstance(event, BlockPass):
                self._pass(segment.blocks[event.block], event)
            elif not event.given:
                made = units.make_gradient(segment.blocks[event.block], event.name)
            else:
                self._take(segment.blocks[event.block], event, made)

    def _take(self, block: str, event: WeightGradient, made: float) -> None:
        """A weight gradient leaves the backward. That of a tied head waits for the embedding's."""
        if self.rules.tied and event.name == "head":
            self.waiting = made
            return
        if self.waiting and block == "embed":
            self.units.change(made, ACTIVATIONS)  # their sum
            self.units.change(-made - self.waiting, ACTIVATIONS)
            self.waiting = 0.0
        stay = self.units.give(block, event.name)
        self.units.change(-made, ACTIVATIONS)
        self.units.change(stay, GRADIENTS)

    def _pass(self, block: str, event: BlockPass) -> None:
        if event.backward:
            self.units.come_back(block)
        elif event.left:
            self.units.leave(block)
        else:
            self.units.enter(block)

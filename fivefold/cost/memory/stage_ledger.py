"""What the actions of one stage do to the memory of its rank, byte by byte: activations by the tape
of its operators, weights and gradients by its flat units.

The first backwards of a step differ from later ones, which find gradients under way, and the last
one sends what ZeRO-1 has summed until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from fivefold.core.layout import Unit
from fivefold.core.schedule import BACKWARD, FORWARD, WEIGHT_GRAD
from fivefold.cost.layer import BlockPass, Change, Event, Pause
from fivefold.cost.memory.segment_steps import Given, JoinedStep, SegmentUse, segment_steps
from fivefold.cost.memory.unit_ledger import (
    ACTIVATIONS,
    DataRules,
    Held,
    Slice,
    UnitLedger,
    UnitTable,
)

FINISH = "finish"
REPLAYED = 2  # actions of those that repeat: what one of them begins has ended by then


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
        known_steps: dict[Hashable, list[JoinedStep]],
    ) -> None:
        self.sliced = sliced
        self.segments, self.packed = segments, units
        self.carried, self.tables = carried, tables
        blocks = [*dict.fromkeys(block for segment in segments for block in segment.blocks)]
        self.table = UnitTable(units, blocks, rules)
        self.sizes = self.table.gradient_sizes()
        self.known: dict[tuple[str, int, bool], ActionBytes] = {}
        self.sums_every_time = any(self.table.sums_every_time)
        self.units = [self.table.segment_units(segment.blocks) for segment in segments]
        self.kinds = self._kinds()
        blocks_of = [segment.blocks for segment in segments]
        self.first = {names: index for index, names in reversed([*enumerate(blocks_of)])}
        self.final = {names: index for index, names in enumerate(blocks_of)}
        self.known_steps = known_steps
        self.steps: dict[tuple[int, str], list[JoinedStep]] = {}

    def _kinds(self) -> list[Hashable]:
        """Segments with equal events and an equal kind have equal steps."""
        kinds: list[Hashable] = []
        for segment in self.segments:
            counts = tuple(map(self.table.entry_counts, segment.blocks))
            kinds.append(self.table.weights_of(segment.blocks) if None in counts else counts)
        return kinds

    def _use_of(self, index: int) -> SegmentUse:
        """A backward comes to the last segment with the same blocks first."""
        blocks = self.segments[index].blocks
        return SegmentUse(waits=index != self.first[blocks], waited=index != self.final[blocks])

    def steps_of(self, index: int, kind: str) -> list[JoinedStep]:
        """Of one segment in an action of this kind; equal segments share them."""
        if (index, kind) not in self.steps:
            self.steps[index, kind] = self._steps_of(index, kind)
        return self.steps[index, kind]

    def _steps_of(self, index: int, kind: str) -> list[JoinedStep]:
        segment, own, passes = self.segments[index], self.kinds[index], any(self.table.sheds)
        use = self._use_of(index)
        key = (id(segment.events[kind]), own, self.sizes, use, passes)
        if key not in self.known_steps:
            gives_rest = kind in (BACKWARD, WEIGHT_GRAD)
            weights = self.table.weights_of(segment.blocks)
            self.known_steps[key] = segment_steps(
                segment.events[kind], weights, self.sizes, use, gives_rest, passes
            )
        return self.known_steps[key]


class StageRun:
    """The actions of one stage in a step. Stages of a kind do the same, so each action is played
    once; `behind` and `latest` are those that this stage has not played itself."""

    def __init__(self, ledger: StageLedger) -> None:
        self.ledger, self.segments = ledger, ledger.segments
        self.units = UnitLedger(ledger.table, ledger.sliced)
        self.counts = Counter[str]()
        self.behind: list[tuple[str, bool]] = []
        self.latest: deque[tuple[str, bool]] = deque(maxlen=REPLAYED)  # of those that repeat
        self.settled: dict[str, ActionBytes] = {}  # what every further action of a kind does

    def is_steady(self, kind: str) -> bool:
        """Whether the next action of a kind, and all after it but the last, do the same."""
        counted, steady = self._counted(kind)
        return self.counts[counted] + 1 >= steady

    def _counted(self, kind: str) -> tuple[str, int]:
        """As what an action is counted, and from which one on all are alike."""
        gives = kind in (BACKWARD, WEIGHT_GRAD)
        return "gradients" if gives else kind, 3 if gives and self.ledger.sums_every_time else 2

    def repeat(self, kind: str) -> None:
        """The same again."""
        self.latest.append((kind, False))

    def act(self, kind: str, last: bool) -> ActionBytes:
        """The next action; `last`: no gradient of the step comes after it."""
        if not last and kind in self.settled:
            self.latest.append((kind, False))
            return self.settled[kind]
        counted, steady = self._counted(kind)
        self.counts[counted] += 1
        key = (kind, min(self.counts[counted], steady), last)
        known = self.ledger.known
        if key in known:
            begins = self.counts[counted] <= steady or last
            (self.behind if begins else self.latest).append((kind, last))
            if not begins:
                self.settled[kind] = known[key]
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
        for index in range(len(self.segments)):
            self._read(index, FORWARD)
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
            self.units.change(-self.ledger.carried, ACTIVATIONS)

    def _backward(self, kind: str) -> None:
        if self.segments[-1].blocks != ("head",):
            self.units.change(self.ledger.carried, ACTIVATIONS)
        for index in reversed(range(len(self.segments))):
            self._read(index, kind)
        if self.segments[0].blocks != ("embed",):
            self.units.change(-self.ledger.carried, ACTIVATIONS)
        self.units.change(-self.ledger.tables, ACTIVATIONS)
        self.units.end_backward()

    def _settle(self) -> None:
        for index in reversed(range(len(self.segments))):
            self._read(index, WEIGHT_GRAD)

    def _read(self, index: int, kind: str) -> None:
        units, blocks = self.units, self.segments[index].blocks
        numbers = self.ledger.units[index]
        for step in self.ledger.steps_of(index, kind):
            if isinstance(step, Change):
                units.pass_through(step)
            elif isinstance(step, Given):
                units.give(numbers[step.unit], step.weights)
            elif isinstance(step, BlockPass):
                self._pass(blocks[step.block], step)
            elif isinstance(step, Pause):
                units.pause()
            else:
                units.keep(blocks[step.block], step.name, step.bytes)

    def _pass(self, block: str, event: BlockPass) -> None:
        if event.backward:
            self.units.come_back(block)
        elif event.left:
            self.units.leave(block)
        else:
            self.units.enter(block)

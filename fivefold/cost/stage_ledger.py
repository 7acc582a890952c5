"""What the actions of one stage do to the memory of its rank, byte by byte: activations by the tape
of its operators, weights and gradients by the rules of its flat units (`parallel/data.py`).

The first backwards of a step differ from later ones, which find gradients under way, and the last
one sends what ZeRO-1 has summed until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core.schedule import BACKWARD, FORWARD, WEIGHT_GRAD
from fivefold.core.units import LocalWeight, Unit, prefetched
from fivefold.cost.layer_operators import EXPERTS
from fivefold.cost.operator_tape import BlockPass, Change, Event, Pause, WeightGradient

MOST_IN_FLIGHT = 2  # reductions whose full gradients are still in memory
FINISH = "finish"
STEADY = 3  # actions of a kind, after which all others of a step are alike
ACTIVATIONS, LOGITS, GRADIENTS, GATHERED = "activations", "logits", "gradients", "prefetch"
Held = dict[str, float]


def nothing() -> Held:
    """Of all that actions change."""
    return {ACTIVATIONS: 0.0, LOGITS: 0.0, GRADIENTS: 0.0, GATHERED: 0.0}


@dataclass(frozen=True)
class DataRules:
    """How the weights of a rank are sharded, in bytes of an element of a weight and a gradient."""

    zero: int
    itemsize: int
    grad_itemsize: int
    dense_ranks: int  # that sum a gradient
    expert_ranks: int
    keeps_weights: bool  # gathered ones, from their first use to the end of the step
    kept_to_backward: bool  # those of the last block, from forward to backward
    prefetch: int
    leaves: bool  # reduced gradients go to another memory
    tied: bool  # one weight is that of the embedding and the head
    queued: bool  # weight gradients go past autograd

    def sheds(self, unit: Unit) -> bool:
        return self.zero == 3 and unit.num_shards > 1

    def sums_every_time(self, unit: Unit) -> bool:
        return self.zero >= 2 if unit.num_shards > 1 else self.leaves

    def collects(self, unit: Unit) -> bool:
        ranks = self.expert_ranks if unit.expert else self.dense_ranks
        return ranks > 1 or self.itemsize != self.grad_itemsize or self.leaves

    def adds_products(self, name: str) -> bool:
        """Whether the gradient of a weight is added to the sum by the GEMM that computes it."""
        others = name == "embed" or name == EXPERTS or name.endswith("norm")
        return self.queued and self.itemsize == self.grad_itemsize and not others


@dataclass(frozen=True)
class Segment:
    """Blocks by name, and their events by the kind of an action."""

    blocks: tuple[str, ...]
    events: Mapping[str, Sequence[Event]]


class Slice(NamedTuple):
    """An action between two collectives: bytes at its peak, and at its end."""

    peak: float
    at_peak: Held
    change: float
    left: Held


@dataclass(frozen=True)
class ActionBytes:
    """Bytes by category: what an action adds at its peak, and what it leaves."""

    at_peak: Held
    left: Held
    peak: float
    change: float
    slices: Sequence[Slice] = ()


class _Units:
    """Weights and gradients of one stage, as its actions come."""

    def __init__(
        self, units: Sequence[Unit], blocks: Sequence[str], rules: DataRules, sliced: bool
    ) -> None:
        self.units, self.blocks, self.rules, self.sliced = units, blocks, rules, sliced
        self.rows: dict[str, list[tuple[int, LocalWeight]]] = {}  # by block, the last one first
        for n, unit in reversed([*enumerate(units)]):
            for entry in reversed(unit.entries):
                self.rows.setdefault(entry.row.block, []).append((n, entry.row))
        self.users = [self._users(unit) for unit in units]
        self.using = {
            block: [n for n, users in enumerate(self.users) if block in users] for block in blocks
        }
        self.level, self.at_peak = nothing(), nothing()
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()  # since the last pause
        self.ahead: dict[tuple[str, int], list[int]] = {}  # units to prefetch
        self.sheds = any(map(rules.sheds, units))
        self.present = {n for n, unit in enumerate(units) if not rules.sheds(unit)}
        self.shares = set[int]()  # with full gradients
        self.summed = set[int]()  # with summed gradients
        self.missing = [len(unit.entries) for unit in units]
        self.in_flight = deque[int]()
        self.kept_gradients = set[str]()  # where backward left them
        self.given = set[str]()
        self.last = self.in_backward = False

    def _users(self, unit: Unit) -> tuple[str, ...]:
        tied = self.rules.tied and any(each.row.name == "embed.weight" for each in unit.entries)
        used = {*unit.blocks, *(["head"] if tied else [])}
        return tuple(each for each in self.blocks if each in used)

    def begin(self, last: bool, in_backward: bool) -> None:
        self.level, self.at_peak = nothing(), nothing()
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()
        self.last, self.in_backward = last, in_backward
        self.given = set[str]()

    def change(self, size: float, category: str) -> None:
        self.level[category] += size
        self.total += size
        if self.total > self.high:
            self.high = self.total
            if self.sliced:
                self.at_high = self.level.copy()
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, self.level.copy()

    def pause(self) -> None:
        """A slice ends."""
        if self.sliced:
            self.slices.append(Slice(self.high, self.at_high, self.total, self.level.copy()))
            self.high, self.at_high = self.total, self.level.copy()

    def gather(self, n: int) -> None:
        if n not in self.present:
            self.present.add(n)
            self.change(self.units[n].size * self.rules.itemsize, GATHERED)

    def release(self, n: int) -> None:
        if n in self.present and self.rules.sheds(self.units[n]):
            self.present.remove(n)
            self.change(-self.units[n].size * self.rules.itemsize, GATHERED)

    def enter(self, block: str) -> None:
        """A forward comes to a block."""
        if not self.sheds:
            return
        for n in self.using[block]:
            self.gather(n)
        if not self.in_backward:
            for n in self._ahead(block, 1):
                self.gather(n)

    def leave(self, block: str) -> None:
        """And has passed it; one of a recomputation is needed at once."""
        if self.in_backward or self.rules.keeps_weights:
            return
        for n in self.using[block]:
            kept = self.rules.kept_to_backward and self.users[n][-1] == self.blocks[-1]
            if self.users[n][-1] == block and not kept:
                self.release(n)

    def come_back(self, block: str) -> None:
        """A backward comes to a block."""
        if not self.sheds or block == "embed":  # whose backward reads no weight
            return
        place = self.blocks.index(block)
        after = self.blocks[place + 1] if place + 1 < len(self.blocks) else None
        if not self.rules.keeps_weights:
            for n, users in enumerate(self.users):
                if users[0] == after:
                    self.release(n)
        for n in (*self.using[block], *self._ahead(block, -1)):
            if self.users[n] != ("embed",):
                self.gather(n)

    def end_backward(self) -> None:
        if not self.rules.keeps_weights:
            for n in range(len(self.units)):
                self.release(n)

    def finish(self) -> None:
        """What is under way arrives, and gathered weights leave."""
        for n in range(len(self.units)):
            self.release(n)
        while self.in_flight:
            self.receive(self.in_flight.popleft())

    def _ahead(self, block: str, step: int) -> list[int]:
        if (block, step) not in self.ahead:
            found = prefetched(self.units, self.blocks, block, step, self.rules.prefetch)
            self.ahead[block, step] = found
        return self.ahead[block, step]

    def weights_of(self, block: str, name: str) -> list[tuple[int, str, int]]:
        """The unit, name and elements of weights whose names begin so."""
        inside = f"{block}.block.{name}" if block.startswith("mtp") and name else f"{block}.{name}"
        begin = name if block in ("embed", "head") else inside
        return [
            (n, row.name, row.numel)
            for n, row in self.rows.get(block, ())
            if row.name not in self.given and row.name.startswith(begin)
        ]

    def make_gradient(self, block: str, name: str) -> float:
        """Bytes of the largest weight gradient of these, as the backward makes it."""
        if self.rules.adds_products(name):
            return 0.0
        sizes = [numel for _, _, numel in self.weights_of(block, name)]
        if self.rules.tied and name == "head":
            sizes = [row.numel for _, row in self.rows["embed"] if row.name == "embed.weight"]
        size = max(sizes, default=0) * self.rules.itemsize
        self.change(size, ACTIVATIONS)
        return size

    def give(self, block: str, name: str) -> float:
        """Gradients of these weights have come. Where they stay as backward made them, their bytes
        are returned."""
        stay = 0.0
        for n, weight, numel in self.weights_of(block, name):
            self.given.add(weight)
            unit = self.units[n]
            if not self.rules.collects(unit):
                stay += 0 if weight in self.kept_gradients else numel * self.rules.grad_itemsize
                self.kept_gradients.add(weight)
                continue
            if n not in self.shares:
                self.shares.add(n)
                self.change(*self._share(unit))
            self.missing[n] -= 1
            if not self.missing[n]:
                self.missing[n] = len(unit.entries)
                if self.last or self.rules.sums_every_time(unit):
                    self._send(n)
        return stay

    def _share(self, unit: Unit) -> tuple[float, str]:
        """Of the full gradients of a unit; they stay if nobody has another part of their sum."""
        passing = unit.num_shards > 1 and self.rules.sums_every_time(unit)
        size = unit.size * self.rules.grad_itemsize
        return size, GATHERED if passing else GRADIENTS

    def _send(self, n: int) -> None:
        while len(self.in_flight) >= MOST_IN_FLIGHT:
            self.receive(self.in_flight.popleft())
        if n in self.in_flight:
            self.in_flight.remove(n)
            self.receive(n)
        self.shares.remove(n)
        self.in_flight.append(n)
        if self.units[n].num_shards > 1:
            self.change(self.units[n].shard_size * self.rules.grad_itemsize, GRADIENTS)

    def receive(self, n: int) -> None:
        unit = self.units[n]
        if unit.num_shards > 1:
            size, category = self._share(unit)
            self.change(-size, category)
            if n in self.summed:
                self.change(-unit.shard_size * self.rules.grad_itemsize, GRADIENTS)
        self.summed.add(n)
        if self.rules.leaves:
            self.summed.discard(n)
            self.change(-unit.shard_size * self.rules.grad_itemsize, GRADIENTS)


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


class StageRun:
    """The actions of one stage in a step. Stages of a kind do the same, so each action is played
    once; `behind` are those that this stage has not played itself."""

    def __init__(self, ledger: StageLedger) -> None:
        self.ledger, self.rules, self.segments = ledger, ledger.rules, ledger.segments
        self.units = _Units(ledger.packed, ledger.blocks, ledger.rules, ledger.sliced)
        self.counts = Counter[str]()
        self.behind: list[tuple[str, bool]] = []
        self.waiting = 0.0  # bytes of the gradient of a tied head

    def act(self, kind: str, last: bool) -> ActionBytes:
        """The next action; `last`: no gradient of the step comes after it."""
        counted = "gradients" if kind in (BACKWARD, WEIGHT_GRAD) else kind
        self.counts[counted] += 1
        key = (kind, min(self.counts[counted], STEADY), last)
        known = self.ledger.known
        if key in known:
            if self.counts[counted] <= STEADY or last:
                self.behind.append((kind, last))
            return known[key]
        for before in self.behind:
            self._play(*before)
        self.behind.clear()
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
                units.change(event.bytes, LOGITS if event.logits else ACTIVATIONS)
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

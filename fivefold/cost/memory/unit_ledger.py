"""Weights and gradients of one stage, by the rules of its flat units (`parallel/data.py`): what is
gathered, made, sent and received as the blocks of its passes come.

The events of a segment, joined: what happens between two changes of a flat unit is one change.

Equal layers have equal steps. So a stage of 40 layers takes the events of one layer, and its plays
add a few numbers a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core.layout import (
    LocalWeight,
    Unit,
    coded_shard_bytes,
    is_coded,
    prefetched,
    segments,
)
from fivefold.cost.layer import EXPERTS, BlockPass, Change, Event, Pause, WeightGradient


class BlockWeight(NamedTuple):
    """A weight by its name inside of its block. `unit` counts those of the segment; `collected`:
    its gradient goes into the buffer of its unit."""

    unit: int
    name: str
    numel: int
    collected: bool


class Given(NamedTuple):
    """Gradients of so many weights of a unit have come, the first and the last one of them in this
    step or another one of the segment."""

    unit: int
    weights: int


class Kept(NamedTuple):
    """A gradient stays where backward made it, if that is the first one of its weight."""

    block: int
    name: str
    bytes: float


JoinedStep = Change | Given | Kept | BlockPass | Pause


class GradientSizes(NamedTuple):
    """Bytes of elements, and whose gradients go past autograd or wait for others."""

    itemsize: int
    grad_itemsize: int
    queued: bool  # weight gradients go past autograd
    tied_head: int  # elements of a weight that is also the embedding's, 0 if there is none

    def adds_products(self, name: str) -> bool:
        """Whether the gradient of a weight is added to the sum by the GEMM that computes it."""
        exempt = name == "embed" or name.startswith(f"{EXPERTS}.experts") or name.endswith("norm")
        return self.queued and self.itemsize == self.grad_itemsize and not exempt


class SegmentUse(NamedTuple):
    """Multi-token prediction uses the head several times. Autograd sums its gradients before it
    gives them: the first one `waits` for the next, and that one has `waited`."""

    waits: bool = False
    waited: bool = False


def segment_steps(
    events: Iterable[Event],
    weights: Sequence[Sequence[BlockWeight]],
    sizes: GradientSizes,
    use: SegmentUse,
    gives_rest: bool,
    with_passes: bool,
) -> list[JoinedStep]:
    """The steps of one segment in one action. `weights` of its blocks come in the order of the
    backward. `gives_rest`: after the events, those come whose gradients take little memory.
    `with_passes`: a pass over a block gathers or frees weights."""
    gives_remainder = gives_rest and not use.waits
    steps = [*_steps(events, _SegmentWeights(weights, sizes), use, gives_remainder, with_passes)]
    return [*_joined(_without_middles(steps))]


class _SegmentWeights:
    """Weights whose gradients have not come yet."""

    def __init__(self, weights: Sequence[Sequence[BlockWeight]], sizes: GradientSizes) -> None:
        self.left, self.sizes = [list(block_weights) for block_weights in weights], sizes

    def gradient_bytes(self, block: int, name: str, apart: bool = False) -> float:
        """Bytes of the largest weight gradient of these, as the backward makes it."""
        if self.sizes.adds_products(name) and not apart:
            return 0.0
        if self.sizes.tied_head and name == "head":
            return float(self.sizes.tied_head * self.sizes.itemsize)
        numels = (weight.numel for weight in self.left[block] if weight.name.startswith(name))
        return float(max(numels, default=0) * self.sizes.itemsize)

    def give(self, block: int, name: str) -> tuple[list[JoinedStep], list[JoinedStep]]:
        """What happens to units, and to gradients that stay."""
        own_weights = [weight for weight in self.left[block] if weight.name.startswith(name)]
        self.left[block] = [
            weight for weight in self.left[block] if not weight.name.startswith(name)
        ]
        size = self.sizes.grad_itemsize
        leftovers: list[JoinedStep] = [
            Kept(block, weight.name, weight.numel * size)
            for weight in own_weights
            if not weight.collected
        ]
        return [Given(weight.unit, 1) for weight in own_weights if weight.collected], leftovers


def _steps(
    events: Iterable[Event],
    weights: _SegmentWeights,
    use: SegmentUse,
    gives_rest: bool,
    with_passes: bool,
) -> Iterator[JoinedStep]:
    sizes: dict[tuple[int, str], float] = {}  # gradients that were not given yet
    for event in events:
        if isinstance(event, WeightGradient):
            key = event.block, event.name
            if not event.is_final:
                sizes[key] = weights.gradient_bytes(*key, event.apart)
                yield Change(sizes[key], peak=sizes[key])
            else:
                yield from _taken(event, weights, use, sizes.pop(key))
        elif with_passes or not isinstance(event, BlockPass):
            yield event
    for block in range(len(weights.left)) if gives_rest else ():
        grads, leftovers = weights.give(block, "")
        yield from (*grads, *leftovers)


def _taken(
    event: WeightGradient, weights: _SegmentWeights, use: SegmentUse, size: float
) -> Iterator[JoinedStep]:
    """A weight gradient leaves the backward. That of a tied head waits for the embedding's."""
    tied = weights.sizes.tied_head > 0
    if tied and event.name == "head":
        return
    if tied and event.name == "embed" and (waiting := weights.gradient_bytes(event.block, "head")):
        yield Change(-waiting, peak=size)  # their sum takes the place of both
    past_autograd = weights.sizes.queued
    if use.waited and not past_autograd:
        yield Change(-size, peak=size)
    if use.waits and not past_autograd:
        return
    grads, leftovers = weights.give(event.block, event.name)
    if use.waits:  # it is added to the sum, which is not complete
        grads = [Given(step.unit, 0) for step in grads if isinstance(step, Given)]
    yield from (*grads, Change(-size), *leftovers)


def _without_middles(steps: Iterable[JoinedStep]) -> Iterator[JoinedStep]:
    """Between the first and the last gradient, nothing happens to a unit."""
    sequence = [*steps]
    last = {
        step.unit: position for position, step in enumerate(sequence) if isinstance(step, Given)
    }
    passed: dict[int, int] = {}  # weights of a unit since its first one
    for index, step in enumerate(sequence):
        if not isinstance(step, Given):
            yield step
        elif step.unit not in passed:
            passed[step.unit] = 0
            yield step
        else:
            passed[step.unit] += step.weights
            if index == last[step.unit]:
                yield Given(step.unit, passed[step.unit])


def _joined(steps: Iterable[JoinedStep]) -> Iterator[JoinedStep]:
    """Neighbouring changes as one."""
    open_ = Change(0.0)
    for step in steps:
        if isinstance(step, Change):
            peak = (open_.peak, open_.peak_logits)
            if open_.bytes + step.peak > open_.peak:
                peak = (open_.bytes + step.peak, open_.logits + step.peak_logits)
            open_ = Change(open_.bytes + step.bytes, open_.logits + step.logits, *peak)
            continue
        if open_ != Change(0.0):
            yield open_
            open_ = Change(0.0)
        yield step
    if open_ != Change(0.0):
        yield open_


WIDENED = 8  # bytes of a code as float32, and times its scale
MOST_IN_FLIGHT = 2  # reductions whose full gradients are still in memory
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
    coded: frozenset[str] = frozenset()  # weights that are gathered as fp8 codes

    def sheds(self, unit: Unit) -> bool:
        return self.zero == 3 and unit.num_shards > 1

    def sums_every_time(self, unit: Unit) -> bool:
        return self.zero >= 2 if unit.num_shards > 1 else self.leaves

    def collects(self, unit: Unit) -> bool:
        ranks = self.expert_ranks if unit.expert else self.dense_ranks
        return ranks > 1 or self.itemsize != self.grad_itemsize or self.leaves


class CodesUnderWay(NamedTuple):
    """Bytes of a unit that is gathered as codes: what is sent and comes, until it is used, and the
    widened values of its longest segment, before it is sent and when it is used."""

    sent: float
    come: float
    widened: float


class Slice(NamedTuple):
    """An action between two collectives: bytes at its peak, and at its end."""

    peak: float
    at_peak: Held
    change: float
    left: Held


class UnitTable:
    """The units of a stage, and which of its blocks use them."""

    def __init__(self, units: Sequence[Unit], blocks: Sequence[str], rules: DataRules) -> None:
        self.units, self.blocks, self.rules = units, blocks, rules
        self.users = [self._users(unit) for unit in units]
        self.using: dict[str, list[int]] = {block: [] for block in blocks}
        self.begun_by: dict[str, list[int]] = {}  # units by the first block that uses them
        for n, users in enumerate(self.users):
            self.begun_by.setdefault(users[0], []).append(n)
            for block in users:
                self.using[block].append(n)
        self.places = {block: index for index, block in enumerate(blocks)}
        self.sheds = [*map(rules.sheds, units)]
        self.collects = [*map(rules.collects, units)]
        self.sums_every_time = [*map(rules.sums_every_time, units)]
        self.gathered = [unit.size * rules.itemsize for unit in units]
        self.codes = [*map(self._codes_of, units)]
        self.shards = [unit.shard_size * rules.grad_itemsize for unit in units]
        self._ahead: dict[tuple[str, int], list[int]] = {}

    def _users(self, unit: Unit) -> tuple[str, ...]:
        tied = self.rules.tied and any(entry.row.name == "embed.weight" for entry in unit.entries)
        used = {*unit.blocks, *(["head"] if tied else [])}
        return tuple(block for block in self.blocks if block in used)

    def _codes_of(self, unit: Unit) -> CodesUnderWay | None:
        coded = self.rules.coded
        if not self.rules.sheds(unit) or not is_coded(unit, coded):
            return None
        size = coded_shard_bytes(unit, coded, self.rules.itemsize)
        shards = (segments(unit, index, coded) for index in range(unit.num_shards))
        longest = max(
            segment.stop - segment.start for shard in shards for segment in shard if segment.rounded
        )
        return CodesUnderWay(size, unit.num_shards * size, WIDENED * longest)

    def ahead(self, block: str, step: int) -> list[int]:
        """Units to prefetch."""
        if (block, step) not in self._ahead:
            unit_numbers = prefetched(self.units, self.blocks, block, step, self.rules.prefetch)
            self._ahead[block, step] = unit_numbers
        return self._ahead[block, step]

    def full_gradient(self, n: int) -> tuple[float, str]:
        """Of a unit; it stays if nobody has another part of its sum."""
        passing = self.units[n].num_shards > 1 and self.sums_every_time[n]
        size = self.units[n].size * self.rules.grad_itemsize
        return size, GATHERED if passing else GRADIENTS

    def entry_counts(self, block: str) -> tuple[tuple[int, bool], ...] | None:
        """Of units that have this block alone: with them, equal blocks have equal weights."""
        if any(self.units[n].blocks != (block,) for n in self.using[block]):
            return None
        return tuple((len(self.units[n].entries), self.collects[n]) for n in self.using[block])

    def units_of(self, block: str) -> list[int]:
        """In the order in which a backward gives their gradients."""
        return [n for n in reversed(self.using[block]) if block in self.units[n].blocks]

    def weights_of(self, blocks: Sequence[str]) -> tuple[tuple[BlockWeight, ...], ...]:
        """The weights of these blocks, in terms of their units."""
        places = {n: i for i, n in enumerate(self.segment_units(blocks))}
        return tuple(
            tuple(
                BlockWeight(places[n], _name_inside(row.name, block), row.numel, self.collects[n])
                for n, row in self._rows(block)
            )
            for block in blocks
        )

    def segment_units(self, blocks: Sequence[str]) -> tuple[int, ...]:
        """The units of these blocks, in the order in which a backward gives their gradients."""
        return tuple(dict.fromkeys(n for block in blocks for n in self.units_of(block)))

    def _rows(self, block: str) -> Iterator[tuple[int, LocalWeight]]:
        for n in self.units_of(block):
            for entry in reversed(self.units[n].entries):
                if entry.row.block == block:
                    yield n, entry.row

    def gradient_sizes(self) -> GradientSizes:
        rules, tied = self.rules, 0
        if rules.tied:
            rows = (row for _, row in self._rows("embed") if row.name == "embed.weight")
            tied = max((row.numel for row in rows), default=0)
        return GradientSizes(rules.itemsize, rules.grad_itemsize, rules.queued, tied)


def _name_inside(name: str, block: str) -> str:
    """As operators call a weight."""
    if block in ("embed", "head"):
        return name
    return name.removeprefix(f"{block}.").removeprefix("block.")


class UnitLedger:
    """The level of memory in one action, and what all actions so far have done to units."""

    def __init__(self, table: UnitTable, sliced: bool) -> None:
        self.table, self.rules, self.sliced = table, table.rules, sliced
        self.level, self.at_peak = nothing(), nothing()
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()  # since the last pause
        self.present = {n for n, sheds in enumerate(table.sheds) if not sheds}
        self.arriving = set[int]()  # gathered as codes that were not used yet
        self.shares = set[int]()  # with full gradients
        self.summed = set[int]()  # with summed gradients
        self.missing = [len(unit.entries) for unit in table.units]
        self.in_flight = deque[int]()
        self.kept_gradients = set[tuple[str, str]]()  # where backward left them
        self.last = self.in_backward = False

    def begin(self, last: bool, in_backward: bool) -> None:
        self.level, self.at_peak = nothing(), nothing()
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()
        self.last, self.in_backward = last, in_backward

    def change(self, size: float, category: str) -> None:
        self.level[category] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, self.level.copy()
        if self.sliced and self.total > self.high:
            self.high, self.at_high = self.total, self.level.copy()

    def pass_through(self, event: Change) -> None:
        """Activations and logits."""
        top = self.total + event.peak
        if top > self.peak or (self.sliced and top > self.high):
            level = self.level.copy()
            level[ACTIVATIONS] += event.peak - event.peak_logits
            level[LOGITS] += event.peak_logits
            if top > self.peak:
                self.peak, self.at_peak = top, level
            if top > self.high:
                self.high, self.at_high = top, level
        self.level[ACTIVATIONS] += event.bytes - event.logits
        self.level[LOGITS] += event.logits
        self.total += event.bytes

    def pause(self) -> None:
        """A slice ends."""
        if self.sliced:
            left = self.level.copy()
            self.slices.append(Slice(self.high, self.at_high, self.total, left))
            self.high, self.at_high = self.total, left

    def gather(self, n: int) -> None:
        if n not in self.present:
            self.present.add(n)
            self.change(self.table.gathered[n], GATHERED)
            if (codes := self.table.codes[n]) is not None:
                self.arriving.add(n)
                self.change(codes.sent + codes.widened, GATHERED)
                self.change(codes.come - codes.widened, GATHERED)

    def arrive(self, n: int) -> None:
        """A unit is used: its codes become values."""
        codes = self.table.codes[n]
        if codes is not None and n in self.arriving:
            self.arriving.remove(n)
            self.change(codes.widened, GATHERED)
            self.change(-codes.widened - codes.sent - codes.come, GATHERED)

    def release(self, n: int) -> None:
        if self.table.sheds[n] and n in self.present:
            self.arrive(n)
            self.present.remove(n)
            self.change(-self.table.gathered[n], GATHERED)

    def enter(self, block: str) -> None:
        """A forward comes to a block."""
        for n in self.table.using[block]:
            self.gather(n)
        if not self.in_backward:
            for n in self.table.ahead(block, 1):
                self.gather(n)
        for n in self.table.using[block]:
            self.arrive(n)

    def leave(self, block: str) -> None:
        """And has passed it; one of a recomputation is needed at once."""
        if self.in_backward or self.rules.keeps_weights:
            return
        users, final = self.table.users, self.table.blocks[-1]
        for n in self.table.using[block]:
            stays = self.rules.kept_to_backward and users[n][-1] == final
            if users[n][-1] == block and not stays:
                self.release(n)

    def come_back(self, block: str) -> None:
        """A backward comes to a block."""
        if block == "embed":  # whose backward reads no weight
            return
        table, after = self.table, self.table.places[block] + 1
        if not self.rules.keeps_weights and after < len(table.blocks):
            for n in table.begun_by.get(table.blocks[after], ()):
                self.release(n)
        for n in (*table.using[block], *table.ahead(block, -1)):
            if table.users[n] != ("embed",):
                self.gather(n)
        for n in table.using[block]:
            self.arrive(n)

    def end_backward(self) -> None:
        if not self.rules.keeps_weights:
            for n in range(len(self.table.units)):
                self.release(n)

    def finish(self) -> None:
        """What is under way arrives, and gathered weights leave."""
        for n in range(len(self.table.units)):
            self.release(n)
        while self.in_flight:
            self.receive(self.in_flight.popleft())

    def keep(self, block: str, name: str, size: float) -> None:
        """A gradient stays where the backward has made it; later ones are added to it."""
        if (block, name) not in self.kept_gradients:
            self.kept_gradients.add((block, name))
            self.change(size, GRADIENTS)

    def give(self, n: int, weights: int) -> None:
        """Gradients of so many weights of a unit have come."""
        if n not in self.shares:
            self.shares.add(n)
            self.change(*self.table.full_gradient(n))
        self.missing[n] -= weights
        if not self.missing[n]:
            self.missing[n] = len(self.table.units[n].entries)
            if self.last or self.table.sums_every_time[n]:
                self._send(n)

    def _send(self, n: int) -> None:
        while len(self.in_flight) >= MOST_IN_FLIGHT:
            self.receive(self.in_flight.popleft())
        if n in self.in_flight:
            self.in_flight.remove(n)
            self.receive(n)
        self.shares.remove(n)
        self.in_flight.append(n)
        if self.table.units[n].num_shards > 1:
            self.change(self.table.shards[n], GATHERED)

    def receive(self, n: int) -> None:
        """A sum arrives: it takes the place of the one before, or leaves."""
        shard = self.table.shards[n]
        if self.table.units[n].num_shards > 1:
            size, category = self.table.full_gradient(n)
            self.change(-size, category)
            self.change(-shard, GATHERED)
            if n not in self.summed and not self.rules.leaves:
                self.change(shard, GRADIENTS)
        elif self.rules.leaves:
            self.change(-shard, GRADIENTS)
        self.summed.add(n)

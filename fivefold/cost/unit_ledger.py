"""Weights and gradients of one stage, by the rules of its flat units (`parallel/data.py`): what is
gathered, made, sent and received as the blocks of its passes come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core.units import LocalWeight, Unit, prefetched
from fivefold.cost.layer_operators import EXPERTS
from fivefold.cost.operator_tape import Change

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

    def sheds(self, unit: Unit) -> bool:
        return self.zero == 3 and unit.num_shards > 1

    def sums_every_time(self, unit: Unit) -> bool:
        return self.zero >= 2 if unit.num_shards > 1 else self.leaves

    def collects(self, unit: Unit) -> bool:
        ranks = self.expert_ranks if unit.expert else self.dense_ranks
        return ranks > 1 or self.itemsize != self.grad_itemsize or self.leaves

    def adds_products(self, name: str) -> bool:
        """Whether the gradient of a weight is added to the sum by the GEMM that computes it."""
        others = name == "embed" or name.startswith(f"{EXPERTS}.experts") or name.endswith("norm")
        return self.queued and self.itemsize == self.grad_itemsize and not others


class Slice(NamedTuple):
    """An action between two collectives: bytes at its peak, and at its end."""

    peak: float
    at_peak: Held
    change: float
    left: Held


class UnitLedger:
    """The level of memory in one action, and what all actions so far have done to units."""

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
        self.places = {block: place for place, block in enumerate(blocks)}
        self.begun_by: dict[str, list[int]] = {}  # units by the first block that uses them
        for n, users in enumerate(self.users):
            self.begun_by.setdefault(users[0], []).append(n)
        self.level, self.noted = nothing(), nothing()
        self.is_highest = False  # the level is the peak, and not noted yet
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()  # since the last pause
        self.ahead: dict[tuple[str, int], list[int]] = {}  # units to prefetch
        self.named: dict[tuple[str, str], list[tuple[int, str, int]]] = {}  # weights by their names
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
        self.level, self.noted, self.is_highest = nothing(), nothing(), False
        self.total = self.peak = self.high = 0.0
        self.at_high, self.slices = nothing(), list[Slice]()
        self.last, self.in_backward = last, in_backward
        self.given = set[str]()

    @property
    def at_peak(self) -> Held:
        """The level when it was highest in this action."""
        return self.level.copy() if self.is_highest else self.noted

    def change(self, size: float, category: str, logits: float = 0.0) -> None:
        if self.is_highest and size + logits <= 0:
            self.noted, self.is_highest = self.level.copy(), False
        self.level[category] += size
        self.level[LOGITS] += logits
        self.total += size + logits
        if self.total > self.high:
            self.high = self.total
            if self.sliced:
                self.at_high = self.level.copy()
        if self.total > self.peak:
            self.peak, self.is_highest = self.total, True

    def pass_through(self, event: Change) -> None:
        """Activations and logits."""
        peak, words = event.peak, event.peak_logits
        self.change(peak - words, ACTIVATIONS, words)
        self.change(event.bytes - peak - event.logits + words, ACTIVATIONS, event.logits - words)

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
        after = self.places[block] + 1
        if not self.rules.keeps_weights and after < len(self.blocks):
            for n in self.begun_by.get(self.blocks[after], ()):
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
        if (block, name) not in self.named:
            inside = f"block.{name}" if block.startswith("mtp") and name else name
            begin = name if block in ("embed", "head") else f"{block}.{inside}"
            rows = [(n, row) for n, row in self.rows.get(block, ()) if row.name.startswith(begin)]
            self.named[block, name] = [(n, row.name, row.numel) for n, row in rows]
        return [each for each in self.named[block, name] if each[1] not in self.given]

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
            self.change(self.units[n].shard_size * self.rules.grad_itemsize, GATHERED)

    def receive(self, n: int) -> None:
        """A sum arrives: it takes the place of the one before, or leaves."""
        unit = self.units[n]
        shard = unit.shard_size * self.rules.grad_itemsize
        if unit.num_shards > 1:
            size, category = self._share(unit)
            self.change(-size, category)
            self.change(-shard, GATHERED)
            if n not in self.summed and not self.rules.leaves:
                self.change(shard, GRADIENTS)
        elif self.rules.leaves:
            self.change(-shard, GRADIENTS)
        self.summed.add(n)

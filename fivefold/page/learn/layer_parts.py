"""What the picture of one layer is made of: local tensors, collectives, and the list that both are
held against.

Nothing here computes the bytes of a collective: they are taken from core's list of this layer, and
a station that asks for one which is not there is a mistake of this program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fivefold.core import groups
from fivefold.core.plan import Plan
from fivefold.core.splits import Ranges
from fivefold.core.weights import held_by, local_shape, weights
from fivefold.cost import axis_collectives
from fivefold.cost.axis_collectives import Collective, RankChunk
from fivefold.cost.collectives import ITEMSIZE, expert_collectives, units_of


@dataclass(frozen=True)
class LocalTensor:
    """What one rank holds of a tensor: the symbol and the size of each dim.

    `rows` are the shares of the row's tokens that it has, `columns` that of width or heads; none
    where tokens of several rows are mixed.
    """

    name: str
    symbols: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[tuple[float, float], ...] = ()
    columns: float = 1.0
    partial: bool = False  # a sum over tp is still to come
    itemsize: int | None = None  # bytes of a number; None: that of activations

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class LayerCollective:
    """Equal collectives of one station, in one direction."""

    call: Collective
    count: int
    what: str
    tier: str


@dataclass(frozen=True)
class Station:
    """One thing that happens to the tokens of a rank, forward and in backward.

    `axis` is the dimension that it belongs to; a station without one is plain arithmetic. `pair`
    names its conjugates: what it is forward, and in backward.
    """

    name: str
    title: str
    says: str
    says_back: str
    held: LocalTensor | None = None
    axis: str = ""
    forward: tuple[LayerCollective, ...] = ()
    backward: tuple[LayerCollective, ...] = ()
    pair: tuple[str, str] | None = None
    weights: tuple[dict[str, Any], ...] = ()
    beside: bool = False  # of the weights, not of the tokens


def over(symbol: str, **degrees: int) -> str:
    """A dim that some degrees cut, as the legend writes it.

    >>> over("s", cp=2, tp=2), over("s", cp=2, tp=1), over("h", tp=1)
    ('s/(cp·tp)', 's/cp', 'h')
    """
    cut = [name for name, degree in degrees.items() if degree > 1]
    if not cut:
        return symbol
    return f"{symbol}/{cut[0]}" if len(cut) == 1 else f"{symbol}/({'·'.join(cut)})"


class Layer:
    """One layer of a plan on rank 0: its sizes, and core's list of its collectives.

    The layer has neither the embedding nor the head beside it; one microbatch passes through it.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.itemsize = ITEMSIZE[plan.precision]
        self.wide = axis_collectives.wide_size(self.itemsize)
        stage = next(s for s, layers in enumerate(plan.stages) if number in layers)
        units = tuple(
            unit
            for unit in units_of(plan, stage, self.itemsize)
            if f"blocks.{number}" in unit.blocks
        )
        alone = RankChunk(range(number, number + 1), 1, units)
        # Weights are gathered as the whole stage does it, whichever of its layers this is.
        whole = alone._replace(layers=plan.stages[stage])
        self._left = (
            axis_collectives.tensor_collectives(plan, alone, self.itemsize)
            + axis_collectives.context_collectives(plan, alone, self.itemsize)
            + expert_collectives(plan, alone, self.itemsize)
            + axis_collectives.data_collectives(plan, whole, self.itemsize, self.wide)
        )
        self._sizes = {call.axis: call.group for call in self._left}
        self.message = Collective(
            "pp", "send", axis_collectives.message_bytes(plan, self.itemsize), 2
        )

    def take(
        self, axis: str, kind: str, size: int, what: str, count: int = 1
    ) -> tuple[LayerCollective, ...]:
        """Some collectives of core's list; none where the axis has only one rank."""
        if axis not in self._sizes:
            return ()
        call = Collective(axis, kind, size, self._sizes[axis])
        assert self._left[call] >= count, f"core lists no {call}"
        self._left[call] -= count
        return (LayerCollective(call, count, what, self.tier(axis)),)

    def take_any(self, axis: str, kind: str, what: str) -> tuple[LayerCollective, ...]:
        """One collective of every size that core lists for an axis and a kind."""
        found = sorted(call for call in self._left if call[:2] == (axis, kind))
        return tuple(wire for call in found for wire in self.take(axis, kind, call.bytes, what))

    def sent(self, what: str) -> tuple[LayerCollective, ...]:
        """The message to the neighbour on the pipeline."""
        return (LayerCollective(self.message, 1, what, self.tier("pp")),)

    def require_all_taken(self) -> None:
        """Every collective that core lists is at some station."""
        assert not +self._left, f"no station has {+self._left}"

    def tier(self, axis: str) -> str:
        """The slowest link tier that a group of the axis spans."""
        assert self.plan.machine is not None, "the panel names a machine"
        return groups.tier(self.plan, axis, self.plan.machine).name

    def held(self, *endings: str) -> tuple[dict[str, Any], ...]:
        """Weights of this layer by the end of their names: the whole, and what rank 0 holds."""
        shape, layout = self.plan.shape, self.plan.layout
        found = [w for w in weights(shape) if w.block == f"blocks.{self.number}"]
        named = {w.name.removeprefix(f"blocks.{self.number}."): w for w in found}
        return tuple(
            {
                "name": name.removesuffix(".weight"),
                "whole": list(w.shape),
                "local": list(local_shape(w, held_by(w, shape, layout, layout.coord(0)))),
                "cut": w.cut,
            }
            for name, w in named.items()
            if name.endswith(endings)
        )


def shares(tokens: Ranges, seq: int, count: int | None = None) -> tuple[tuple[float, float], ...]:
    """The first `count` of some tokens of a row, or all, as shares of the row."""
    found: list[tuple[float, float]] = []
    left = sum(map(len, tokens)) if count is None else count
    for each in tokens:
        part = each[:left]
        left -= len(part)
        if part:
            found.append((part.start / seq, part.stop / seq))
    return tuple(found)

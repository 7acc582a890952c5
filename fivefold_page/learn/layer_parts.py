"""What the picture of one layer consists of: stations with local tensors and collectives.

Nothing here computes the bytes of a collective: stations take them from the list of collectives
that the plan has for this layer. Taking one that is not in the list is a programming error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.core import PRECISIONS
from fivefold.core.layout import Ranges, groups, local_shape, shard_of
from fivefold.core.layout import weights as model_weights
from fivefold.core.plan import Plan
from fivefold.cost.traffic import (
    Collective,
    RankChunk,
    context_collectives,
    data_collectives,
    expert_collectives,
    message_bytes,
    tensor_collectives,
    units_of,
    wide_size,
)
from fivefold_page import View


@dataclass(frozen=True)
class LocalTensor:
    """One rank's shard of a tensor: the symbol and the size of each dim.

    `rows` has the spans of tokens as shares of the sequence, and is empty if tokens of several
    sequences are mixed; `columns` is the share of the width or of the heads.
    """

    name: str
    symbols: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[tuple[float, float], ...] = ()
    columns: float = 1.0
    partial: bool = False  # a sum over tp is still to come
    itemsize: int | None = None  # None: that of activations

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class LayerCollective:
    """Equal collectives of one station, in one direction."""

    collective: Collective
    count: int
    what: str
    tier: str


@dataclass(frozen=True)
class Station:
    """One operation on the tokens of a rank, in forward and in backward.

    `axis` is the dimension that it belongs to; a station without one is plain arithmetic. `pair`
    names its communication in forward and in backward.
    """

    name: str
    title: str
    says: str
    says_back: str
    tensor: LocalTensor | None = None
    axis: str = ""
    forward: tuple[LayerCollective, ...] = ()
    backward: tuple[LayerCollective, ...] = ()
    pair: tuple[str, str] | None = None
    weights: tuple[View, ...] = ()
    beside: bool = False  # about weights, not tokens: drawn beside the path of the tokens


def over(symbol: str, **degrees: int) -> str:
    """The symbol of a dim that is sharded over some degrees, as in the legend.

    >>> over("s", cp=2, tp=2), over("s", cp=2, tp=1), over("h", tp=1)
    ('s/(cp·tp)', 's/cp', 'h')
    """
    cut = [name for name, degree in degrees.items() if degree > 1]
    if not cut:
        return symbol
    return f"{symbol}/{cut[0]}" if len(cut) == 1 else f"{symbol}/({'·'.join(cut)})"


class Layer:
    """One layer of a plan on rank 0: its sizes, and the list of its collectives.

    The list has one microbatch, and neither the embedding nor the head.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.itemsize = PRECISIONS[plan.precision].itemsize
        self.wide = wide_size(self.itemsize)
        stage = next(s for s, layers in enumerate(plan.stages) if number in layers)
        units = tuple(
            unit
            for unit in units_of(plan, stage, self.itemsize)
            if f"blocks.{number}" in unit.blocks
        )
        alone = RankChunk(range(number, number + 1), 1, units, plan.recompute.of(stage))
        # Weights are gathered as in the whole stage, whichever of its layers this is.
        stage_chunk = alone._replace(layers=plan.stages[stage])
        self._left = (
            tensor_collectives(plan, alone, self.itemsize)
            + context_collectives(plan, alone, self.itemsize)
            + expert_collectives(plan, alone, self.itemsize)
            + data_collectives(plan, stage_chunk, self.itemsize)
        )
        self._sizes = {call.axis: call.group for call in self._left}
        self.message = Collective("pp", "send", message_bytes(plan, self.itemsize), 2)

    def take(
        self, axis: str, kind: str, size: int, what: str, count: int = 1
    ) -> tuple[LayerCollective, ...]:
        """Take some collectives from the list; none if the axis has only one rank."""
        if axis not in self._sizes:
            return ()
        call = Collective(axis, kind, size, self._sizes[axis])
        assert self._left[call] >= count, f"the plan has no {call}"
        self._left[call] -= count
        return (LayerCollective(call, count, what, tier_name(self.plan, axis)),)

    def take_any(self, axis: str, kind: str, what: str) -> tuple[LayerCollective, ...]:
        """Take one collective of every size that the list has for an axis and a kind."""
        calls = sorted(call for call in self._left if call[:2] == (axis, kind))
        return tuple(
            collective for call in calls for collective in self.take(axis, kind, call.bytes, what)
        )

    def sent(self, what: str) -> tuple[LayerCollective, ...]:
        """The message to the next pipeline rank."""
        return (LayerCollective(self.message, 1, what, tier_name(self.plan, "pp")),)

    def take_rest(self) -> tuple[LayerCollective, ...]:
        """Take what no station has taken."""
        remainder = sorted((+self._left).items())
        self._left.clear()
        return tuple(
            LayerCollective(call, count, call.payload, tier_name(self.plan, call.axis))
            for call, count in remainder
        )

    def weights(self, *endings: str) -> tuple[View, ...]:
        """Weights of this layer by the end of their names: the full shape, and that of rank 0."""
        shape, layout = self.plan.shape, self.plan.layout
        layer_weights = [w for w in model_weights(shape) if w.block == f"blocks.{self.number}"]
        named = {w.name.removeprefix(f"blocks.{self.number}."): w for w in layer_weights}
        return tuple(
            {
                "name": name.removesuffix(".weight"),
                "whole": list(w.shape),
                "local": list(local_shape(w, shard_of(w, shape, layout, layout.coord(0)))),
                "cut": w.cut,
            }
            for name, w in named.items()
            if name.endswith(endings)
        )


def tier_name(plan: Plan, axis: str) -> str:
    """The slowest link tier that a group of the axis spans."""
    assert plan.machine is not None, "the panel names a machine"
    return groups.tier(plan, axis, plan.machine).name


def shares(tokens: Ranges, seq: int, count: int | None = None) -> tuple[tuple[float, float], ...]:
    """The first `count` of some tokens, or all, as shares of the sequence."""
    fractions: list[tuple[float, float]] = []
    left = sum(map(len, tokens)) if count is None else count
    for piece in tokens:
        part = piece[:left]
        left -= len(part)
        if part:
            fractions.append((part.start / seq, part.stop / seq))
    return tuple(fractions)

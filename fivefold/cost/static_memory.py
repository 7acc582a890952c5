"""The ledger: bytes of one rank, exact, by the ZeRO stage and over the schedule.

`static_bytes` stay through a step, and are counted where all of them are there at once: after the
last backward, in front of the optimizer. What comes and goes before that moment stands beside them:
weights that stage 3 has gathered, microbatches in flight, and the inputs of their stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule import Action, Overlap
from fivefold.core.schedule.clock import memory_levels
from fivefold.core.units import Unit
from fivefold.cost.axis_collectives import ChunkShards, message_bytes
from fivefold.cost.collectives import chunks_of, owned_by

Optimizer = Literal["adamw", "sgd"]
STATES = {"adamw": 2, "sgd": 1}  # tensors like the weight: two moments, or the momentum
_MASTER = 4  # bytes: copies of weights that an optimizer updates, and its states, are float32
_SCALAR = 4  # bytes: AdamW counts the steps of every tensor, in float32


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank; all but `host` are on its device.

    `padding` is what alignment and even slices add to weights and gradients. `master` are wider
    copies of narrow weights, which the optimizer updates. `scalars` are AdamW's counts of steps.
    `host` is all that offload keeps in host memory. Rows that pad the vocabulary to a multiple of
    tp count as weights.
    """

    weights: int
    gradients: int
    optimizer: int
    scalars: int
    padding: int
    host: int
    master: int = 0

    @property
    def device(self) -> int:
        """All of it that is on the device."""
        states = self.master + self.optimizer + self.scalars
        return self.weights + self.gradients + states + self.padding


def static_bytes(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    optimizer: Optimizer,
    offload: bool = False,
    bucket: int | None = None,
    master: bool = False,
) -> StaticMemory:
    """What `rank` holds of weights, gradients and optimizer states of all its stages, in bytes.

    Weights are whole, but sliced in stage 3 where the shard group is more than one rank. Gradients
    are as the optimizer gets them, in the type of the weights; where data ranks sum them in another
    type, that sum is held beside them. States have the type of the weights. With a `master`, which
    is float32, states are too, and gradients are held once, in the type they are summed in. Offload
    keeps states and masters in host memory, and sliced weights too.
    """
    if plan.schedule.asynchronous:
        raise FivefoldError(
            "the bytes of asynchronous schedules, which keep older weights, are not predicted: use "
            f"another one than {plan.schedule.name}"
        )
    found = [
        _of_unit(plan.layout, rank, unit, itemsize, grad_itemsize, optimizer, offload, master)
        for chunk in chunks_of(plan, rank, itemsize, bucket)
        for unit in chunk.units
    ]
    return StaticMemory(
        *(sum(getattr(one, name.name) for one in found) for name in fields(StaticMemory))
    )


def _of_unit(
    layout: Layout,
    rank: int,
    unit: Unit,
    itemsize: int,
    grad_itemsize: int,
    optimizer: Optimizer,
    offload: bool,
    master: bool,
) -> StaticMemory:
    parts = owned_by(layout, rank, [unit])
    owned = sum(stop - start for _, start, stop in parts)
    spare = unit.slice_size - owned
    states = STATES[optimizer] * owned * (_MASTER if master else itemsize)
    copies = _MASTER * owned if master else 0
    scalars = _SCALAR * len(parts) if optimizer == "adamw" else 0
    sheds = _sheds_weights(layout, unit)
    weights, weights_spare = (owned, spare) if sheds else (unit.size - unit.padding, unit.padding)
    host = 0
    if offload:
        host, states, scalars, copies = states + scalars + copies, 0, 0, 0
        if sheds:
            host, weights, weights_spare = host + (owned + spare) * itemsize, 0, 0
    sums = itemsize if grad_itemsize == itemsize else itemsize + grad_itemsize
    if master:
        sums = grad_itemsize
    elif (layout.edp if unit.expert else layout.dp * layout.cp) == 1:
        # Alone, a rank leaves each gradient where backward made it: no buffer, so no padding.
        sums, spare = itemsize, 0
    return StaticMemory(
        weights=weights * itemsize,
        gradients=owned * sums,
        optimizer=states,
        scalars=scalars,
        padding=weights_spare * itemsize + spare * sums,
        host=host,
        master=copies,
    )


def gathered_bytes(plan: Plan, rank: int, itemsize: int, bucket: int | None = None) -> int:
    """The most whole weights that stage 3 has gathered at once, padding included.

    All of the rank's stages where they are gathered once a step. Gathered for each microbatch, a
    unit is there while it is used and one use ahead; where a forward and a backward run as one,
    both stages are counted at their most, which they need not reach together.
    """
    chunks = [
        chunk._replace(units=tuple(u for u in chunk.units if _sheds_weights(plan.layout, u)))
        for chunk in chunks_of(plan, rank, itemsize, bucket)
    ]
    if not any(chunk.units for chunk in chunks):
        return 0
    if plan.gather == "step":
        return itemsize * sum(unit.size for chunk in chunks for unit in chunk.units)
    peaks = [itemsize * _Walk(plan, chunk).peak() for chunk in chunks]
    paired = any(isinstance(step, Overlap) for steps in plan.schedule.order for step in steps)
    return sum(peaks) if paired else max(peaks)


class _Walk:
    """Which units of a chunk are here while one microbatch goes forward and back."""

    def __init__(self, plan: Plan, chunk: ChunkShards) -> None:
        self.plan, self.units = plan, chunk.units
        embed = ("embed",) if chunk.layers.start == 0 else ()
        head = ("head",) if chunk.layers.stop == plan.shape.layers else ()
        self.order = (*embed, *(f"blocks.{i}" for i in chunk.layers), *head)
        self.here: set[int] = set()
        self.most = 0

    def peak(self) -> int:
        """Elements, at most."""
        for block in self.order:
            self._gather(self._needed(block), ahead=+1)
            kept = self.plan.layout.pp == 1
            for place in self._needed(block):
                users = self._users(place)
                if users[-1] == block and not (kept and block == self.order[-1]):
                    self.here.discard(place)
        for place in range(len(self.order) - 1, -1, -1):
            self._return(place)
        return self.most

    def _return(self, place: int) -> None:
        """The backward of a block, behind the forward of its segment where that is repeated."""
        block = self.order[place]
        if block == "embed":  # its backward reads no weight
            return
        behind = self.order[place + 1 : place + 2]
        self.here -= {u for u in range(len(self.units)) if self._users(u)[:1] == behind}
        self._gather([u for u in self._needed(block) if self._is_read(u)], ahead=-1)
        blocks = [name for name in self.order if name.startswith("blocks.")]
        if self.plan.recompute.kind == "full" and block in blocks:
            size = self.plan.recompute.blocks
            start = blocks.index(block) // size * size
            if block == blocks[start : start + size][-1]:
                for name in blocks[start : start + size]:
                    self._gather(self._needed(name), ahead=0)

    def _gather(self, places: list[int], ahead: int) -> None:
        self.here |= set(places)
        if places and ahead:
            following = places[-1] + 1 if ahead > 0 else places[0] - 1
            if 0 <= following < len(self.units) and (ahead > 0 or self._is_read(following)):
                self.here.add(following)
        self.most = max(self.most, sum(self.units[place].size for place in self.here))

    def _needed(self, block: str) -> list[int]:
        return [place for place in range(len(self.units)) if block in self._users(place)]

    def _users(self, place: int) -> tuple[str, ...]:
        unit = self.units[place]
        tied = self.plan.shape.tied and any(e.row.name == "embed.weight" for e in unit.entries)
        used = {*unit.blocks, *(("head",) if tied else ())}
        return tuple(block for block in self.order if block in used)

    def _is_read(self, place: int) -> bool:
        return self._users(place) != ("embed",)


def in_flight(plan: Plan, rank: int) -> int:
    """The most microbatches whose activations the rank holds; each of its stages counts its own.

    A microbatch counts from the start of its forward to the end of its backward, weights included.
    """
    return _most_live(plan.schedule.actions(plan.layout.coord(rank).pp))


def boundary_bytes(plan: Plan, rank: int, itemsize: int) -> int:
    """The inputs of stages that are held for those microbatches, at most; the first has none."""
    actions = plan.schedule.actions(plan.layout.coord(rank).pp)
    later = (action for action in actions if action.stage > 0)
    return _most_live(later) * message_bytes(plan, itemsize)


def _most_live(actions: Iterable[Action]) -> int:
    return round(max(memory_levels(tuple(actions)), default=0.0))


def _sheds_weights(layout: Layout, unit: Unit) -> bool:
    """Whether the whole weights of a unit are here only while they are used."""
    return layout.zero == 3 and unit.num_slices > 1

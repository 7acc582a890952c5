"""The ledger: bytes of one rank, exact, by the ZeRO stage and over the schedule.

`static_bytes` stay through a step, and are counted where all of them are there at once: after the
last backward, in front of the optimizer. What comes and goes before that moment stands beside them:
weights that stage 3 has gathered, microbatches in flight, and the inputs of their stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fivefold.core.clock import memory_levels
from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule.action import Action
from fivefold.core.traffic import chunks_of, message_bytes, slice_of
from fivefold.core.units import Unit

Optimizer = Literal["adamw", "sgd"]
STATES = {"adamw": 2, "sgd": 1}  # tensors like the weight: two moments, or the momentum
_SCALAR = 4  # bytes: AdamW counts the steps of every tensor, in float32


@dataclass(frozen=True)
class Static:
    """Bytes of one rank; all but `host` are on its device.

    `padding` is what alignment and even slices add to weights and gradients. `scalars` are AdamW's
    counts of steps. `host` is all that offload keeps in host memory. Rows that pad the vocabulary
    to a multiple of tp count as weights.
    """

    weights: int
    gradients: int
    optimizer: int
    scalars: int
    padding: int
    host: int

    @property
    def device(self) -> int:
        """All of it that is on the device."""
        return self.weights + self.gradients + self.optimizer + self.scalars + self.padding


def static_bytes(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    optimizer: Optimizer,
    offload: bool = False,
    bucket: int | None = None,
) -> Static:
    """What `rank` holds of weights, gradients and optimizer states of all its stages, in bytes.

    Weights are whole, but sliced in stage 3 where the shard group is more than one rank. Gradients
    are as the optimizer gets them, in the type of the weights; where data ranks sum them in another
    type, that sum is held beside them. States have the type of the weights. Offload keeps states in
    host memory, and sliced weights too.
    """
    if plan.schedule.asynchronous:
        raise FivefoldError(
            "the bytes of asynchronous schedules, which keep older weights, are not predicted: use "
            f"another one than {plan.schedule.name}"
        )
    layout = plan.layout
    units, place = _units(plan, rank, itemsize, bucket), slice_of(layout, rank)
    parts = [part for unit in units for part in unit.owned(place)]
    owned = sum(stop - start for _, start, stop in parts)
    spare = sum(unit.slice_size for unit in units) - owned
    states = STATES[optimizer] * owned * itemsize
    scalars = _SCALAR * len(parts) if optimizer == "adamw" else 0
    sheds = _sheds_weights(layout)
    weights, weights_spare = (owned, spare) if sheds else _whole(units)
    host = 0
    if offload:
        host, states, scalars = states + scalars, 0, 0
        if sheds:
            host, weights, weights_spare = host + (owned + spare) * itemsize, 0, 0
    sums = itemsize if grad_itemsize == itemsize else itemsize + grad_itemsize
    if layout.dp * layout.cp == 1:
        # Alone, a rank leaves each gradient where backward made it: no buffer, so no padding.
        sums, spare = itemsize, 0
    return Static(
        weights=weights * itemsize,
        gradients=owned * sums,
        optimizer=states,
        scalars=scalars,
        padding=weights_spare * itemsize + spare * sums,
        host=host,
    )


def gathered_bytes(plan: Plan, rank: int, itemsize: int, bucket: int | None = None) -> int:
    """Whole weights that stage 3 keeps from their first use in a step to the last backward.

    All of the rank's stages where they are gathered once a step, padding included. None where they
    are gathered for each microbatch: a unit is then there only while it is used.
    """
    layout = plan.layout
    if plan.gather == "microbatch" or not _sheds_weights(layout):
        return 0
    return sum(unit.size for unit in _units(plan, rank, itemsize, bucket)) * itemsize


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


def _units(plan: Plan, rank: int, itemsize: int, bucket: int | None) -> list[Unit]:
    chunks = chunks_of(plan, rank, itemsize, bucket)
    return [unit for chunk in chunks for unit in chunk.units]


def _sheds_weights(layout: Layout) -> bool:
    """Whether whole weights are here only while they are used."""
    return layout.zero == 3 and layout.shard * layout.cp > 1


def _whole(units: Iterable[Unit]) -> tuple[int, int]:
    """Elements of the weights of all units, and of their padding."""
    padding = sum(unit.padding for unit in units)
    return sum(unit.size for unit in units) - padding, padding

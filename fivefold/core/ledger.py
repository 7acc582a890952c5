"""The ledger: bytes that stay on a rank through a step, exact, by the ZeRO stage.

Counted where all of them are there at once: after the last backward, in front of the optimizer.
Activations come and go before that moment and are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.plan import Plan
from fivefold.core.traffic import slice_of, units_of
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
    """What `rank` holds of weights, gradients and optimizer states, in bytes.

    Weights are whole, but sliced in stage 3 where the shard group is more than one rank. Gradients
    are as the optimizer gets them, in the type of the weights; where data ranks sum them in another
    type, that sum is held beside them. States have the type of the weights. Offload keeps states in
    host memory, and sliced weights too.
    """
    layout = plan.layout
    units, place = units_of(plan, itemsize, bucket), slice_of(layout, rank)
    parts = [part for unit in units for part in unit.owned(place)]
    owned = sum(stop - start for _, start, stop in parts)
    spare = sum(unit.slice_size for unit in units) - owned
    states = STATES[optimizer] * owned * itemsize
    scalars = _SCALAR * len(parts) if optimizer == "adamw" else 0
    sheds = layout.zero == 3 and layout.shard * layout.cp > 1
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


def _whole(units: tuple[Unit, ...]) -> tuple[int, int]:
    """Elements of the weights of all units, and of their padding."""
    padding = sum(unit.padding for unit in units)
    return sum(unit.size for unit in units) - padding, padding

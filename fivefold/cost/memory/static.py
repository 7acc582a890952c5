"""Exact bytes of one rank: weights, gradients and optimizer states.

`static_bytes` counts the moment when all of them exist at once: after the last backward, before the
optimizer step. A run must match it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fivefold.core import FivefoldError
from fivefold.core.layout import Layout, Unit
from fivefold.core.plan import OptimizerKind, Plan, optimizer_kind
from fivefold.cost.traffic import chunks_of, shards_of

_MASTER = 4  # bytes: copies of weights that an optimizer updates, and its states, are float32
_SCALAR = 4  # bytes: AdamW counts the steps of every tensor, in float32


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank; all but `host` are on its device.

    `padding` is what alignment and even shards add to weights and gradients. `master` are the
    float32 copies that the optimizer updates. `scalars` are AdamW's step counts. `host` is all that
    offload keeps in host memory. Rows that pad the vocabulary to a multiple of tp count as weights.
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
    optimizer: str,
    offload: bool = False,
    offload_grads: bool = False,
    master: bool = False,
) -> StaticMemory:
    """Bytes of the weights, gradients and optimizer states of all stages of `rank`.

    Weights are full, but sharded under ZeRO-3 if the shard group has more than one rank. Gradients
    are in the type in which the plan sums them. States have the type of the weights; with `master`
    weights, they are float32 too. Offload moves states, masters and sharded weights to host memory,
    `offload_grads` the gradients.
    """
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"{plan.schedule.name} is asynchronous and keeps older weights, whose bytes are not "
            "predicted: choose another schedule"
        )
    kind = optimizer_kind(optimizer)
    assert not kind.full_matrices, "the states of such an optimizer are not estimated"
    grad_itemsize = plan.units.grad_itemsize(itemsize)
    options = (grad_itemsize, kind, offload, offload_grads, master)
    memories = [
        _of_unit(plan.layout, rank, unit, itemsize, *options)
        for chunk in chunks_of(plan, rank, itemsize)
        for unit in chunk.units
    ]
    return StaticMemory(
        *(sum(getattr(memory, name.name) for memory in memories) for name in fields(StaticMemory))
    )


def _of_unit(
    layout: Layout,
    rank: int,
    unit: Unit,
    itemsize: int,
    grad_itemsize: int,
    optimizer: OptimizerKind,
    offload: bool,
    offload_grads: bool,
    master: bool,
) -> StaticMemory:
    parts = shards_of(layout, rank, [unit])
    owned = sum(stop - start for _, start, stop in parts)
    spare = unit.shard_size - owned
    frees, learned = frees_weights(layout, unit), 0 if unit.frozen else owned
    states = len(optimizer.states) * learned * (_MASTER if master else itemsize)
    copies = _MASTER * learned if master else 0
    scalars = _SCALAR * len(parts) if optimizer.counts_steps and not unit.frozen else 0
    weights, weights_spare = (owned, spare) if frees else (unit.size - unit.padding, unit.padding)
    host = 0
    if offload:
        host, states, scalars, copies = states + scalars + copies, 0, 0, 0
        if frees:
            host, weights, weights_spare = host + (owned + spare) * itemsize, 0, 0
    gradients, spare = learned, 0 if unit.frozen else spare
    if offload_grads and not unit.frozen:
        host, gradients, spare = host + unit.shard_size * grad_itemsize, 0, 0
    alone = (layout.edp if unit.expert else layout.dp * layout.cp) == 1
    if alone and grad_itemsize == itemsize:
        # A single rank leaves each gradient where backward made it: no flat buffer, no padding.
        spare = 0
    return StaticMemory(
        weights=weights * itemsize,
        gradients=gradients * grad_itemsize,
        optimizer=states,
        scalars=scalars,
        padding=weights_spare * itemsize + spare * grad_itemsize,
        host=host,
        master=copies,
    )


def frees_weights(layout: Layout, unit: Unit) -> bool:
    """Whether the weights of a unit are gathered only while they are used."""
    return layout.zero == 3 and unit.num_shards > 1

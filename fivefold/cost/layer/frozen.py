"""Weights that do not learn, and the low-rank adapters beside them (LoRA).

A frozen weight has no gradient, no optimizer state and no master copy; its matmul has no third
pass. An adapter of rank r adds r · (inputs + outputs) weights to each matmul of attention and of a
dense MLP, and one small matmul more to each pass. Inputs of matmuls are saved all the same: the
adapters need them.
"""

from __future__ import annotations

from functools import lru_cache

from fivefold.core.layout import planned_weights
from fivefold.core.model import Shape, layer_kinds, parameters
from fivefold.cost import Array
from fivefold.cost.hardware import SoftwareStack


def trainable_share(shape: Shape, stack: SoftwareStack) -> float:
    """Weights that learn over all weights: by the table of a model that a plan tunes, else by the
    rank of other people's adapters."""
    if shape.tuning is not None:
        return _learned_share(shape)
    if not stack.frozen:
        return 1.0
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.value_dim
    attention = 4 * shape.width + heads
    mlp = (3 if shape.gated else 2) * (shape.width + shape.ffn)
    adapters = 0
    for i, count in layer_kinds(shape).items():
        adapters += count * (attention + (0 if shape.is_moe_layer(i) else mlp))
    return stack.lora_rank * adapters / parameters(shape).total


@lru_cache(maxsize=16)
def _learned_share(shape: Shape) -> float:
    rows = planned_weights(shape)
    return sum(row.numel for row in rows if not row.frozen) / sum(row.numel for row in rows)


def freeze(
    passes: tuple[dict[str, Array], ...], weights: dict[str, Array], adapters: Array
) -> None:
    """Take the weight gradients out of a layer, and add its adapters, of so many seconds a pass."""
    for parts in passes:
        parts["products"] = parts.get("products", 0.0 * adapters) + adapters
    weights.clear()
    weights["products"] = adapters

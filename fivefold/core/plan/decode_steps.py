"""Which decode steps are captured as CUDA graphs: the one rule of the engine and of plans."""

from __future__ import annotations

from fivefold.core.layout import Layout
from fivefold.core.model import Shape


def captures_decode(shape: Shape, layout: Layout) -> bool:
    """Whether a rank replays its decode steps: all that it calls and sends has sizes that depend on
    the number of tokens alone. Ranks of cp own keys by the blocks that were free, and experts of
    several ranks exchange as many rows as chose them, unless they have kernels for few tokens."""
    if layout.cp > 1:
        return False
    return shape.moe is None or layout.ep * layout.etp == 1 or few_token_experts(shape)


def few_token_experts(shape: Shape) -> bool:
    """Whether kernels for few tokens compute what these experts do: they know one activation, no
    biases, and weights that multiply outputs."""
    moe = shape.moe
    return moe is not None and shape.activation == "swiglu" and not (moe.biases or moe.weigh_inputs)

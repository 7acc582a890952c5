"""Which decode steps are captured as CUDA graphs: the one rule of the engine and of plans."""

from __future__ import annotations

from fivefold.core.layout import Layout
from fivefold.core.model import Shape


def captures_decode(shape: Shape, layout: Layout) -> bool:
    """Whether a rank replays its decode steps: all that it calls and sends has sizes that depend on
    the number of tokens alone. Stages of a pipeline receive between kernels, ranks of cp own keys
    by the blocks that were free, and experts of several ranks exchange as many rows as chose
    them."""
    if layout.pp > 1 or layout.cp > 1:
        return False
    return shape.moe is None or layout.tp * layout.ep * layout.etp == 1

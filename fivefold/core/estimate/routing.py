"""How unevenly routing loads ranks: from the fullest expert to the rank that has it."""

from __future__ import annotations

from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.grid import Array
from fivefold.core.shape import Moe, Shape


def require_possible(shape: Shape, imbalance: float) -> None:
    """Refuse a load that no routing can have."""
    if shape.moe is None:
        if imbalance != 1:
            raise FivefoldError(f"--imbalance is for experts, and {shape.name} has none")
        return
    most = shape.moe.experts / shape.moe.top_k
    if not 1 <= imbalance <= most:
        raise FivefoldError(
            f"--imbalance {imbalance:g}: the fullest expert has 1 to {most:g} times the mean, for "
            f"no token chooses it twice ({shape.moe.top_k} of {shape.moe.experts} experts)"
        )


def fullest_rank(moe: Moe, ep: Array, imbalance: float) -> Array | float:
    """Slots of the rank with the fullest expert over the average rank's.

    All other experts share what that one leaves. So a rank with all experts has its share however
    tokens choose, and a rank with one expert has all that comes to it.
    """
    if imbalance == 1:
        return 1.0
    held = moe.experts / ep
    other = (moe.experts - imbalance) / (moe.experts - 1)
    return (imbalance + (held - 1) * other) / held

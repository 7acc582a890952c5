"""The values of a search that a target can express: what restricts a search to one framework."""

from __future__ import annotations

from fivefold.bridges.job_values import usual_values
from fivefold.bridges.key_table import allowed
from fivefold.bridges.target import Target
from fivefold.core.layout import divisors
from fivefold.core.model import Shape

Allowed = dict[str, frozenset[int | str]]
_AXES = ("replicate", "tp", "pp", "cp", "ep", "etp")
_LISTED = ("zero", "context", "recompute", "offload", "sp")


def possible_values(target: Target, shape: Shape, gpus: int) -> Allowed:
    """For each choice of a search, the values that the target has; a choice that is not there may
    have any. Values that only together cannot be are not here: `express` mends them."""
    allowed: Allowed = {axis: frozenset({1}) for axis in _AXES if axis not in target.axes}
    allowed["schedule"] = frozenset(target.schedules)
    for key in _LISTED:
        values = _values_of(target, key, shape.moe is not None)
        if values is not None:
            allowed[key] = values
    if "tp" not in allowed:
        usual = {**usual_values(), "microbatches": 1, "microbatch_size": 1, "zero": 1}
        degrees = [
            tp
            for tp in divisors(gpus)
            if all(key != "tp" for key, *_ in target.impossible({**usual, "tp": tp}, shape))
        ]
        allowed["tp"] = frozenset(degrees)
    return allowed


def _values_of(target: Target, key: str, has_experts: bool) -> frozenset[int | str] | None:
    """The values of a key of ours that the target lists; None: any."""
    for item in target.table:
        ours = (item.ours,) if isinstance(item.ours, str) else item.ours
        if key != ours[0]:
            continue
        listed = allowed(item, has_experts)
        if listed is None:
            return None
        return frozenset(row[0] if len(ours) > 1 else row for row in listed)
    if key in target.left or key in target.covers:
        return None
    return frozenset({target.always.get(key, usual_values()[key])})

"""What no estimate can be: a step without time, a part below zero, more memory than there is.

Such a number is a defect of the program and never an answer. The error names the part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fivefold.core import InternalError
from fivefold.cost.step.parts import COMPUTE

_ROUNDING = 1e-6  # of the whole: parts are differences of sums
_WORK = (*COMPUTE, "measured")  # what a rank of every step does


def require_possible_time(job: str, step: float, parts: Mapping[str, float]) -> None:
    """Raise an error unless the step takes time and its parts sum to it, none of them negative."""
    for name, seconds in parts.items():
        if not math.isfinite(seconds) or seconds < -_ROUNDING * abs(step):
            raise InternalError(f"{job}: {name} of a step takes {seconds:g} s")
    if not math.isfinite(step) or step <= 0:
        raise InternalError(f"{job}: a step takes {step:g} s ({_listed(parts)})")
    if sum(parts.get(name, 0.0) for name in _WORK) <= 0:
        raise InternalError(f"{job}: compute of a step takes no time ({_listed(parts)})")
    if abs(sum(parts.values()) - step) > _ROUNDING * step:
        raise InternalError(
            f"{job}: the pipeline takes less than the work of a rank: parts of "
            f"{sum(parts.values()):g} s in a step of {step:g} s ({_listed(parts)})"
        )


def require_possible_memory(job: str, memory: Mapping[str, float]) -> None:
    """Raise an error unless every category of a rank's memory is a number of bytes."""
    for name, size in memory.items():
        if not math.isfinite(size) or size < -_ROUNDING * abs(sum(memory.values())):
            raise InternalError(f"{job}: {name} of a rank take {size:g} bytes")


def require_room(job: str, memory: Mapping[str, float], there_is: float) -> None:
    """Raise an error if a layout that a search answers with needs more than the machine has."""
    total = sum(memory.values())
    if total > there_is:
        name = max(memory, key=lambda key: memory[key])
        raise InternalError(
            f"{job}: the answer needs {total / 2**30:,.1f} GiB of {there_is / 2**30:,.1f}, most of "
            f"it {name} ({memory[name] / 2**30:,.1f} GiB)"
        )


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:g}" for name, seconds in parts.items())

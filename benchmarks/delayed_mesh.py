"""A mesh whose collectives take a set time, to show on a slow machine what hides what.

A collective takes that long on its axis, one after the other, while its caller goes on until it
waits.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from fivefold.parallel.mesh import Issued, Mesh


class DelayedMesh(Mesh):
    """Set `delay`, in seconds, or `delays` by axis."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.delay = 0.0
        self.delays: dict[str, float] = {}
        self._free_at: dict[str, float] = {}

    def issue(self, axis: str, *arguments: Any, **named: Any) -> Any:
        return _Delayed(super().issue(axis, *arguments, **named), self._ready_at(axis))

    def pass_on(self, tensor: Tensor, axis: str) -> Any:
        return _Delayed(super().pass_on(tensor, axis), self._ready_at(axis))

    def _ready_at(self, axis: str) -> float:
        """When the delay of a collective that begins now on this axis is over."""
        begin = max(time.perf_counter(), self._free_at.get(axis, 0.0))
        self._free_at[axis] = begin + self.delays.get(axis, self.delay)
        return self._free_at[axis]


class _Delayed:
    """A collective that is not over before a set time."""

    def __init__(self, issued: Issued, ready_at: float) -> None:
        self.issued, self.ready_at = issued, ready_at

    def wait(self) -> Any:
        found = self.issued.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return found

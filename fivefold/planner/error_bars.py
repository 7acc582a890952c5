"""How far estimates may be off, from measured runs: the error bars that are printed beside them.

Two layouts of one job share most of their error (the chip's shares, the stack's host time), so the
bar of their difference is smaller than that of either. `equal` is that bar: the median error of the
ratio of two measured layouts of one job whose estimates are close.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fivefold.core import PRESETS, read_toml


@dataclass(frozen=True)
class Accuracy:
    """Shares by which measured values differ from estimates."""

    time: float  # half of all step times are nearer than this
    time_p90: float  # nine in ten
    memory: float  # mean of the peaks
    memory_p90: float
    equal: float  # layouts whose steps differ by less are called equal

    def span(self, step: float) -> tuple[float, float]:
        """The measured times that nine in ten runs with this estimate have."""
        return step / (1 + self.time_p90), step / (1 - self.time_p90)

    def within(self, step: float, fastest: float) -> bool:
        """Whether a step is equal to the fastest one of the same job."""
        return step <= (1 + self.equal) * fastest


@cache
def accuracy() -> Accuracy:
    """The measured accuracy of this version."""
    table = read_toml(PRESETS / "accuracy.toml")
    time, memory, layouts = table["time"], table["memory"], table["layouts"]
    return Accuracy(
        time=float(time["median"]),
        time_p90=float(time["p90"]),
        memory=float(memory["mean"]),
        memory_p90=float(memory["p90"]),
        equal=float(layouts["median"]),
    )

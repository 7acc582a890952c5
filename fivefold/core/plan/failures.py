"""Failures of a cluster, what a job does about them, and the formulas for both.

A job fails when a GPU, a host or a leaf switch of it does, each at a rate of its own: one after
another, independently (a Poisson process). It saves every `interval` seconds of work. A failure
throws it back to the last save that was complete, and a recovery follows: notice it, start the
ranks, load. A failure during a recovery is seen when the ranks meet at its end, so that the whole
recovery is repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fivefold.core import FivefoldError, counted

CheckpointPlace = Literal["disk", "memory"]
PLACES: tuple[CheckpointPlace, ...] = ("disk", "memory")

# A DGX SuperPOD has 8 leaf switches for 32 hosts; we count a switch for 4 hosts, as one domain.
HOSTS_PER_SWITCH = 4
DETECT = 30.0  # seconds: the watchdog names a lost rank after 24 to 29
RESTART = 300.0  # seconds to start processes, build and compile: assumed
REPAIR = 86_400.0  # seconds until a lost host is back: assumed
CAUSES = ("gpu", "host", "switch")
_HOUR = 3600.0


@dataclass(frozen=True)
class FailureRates:
    """Mean hours between two failures of one GPU, of one host and of one leaf switch.

    Published numbers often have one rate for everything, as failures of GPUs: then the other two
    are None, which means that they never fail by themselves.
    """

    gpu: float
    host: float | None = None
    switch: float | None = None

    def __post_init__(self) -> None:
        for name in CAUSES:
            hours = getattr(self, name)
            if hours is not None and not 0 < hours < math.inf:
                raise FivefoldError(
                    f"--mtbf-{name} {hours:g}: give hours between two failures of one "
                    f"{_NAMES[name]}, above 0; {_LEAVE_OUT[name]}"
                )

    def per_second(self, domain: FailureDomain) -> dict[str, float]:
        """Failures of a job in a second, by cause."""
        numbers = {"gpu": domain.gpus, "host": domain.hosts, "switch": domain.switches}
        return {
            name: number / (hours * _HOUR)
            for name, number in numbers.items()
            if (hours := getattr(self, name)) is not None
        }


_NAMES = {"gpu": "GPU", "host": "host", "switch": "leaf switch"}
_LEAVE_OUT = {
    "gpu": "Llama 3's H100 had 50,700",
    "host": "leave it out if hosts fail with their GPUs only",
    "switch": "leave it out if no switch fails",
}


class FailureDomain(NamedTuple):
    """What can fail: the GPUs of a job, its hosts and their leaf switches."""

    gpus: int
    gpus_per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.gpus_per_host)

    @property
    def switches(self) -> int:
        return -(-self.hosts // HOSTS_PER_SWITCH)

    def hosts_lost(self, cause: str) -> int:
        """Hosts that a failure takes out of the job."""
        return min(HOSTS_PER_SWITCH, self.hosts) if cause == "switch" else 1


class SaveCost(NamedTuple):
    """A checkpoint: its bytes on all ranks together, and the seconds that it takes.

    `stall`: steps wait. `write`: in the background, until it is safe; the next one begins after.
    `slowed`: what the steps lose meanwhile. `load`: to read it at a restart.
    """

    bytes: float
    stall: float
    write: float
    slowed: float
    load: float

    @property
    def cost(self) -> float:
        """Seconds of steps that a save takes."""
        return self.stall + self.slowed


@dataclass(frozen=True)
class RecoveryDesign:
    """What a job does about failures. Without `spares` lost hosts are replaced at once; with them a
    job that has none left goes on with fewer replicas, until hosts are repaired."""

    detect: float = DETECT
    restart: float = RESTART
    repair: float = REPAIR
    spares: int | None = None

    def __post_init__(self) -> None:
        for name in ("detect", "restart", "repair"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FivefoldError(f"--{name} {getattr(self, name)}: give seconds, 0 or more")
        if self.spares is not None and self.spares < 0:
            raise FivefoldError(f"--spares {self.spares}: give a number of hosts, 0 or more")

    def require_possible(self, domain: FailureDomain) -> None:
        """Refuse more spares than hosts."""
        if self.spares is not None and self.spares > domain.hosts:
            raise FivefoldError(
                f"--spares {self.spares}: more than the {counted(domain.hosts, 'host')} of the "
                f"job; give {domain.hosts} at most, or leave it out if hosts never run out"
            )


def young_interval(cost: float, mtbf: float) -> float:
    """Seconds of work between two saves that lose the least: Young and Daly's first order.

    >>> young_interval(cost=10, mtbf=18_000)
    600.0
    """
    return math.sqrt(2 * cost * mtbf)


def steps_between(cost: float, mtbf: float, step: float, write: float = 0.0) -> int:
    """The same in steps, at least one; a save begins after the one before has been written.

    >>> steps_between(10, 18_000, step=7.0), steps_between(10, 18_000, step=7.0, write=900)
    (86, 129)
    """
    return max(1, math.ceil(max(young_interval(cost, mtbf), write) / step - 1e-9))


def recovery_seconds(once: float, rate: float) -> float:
    """Mean seconds of a recovery that is repeated when a failure comes during it."""
    return once * math.exp(min(rate * once, 700.0))


def expected_goodput(rate: float, interval: float, save: SaveCost, recovery: float) -> float:
    """The mean share of time in steps that count, in a long run in which hosts never run out.

    An up-time u, exponential with mean 1/rate, completes floor((u − write) / (interval + cost))
    saves, each worth an interval; a recovery follows. Exact for these rules.
    """
    if rate <= 0:
        return interval / (interval + save.cost)
    cycle = rate * (interval + save.cost)
    if cycle > 700:
        return 0.0
    worth = interval * math.exp(-rate * save.write) / math.expm1(cycle)
    return worth / (1 / rate + recovery_seconds(recovery, rate))


def first_order_goodput(rate: float, interval: float, cost: float, recovery: float) -> float:
    """Young and Daly's first order: what saves, lost work and recoveries each take."""
    return 1 - cost / interval - rate * (interval / 2 + recovery)

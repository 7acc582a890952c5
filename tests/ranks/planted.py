"""One bug at a time in the ranks of a trial, as `verify` runs it, and what it must change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.compare import Dtype
from fivefold.verify.reference import Truth
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge

Patch = AbstractContextManager[Any]
# What `verify` compares, in the order in which a step makes it.
LOSS, GRADIENTS, NORM, CLIP, WEIGHTS = "loss_err", "grad_err", "norm_err", "clip_err", "weight_err"
TRAFFIC = "traffic"
QUANTITIES = (LOSS, GRADIENTS, NORM, CLIP, WEIGHTS, TRAFFIC)

Healthy = tuple[VerifyVerdict, list[Truth]]
# Many faults have the same healthy twin: a test worker computes it once.
_HEALTHY: dict[tuple[str, VerifySettings], Healthy] = {}


@dataclass(frozen=True)
class Fault:
    """A bug, a layout in which it matters, and the first quantity of a step that it changes.

    Where that is the traffic, everything else is right.
    """

    plant: Callable[[], Patch]
    layout: str
    first: str
    options: dict[str, Any] = field(default_factory=dict)
    set: dict[str, str] = field(default_factory=dict)
    model: str = "tiny"
    dtype: Dtype = "float64"
    steps: int = 1

    def __str__(self) -> str:
        return f"{self.plant.__name__} {self.layout}"

    @property
    def plan(self) -> Plan:
        changes = {"layers": "4" if "pp" in self.layout else "2"} | self.set
        said = {"unit_size": 0.06} | self.options
        options = PlanOptions(self.model, layout=self.layout, set=changes, **said)
        return resolve(options, small=True)

    @property
    def settings(self) -> VerifySettings:
        return VerifySettings(dtype=self.dtype, steps=self.steps)


def check_seen(pool: Pool, fault: Fault) -> VerifyVerdict:
    """A trial passes without the fault, and with it fails where the fault says: that verdict."""
    settings = fault.settings
    key = fault.plan.to_toml(), settings
    if key not in _HEALTHY:
        _HEALTHY[key] = _healthy_trial(pool, fault.plan, settings)
    healthy, truths = _HEALTHY[key]
    assert healthy.passed, (healthy.errors, healthy.tolerance, healthy.diverges_at)
    # The reference and the prediction stay healthy: only the ranks have the bug.
    ranks = [(_sick_rank, (fault.plant, fault.plan, settings))] * fault.plan.layout.world
    sick = judge(fault.plan, settings, pool.run_each(ranks), truths)
    assert not sick.passed
    assert _differing(sick)[0] == fault.first, (sick.errors, sick.traffic_match)
    return sick


def _differing(verdict: VerifyVerdict) -> list[str]:
    """The quantities that are wrong, in order."""
    right = {name: verdict.errors[name] <= most for name, most in verdict.tolerance.items()}
    right[TRAFFIC] = verdict.traffic_match
    return [each for each in QUANTITIES if not right[each]]


def _healthy_trial(pool: Pool, plan: Plan, settings: VerifySettings) -> Healthy:
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    return judge(plan, settings, runs, truths), truths


def _sick_rank(
    worker: Worker, plant: Callable[[], Patch], plan: Plan, settings: VerifySettings
) -> VerifiedRank:
    with plant():
        return run_rank(worker, plan, settings)

"""One verification: a plan run by its ranks and by one process, and the two compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fivefold.core import FORMATS, FivefoldError
from fivefold.core.layout import Topology, all_groups
from fivefold.core.layout import weight_table as weights
from fivefold.core.plan import Plan
from fivefold.cost.traffic import UNEVEN_AXES, collectives, least_traffic_share
from fivefold.launch import Pool
from fivefold.verify import compare, flips
from fivefold.verify.compare import Call, Traffic, Wanted
from fivefold.verify.expert_flips import count_expert_flips
from fivefold.verify.reference import Truth
from fivefold.verify.runs import VerifiedRank, VerifySettings, num_phases, run_rank, run_reference


@dataclass(frozen=True)
class VerifyVerdict:
    """Errors with tolerances by name, traffic of every rank and step, and the first difference.

    `disorder` says which ranks issue the collectives of flat units in different orders, `flips` how
    many values were rounded to another fp8 number than in the reference; None in other precisions.
    """

    errors: dict[str, float]
    tolerance: dict[str, float]
    traffic: list[list[Traffic]] = field(repr=False)  # by rank, then by step
    diverges_at: str | None
    disorder: str | None
    flips: int | None = None

    @property
    def traffic_match(self) -> bool:
        return all(traffic.match for steps in self.traffic for traffic in steps)

    @property
    def passed(self) -> bool:
        exact = all(self.errors[name] <= most for name, most in self.tolerance.items())
        return exact and self.traffic_match and self.disorder is None and not self.flips


def judge(
    plan: Plan, settings: VerifySettings, runs: list[VerifiedRank], truths: list[Truth]
) -> VerifyVerdict:
    """Compare every rank's steps with the reference, and its collectives with the prediction."""
    if not truths[0].floor:
        raise FivefoldError(
            f"a token lies between two experts so closely that rounding to {settings.dtype} "
            "decides: verify in float64, or with another --seed"
        )
    tolerance = compare.tolerances(settings.dtype, [truth.floor for truth in truths if truth.floor])
    errors = dict.fromkeys(tolerance, 0.0)
    off: set[str] = set()
    for number, truth in enumerate(truths):
        records = [run.steps[number] for run in runs]
        for key, kind in (("loss", "loss_err"), ("norm", "norm_err"), ("clip", "clip_err")):
            values = [getattr(record, key) for record in records]
            worst = max(compare.relative(value, getattr(truth, key)) for value in values)
            errors[kind] = max(errors[kind], worst)
        gradients = [part for record in records for part in record.gradients]
        updated = [part for record in records for part in (*record.weights, *record.biases)]
        if number == len(truths) - 1:
            updated += [part for run in runs for part in run.parts]
        for kind, comparison in (
            ("grad_err", Wanted(truth.gradients, gradients)),
            ("weight_err", Wanted({**truth.weights, **truth.biases}, updated)),
        ):
            by_name = compare.errors_by_name(comparison)
            off |= {name for name, error in by_name.items() if not error <= tolerance[kind]}
            errors[kind] = max(errors[kind], *by_name.values())
    order = [weight.name for weight in (*weights.weights(plan.shape), *weights.buffers(plan.shape))]
    diverges_at = compare.first_module(off, order)
    traffic, disorder = _traffic(plan, settings, runs), _disorder(plan, runs)
    changed = None if plan.fp8 is None else _flips(plan, runs, truths)
    return VerifyVerdict(errors, tolerance, traffic, diverges_at, disorder, changed)


def _flips(plan: Plan, runs: list[VerifiedRank], truths: list[Truth]) -> int:
    count = 0
    for number, truth in enumerate(truths):
        count += flips.count_flips(plan, truth.codes, [run.codes[number] for run in runs])
        if truth.rows is not None:
            count += count_expert_flips(plan, truth.rows, [run.rows[number] for run in runs])
    return count


def _disorder(plan: Plan, runs: list[VerifiedRank]) -> str | None:
    """The first group whose ranks gather or reduce flat units in different orders."""
    topology = Topology.of(plan)
    for number in range(len(runs[0].orders)):
        axes = sorted({axis for run in runs for axis in run.orders[number]})
        for axis, group in [
            (axis_name, ranks) for axis_name in axes for ranks in all_groups(topology, axis_name)
        ]:
            issued = {rank: runs[rank].orders[number].get(axis, []) for rank in group}
            if mismatch := compare.first_disagreement(issued):
                return f"step {number + 1}, axis {axis}: {mismatch}"
    return None


def _traffic(plan: Plan, settings: VerifySettings, runs: list[VerifiedRank]) -> list[list[Traffic]]:
    traffic: list[list[Traffic]] = []
    itemsize = FORMATS[settings.dtype].itemsize
    for rank, run in enumerate(runs):
        if plan.schedule.asynchronous:
            listed = collectives.predict_async_traffic(
                plan, rank, settings.steps, itemsize=itemsize
            )
        else:
            listed = collectives.predict_traffic(plan, rank, itemsize=itemsize)
        predicted: Counter[Call] = Counter(
            {
                (
                    collective.axis,
                    collective.kind,
                    collective.bytes,
                    collective.group,
                ): collective.count
                for collective in listed
            }
        )
        traffic.append([Traffic(predicted, record.seen) for record in run.heard])
    for group in plan.layout.groups("ep") if plan.layout.ep * plan.layout.etp > 1 else ():
        for number in range(len(traffic[0])):
            least = {axis: least_traffic_share(plan, axis) for axis in (*UNEVEN_AXES, "etp")}
            shared = compare.evened([traffic[rank][number] for rank in group], least)
            for rank, traffic_of_rank in zip(group, shared, strict=True):
                traffic[rank][number] = traffic_of_rank
    return traffic


__all__ = [
    "VerifiedRank",
    "VerifySettings",
    "VerifyVerdict",
    "judge",
    "num_phases",
    "run_rank",
    "run_reference",
    "run_trial",
]


def run_trial(
    pool: Pool, plan: Plan, settings: VerifySettings, on_phase: Callable[[], None] | None = None
) -> VerifyVerdict:
    """Run the plan on the pool's first ranks, and the reference on the one after them."""
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))], on_phase)
    return judge(plan, settings, runs, truths)

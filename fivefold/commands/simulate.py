"""`fivefold simulate`: a run with failures, before it happens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import Model, above, one_of, positive
from fivefold.commands.options import as_given, print_answer, require_known, with_plan_options
from fivefold.commands.search import plan
from fivefold.core import FivefoldError
from fivefold.core.plan import (
    DETECT,
    PLACES,
    REPAIR,
    RESTART,
    FailureRates,
    Plan,
    PlanOptions,
    RecoveryDesign,
)

if TYPE_CHECKING:
    from fivefold.planner import Estimate, FailureForecast


RUNS = 200


def _hours(what: str) -> typer.models.OptionInfo:
    return typer.Option(help=f"Hours between two failures of one {what}.", show_default=False)


@with_plan_options
def run(
    options: PlanOptions,
    command: typer.Context,
    days: Annotated[float, typer.Option(help="Days of the run.")],
    mtbf_gpu: Annotated[float | None, _hours("GPU (default: the machine's)")] = None,
    mtbf_host: Annotated[float | None, _hours("host, beside its GPUs")] = None,
    mtbf_switch: Annotated[float | None, _hours("leaf switch, one for 4 hosts")] = None,
    spares: Annotated[
        int | None,
        typer.Option(help="Spare hosts (default: never too few).", show_default=False),
    ] = None,
    detect: Annotated[float, typer.Option(help="Seconds until a failure is noticed.")] = DETECT,
    restart: Annotated[float, typer.Option(help="Seconds to start all ranks again.")] = RESTART,
    repair: Annotated[float, typer.Option(help="Seconds until a lost host is back.")] = REPAIR,
    checkpoint: Annotated[
        str, typer.Option(help="Where checkpoints go: disk, memory of partners, or auto.")
    ] = "auto",
    storage: Annotated[
        float | None,
        typer.Option(
            help="Bytes/s of the shared disk (default: 1e9 a host, 2e12 at most).",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Simulated runs.")] = RUNS,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a run with failures: goodput, interruptions, and where the time goes."""
    require_known(options.machine)
    simulation = simulate(
        as_given(options, command),
        days=days,
        mtbf_gpu=mtbf_gpu,
        mtbf_host=mtbf_host,
        mtbf_switch=mtbf_switch,
        spares=spares,
        detect=detect,
        restart=restart,
        repair=repair,
        checkpoint=checkpoint,
        storage=storage,
        runs=runs,
        seed=seed,
    )
    print_answer(simulation, as_json)


_MOST_DAYS, _MOST_RUNS = 36_525.0, 100_000


@dataclass(frozen=True)
class SimulatedFailures:
    """A plan with failures: means over runs, bands, and where the time went.

    `str()` is the text of `fivefold simulate`, `to_json()` its JSON.
    """

    plan: Plan
    estimate: Estimate
    forecast: FailureForecast

    @property
    def goodput(self) -> float:
        """The share of time in steps that count."""
        return self.forecast.goodput

    @property
    def lines(self) -> list[str]:
        """The answer in lines."""
        from fivefold.render import forecast_lines

        return forecast_lines(self.plan, self.forecast)

    @cached_property
    def _table(self) -> dict[str, Any]:
        from fivefold.render import forecast_json

        return forecast_json(self.plan, self.forecast)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold simulate --json` prints."""
        return self._table

    def __repr__(self) -> str:
        return f"SimulatedFailures({self.plan.layout}: goodput {self.goodput:.1%})"

    def __str__(self) -> str:
        return "\n".join(self.lines)


def simulate(
    model: Model,
    *,
    days: float,
    mtbf_gpu: float | None = None,
    mtbf_host: float | None = None,
    mtbf_switch: float | None = None,
    spares: int | None = None,
    detect: float = DETECT,
    restart: float = RESTART,
    repair: float = REPAIR,
    checkpoint: str = "auto",
    storage: float | None = None,
    runs: int = RUNS,
    seed: int = 0,
    **keys: Any,
) -> SimulatedFailures:
    """Simulate the run of a plan with failures.

    `mtbf_…` are hours between two failures of one GPU, host or leaf switch; that of a GPU may come
    from the machine. `spares` are hosts; without them hosts never run out. `detect`, `restart` and
    `repair` are seconds. `checkpoint`: disk, memory (of partner hosts), or auto, the better one.
    `storage`: bytes/s of the shared file system. `keys` as for `plan`, such as `machine`.
    """
    if not 0 < days <= _MOST_DAYS:
        raise FivefoldError(f"--days {days}: give days above 0, {_MOST_DAYS:,.0f} at most")
    if above("--runs", runs, 0) > _MOST_RUNS:
        raise FivefoldError(f"--runs {runs}: give {_MOST_RUNS:,} at most")
    if seed < 0:
        raise FivefoldError(f"--seed {seed}: give a whole number, 0 or more")
    if storage is not None:
        positive("--storage", storage)
    one_of("--checkpoint", checkpoint, ("auto", *PLACES))
    design = RecoveryDesign(detect, restart, repair, spares)
    if mtbf_gpu is not None:
        FailureRates(mtbf_gpu, mtbf_host, mtbf_switch)  # refuses what is no rate, before a plan
    elif mtbf_host is not None or mtbf_switch is not None:
        raise FivefoldError(
            "--mtbf-host or --mtbf-switch without --mtbf-gpu: the rate of a machine has failures "
            "of every kind; give --mtbf-gpu without theirs"
        )
    planned = plan(model, **keys)
    if planned.estimate is None or planned.plan.machine is None:
        raise FivefoldError(
            "a simulation needs the time of a step, so the machine: add --machine NAME, or name "
            "it in the plan"
        )
    hours = planned.plan.machine.gpu_mtbf_hours if mtbf_gpu is None else mtbf_gpu
    if hours is None:
        raise FivefoldError(
            "--mtbf-gpu is missing, and no rate of failures is known for "
            f"{planned.plan.machine.name}: give hours between two failures of one GPU (Llama 3's "
            "H100 had 50,700)"
        )
    rates = FailureRates(hours, mtbf_host, mtbf_switch)
    from fivefold.planner import failing_job, simulate_failures

    job = failing_job(planned.estimate, rates, design, checkpoint, storage)
    return SimulatedFailures(
        planned.plan, planned.estimate, simulate_failures(job, days, runs, seed)
    )

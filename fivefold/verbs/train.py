"""`fivefold train`: train a plan, and print what was measured beside what was planned.

On one machine it forks the ranks itself; under torchrun, Slurm or Kubernetes it is one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fivefold.core import models
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, PlanOptions, read, resolve
from fivefold.core.precision import FORMATS, PRECISIONS
from fivefold.core.weights import weights
from fivefold.launch.launcher import LauncherEnvironment, read_environment, refit
from fivefold.records import Pace, PlannedStep, StepRecord
from fivefold.records.run_folder import PLAN, run_folder
from fivefold.report.training_text import head, out_of_memory, step_line, summary_text, tail
from fivefold.verbs import BackendOption, above, asked_backend, json_text, one_of, with_plan_options

if TYPE_CHECKING:
    from fivefold.data.mixture import Source
    from fivefold.launch.backend import Backend, RankDevice
    from fivefold.launch.processes import RankLost
    from fivefold.train import SampleText, Shortage, TrainedRank, TrainSettings


_MOST_RANKS = 64  # processes on one machine
_DEVICES = ("auto", "cpu", "cuda")
_PATIENCE = 600.0  # seconds: the watchdogs of the ranks find a hang long before


@partial(with_plan_options, default_target="tiny-moe")
def run(
    options: PlanOptions,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: the next free runs/NAME-N).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")
    ] = False,
    until: Annotated[
        int | None, typer.Option(help="End this start after that step, with a checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default 20).")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FORMATS)} (default: the plan's; float32 without a GPU)."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate (default 1e-3).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the weights and of the order of the text.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: BackendOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the losses with those of one process.")
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Kernels that add in one order: two runs of a layout are equal to the bit.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train; without `data`, on the source of Python's standard library, byte by byte."""
    given = {"steps": steps, "lr": lr, "seed": seed}
    if until is not None:
        above("until", until, 0)
    recipe = replace(options.train, **{key: one for key, one in given.items() if one is not None})
    options = replace(options, train=recipe)
    dtype = None if dtype is None else one_of("dtype", dtype, FORMATS)
    one_of("device", device, _DEVICES)
    asked = asked_backend(backend)
    if check and resume:
        raise FivefoldError("--check compares a training from its first step: leave --resume out")
    launched = read_environment(os.environ)
    resume = resume or launched is not None  # a launcher restarts a job that has failed
    if launched is not None and out is None:
        raise FivefoldError("name the run folder, which all hosts share, with --out")
    plan = runnable(_same_batch(options, out, resume), launched)
    start = _Start(plan, dtype, device, asked, out, resume, until, check, deterministic)
    raise typer.Exit(_join(start, launched) if launched else _fork(start, as_json))


def _same_batch(options: PlanOptions, out: Path | None, resume: bool) -> PlanOptions:
    """A run that resumes in another layout has the same global batch, unless another is given."""
    if not resume or options.batch is not None or options.microbatches is not None:
        return options
    folder = out or run_folder(Path("runs"), models.load(options.model).name, newest=True)
    if not (folder / PLAN).is_file():
        return options
    return replace(options, batch=resolve(read(folder / PLAN)).batch.sequences)


def runnable(options: PlanOptions, launched: LauncherEnvironment | None = None) -> Plan:
    """The plan; raises if these ranks cannot run it."""
    plan = resolve(options)
    weights(plan.shape)  # raises for a model that cannot be built
    if plan.fp8 is not None:
        plan.fp8.require_runnable(plan.schedule.asynchronous)
    if launched is not None:
        plan = refit(plan, launched.world)
    elif plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"train forks a process for every rank, and {plan.layout.world} are too many for one "
            f"machine: lower the degrees to at most {_MOST_RANKS} ranks, or start it with torchrun"
        )
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"schedule {plan.schedule.name} is asynchronous, which train does not run: choose "
            "another, such as 1f1b or zb-h1"
        )
    return plan


@dataclass(frozen=True)
class _Start:
    """What one start of a run was given on the command line."""

    plan: Plan
    dtype: str | None
    device: str
    backend: Backend | None
    out: Path | None
    resume: bool
    until: int | None
    check: bool
    deterministic: bool


def _device(start: _Start, launched: LauncherEnvironment | None) -> RankDevice:
    """The device of the first rank, or of this one, and the backend of all; refused if these ranks
    cannot have it."""
    from fivefold.launch.backend import (
        NcclLibrary,
        available_device,
        choose_backend,
        forked_device,
        launched_device,
        num_gpus,
    )

    gpus, nccl = num_gpus(), NcclLibrary.here()
    device = available_device(start.device, gpus)
    if launched is not None:
        return launched_device(device, start.backend, launched, gpus, nccl)
    world = start.plan.layout.world
    backend = choose_backend(start.backend, device, world, gpus, nccl)
    return forked_device(device, backend, 0, world)


def _settings(start: _Start, folder: Path, rank: RankDevice) -> TrainSettings:
    """How the ranks train: their device, their dtype, and what the plan expects of a step."""
    from fivefold.train import TrainSettings, estimate_of

    plan, device = start.plan, rank.device.type
    dtype = start.dtype or PRECISIONS[plan.precision].dtype
    if start.dtype is None and device == "cpu" and dtype == "bfloat16":
        dtype = "float32"  # CPUs are slow at bfloat16, which is the default of every plan
    estimate = estimate_of(plan, plan.options.train)
    return TrainSettings(
        recipe=plan.options.train,
        dtype=cast("Any", dtype),
        device=cast("Any", device),
        backend=rank.backend,
        folder=folder,
        resume=start.resume,
        until=start.until,
        planned=None if estimate is None else PlannedStep.of(estimate),
        check=start.check,
        deterministic=start.deterministic,
    )


def _fork(start: _Start, as_json: bool) -> int:
    """Train on ranks of this machine; the exit code."""
    from fivefold.launch.processes import Pool, RankLost
    from fivefold.records.run_folder import RunFolder
    from fivefold.train import checked_source, keep_tokenizer, num_processes, train

    began, rank = time.perf_counter(), _device(start, None)
    plan = _noted(start.plan, rank)
    folder = start.out or run_folder(Path("runs"), plan.shape.name, start.resume)
    settings = _settings(start, folder, rank)
    source = checked_source(plan, settings)
    toml = plan.to_toml(folder, whole=True)
    run_files = RunFolder.create(folder, toml, _start_facts(plan, source), start.resume)
    keep_tokenizer(folder, source)
    print_line: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    print_line(head(plan, settings.recipe, settings.dtype, str(source), settings.planned))
    print_line(f"run folder: {folder}")
    reporter = _Reporter(settings.recipe.steps, print_line)
    try:
        with Pool(num_processes(plan, settings), _PATIENCE, forwards_stop=True) as pool:
            runs, check = train(pool, plan, settings, reporter.report)
    except RankLost as lost:
        return _report_lost_rank(lost, plan, as_json)
    finally:
        summary = run_files.summarize()
    table = {
        **_steps_json(plan, settings, str(source), reporter.records),
        **_measured_json(plan, settings, runs),
        "check": None if check is None else {**asdict(check), "passed": check.passed},
        "stopped": runs[0].stopped,
        "run": str(folder),
        "summary": summary.to_json(),
        "seconds": round(time.perf_counter() - began, 3),
    }
    typer.echo(
        json_text(table) if as_json else "\n".join(["", summary_text(summary), *tail(table)])
    )
    return 0 if check is None or check.passed else 1


def _join(start: _Start, launched: LauncherEnvironment) -> int:
    """Be one rank of a job that a launcher has started; the exit code."""
    from fivefold.launch.worker import joined_worker
    from fivefold.records.run_folder import RunFolder
    from fivefold.train import checked_source, keep_tokenizer, run_rank

    rank, first = _device(start, launched), launched.rank == 0
    plan = _noted(start.plan, rank)
    assert start.out is not None
    folder, settings = start.out, _settings(start, start.out, rank)
    print_line: Callable[[str], None] = typer.echo if first else (lambda line: None)
    if first:  # the others open the folder after they have joined this rank
        source = checked_source(plan, settings)
        toml = plan.to_toml(folder, whole=True)
        run_files = RunFolder.create(folder, toml, _start_facts(plan, source), start.resume)
        keep_tokenizer(folder, source)
        print_line(head(plan, settings.recipe, settings.dtype, str(source), settings.planned))
        print_line(f"run folder: {folder}")
    reporter = _Reporter(settings.recipe.steps, print_line)
    run_rank(joined_worker(launched, reporter.report), plan, settings, device=rank)
    if first:
        print_line("\n" + summary_text(run_files.summarize()))
    return 0


def _noted(plan: Plan, rank: RankDevice) -> Plan:
    """The plan with a note on how collectives travel between GPUs."""
    if rank.device.type == "cpu" or plan.layout.world == 1:
        return plan
    return replace(plan, notes=(*plan.notes, rank.describe()))


class _Reporter:
    """Prints every step when it is over, and collects the records."""

    def __init__(self, steps: int, print_line: Callable[[str], None]) -> None:
        self.steps, self.print_line, self.pace = steps, print_line, Pace()
        self.records: list[StepRecord] = []

    def report(self, record: StepRecord | Shortage | SampleText | str) -> None:
        from fivefold.train import SampleText

        if isinstance(record, StepRecord):
            self.records.append(record)
            self.print_line(step_line(record, self.steps, self.pace.eta(record, self.steps)))
        elif isinstance(record, SampleText):
            self.print_line(str(record))
        elif isinstance(record, str):
            typer.echo(f"fivefold: {record}", err=True)
        else:
            words = {**asdict(record), "where": f"{record.where} of rank {record.rank}"}
            words.pop("rank")
            typer.echo(f"fivefold: {out_of_memory(**words)}", err=True)


def _facts(plan: Plan) -> dict[str, object]:
    """Facts of a start, for --json too."""
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        "schedule": plan.schedule.name,
    }


def _start_facts(plan: Plan, source: Source) -> dict[str, object]:
    """Facts of this start for `run.json`."""
    tokenizer = source.tokenizer
    return {**_facts(plan), "tokenizer": None if tokenizer is None else asdict(tokenizer)}


def _report_lost_rank(lost: RankLost, plan: Plan, as_json: bool) -> int:
    who = "the one process" if lost.rank >= plan.layout.world else f"rank {lost.rank}"
    reason = f"lost {who} at {lost.doing}: it {lost.cause}"
    if as_json:
        typer.echo(json_text({"passed": False, "error": reason, "rank": lost.rank}))
    typer.echo(f"fivefold: {reason}", err=True)
    return 1


def _steps_json(
    plan: Plan, settings: TrainSettings, corpus: str, records: list[StepRecord]
) -> dict[str, Any]:
    """The run and its steps as JSON."""
    return {
        **_facts(plan),
        "dtype": settings.dtype,
        "corpus": corpus,
        "tokens_per_step": plan.batch.tokens,
        "steps": [record.to_json() for record in records],
        "notes": list(plan.notes),
    }


def _measured_json(plan: Plan, settings: TrainSettings, runs: list[TrainedRank]) -> dict[str, Any]:
    """Measured memory and traffic beside the plan, as JSON; null if no step was left to run."""
    from fivefold.train import compare_with_plan

    measured = compare_with_plan(plan, settings, runs)
    if measured is None:
        return {"memory": None, "traffic": None}
    by_source = {"planned": measured.planned_traffic, "measured": measured.traffic}
    traffic = {
        "step": measured.step,
        "match": measured.traffic_as_planned,
        **{
            name: {axis: one._asdict() for axis, one in axes.items()}
            for name, axes in by_source.items()
        },
    }
    memory = measured.memory
    if memory is None:
        return {"memory": None, "traffic": traffic}
    sizes = {"planned": memory.planned, "measured": memory.measured}
    return {
        "memory": {
            "rank": memory.rank,
            "ranks_as_planned": memory.num_as_planned,
            **{name: {**asdict(each), "total": each.total} for name, each in sizes.items()},
        },
        "traffic": traffic,
    }

"""`fivefold train`: train a plan, and print what was measured beside what was planned.

On one machine it forks the ranks itself; under torchrun, Slurm or Kubernetes it is one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fivefold.commands.job import GivenJob, Model, above, asked_backend, given_job, one_of, reopened
from fivefold.commands.options import (
    BackendOption,
    RunPrecisionOption,
    as_given,
    in_precision,
    json_text,
    with_plan_options,
)
from fivefold.commands.train_start import (
    RestartedRun,
    copy_domain,
    device_of,
    host_keeper,
    kept_memory,
    noted,
    plan_facts,
    require_restarts,
    settings_of,
    start_facts,
    with_layout,
)
from fivefold.core import FORMATS, FivefoldError, RankLost, counted
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, Recipe, resolve, says_layout
from fivefold.launch import (
    LauncherEnvironment,
    read_environment,
    refit,
    require_trainable,
    without_replica,
)
from fivefold.records import (
    PLAN,
    RUN,
    Pace,
    PlannedStep,
    RunFolder,
    StepRecord,
    Summary,
    mend,
    options_of,
    own_run,
    run_folder,
)
from fivefold.render import LinePrinter, out_of_memory, run_head, run_tail, step_line, summary_text

if TYPE_CHECKING:
    from fivefold.data import Source
    from fivefold.train import (
        Check,
        MeasuredRun,
        RankArguments,
        RunOptions,
        TrainedRank,
        TrainSettings,
    )
    from fivefold.train.callbacks import Callback, SampleText, Shortage

_MOST_RANKS = 64  # processes on one machine
_DEVICES = ("auto", "cpu", "cuda")
_OWNER_SECONDS = 2.0  # in which the ranks of a launcher that was killed end
_RESTART_SECONDS = 30.0  # in which a cluster's launcher ends the ranks before it starts others


@dataclass(frozen=True)
class StartedRun:
    """What is about to run, reported before the first step."""

    plan: Plan
    recipe: Recipe
    dtype: str
    corpus: str
    planned: PlannedStep | None
    folder: Path

    def __str__(self) -> str:
        text = run_head(self.plan, self.recipe, self.dtype, self.corpus, self.planned)
        return f"{text}\nrun folder: {self.folder}"


OnReport = Callable[[Any], None]
"""Gets the start, the record of every step, sampled text, a rank that is out of memory, and
warnings as texts."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. Under a launcher it is what one rank knows: rank 0 has the summary.

    `str()` is the text that `fivefold train` ends with, `to_json()` its JSON.
    """

    plan: Plan
    folder: Path
    dtype: str
    corpus: str
    records: tuple[StepRecord, ...]  # of the steps of this start
    summary: Summary | None
    stopped: bool  # it was asked to stop before the last step
    seconds: float
    measured: MeasuredRun | None = None
    check: Check | None = None
    joined: bool = False  # one rank of a launcher's job

    @property
    def passed(self) -> bool:
        """Whether the losses are those of one process, if that was checked."""
        return self.check is None or self.check.passed

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(record.loss for record in self.records)

    @cached_property
    def _table(self) -> dict[str, Any]:
        return {
            **plan_facts(self.plan),
            "dtype": self.dtype,
            "corpus": self.corpus,
            "tokens_per_step": self.plan.batch.tokens,
            "steps": [record.to_json() for record in self.records],
            "notes": list(self.plan.notes),
            **(
                {"memory": None, "traffic": None}
                if self.measured is None
                else self.measured.to_json()
            ),
            "check": None if self.check is None else {**asdict(self.check), "passed": self.passed},
            "stopped": self.stopped,
            "run": str(self.folder),
            "summary": None if self.summary is None else self.summary.to_json(),
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> dict[str, Any]:
        """What `fivefold train --json` prints."""
        return self._table

    def __repr__(self) -> str:
        steps = counted(len(self.records), "step")
        return f"TrainedRun({self.plan.shape.name} on {self.plan.layout}: {steps}, {self.folder})"

    def __str__(self) -> str:
        summary = "" if self.summary is None else summary_text(self.summary)
        return summary if self.joined else "\n".join([summary, *run_tail(self._table)])

    def _repr_html_(self) -> str:
        from fivefold.render import run_html

        lines = [step_line(record, self.plan.options.train.steps) for record in self.records]
        return run_html(self.losses, lines, str(self), self.passed)


def train(
    model: Model = "tiny-moe",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    until: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    backend: str | None = None,
    check: bool = False,
    deterministic: bool = False,
    restarts: int = 0,
    shrink: bool = False,
    callbacks: str | Sequence[Callback] = (),
    on_progress: OnReport | None = None,
    **keys: Any,
) -> TrainedRun:
    """Train on ranks that are forked from this process, or as one rank of a launcher's job.

    `keys` are those of a plan file, of training (`steps`, `lr`, `data`, …) and of the model. `out`
    is the run folder, by default the next free `runs/NAME-N`. After the loss of a rank all ranks
    start again up to `restarts` times; with `shrink` every other time without the lost replica.
    `callbacks` are values, of which each rank gets a copy, or the text of the key `callbacks`.
    `on_progress` gets a `StartedRun`, the `StepRecord` of every step, samples and warnings.
    """
    from fivefold.train import RunOptions, compare_with_plan
    from fivefold.train.callbacks import require_callbacks
    from fivefold.train.recovery import nothing_left

    if isinstance(callbacks, str):
        keys["callbacks"], callbacks = callbacks, ()
    job = reopened(given_job(model, keys))
    launched = read_environment(os.environ)
    options = RunOptions(
        out=None if out is None else Path(out),
        resume=resume or launched is not None,  # a launcher restarts a job that has failed
        until=None if until is None else above("--until", until, 0),
        dtype=None if dtype is None else cast("Any", one_of("--dtype", dtype, FORMATS)),
        device=cast("Any", one_of("--device", device, _DEVICES)),
        backend=asked_backend(backend),
        check=check,
        deterministic=deterministic,
        restarts=restarts,
        shrink=shrink,
        callbacks=require_callbacks(callbacks),
    )
    plan = _require_start(job, options, launched, resume)
    on_report: OnReport = on_progress or (lambda _: None)
    if launched is not None:
        return _join(plan, options, launched, on_report)
    rank = device_of(plan, options, None)
    full = noted(plan, rank)
    folder = options.out or run_folder(Path("runs"), full.shape.name, options.resume)
    settings = settings_of(full, options, folder, rank, on_report)
    if options.resume and (done := nothing_left(settings)) is not None:
        raise FivefoldError(done)  # before anything in the folder changes
    records, world = _Records(on_report), full.layout.world
    with own_run(folder, _OWNER_SECONDS) as ticket:
        began, settings = time.perf_counter(), replace(settings, ticket=ticket)
        files, source = _begin(full, settings, on_report)
        with kept_memory(settings.recipe, world) as memory:
            settings = replace(settings, memory=memory)
            try:
                plan, runs, verdict = _run_ranks(full, settings, files, source, records)
            finally:
                summary = _summary(files, on_report)
        return TrainedRun(
            plan,
            files.path,
            settings.dtype,
            str(source),
            tuple(records.records),
            summary,
            runs[0].stopped,
            time.perf_counter() - began,
            compare_with_plan(plan, settings, runs),
            verdict,
        )


def _require_start(
    job: GivenJob, options: RunOptions, launched: LauncherEnvironment | None, resume: bool
) -> Plan:
    """The plan of a start; refuses what cannot run before anything is written."""
    from fivefold.train.callbacks import callback_classes

    if options.check and resume:
        raise FivefoldError("--check compares a training from its first step: leave --resume out")
    if launched is not None and options.out is None:
        raise FivefoldError("name the run folder, which all hosts share, with --out")
    before = _plan_before(job.options, options.out) if options.resume else None
    job = replace(job, options=_same_batch(job.options, before))
    plan_options, why = with_layout(job, before, options.device, launched)
    plan = runnable(plan_options, launched)
    plan = replace(plan, notes=(*why, *plan.notes))
    require_restarts(options, plan, launched)
    copy_domain(plan.options.train, plan.layout.world, launched)
    # Mistakes in a user's files are refused before ranks start, which inherit what is loaded.
    callback_classes(plan.options.train)
    _ = plan.options.train.optimizer_kind
    return plan


def _plan_before(options: PlanOptions, out: Path | None) -> PlanOptions | None:
    """The plan of a run that resumes; None if it has none, or an import that was not trained."""
    folder = out or run_folder(Path("runs"), models.load(options.model).name, newest=True)
    file = folder / PLAN
    return options_of(folder) if file.is_file() and says_layout(str(file)) else None


def _same_batch(options: PlanOptions, before: PlanOptions | None) -> PlanOptions:
    """A run that resumes in another layout has the same global batch and the same rows, unless
    others are given."""
    sized = options.batch is not None or options.microbatches is not None
    if before is None or (sized and options.seq is not None):
        return options
    batch = resolve(before).batch
    seq = batch.seq if options.seq is None else options.seq
    return replace(options, seq=seq, batch=options.batch if sized else batch.sequences)


def runnable(options: PlanOptions, launched: LauncherEnvironment | None = None) -> Plan:
    """The plan; raises if these ranks cannot run it."""
    plan = resolve(options)
    require_trainable(plan)
    if launched is not None:
        plan = refit(plan, launched.world)
    elif plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"train forks a process for every rank, and {plan.layout.world} are too many for one "
            f"machine: lower the degrees to at most {_MOST_RANKS} ranks, or start it with torchrun"
        )
    return plan


class _Records:
    """Collects the records of steps, and passes all reports on."""

    def __init__(self, on_report: OnReport) -> None:
        self.on_report = on_report
        self.records: list[StepRecord] = []

    def report(self, report: StepRecord | Shortage | SampleText | str) -> None:
        if isinstance(report, StepRecord):
            while self.records and self.records[-1].step >= report.step:  # a restart repeats it
                self.records.pop()
            self.records.append(report)
        self.on_report(report)


def _begin(
    plan: Plan, settings: TrainSettings, on_report: OnReport, *, joined: bool = False
) -> tuple[RunFolder, Source]:
    """Make the run folder, and tell what is about to run; the folder, and what is read.

    A launcher may start a finished job again, by itself: its ranks, which have `joined`, find no
    step left and end well. The folder stays as it is.
    """
    from fivefold.train import checked_source, keep_tokenizer
    from fivefold.train.recovery import check_resume, nothing_left

    folder = settings.folder
    assert folder is not None
    done = nothing_left(settings) if joined else None
    resume = settings.options.resume
    if resume and done is None:
        for message in (*mend(folder), *check_resume(plan, settings)):
            on_report(message)
    source = checked_source(plan, settings)
    if done is None or not (folder / RUN).exists():
        toml = plan.to_toml(folder, full=True)
        run_files = RunFolder.create(folder, toml, start_facts(plan, source), resume)
        keep_tokenizer(folder, source)
    else:
        on_report(done)
        run_files = RunFolder.open(folder)
    recipe, corpus = settings.recipe, str(source)
    on_report(StartedRun(plan, recipe, settings.dtype, corpus, settings.planned, folder))
    return run_files, source


def _run_ranks(
    full: Plan, settings: TrainSettings, files: RunFolder, source: Source, records: _Records
) -> tuple[Plan, list[TrainedRank], Check | None]:
    """Run all ranks, and start them again where one is lost and restarts are left; the plan with
    which they ended. A loss is recorded."""
    from fivefold.launch import Pool, torch_limit
    from fivefold.train import check_runs, reference_runs, run_rank
    from fivefold.train.checkpoint import latest

    options, path, plan = settings.options, files.path, full
    for number in range(options.restarts + 1):
        attempt = settings
        if number:
            facts, toml = start_facts(plan, source), full.to_toml(path, full=True)
            files = RunFolder.create(path, toml, facts, resume=True)
            planned = settings.planned if plan is full else None
            attempt = replace(settings, options=replace(options, resume=True), planned=planned)
        world, asked_to_stop, before = plan.layout.world, False, latest(path)
        # For a check a single process trains beside the ranks, and in float32 a second one.
        singles = reference_runs(plan, attempt) if options.check else []
        tasks = [(run_rank, (plan, attempt))] * world + [(run_rank, single) for single in singles]
        try:
            patience = torch_limit(settings.recipe.hang_after)
            with Pool(len(tasks), patience, forwards_stop=True) as pool:
                try:
                    runs = pool.run_each(tasks, on_report=records.report)
                finally:
                    asked_to_stop = pool.stopping
            ranks, references = runs[:world], runs[world:]
            alone = partial(_run_alone, patience)
            return plan, ranks, check_runs(plan, attempt, ranks, references, alone)
        except BaseException as error:
            if latest(path) == before:
                files.restore_plan()
            if not isinstance(error, RankLost):
                raise
            named = error.named("the one process") if error.rank >= world else error
            if (unrecorded := files.fail(named.reason)) is not None:
                records.report(unrecorded)
            lost = named.ended(named.final or asked_to_stop)
            if lost.final or number == options.restarts:
                raise lost from None
        shrinks = options.shrink and plan.layout.dp == full.layout.dp
        plan = without_replica(full) if shrinks else full
        records.on_report(RestartedRun(lost, number + 1, options.restarts, plan))
    raise AssertionError("the last start returns or raises")


def _run_alone(patience: float, arguments: RankArguments) -> TrainedRank:
    """Run one process more, for a check."""
    from fivefold.launch import Pool
    from fivefold.train import run_rank

    with Pool(1, patience) as pool:
        return pool.run_each([(run_rank, arguments)])[0]


def _join(
    plan: Plan, options: RunOptions, launched: LauncherEnvironment, on_report: OnReport
) -> TrainedRun:
    """Be one rank of a job that a launcher has started; the first one owns the run."""
    from fivefold.launch import joined_worker
    from fivefold.train import run_rank
    from fivefold.train.checkpoint import latest

    rank, first, folder = device_of(plan, options, launched), launched.rank == 0, options.out
    assert folder is not None
    owner = own_run(folder, _RESTART_SECONDS) if first else nullcontext()
    plan, recipe = noted(plan, rank), plan.options.train
    records = _Records(on_report if first else _warnings(on_report))
    with owner as ticket, host_keeper(recipe, launched, folder) as memory:
        settings = replace(
            settings_of(plan, options, folder, rank),
            ticket=ticket,
            memory=memory,
            copy_domain=copy_domain(recipe, launched.world, launched),
        )
        began, before = time.perf_counter(), latest(folder)
        # The others open the folder after they have joined this rank.
        begun = _begin(plan, settings, on_report, joined=True) if first else None
        try:
            done = run_rank(joined_worker(launched, records.report), plan, settings, device=rank)
        except BaseException:
            if begun is not None and latest(folder) == before:
                begun[0].restore_plan()
            raise
        return TrainedRun(
            plan,
            folder,
            settings.dtype,
            "" if begun is None else str(begun[1]),
            tuple(records.records),
            None if begun is None else _summary(begun[0], on_report),
            done.stopped,
            time.perf_counter() - began,
            joined=True,
        )


def _summary(files: RunFolder, on_report: OnReport) -> Summary | None:
    """The summary of a run that has ended; None, and why, if its files cannot be summarised.

    Nothing in them can change how the training itself has ended.
    """
    try:
        return files.summarize(on_report)
    except Exception as error:
        reason = str(error) or repr(error)
        on_report(f"the run has ended, but cannot be summarised: {reason}")
        return None


def _warnings(on_report: OnReport) -> OnReport:
    """All but steps and samples, which rank 0 tells."""
    from fivefold.train.callbacks import SampleText

    return lambda report: None if isinstance(report, StepRecord | SampleText) else on_report(report)


@partial(with_plan_options, default_target="tiny-moe")
def run(
    options: PlanOptions,
    command: typer.Context,
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
    precision: RunPrecisionOption = None,
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
    restarts: Annotated[
        int, typer.Option(help="How often all ranks start again after one is lost.")
    ] = 0,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Go on without the replica of a lost rank, until the restart after that.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train; without `data`, on the source of Python's standard library, byte by byte."""
    overrides = {"steps": steps, "seed": seed}
    recipe = replace(
        options.train, **{key: value for key, value in overrides.items() if value is not None}
    )
    options = in_precision(options, precision)
    job = as_given(replace(options, train=recipe), command)
    alone = read_environment(os.environ) is None
    reporter = _Reporter(quiet=as_json and alone)
    try:
        outcome = train(
            job,
            out=out,
            resume=resume,
            until=until,
            dtype=dtype,
            device=device,
            backend=backend,
            check=check,
            deterministic=deterministic,
            restarts=restarts,
            shrink=shrink,
            on_progress=reporter.report,
        )
    except RankLost as lost:
        reporter.printer.close()
        if as_json:
            table = {"passed": False, "error": lost.reason, "rank": lost.rank}
            typer.echo(json_text(table))
        typer.echo(f"fivefold: {lost.reason}", err=True)
        raise typer.Exit(1) from lost
    finally:
        reporter.printer.close()
    if not outcome.joined:
        typer.echo(json_text(outcome.to_json()) if as_json else f"\n{outcome}")
    elif outcome.summary is not None:
        typer.echo(f"\n{outcome}")
    raise typer.Exit(0 if outcome.passed else 1)


class _Reporter:
    """Prints every step when it is over. Once ranks run, a thread prints: nobody waits for it."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.pace, self.steps = quiet, Pace(), 0
        self.printer = LinePrinter(lambda line, err: typer.echo(line, err=err))
        self.started = False

    def print_line(self, line: str, err: bool = False) -> None:
        if self.quiet and not err:
            return
        if self.started:
            self.printer.print_line(line, err)
        else:
            typer.echo(line, err=err)  # a thread would be forked with the ranks

    def report(self, report: Any) -> None:
        from fivefold.train.callbacks import SampleText

        if isinstance(report, StartedRun):
            self.steps = report.recipe.steps
            self.print_line(str(report))
            self.started = True
        elif isinstance(report, StepRecord):
            self.print_line(step_line(report, self.steps, self.pace.eta(report, self.steps)))
        elif isinstance(report, SampleText):
            self.print_line(str(report))
        elif isinstance(report, RestartedRun):
            self.printer.close()  # its thread would be forked with the ranks
            typer.echo(f"fivefold: {report}", err=True)
        elif isinstance(report, str):
            self.print_line(f"fivefold: {report}", err=True)
        else:
            facts: dict[str, Any] = {
                **asdict(report),
                "where": f"{report.where} of rank {report.rank}",
            }
            facts.pop("rank")
            self.print_line(f"fivefold: {out_of_memory(**facts)}", err=True)

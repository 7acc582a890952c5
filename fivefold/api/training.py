"""Training: the answer of `ff.train`, and of `fivefold train`.

On one machine it forks the ranks itself; under torchrun, Slurm or Kubernetes it is one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.api.restarting import RestartPolicy, copy_domain, host_keeper, kept_memory
from fivefold.api.training_start import (
    TrainStart,
    device_of,
    noted,
    plan_facts,
    settings_of,
    start_facts,
    with_layout,
)
from fivefold.commands.job import Model, above, asked_backend, given_job, one_of, reopened
from fivefold.core import FORMATS, FivefoldError, RankLost, counted
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, Recipe, resolve, says_layout
from fivefold.launch import LauncherEnvironment, read_environment, refit, require_trainable
from fivefold.records import (
    PLAN,
    RUN,
    PlannedStep,
    RunFolder,
    StepRecord,
    Summary,
    mend,
    options_of,
    own_run,
    run_folder,
)
from fivefold.render import run_head, run_tail, step_line, summary_text

if TYPE_CHECKING:
    from fivefold.data import Source
    from fivefold.launch import RankDevice
    from fivefold.train import Check, MeasuredRun, TrainedRank, TrainSettings
    from fivefold.train.callbacks import SampleText, Shortage

_MOST_RANKS = 64  # processes on one machine
_DEVICES = ("auto", "cpu", "cuda")
_PATIENCE = 600.0  # seconds: the watchdogs of the ranks find a hang long before
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
    on_progress: OnReport | None = None,
    **keys: Any,
) -> TrainedRun:
    """Train on ranks that are forked from this process, or as one rank of a launcher's job.

    `keys` are those of a plan file, of training (`steps`, `lr`, `data`, …) and of the model. `out`
    is the run folder, by default the next free `runs/NAME-N`. After the loss of a rank all ranks
    start again up to `restarts` times; with `shrink` every other time without the lost replica.
    `on_progress` gets a `StartedRun`, the `StepRecord` of every step, samples and warnings.
    """
    job = reopened(given_job(model, keys))
    if until is not None:
        above("--until", until, 0)
    dtype = None if dtype is None else one_of("--dtype", dtype, FORMATS)
    one_of("--device", device, _DEVICES)
    backend_name = asked_backend(backend)
    if check and resume:
        raise FivefoldError("--check compares a training from its first step: leave --resume out")
    folder = None if out is None else Path(out)
    launched = read_environment(os.environ)
    resume = resume or launched is not None  # a launcher restarts a job that has failed
    if launched is not None and folder is None:
        raise FivefoldError("name the run folder, which all hosts share, with --out")
    before = _run_options(job.options, folder) if resume else None
    job = replace(job, options=_same_batch(job.options, before))
    options, why = with_layout(job, before, device, launched)
    plan = runnable(options, launched)
    plan = replace(plan, notes=(*why, *plan.notes))
    policy, chosen = RestartPolicy(restarts, shrink), (check, deterministic)
    policy.require(plan, launched, check)
    copy_domain(plan.options.train, plan.layout.world, launched)
    start = TrainStart(plan, dtype, device, backend_name, folder, resume, until, *chosen, policy)
    listener: OnReport = on_progress or (lambda _: None)
    return _join(start, launched, listener) if launched else _fork(start, listener)


def _run_options(options: PlanOptions, out: Path | None) -> PlanOptions | None:
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


@dataclass(frozen=True)
class _Begun:
    """A run whose folder is there: its files, and what it reads."""

    files: RunFolder
    corpus: str
    source: Source


class _Records:
    """Collects the records of steps, and passes all reports on."""

    def __init__(self, on_report: OnReport) -> None:
        self.on_report = on_report
        self.found: list[StepRecord] = []

    def report(self, report: StepRecord | Shortage | SampleText | str) -> None:
        if isinstance(report, StepRecord):
            while self.found and self.found[-1].step >= report.step:  # a restart repeats it
                self.found.pop()
            self.found.append(report)
        self.on_report(report)


def _begin(
    start: TrainStart, plan: Plan, settings: TrainSettings, told: OnReport, *, joined: bool = False
) -> _Begun:
    """Make the run folder, and tell what is about to run.

    A launcher may start a finished job again, by itself: its ranks, which have `joined`, find no
    step left and end well. The folder stays as it is.
    """
    from fivefold.train import checked_source, keep_tokenizer
    from fivefold.train.recovery import check_resume, nothing_left

    folder = settings.folder
    assert folder is not None
    done = nothing_left(settings) if joined else None
    if start.resume and done is None:
        for message in (*mend(folder), *check_resume(plan, settings)):
            told(message)
    source = checked_source(plan, settings)
    if done is None or not (folder / RUN).exists():
        toml = plan.to_toml(folder, full=True)
        run_files = RunFolder.create(folder, toml, start_facts(plan, source), start.resume)
        keep_tokenizer(folder, source)
    else:
        told(done)
        run_files = RunFolder.open(folder)
    recipe, corpus = settings.recipe, str(source)
    told(StartedRun(plan, recipe, settings.dtype, corpus, settings.planned, folder))
    return _Begun(run_files, corpus, source)


def _fork(start: TrainStart, told: OnReport) -> TrainedRun:
    """Train on ranks of this machine."""
    from fivefold.train.recovery import nothing_left

    rank = device_of(start, None)
    plan = noted(start.plan, rank)
    folder = start.out or run_folder(Path("runs"), plan.shape.name, start.resume)
    settings = settings_of(start, folder, rank, told)
    if start.resume and (done := nothing_left(settings)) is not None:
        raise FivefoldError(done)  # before anything in the folder changes
    with own_run(folder, _OWNER_SECONDS) as ticket:
        return _forked(start, plan, replace(settings, ticket=ticket), told)


def _forked(start: TrainStart, plan: Plan, settings: TrainSettings, told: OnReport) -> TrainedRun:
    """Train in a folder that this process owns; it keeps the memory of copies over restarts."""
    from fivefold.train import compare_with_plan

    began, full = time.perf_counter(), plan
    begun, records = _begin(start, plan, settings, told), _Records(told)
    with kept_memory(settings.recipe, plan.layout.world) as memory:
        settings = replace(settings, memory=memory)

        def attempt(plan: Plan, again: bool) -> tuple[Plan, list[TrainedRank], Check | None]:
            if not again:
                return plan, *_attempt(plan, settings, begun.files, records)
            facts, path = start_facts(plan, begun.source), begun.files.path
            files = RunFolder.create(path, full.to_toml(path, full=True), facts, resume=True)
            planned = settings.planned if plan is full else None
            resumed = replace(settings, resume=True, planned=planned)
            return plan, *_attempt(plan, resumed, files, records)

        try:
            plan, runs, check = start.restarts.run(plan, attempt, told)
        finally:
            summary = _summary(begun.files, told)
    return TrainedRun(
        plan,
        begun.files.path,
        settings.dtype,
        begun.corpus,
        tuple(records.found),
        summary,
        runs[0].stopped,
        time.perf_counter() - began,
        compare_with_plan(plan, settings, runs),
        check,
    )


def _attempt(
    plan: Plan, settings: TrainSettings, files: RunFolder, records: _Records
) -> tuple[list[TrainedRank], Check | None]:
    """One start of all ranks; a loss is recorded and raised."""
    from fivefold.launch import Pool
    from fivefold.train import num_processes, train
    from fivefold.train.checkpoint import latest

    asked_to_stop, before = False, latest(files.path)
    try:
        with Pool(num_processes(plan, settings), _PATIENCE, forwards_stop=True) as pool:
            try:
                return train(pool, plan, settings, records.report)
            finally:
                asked_to_stop = pool.stopping
    except BaseException as error:
        if latest(files.path) == before:
            files.restore_plan()
        if not isinstance(error, RankLost):
            raise
        named = error.named("the one process") if error.rank >= plan.layout.world else error
        if (unrecorded := files.fail(named.reason)) is not None:
            records.report(unrecorded)
        raise named.ended(named.final or asked_to_stop) from None


def _join(start: TrainStart, launched: LauncherEnvironment, told: OnReport) -> TrainedRun:
    """Be one rank of a job that a launcher has started; the first one owns the run."""
    rank = device_of(start, launched)
    assert start.out is not None
    owner = own_run(start.out, _RESTART_SECONDS) if launched.rank == 0 else nullcontext()
    recipe = start.plan.options.train
    domain = copy_domain(recipe, launched.world, launched)
    with owner as ticket, host_keeper(recipe, launched, start.out) as memory:
        settings = replace(settings_of(start, start.out, rank), ticket=ticket)
        settings = replace(settings, memory=memory, copy_domain=domain)
        return _joined(start, launched, rank, settings, told)


def _joined(
    start: TrainStart,
    launched: LauncherEnvironment,
    rank: RankDevice,
    settings: TrainSettings,
    told: OnReport,
) -> TrainedRun:
    from fivefold.launch import joined_worker
    from fivefold.train import run_rank
    from fivefold.train.checkpoint import latest

    began, first = time.perf_counter(), launched.rank == 0
    plan = noted(start.plan, rank)
    assert settings.folder is not None
    # The others open the folder after they have joined this rank.
    before = latest(settings.folder)
    begun = _begin(start, plan, settings, told, joined=True) if first else None
    records = _Records(told if first else _warnings(told))
    try:
        done = run_rank(joined_worker(launched, records.report), plan, settings, device=rank)
    except BaseException:
        if begun is not None and latest(settings.folder) == before:
            begun.files.restore_plan()
        raise
    return TrainedRun(
        plan,
        settings.folder,
        settings.dtype,
        "" if begun is None else begun.corpus,
        tuple(records.found),
        None if begun is None else _summary(begun.files, told),
        done.stopped,
        time.perf_counter() - began,
        joined=True,
    )


def _summary(files: RunFolder, told: OnReport) -> Summary | None:
    """The summary of a run that has ended; None, and why, if its files cannot be summarised.

    Nothing in them can change how the training itself has ended.
    """
    try:
        return files.summarize(told)
    except Exception as error:
        reason = str(error) or repr(error)
        told(f"the run has ended, but cannot be summarised: {reason}")
        return None


def _warnings(told: OnReport) -> OnReport:
    """All but steps and samples, which rank 0 tells."""
    from fivefold.train.callbacks import SampleText

    return lambda report: None if isinstance(report, StepRecord | SampleText) else told(report)

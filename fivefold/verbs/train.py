"""`fivefold train`: run a plan, with what was planned beside what was measured.

On one machine it forks the ranks itself; under torchrun, Slurm or Kubernetes it is one of them.
"""

from __future__ import annotations

import json
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
from fivefold.core.plan import Plan, Wishes, read, resolve
from fivefold.core.weights import weights
from fivefold.launch.launcher import LauncherEnvironment, here, refit
from fivefold.records import Pace, PlannedStep, StepRecord
from fivefold.records.run_folder import PLAN, run_folder
from fivefold.report.training_text import head, out_of_memory, step_line, summary_text, tail
from fivefold.verbs import above, one_of, with_plan_options

if TYPE_CHECKING:
    from fivefold.launch.processes import RankLost
    from fivefold.train import Shortage, TrainedRank, TrainSettings


_MOST_RANKS = 64  # processes that one machine is asked to run
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_PATIENCE = 600.0  # seconds: who hangs is found out by the ranks themselves, long before


@partial(with_plan_options, default_target="tiny-moe")
def run(
    wishes: Wishes,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: the next free runs/NAME-N).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on behind the newest good checkpoint.")
    ] = False,
    until: Annotated[
        int | None, typer.Option(help="End this start behind that step, with a checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default 20).")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(_DTYPES)} (default: the plan's; float32 without a GPU)."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate (default 1e-3).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and of the order of the text.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Compare the losses with those of one process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train; without `data`, on the source of Python's standard library, byte by byte."""
    said = {"steps": steps, "lr": lr, "seed": seed}
    if until is not None:
        above("until", until, 0)
    recipe = replace(wishes.train, **{key: one for key, one in said.items() if one is not None})
    wishes = replace(wishes, train=recipe)
    asked = None if dtype is None else one_of("dtype", dtype, _DTYPES)
    one_of("device", device, _DEVICES)
    if check and resume:
        raise FivefoldError("--check follows a training from its first step: leave --resume out")
    launched = here(os.environ)
    resume = resume or launched is not None  # a launcher starts again what it has lost
    if launched is not None and out is None:
        raise FivefoldError("name the run folder, which all hosts share, with --out")
    plan = runnable(_same_batch(wishes, out, resume), launched)
    where = _Where(plan, asked, device, out, resume, until, check)
    raise typer.Exit(_join(where, launched) if launched else _fork(where, as_json))


def _same_batch(wishes: Wishes, out: Path | None, resume: bool) -> Wishes:
    """A run that goes on in another layout keeps its global batch, unless another is asked for."""
    if not resume or wishes.batch is not None or wishes.microbatches is not None:
        return wishes
    folder = out or run_folder(Path("runs"), models.load(wishes.model).name, newest=True)
    if not (folder / PLAN).is_file():
        return wishes
    return replace(wishes, batch=resolve(read(folder / PLAN)).batch.sequences)


def runnable(wishes: Wishes, launched: LauncherEnvironment | None = None) -> Plan:
    """The plan; refused where these ranks cannot run it."""
    plan = resolve(wishes)
    weights(plan.shape)  # refuses what cannot be built
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
    if wishes.train.compile and (reason := _not_compiled(plan)):
        raise FivefoldError(f"compile = true: {reason}")
    if plan.shape.dropout:
        note = "dropout is 0: many ranks and one cannot drop the same activations"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


def _not_compiled(plan: Plan) -> str | None:
    """What a block does that cannot be part of one graph."""
    layout = plan.layout
    inside = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    found = [
        f"{axis}={degree} moves tokens inside" for axis, degree in inside.items() if degree > 1
    ]
    if plan.schedule.splits_backward and layout.pp > 1:
        found.append(f"schedule {plan.schedule.name} splits backward inside")
    return f"{' and '.join(found)} of a block; choose a layout of dp and pp" if found else None


@dataclass(frozen=True)
class _Where:
    """What the command line asks for besides the plan."""

    plan: Plan
    dtype: str | None
    device: str
    out: Path | None
    resume: bool
    until: int | None
    check: bool


def _settings(where: _Where, folder: Path) -> TrainSettings:
    """How the ranks train: on which device, and how precisely."""
    from fivefold.launch.processes import num_gpus
    from fivefold.train import PRECISIONS, TrainSettings, expected

    plan, device = where.plan, where.device
    if device == "auto":
        device = "cuda" if num_gpus() else "cpu"
    elif device == "cuda" and not num_gpus():
        raise FivefoldError("--device cuda: this machine has no GPU; use --device cpu")
    dtype = where.dtype or PRECISIONS[plan.precision]
    if where.dtype is None and device == "cpu" and dtype == "bfloat16":
        dtype = "float32"  # CPUs are slow at bfloat16, and every plan is for it by default
    outlook = expected(plan, plan.wishes.train)
    return TrainSettings(
        recipe=plan.wishes.train,
        dtype=cast("Any", dtype),
        device=cast("Any", device),
        folder=folder,
        resume=where.resume,
        until=where.until,
        planned=None if outlook is None else PlannedStep.of(outlook),
        check=where.check,
    )


def _fork(where: _Where, as_json: bool) -> int:
    """Train on ranks of this machine; the exit code."""
    from fivefold.launch.processes import Pool, RankLost
    from fivefold.records.run_folder import RunFolder
    from fivefold.train import num_processes, source_of, train

    began, plan = time.perf_counter(), where.plan
    folder = where.out or run_folder(Path("runs"), plan.shape.name, where.resume)
    settings = _settings(where, folder)
    source = source_of(plan, settings, verify=True)
    made = RunFolder.create(folder, plan.to_toml(folder, whole=True), _facts(plan), where.resume)
    say: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    say(head(plan, settings.recipe, settings.dtype, str(source), settings.planned))
    say(f"run folder: {folder}")
    teller = _Reporter(settings.recipe.steps, say)
    try:
        with Pool(num_processes(plan, settings), _PATIENCE, forwards_stop=True) as pool:
            runs, verdict = train(pool, plan, settings, teller.tell)
    except RankLost as lost:
        return _lost(lost, plan, as_json)
    finally:
        summary = made.summarize()
    table = {
        **_described(plan, settings, str(source), teller.records),
        **_beside(plan, settings, runs),
        "check": None if verdict is None else {**asdict(verdict), "passed": verdict.passed},
        "stopped": runs[0].stopped,
        "run": str(folder),
        "summary": summary.to_json(),
        "seconds": round(time.perf_counter() - began, 3),
    }
    typer.echo(
        json.dumps(table) if as_json else "\n".join(["", summary_text(summary), *tail(table)])
    )
    return 0 if verdict is None or verdict.passed else 1


def _join(where: _Where, launched: LauncherEnvironment) -> int:
    """Be one rank of a job that a launcher has started; the exit code."""
    from fivefold.launch.launcher import joined_worker, own_device
    from fivefold.records.run_folder import RunFolder
    from fivefold.train import run_rank, source_of

    plan, first = where.plan, launched.rank == 0
    assert where.out is not None
    folder, settings = where.out, _settings(where, where.out)
    say: Callable[[str], None] = typer.echo if first else (lambda line: None)
    if first:  # the others see the folder when they have met this rank
        source = source_of(plan, settings, verify=True)
        toml = plan.to_toml(folder, whole=True)
        made = RunFolder.create(folder, toml, _facts(plan), where.resume)
        say(head(plan, settings.recipe, settings.dtype, str(source), settings.planned))
        say(f"run folder: {folder}")
    teller = _Reporter(settings.recipe.steps, say)
    device = own_device(launched) if settings.device == "cuda" else None
    run_rank(joined_worker(launched, teller.tell), plan, settings, device=device)
    if first:
        say("\n" + summary_text(made.summarize()))
    return 0


class _Reporter:
    """Says every step when it is over."""

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self.steps, self.say, self.pace = steps, say, Pace()
        self.records: list[StepRecord] = []

    def tell(self, record: StepRecord | Shortage | str) -> None:
        if isinstance(record, StepRecord):
            self.records.append(record)
            self.say(step_line(record, self.steps, self.pace.eta(record, self.steps)))
        elif isinstance(record, str):
            typer.echo(f"fivefold: {record}", err=True)
        else:
            words = {**asdict(record), "where": f"{record.where} of rank {record.rank}"}
            words.pop("rank")
            typer.echo(f"fivefold: {out_of_memory(**words)}", err=True)


def _facts(plan: Plan) -> dict[str, object]:
    """Of this start, for whoever reads the run folder."""
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        "schedule": plan.schedule.name,
    }


def _lost(lost: RankLost, plan: Plan, as_json: bool) -> int:
    who = "the one process" if lost.rank >= plan.layout.world else f"rank {lost.rank}"
    reason = f"lost {who} at {lost.doing}: it {lost.cause}"
    if as_json:
        typer.echo(json.dumps({"passed": False, "error": reason, "rank": lost.rank}))
    typer.echo(f"fivefold: {reason}", err=True)
    return 1


def _described(
    plan: Plan, settings: TrainSettings, corpus: str, records: list[StepRecord]
) -> dict[str, Any]:
    """The run as JSON, step by step."""
    return {
        **_facts(plan),
        "dtype": settings.dtype,
        "corpus": corpus,
        "tokens_per_step": plan.batch.tokens,
        "steps": [record.to_json() for record in records],
        "notes": list(plan.notes),
    }


def _beside(plan: Plan, settings: TrainSettings, runs: list[TrainedRank]) -> dict[str, Any]:
    """Planned beside measured, as JSON; nothing where no step was left to run."""
    from fivefold.train import beside_the_plan

    measured = beside_the_plan(plan, settings, runs)
    if measured is None:
        return {"memory": None, "traffic": None}
    moved = {"planned": measured.planned_moved, "measured": measured.moved}
    traffic = {
        "step": measured.step,
        "match": measured.moved_as_planned,
        **{
            name: {axis: one._asdict() for axis, one in axes.items()}
            for name, axes in moved.items()
        },
    }
    memory = measured.memory
    if memory is None:
        return {"memory": None, "traffic": traffic}
    held = {"planned": memory.planned, "measured": memory.held}
    return {
        "memory": {
            "rank": memory.rank,
            "ranks_as_planned": memory.num_as_planned,
            **{name: {**asdict(each), "total": each.total} for name, each in held.items()},
        },
        "traffic": traffic,
    }

"""`fivefold train`: run a plan on this machine, with what was planned beside what was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.core.weights import weights
from fivefold.core.words import counted
from fivefold.verbs.options import above, one_of, with_plan_options

if TYPE_CHECKING:
    from fivefold.training import Check, Measured, Settings, StepLine

_MOST_RANKS = 64  # processes that one machine is asked to run
_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "padding": "padding",
    "total": "total",
}


@partial(with_plan_options, default_target="tiny-moe")
def run(
    wishes: Wishes,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    lr: Annotated[float, typer.Option(help="Learning rate, after a tenth of the steps.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights and of the order of the text.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the losses with those of one process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train on this machine, on the source of Python's standard library, byte by byte."""
    plan = runnable(wishes)
    chosen = {
        "steps": above("steps", steps, 0),
        "dtype": one_of("dtype", dtype, ("float32", "float64")),
        "lr": above("lr", lr, 0.0),
        "seed": above("seed", seed, -1),
        "check": check,
    }
    raise typer.Exit(_train(plan, chosen, as_json))


def runnable(wishes: Wishes) -> Plan:
    """The plan; refused where these ranks cannot run it."""
    plan = resolve(wishes)
    weights(plan.shape)  # refuses what cannot be built
    if plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"train forks a process for every rank, and {plan.layout.world} are too many for one "
            f"machine: lower the degrees to at most {_MOST_RANKS} ranks"
        )
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"schedule {plan.schedule.name} is asynchronous, which train does not run: choose "
            "another, such as 1f1b or zb-h1"
        )
    if plan.shape.dropout:
        note = "dropout is 0: many ranks and one cannot drop the same activations"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


def _train(plan: Plan, chosen: dict[str, Any], as_json: bool) -> int:
    """Run and print; the exit code."""
    # Here, so that a mistake on the command line is answered before torch is loaded.
    from fivefold.run.ranks import Pool, RankLost
    from fivefold.training import Settings, beside_the_plan, num_processes, source_of, train

    settings, began = Settings(**chosen), time.perf_counter()
    corpus = source_of(plan, settings.seed).corpus
    say: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    say(_head(plan, settings, str(corpus)))
    lines: list[StepLine] = []

    def on_step(line: StepLine) -> None:
        lines.append(line)
        say(step_line(line, settings.steps, plan.batch.tokens))

    try:
        with Pool(num_processes(plan, settings)) as pool:
            runs, verdict = train(pool, plan, settings, on_step)
    except RankLost as lost:
        who = "the one process" if lost.rank >= plan.layout.world else f"rank {lost.rank}"
        reason = f"lost {who} at {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json.dumps({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        return 1
    table = {
        **describe(plan, settings, str(corpus), lines),
        **_measured(beside_the_plan(plan, settings, runs)),
        "check": None if verdict is None else _check(verdict),
        "seconds": round(time.perf_counter() - began, 3),
    }
    typer.echo(json.dumps(table) if as_json else "\n".join(_tail(table)))
    return 0 if verdict is None or verdict.passed else 1


def step_line(line: StepLine, steps: int, tokens: int) -> str:
    """What users paste into bug reports."""
    words = [
        f"step {line.step}/{steps}",
        f"loss {line.loss:.4f}",
        f"norm {line.norm:.2f}",
        f"lr {line.lr:.1e}",
        f"{line.seconds * 1e3:.0f} ms",
        f"{_thousands(tokens / line.seconds)} tok/s",
    ]
    if line.fullest is not None:
        words.append(f"fullest expert {line.fullest:.1f}x")
    return " | ".join(words)


def _thousands(number: float) -> str:
    return f"{number:.0f}" if number < 1000 else f"{number / 1000:.1f}k"


def _head(plan: Plan, settings: Settings, corpus: str) -> str:
    layout = plan.layout
    masks = "document masks" if plan.packed else "no document masks"
    lines = [
        f"{plan.shape.name} on {layout}, ZeRO-{layout.zero}, {plan.schedule.name}, "
        f"{settings.dtype}: {counted(layout.world, 'rank')}, {counted(settings.steps, 'step')} of "
        "adamw",
        f"{plan.batch}",
        f"{corpus}; {masks}",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def describe(plan: Plan, settings: Settings, corpus: str, lines: list[StepLine]) -> dict[str, Any]:
    """The run as JSON, step by step."""
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        "schedule": plan.schedule.name,
        "dtype": settings.dtype,
        "corpus": corpus,
        "tokens_per_step": plan.batch.tokens,
        "steps": [line._asdict() for line in lines],
        "notes": list(plan.notes),
    }


def _measured(measured: Measured) -> dict[str, Any]:
    """Planned beside measured, as JSON."""
    held = {"planned": measured.planned_held, "measured": measured.held}
    moved = {"planned": measured.planned_moved, "measured": measured.moved}
    return {
        "memory": {
            "rank": measured.rank,
            "ranks_as_planned": measured.num_as_planned,
            **{name: {**asdict(each), "total": each.total} for name, each in held.items()},
        },
        "traffic": {
            "step": measured.step,
            "match": measured.moved_as_planned,
            **{
                name: {axis: one._asdict() for axis, one in axes.items()}
                for name, axes in moved.items()
            },
        },
    }


def _check(check: Check) -> dict[str, Any]:
    return {**asdict(check), "passed": check.passed}


def _tail(table: dict[str, Any]) -> Iterator[str]:
    """What is said after the last step."""
    yield ""
    yield from _memory_lines(table["memory"], table["world"])
    yield ""
    yield from _traffic_lines(table["traffic"])
    if table["check"] is None:
        yield f"\ndone in {table['seconds']:.1f} s"
        return
    yield ""
    yield from _check_lines(table)
    verdict = "PASS" if table["check"]["passed"] else "FAIL"
    yield f"{verdict} in {table['seconds']:.1f} s"


def _memory_lines(memory: dict[str, Any], world: int) -> Iterator[str]:
    """Bytes of the rank that holds most."""
    head = f"bytes of rank {memory['rank']}, which holds most"
    yield f"{head:<34}{'planned':>14}{'measured':>14}"
    for name, word in _WORDS.items():
        planned, measured = memory["planned"][name], memory["measured"][name]
        mark = "" if planned == measured else "   differs"
        yield f"{word:<34}{planned:>14,}{measured:>14,}{mark}"
    yield (
        f"{memory['ranks_as_planned']} of {counted(world, 'rank')} hold what was planned, to the "
        "byte"
    )


def _traffic_lines(traffic: dict[str, Any]) -> Iterator[str]:
    """What all ranks sent on each axis in one step."""
    axes = sorted({*traffic["planned"], *traffic["measured"]})
    if not axes:
        yield "collectives: none planned, none measured"
        return
    head = f"moved in step {traffic['step']}, all ranks"
    yield f"{head:<34}{'bytes planned':>14}{'measured':>14}{'calls planned':>15}{'measured':>10}"
    none = {"calls": 0, "bytes": 0}
    for axis in axes:
        planned, measured = (traffic[name].get(axis, none) for name in ("planned", "measured"))
        yield (
            f"{axis:<34}{planned['bytes']:>14,}{measured['bytes']:>14,}"
            f"{planned['calls']:>15,}{measured['calls']:>10,}"
        )
    yield "every step as planned" if traffic["match"] else "this step differs from the plan"


def _check_lines(table: dict[str, Any]) -> Iterator[str]:
    """The losses beside those of one process."""
    check = table["check"]
    last = table["steps"][-1]["loss"]
    yield f"loss of step {len(table['steps'])}: {last:.9f}; one process: {check['loss']:.9f}"
    yield (
        f"largest difference of all steps: {check['difference']:.1e} nats, allowed "
        f"{check['allowed']:.1e}"
        + (
            ""
            if check["spread"] is None
            else f" (3 times the spread {check['spread']:.1e} of two runs of one process that sum "
            "in another order, at least 2e-06)"
        )
    )
    if check["routed"]:
        yield (
            f"routing flips: {check['flips']:,} of {check['routed']:,} (tokens times layers whose "
            "experts differ from those of one process)"
        )

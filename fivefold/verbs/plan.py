"""`fivefold plan`: resolve a job, or search its layout; say what it is, what it takes, and why."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fivefold.core import machine as machines
from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.layout import ContextKind
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.core.schedule.catalog import family
from fivefold.report import plan_text, plan_values, write_text
from fivefold.verbs import above, one_of, progress_bar, with_plan_options

if TYPE_CHECKING:  # what estimates needs numpy, whose import costs more than a plan without them
    from fivefold.planner import PlanAnswer, PlanRequest
    from fivefold.planner.estimate import Estimate

_NUMBERS = ("tp", "cp", "pp", "dp", "replicate", "ep", "etp", "zero", "chunks", "microbatch_size")
_FIXED = (*_NUMBERS, "schedule", "recompute", "context", "offload")
_KINDS = ("none", "selective", "full")
_OFFLOADS = ("none", "cpu", "nvme")
_SAID = ("zero", "schedule", "chunks", "microbatch_size", "recompute", "context")
_CLOSED = ("microbatches", "stage_layers", "gather", "sp")  # what a search cannot hold to


@with_plan_options
def run(
    wishes: Wishes,
    command: typer.Context,
    fix: Annotated[
        str | None, typer.Option(help='What a search keeps: "tp=8 zero=1 schedule=zb-v".')
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts in the ranked table.")] = 10,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole run: days and GPU-hours.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Money for a GPU-hour.")] = None,
    objective: Annotated[
        str, typer.Option(help="Best in: tokens (a second), gpus (fewest), gpu-hours (fewest).")
    ] = "tokens",
    headroom: Annotated[float, typer.Option(help="Share of the memory that stays free.")] = 0.05,
    precision: Annotated[
        str | None, typer.Option(help="Estimate in bf16, fp8, fp16 or fp32.")
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="compiled, eager, graphs: what blocks keep, and how they launch.")
    ] = "compiled",
    imbalance: Annotated[
        float | None, typer.Option(help="Load of the fullest expert over the mean; 1 is even.")
    ] = None,
    what_if: Annotated[
        str | None, typer.Option(help='The same job changed: "gpus=2x", "machine=gb200".')
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Each dimension alone.")] = False,
    sweep: Annotated[str | None, typer.Option(help="Curves: seq=4k..1m or gpus=8..16384.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as TOML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Resolve a job or search its layout: memory, time, and why."""
    options: dict[str, Any] = {
        "fix": fix,
        "top": above("top", top, 0),
        "tokens": None if tokens is None else _positive("tokens", tokens),
        "price": None if price is None else _positive("price", price),
        "objective": objective,
        "precision": precision,
        "how": _how(headroom, kernels, imbalance),
        "what_if": what_if,
        "compare": compare,
        "sweep": sweep,
        "output": output,
    }
    said = {name for name, value in command.params.items() if value not in (None, False, [])}
    is_open = "layout" not in said and not command.params["target"].endswith(".toml")
    _require_known(wishes.machine)
    if wishes.machine is None:
        _require_no_estimates(said)
        table, lines = _resolved(resolve(wishes), output)
    elif wishes.gpus is not None and is_open:
        table, lines = _searched(wishes, options, said)
    else:
        table, lines = _given(wishes, options)
    typer.echo(json.dumps(table) if as_json else "\n".join(lines))


Printed = tuple[dict[str, Any], list[str]]


def _how(headroom: float, kernels: str, imbalance: float | None) -> dict[str, Any]:
    """What estimates assume."""
    if not 0 <= headroom < 1:
        raise FivefoldError(f"--headroom {headroom}: give a share of the memory from 0 to below 1")
    return {
        "headroom": headroom,
        "kernels": one_of("kernels", kernels, ("compiled", "eager", "graphs")),
        "imbalance": 1.0 if imbalance is None else imbalance,
    }


def _require_no_estimates(said: set[str]) -> None:
    """Options that need a machine say so."""
    needs = ("fix", "tokens", "price", "what_if", "compare", "sweep", "precision", "imbalance")
    if given := [name for name in needs if name in said]:
        option = given[0].replace("_", "-")
        raise FivefoldError(
            f"--{option} is for estimates: say on what with --machine ({_known_machines()})"
        )


def _require_known(machine: str | None) -> None:
    """A machine that is not known is answered with all that are."""
    if machine is None:
        return
    try:
        machines.load(machine)
    except UnknownName as error:
        if _known_machines() in str(error):
            raise
        raise FivefoldError(f"{error} known machines: {_known_machines()}") from error


def _known_machines() -> str:
    return ", ".join(machines.presets())


def _resolved(plan: Plan, output: Path | None) -> Printed:
    if output is not None:
        write_text(output, plan.to_toml(output.parent))
    table = plan_values.describe(plan)
    return table, plan_values.render(plan, table)


def _given(wishes: Wishes, options: dict[str, Any]) -> Printed:
    """A plan whose layout is given, with its estimates."""
    from fivefold.planner import single
    from fivefold.planner.comparisons import parse_changes, stretched
    from fivefold.planner.why import takeaways

    if options["fix"] is not None or options["objective"] != "tokens":
        raise FivefoldError("--fix and --objective are for a search: leave --layout out")
    if options["compare"] or options["sweep"]:
        if wishes.gpus is None:
            wishes = replace(wishes, gpus=resolve(wishes).layout.world)
        return _tables(_inquiry(wishes, options, {}), options)
    began = time.perf_counter()
    plan = resolve(wishes)
    chosen: dict[str, Any] = dict(options["how"])
    chosen["precision"] = options["precision"] or wishes.precision
    table, lines = _resolved(plan, options["output"])
    found = single(plan, _machine(plan), **chosen)
    if options["what_if"] is not None:
        other = resolve(stretched(plan, parse_changes(options["what_if"])))
        return _what_if(found, single(other, _machine(other), **chosen), options["what_if"])
    why = plan_text.because(found, takeaways(found), None)
    table |= {"candidates": 1, "seconds": time.perf_counter() - began}
    table |= {"layouts": [plan_values.entry(found, why)]}
    table |= plan_values.costs(found, options["tokens"], options["price"])
    table |= {"notes": list(found.plan.notes)}
    more = (note for note in found.plan.notes if note not in plan.notes)
    return table, [*lines, *_detail(found, why, options), *(f"note      {one}" for one in more)]


def _machine(plan: Plan) -> Machine:
    assert plan.machine is not None, "estimates are for a machine"
    return plan.machine


def _detail(found: Estimate, why: list[str], options: dict[str, Any]) -> list[str]:
    return [
        *plan_text.detail(found),
        *plan_text.bill(found, options["tokens"], options["price"]),
        *plan_text.said("why", why),
    ]


def _searched(wishes: Wishes, options: dict[str, Any], said: set[str]) -> Printed:
    """The best layouts of the whole space."""
    if closed := [name for name in _CLOSED if name in said]:
        raise FivefoldError(
            f"--{closed[0].replace('_', '-')} is for a given layout: leave it out, or say --layout"
        )
    fixed = {name: getattr(wishes, name) for name in _SAID if name in said}
    fixed |= _pairs(options["fix"] or "")
    if "schedule" in fixed:
        fixed["schedule"] = family(fixed["schedule"]).name
    asked = _inquiry(wishes, options, fixed)
    if options["compare"] or options["sweep"]:
        return _tables(asked, options)
    found = _answer(asked, options)
    if options["what_if"] is not None:
        other = _answer(_changed(asked, options, fixed), options)
        return _what_if(found.plans[0], other.plans[0], options["what_if"])
    if options["output"] is not None:
        write_text(options["output"], found.plans[0].plan.to_toml(options["output"].parent))
    return _ranked(found, options)


def _inquiry(wishes: Wishes, options: dict[str, Any], fixed: dict[str, int | str]) -> PlanRequest:
    from fivefold.planner import PRECISIONS, inquiry

    precision = one_of("precision", options["precision"] or wishes.precision, PRECISIONS)
    machine = machines.load(wishes.machine or "")
    return inquiry(wishes, machine, fixed, precision=precision, **options["how"])


def _changed(
    asked: PlanRequest, options: dict[str, Any], fixed: dict[str, int | str]
) -> PlanRequest:
    from fivefold.planner.comparisons import changed, parse_changes

    question = asked.question
    now = {"gpus": question.gpus, "seq": question.seq, "batch": question.batch}
    wishes = replace(asked.wishes, batch=question.batch)
    return _inquiry(changed(wishes, parse_changes(options["what_if"]), **now), options, fixed)


def _answer(asked: PlanRequest, options: dict[str, Any]) -> PlanAnswer:
    from fivefold.planner import OBJECTIVES, answer, cheapest, fewest

    objective = one_of("objective", options["objective"], OBJECTIVES)
    find = {"tokens": answer, "gpus": fewest, "gpu-hours": cheapest}[objective]
    with progress_bar("search") as on_progress:
        return find(asked, options["top"], on_progress)


def _ranked(found: PlanAnswer, options: dict[str, Any]) -> Printed:
    """The table of the best, and all about the first."""
    from fivefold.planner.why import takeaways

    first, *others = found.plans
    why = plan_text.because(first, takeaways(first), others[0] if others else None)
    reasons = [why, *([f"{plan_text.loses(one, first)}"] for one in others)]
    question, notes = found.inquiry.question, list(found.inquiry.notes)
    if first.offload != "none":
        where = {"cpu": "in host memory", "nvme": "on local disks"}[first.offload]
        notes.append(
            f"states lie {where}, which no plan file says; the way there is counted, the host's "
            "own time is assumed"
        )
    table = {
        "model": found.inquiry.shape.name,
        "machine": found.inquiry.setting.machine.name,
        "precision": found.inquiry.setting.precision,
        "gpus": question.gpus,
        "seq": question.seq,
        "batch": question.batch,
        "candidates": found.candidates,
        "passed_over": found.passed_over,
        "seconds": found.seconds,
        "layouts": [
            plan_values.entry(one, reason) for one, reason in zip(found.plans, reasons, strict=True)
        ],
        "front": [plan_values.entry(one, []) for one in found.front],
        "notes": notes,
        **plan_values.costs(first, options["tokens"], options["price"]),
    }
    lines = [
        f"{table['model']} on {question.place} of {table['machine']}: {question.batch:,} "
        f"sequences of {question.seq:,} tokens a step, {table['precision']}",
        f"{found.candidates:,} layouts weighed and {found.passed_over:,} passed over in "
        f"{found.seconds:.1f} s; those below were played",
        "",
        *plan_text.ranked(found.plans),
        "",
        f"first     {first.plan.batch}",
        *_detail(first, why, options),
        *plan_text.front(found.front),
        *(f"note      {note}" for note in (*notes, *first.plan.notes)),
    ]
    return table, lines


def _what_if(before: Estimate, after: Estimate, words: str) -> Printed:
    table = {
        "what_if": words,
        "layouts": [plan_values.entry(before, []), plan_values.entry(after, [])],
    }
    return table, plan_values.before_after(before, after, words)


def _tables(asked: PlanRequest, options: dict[str, Any]) -> Printed:
    """Each dimension alone, or curves."""
    from fivefold.planner.comparisons import alone, parse_sweep, sweep

    if options["compare"]:
        found = list(alone(asked))
        return {"strategies": plan_values.compared_json(found)}, plan_values.compared(found)
    axis, values = parse_sweep(options["sweep"])
    with progress_bar("sweep") as on_progress:
        points = list(sweep(asked, axis, values, on_progress))
    return (
        {"axis": axis, "points": plan_values.curves_json(axis, points)},
        plan_values.curves(axis, values, points),
    )


def _positive(option: str, given: float) -> float:
    if not 0 < given < 1e30:
        raise FivefoldError(f"--{option} {given}: give a number above 0")
    return given


def _pairs(text: str) -> dict[str, int | str]:
    """`tp=8 schedule=zb-v` as a table; typos are named."""
    found: dict[str, int | str] = {}
    for word in text.replace(",", " ").split():
        key, _, value = word.partition("=")
        if key not in _FIXED:
            raise UnknownName("--fix", key, _FIXED)
        if not value or (key in _NUMBERS and not value.isdecimal()):
            raise BadFile(
                "--fix", [f"{word!r}: write {key}= and a value, as in tp=8 schedule=1f1b"]
            )
        found[key] = int(value) if value.isdecimal() else value
    words = {"recompute": _KINDS, "context": get_args(ContextKind), "offload": _OFFLOADS}
    for key, known in words.items():
        if key in found and found[key] not in known:
            raise UnknownName(f"--fix {key}", str(found[key]), known)
    return found

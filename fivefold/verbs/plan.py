"""`fivefold plan`: resolve a job or search its layout; print memory, time and reasons."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold import verbs
from fivefold.core import machine as machines
from fivefold.core.compute_budget import TOKENS_PER_PARAMETER, USUAL_MFU, parse_budget
from fivefold.core.errors import FivefoldError, counted
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.core.precision import PRECISIONS, plan_keys
from fivefold.core.schedule.catalog import family
from fivefold.report import plan_text, plan_values, write_text
from fivefold.report.formula_text import budget_answer, textbook_answer
from fivefold.report.great_run_text import run_answer
from fivefold.report.job_table_text import job_table_answer

if TYPE_CHECKING:  # estimates need numpy, whose import takes longer than a plan without estimates
    from fivefold.planner import PlanRequest, PlanResult
    from fivefold.planner.estimate import Estimate

_ALSO_FIXED = ("zero", "schedule", "chunks", "microbatch_size", "recompute", "context")
_NOT_SEARCHED = ("microbatches", "stage_layers", "gather", "sp")  # only for a given layout


Printed = tuple[dict[str, Any], list[str]]


@partial(verbs.with_plan_options, default_target="")
def run(
    plan_options: PlanOptions,
    command: typer.Context,
    fix: verbs.FixOption = None,
    top: Annotated[int, typer.Option(help="Layouts in the ranked table.")] = 10,
    tokens: verbs.TokensOption = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU-hour.")] = None,
    objective: verbs.ObjectiveOption = "tokens",
    headroom: Annotated[float, typer.Option(help="Share of the memory to leave free.")] = 0.05,
    precision: verbs.PrecisionOption = None,
    kernels: verbs.KernelsOption = "compiled",
    stack: verbs.StackOption = None,
    imbalance: verbs.ImbalanceOption = None,
    what_if: verbs.WhatIfOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Each dimension alone.")] = False,
    sweep: verbs.SweepOption = None,
    table: verbs.TableOption = None,
    great_run: verbs.RunOption = None,
    textbook: verbs.TextbookOption = False,
    budget: verbs.BudgetOption = None,
    tokens_per_parameter: verbs.RatioOption = TOKENS_PER_PARAMETER,
    mfu: verbs.MfuOption = USUAL_MFU,
    output: verbs.OutputOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Resolve a job or search its layout: memory, time and reasons."""
    options: dict[str, Any] = {
        "fix": fix,
        "top": verbs.above("top", top, 0),
        "tokens": None if tokens is None else verbs.positive("tokens", tokens),
        "price": None if price is None else verbs.positive("price", price),
        "objective": objective,
        "precision": precision,
        "how": _how(headroom, kernels, imbalance, stack),
        "what_if": what_if,
        "compare": compare,
        "sweep": sweep,
        "table": table,
        "output": output,
        "great_run": great_run,
        "textbook": textbook,
        "budget": budget,
        "ratio": tokens_per_parameter,
        "mfu": mfu,
        "as_json": as_json,
    }
    verbs.require_known(plan_options.machine)
    printed = _answer_of(_as_estimated(plan_options, kernels, precision), options, command)
    typer.echo(verbs.json_text(printed[0]) if as_json else "\n".join(printed[1]))


def _answer_of(
    plan_options: PlanOptions, options: dict[str, Any], command: typer.Context
) -> Printed:
    """What the command line asks: a run, a formula, a given layout or a search."""
    set_options = {name for name, value in command.params.items() if value not in (None, False, [])}
    is_open = "layout" not in set_options and not command.params["target"].endswith(".toml")
    if options["great_run"] is not None:
        verbs.only_with(command, "run", _OF_A_RUN)
        return _great_run(options["great_run"], options)
    if options["budget"] is not None:
        verbs.only_with(command, "budget", _OF_A_BUDGET)
        spent = parse_budget(options["budget"], options["mfu"], options["precision"] or "bf16")
        return budget_answer(spent, options["ratio"], plan_options.model or None)
    if options["textbook"]:
        verbs.only_with(command, "textbook", _OF_A_TEXTBOOK)
        return textbook_answer(plan_options, is_open)
    if alone := [each for each in ("mfu", "tokens_per_parameter") if verbs.typed(command, each)]:
        raise FivefoldError(f"--{alone[0].replace('_', '-')} is for --budget: give both")
    return _planned(plan_options, options, set_options, is_open)


def _as_estimated(options: PlanOptions, kernels: str, precision: str | None) -> PlanOptions:
    """The plan says in which precision, and whether with compiled kernels."""
    keys: dict[str, Any] = plan_keys(precision) if precision in PRECISIONS else {}
    return replace(options, train=replace(options.train, compile=kernels != "eager"), **keys)


_OF_A_RUN = ("great_run", "stack", "headroom", "output")
_OF_A_BUDGET = ("target", "budget", "tokens_per_parameter", "mfu", "precision")
_OF_A_TEXTBOOK = (
    *("target", "textbook", "layout", "gpus", "machine", "seq", "batch", "microbatch_size"),
    *("microbatches", "schedule", "chunks", "set"),
)


def _great_run(name: str, options: dict[str, Any]) -> Printed:
    """A published run beside our estimate; `-o` writes its plan."""
    how = options["how"]
    plan, table, lines = run_answer(name, how["headroom"], how["stack"])
    if (output := options["output"]) is not None:
        write_text(output, plan.to_toml(output.parent))
    return table, lines


def _planned(
    plan_options: PlanOptions, options: dict[str, Any], set_options: set[str], is_open: bool
) -> Printed:
    """A search over GPUs, which need a machine; else the estimate of one layout, or without a
    machine the plan alone."""
    if plan_options.gpus is not None and is_open:
        plan_options = verbs.with_machine(plan_options, options["as_json"])
        return _searched(plan_options, options, set_options)
    if plan_options.machine is None:
        _require_no_estimates(set_options)
        return _resolved(resolve(plan_options), options["output"])
    return _given(plan_options, options)


def _how(
    headroom: float, kernels: str, imbalance: float | None, stack: str | None
) -> dict[str, Any]:
    """The assumptions of the estimates."""
    if stack is not None:
        _require_known_stack(stack, kernels)
    if not 0 <= headroom < 1:
        raise FivefoldError(f"--headroom {headroom}: give a share of the memory from 0 to below 1")
    return {
        "headroom": headroom,
        "kernels": verbs.one_of("kernels", kernels, ("compiled", "eager", "graphs")),
        "imbalance": 1.0 if imbalance is None else imbalance,
        "stack": stack,
    }


def _require_known_stack(stack: str, kernels: str) -> None:
    """Refuse an unknown stack, and what only our own has."""
    from fivefold.cost.stack_presets import OUR_OWN, load_preset

    if stack != OUR_OWN:
        load_preset(stack)
    if kernels != "compiled":
        raise FivefoldError(
            f"--kernels {kernels} is for fivefold's own software: leave it or --stack out"
        )


def _require_no_estimates(set_options: set[str]) -> None:
    """Refuse options that need a machine."""
    needs = ("fix", "tokens", "price", "what_if", "compare", "sweep", "table", "precision")
    needs = (*needs, "imbalance", "stack")
    if given := [name for name in needs if name in set_options]:
        option = given[0].replace("_", "-")
        raise FivefoldError(
            f"--{option} is for estimates: name the machine with --machine "
            f"({verbs.known_machines()})"
        )


def _resolved(plan: Plan, output: Path | None) -> Printed:
    if output is not None:
        write_text(output, plan.to_toml(output.parent))
    table = plan_values.describe(plan)
    return table, plan_values.render(plan, table)


def _given(plan_options: PlanOptions, options: dict[str, Any]) -> Printed:
    """A plan with a given layout, and its estimates."""
    from fivefold.planner import estimate_on_machine
    from fivefold.planner.comparisons import parse_changes, scale_plan
    from fivefold.planner.neighbours import compare_neighbours

    if options["fix"] is not None or options["objective"] != "tokens":
        raise FivefoldError("--fix and --objective are for a search: leave --layout out")
    if options["compare"] or options["sweep"] or options["table"]:
        plan = resolve(plan_options)
        plan_options = replace(plan_options, gpus=plan.layout.world)
        if options["table"]:
            plan_options = replace(plan_options, seq=plan.batch.seq, batch=plan.batch.sequences)
        return _tables(_inquiry(plan_options, options, {}), options, plan)
    began = time.perf_counter()
    plan = resolve(plan_options)
    chosen: dict[str, Any] = dict(options["how"])
    chosen["precision"] = options["precision"] or plan_options.precision
    table, lines = _resolved(plan, options["output"])
    found = estimate_on_machine(plan, _machine(plan), **chosen)
    if options["what_if"] is not None:
        other = resolve(scale_plan(plan, parse_changes(options["what_if"])))
        changed = estimate_on_machine(other, _machine(other), **chosen)
        return _what_if(found, changed, options["what_if"])
    why = plan_text.reasons_text(found, compare_neighbours(found), None)
    table |= {"stack": found.setting.stack.name}
    table |= {"candidates": 1, "seconds": time.perf_counter() - began}
    table |= {"layouts": [plan_values.estimate_json(found, why)]}
    table |= plan_values.run_costs(found, options["tokens"], options["price"])
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
        *plan_text.labelled("why", why),
    ]


def _searched(plan_options: PlanOptions, options: dict[str, Any], set_options: set[str]) -> Printed:
    """The best layouts of the search space."""
    from fivefold.planner.space import parse_fixed

    if closed := [name for name in _NOT_SEARCHED if name in set_options]:
        raise FivefoldError(
            f"--{closed[0].replace('_', '-')} is for a given layout: leave it out, or give --layout"
        )
    fixed = {name: getattr(plan_options, name) for name in _ALSO_FIXED if name in set_options}
    fixed |= parse_fixed(options["fix"] or "")
    if "schedule" in fixed:
        fixed["schedule"] = family(fixed["schedule"]).name
    asked = _inquiry(plan_options, options, fixed)
    if options["compare"] or options["sweep"] or options["table"]:
        return _tables(asked, options)
    if options["what_if"] is not None:
        both = (asked, _changed(asked, options, fixed))
        return _what_if(*(_answer(one, options, 1).plans[0] for one in both), options["what_if"])
    found = _answer(asked, options, options["top"])
    if options["output"] is not None:
        write_text(options["output"], found.plans[0].plan.to_toml(options["output"].parent))
    return _ranked(found, options)


def _inquiry(
    plan_options: PlanOptions, options: dict[str, Any], fixed: dict[str, int | str]
) -> PlanRequest:
    from fivefold.planner import plan_request

    asked = options["precision"] or plan_options.precision
    precision = verbs.one_of("precision", asked, PRECISIONS)
    machine = machines.load(plan_options.machine or "")
    return plan_request(plan_options, machine, fixed, precision=precision, **options["how"])


def _changed(
    asked: PlanRequest, options: dict[str, Any], fixed: dict[str, int | str]
) -> PlanRequest:
    from fivefold.planner.comparisons import apply_changes, parse_changes

    question = asked.space
    now = {"gpus": question.gpus, "seq": question.seq, "batch": question.batch}
    plan_options = replace(asked.options, batch=question.batch)
    changed = apply_changes(plan_options, parse_changes(options["what_if"]), **now)
    return _inquiry(changed, options, fixed)


def _answer(asked: PlanRequest, options: dict[str, Any], top: int) -> PlanResult:
    from fivefold.planner import OBJECTIVES, best_plans, fewest_gpu_hours, fewest_gpus

    objective = verbs.one_of("objective", options["objective"], OBJECTIVES)
    find = {"tokens": best_plans, "gpus": fewest_gpus, "gpu-hours": fewest_gpu_hours}[objective]
    with verbs.progress_bar("search") as bar:
        return find(asked, top, bar.update)


def _ranked(found: PlanResult, options: dict[str, Any]) -> Printed:
    """A table of the best layouts, and details of the first."""
    from fivefold.planner.neighbours import compare_neighbours

    first, *others = found.plans
    fastest = found.fastest.step
    why = plan_text.reasons_text(first, compare_neighbours(first), found.rival, found.simpler)
    reasons = [why, *([plan_text.loses(one, first, fastest)] for one in others)]
    question, notes = found.request.space, [*found.request.notes, *found.warnings]
    if first.offload != "none":
        where = {"cpu": "in host memory", "nvme": "on local disks"}[first.offload]
        notes.append(
            f"optimizer states are {where} (offload = {first.plan.options.train.offload}); the "
            "transfer is counted, the time of the host is assumed"
        )
    table = {
        "model": found.request.shape.name,
        "machine": found.request.setting.machine.name,
        "precision": found.request.setting.precision,
        "stack": found.request.setting.stack.name,
        "gpus": question.gpus,
        "seq": question.seq,
        "batch": question.batch,
        "candidates": found.candidates,
        "passed_over": found.passed_over,
        "seconds": found.seconds,
        "equal_bar": first.accuracy.equal,
        "fastest": plan_values.estimate_json(found.fastest, []),
        "layouts": [
            plan_values.estimate_json(one, reason)
            | {"equal": one.accuracy.within(one.step, fastest)}
            for one, reason in zip(found.plans, reasons, strict=True)
        ],
        "front": [plan_values.estimate_json(one, []) for one in found.front],
        "notes": notes,
        **plan_values.run_costs(first, options["tokens"], options["price"]),
    }
    lines = [
        f"{table['model']} on {question.gpus_text} of {table['machine']}: "
        f"{counted(question.batch, 'sequence')} of {question.seq:,} tokens a step, "
        f"{table['precision']}",
        f"{counted(found.candidates, 'layout')} estimated and {found.passed_over:,} skipped in "
        f"{found.seconds:.1f} s; those below were simulated",
        "",
        *plan_text.ranked(found.plans, fastest),
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
        "layouts": [plan_values.estimate_json(before, []), plan_values.estimate_json(after, [])],
    }
    return table, plan_values.before_after(before, after, words)


def _tables(asked: PlanRequest, options: dict[str, Any], given: Plan | None = None) -> Printed:
    """The tables of `--table`, `--compare` and `--sweep`."""
    from fivefold.planner.comparisons import single_axis_strategies, sweep, sweep_values
    from fivefold.planner.job_tables import TABLES, job_table

    if options["table"]:
        chosen = job_table(verbs.one_of("table", options["table"], TABLES), asked, given)
        return job_table_answer(chosen)

    if options["compare"]:
        found = list(single_axis_strategies(asked))
        best = _first_choice(asked)
        table: dict[str, Any] = {"strategies": plan_values.strategies_json(found)}
        table["best"] = None if best is None else plan_values.estimate_json(best, [])
        return table, plan_values.strategies_text(found, best)
    axis, values = sweep_values(asked, options["sweep"])
    with verbs.progress_bar("sweep") as bar:
        points = list(sweep(asked, axis, values, bar.update))
    table = {"axis": axis, "points": plan_values.sweep_json(axis, points)}
    return table, plan_values.sweep_text(axis, values, points)


def _first_choice(asked: PlanRequest) -> Estimate | None:
    """The first choice of a search, or None if nothing fits."""
    from fivefold.planner import best_plans

    try:
        return best_plans(asked, 1).plans[0]
    except FivefoldError:
        return None

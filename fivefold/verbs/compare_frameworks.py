"""`fivefold compare-frameworks`: price the best layout that each framework can express."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold import verbs
from fivefold.api.bridging import is_foreign
from fivefold.api.frameworks import compare_frameworks
from fivefold.api.jobs import GivenJob
from fivefold.core.plan import PlanOptions


@verbs.with_plan_options
def run(
    plan_options: PlanOptions,
    command: typer.Context,
    stack: Annotated[
        bool, verbs.Key("Price each as its own software runs it, where known.")
    ] = False,
    headroom: verbs.HeadroomKey = 0.05,
    precision: verbs.PrecisionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Price the best layout that each framework can express, beside fivefold's best."""
    verbs.only_with(command, "gpus", _TAKEN)
    verbs.require_known(plan_options.machine)
    target: str = command.params["target"]
    closed = target.endswith(".toml") or is_foreign(target)
    if plan_options.gpus is not None:
        plan_options = verbs.with_machine(plan_options, as_json)
    job = GivenJob(plan_options, frozenset(), not closed)
    with verbs.shown_progress("compare") as on_progress:
        comparison = compare_frameworks(
            job, stacks=stack, headroom=headroom, precision=precision, on_progress=on_progress
        )
    typer.echo(verbs.json_text(comparison.to_json()) if as_json else str(comparison))


_TAKEN = ("target", "gpus", "machine", "seq", "batch", "set", "stack", "headroom", "precision")

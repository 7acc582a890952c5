"""`fivefold launch`: write the script that starts a plan on a cluster; each line says why."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.commands.options import json_text, typed
from fivefold.core import FivefoldError, counted
from fivefold.core.plan import Plan, options_from, resolve
from fivefold.launch import require_trainable
from fivefold.launch.scripts import (
    LaunchJob,
    LaunchRequest,
    Target,
    job_of,
    known_target,
    kubernetes_manifest,
    slurm_script,
    torchrun_script,
)
from fivefold.render import write_text

_WRITERS = {
    "slurm": slurm_script,
    "torchrun": torchrun_script,
    "kubernetes": kubernetes_manifest,
}
_ONLY_FOR: dict[str, Target] = {
    **dict.fromkeys(("partition", "account", "time"), "slurm"),
    **dict.fromkeys(("master",), "torchrun"),
    **dict.fromkeys(("image", "claim"), "kubernetes"),
}
_USUAL = LaunchRequest(plan="")
_ASKED = [field.name for field in fields(LaunchRequest) if field.name not in ("plan", "file")]


def run(
    command: typer.Context,
    target: Annotated[str, typer.Argument(help="slurm, torchrun or kubernetes.")],
    plan_file: Annotated[str, typer.Argument(metavar="PLAN.toml", help="Of `fivefold plan -o`.")],
    output: Annotated[Path | None, typer.Option("-o", help="Write the script to a file.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Run folder, which all nodes share (default: runs/NAME).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job (default: the model's).")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of a node (default: the machine's; 8 without one).")
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each rank (default 8).")] = None,
    restarts: Annotated[
        int, typer.Option(help="How often ranks start again after a failure.")
    ] = _USUAL.restarts,
    grace: Annotated[
        int,
        typer.Option(help="Seconds to write a checkpoint before the time limit or an eviction."),
    ] = _USUAL.grace,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    time: Annotated[str, typer.Option(help="Slurm's time limit, DAYS-HH:MM:SS.")] = _USUAL.time,
    master: Annotated[
        str | None, typer.Option(help="torchrun's first node, HOST or HOST:PORT.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Kubernetes: container image with fivefold.")
    ] = None,
    claim: Annotated[
        str, typer.Option(help="Kubernetes: claim of the volume that all pods share.")
    ] = _USUAL.claim,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="A test of 20 steps: allows default data, steps and saves on many nodes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the script that starts a plan under Slurm, torchrun or Kubernetes."""
    chosen = known_target(target)
    for option, only in _ONLY_FOR.items():
        if chosen != only and typed(command, option):
            raise FivefoldError(f"--{option} is for {only}, not for {chosen}: leave it out")
    request_options = {name: command.params[name] for name in _ASKED}
    file = None if output is None else str(output)
    plan = _read(plan_file)
    job = job_of(chosen, plan, LaunchRequest(plan=plan_file, file=file, **request_options))
    _print(plan, job, _WRITERS[chosen](plan, job), output, as_json)


def _read(plan_file: str) -> Plan:
    """The plan, which `train` must be able to run."""
    if not plan_file.endswith(".toml"):
        raise FivefoldError(
            f"{plan_file!r} is no plan file: write one with `fivefold plan MODEL -o plan.toml`"
        )
    plan = resolve(options_from(plan_file, {}))
    require_trainable(plan)
    return plan


def _print(plan: Plan, job: LaunchJob, text: str, output: Path | None, as_json: bool) -> None:
    """Write the script to its file, or print it."""
    if output is not None:
        write_text(output, text)
    if as_json:
        typer.echo(json_text({**_table(plan, job, output), "script": text}))
    elif output is None:
        typer.echo(text, nl=False)
    else:
        size = f"{counted(job.nodes, 'node')}, {counted(job.per_node, 'rank')} on each"
        typer.echo(f"{output}: {plan.shape.name} in {plan.layout}, {size}\nstart it: {job.start}")


def _table(plan: Plan, job: LaunchJob, output: Path | None) -> dict[str, Any]:
    return {
        "target": job.target,
        "plan": job.request.plan,
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "nodes": job.nodes,
        "gpus_per_node": job.per_node,
        "device": job.device or "auto",
        "name": job.name,
        "run": job.out,
        "start": job.start,
        "file": None if output is None else str(output),
    }

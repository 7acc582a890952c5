"""`fivefold launch`: write the script that starts a plan on a cluster; each line says why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.commands.options import print_answer
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


def run(
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
    script = launch(
        target,
        plan_file,
        output=output,
        out=out,
        name=name,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        restarts=restarts,
        grace=grace,
        partition=partition,
        account=account,
        time=time,
        master=master,
        image=image,
        claim=claim,
        smoke=smoke,
    )
    print_answer(script, as_json)


@dataclass(frozen=True)
class LaunchScript:
    """The script that starts a plan on a cluster, and the command that starts the script.

    `str()` is the text of `fivefold launch`, `to_json()` its JSON.
    """

    plan: Plan
    job: LaunchJob
    script: str
    output: Path | None  # the file that it was written to

    def to_json(self) -> dict[str, Any]:
        """What `fivefold launch --json` prints."""
        plan, job = self.plan, self.job
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
            "file": None if self.output is None else str(self.output),
            "script": self.script,
        }

    def __str__(self) -> str:
        if self.output is None:
            return self.script.removesuffix("\n")
        plan, job = self.plan, self.job
        size = f"{counted(job.nodes, 'node')}, {counted(job.per_node, 'rank')} on each"
        head = f"{self.output}: {plan.shape.name} in {plan.layout}, {size}"
        return f"{head}\nstart it: {job.start}"


def launch(
    target: str,
    plan: str | Path,
    *,
    output: str | Path | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    gpus_per_node: int | None = None,
    cpus: int | None = None,
    restarts: int = _USUAL.restarts,
    grace: int = _USUAL.grace,
    partition: str | None = None,
    account: str | None = None,
    time: str = _USUAL.time,
    master: str | None = None,
    image: str | None = None,
    claim: str = _USUAL.claim,
    smoke: bool = False,
) -> LaunchScript:
    """The script that starts the plan of a file under slurm, torchrun or kubernetes.

    With `output` it is written to a file. `out` is the run folder, which all nodes share.
    """
    chosen = known_target(target)
    request = LaunchRequest(
        plan=str(plan),
        out=None if out is None else str(out),
        name=name,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        restarts=restarts,
        grace=grace,
        partition=partition,
        account=account,
        time=time,
        master=master,
        image=image,
        claim=claim,
        smoke=smoke,
        file=None if output is None else str(output),
    )
    for option, only in _ONLY_FOR.items():
        if chosen != only and getattr(request, option) != getattr(_USUAL, option):
            raise FivefoldError(f"--{option} is for {only}, not for {chosen}: leave it out")
    # The plan, which `train` must be able to run.
    plan_file = str(plan)
    if not plan_file.endswith(".toml"):
        raise FivefoldError(
            f"{plan_file!r} is no plan file: write one with `fivefold plan MODEL -o plan.toml`"
        )
    launched = resolve(options_from(plan_file, {}))
    require_trainable(launched)
    job = job_of(chosen, launched, request)
    script = _WRITERS[chosen](launched, job)
    file = None if output is None else Path(output)
    if file is not None:
        write_text(file, script)
    return LaunchScript(launched, job, script, file)

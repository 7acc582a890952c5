"""A script for every node: torchrun starts one rank for each GPU, or so many on the CPU.

torchrun restarts ranks on all nodes if one is lost. Nodes meet at a store on the first of them, and
a node that comes back joins the others. The pods of `kubernetes.py` run the same command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from fivefold.core.plan import Plan
from fivefold.launch.scripts.script import LaunchJob, Reasoned, explained, paths

PORT = 29400


def torchrun_script(plan: Plan, job: LaunchJob) -> str:
    """Generate the script of a node; all nodes run the same."""
    note = "Options of fivefold train may follow, as in --steps 10. A run that exists is resumed."
    if job.nodes > 1:
        note = f"It is the same on all {job.nodes} nodes: start it on each. {note}"
    lines = [
        "#!/bin/bash",
        *job.head(plan, note),
        Reasoned("An unset variable or a failed command ends the script.", "set -euo pipefail"),
        "",
        *paths(job),
        *_meeting(job),
        *settings(job),
        "",
    ]
    meeting_point = "on localhost" if job.nodes == 1 else "at the first node"
    tail = '-m fivefold train "$plan" --out "$run"' + job.train + ' "$@"'
    logs = Reasoned(
        "What ranks print goes to the terminal and to files, by rank and by start.",
        '--log-dir="$run/logs" --tee=3',
    )
    command = command_lines(job, meeting_point, [logs], tail)
    end = Reasoned(
        "In place of this shell, so that signals reach torchrun.", 'exec "${command[@]}"'
    )
    return "\n".join([*explained(lines), *command, *explained([end])]) + "\n"


def _meeting(job: LaunchJob) -> Iterator[Reasoned | str]:
    """Where the nodes meet; one node needs no place."""
    if job.nodes == 1:
        return
    if job.request.master is None:
        yield Reasoned(
            "The first node, by a name that the others know: set it when you start the script.",
            "endpoint=${MASTER_ADDR:?set it to the name of the first node}:"
            f"${{MASTER_PORT:-{PORT}}}",
        )
        return
    host, _, port = job.request.master.partition(":")
    yield Reasoned(
        "The first node and a free port there, which all others reach by this name.",
        f"endpoint={shlex.quote(f'{host}:{port or PORT}')}",
    )


def settings(job: LaunchJob) -> list[Reasoned | str]:
    """Environment variables of torchrun and its ranks."""
    return [
        Reasoned(
            "As many threads as cores for each rank; else every rank would take all of the node.",
            f"export OMP_NUM_THREADS={job.cpus}",
        ),
        Reasoned(
            "TERM or Ctrl-C asks the ranks to stop: they write a checkpoint after the step. After "
            "so many seconds torchrun kills them (before torch 2.12 always after 30).",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.request.grace}",
        ),
    ]


def command_lines(
    job: LaunchJob, meeting_point: str, extra: list[Reasoned], tail: str
) -> Iterator[str]:
    """torchrun's command with its options, each after its reason."""
    meeting = [Reasoned(f"Its ranks meet {meeting_point}, at a free port.", "--standalone")]
    if job.nodes > 1:
        meeting = [
            Reasoned(
                f"torchrun on every node meets the others {meeting_point}. It numbers nodes by "
                "name, and ranks within a node.",
                f'--nnodes={job.nodes} --rdzv-backend=c10d --rdzv-endpoint="$endpoint"',
            ),
            Reasoned(
                "Nodes of another job that come to the same place are not let in.",
                f"--rdzv-id={job.name}",
            ),
        ]
    yield "command=("
    yield from explained(
        [
            "torchrun",
            *meeting,
            Reasoned(
                "A rank for each GPU." if job.device != "cpu" else "Ranks on CPUs, over gloo.",
                f"--nproc-per-node={job.per_node}",
            ),
            Reasoned(
                "If a rank is lost, all start again from the newest good checkpoint, so often.",
                f"--max-restarts={job.request.restarts}",
            ),
            *extra,
            Reasoned("The ranks.", tail),
        ],
        "    ",
    )
    yield ")"

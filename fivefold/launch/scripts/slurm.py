"""A script for `sbatch`: srun starts one task for each GPU, and each task is a rank.

Ranks read their numbers from Slurm, so that they lie on the nodes in Slurm's order, which follows
the network. A failed step is started again in the same job. Before the time limit the script asks
ranks to stop, and requeues the job: it resumes from the checkpoint that they wrote.
"""

from __future__ import annotations

from fivefold.core.plan import Plan
from fivefold.launch.scripts.script import LaunchJob, Reasoned, explained, paths, waiting


def slurm_script(plan: Plan, job: LaunchJob) -> str:
    """Generate the script of a job."""
    note = "Options of fivefold train may follow, as in --steps 10. A run that exists is resumed."
    lines = [
        "#!/bin/bash",
        *job.head(plan, note),
        *explained(_directives(plan, job)),
        "",
        *explained(_settings(job)),
        "",
        *explained(_traps(job)),
        "",
        *explained(_attempts(job)),
    ]
    return "\n".join(lines) + "\n"


def _directives(plan: Plan, job: LaunchJob) -> list[Reasoned | str]:
    """What Slurm is asked for."""
    request, machine = job.request, plan.machine
    node_lines: list[Reasoned | str] = []
    if machine is not None and job.per_node == machine.gpus_per_node:
        node_lines = [
            Reasoned(
                "The ranks use every GPU of a node, so they take its cores and memory too.",
                "#SBATCH --exclusive",
            ),
            "#SBATCH --mem=0",
        ]
    names = {"partition": "The queue.", "account": "Who is charged."}
    return [
        Reasoned("The name in squeue, and of the log.", f"#SBATCH --job-name={job.name}"),
        *(
            Reasoned(why, f"#SBATCH --{option}={getattr(request, option)}")
            for option, why in names.items()
            if getattr(request, option) is not None
        ),
        Reasoned(
            f"{plan.layout} has {plan.layout.world} ranks, and a node has {job.per_node}.",
            f"#SBATCH --nodes={job.nodes}",
        ),
        Reasoned("A task is a rank, and has a GPU.", f"#SBATCH --ntasks-per-node={job.per_node}"),
        Reasoned(
            "Of the node, not of the task: a rank takes the GPU with its local number, and reaches "
            "the others over NVLink only if it may see them.",
            f"#SBATCH --gpus-per-node={job.per_node}",
        ),
        Reasoned(
            "Cores of a rank, which launches kernels, reads data and writes checkpoints.",
            f"#SBATCH --cpus-per-task={job.cpus}",
        ),
        *node_lines,
        Reasoned(
            "The job may run that long at a time. A longer run goes on in the same job, requeued.",
            f"#SBATCH --time={request.time}",
        ),
        Reasoned(
            f"{request.grace} s before that, Slurm sends USR1 to this script (B: not to the "
            "ranks): time to write a checkpoint.",
            f"#SBATCH --signal=B:USR1@{request.grace}",
        ),
        Reasoned(
            "Slurm may start the job again, after a lost node, a preemption or the requeue below.",
            "#SBATCH --requeue",
        ),
        Reasoned(
            "Rank 0 prints the steps, every rank its errors; %x is the name, %j the job's number.",
            "#SBATCH --output=%x-%j.log",
        ),
        Reasoned("A job that starts again continues its log.", "#SBATCH --open-mode=append"),
    ]


def _settings(job: LaunchJob) -> list[Reasoned | str]:
    """The environment of the ranks; sbatch passes on the one in which it is called."""
    return [
        Reasoned(
            "An unset variable or a failed command ends the script. Environments (modules, a venv) "
            "come from where sbatch is called, or are loaded here.",
            "set -euo pipefail",
        ),
        *paths(job),
        Reasoned(
            "Ranks meet at the first node of the job, and so does every start of the job.",
            'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        ),
        Reasoned(
            "The port follows from the job's number, so that jobs on one node do not meet.",
            "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        ),
        "export MASTER_ADDR MASTER_PORT",
        Reasoned(
            "As many threads as cores; else every rank would take all cores of the node.",
            f"export OMP_NUM_THREADS={job.cpus}",
        ),
    ]


def _traps(job: LaunchJob) -> list[Reasoned | str]:
    """What the script does when Slurm signals it."""
    return [
        "stop=",
        Reasoned(
            "Before the time limit: TERM to all ranks, which write a checkpoint after the step and "
            "end. scancel signals the steps of a job, and not this script.",
            "trap 'stop=requeue; scancel --signal=TERM \"$SLURM_JOB_ID\" || true' USR1",
        ),
        Reasoned(
            "Cancelled or preempted: Slurm has sent TERM to the ranks itself, and nothing is to be "
            "started after them.",
            "trap 'stop=end' TERM",
        ),
    ]


def _attempts(job: LaunchJob) -> list[Reasoned | str]:
    """The ranks, started again as often as they may fail."""
    body = explained(
        [
            Reasoned(
                "One task for each rank, with numbers that count up within a node (block). The "
                "first one that fails ends all others. srun does not take the number of cores from "
                "sbatch.",
                "srun --kill-on-bad-exit=1 --distribution=block "
                f"--cpus-per-task={job.cpus} \\\n"
                f'    python -m fivefold train "$plan" --out "$run"{job.train} "$@" &',
            ),
            *waiting("srun"),
            Reasoned(
                "Done, or stopped, or refused by every rank (code 2), which would be repeated.",
                'if [ -n "$stop" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then break; fi',
            ),
            Reasoned(
                "Else a rank was lost: all start again, from the newest good checkpoint.",
                'echo "attempt $attempt ended with code $code" >&2',
            ),
        ],
        "    ",
    )
    return [
        f"for attempt in $(seq 0 {job.request.restarts}); do",
        *body,
        "done",
        "",
        Reasoned(
            "Stopped by the time limit: the job goes back to the queue, and resumes.",
            'if [ "$stop" = requeue ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        ),
        'exit "$code"',
    ]

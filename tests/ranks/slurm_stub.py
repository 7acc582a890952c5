"""`srun`, `scontrol` and `scancel`, as far as scripts of `fivefold launch slurm` use them.

All nodes of the job are this host. `srun` starts the tasks with the variables that Slurm sets for a
task, ends them all if one fails, and returns the highest exit code. An option that it does not know
is an error, so that a script cannot rely on what is not here. STUB_FOLDER has what the stubs share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("srun", "scontrol", "scancel")
KILL_AFTER = 30.0  # seconds after TERM


def write_stubs(folder: Path) -> None:
    """The commands, as files of a folder for PATH."""
    for name in NAMES:
        text = f'#!/bin/bash\nexec "{sys.executable}" "{__file__}" {name} "$@"\n'
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)


def directives(script: str) -> dict[str, str]:
    """What a script asks of sbatch, up to the first line that is no comment."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[option] = value
    return found


def job_environment(script: str, folder: Path, number: int = 1234567) -> dict[str, str]:
    """The variables that sbatch sets for a script."""
    asked = directives(script)
    return {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": ",".join(["localhost"] * int(asked["nodes"])),
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "STUB_FOLDER": str(folder),
    }


def srun(words: list[str]) -> int:
    options: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    known = {"--kill-on-bad-exit": "1", "--distribution": "block"}
    cores = options.pop("--cpus-per-task")
    assert options == known and int(cores) > 0, options
    nodes, per_node = (
        int(os.environ[f"SLURM_{name}"]) for name in ("JOB_NUM_NODES", "NTASKS_PER_NODE")
    )
    steps = Path(os.environ["STUB_FOLDER"], "steps")
    step = len(steps.read_text("utf-8").splitlines()) if steps.exists() else 0
    tasks = [start(words, rank, nodes, per_node, step) for rank in range(nodes * per_node)]
    with steps.open("a", encoding="utf-8") as file:
        file.write(" ".join(str(task.pid) for task in tasks) + "\n")
    return wait_for(tasks)


def start(
    words: list[str], rank: int, nodes: int, per_node: int, step: int
) -> subprocess.Popen[bytes]:
    said = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank % per_node,
        "SLURM_NODEID": rank // per_node,
        "SLURM_NTASKS": nodes * per_node,
        "SLURM_STEP_NUM_TASKS": nodes * per_node,
        "SLURM_STEP_ID": step,
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else per_node,
    }
    environment = {**os.environ, **{name: str(value) for name, value in said.items()}}
    return subprocess.Popen(words, env=environment)


def wait_for(tasks: list[subprocess.Popen[bytes]]) -> int:
    """The highest code; a task that a signal ended has 128 more than its number."""
    deadline = None
    while any(task.poll() is None for task in tasks):
        if deadline is None and any(task.poll() for task in tasks):
            deadline = time.monotonic() + KILL_AFTER
            signal_all(tasks, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            signal_all(tasks, signal.SIGKILL)
        time.sleep(0.05)
    return max(128 - code if (code := task.returncode) < 0 else code for task in tasks)


def signal_all(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may take the first line only
        print("\n".join(words[2].split(",")))
        return 0
    assert words == ["requeue", os.environ["SLURM_JOB_ID"]], words
    Path(os.environ["STUB_FOLDER"], "requeued").touch()
    return 0


def scancel(words: list[str]) -> int:
    assert words == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], words
    steps = Path(os.environ["STUB_FOLDER"], "steps").read_text("utf-8").splitlines()
    for pid in map(int, steps[-1].split()):
        os.kill(pid, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "scancel": scancel}[sys.argv[1]](sys.argv[2:]))

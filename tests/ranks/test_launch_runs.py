"""Scripts of `fivefold launch` are run as they are written, and train."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from slurm_stub import job_environment, write_stubs
from torch.distributed.run import get_args_parser

from fivefold.cli import build
from tests.commands import in_fork

ROOT = Path(__file__).parents[2]
SMALL = ("tiny", "--layout", "dp=2", "--seq", "32", "--microbatches", "1", "--set", "kernels=eager")
IMAGE = ("--image", "fivefold:0.1.0")


def scripted(folder: Path, target: str, *words: str, plan: tuple[str, ...] = ()) -> str:
    """Plan a small job in a folder, and write its script; what the script says."""
    settings = ("--set", "layers=2", "steps=2", "data=synthetic", "save_every=1000", *plan)
    made = in_fork(["plan", *SMALL, *settings, "-o", "plan.toml"], folder)
    assert made.returncode == 0, made.stderr
    written = ["launch", target, "plan.toml", "--cpus", "1", "-o", "script", "--out", "run", *words]
    done = in_fork(written, folder)
    assert done.returncode == 0, done.stderr
    return (folder / "script").read_text("utf-8")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This one, with the commands of a folder and of this Python before all others."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    path = os.pathsep.join([str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def begin(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    out = subprocess.PIPE
    return subprocess.Popen(
        words, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, text=True
    )


def run_torchrun(folder: Path) -> str:
    scripted(folder, "torchrun", plan=("--machine", "laptop"))
    process = begin(["bash", "script"], folder, environment(folder))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    (first,) = folder.glob("run/logs/*/attempt_0/0/stdout.log")
    assert "step 2/2" in first.read_text("utf-8")
    return said


def sbatch(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the script of a folder as Slurm would: a copy, in the folder of sbatch."""
    env = environment(folder)
    write_stubs(folder / "stubs")
    script = (folder / "script").read_text("utf-8")
    said = job_environment(script, folder / "stubs", number=free_port() - 20_000)
    return begin(["bash", "script", *words], folder, {**env, **said})


def run_slurm(folder: Path) -> str:
    scripted(folder, "slurm", "--gpus-per-node", "1", plan=("--machine", "h100"))
    process = sbatch(folder, "--device", "cpu")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert not (folder / "stubs/requeued").exists()
    return said


def free_port() -> int:
    """A port that a job's number gives."""
    for port in range(20_000 + os.getpid() % 5_000, 30_000):
        with socket.socket() as found:
            if found.connect_ex(("localhost", port)):
                return port
    raise AssertionError("no port is free")


def pods(folder: Path, **plan: Any) -> list[subprocess.Popen[str]]:
    """Start the two pods of a manifest here: their variables, with the paths of this folder."""
    yaml = pytest.importorskip("yaml")
    scripted(folder, "kubernetes", "--gpus-per-node", "1", *IMAGE, **plan)
    documents = list(yaml.safe_load_all((folder / "script").read_text("utf-8")))
    (folder / "embedded.toml").write_text(documents[0]["data"]["plan.toml"], "utf-8")
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    said = {each["name"]: each["value"] for each in container["env"]}
    assert said.keys() == {"PLAN", "RUN", "FIRST_POD"} and said["RUN"] == "/shared/run"
    here = {"PLAN": "embedded.toml", "RUN": "run", "FIRST_POD": "localhost"}
    command = [
        *container["command"][:2],
        container["command"][2].replace(":29400", f":{free_port()}"),
    ]
    return [begin(command, folder, environment(folder, **here)) for _ in range(2)]


def run_kubernetes(folder: Path) -> str:
    started = pods(folder)
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return "".join(said)


RUNS = {"torchrun": run_torchrun, "slurm": run_slurm, "kubernetes": run_kubernetes}


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("target", RUNS)
def test_a_script_trains(target: str, tmp_path: Path) -> None:
    said = RUNS[target](tmp_path)
    assert "step 2/2 | loss" in said and said.count("2 steps | 128 tokens") == 1, said
    assert [each["world"] for each in steps(tmp_path)] == [2, 2]
    assert last_start(tmp_path)["ended"]["why"] == "done"


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_start(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/run.json").read_text("utf-8"))["starts"][-1]


def wait_for_step(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    until = time.monotonic() + 300
    while len(steps(folder)) < number:
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.nightly
def test_the_time_limit_of_slurm_leaves_a_checkpoint_and_requeues(tmp_path: Path) -> None:
    scripted(tmp_path, "slurm", "--gpus-per-node", "1", plan=("steps=100000",))
    process = sbatch(tmp_path)
    wait_for_step(process, tmp_path, 2)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert (tmp_path / "stubs/requeued").exists(), said
    done = len(steps(tmp_path))
    assert last_start(tmp_path)["ended"]["why"] == "stopped"
    assert (tmp_path / f"run/checkpoints/step-{done:08}/manifest.json").is_file()
    (tmp_path / "stubs/requeued").unlink()
    again = sbatch(tmp_path, "--steps", str(done + 2))
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert [each["step"] for each in steps(tmp_path)] == list(range(1, done + 3))
    assert not (tmp_path / "stubs/requeued").exists()


@pytest.mark.nightly
def test_a_lost_rank_of_slurm_starts_all_again(tmp_path: Path) -> None:
    scripted(tmp_path, "slurm", "--gpus-per-node", "1", plan=("steps=400", "save_every=20"))
    process = sbatch(tmp_path)
    wait_for_step(process, tmp_path, 30)
    first = (tmp_path / "stubs/steps").read_text("utf-8").split()
    os.kill(int(first[1]), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "attempt 0 ended with code 137" in said, said
    assert len((tmp_path / "stubs/steps").read_text("utf-8").splitlines()) == 2
    assert [each["step"] for each in steps(tmp_path)] == list(range(1, 401))


@pytest.mark.nightly
def test_a_refusal_of_slurm_is_not_repeated(tmp_path: Path) -> None:
    scripted(tmp_path, "slurm", plan=("--layout", "dp=1"))
    process = sbatch(tmp_path, "--set", "lr=fast")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "lr = 'fast'" in said, said
    assert len((tmp_path / "stubs/steps").read_text("utf-8").splitlines()) == 1


@pytest.mark.nightly
def test_torchrun_passes_a_stop_on_to_its_ranks(tmp_path: Path) -> None:
    scripted(tmp_path, "torchrun", plan=("steps=100000",))
    process = begin(["bash", "script"], tmp_path, environment(tmp_path))
    wait_for_step(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    done = len(steps(tmp_path))
    assert last_start(tmp_path)["ended"]["why"] == "stopped", said
    assert (tmp_path / f"run/checkpoints/step-{done:08}/manifest.json").is_file()


def known_options(text: str) -> None:
    """That torchrun and `fivefold train` have the options of a script."""
    launcher = get_args_parser()
    train = typer.main.get_command(build("train")).commands["train"]
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
    words = " ".join(lines[lines.index("torchrun") + 1 :]).partition(" ) ")[0].split()
    at = words.index("-m")
    known = (
        {name for action in launcher._actions for name in action.option_strings},
        {name for each in train.params for name in each.opts},
    )
    assert words[at : at + 3] == ["-m", "fivefold", "train"]
    for side, options in zip((words[:at], words[at + 3 :]), known, strict=True):
        used = {word.partition("=")[0] for word in side if word.startswith("--")}
        assert used and used <= options, used - options


def test_options_of_the_scripts_exist() -> None:
    for name in ("train.sh", "train.yaml"):
        known_options((ROOT / "examples/launch" / name).read_text("utf-8"))

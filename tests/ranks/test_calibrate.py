"""`fivefold calibrate` on this machine's CPU: a file that `plan` takes, and what is refused."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.commands.train_start import calibrated_cpu
from fivefold.core.hardware import load, presets
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.launch.backend import num_gpus
from fivefold.train.callbacks.memory import estimate_of
from tests.commands import in_new_process

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def run(*words: str) -> str:
    """In a process of its own: measuring uses all threads. A fork of a worker that has used some
    would wait for them forever, and no rank may be forked beside them later."""
    done = in_new_process(list(words), Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", *words])
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert not output.out and "Traceback" not in output.err
    return output.err


@pytest.mark.sample(0.6)
def test_plan_takes_the_file() -> None:
    words = ("calibrate", "--device", "cpu", "--seconds", "0.3", "--ranks", "2", "--json")
    table: dict[str, Any] = json.loads(run(*words))
    machine = load("./machine.toml")
    assert table["base"] == "laptop" and table["dtype"] == "fp32" and table["ranks"] == 2
    constants = table["constants"]
    assert [*constants] == ["matmul", "start", "attention", "memory", "links", "latency"]
    assert machine.efficiency.matmul == constants["matmul"]["measured"]
    assert machine.efficiency.links == (constants["links"]["measured"],)
    assert machine.tiers[0].link.latency == constants["latency"]["measured"]
    assert all(each["error"]["worst"] >= each["error"]["median"] for each in constants.values())
    assert table["launch_s"] > 0
    hops = {sample["starts"] for sample in table["samples"]["links"]}
    assert hops == {1.0}
    planned = ("plan", "tiny", "--layout", "dp=2", "--precision", "fp32", "--json")
    slow = json.loads(run(*planned, "--machine", "./machine.toml"))
    assert slow["layouts"][0]["step_s"] > 0


@pytest.mark.sample(1)
def test_the_text_names_the_file() -> None:
    words = ("calibrate", "--device", "cpu", "--seconds", "0.2", "-o", "here.toml")
    text = run(*words)
    assert "here.toml written in" in text and "launch floor" in text
    assert "attention_old was not measured" in text
    assert Path("here.toml").read_text("utf-8").startswith("# Measured by fivefold calibrate on ")
    assert load("here.toml").tiers == load("laptop").tiers  # no ranks, no rings


def test_an_unknown_base_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    error = refuse(capsys, "--base", "h2000")
    assert all(name in error for name in presets())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seconds", "0"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (("--seconds", "3600"), "120 at most"),
        (("--ranks", "0"), "from 1 to 64"),
        (("--ranks", "65"), "from 1 to 64"),
        (("--device", "gpu"), "choose from cpu, cuda"),
        (("-o", "machine"), "ends in .toml"),
        (("-o", "nowhere/machine.toml"), "a folder that exists"),
        (("--device", "cpu", "--base", "tpu-v4", "--seconds", "1"), "no peak for 'fp32'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert says in refuse(capsys, *words)
    assert not [*Path().iterdir()]


def test_a_file_is_written_over_only_when_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("machine.toml").write_text("mine", "utf-8")
    assert "say -o machine.toml to write over it" in refuse(capsys, "--device", "cpu")
    assert Path("machine.toml").read_text("utf-8") == "mine"


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU here")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no GPU is seen here" in refuse(capsys, "--device", "cuda")


def test_torchrun_is_for_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "with --ranks" in refuse(capsys, "--device", "cpu")


class Calibration:
    """In place of the process that measures: writes a text as the machine file."""

    def __init__(self, text: str = 'base = "laptop"\n') -> None:
        self.text, self.num_runs = text, 0

    def __call__(self, path: Path) -> None:
        self.num_runs += 1
        path.write_text(self.text, "utf-8")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    calibration = Calibration()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fivefold.commands.train_start.calibrate_cpu", calibration)
    return calibration


def test_this_cpu_is_measured_once(measured: Calibration) -> None:
    reports = list[str]()
    first, second = (calibrated_cpu(reports.append) for _ in range(2))
    assert first == second and first is not None and first.is_cpu
    assert measured.num_runs == len(reports) == 1 and "measuring this CPU once" in reports[0]


def test_a_file_of_this_cpu_that_cannot_be_read_is_measured_again(measured: Calibration) -> None:
    measured.text = "no table"
    assert calibrated_cpu(print) is None
    measured.text = 'base = "laptop"\n'
    assert calibrated_cpu(print) is not None and measured.num_runs == 2


def test_a_cpu_that_cannot_be_measured_has_no_plan(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise subprocess.CalledProcessError(2, ["calibrate"])

    monkeypatch.setattr("fivefold.commands.train_start.calibrate_cpu", failing)
    assert calibrated_cpu(print) is None


def test_training_on_a_cpu_has_planned_beside_measured(
    measured: Calibration, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ["--set", "layers=2", "--seq", "16", "--steps", "2"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "tiny", *words, "--out", str(run)])
    first = json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    assert first["planned"]["step_s"] > 0 and measured.num_runs == 1


# Planned for ranks that are processes on a CPU.

TINY = PlanOptions("tiny", "dp=1", batch=16, microbatch_size=1, seq=64)


def planned_step(options: PlanOptions = TINY, **efficiency: float) -> float:
    """Seconds of a planned step on a laptop with so many seconds for the host's program."""
    laptop = load("laptop")
    laptop = replace(laptop, efficiency=replace(laptop.efficiency, **efficiency))
    plan = resolve(options)
    estimate = estimate_of(plan, plan.options.train, laptop)
    assert estimate is not None
    return estimate.step


def test_a_cpu_takes_the_sum_of_program_and_arithmetic() -> None:
    once = planned_step(forward_host=1e-3, backward_host=2e-3)
    more = planned_step(forward_host=2e-3, backward_host=5e-3)
    # 16 microbatches, eight layers, an embedding and a head.
    assert more - once == pytest.approx(16 * (8 + 2) * (1e-3 + 3e-3), rel=1e-6)


def test_ranks_share_the_cores_of_a_cpu() -> None:
    wide = [planned_step(replace(TINY, layout=f"dp={dp}", batch=dp)) for dp in (8, 16, 32)]
    assert wide[1] > 1.9 * wide[0] and wide[2] > 1.9 * wide[1], "a laptop has eight cores"


def test_a_cpu_computes_in_float32_whatever_the_plan_says() -> None:
    narrow = planned_step(replace(TINY, precision="bf16"))
    assert narrow == planned_step(replace(TINY, precision="fp32"))

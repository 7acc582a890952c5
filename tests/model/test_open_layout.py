"""`train` without a layout: all visible GPUs, the run's own layout when it resumes, or one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.commands import train as training
from fivefold.commands import train_start as training_start
from fivefold.commands.job import given_job
from fivefold.commands.train_start import machine_here, with_layout
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch import backend
from fivefold.launch.launcher import LauncherEnvironment, refit

SMALL = {"layers": 2, "seq": 64}


class Started(Exception):
    """Ends a training before a rank starts; has its plan."""


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of GPUs that torch sees and the names that the driver gives them, and
    catches the plan before a rank starts."""

    def stop(plan: Plan, *_: Any) -> None:
        raise Started(plan)

    def see(count: int, *names: str) -> None:
        monkeypatch.setattr(backend.torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(training_start, "gpu_names", lambda: list(names))

    monkeypatch.setattr(training, "device_of", stop)  # of ranks that are forked
    monkeypatch.setattr(training, "_join", stop)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return see


def started(*words: Any, **keys: Any) -> Plan:
    with pytest.raises(Started) as stop:
        training.train(*words, **keys)
    return stop.value.args[0]


def noted(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "--layout chooses another" in note]


def test_all_visible_gpus_train(visible: Any) -> None:
    visible(8, *["NVIDIA H100 80GB HBM3"] * 8)
    plan = started("tiny", **SMALL)
    assert plan.layout.world == 8 and plan.machine is None
    (note,) = noted(plan)
    assert note.startswith(f"{plan.layout} for 8 visible GPUs, the planner's choice on h100")
    visible(8, *["NVIDIA Unheard-Of"] * 8)  # no preset: data ranks
    plan = started("tiny", **SMALL)
    assert str(plan.layout) == "dp=8" and plan.batch.sequences == 16
    assert noted(plan) == ["dp=8 for 8 visible GPUs, as data ranks; --layout chooses another"]
    assert str(started("tiny", batch=12, **SMALL).layout) == "dp=6"
    assert started("tiny", microbatches=3, **SMALL).batch.sequences == 24
    visible(3)  # of CUDA_VISIBLE_DEVICES, which torch obeys
    assert str(started("tiny", **SMALL).layout) == "dp=3"
    assert str(started("tiny", gpus=2, **SMALL).layout) == "dp=2"


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (1, "auto"), (8, "cpu")])
def test_one_device_is_as_before(visible: Any, gpus: int, device: str) -> None:
    visible(gpus, *["NVIDIA H100 80GB HBM3"] * gpus)
    plan = started("tiny", device=device, **SMALL)
    assert plan == resolve(given_job("tiny", SMALL).options) and plan.layout.world == 1


def test_a_layout_that_is_given_is_obeyed(visible: Any, tmp_path: Path) -> None:
    visible(8)
    assert str(started("tiny", layout="tp=2", **SMALL).layout) == "tp=2"
    file = tmp_path / "plan.toml"
    file.write_text(resolve(PlanOptions("tiny", "dp=1", seq=64)).to_toml(tmp_path), "utf-8")
    assert str(started(file).layout) == "dp=1" and not noted(started(file))
    file.write_text('model = "tiny"\nseq = 64\n', "utf-8")  # as an import writes it
    assert str(started(file).layout) == "dp=8"
    assert str(started(file, out=tmp_path, resume=True).layout) == "dp=8"


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ((), "dp=4"),
        (("--layout", "tp=2"), "tp=2"),
        (("--set", "layout=dp=2"), "dp=2"),
        (("--gpus", "2"), "dp=2"),
        (("--set", "gpus=2"), "dp=2"),
        (("--device", "cpu"), "dp=1"),
    ],
)
def test_the_command_line_chooses_too(visible: Any, words: tuple[str, ...], layout: str) -> None:
    visible(4)
    with pytest.raises(Started) as stop:
        main(["train", "tiny", "--seq", "64", *words])
    assert str(stop.value.args[0].layout) == layout


def test_a_run_resumes_in_its_layout(visible: Any, tmp_path: Path) -> None:
    keys = {"schedule": "interleaved", "chunks": 2, "microbatches": 4, "seq": 64, "zero": 1}
    before = resolve(PlanOptions("tiny", "dp=2 pp=2", recompute="full", **keys))
    (tmp_path / "plan.toml").write_text(before.to_toml(tmp_path, full=True), "utf-8")
    for gpus in (0, 8):
        visible(gpus)
        plan = started("tiny", out=tmp_path, resume=True)
        assert plan.options == before.options and plan.batch == before.batch
        (note,) = noted(plan)
        assert note.startswith("dp=2 pp=2, as the run before")
    other = started("tiny", out=tmp_path, resume=True, gpus=4)
    assert str(other.layout) == "dp=4" and other.batch.sequences == before.batch.sequences
    assert str(started("tiny", out=tmp_path, resume=True, layout="tp=2").layout) == "tp=2"


def test_ranks_of_a_launcher_choose_the_same(visible: Any, monkeypatch: Any) -> None:
    """By their number, whatever GPUs each of them sees; over several hosts without the names of
    GPUs, which may differ."""
    job = given_job("tiny", SMALL)
    alone = LauncherEnvironment(1, 4, 1, "node1", 29400, local_world=4, own_gpu=True)
    for count in (0, 1, 4):
        visible(count, *["NVIDIA H200"] * count)
        options, (why,) = with_layout(job, None, "auto", replace(alone, local_world=2))
        assert options.layout == "dp=4" and "4 ranks, as data ranks" in why
        assert refit(resolve(options), 4) == resolve(options)
    _, (why,) = with_layout(job, None, "auto", alone)
    assert "for 4 ranks, the planner's choice on h200" in why
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert started("tiny", out="nowhere", **SMALL).layout.world == 4


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "h100"),
        (["NVIDIA H200"], "h200"),
        (["NVIDIA A100-SXM4-40GB"], "a100-40g"),
        (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA H100 PCIe"], None),
        (["NVIDIA GH200 480GB"], None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA H200"], None),
        ([], None),
    ],
)
def test_the_driver_names_the_machine(
    names: list[str], preset: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_start, "gpu_names", lambda: names)
    assert machine_here() == preset

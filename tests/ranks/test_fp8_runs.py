"""Runs in fp8 resume exactly, their checkpoints hold no scales and their exports are bf16; and what
a GPU lacks is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.weight_table import by_name
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.model.fp8 import matmul as fp8_matmul
from fivefold.model.fp8.rounding import power_of_two
from fivefold.records.run_writer import METRICS, read_records
from fivefold.train.checkpoint.of_run import open_run
from tests.commands import in_fork

CURVE = "lr_curve=constant,warmup=0"


def train(folder: Path, steps: int, *more: str, fp8: str = "tensorwise") -> Path:
    words = ["train", "tiny", "--device", "cpu", "--seq", "32", "--batch", "2", *more]
    words += ["--steps", str(steps), "--set", f"layers=2,{CURVE},precision=fp8,fp8={fp8}"]
    out = folder / "run"
    done = in_fork([*words, "--out", str(out)], folder)
    assert done.returncode == 0, done.stderr
    return out


def losses(run: Path) -> list[float]:
    return [each.loss for each in read_records(run / METRICS)]


def test_a_run_in_fp8_resumes_exactly_and_is_exported_as_bf16(tmp_path: Path) -> None:
    """Scales come from tensors, so that a checkpoint of weights and states is all there is."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for each in (whole, parts):
        each.mkdir()
    expected = losses(train(whole, 4))
    train(parts, 2)
    run = train(parts, 4, "--resume")
    assert losses(run)[-2:] == expected[-2:]

    shape = resolve(PlanOptions("tiny", set={"layers": "2"})).shape
    kept = open_run(run, shape, None, pytest.fail).tensors
    names = {each.removeprefix("model/") for each in kept if each.startswith("model/")}
    assert names == set(by_name(shape))
    rest = {each.split("/")[0] for each in kept if not each.startswith("model/")}
    assert rest <= {"optim"} and not any("scale" in each or "fp8" in each for each in kept)

    done = in_fork(["export", str(run), str(tmp_path / "hf")], tmp_path)
    assert done.returncode == 0, done.stderr
    with safe_open(next((tmp_path / "hf").glob("*.safetensors")), "pt") as found:
        tensors = {found.get_tensor(name).dtype for name in found.keys()}  # noqa: SIM118
    assert tensors == {torch.bfloat16}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "tiny", "--set", "precision=nvfp4"], "is planned and not run"),
        (["train", "tiny", "--precision", "nvfp4"], "is planned and not run"),
        (["rehearse", "tiny", "--precision", "nvfp4"], "is planned and not run"),
        (["rehearse", "tiny", "--set", "precision=nvfp4"], "precision = fp8 or bf16"),
        (["verify", "tiny", "--precision", "nvfp4"], "is planned and not run"),
        (
            ["verify", "tiny", "--precision", "mxfp8", "--layout", "cp=2", "--seq", "64"],
            "chunks of 16, inside of a block of 32",
        ),
        (["train", "tiny", "--set", "precision=fp8,fp8=nvfp4"], "mxfp8"),
        (["train", "tiny", "--set", "precision=fp8,fp8_matmul=cpu"], "unknown fp8_matmul"),
    ],
)
def test_what_does_not_run_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = in_fork(words, tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


OLD, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("scaling", "capability", "said"),
    [
        ("tensorwise", OLD, "no fp8 matmuls, which begin with 8.9; choose precision=bf16"),
        ("tensorwise", ADA, ""),
        ("tensorwise", BLACKWELL, ""),
        ("blockwise", ADA, "for 9.0 alone; choose fp8=tensorwise"),
        ("blockwise", HOPPER, ""),
        ("blockwise", BLACKWELL, "for 9.0 alone"),
        ("mxfp8", HOPPER, "begin with 10.0 (Blackwell)"),
        ("mxfp8", BLACKWELL, "in an order that is not built here"),
    ],
)
def test_what_a_gpu_lacks(
    scaling: str, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounded values can be multiplied anywhere, if that is asked for."""

    def found(device: Any) -> tuple[int, int]:
        return capability

    monkeypatch.setattr(fp8_matmul, "_capability", found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    device = torch.device("cuda")
    fp8_matmul.require_units(Fp8.parse(scaling), torch.device("cpu"))
    fp8_matmul.require_units(Fp8.parse(scaling, matmul="emulated"), device)
    if not said:
        fp8_matmul.require_units(Fp8.parse(scaling), device)
        return
    with pytest.raises(FivefoldError) as refused:
        fp8_matmul.require_units(Fp8.parse(scaling), device)
    assert said in str(refused.value) and "fp8_matmul=emulated" in str(refused.value)


def test_scales_of_small_blocks_are_powers_of_two() -> None:
    scales = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-40, 3e-20, float("inf")])
    found = power_of_two(scales)
    assert found.tolist() == [1.0, 2.0, 1.0, 2.0**-40, 2.0**-64, float("inf")]

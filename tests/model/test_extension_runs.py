"""The dummies of `tests/dummies.py` at work: trained, exported, and verified by many ranks."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fivefold import cli
from fivefold.core.model.presets import load
from fivefold.huggingface.config_export import as_hf
from tests import dummies

RUN, CONFIG = Path("run"), Path("model/config.json")


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return dummies.run_checks("tests.model.test_extension_runs", tmp_path_factory.mktemp("copy"))


def answer(*words: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.run(cli.gather_pairs(list(words)))
    assert not code, err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])


def check_training() -> None:
    """A model of the new family, in the new precision, with the new optimizer and training key."""
    torch.set_num_threads(1)
    CONFIG.parent.mkdir()
    config = as_hf(load("tiny"), "float32").config
    CONFIG.write_text(json.dumps({**config, "model_type": "dummy", "num_hidden_layers": 2}))
    keys = "optimizer=dummy precision=fp64 dummy=0.5"
    words = ("--set", keys, "--seq", "32", "--steps", "2", "--out", str(RUN), "--json")
    found = answer("train", str(CONFIG), *words)
    assert found["dtype"] == "float64"
    assert found["memory"]["measured"] == found["memory"]["planned"]
    assert found["memory"]["measured"]["optimizer"] > found["memory"]["measured"]["weights"]
    assert found["steps"][0]["lr"] == 0.5e-3


def check_export() -> None:
    answer("export", str(RUN), "out", "--json")
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "dummy"
    with safe_open("out/model.safetensors", "pt") as file:
        assert "model.layers.1.self_attn.dummy.weight" in file.keys()  # noqa: SIM118


def check_optimizer_and_collective() -> None:
    words = ("--layout", "tp=2", "--set", "layers=2", "--set", "optimizer=dummy", "--json")
    found = answer("verify", "tiny", *words)
    assert found["passed"] and found["traffic"]["match"]
    assert "broadcast" in [each["kind"] for each in found["traffic"]["observed"]]


def check_context_kind() -> None:
    words = ("--layout", "cp=4", "--set", "layers=2", "--context", "dummy", "--json")
    found = answer("verify", "tiny", *words)
    assert found["passed"] and found["traffic"]["match"]


CHECKS = {
    "training": check_training,
    "export": check_export,
    "optimizer and collective": check_optimizer_and_collective,
    "context kind": check_context_kind,
}


@pytest.mark.sample(0.5)  # 12 seconds for them all
@pytest.mark.parametrize("name", CHECKS)
def test_dummies_run(name: str, errors: dict[str, str]) -> None:
    assert not errors[name], errors[name]

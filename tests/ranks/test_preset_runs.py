"""Great runs, scaled down: the same dimensions on a few ranks compute what one device does."""

from __future__ import annotations

import json

import pytest

from fivefold.cli import main
from fivefold.core.hardware import PRESETS

SHORT = ("--seq", "32", "--microbatches", "4", "--microbatch-size", "1", "--steps", "1", "--json")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek-v3", "dp=2 pp=2 ep=2"),
        ("llama-3.1-405b-128k", "tp=2 pp=2 cp=2"),
        ("mt-nlg-530b", "dp=2 tp=2 pp=2"),
    ],
)
def test_verifies_scaled_down(capsys: pytest.CaptureFixture[str], name: str, layout: str) -> None:
    path = PRESETS / "runs" / f"{name}.toml"
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(path), "--layout", layout, *SHORT])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["passed"]

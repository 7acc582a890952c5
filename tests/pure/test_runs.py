"""The great runs that come with fivefold: each resolves, and says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.core.hardware import PRESETS
from fivefold.core.plan.plan import read, resolve
from fivefold.planner.planning import estimate_on_machine

RUNS = sorted((PRESETS / "runs").glob("*.toml"))


def test_all_are_there() -> None:
    assert {run.stem for run in RUNS} == {
        "bloom-176b", "deepseek-67b", "deepseek-v2", "deepseek-v3", "gemini-ultra", "llama-1-65b",
        "llama-2-70b", "llama-3.1-405b-128k", "llama-3.1-405b-8k", "megatron-1t", "megatron-8.3b",
        "mt-nlg-530b", "palm-540b",
    }  # fmt: skip


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_each_plans_whole(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "# source: " in text and "# confidence: " in text and "# assumed: " in text
    plan = resolve(read(path))
    assert plan.machine is not None and plan.layout.world >= 384
    found = estimate_on_machine(plan, plan.machine, precision="bf16", headroom=0.05)
    assert 0.1 < found.mfu < 0.7

"""Impossible estimates are internal errors that name the part, never answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.cli import INTERNAL_ERROR, main
from fivefold.core import hardware as machine
from fivefold.core.errors import InternalError
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.grid import grid_of_plan
from fivefold.cost.hardware.stack import FIVEFOLD
from fivefold.cost.step.sanity import require_possible_memory, require_possible_time, require_room
from fivefold.cost.step.time import step_time
from fivefold.planner import estimate
from fivefold.planner import planning as planner
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.setting import EstimateSetting
from fivefold_score import outcome
from fivefold_score.outcome import score, score_row
from fivefold_score.scoring import summary

H100 = EstimateSetting(machine.load("h100"), FIVEFOLD, "bf16")
GOOD = {"products": 2.0, "bubble": 1.0, "dp": 0.5}
# DeepSeek-V3 as its report describes it: arXiv 2412.19437, section 3.
V3: dict[str, Any] = {
    "id": "v3-report", "source": "arXiv 2412.19437", "model": "DeepSeek-V3", "seq_len": 4096,
    "layers": 61, "hidden": 7168, "heads": 128,
    "gpu": "h800", "gpus": 2048, "precision": "bf16", "dp": 128, "zero": 1, "tp": 1, "pp": 16,
    "ep": 64, "schedule": "dualpipe", "micro_batch": 1, "global_batch": 15_360,
    "recompute": "selective", "achieved": {"step_time_s": 19.9},
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "changes", "part"),
    [
        (0.0, {"products": 0.0, "bubble": 0.0, "dp": 0.0}, "a step takes 0 s"),
        (2.0, {"bubble": -0.5}, "bubble of a step takes -0.5 s"),
        (3.0, {"dp": float("nan")}, "dp of a step takes nan s"),
        (3.0, {"pp": float("inf")}, "pp of a step takes inf s"),
        (1.5, {"products": 0.0}, "compute of a step takes no time"),
        (0.5, {}, "the pipeline takes less than the work of a rank"),
    ],
)
def test_an_impossible_time_names_its_part(
    step: float, changes: dict[str, float], part: str
) -> None:
    with pytest.raises(InternalError, match=part):
        require_possible_time("job", step, GOOD | changes)


def test_rounding_is_possible() -> None:
    require_possible_time("job", 3.5, GOOD | {"launch": -1e-12})
    require_possible_memory("job", {"weights": 1e9, "margin": 0.0})


def test_impossible_memory_names_its_category() -> None:
    with pytest.raises(InternalError, match="activations of a rank take -1 bytes"):
        require_possible_memory("job", {"weights": 3.0, "activations": -1.0})
    with pytest.raises(InternalError, match=r"needs 3\.0 GiB of 2\.0, most of it weights"):
        require_room("job", {"weights": 2.0 * 2**30, "logits": 1.0 * 2**30}, 2.0 * 2**30)


def plan_of(**changes: Any) -> estimate.Plan:
    options = PlanOptions(model="llama-3.1-8b", layout="dp=2 tp=2 pp=2", seq=4096)
    return resolve(replace(options, **changes))


def test_a_clock_that_stands_still_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A makespan of 0 was once taken for an answer."""

    plan = plan_of()
    assert estimate_plan(plan, H100).step > 0
    monkeypatch.setattr(estimate, "simulate_trace", lambda *_: np.zeros(1))
    with pytest.raises(InternalError, match=r"llama-3.1-8b on h100, .*: bubble of a step takes -"):
        estimate_plan(plan, H100)


def test_the_command_exits_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., Estimate] = planner.estimate_plan

    def huge(*arguments: Any, **known: Any) -> Estimate:
        found = real(*arguments, **known)
        return replace(found, memory=found.memory | {"logits": 10.0 * found.setting.machine.memory})

    monkeypatch.setattr(planner, "estimate_plan", huge)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "tiny", "--machine", "h100", "--gpus", "2"])
    assert stop.value.code == INTERNAL_ERROR
    printed = capsys.readouterr()
    assert not printed.out
    assert "internal error: tiny on h100" in printed.err and "most of it logits" in printed.err


# Schedules that cannot run the numbers of a layout


def test_a_schedule_that_cannot_run_never_ends() -> None:
    """DualPipe needs twice as many microbatches as stages; with fewer its time was once 0."""
    shape = models.load("deepseek-v3")
    plan = plan_of(model="deepseek-v3", layout="dp=8 pp=8 ep=8", schedule="dualpipe")
    job = (shape, H100.machine, FIVEFOLD)
    legal = replace(grid_of_plan(plan), microbatches=np.array([16.0]))
    few = replace(legal, microbatches=np.array([8.0]))
    for simulated in (False, True):
        found = [
            float(step_time(*job, grid, 4096, "bf16", simulated=simulated).step.item())
            for grid in (legal, few)
        ]
        assert 0 < found[0] < np.inf == found[1]


@pytest.mark.parametrize("spelled", ["dualpipe", "DualPipe"])
@pytest.mark.parametrize("chunks", [None, 1, 2])
def test_a_row_has_the_chunks_of_its_schedule(spelled: str, chunks: int | None) -> None:
    """A rank of DualPipe has two stages of two copies: some call that two chunks."""
    found = score_row({**V3, "schedule": spelled, "vpp": chunks}).seconds.low
    assert found == score_row(V3).seconds.low > 10


def test_a_row_whose_schedule_cannot_run_is_refused() -> None:
    found = score([{**V3, "micro_batch": 4}])
    assert not found.outcomes and not found.impossible
    reason = "dualpipe cannot run 16 stages, 30 microbatches, 1 chunk: microbatches must be at"
    assert found.skipped[0].reason.startswith(reason)


def test_an_impossible_row_is_counted_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Nothing:
        step, parts = np.zeros(1), {"products": np.zeros(1)}

    monkeypatch.setattr(outcome, "step_time", lambda *job: Nothing())
    table = summary(score([V3]))
    assert (table["rows"], table["specified"]["skipped"], table["time"]["n"]) == (1, 1, 0)
    assert "a step takes 0 s" in table["internal_errors"][0]["reason"]
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps(V3) + "\n", "utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["score", str(runs)])
    assert stop.value.code == INTERNAL_ERROR
    printed = capsys.readouterr()
    assert "1 runs: 0 scored" in printed.out and "a step takes 0 s" in printed.err

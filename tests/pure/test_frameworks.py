"""The best layout that each framework can express: it is one of its files, and never beats ours."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.bridges.bridging import TARGETS, emit_plan, possible_values
from fivefold.cli import run
from fivefold.commands.compare_frameworks import _lacks, compare_frameworks, stack_names
from fivefold.commands.search import estimate_given, estimate_options
from fivefold.core import hardware as machine
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions
from fivefold.cost.hardware import stack_presets
from fivefold.planner.search import search_layouts
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import SearchSpace, layout_blocks

_JOB: dict[str, Any] = {"gpus": 8, "machine": "h100", "batch": 64, "seq": 2048}


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["llama-3.2-1b", "tiny-moe"])
def test_each_layout_is_one_that_the_framework_can_say(model: str) -> None:
    found = compare_frameworks(model, **_JOB)
    assert [row.name for row in found.rows] == [*TARGETS]
    for row in found.rows:
        assert row.estimate is not None, row.refused
        emitted = emit_plan(row.name, row.estimate.plan)
        lost = [loss for loss in emitted.losses if not loss.left and loss.key != "model"]
        assert not lost, (row.name, lost)
        assert row.estimate.plan.batch.sequences == _JOB["batch"]
        assert row.estimate.plan.layout.world == _JOB["gpus"]
        assert row.slower is not None and row.slower >= 0  # fivefold runs that layout, too
        assert row.estimate.step == pytest.approx(found.best.step * (1 + row.slower))
        if row.slower > 0.001 and row.name not in ("deepspeed", "accelerate"):
            assert row.lacks, row.name


def test_a_search_stays_within_what_a_target_can_say() -> None:
    shape = models.load("llama-3.1-70b")
    only = possible_values(TARGETS["nanotron"], shape, 64)
    assert only["ep"] == {1} and only["zero"] == {0, 1} and only["schedule"] == {"1f1b", "gpipe"}
    assert only["tp"] == {1, 2, 4, 8}  # as many KV heads
    space = SearchSpace(shape, 64, 4096, 64, only=only)
    blocks = list(layout_blocks(space))
    assert blocks
    for block in blocks:
        for one in block.degrees:
            assert one.tp in only["tp"]
            assert one.cp == 1 or one.context in only["context"]
        assert {*block.grid.zero.flatten().tolist()} <= {0, 1}
    setting = EstimateSetting(machine.load("h100"), stack_presets.load_stack("eager"), "bf16")
    assert search_layouts(space, setting, 4).best


def test_deepspeed_has_no_pipeline_and_megatron_no_v_schedules() -> None:
    shape = models.load("llama-3.1-8b")
    assert possible_values(TARGETS["deepspeed"], shape, 16)["pp"] == {1}
    assert "zb-v" not in possible_values(TARGETS["megatron"], shape, 16)["schedule"]
    assert "recompute" not in possible_values(TARGETS["deepspeed"], shape, 16)  # in the program


def test_stacks_of_frameworks_are_there_and_price() -> None:
    named = stack_names()
    assert named.keys() <= TARGETS.keys()
    assert {*named.values()} <= {*stack_presets.presets()}
    theirs = compare_frameworks("tiny", gpus=2, machine="h100", stack=True)
    assert all(row.stack == named.get(row.name) for row in theirs.rows)
    nanotron = next(row for row in theirs.rows if row.name == "nanotron")
    assert nanotron.estimate is not None and nanotron.slower is not None
    assert nanotron.slower > 0.1
    assert "priced as nanotron runs it" in str(theirs)


def test_what_a_framework_lacks_is_named_by_its_modules() -> None:
    """Megatron's selective recomputation is of core attention: it lacks not that, but ours."""
    how = estimate_options(0.05, "compiled", None, None)
    keys: dict[str, Any] = {"machine": "h100", "recompute": "selective", "seq": 4096}
    _, best = estimate_given(PlanOptions("llama-3.1-8b", "dp=8", **keys), how, None)
    assert _lacks(TARGETS["megatron"], best) == ("recompute=norm+act",)


def test_a_framework_without_a_layout_says_why() -> None:
    found = compare_frameworks("mistral-7b", gpus=1, machine="h100", batch=8, seq=2048)
    refused = {row.name: row.refused for row in found.rows if row.refused}
    assert "does not fit" in str(refused["nanotron"])  # no states on the host
    assert "megatron" not in refused and "cannot" in str(found)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["llama-3.1-8b"], "number of GPUs"),
        (["llama-3.1-8b", "--gpus", "8"], "--machine NAME"),
        (["llama-3.1-8b", "--gpus", "8", "--machine", "h10"], "did you mean h100"),
        (["llama-3.1-8b", "--gpus", "0", "--machine", "h100"], "above 0"),
        (["llama-3.1-8b", "--gpus", "8", "--layout", "dp=8"], "--layout has no effect"),
        (["nobody", "--gpus", "8", "--machine", "h100"], "unknown model"),
    ],
)
def test_bad_comparisons_are_refused(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare-frameworks", *words]) == 2
    assert rule in " ".join(capsys.readouterr().err.split())

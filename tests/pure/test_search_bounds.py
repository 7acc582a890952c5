"""What a search shares between its blocks and knows before it estimates them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fivefold.core.hardware import load
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.grid import RECOMPUTE, Array, Flags
from fivefold.cost.hardware.stack import BY_KERNELS
from fivefold.cost.step.time import step_time
from fivefold.planner.candidates import KeptLayouts, SearchResult, complexity
from fivefold.planner.comparisons import best_estimate, sweep
from fivefold.planner.estimate import estimate_plan
from fivefold.planner.planning import plan_request
from fivefold.planner.search import LayoutBounds, search_layouts
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import (
    LayoutBlock,
    SearchSpace,
    all_degrees,
    layout_blocks,
    options_of,
)

H100 = EstimateSetting(load("h100"), BY_KERNELS["compiled"], "bf16")


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-8b", 16), ("deepseek-v3", 32)])
def test_layers_of_a_table_are_timed_as_those_of_each_block(model: str, gpus: int) -> None:
    """With experts, dualpipe hides a share of their exchange that differs from block to block."""
    space = SearchSpace(models.load(model), gpus, 4096, 64, (8,), {"offload": "none", "zero": 1})
    bounds, blocks = LayoutBounds(space, H100), list(layout_blocks(space))
    bounds.of_time(blocks)
    compared = 0
    for block in blocks:
        job = H100.arguments(space.shape, block.grid, space.seq)
        wanted = partial(_legal, block)
        alone = step_time(*job, selection=wanted).step
        shared = step_time(*job, selection=wanted, passes=bounds.passes(block)).step
        np.testing.assert_allclose(shared, alone, rtol=1e-12)
        compared += alone.size
    assert compared > 5_000


def _legal(block: LayoutBlock, around: Array) -> Flags:
    return np.broadcast_to(block.legal, (1, *block.shape[1:3], 1, 1, 1))


def test_one_search_for_all_rules_finds_what_one_search_each_finds() -> None:
    options = PlanOptions("llama-3.1-8b", gpus=16, batch=64, machine="h100")
    asked = plan_request(options, H100.machine, {}, precision="bf16", headroom=0.05)
    points = list(sweep(asked, "gpus", [8, 16]))
    assert [(one.value, one.recompute) for one in points[:6]] == [
        (value, kind) for kind in RECOMPUTE for value in (8, 16)
    ]
    for one in points:
        if one.strategy != "all":
            continue
        fixed = {"offload": "none", "recompute": one.recompute}
        space = replace(asked.space, gpus=one.value, fixed=fixed)
        alone = best_estimate(replace(asked, space=space))
        assert alone is not None and one.estimate is not None
        assert one.estimate.step == pytest.approx(alone.step, rel=1e-12)
        assert one.estimate.plan.layout == alone.plan.layout


def test_a_simulated_candidate_is_not_simulated_again() -> None:
    """Its estimate with the known makespan is that of its plan."""
    fixed = {"pp": 4, "offload": "none"}
    space = SearchSpace(models.load("llama-3.1-8b"), 16, 4096, 64, (8,), fixed)
    found = [one for one in search_layouts(space, H100, 8).best if one.makespan is not None]
    assert len(found) >= 8
    for one in found:
        plan = resolve(options_of(one.grid, PlanOptions("llama-3.1-8b", seq=4096)))
        known = estimate_plan(plan, H100, makespan=one.makespan)
        assert known.step == pytest.approx(estimate_plan(plan, H100).step, rel=1e-12)
        assert known.step == pytest.approx(one.seconds, rel=1e-9)


@pytest.mark.parametrize("rules", [(), (0, 1)], ids=["any rule", "two rules"])
def test_what_a_search_keeps_is_what_is_best_of_all_blocks(rules: tuple[int, ...]) -> None:
    """The fastest, those of each complexity and microbatch size, and the one with least memory that
    is legal; seconds and bytes are random."""
    space = SearchSpace(models.load("llama-3.1-8b"), 8, 4096, 64, (8,), {"offload": "none"})
    result, draw, most = SearchResult(), np.random.default_rng(0).uniform, 5
    leaders = KeptLayouts(result, most, 1.0, H100.machine.memory, 8.0, rules)
    simple: dict[tuple[int, int], float] = {}
    seen: list[tuple[float, float, int]] = []
    for block in layout_blocks(space):
        count = int(np.prod(block.shape))
        seconds, memory = draw(1.0, 1.9, count), draw(0.0, H100.machine.memory, count)
        seconds[draw(0.0, 1.0, count) < 0.5] = np.inf
        leaders.keep(block, seconds, memory, seconds)
        columns = (complexity(block.grid, 8.0), block.grid.microbatch_size, block.grid.recompute)
        kinds = np.stack([np.broadcast_to(column, block.shape).ravel() for column in columns])
        for time, size, (code, rows, rule) in zip(seconds, memory, kinds.T, strict=True):
            key = int(code), int(rows)
            simple[key] = min(simple.get(key, np.inf), time)
            seen.append((time, size, int(rule)))
    assert {key: best.seconds for key, best in result.simple.items()} == {
        key: best for key, best in simple.items() if np.isfinite(best)
    }
    assert result.leanest is not None
    assert result.leanest.bytes == min(size for time, size, _ in seen if np.isfinite(time))
    for rule in rules:
        fastest = sorted(time for time, _, own in seen if own == rule)[:most]
        assert [best.seconds for best in leaders.fastest[rule]] == fastest
    if not rules:
        fastest = sorted(time for time, *_ in seen)[:most]
        assert [best.seconds for best in result.best[:most]] == fastest
    assert leaders.worst == max(
        sorted(time for time, _, own in seen if own == rule or not rules)[most - 1]
        for rule in rules or (0,)
    )


@pytest.mark.parametrize(("fixed", "legal"), [({"ep": 1}, True), ({"ep": 2}, False)])
def test_experts_of_a_dense_model_are_not_split(fixed: dict[str, int], legal: bool) -> None:
    space = SearchSpace(models.load("llama-3.1-8b"), 8, 4096, 64, (8,), fixed)
    assert any(all_degrees(space)) == legal

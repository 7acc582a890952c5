"""The planner's seconds for our own stack, held against one H200."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from one_layout import grid_of

from fivefold.core import machine, models
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost import stack as stacks
from fivefold.cost.layer_time import LayerTimer, total_seconds
from fivefold.cost.step_time import launch_bound_layer
from fivefold.planner import estimate_setting
from fivefold.planner.estimate import rank_seconds_alone

H200 = machine.load("h200")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "data" / "h200-measured.jsonl"


def plan_of(model: str, layout: str, said: dict[str, Any]) -> Plan:
    """As benchmarks/rehearsal.py resolves a job."""
    count = {} if "pp=" in layout or "microbatches" in said else {"microbatches": 1}
    return resolve(
        PlanOptions(model, layout=layout, machine="h200", ep_nodes=1, **{**said, **count})
    )


def is_fitted(line: dict[str, Any]) -> bool:
    """The half of the jobs that constants may be chosen on."""
    name = line["model"] + line["layout"] + json.dumps(line["said"])
    return sha256(name.encode()).digest()[0] % 2 == 0


def test_measured_steps_come_out_in_both_halves() -> None:
    """Eager, one rank alone: 12% off in the mean when these kernels were not counted."""
    setting, _ = estimate_setting(H200, "bf16", 0.0, "eager", 1.0)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for line in map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines()):
        plan = plan_of(line["model"], line["layout"], line["said"])
        seconds = rank_seconds_alone(plan, setting, line["rank"])
        errors[is_fitted(line)].append(abs(seconds / line["measured"][1] - 1))
    assert sum(map(len, errors.values())) >= 20
    assert all(mean(each) < 0.08 and max(each) < 0.20 for each in errors.values()), errors


def test_a_compiled_step_comes_out() -> None:
    """Llama-3.2-1B, two rows of 8,192 tokens: 285 ms were measured."""
    setting, _ = estimate_setting(H200, "bf16", 0.0, "compiled", 1.0)
    plan = plan_of("llama-3.2-1b", "dp=1", {"seq": 8192, "microbatch_size": 2})
    assert rank_seconds_alone(plan, setting, 0) == pytest.approx(0.285, rel=0.02)


def test_experts_on_other_ranks_take_their_host_longer() -> None:
    shape, found = models.load("tiny-moe"), list[float]()
    for grid in (grid_of(), grid_of(shard=2, ep=2)):
        layer = launch_bound_layer(
            LayerTimer(shape, H200, stacks.FIVEFOLD_EAGER, grid, 32, "bf16"), 1
        )
        found.append(sum(total_seconds(each).item() for each in (layer.forward, layer.inputs)))
        found[-1] += total_seconds(layer.weights).item()
    assert found == pytest.approx([4.29e-3, 8.19e-3])


def test_recomputation_stops_before_the_last_product() -> None:
    """Backward reads the input of an MLP's last product, and not what it returns."""
    shape, grid = models.load("llama-3.1-8b"), grid_of(recompute=2)
    shares: list[float] = []
    for stack in (stacks.FIVEFOLD, stacks.FIVEFOLD_EAGER):
        layer = LayerTimer(shape, H200, stack, grid, 8192, "bf16").layer(0)
        shares.append((layer.again["products"] / layer.forward["products"]).item())
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    last = shape.ffn / (attention + 3 * shape.ffn)
    assert shares == pytest.approx([1 - last] * 2, abs=2e-3)

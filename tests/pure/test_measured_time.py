"""The planner's seconds for our own stack, held against one H200."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_layout import grid_of

from benchmarks.h200_jobs import (
    SEARCHED,
    Errors,
    Speeds,
    errors_with,
    measured_jobs,
    page,
)
from fivefold.core import hardware as machine
from fivefold.core.model import presets as models
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.layer.time import LayerTimer, total_seconds
from fivefold.cost.step.time import launch_bound_layer

H200 = machine.load("h200")


def test_half_of_the_jobs_foretells_the_other() -> None:
    """The planner has the speeds that were searched on one half."""
    reach = H200.efficiency
    attention = (reach.attention, reach.softmax_dims, reach.short_keys)
    assert Speeds(reach.matmul, *attention, stacks.GROUPED_SHARE) == SEARCHED
    assert errors_with(SEARCHED, fitted=True).mean < 0.04
    outside = errors_with(SEARCHED, fitted=False)
    assert outside.mean < 0.06 and outside.worst < 0.15


@pytest.mark.parametrize("kernels", ["compiled", "eager"])
@pytest.mark.parametrize("fitted", [True, False])
def test_measured_steps_come_out_in_both_halves(kernels: str, fitted: bool) -> None:
    jobs = [job for job in measured_jobs() if (job.kernels, job.is_fitted) == (kernels, fitted)]
    assert len(jobs) == (17 if fitted else 8)
    found = Errors.of([job.time_error for job in jobs])
    assert found.mean < 0.06 and found.worst < 0.15


@pytest.mark.parametrize("kernels", ["compiled", "eager"])
def test_measured_memory_comes_out(kernels: str) -> None:
    jobs = [job for job in measured_jobs() if job.kernels == kernels]
    found = Errors.of([job.memory_error for job in jobs])
    assert found.mean < 0.01 and found.worst < (0.03 if kernels == "compiled" else 0.08)


def test_the_page_says_what_the_command_says() -> None:
    written = (Path(__file__).parents[2] / "docs" / "h200-jobs.md").read_text("utf-8")
    assert written == "\n".join(page()) + "\n"


def test_experts_on_other_ranks_take_their_host_longer() -> None:
    shape, found = models.load("tiny-moe"), list[float]()
    for grid in (grid_of(), grid_of(shard=2, ep=2)):
        layer = launch_bound_layer(
            LayerTimer(shape, H200, stacks.FIVEFOLD_EAGER, grid, 32, "bf16"), 1
        )
        found.append(sum(total_seconds(each).item() for each in (layer.forward, layer.inputs)))
        found[-1] += total_seconds(layer.weights).item()
    assert found == pytest.approx([4.29e-3, 8.89e-3])


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

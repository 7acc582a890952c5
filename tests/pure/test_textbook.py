"""Figures that every textbook on parallel training has, computed by our own counts."""

from __future__ import annotations

import pytest

from fivefold.core.model.presets import load
from fivefold.core.model.shape import parameters, training_flops
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.collectives import predict_traffic


def moved(zero: int) -> float:
    """Elements that a data rank's group moves in a step of one microbatch, over the parameters."""
    keys = {"zero": zero, "microbatches": 1, "grad_dtype": "bf16"}
    plan = resolve(PlanOptions("llama-3.1-8b", layout="dp=8", **keys))  # pyright: ignore
    total = 0
    for entry in predict_traffic(plan, 0, itemsize=2):
        if entry.axis == "fsdp":
            whole = entry.bytes * (entry.group if entry.kind == "all_gather" else 1)
            total += entry.count * whole // 2
        elif entry.axis == "dp-cp" and entry.bytes > 8:
            total += 2 * entry.count * entry.bytes // 2  # an all-reduce is a scatter and a gather
    return total / parameters(plan.shape).total


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_of_the_parameters_move_without_sharded_weights(zero: int) -> None:
    assert moved(zero) == pytest.approx(2, rel=1e-3)


def test_three_of_them_move_with_sharded_weights() -> None:
    """Less one gather of the embedding, whose backward reads no weight, and of the head, which
    backward begins with."""
    shape = load("llama-3.1-8b")
    ends = 2 * shape.vocab * shape.width / parameters(shape).total
    assert moved(3) == pytest.approx(3 - ends, rel=1e-3)


def test_recomputing_attention_of_gpt3_costs_a_few_percent() -> None:
    """Korthikanti et al. 2022, eq. 7 and 8: 2.7% more FLOPs at 2,048 tokens."""
    flops = training_flops(load("gpt3-175b"), 2048)
    whole_square = 2 * flops.scores  # they count the square, not its causal half
    assert whole_square / (flops.attention + flops.mlp) == pytest.approx(2048 / (6 * 12288), 1e-3)
    assert round(100 * whole_square / (flops.total + flops.scores), 1) == 2.7

"""The tolerances of `verify`: measured on one process that adds in another order, per quantity."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.commands.job import given_job
from fivefold.commands.verify import runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan
from fivefold.launch.processes import Pool
from fivefold.verify.compare import KINDS
from fivefold.verify.reference import Truth, measure_floors
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import judge, run_trial

FLOAT64 = 2.0**-52


def plan_of(model: str, layout: str, **keys: Any) -> Plan:
    keys = {"layers": 2, "seq": 32, "microbatches": 2} | keys
    return runnable(given_job(model, {"layout": layout, **keys}).options)


def scaled(run: VerifiedRank, name: str, factor: float) -> VerifiedRank:
    """The same run with a wrong gradient of one weight in its first step."""
    step = run.steps[0]
    parts = [
        replace(part, values=part.values * factor) if part.name == name else part
        for part in step.gradients
    ]
    return replace(run, steps=[replace(step, gradients=parts), *run.steps[1:]])


def test_adapters_pass_beyond_any_formula_and_wrong_gradients_do_not(pool: Pool) -> None:
    """Gradients of these adapters are sums that nearly cancel."""
    keys = {"lora": 1, "lora_targets": "attention", "microbatches": 1, "seq": 16}
    plan, settings = plan_of("tiny-moe", "cp=2", **keys), VerifySettings(seed=18, steps=1)
    ranks = [(run_rank, (plan, settings))] * 2
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    verdict = judge(plan, settings, runs, truths)
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert verdict.tolerance["grad_err"] > 8 * FLOAT64 * np.sqrt(2 * 256)  # layers, longest sum
    assert all(FLOAT64 < verdict.tolerance[kind] < 1e-10 for kind in KINDS)
    name = "blocks.1.attention.v.lora.b"
    for factor in (1 + 1e-3, 1 + 1e-9):
        wrong = judge(plan, settings, [scaled(run, name, factor) for run in runs], truths)
        assert not wrong.passed and wrong.diverges_at == "blocks.1.attention.v.lora"


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_the_bias_of_a_router_under_an_asynchronous_schedule(pool: Pool, schedule: str) -> None:
    keys = {"moe.bias": True, "schedule": schedule, "zero": 0}
    verdict = run_trial(pool, plan_of("tiny-moe", "pp=2", **keys), VerifySettings(steps=2))
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)


@pytest.mark.parametrize(
    ("layout", "keys"), [("dp=2", {}), ("pp=2", {"schedule": "pipedream", "zero": 0})], ids=str
)
def test_narrow_gradients_of_norms_that_are_stored_less_1(
    pool: Pool, layout: str, keys: dict[str, Any]
) -> None:
    """These weights are nearly 0, so that a rounded gradient is much of them."""
    plan = plan_of("tiny", layout, norm="rms_offset", grad_dtype="bf16", **keys)
    verdict = run_trial(pool, plan, VerifySettings(optimizer="sgd"))
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert 1e-4 < verdict.errors["grad_err"] < verdict.tolerance["grad_err"] < 1 / 7


def truth_of(gradient: float, slots: float = 3.0) -> Truth:
    arrays = {"w": np.array([gradient, 1.0])}
    return Truth(2.0, 1.0, 1.0, arrays, arrays, slots=[np.array([slots, 1.0])])


def test_a_number_that_agrees_by_chance_has_the_floor_of_the_gradients() -> None:
    (truth,) = measure_floors([truth_of(1.0)], [truth_of(1.0 + 1e-12)])
    assert truth.floor["grad_err"] == truth.floor["weight_err"] == pytest.approx(1e-12, rel=1e-3)
    for kind in ("loss_err", "norm_err", "clip_err"):
        assert truth.floor[kind] == pytest.approx(1e-12 / np.sqrt(2), rel=1e-3)


def test_a_token_that_goes_to_other_experts_is_no_rounding_error() -> None:
    steps = [truth_of(1.0)] * 3
    others = [truth_of(1.0 + 1e-12), truth_of(1.1, slots=2.0), truth_of(1.1)]
    assert [bool(each.floor) for each in measure_floors(steps, others)] == [True, False, False]
    with pytest.raises(FivefoldError, match=r"between two experts .*another --seed"):
        judge(plan_of("tiny-moe", "dp=2"), VerifySettings(dtype="float32"), [], steps)


def test_the_sum_of_the_norm_is_rounded_too(pool: Pool) -> None:
    """Torch adds the squares of a large gradient one after another, which rounds by far more than
    the gradients differ; shards of ranks are shorter."""
    large = plan_of("tiny", "dp=1", layers=1, microbatches=1, set={"vocab": 16384})
    (truths,) = pool.run_each([(run_reference, (large, VerifySettings(steps=1)))])
    (truth,) = truths
    squares = (value * value for grad in truth.gradients.values() for value in grad.ravel())
    error = abs(truth.norm / math.sqrt(math.fsum(squares)) - 1)
    assert error > 5 * FLOAT64
    assert truth.floor["norm_err"] > 0.9 * error

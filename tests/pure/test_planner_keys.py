"""Keys of a plan that change what runs change its estimate."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core.machine import load
from fivefold.core.plan import PlanOptions, resolve
from fivefold.cost import stack as stacks
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.search import EstimateSetting


def estimated(model: str, layout: str, **options: Any) -> Estimate:
    said = {"seq": 4096, "machine": "h100", **options}
    setting = EstimateSetting(load("h100"), stacks.FIVEFOLD, "bf16")
    return estimate_plan(resolve(PlanOptions(model, layout=layout, **said)), setting)


@pytest.mark.parametrize("layout", ["dp=4 pp=2", "dp=8"])
def test_weights_that_stay_gathered_take_memory_and_save_time(layout: str) -> None:
    found = [
        estimated("llama-3.1-8b", layout, zero=3, microbatches=8, gather=gather)
        for gather in ("step", "microbatch", None)
    ]
    step, microbatch, usual = found
    assert step.memory["prefetch"] > microbatch.memory["prefetch"]
    assert step.parts["dp"] < microbatch.parts["dp"]
    assert usual.step == (step if "pp" in layout else microbatch).step


def test_inputs_that_stay_gathered_take_memory_and_save_time() -> None:
    shard, gathered = (
        estimated("llama-3.1-8b", "tp=4 dp=2", tp_keep=keep) for keep in ("shard", "gathered")
    )
    assert shard.memory["activations"] < gathered.memory["activations"]
    assert shard.parts["tp"] == pytest.approx(gathered.parts["tp"] * 5 / 4, rel=0.02)


def test_tokens_that_cross_to_each_node_once() -> None:
    """Flat, every copy of a token crosses by itself."""
    flat, nodes = (
        estimated("mixtral-8x7b", "dp=16 ep=8 tp=2 etp=2", ep_nodes=number, set={"layers": "8"})
        for number in (1, 2)
    )
    assert nodes.parts["ep"] != flat.parts["ep"]
    assert nodes.parts["tp"] == flat.parts["tp"]

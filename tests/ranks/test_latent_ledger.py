"""The planner's memory of latent attention beside shared and routed experts, held against ranks
that are rehearsed on tensors without values."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.planner.setting import estimate_setting
from fivefold.rehearse.rank import rehearse_rank
from tests.ranks.priced import planned_bytes

# Few layers as wide as they are: model, layers, layout, rank, and what else. Experts of one node
# and of two, whose tokens cross once to each.
JOBS: tuple[tuple[str, int, str, int, dict[str, Any]], ...] = (
    ("deepseek-v3", 8, "dp=64 pp=4 ep=64", 64, {"zero": 1}),
    ("deepseek-v3", 8, "dp=64 pp=4 ep=64", 64, {"zero": 1, "ep_nodes": 8}),
    ("deepseek-v3", 8, "dp=64 pp=4 ep=64", 0, {"zero": 1, "ep_nodes": 8}),
    ("deepseek-v3", 5, "dp=256 ep=64", 0, {"zero": 1, "ep_nodes": 8, "microbatches": 1}),
    ("deepseek-v2-lite", 6, "dp=4 tp=2 pp=2 ep=8", 8, {"zero": 1}),
    ("deepseek-v2-lite", 6, "dp=8 pp=3 ep=4", 8, {"zero": 2, "recompute": "selective"}),
    ("deepseek-v2-lite", 6, "dp=4 ep=4", 0, {"zero": 3, "ep_nodes": 2, "recompute": "full"}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("model", "layers", "layout", "rank", "said"), JOBS)
def test_a_rank_with_latent_attention_holds_what_is_planned(
    model: str, layers: int, layout: str, rank: int, said: dict[str, Any], precision: str
) -> None:
    keys = {"precision": precision, "seq": 4096, "microbatches": 8, "set": {"layers": str(layers)}}
    plan = resolve(PlanOptions(model, layout=layout, **{**keys, **said}))
    setting, _ = estimate_setting(machine.load("h200"), precision, 0.0, "compiled", 1.0)
    planned = planned_bytes(plan, setting, rank)
    assert planned == pytest.approx(rehearse_rank(plan, rank, {}).peak, rel=0.02)

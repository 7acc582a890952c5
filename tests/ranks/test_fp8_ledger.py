"""The planner's memory and traffic of fp8 jobs held against the program: ranks rehearsed on tensors
without values."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.memory.unit_ledger import UnitTable
from fivefold.planner.estimate import rank_memory
from fivefold.planner.setting import estimate_setting
from fivefold.rehearse.job import judged
from fivefold.rehearse.rank import rehearse_rank
from tests.ranks.ledger_draws import draw_fp8
from tests.ranks.priced import planned_bytes
from tests.ranks.test_ledger_rehearsed import require_priced

COMPILED, _ = estimate_setting(machine.load("h200"), "fp8", 0.0, "compiled", 1.0)
NUM_DRAWS = 20
BLOCKS, WIDE = {"fp8": "blockwise"}, {"fp8_wgrad": "bf16"}
ZERO_3 = {"microbatches": 2, "zero": 3}
SPLIT = {"microbatches": 8, "schedule": "zb-h1"}
# A few layers of each model, as wide as they are: model, layers, layout, rank, and what else.
JOBS: tuple[tuple[str, int, str, int, dict[str, Any]], ...] = (
    *(
        ("llama-3.1-8b", 4, "dp=1", 0, {"microbatches": 1, "grad_dtype": "bf16", **keys})
        for keys in ({}, BLOCKS, WIDE)
    ),
    ("llama-3.1-8b", 4, "dp=8", 0, {**ZERO_3, "recompute": "full"}),
    ("llama-3.1-8b", 4, "dp=8", 0, {**ZERO_3, **BLOCKS}),
    ("llama-3.1-8b", 4, "dp=8", 0, {"microbatches": 1, "zero": 1, "recompute": "selective"}),
    *(
        ("llama-3.1-8b", 4, "tp=4", 0, {"microbatches": 2, **keys})
        for keys in (
            {},
            BLOCKS,
            WIDE,
            {"tp_keep": "gathered"},
            {"sp": False},
            {"microbatch_size": 2, "fp8_skip": "1+1"},
        )
    ),
    ("qwen3-8b", 4, "tp=2 cp=2", 0, {"microbatches": 2}),
    ("llama-3.1-8b", 6, "cp=4 pp=3", 4, {"microbatches": 5, "zero": 1}),
    *(("llama-3.1-8b", 8, "tp=2 pp=4", 2, {**SPLIT, **keys}) for keys in ({}, BLOCKS, WIDE)),
    ("llama-3.1-8b", 8, "pp=4", 3, {**SPLIT, "grad_dtype": "bf16"}),
    ("mixtral-8x7b", 2, "dp=8 ep=8", 0, {"microbatches": 1, "zero": 2}),
    ("deepseek-v2-lite", 4, "dp=1", 0, {"microbatches": 1}),
    ("deepseek-v2-lite", 4, "tp=2 ep=2", 0, {"microbatches": 2}),
    ("deepseek-v2-lite", 4, "dp=2 ep=2 pp=2", 2, {**SPLIT, **BLOCKS}),
    *(
        ("mixtral-8x7b", 2, layout, 0, {**ZERO_3, **keys})
        for layout, keys in (
            ("dp=4 ep=2", {"gather": "microbatch"}),
            ("dp=4 ep=2", {"gather": "step", **BLOCKS}),
            ("tp=4 ep=2 etp=2", {"recompute": "experts"}),
        )
    ),
    ("qwen3-30b-a3b", 8, "dp=4 ep=4 pp=4", 4, {**SPLIT, "recompute": "experts"}),
    ("deepseek-v3", 4, "dp=64 pp=2 ep=64", 64, {"zero": 1, "recompute": "full", **BLOCKS}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layers", "layout", "rank", "said"), JOBS)
def test_a_rank_holds_what_is_planned_in_fp8(
    model: str, layers: int, layout: str, rank: int, said: dict[str, Any]
) -> None:
    """Within 3%, as in other precisions; its collectives are those that are predicted."""
    keys: dict[str, Any] = {"precision": "fp8", "seq": 4096, "set": {"layers": str(layers)}}
    plan = resolve(PlanOptions(model, layout=layout, **keys, **said))
    run = rehearse_rank(plan, rank, None)
    assert not judged(plan, [run], {}).astray
    assert planned_bytes(plan, COMPILED, rank) == pytest.approx(run.peak, rel=0.03)


def test_weights_in_fp8_are_seen_as_weights() -> None:
    """Two bytes for each weight of a linear in a layer, in the rehearsal as in the plan."""
    keys: dict[str, Any] = {"microbatches": 1, "seq": 2048, "set": {"layers": "2"}}
    plain, rounded = (
        rehearse_rank(resolve(PlanOptions("llama-3.2-1b", **keys, precision=each)), 0, None)
        for each in ("bf16", "fp8")
    )
    linears = 2 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    more = rounded.memory["weights"] - plain.memory["weights"]
    assert more == pytest.approx(2 * linears, rel=1e-3)


def test_weights_of_experts_in_fp8_are_seen_as_weights() -> None:
    """The same for those of routed experts."""
    small = {"layers": "2", "vocab": "512"}
    keys: dict[str, Any] = {"microbatches": 1, "seq": 512, "set": small, "zero": 1}
    plain, rounded = (
        resolve(PlanOptions("mixtral-8x7b", layout="dp=8 ep=8", **keys, precision=each))
        for each in ("bf16", "fp8")
    )
    seen = [rehearse_rank(each, 0, None).memory["weights"] for each in (plain, rounded)]
    linears = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096)
    experts = 2 * 3 * 4096 * 14336
    assert seen[1] - seen[0] == pytest.approx(2 * (linears + experts), rel=1e-3)
    planned = rank_memory(rounded, COMPILED, 0)["weights"]
    assert planned == pytest.approx(seen[1], rel=1e-2)


def gathered_ahead(model: str, layout: str, **keys: Any) -> Plan:
    """ZeRO-3 that gathers for every microbatch, with little but layers in memory."""
    small = {"layers": "4", "vocab": "512"}
    both: dict[str, Any] = {**ZERO_3, "gather": "microbatch", "seq": 512, "precision": "fp8"}
    return resolve(PlanOptions(model, layout=layout, set=small, **(both | keys)))


# Where weights do not stay, the peak of these is a weight gradient.
AT_WEIGHT_GRADIENTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("llama-3.2-1b", "dp=8", keys) for keys in ({}, BLOCKS, WIDE, {"grad_dtype": "bf16"})),
    ("llama-3.2-1b", "dp=4 tp=2", {"recompute": "full"}),
    ("llama-3.2-1b", "dp=4 pp=2", {**SPLIT, "microbatches": 4, "grad_dtype": "bf16"}),
    ("mixtral-8x7b", "dp=16 ep=4 pp=2", {**SPLIT, "microbatches": 2}),
)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("model", "layout", "keys"), AT_WEIGHT_GRADIENTS)
def test_rounded_weights_are_gone_before_weight_gradients(
    model: str, layout: str, keys: dict[str, Any]
) -> None:
    """Within 1%; with weights of the input gradient beside them it was up to 5% more."""
    plan = gathered_ahead(model, layout, **keys)
    assert planned_bytes(plan, COMPILED, 0) == pytest.approx(
        rehearse_rank(plan, 0, None).peak, rel=0.01
    )


@pytest.mark.sample(0.25)
def test_codes_on_their_way_are_counted() -> None:
    """ZeRO-3: of a unit that is gathered ahead, one byte a weight and this rank's shard of them.
    With blocks values are gathered."""
    both = [gathered_ahead("llama-3.2-1b", "dp=4", recompute="full", **how) for how in ({}, BLOCKS)]
    held = [rehearse_rank(each, 0, None).peak for each in both]
    planned = [planned_bytes(each, COMPILED, 0) for each in both]
    layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    assert held[0] - held[1] == pytest.approx(1.25 * layer, rel=0.02)
    assert planned[0] - planned[1] == pytest.approx(1.25 * layer, rel=0.02)


@pytest.mark.sample(0.25)
@pytest.mark.parametrize(
    ("model", "layout", "keys"),
    [
        ("llama-3.2-1b", "dp=4", {}),
        ("mixtral-8x7b", "dp=8 ep=2", {"microbatches": 1}),
        ("mixtral-8x7b", "dp=8 ep=2", {"microbatches": 1, **BLOCKS}),
    ],
)
def test_codes_that_are_not_counted_are_missed(
    model: str, layout: str, keys: dict[str, Any]
) -> None:
    """Of linears and of experts, which come as codes with blocks too."""
    plan = gathered_ahead(model, layout, recompute="full", **keys)
    held = pytest.approx(rehearse_rank(plan, 0, None).peak, rel=0.01)
    assert planned_bytes(plan, COMPILED, 0) == held
    with patch.object(UnitTable, "_codes_of", lambda self, unit: None):
        assert planned_bytes(plan, COMPILED, 0) != held


@pytest.mark.sample(0.25)
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_a_random_plan_in_fp8_runs_as_it_is_priced(number: int) -> None:
    """Calls and bytes are those that are priced, and memory is the estimate."""
    plan = draw_fp8(f"fp8 ledger {number}")
    require_priced(plan, COMPILED)
    rank = plan.layout.rank(pp=number % plan.layout.pp)
    run = rehearse_rank(plan, rank, None)
    assert not judged(plan, [run], {}).astray
    assert planned_bytes(plan, COMPILED, rank) == pytest.approx(run.peak, rel=0.05)

"""The planner's memory held against the program: ranks rehearsed on tensors without values."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.model.kernels import varlen
from fivefold.planner.setting import EstimateSetting, estimate_setting
from fivefold.rehearse.job import judged
from fivefold.rehearse.rank import rehearse_rank
from tests.ranks.ledger_draws import NUM_DRAWS, draw
from tests.ranks.priced import listed_traffic, planned_bytes, priced_traffic

COMPILED, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, "compiled", 1.0)
KEPT = "full-but-attention"
# A few layers of each model, as wide as they are: model, layers, layout, rank, and what else.
JOBS: tuple[tuple[str, int, str, int, dict[str, Any]], ...] = (
    ("llama-3.2-1b", 4, "dp=1", 0, {"microbatches": 1}),
    ("llama-3.1-8b", 4, "dp=8", 0, {"microbatches": 2, "zero": 3, "recompute": "full"}),
    ("llama-3.1-8b", 4, "dp=8", 0, {"microbatches": 1, "zero": 1, "recompute": "selective"}),
    ("llama-3.1-8b", 4, "tp=8", 0, {"microbatches": 2}),
    *(
        ("llama-3.1-8b", 6, "dp=8", 0, {"microbatches": 2, "zero": 3, "recompute": "full"} | keys)
        for keys in (
            {"grad_dtype": "bf16"},
            {"unit_size": 900.0},
            {"unit_size": 150.0, "prefetch": 2},
            {"prefetch": 0},
            {"prefetch": 4},
        )
    ),
    ("mixtral-8x7b", 4, "dp=16 ep=8", 0, {"zero": 3, "recompute": "full", "prefetch": 2}),
    ("llama-3.1-8b", 6, "dp=8", 0, {"zero": 1, "recompute": KEPT, "microbatches": 2}),
    ("llama-3.1-8b", 6, "tp=2 pp=2", 2, {"recompute": KEPT, "microbatches": 4}),
    ("llama-3.1-8b", 6, "cp=4", 0, {"zero": 1, "recompute": KEPT, "microbatches": 2}),
    ("llama-3.1-8b", 6, "cp=4", 0, {"recompute": KEPT, "context": "ulysses"}),
    ("deepseek-v3", 4, "dp=64 pp=2 ep=64", 64, {"zero": 1, "recompute": KEPT}),
    ("qwen3-30b-a3b", 4, "dp=8 ep=8", 0, {"recompute": "full:2-but-attention"}),
    ("llama-3.1-8b", 6, "cp=4 pp=3", 4, {"microbatches": 5, "zero": 1}),
    ("mixtral-8x7b", 2, "dp=8 ep=8", 0, {"microbatches": 1, "zero": 2}),
    ("mixtral-8x7b", 4, "dp=16 ep=8", 0, {"microbatches": 2, "zero": 3, "recompute": "full"}),
    ("mixtral-8x7b", 4, "dp=8 ep=8", 0, {"microbatches": 2, "zero": 3, "recompute": "full"}),
    ("deepseek-v2-lite", 4, "dp=1", 0, {"microbatches": 1, "packed": True}),
    ("llama-3.1-8b", 4, "cp=4", 0, {"microbatches": 2, "packed": True}),
    # The rank that predicts several tokens: the first gradient of its head waits for the second.
    ("deepseek-v3", 4, "dp=64 pp=2 ep=64", 64, {"zero": 1, "recompute": "full"}),
    # DualPipe of two ranks defers nothing: its head is computed in chunks.
    ("llama-3.2-1b", 4, "dp=8 pp=2", 0, {"microbatches": 4, "schedule": "dualpipe"}),
    # Updates by blocks: kernels clip as they read, and bf16 states are rounded in pieces.
    ("llama-3.2-1b", 4, "tp=4", 0, {"microbatches": 1, "train": Recipe(states="bf16")}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layers", "layout", "rank", "said"), JOBS)
def test_a_rank_holds_what_is_planned(
    model: str, layers: int, layout: str, rank: int, said: dict[str, Any]
) -> None:
    """Within 3%; what a plan may be off at the worst is 5%."""
    options = PlanOptions(model, layout=layout, seq=4096, set={"layers": str(layers)}, **said)
    plan = resolve(options)
    planned = planned_bytes(plan, COMPILED, rank)
    assert planned == pytest.approx(rehearse_rank(plan, rank, None).peak, rel=0.03)


@pytest.mark.parametrize("layout", ["dp=1", "cp=2"])
def test_packed_rows_hold_what_whole_rows_hold(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for some lengths. A mask of all pairs would be 16 MiB a row, and a bias of it 32."""
    peaks: list[int] = []
    calls: list[int] = []
    inner = varlen.attend
    monkeypatch.setattr(varlen, "attend", lambda *given: calls.append(1) or inner(*given))
    for packed in (False, True):
        said: dict[str, Any] = {"microbatches": 1, "seq": 4096, "packed": packed}
        small = {"layers": "2", "vocab": "512"}  # the peak is in a layer, not in the head
        plan = resolve(PlanOptions("llama-3.2-1b", layout=layout, set=small, **said))
        peaks.append(rehearse_rank(plan, 0, None).peak)
        assert bool(calls) == packed
    assert abs(peaks[0] - peaks[1]) < 1 << 14


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_a_random_plan_runs_as_it_is_priced(number: int) -> None:
    """Calls and bytes are those that are priced, and memory is the estimate."""
    plan = draw(f"ledger {number}")
    require_priced(plan, COMPILED)
    rank = plan.layout.rank(pp=number % plan.layout.pp)
    run = rehearse_rank(plan, rank, {})
    assert not judged(plan, [run], {}).astray
    planned = planned_bytes(plan, COMPILED, rank)
    assert planned == pytest.approx(run.peak, rel=0.05)


def require_priced(plan: Plan, setting: EstimateSetting) -> None:
    """The arrays have the calls and bytes of the list that the rehearsal is held to."""
    priced, listed = priced_traffic(plan, setting), listed_traffic(plan)
    stages = plan.schedule.placement.stages_of(0)
    if all(plan.recompute.of(stage).blocks <= 1 for stage in stages):
        assert priced == listed
        return
    # Of layers that are computed again together, the last one issues less. The arrays have the
    # share of such layers, with or without experts alike.
    assert priced.keys() == listed.keys()
    for key, (_, calls) in priced.items():
        assert abs(calls - listed[key][1]) <= len(stages) * plan.batch.microbatches

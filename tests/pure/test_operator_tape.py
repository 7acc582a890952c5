"""What operators hold, one after the other: nothing is left over, and what is saved is the list."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.core import hardware as machine
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import LayerKind
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.layer.operator_tape import Change, Event, OperatorTape
from fivefold.cost.memory.categories import MemoryEntries
from fivefold.cost.memory.rank_ledger import PlanLedger
from fivefold.planner.setting import estimate_setting, plan_arguments

SETTING, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, "compiled", 1.0)
RULES = ("none", "norm", "act", "attention", "mlp+experts", "norm+attention+mlp", "full", "full:2")
# A queue of weight gradients belongs to schedules that split their backwards.
JOBS = (
    ("llama-3.1-8b", "pp=2 tp=2", "1f1b"),
    ("llama-3.1-8b", "pp=2 tp=2", "zb-h1"),
    ("deepseek-v3", "dp=8 pp=2 ep=8", "1f1b"),
    ("deepseek-v3", "dp=4 pp=2 tp=2 ep=8", "zb-h1"),
    ("gpt2-xl", "dp=2 pp=2", "zb-h1"),
)


def ledger(model: str, layout: str, schedule: str) -> PlanLedger:
    options = PlanOptions(
        model, layout=layout, seq=1024, schedule=schedule, microbatches=4, set={"layers": "8"}
    )
    plan = resolve(options)
    return PlanLedger(plan, MemoryEntries(*plan_arguments(plan, SETTING)))


def bytes_of(events: list[Event]) -> float:
    return sum(each.bytes for each in events if isinstance(each, Change))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("model", "layout", "schedule"), JOBS)
def test_a_backward_frees_what_its_forward_saved(
    model: str, layout: str, schedule: str, rule: str
) -> None:
    found, how = ledger(model, layout, schedule), Recompute.parse(rule)
    kinds = (False, True) if found.plan.shape.moe else (False,)
    for routed in kinds:
        blocks = found.operators.blocks((LayerKind(routed, True),) * max(how.blocks, 1), how)

        def tape() -> OperatorTape:
            return OperatorTape(blocks, how.modules, how.full)  # noqa: B023, called at once

        whole = tape()
        saved = bytes_of(whole.forward())
        assert saved > 0
        way = "queued" if found.queued else "backward"
        assert saved + bytes_of(whole.backward(way)) == pytest.approx(0, abs=1)
        if found.queued:
            apart = tape()
            before = bytes_of(apart.forward()) + bytes_of(apart.backward("input"))
            assert before > 0
            assert before + bytes_of(apart.weight_gradients()) == pytest.approx(0, abs=1)


@pytest.mark.parametrize("rule", RULES[:-1])
@pytest.mark.parametrize(("model", "layout", "schedule"), JOBS[:2])
def test_operators_save_what_the_search_counts(
    model: str, layout: str, schedule: str, rule: str
) -> None:
    found, how = ledger(model, layout, schedule), Recompute.parse(rule)
    listed = found.entries.activations
    counted = listed.inputs() if how.full else listed.saved(False, how)
    tape = OperatorTape(
        found.operators.blocks((LayerKind(False, True),), how), how.modules, how.full
    )
    expected = float(np.asarray(counted).reshape(-1)[0]) * found.operators.tokens
    assert bytes_of(tape.forward()) == pytest.approx(expected)

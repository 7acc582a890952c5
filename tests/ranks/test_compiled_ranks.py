"""The compiled layouts, of which `python -m tests.ranks.compiled` runs all."""

from __future__ import annotations

import pytest
from compiled import Case, cases, most_error, prove

from fivefold.core.model.recompute import MODULES
from fivefold.launch.processes import Pool


@pytest.mark.nightly  # a minute of compiling; tests/model compile a head, and trace all regions
@pytest.mark.sample(1, table=True)
@pytest.mark.parametrize("case", [case for case in cases() if case.plan.layout.world == 2], ids=str)
def test_a_compiled_layout(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.passed, (verdict.errors, verdict.diverges_at)
    assert max(verdict.errors.values()) <= most_error(case)


def test_the_table_has_everything() -> None:
    everything = list(cases())
    plans = [case.plan for case in everything]
    assert len({str(case) for case in everything}) == len(everything) >= 40
    degrees = ("dp", "tp", "pp", "cp", "ep", "etp")
    assert all(any(getattr(plan.layout, each) > 1 for plan in plans) for each in degrees)
    splits = {plan.options.schedule for plan in plans if plan.layout.pp > 1}
    assert splits >= {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"}
    rules = [plan.recompute.usual for plan in plans]
    assert all(any(each in rule.modules for rule in rules) for each in MODULES)
    assert any(rule.full for rule in rules) and any(plan.recompute.special for plan in plans)
    zeros = {plan.layout.zero for plan in plans if plan.layout.dp > 1}
    assert zeros == {0, 1, 2, 3}
    shapes = [plan.shape for plan in plans]
    for found in (
        [shape.mla is not None for shape in shapes],
        [shape.mtp > 0 for shape in shapes],
        [shape.tied for shape in shapes],
        [shape.window is not None for shape in shapes],
        [bool(plan.balance) for plan in plans],
        [plan.packed for plan in plans],
        [case.dtype == "float32" for case in everything],
    ):
        assert any(found) and not all(found)

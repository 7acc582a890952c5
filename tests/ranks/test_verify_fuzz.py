"""Random layouts, schedules, models and settings: whatever the core accepts passes `verify`.

The cases change with the commit; a failure prints the command that repeats it.
"""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.cli import main
from fivefold.commands import verify
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.plan.plan import Plan
from fivefold.launch.processes import Pool
from fivefold.verify.runs import VerifySettings
from tests.ranks.verify_draws import complaint, draw, prove
from tests.selection import salt

NUM_DRAWS = 40


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("i", range(NUM_DRAWS))
def test_a_random_verification_passes(i: int, pool: Pool) -> None:
    drawn = draw(f"{salt()}: {i}")
    try:
        verdict = prove(pool, drawn)
    except RankLost as lost:
        lost.add_note(str(drawn))
        raise
    assert verdict.passed, complaint(drawn, verdict)


@pytest.mark.parametrize("i", range(NUM_DRAWS))
def test_the_printed_command_repeats_the_draw(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(f"{salt()}: {i}")
    repeated: list[tuple[Plan, VerifySettings]] = []

    def noted(plan: Plan, chosen: dict[str, Any], *_: object) -> None:
        repeated.append((plan, VerifySettings(**chosen)))
        raise FivefoldError("noted")

    monkeypatch.setattr(verify, "_verify", noted)
    with pytest.raises(SystemExit):
        main(drawn.arguments)
    ((plan, settings),) = repeated
    assert settings == drawn.settings
    assert (plan.options, plan.shape) == (drawn.plan.options, drawn.plan.shape)

"""Random layouts, schedules, models and settings: whatever the core accepts passes `verify`.

The cases change with the commit; a failure prints the command that repeats it.
"""

from __future__ import annotations

import pytest

from fivefold.core.errors import RankLost
from fivefold.launch.processes import Pool
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

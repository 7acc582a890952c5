"""Random faults at 1,024 simulated ranks, and the rules that judge them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.launch import watchdog
from fivefold.launch.positions import HangVerdict
from fivefold.records.run_owner import RunTicket
from tests.control_plane import KINDS, Script, SimulatedBoard
from tests.control_scripts import judged, owners

SCRIPTS = [next(seed for seed in range(1000) if Script.of(seed).kind == kind) for kind in KINDS]


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SCRIPTS, ids=KINDS)
def test_the_right_rank_is_named_and_nothing_goes_on_twice(seed: int, tmp_path: Path) -> None:
    found = judged(Script.of(seed), tmp_path)
    assert not found.unsafe
    assert found.right, f"rank {found.named} instead of {sorted(found.script.ranks)}"


def test_a_wrong_name_is_seen(tmp_path: Path) -> None:
    script = Script.of(SCRIPTS[KINDS.index("death")])
    wrong = HangVerdict((min(script.ranks) + 1) % 1024, "a step", "is not to blame")
    with patch.object(watchdog, "verdict", lambda *_: wrong):
        found = judged(script, tmp_path)
    assert not found.right and not found.unsafe


def test_a_second_verdict_is_seen(tmp_path: Path) -> None:
    """A board that forgets the verdict: the next judge finds one too."""
    inner = SimulatedBoard.claim

    def claim(self: SimulatedBoard, name: str, text: str) -> bool:
        return name == "verdict" or inner(self, name, text)

    with patch.object(SimulatedBoard, "claim", claim):
        found = judged(Script.of(SCRIPTS[KINDS.index("hang")]), tmp_path)
    assert any("each by itself" in each for each in found.unsafe)


def test_a_publication_without_a_fence_is_seen(tmp_path: Path) -> None:
    assert owners(random.Random(0), tmp_path) == []
    with patch.object(RunTicket, "publishing", lambda self: contextlib.nullcontext()):
        assert owners(random.Random(0), tmp_path)

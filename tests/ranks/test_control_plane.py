"""Random faults at 1,024 simulated ranks, and the rules that judge them."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.launch.watch import watchdog
from fivefold.launch.watch.positions import HangVerdict
from fivefold.launch.watch.watchdog import PATIENCE
from fivefold.records.run_owner import RunTicket
from tests.control_plane import KINDS, Script, SimulatedBoard, SimulatedWatchdog, World
from tests.control_scripts import judged, owners
from tests.virtual_time import VirtualTime

SCRIPTS = [next(seed for seed in range(1000) if Script.of(seed).kind == kind) for kind in KINDS]


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SCRIPTS, ids=KINDS)
def test_the_right_rank_is_named_and_nothing_goes_on_twice(seed: int, tmp_path: Path) -> None:
    found = judged(Script.of(seed), tmp_path)
    assert not found.unsafe
    assert found.right, f"rank {found.named} instead of {sorted(found.script.ranks)}"


def script_of(kind: str, decides: float) -> Script:
    return replace(Script.of(SCRIPTS[KINDS.index(kind)]), decides=decides)


def test_a_judge_that_decides_for_long_is_not_named(tmp_path: Path) -> None:
    """It does not answer meanwhile: the next round waits for it."""
    found = judged(script_of("hang", 8.0), tmp_path)
    assert found.right and not found.unsafe, f"rank {found.named}, not {found.script.ranks}"


def test_a_judge_that_was_stopped_reads_what_came_meanwhile(tmp_path: Path) -> None:
    script = replace(script_of("judge", 0.0), judge_stops=1.1, judge_back=4.0)
    found = judged(script, tmp_path)
    assert found.right and not found.unsafe, f"rank {found.named}, not {found.script.ranks}"


def test_a_rank_that_is_back_is_not_said_to_be_silent() -> None:
    """It answers again while the judge decides, and its main thread still does not move."""
    world = World(script_of("death", 10.0))
    (rank,) = world.script.ranks
    world.later(10.0 + PATIENCE + 8.0, world.ranks[rank].resume)
    world.play()
    assert world.verdicts[0][1] == rank
    assert "has not moved" in world.texts["verdict"]


def test_a_rank_that_is_back_before_the_limit_is_named_and_not_lost() -> None:
    world = World(replace(script_of("late", 0.0), back=45.0, hang_after=600.0))
    world.play()
    assert set(world.named()) == world.script.ranks
    assert not world.verdicts and not world.unfinished()


def test_rounds_overlap_if_a_judge_has_had_its_time() -> None:
    world = World(script_of("death", 19.0))
    world.play()
    (by, lost), judge = world.verdicts[0], int(world.texts["round-1"].split()[-1])
    assert by == judge and lost in world.script.ranks
    assert "round-2" in world.texts


def test_looks_that_are_left_out_change_nothing() -> None:
    found = list[tuple[list[tuple[int, int]], dict[str, str]]]()
    for idle in (SimulatedWatchdog.idle_until, lambda self: 0.0):
        world = World(script_of("two", 5.0))
        with patch.object(SimulatedWatchdog, "idle_until", idle):
            world.play()
        judges = {name: text for name, text in world.texts.items() if "rank" not in name}
        found.append((world.verdicts, judges))
    assert found[0] == found[1]


def test_errors_of_events_come_out() -> None:
    time = VirtualTime()

    def fails() -> None:
        time.sleep(2.0)
        raise ValueError(time.now)

    time.later(1.0, fails)
    time.later(2.0, lambda: time.sleep(100.0))
    with pytest.raises(ValueError, match=r"3\.0"):
        time.run_until(10.0)


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

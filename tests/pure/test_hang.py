"""Who keeps the others waiting, on planted cases."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from fivefold.launch.watch.hang import verdict
from fivefold.launch.watch.positions import CommGroup, HangVerdict, LoggedCollective, Position

WORLD = CommGroup("world", (0, 1, 2, 3))
TP = {rank: CommGroup("tp", members) for members in ((0, 1), (2, 3)) for rank in members}
DP = {rank: CommGroup("dp", members) for members in ((0, 2), (1, 3)) for rank in members}
KINDS = {"w": ("all_reduce", 24), "t": ("all_reduce", 16384), "d": ("reduce_scatter", 512)}
BOUND = 20.0


def at(rank: int, calls: str, idle: float = 12.0, forgets: int = 0) -> Position:
    """A rank of dp=2 tp=2 after calls such as `ttdw`, without the first ones."""
    groups = {"w": WORLD, "t": TP[rank], "d": DP[rank]}
    trail = [LoggedCollective(groups[letter], *KINDS[letter]) for letter in calls]
    counts = Counter(call.group for call in trail)
    return Position(counts, trail[forgets:], phase=f"step 3 of rank {rank}", idle=idle)


def four(*calls: str) -> dict[int, Position]:
    return {rank: at(rank, text) for rank, text in enumerate(calls)}


def judged(found: HangVerdict | None, rank: int, pattern: str) -> None:
    assert found is not None
    assert found.rank == rank, str(found)
    assert re.search(pattern, found.cause), str(found)


def test_a_rank_that_sleeps_is_behind_and_waits_for_nobody() -> None:
    positions = four("ttd", "ttdw", "tt", "ttdw")
    positions[2] = replace(positions[2], idle=25.0, stack=["model.py:7 forward: sleep()"])
    found = verdict(positions, bound=BOUND)
    judged(found, 2, r"has not joined call 1 on dp \(ranks 0 and 2\), reduce_scatter of 512 bytes")
    judged(found, 2, r"where rank 0 waits; ranks 1 and 3 wait in turn; it has not moved")
    judged(found, 2, r"for 25 s, in:\nmodel.py:7")
    assert found is not None and found.doing == "step 3 of rank 2"


def test_a_slow_rank_has_more_time_and_more_where_it_was_allowed() -> None:
    positions = four("ttdw", "ttdw", "tt", "ttdw")
    assert verdict(positions, bound=BOUND) is None
    late = {**positions, 2: replace(positions[2], idle=25.0)}
    assert verdict(late, bound=BOUND) is not None
    allowed = {**positions, 2: replace(positions[2], idle=25.0, allowed=100.0)}
    assert verdict(allowed, bound=BOUND) is None


def test_the_chain_is_followed_to_its_end() -> None:
    # 0 waits for 1 in tp, 1 for 3 in dp, 3 for 2 in tp; 2 is asleep.
    positions = four("tt", "td", "", "t")
    positions[1] = replace(positions[1], idle=30.0)
    positions[2] = replace(positions[2], idle=30.0)
    positions[3] = replace(positions[3], idle=30.0)
    judged(
        verdict(positions, bound=BOUND),
        2,
        "call 1 on tp .*where rank 3 waits; ranks 0 and 1 wait in turn",
    )


def test_a_silent_rank_is_lost_with_what_it_lacks() -> None:
    positions = four("ttdw", "ttdw", "ttdw", "ttd")
    judged(verdict(positions, {3}, BOUND), 3, r"call 1 on world .*it does not answer")


def test_who_may_be_silent_is_not_blamed_nor_who_waits_for_it() -> None:
    positions = four("ttdw", "ttdw", "ttdw", "ttd")
    assert verdict(positions, {3}, BOUND, excused={3}) is None
    positions = four("ttdw", "ttdw", "ttd", "ttd")
    judged(verdict(positions, {2, 3}, BOUND, excused={2}), 3, "it does not answer")


def test_a_silent_rank_of_which_nothing_is_known() -> None:
    positions = four("ttdw", "ttd", "ttdw", "")
    del positions[3]
    found = verdict(positions, {3}, BOUND)
    judged(found, 3, r"has not joined call \d on \w+ .*it does not answer")
    assert found is not None and found.doing == "an unknown place"


STEP = "tttdw"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("forgets", [0, 2])
def test_a_skipped_call_among_equal_ones_makes_a_circle(steps: int, forgets: int) -> None:
    """Rank 2 left out one of three, and waits at the end of the step for rank 3, which waits for
    it; that the others made three tells who is wrong."""
    past = STEP * steps
    positions = {
        0: at(0, past + "tttdw", forgets=forgets),
        1: at(1, past + "tttd", forgets=forgets),
        2: at(2, past + "ttdw", forgets=forgets),
        3: at(3, past + "ttt", forgets=forgets),
    }
    number = 3 * steps + 3
    judged(verdict(positions, bound=BOUND), 2, rf"has not joined call {number} on tp \(ranks 2 and")


def test_two_ranks_alone_are_judged_by_their_past() -> None:
    world, pair = CommGroup("world", (0, 1)), CommGroup("tp", (0, 1))

    def calls(text: str) -> Position:
        groups = {"w": world, "t": pair}
        trail = [LoggedCollective(groups[letter], *KINDS[letter]) for letter in text]
        return Position(Counter(call.group for call in trail), trail, phase="step 3", idle=12.0)

    skips_tp = {0: calls("ttwttwttwtw"), 1: calls("ttwttwttwtt")}
    judged(verdict(skips_tp, bound=BOUND), 0, r"call 8 on tp .*went on to all_reduce on world")
    skips_world = {0: calls("ttwttwttwttw"), 1: calls("ttwttwttwttt")}
    judged(verdict(skips_world, bound=BOUND), 1, "call 4 on world")
    # Nothing has ever followed these before: both are named, and what they called.
    undecided = verdict({0: calls("tw"), 1: calls("tt")}, bound=BOUND)
    judged(undecided, 0, "and rank 1, at step 3, have not called the same: rank 0 call 1 on world")


def test_ranks_that_called_different_things_as_often() -> None:
    """All counts are equal: only what was called tells."""
    other = LoggedCollective(TP[2], "all_gather", 64)
    positions = four("ttt", "ttt", "ttt", "ttt")
    trail = [*positions[3].trail[:-1], other]
    positions[3] = replace(positions[3], trail=trail)
    cause = r"call 3 on tp .*, all_reduce of 16,384 bytes, which"
    judged(verdict(positions, bound=BOUND), 3, cause)


def test_a_different_call_is_found_before_somebody_is_called_slow() -> None:
    """Rank 2 left out a sum of tp, and waits in the next call, which is another; rank 0 waits for
    rank 2, which seems to wait for nobody."""
    gathers = {rank: LoggedCollective(TP[rank], "all_gather", 64) for rank in range(4)}
    positions = four("ttdw", "ttdw", "tt", "ttt")
    for rank, calls in ((0, "tttd"), (1, "tttd")):
        trail = list(at(rank, calls).trail)
        trail.insert(3, gathers[rank])
        positions[rank] = Position(Counter(call.group for call in trail), trail, idle=12.0)
    trail = [*positions[2].trail, gathers[2]]
    positions[2] = replace(positions[2], trail=trail, counts={TP[2]: 3})
    found = verdict(positions, bound=BOUND)
    judged(found, 2, r"call 3 on tp \(ranks 2 and 3\), all_reduce .*went on to all_gather on tp")


def test_in_a_circle_the_rank_whose_program_does_not_wait_is_lost() -> None:
    """Rank 0 has gathered ahead, so that others are behind it, and then falls asleep."""
    ahead, back = CommGroup("pp", (0, 1), is_pair=True), CommGroup("pp", (1, 0), is_pair=True)
    sent = LoggedCollective(ahead, "send", 64)
    wanted = LoggedCollective(back, "recv", 64)
    positions = {
        0: Position({ahead: 1, back: 1}, [sent, wanted], "step 1 0F1", 30.0, waits=False),
        1: Position({ahead: 2}, [LoggedCollective(ahead, "recv", 64)] * 2, "step 1 1F1", 12.0),
    }
    found = verdict(positions, bound=BOUND)
    judged(found, 0, "has not joined call 2 on pp from rank 0 to rank 1, recv of 64 bytes, where")
    slow = {**positions, 0: replace(positions[0], idle=12.0)}
    assert verdict(slow, bound=BOUND) is None


def test_a_rank_that_has_ended_is_behind_for_ever() -> None:
    positions = four("ttdwt", "ttdw", "ttdw", "ttdw")
    positions[1] = replace(positions[1], idle=float("inf"), phase="the end, after step 3")
    judged(
        verdict(positions, bound=BOUND), 1, r"call 3 on tp \(ranks 0 and 1\).*where rank 0 waits$"
    )


def test_nobody_is_behind() -> None:
    stands = {rank: replace(each, idle=30.0) for rank, each in four(*["ttdw"] * 4).items()}
    judged(verdict(stands, bound=BOUND), 0, "ranks 1, 2 and 3 wait .*network.*call 1 on world")
    assert verdict(four(*["ttdw"] * 4), bound=BOUND) is None, "slow is not stuck"
    over = {rank: replace(each, idle=float("inf")) for rank, each in stands.items()}
    assert verdict({**over, 0: stands[0]}, bound=BOUND) is None, "the last one is on its way"

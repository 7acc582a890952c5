"""What pipeline ranks send one another, counted by hand and as laws of every schedule."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.schedule import catalog
from fivefold.core.schedule import selection as choose
from fivefold.core.schedule.schedule import (
    Action,
    Message,
    Placement,
    Schedule,
    channels,
    linear_placement,
    loop_placement,
    merged,
    mirrored_placement,
    needed,
    parse_steps,
    sent,
    sent_by,
    twins,
    v_placement,
)


def counts(schedule: Schedule) -> Counter[tuple[int, int, str]]:
    """How many messages of each kind go from rank to rank."""
    ranks = range(schedule.num_ranks)
    return Counter((m.source, m.target, m.kind) for rank in ranks for m in sent_by(schedule, rank))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream"])
def test_every_boundary_carries_each_microbatch_both_ways(name: str) -> None:
    boundaries = [(0, 1), (1, 2), (2, 3)]
    expected = {(a, b, "F"): 8 for a, b in boundaries} | {(b, a, "B"): 8 for a, b in boundaries}
    assert counts(catalog.make(name, 4, 8)) == expected


def test_a_loop_goes_round_to_the_first_rank() -> None:
    found = counts(catalog.make("interleaved", 4, 8, 3))
    # Three chunks: every boundary inside a chunk three times, the way back to rank 0 twice.
    for a, b in ((0, 1), (1, 2), (2, 3)):
        assert (found.pop((a, b, "F")), found.pop((b, a, "B"))) == (24, 24)
    assert found == {(3, 0, "F"): 16, (0, 3, "B"): 16}


def test_two_ranks_of_a_loop_use_one_channel_for_both_kinds() -> None:
    # Stages 0 2 on rank 0 and 1 3 on rank 1: two boundaries lead down, one leads back.
    found = counts(catalog.make("interleaved", 2, 4, 2))
    assert found == {(0, 1, "F"): 8, (1, 0, "F"): 4, (1, 0, "B"): 8, (0, 1, "B"): 4}


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_the_turn_of_a_v_stays_on_the_last_rank(name: str) -> None:
    schedule = catalog.make(name, 4, 8)
    neighbours = [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)]
    assert counts(schedule) == {(a, b, kind): 8 for a, b in neighbours for kind in "FB"}
    turn = [Action(3, "F", 0), Action(4, "F", 0), Action(4, "B", 0), Action(3, "B", 0)]
    assert sent(schedule, turn[0]) is needed(schedule, turn[1]) is None
    assert sent(schedule, turn[2]) is needed(schedule, turn[3]) is None


def test_two_directions_carry_half_of_the_microbatches_each() -> None:
    schedule = catalog.make("dualpipe", 4, 8)
    neighbours = [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)]
    # Down go the forwards of microbatches 0 to 3 and the backwards of 4 to 7; up the others.
    assert counts(schedule) == {(a, b, kind): 4 for a, b in neighbours for kind in "FB"}
    assert sent(schedule, Action(0, "F", 3)) == Message(1, "F", 3, 0, 1)
    assert sent(schedule, Action(0, "F", 4)) == Message(1, "F", 4, 3, 2)
    assert needed(schedule, Action(2, "B", 7)) == Message(2, "B", 7, 0, 1)


def test_the_ends_and_weight_gradients_send_nothing() -> None:
    schedule = catalog.make("zb-h1", 2, 3)
    assert needed(schedule, Action(0, "F", 0)) is None
    assert sent(schedule, Action(0, "I", 0)) is None
    assert sent(schedule, Action(1, "F", 0)) is needed(schedule, Action(1, "I", 0)) is None
    assert sent(schedule, Action(1, "W", 0)) is needed(schedule, Action(0, "W", 0)) is None
    assert sent(schedule, Action(1, "I", 2)) == Message(0, "B", 2, 1, 0)


def test_channels_of_a_lopsided_file() -> None:
    text = "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n4F0 4B0"
    assert channels(choose.parse_schedule(text)) == ((0, 1), (0, 2), (1, 0), (2, 0))


domain = [
    (name, numbers)
    for name in (family.name for family in catalog.FAMILIES)
    for numbers in product(range(1, 7), range(1, 13), range(1, 4))
    if not catalog.family(name).problems(*numbers)
]


@settings(max_examples=150)
@given(drawn=st.sampled_from(domain))
def test_what_is_sent_is_what_is_needed(drawn: tuple[str, tuple[int, int, int]]) -> None:
    name, numbers = drawn
    schedule = catalog.make(name, *numbers)
    ranks = range(schedule.num_ranks)
    given = [message for rank in ranks for message in sent_by(schedule, rank)]
    wanted = [
        (rank, message)
        for rank in ranks
        for action in schedule.actions(rank)
        if (message := needed(schedule, action))
    ]
    assert all(message.target == rank != message.source for rank, message in wanted)
    assert len(set(given)) == len(given)
    assert Counter(given) == Counter(message for _, message in wanted)
    assert set(channels(schedule)) == {(each.source, each.target) for each in given}


def joined(text: str) -> str:
    """What is left of the steps of rank 0, which has stages 0, 1 and 3 of four."""
    order = (parse_steps(text.split(","), ""), ())
    steps = merged(Schedule("drawn", Placement((0, 0, 1, 0)), 4, order), 0)
    return ",".join(map(str, steps))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("0I0,0W0", "0B0"),
        ("0F0,0I0,0W0,0F1,0I1,0W1", "0F0,0B0,0F1,0B1"),
        ("1I0,1W0", "1B0"),  # its gradient stays on the rank
        ("3I0,3W0", "3I0,3W0"),  # its gradient leaves, and must not wait for W
        ("0I0,0F1,0W0", "0I0,0F1,0W0"),
        ("0I0,0W1", "0I0,0W1"),
        ("0I0,1W0", "0I0,1W0"),
        ("0I0,0I1,0W1,0W0", "0I0,0B1,0W0"),
        ("0W0,0I0", "0W0,0I0"),
        ("0B0,0W0", "0B0,0W0"),
        ("(0F1;1B0)OVERLAP_F_B,0I1,0W1", "(0F1;1B0)OVERLAP_F_B,0B1"),
    ],
)
def test_halves_of_a_backward_are_joined_where_no_other_rank_waits(text: str, left: str) -> None:
    assert joined(text) == left


def test_twins() -> None:
    assert twins(linear_placement(4), tied=False) == ()
    assert twins(linear_placement(4), tied=True) == ((0, 3),)
    assert twins(loop_placement(4, 2), tied=True) == ((0, 3),)
    assert twins(v_placement(4), tied=True) == ()  # first and last stage are neighbours on rank 0
    for tied in (False, True):
        assert twins(mirrored_placement(4), tied) == ((0, 3), (1, 2))


def test_held_stages() -> None:
    assert [v_placement(3).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [loop_placement(2, 3).stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [mirrored_placement(4).stages_of(rank) for rank in range(4)] == [
        (0, 3),
        (1, 2),
        (1, 2),
        (0, 3),
    ]

"""Which ranks of a job differ, and calls of ranks held against one another."""

from __future__ import annotations

import pytest

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.order import IssuedCollective, Mismatch, distinct_ranks, mismatches

PAIR = (0, 1)
WEIGHTS = IssuedCollective("fsdp", "all_gather", 512, PAIR, "0F0")
MORE_WEIGHTS = IssuedCollective("fsdp", "all_gather", 1024, PAIR, "0F0")
GRADIENTS = IssuedCollective("fsdp", "reduce_scatter", 1024, PAIR, "0B0")
TOKENS = IssuedCollective("dp-cp", "all_reduce", 8, PAIR)
STEP = (TOKENS, WEIGHTS, MORE_WEIGHTS, GRADIENTS)


def test_equal_calls_match() -> None:
    assert mismatches({0: STEP, 1: STEP}) == []


def test_where_a_call_is_made_may_differ() -> None:
    assert mismatches({0: [WEIGHTS], 1: [WEIGHTS._replace(where="0F1")]}) == []


def test_a_skipped_call() -> None:
    skipped = (TOKENS, MORE_WEIGHTS, GRADIENTS)
    assert mismatches({0: STEP, 1: skipped}) == [Mismatch(2, 0, 1, WEIGHTS, MORE_WEIGHTS)]


def test_the_last_call_skipped() -> None:
    (found,) = mismatches({0: STEP, 1: STEP[:-1]})
    assert found == Mismatch(4, 0, 1, GRADIENTS, None)
    assert str(found) == (
        "call 4 of ranks 0 and 1: rank 0 makes reduce_scatter of 1,024 bytes on fsdp in 0B0, "
        "rank 1 makes no further call"
    )


def test_two_calls_swapped() -> None:
    swapped = (TOKENS, MORE_WEIGHTS, WEIGHTS, GRADIENTS)
    (found,) = mismatches({0: STEP, 1: swapped})
    assert (found.issued, found.other_issued) == (WEIGHTS, MORE_WEIGHTS)


def test_calls_swapped_over_axes_of_the_same_ranks() -> None:
    """In a job of two ranks all axes share one group."""
    (found,) = mismatches({0: STEP, 1: (WEIGHTS, TOKENS, *STEP[2:])})
    assert found == Mismatch(1, 0, 1, TOKENS, WEIGHTS)


@pytest.mark.parametrize("change", [{"bytes": 513}, {"kind": "all_reduce"}, {"axis": "tp"}])
def test_another_size_kind_or_axis(change: dict[str, int | str]) -> None:
    other = WEIGHTS._replace(**change)  # pyright: ignore[reportArgumentType]
    assert mismatches({0: [WEIGHTS], 1: [other]}) == [Mismatch(1, 0, 1, WEIGHTS, other)]


def test_a_rank_without_any_call() -> None:
    assert mismatches({0: STEP, 1: []}) == [Mismatch(1, 0, 1, TOKENS, None)]
    assert mismatches({0: [], 1: STEP}) == [Mismatch(1, 0, 1, None, TOKENS)]


def test_a_rank_that_was_not_looked_at_is_not_missed() -> None:
    assert mismatches({1: STEP}) == []


def test_every_other_rank_is_held_against_the_first() -> None:
    group = (0, 4, 8, 12)
    same = [WEIGHTS._replace(members=group)]
    wrong = [same[0]._replace(bytes=1)]
    found = mismatches({0: same, 4: wrong, 12: wrong})
    assert [(each.rank, each.other_rank) for each in found] == [(0, 4), (0, 12)]


def test_groups_do_not_wait_for_one_another() -> None:
    """Calls on different ranks' groups have no common order."""
    near, far = WEIGHTS, GRADIENTS._replace(members=(0, 2))
    assert mismatches({0: [near, far], 1: [near], 2: [far]}) == []
    assert mismatches({0: [far, near], 1: [near], 2: [far]}) == []


def message(kind: str, size: int, source: int, target: int) -> IssuedCollective:
    return IssuedCollective("pp", kind, size, (source, target))


def test_messages_cross_each_other() -> None:
    """Either rank may send before it receives: directions are lines of their own."""
    one = [message("send", 8, 0, 1), message("recv", 6, 1, 0)]
    other = [message("send", 6, 1, 0), message("recv", 8, 0, 1)]
    assert mismatches({0: one, 1: other}) == []


def test_messages_that_come_in_another_order() -> None:
    sent = [message("send", 8, 0, 1), message("send", 6, 0, 1)]
    expected = [message("recv", 6, 0, 1), message("recv", 8, 0, 1)]
    assert mismatches({0: sent, 1: expected}) == [Mismatch(1, 0, 1, sent[0], expected[0])]


def test_a_message_that_nobody_receives() -> None:
    sent = message("send", 8, 1, 0)
    (found,) = mismatches({0: [], 1: [sent]})
    assert found == Mismatch(1, 0, 1, None, sent)


def test_around_a_ring_all_send_and_receive() -> None:
    ring = [IssuedCollective("ring", kind, 64, (0, 1, 2)) for kind in ("send", "recv")] * 2
    assert mismatches(dict.fromkeys(range(3), ring)) == []
    found = mismatches({0: ring, 1: ring, 2: ring[:2]})
    assert found == [Mismatch(3, 0, 2, ring[2], None)]


def test_experts_are_sent_as_much_as_they_are() -> None:
    """The routing decides how much each rank sends; that it sends is for all to do."""
    rows = [IssuedCollective("ep", "all_to_all", size, PAIR) for size in (96, 32)]
    assert mismatches({0: rows[:1], 1: rows[1:]}) == []
    assert len(mismatches({0: rows, 1: rows[1:]})) == 1
    gathers = [each._replace(kind="all_gather") for each in rows]
    assert len(mismatches({0: gathers[:1], 1: gathers[1:]})) == 1


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 tp=2 pp=2", "tp=4 pp=4"])
def test_all_ranks_of_a_small_job_are_looked_at(layout: str) -> None:
    plan = resolve(PlanOptions("tiny", layout=layout))
    assert distinct_ranks(plan) == tuple(range(plan.layout.world))


@pytest.mark.parametrize(
    ("layout", "on_each_axis"),
    [
        ("tp=8 pp=16 dp=128", {"tp": {1, 7}, "dp": {1, 127}}),
        ("tp=8 cp=16 pp=16 dp=8", {"tp": {1, 7}, "cp": {1, 15}, "dp": {1, 7}}),
        ("tp=2 pp=16 dp=64", {"tp": {1}, "dp": {1, 63}}),
    ],
)
def test_ranks_of_a_large_job(layout: str, on_each_axis: dict[str, set[int]]) -> None:
    plan = resolve(PlanOptions("llama-3.1-405b", layout=layout, microbatches=16))
    coords = [plan.layout.coord(rank) for rank in distinct_ranks(plan)]
    firsts = [each.pp for each in coords if not (each.tp or each.cp or each.dp)]
    assert firsts == list(range(16))
    for axis in ("tp", "cp", "dp"):
        assert {getattr(at, axis) for at in coords} == {0} | on_each_axis.get(axis, set())
    # Each of those at the first, a middle and the last stage, and nothing else.
    assert len(coords) == 16 + 3 * sum(len(places) for places in on_each_axis.values())
    assert {at.pp for at in coords if at.tp == 1} == {0, 8, 15}

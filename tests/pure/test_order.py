"""The order proof: lists of calls that end, and lists that do not, with the cycle named."""

from __future__ import annotations

from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.layout.groups import PIPELINE, Topology, group_of
from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.order import (
    AFTER,
    IssuedCollective,
    OrderVerdict,
    Waiting,
    distinct_ranks,
    mismatches,
    prove_order,
)

Lists = dict[int, list[IssuedCollective]]


@cache
def topology_of(layout: str) -> Topology:
    return Topology.of(resolve(PlanOptions("tiny", layout=layout, set={"layers": "8"})))


def pair(kind: str, source: int, target: int, where: str = "", size: int = 8) -> IssuedCollective:
    return IssuedCollective("pp", kind, size, (source, target), where)


def connected(*pairs: tuple[int, int]) -> list[IssuedCollective]:
    return [pair("connect", *each, "before the first action", 0) for each in pairs]


def reduction(axis: str, *members: int, where: str = "") -> IssuedCollective:
    return IssuedCollective(axis, "all_reduce", 64, members, where)


BOTH = connected((0, 1), (1, 0))
TWO = topology_of("pp=2")


def test_nothing_to_wait_for() -> None:
    assert prove_order(topology_of("dp=1"), {0: []}) == OrderVerdict(1, 0)
    assert prove_order(topology_of("dp=1"), {0: []}).ok


def test_sends_that_cross_are_a_cycle() -> None:
    """Each side sends before it receives: fine for `mismatches`, a deadlock if a send blocks."""
    calls = {
        0: [*BOTH, pair("send", 0, 1, "0F0"), pair("recv", 1, 0, "0B0")],
        1: [*BOTH, pair("send", 1, 0, "1B0"), pair("recv", 0, 1, "1F0")],
    }
    assert not mismatches(calls)
    found = prove_order(TWO, calls)
    assert not found.ok
    assert found.cycle == (Waiting(0, calls[0][2], (1,)), Waiting(1, calls[1][2], (0,)))
    assert str(found.cycle[0].call) == "send of 8 bytes on pp to rank 1 in 0F0"
    assert not found.unconnected
    assert not found.differing


def test_receives_that_cross_are_a_cycle() -> None:
    calls = {
        0: [*BOTH, pair("recv", 1, 0), pair("send", 0, 1)],
        1: [*BOTH, pair("recv", 0, 1), pair("send", 1, 0)],
    }
    assert [each.rank for each in prove_order(TWO, calls).cycle] == [0, 1]


def test_one_of_both_sides_turns_around() -> None:
    calls = {
        0: [*BOTH, pair("send", 0, 1), pair("recv", 1, 0)],
        1: [*BOTH, pair("recv", 0, 1), pair("send", 1, 0)],
    }
    assert prove_order(TWO, calls) == OrderVerdict(2, 8)


def test_connections_in_another_order_are_a_cycle() -> None:
    (first, second) = BOTH
    found = prove_order(TWO, {0: [first, second], 1: [second, first]})
    assert [each.waits_for for each in found.cycle] == [(1,), (0,)]
    said = "connection of ranks 0 to 1 before the first action"
    assert str(found.cycle[0].call) == said


def test_the_shortest_cycle_is_named() -> None:
    """Rank 0 waits for rank 1 and rank 1 for rank 2, because ranks 2 and 3 lock each other."""
    layout = topology_of("pp=4")
    pairs = connected((0, 1), (1, 2), (2, 3), (3, 2))
    calls = {
        0: [*pairs[:1], pair("send", 0, 1)],
        1: [*pairs[:2], pair("send", 1, 2), pair("recv", 0, 1)],
        2: [*pairs[1:], pair("send", 2, 3), pair("recv", 3, 2), pair("recv", 1, 2)],
        3: [*pairs[2:], pair("send", 3, 2), pair("recv", 2, 3)],
    }
    assert [(each.rank, each.waits_for) for each in prove_order(layout, calls).cycle] == [
        (2, (3,)),
        (3, (2,)),
    ]


def test_a_rank_that_has_no_call_left() -> None:
    """No cycle; of the chain, the rank that waits for an ended one is named."""
    calls: Lists = {
        0: [reduction("dp-cp", 0, 1), reduction("dp-cp", 0, 1)],
        1: [reduction("dp-cp", 0, 1)],
    }
    found = prove_order(topology_of("dp=2"), calls)
    assert found.cycle == (Waiting(0, calls[0][1], (1,)),)
    assert [each.number for each in found.differing] == [2]


def test_order_across_groups_is_a_cycle_and_a_difference() -> None:
    """Within each group all is well: two groups of two ranks each, taken in another order."""
    tp, dp = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3)}
    usual = {rank: [reduction("tp", *tp[rank]), reduction("dp-cp", *dp[rank % 2])] for rank in tp}
    assert prove_order(topology_of("dp=2 tp=2"), usual).ok
    swapped = usual | {1: usual[1][::-1], 2: usual[2][::-1]}
    assert not mismatches(swapped)
    found = prove_order(topology_of("dp=2 tp=2"), swapped)
    assert [(each.rank, each.waits_for) for each in found.cycle] == [
        (0, (1,)),
        (1, (3,)),
        (3, (2,)),
        (2, (0,)),
    ]
    assert [(each.rank, each.other_rank) for each in found.differing] == [(0, 1), (0, 2)]


def test_two_axes_of_one_group_are_told_apart() -> None:
    """A rank has one tuple for the members of both, which have communicators of their own."""
    members = (0, 1)
    first, second = (IssuedCollective(axis, "all_reduce", 64, members) for axis in ("tp", "row"))
    calls = {0: [first, first, second], 1: [first, second, first]}
    found = prove_order(topology_of("tp=2"), calls)
    assert [(each.rank, each.waits_for) for each in found.cycle] == [(0, (1,)), (1, (0,))]


@pytest.mark.parametrize(
    "change", [{"where": "0F1"}, {"bytes": 65}, {"kind": "all_gather"}, {"axis": "fsdp"}]
)
def test_ranks_at_one_stage_issue_the_same(change: dict[str, int | str]) -> None:
    mine, theirs = reduction("tp", 0, 1, where="0F0"), reduction("tp", 2, 3, where="0F0")
    other = theirs._replace(**change)  # pyright: ignore[reportArgumentType]
    calls: Lists = {0: [mine], 2: [other]}
    (found,) = prove_order(topology_of("dp=2 tp=2"), calls).differing
    assert (found.number, found.rank, found.other_rank) == (1, 0, 2)
    assert prove_order(topology_of("dp=2 tp=2"), {0: [mine], 2: [theirs]}).ok


def test_what_routing_decides_may_differ() -> None:
    rows = [IssuedCollective("ep", "all_to_all", size, (0, 1)) for size in (96, 32)]
    assert prove_order(topology_of("dp=2"), {0: rows[:1], 1: rows[1:]}).ok


def test_what_a_shard_decides_may_differ_between_ranks_that_do_not_meet_in_it() -> None:
    """Partial sums over tp: another dp rank may have none, or more; the same tp group may not."""
    layout, end = topology_of("dp=2 tp=2"), AFTER
    groups = {0: ((0, 1), (0, 2)), 1: ((0, 1), (1, 3)), 2: ((2, 3), (0, 2)), 3: ((2, 3), (1, 3))}
    calls: Lists = {
        rank: [reduction("tp", *tp, where=end), reduction("fsdp", *dp, where=end)]
        for rank, (tp, dp) in groups.items()
    }
    larger = {rank: [calls[rank][0]._replace(bytes=128), calls[rank][1]] for rank in (2, 3)}
    assert prove_order(layout, calls | larger).ok
    assert prove_order(layout, calls | {rank: calls[rank][1:] for rank in (2, 3)}).ok
    inside = {rank: [each._replace(where="0F0") for each in larger[rank]] for rank in larger}
    assert not prove_order(layout, calls | inside).ok
    swapped = prove_order(layout, {0: calls[0], 1: calls[1][::-1]})
    assert [(each.number, each.rank, each.other_rank) for each in swapped.differing] == [(1, 0, 1)]


def test_messages_between_other_stages_differ() -> None:
    """Rank 0 sends to stage 1, and rank 4, which is at the same stage, to stage 2."""
    layout = topology_of("dp=2 pp=4")
    one, other = (group_of(layout, PIPELINE, rank) for rank in (0, 1))
    calls: Lists = {
        0: [*connected((0, one[1])), pair("send", 0, one[1])],
        1: [*connected((1, other[2])), pair("send", 1, other[2])],
    }
    (found,) = prove_order(layout, calls).differing
    assert found.number == 1
    calls[1] = [*connected((1, other[1])), pair("send", 1, other[1])]
    assert prove_order(layout, calls) == OrderVerdict()


def test_a_message_before_its_connection() -> None:
    """The first message of the pair is named, once; the other direction is connected."""
    first = [pair("send", 0, 1, "0F0"), pair("send", 0, 1, "0F1"), pair("recv", 1, 0, "0B0")]
    other = [pair("recv", 0, 1, "1F0"), pair("recv", 0, 1, "1F1"), pair("send", 1, 0, "1B0")]
    back = connected((1, 0))
    found = prove_order(TWO, {0: [*back, *first], 1: [*back, *other]})
    assert not found.ok
    assert not found.cycle
    assert [(each.rank, each.call) for each in found.unconnected] == [(0, first[0])]
    late = [first[0], *BOTH, *first[1:]], [other[0], *BOTH, *other[1:]]
    assert len(prove_order(TWO, dict(enumerate(late))).unconnected) == 1
    healthy = [*BOTH, *first], [*BOTH, *other]
    assert prove_order(TWO, dict(enumerate(healthy))).ok


def test_connections_do_not_disturb_the_comparison_of_groups() -> None:
    """In a job of two ranks a connection and a collective have the same members."""
    calls = {
        rank: [*BOTH, reduction("world", 0, 1), pair("send" if rank == 0 else "recv", 0, 1)]
        for rank in (0, 1)
    }
    assert not mismatches(calls)
    assert prove_order(TWO, calls).ok
    (found,) = mismatches({0: calls[0], 1: calls[1][1:]})
    assert found.issued == BOTH[0]


def test_around_a_ring_all_send_and_receive() -> None:
    ring = [IssuedCollective("ring", kind, 64, (0, 1, 2)) for kind in ("send", "recv")] * 2
    layout = Topology(Layout(cp=3))
    assert prove_order(layout, dict.fromkeys(range(3), ring)) == OrderVerdict(3, 12)
    (found,) = prove_order(layout, {0: ring, 1: ring, 2: ring[:2]}).cycle
    assert (found.rank, found.waits_for) == (0, (2,))


def has_an_order(calls: Lists) -> bool:
    """Once more, as a graph: the n-th call of a group is a node, after the one before on a rank."""
    after: TopologicalSorter[tuple[object, int]] = TopologicalSorter()
    for own in calls.values():
        numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
        before: list[tuple[object, int]] = []
        for call in own:
            group = (call.axis, call.members)
            node = (group, numbers[group])
            after.add(node, *before)
            numbers[group] += 1
            before = [node]
    try:
        after.prepare()
    except CycleError:
        return False
    return True


GROUPS = [
    ("tp", (0, 1)),
    ("tp", (2, 3)),
    ("dp-cp", (0, 2)),
    ("dp-cp", (1, 3)),
    ("ep", (0, 2)),
    ("world", (0, 1, 2, 3)),
    ("row", (0, 1, 3)),
]


@settings(max_examples=200)
@given(st.data())
def test_a_step_ends_where_its_calls_have_one_order(data: st.DataObject) -> None:
    """Lists cut from one order, with some neighbours swapped; cycles lead back to their start."""
    line = data.draw(st.lists(st.sampled_from(GROUPS), min_size=2, max_size=12))
    calls: Lists = {
        rank: [reduction(axis, *members) for axis, members in line if rank in members]
        for rank in range(4)
    }
    assert not prove_order(topology_of("dp=2 tp=2"), calls).cycle
    for _ in range(data.draw(st.integers(0, 3))):
        own = calls[data.draw(st.integers(0, 3))]
        place = data.draw(st.integers(0, max(0, len(own) - 2)))
        own[place : place + 2] = own[place : place + 2][::-1]
    cycle = prove_order(topology_of("dp=2 tp=2"), calls).cycle
    assert bool(cycle) != has_an_order(calls)
    for one, other in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert other.rank in one.waits_for


# --- A large job, of which some ranks are known


def large() -> tuple[Topology, Lists]:
    """405B on 1,024 ranks: messages down one pipeline, and a tp, an fsdp and a world collective."""
    plan = resolve(PlanOptions("llama-3.1-405b", layout="tp=8 pp=16 dp=8", microbatches=16))
    topology = Topology.of(plan)
    calls: Lists = {}
    for rank in distinct_ranks(plan):
        at, column = plan.layout.coord(rank).pp, group_of(topology, PIPELINE, rank)
        ends = [(column[i], column[i + 1]) for i in range(15) if at in (i, i + 1)]
        groups = {axis: group_of(topology, axis, rank) for axis in ("tp", "fsdp", "world")}
        own = connected(*ends)
        for microbatch in range(4):
            where = f"{at}F{microbatch}"
            own += [pair("recv", *ends[0], where)] if at else []
            own += [IssuedCollective("fsdp", "all_gather", 32, groups["fsdp"], where)]
            own += [IssuedCollective("tp", "all_gather", 32, groups["tp"], where)]
            own += [pair("send", *ends[-1], where)] if at < 15 else []
        calls[rank] = [*own, reduction("world", *groups["world"])]
    return topology, calls


def test_of_a_large_job_whole_pipelines_are_played() -> None:
    topology, calls = large()
    column = group_of(topology, PIPELINE, 0)
    assert len(calls) == 28
    found = prove_order(topology, calls)
    assert found == OrderVerdict(16, sum(len(calls[rank]) for rank in column))


def test_of_a_large_job_a_pipeline_that_hangs() -> None:
    """The last stage enters the collective of all ranks one message too early, everywhere."""
    topology, calls = large()
    for rank, own in calls.items():
        if topology.layout.coord(rank).pp == 15:
            own.insert(-4, own.pop())
    assert not mismatches({rank: calls[rank] for rank in (0, 1)})
    found = prove_order(topology, calls)
    last, before = group_of(topology, PIPELINE, 0)[:-3:-1]
    assert [each.rank for each in found.cycle] in ([last, before], [before, last])
    assert not found.differing


def test_of_a_large_job_a_rank_outside_the_pipeline_differs() -> None:
    """Rank 1 swaps two groups that no other known rank shares with it."""
    topology, calls = large()
    where = next(place for place, each in enumerate(calls[1]) if each.axis == "fsdp")
    calls[1][where : where + 2] = calls[1][where : where + 2][::-1]
    found = prove_order(topology, calls)
    assert not found.cycle
    assert [(each.number, each.rank, each.other_rank) for each in found.differing] == [
        (where + 1, 0, 1)
    ]


def test_a_part_of_a_pipeline_is_not_played() -> None:
    topology, calls = large()
    found = prove_order(topology, {rank: calls[rank] for rank in (0, 1)})
    assert found == OrderVerdict(0, 0)

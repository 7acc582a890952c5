"""The order proof on schedules: their messages in one line end, and posted late they do not."""

from __future__ import annotations

import pytest
from test_order import Lists, connected, pair, reduction

from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, play
from fivefold.core.schedule.schedule import Message, Schedule, actions_of, channels, needed, sent
from fivefold.cost.traffic.order import OrderVerdict, mismatches, prove_order


def lists_of(schedule: Schedule, columns: int = 1, posted_late: bool = False) -> Lists:
    """Calls of every pipeline rank of `columns` pipelines, rank = coord · columns + column.

    All messages have one order: by the time at which they are sent. Each rank issues its sends and
    posts its receives in that order. `posted_late`: a receive only comes before the action that
    needs it.
    """
    order = _by_need(schedule) if posted_late else _by_time(schedule)
    pairs, world = channels(schedule), range(columns * schedule.num_ranks)
    calls: Lists = {}
    for rank in world:
        coord, column = divmod(rank, columns)
        ends = [(a * columns + column, b * columns + column) for a, b in pairs]
        own = connected(*(each for each in ends if rank in each))
        for each in order[coord]:
            kind = "send" if each.source == coord else "recv"
            where = f"{each.stage}{each.kind}{each.microbatch}"
            own.append(pair(kind, *ends[pairs.index((each.source, each.target))], where))
        group = range(coord * columns, (coord + 1) * columns)
        own += [reduction("dp-cp", *group)] if columns > 1 else []
        calls[rank] = [*own, reduction("world", *world)]
    return calls


def _by_time(schedule: Schedule) -> list[list[Message]]:
    one = (1.0,) * schedule.num_stages
    timeline = play(schedule, Costs(one, one, one, (0.0,) * schedule.num_stages))
    line: list[tuple[float, int, int, Message]] = []
    for rank, (steps, ends) in enumerate(zip(schedule.order, timeline.ends, strict=True)):
        for step, end in zip(steps, ends, strict=True):
            for action in actions_of(step):
                if message := sent(schedule, action):
                    line.append((end, rank, len(line), message))
    messages = [each[-1] for each in sorted(line)]
    return [
        [each for each in messages if rank in (each.source, each.target)]
        for rank in range(schedule.num_ranks)
    ]


def _by_need(schedule: Schedule) -> list[list[Message]]:
    found: list[list[Message]] = []
    for steps in schedule.order:
        own: list[Message | None] = []
        for actions in map(actions_of, steps):
            own += [needed(schedule, each) for each in actions]
            own += [sent(schedule, each) for each in actions]
        found.append([each for each in own if each is not None])
    return found


NAMES = [family.name for family in catalog.FAMILIES if not family.asynchronous]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 2])
def test_a_schedule_ends_if_messages_have_one_order(name: str, columns: int) -> None:
    schedule = catalog.make(name, 4, 8)
    calls = lists_of(schedule, columns)
    assert not mismatches(calls)
    found = prove_order(Topology(Layout(pp=4, shard=columns), schedule=schedule), calls)
    assert found == OrderVerdict(4 * columns, sum(map(len, calls.values())))
    without = {
        rank: [each for each in own if each.kind != "connect"] for rank, own in calls.items()
    }
    bare = prove_order(Topology(Layout(pp=4, shard=columns), schedule=schedule), without)
    assert {each.call.members for each in bare.unconnected} == {
        each.members for own in calls.values() for each in own if each.kind == "connect"
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_a_schedule_hangs_if_receives_are_posted_where_they_are_needed(name: str) -> None:
    """Activations and gradients cross: a blocking send on both sides."""
    schedule = catalog.make(name, 4, 8)
    found = prove_order(
        Topology(Layout(pp=4), schedule=schedule), lists_of(schedule, posted_late=True)
    )
    assert len(found.cycle) >= 2
    following = [*found.cycle[1:], found.cycle[0]]
    for one, other in zip(found.cycle, following, strict=True):
        assert other.rank in one.waits_for

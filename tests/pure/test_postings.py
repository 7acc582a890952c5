"""When receives are posted: a step ends even if every call blocks its host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.receives import postings
from fivefold.core.schedule.schedule import (
    Message,
    Schedule,
    actions_of,
    merged,
    needed,
    sent,
    sent_by,
)

NAMES = [family.name for family in FAMILIES]
Call = tuple[str, Message]


def calls(schedule: Schedule, rank: int) -> list[Call]:
    """What a rank issues, in order."""
    found: list[Call] = []
    for step, messages in zip(merged(schedule, rank), postings(schedule)[rank], strict=True):
        found += [("recv", message) for message in messages]
        for message in filter(None, (needed(schedule, action) for action in actions_of(step))):
            assert ("recv", message) in found, f"{step} needs what is not posted"
        sends = (sent(schedule, action) for action in actions_of(step))
        found += [("send", message) for message in sends if message is not None]
    return found


def one_step_early(schedule: Schedule, rank: int) -> list[Call]:
    """The receives of the next step before each step, whatever they wait for."""
    steps, found, posted = merged(schedule, rank), list[Call](), set[Message]()
    lines = {source: list(sent_by(schedule, source)) for source in range(schedule.num_ranks)}
    for place, step in enumerate(steps):
        for following in steps[place : place + 2]:
            for message in filter(None, (needed(schedule, one) for one in actions_of(following))):
                line = [each for each in lines[message.source] if each.target == rank]
                for each in line[: line.index(message) + 1]:
                    if each not in posted:
                        posted.add(each)
                        found.append(("recv", each))
        sends = (sent(schedule, action) for action in actions_of(step))
        found += [("send", message) for message in sends if message is not None]
    return found


def ends(lists: list[list[Call]]) -> bool:
    """Play the calls of all ranks, each of which blocks until its other end has called."""
    place, moved = [0] * len(lists), True

    def now(rank: int) -> Call | None:
        return lists[rank][place[rank]] if place[rank] < len(lists[rank]) else None

    while moved:
        moved = False
        for rank in range(len(lists)):
            while (mine := now(rank)) is not None:
                kind, message = mine
                other = message.target if kind == "send" else message.source
                if now(other) != ("recv" if kind == "send" else "send", message):
                    break
                place[rank] += 1
                place[other] += 1
                moved = True
    return all(at == len(each) for at, each in zip(place, lists, strict=True))


def schedules(ranks: int, microbatches: int) -> Iterator[Schedule]:
    for family in FAMILIES:
        for chunks in range(1, 5):
            if not family.problems(ranks, microbatches, chunks):
                yield family.make(ranks, microbatches, chunks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 6, 16])
def test_every_schedule_ends_though_every_call_blocks(ranks: int, microbatches: int) -> None:
    for schedule in schedules(ranks, microbatches):
        for each in (schedule, schedule.forwards()):
            assert ends([calls(each, rank) for rank in range(ranks)]), each.name


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.integers(2, 12), st.integers(1, 40), st.integers(1, 6))
def test_any_size_ends(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    if not family.problems(ranks, microbatches, chunks):
        schedule = family.make(ranks, microbatches, chunks)
        assert ends([calls(schedule, rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_receives_of_the_next_step_would_lock(ranks: int) -> None:
    for schedule in schedules(ranks, 8):
        assert not ends([one_step_early(schedule, rank) for rank in range(ranks)]), schedule.name


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_posted_once_in_the_order_of_its_source(name: str) -> None:
    schedule = next(each for each in schedules(4, 8) if each.name == name)
    for rank in range(4):
        posted = [message for step in postings(schedule)[rank] for message in step]
        for source in range(4):
            line = [each for each in sent_by(schedule, source) if each.target == rank]
            assert [each for each in posted if each.source == source] == line


def test_a_step_computes_while_the_next_message_comes() -> None:
    """In the steady state of 1F1B, what a step needs is posted before the step ahead of it."""
    schedule = next(each for each in schedules(4, 16) if each.name == "1f1b")
    steps = merged(schedule, 1)
    ahead = 0
    for place, messages in enumerate(postings(schedule)[1]):
        wanted = {needed(schedule, action) for action in actions_of(steps[place])}
        ahead += sum(message not in wanted for message in messages)
    assert ahead >= len(steps) // 3


def test_a_schedule_of_another_order_has_other_postings() -> None:
    """Nothing is kept by name: two schedules of one name may differ."""
    made = next(each for each in schedules(2, 4) if each.name == "gpipe")
    other = next(each for each in schedules(2, 4) if each.name == "1f1b")
    assert postings(made) != postings(replace(other, name="gpipe"))

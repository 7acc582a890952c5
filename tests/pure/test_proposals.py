"""Drafts without a model: what is proposed, and how the option is written."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.generate.blocks import BlockPool, blocks_of
from fivefold.generate.drafts import DraftOptions, NgramDrafter
from fivefold.generate.requests import DECODE_ROWS, Request, SequenceState
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from tests.guesses import Guesses


def sequence_of(tokens: list[int]) -> SequenceState:
    return SequenceState(Request("a", tuple(tokens), 10), 0, 1000, tokens=list(tokens))


def proposed(tokens: list[int], count: int = 4) -> list[int]:
    return NgramDrafter(count).propose(sequence_of(tokens), count)


@pytest.mark.parametrize(
    ("tokens", "proposals"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3], []),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # it goes on with itself
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], [5, 8, 1, 2]),  # the longest text before it
        ([9, 1, 2, 5, 9, 1, 2, 6, 9, 1, 2], [6, 9, 1, 2]),  # the last of equals
        ([1, 2], []),
        ([1], []),
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], proposals: list[int]) -> None:
    assert proposed(tokens) == proposals


def by_search(tokens: list[int]) -> int | None:
    """The place to go on from, looked for everywhere."""

    def equal(stop: int) -> int:
        length = 0
        while length < min(stop, 16) and tokens[stop - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    stops = [stop for stop in range(2, len(tokens)) if equal(stop) >= 2]
    return max(stops[::-1][:8], key=equal, default=None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 7)))
def test_the_index_grows_with_the_tokens(tokens: list[int], steps: list[int]) -> None:
    drafter, state, length = NgramDrafter(3), sequence_of(tokens[:1]), 1
    for step in [*steps, len(tokens)]:
        length = min(len(tokens), length + step)
        state.tokens[:] = tokens[:length]
        place = by_search(state.tokens)
        longer = list(state.tokens)
        for i in range(3 if place is not None else 0):
            longer.append(longer[(place or 0) + i])
        assert drafter.propose(state, 9) == longer[length:]


def test_a_step_does_not_read_a_long_text_again() -> None:
    dice = random.Random(0)
    state, drafter = sequence_of([dice.randrange(50) for _ in range(200_000)]), NgramDrafter(4)
    drafter.propose(state, 4)
    began = time.process_time()
    for _ in range(200):
        state.tokens.append(dice.randrange(50))
        drafter.propose(state, 4)
    assert time.process_time() - began < 0.2, "a millisecond a step"


@pytest.mark.parametrize("text", ["ngram", "ngram:", "ngram:x", "ngram:-1", "words:3", "", "4"])
def test_other_drafts_are_refused(text: str) -> None:
    with pytest.raises(FivefoldError, match="give ngram:K"):
        DraftOptions.parse(text)


@pytest.mark.parametrize("text", ["ngram:0", "ngram:17", "ngram:999"])
def test_the_number_of_drafts_has_bounds(text: str) -> None:
    with pytest.raises(FivefoldError, match="give 1 to 16 tokens"):
        DraftOptions.parse(text)


def scheduled(scheduler: Scheduler) -> list[tuple[str, int, bool]]:
    """Tokens of the next step, as if nothing of it was accepted."""
    batch, by_id = scheduler.schedule(), {state.request.id: state for state in scheduler.running}
    sequences = [by_id[chunk.id] for chunk in batch.chunks]
    scheduler.computed(batch, sequences)
    for chunk, state in zip(batch.chunks, sequences, strict=True):
        if chunk.samples and not chunk.draft:
            state.append(0, -1.0)
    return [(chunk.id, chunk.start, chunk.draft) for chunk in batch.chunks]


def scheduler_of(
    blocks: int = 100, outgrown_at: int | None = None, in_flight: int = 1, **limits: int
) -> Scheduler:
    drafter = Guesses({}, 9, least=4, most=4)
    return Scheduler(
        BlockPool(blocks),
        ScheduleLimits(**limits),
        1000,
        in_flight,
        outgrown_at=outgrown_at,
        drafter=drafter,
    )


def test_drafts_take_what_others_leave_of_a_step() -> None:
    """Of its tokens and rows: whoever runs or waits has its own before any proposal."""
    scheduler = scheduler_of(tokens=6)
    for id in "abcd":
        scheduler.add(Request(id, (1,), 40))
    seen = [scheduled(scheduler) for _ in range(20)]
    assert all(len(step) <= 6 and len({id for id, *_ in step}) == 4 for step in seen)
    assert any(len(step) == 6 for step in seen)
    crowded = scheduler_of(blocks=2 * DECODE_ROWS, tokens=4 * DECODE_ROWS)
    for number in range(DECODE_ROWS - 3):
        crowded.add(Request(f"{number}", (1,), 9))
    assert max(len(scheduled(crowded)) for _ in range(6)) == DECODE_ROWS


def test_proposals_have_the_adapter_of_their_sequence() -> None:
    scheduler = scheduler_of()
    scheduler.add(Request("a", (1,), 40, adapter=2))
    scheduler.add(Request("b", (1,), 40))
    chunks = scheduler.schedule().chunks
    assert sum(chunk.draft for chunk in chunks) == 8
    assert {(chunk.id, chunk.adapter) for chunk in chunks} == {("a", 2), ("b", 0)}


def test_no_sequence_loses_its_blocks_to_proposals() -> None:
    """Two that fill all blocks with what they have: there is no room for drafts, and none taken."""
    scheduler = scheduler_of(blocks=4)
    for token, id in enumerate("ab"):
        scheduler.add(Request(id, (token,) * 10, 22))
    drafted = 0
    for _ in range(22):
        step = scheduled(scheduler)
        drafted += sum(draft for *_, draft in step)
        assert {id for id, *_ in step} == {"a", "b"} and scheduler.num_preempted == 0
    assert drafted > 20


def test_blocks_of_proposals_under_way_are_waited_for() -> None:
    """Two batches are in flight, and the block that the younger one needs has only proposals of the
    older: it has it as soon as they are refused, and neither starts again."""
    scheduler = scheduler_of(blocks=3, in_flight=2)
    for token, length in ((1, 13), (2, 16)):
        scheduler.add(Request(f"{token}", (token,) * length, 20))
    states, flights = list(scheduler.waiting), list[SequenceState]()
    for _ in range(8):
        batch = scheduler.schedule()
        if batch.chunks:
            state = next(state for state in states if state.request.id == batch.chunks[0].id)
            scheduler.computed(batch, [state] * len(batch.chunks))
            flights.append(state)
        if len(flights) == 2 or not batch.chunks:
            flights.pop(0).append(0, -1.0)
        if len(states[1].table) == 2:
            break
    assert len(states[1].table) == 2 and scheduler.num_preempted == 0 < scheduler.num_drafted


def test_blocks_of_refused_proposals_are_given_back() -> None:
    scheduler = scheduler_of(blocks=3)
    scheduler.add(Request("a", (1,) * 12, 30))
    (state,) = scheduler.waiting
    most = 0
    for _ in range(18):
        scheduled(scheduler)
        most = max(most, len(state.table) - blocks_of(len(state.tokens)))
        scheduler._trim_drafts()
        assert blocks_of(state.computed) <= len(state.table) <= blocks_of(len(state.tokens))
    assert most == 1, "some proposal was beyond the last block"
    scheduler.remove(state)
    assert scheduler.pool.num_free == 3


@pytest.mark.parametrize(
    ("limit", "outgrown_at", "steps", "last"), [(20, None, 19, 28), (90, 24, 14, 23)]
)
def test_no_proposal_is_beyond_the_last_place_that_counts(
    limit: int, outgrown_at: int | None, steps: int, last: int
) -> None:
    """The last token that may be drawn is not computed; and a text that outgrows its rotation is
    computed again, so a step has tokens of one side."""
    scheduler = scheduler_of(outgrown_at=outgrown_at)
    scheduler.add(Request("a", (1,) * 10, limit))
    starts = [start for _ in range(steps) for _, start, draft in scheduled(scheduler) if draft]
    assert max(starts) == last


def test_grammars_and_scores_are_not_drafted() -> None:
    scheduler = scheduler_of()
    scheduler.add(Request("grammar", (1,) * 10, 30, grammar="{}"))
    scheduler.add(Request("targets", (1,) * 10, 0, targets=(1,)))
    scheduler.add(Request("scores", (1,) * 2, 30, prompt_logprobs=1))
    first = scheduled(scheduler)
    assert not any(draft for *_, draft in first)
    steps = [scheduled(scheduler) for _ in range(8)]
    assert not any(draft for step in steps for id, _, draft in step if id != "scores")

"""Blocks and the scheduler of generation, without a model: nothing leaks, nothing is shared that
differs, and every request ends."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.model.kv_pages import BLOCK, STEP_TOKENS, blocks_of
from fivefold.generate.blocks import BlockPool, chained_digest
from fivefold.generate.requests import Request, SequenceState, StepBatch
from fivefold.generate.scheduler import ScheduleLimits, Scheduler

MAX_SEQ = 120


def test_a_block_is_shared_until_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    first, digest = pool.take(), chained_digest(b"", range(BLOCK))
    assert first is not None
    pool.publish(first, digest)
    assert pool.share(digest) == first and pool.users(first) == 2
    pool.release(first)
    assert pool.num_free == 1
    pool.release(first)
    assert pool.num_free == 2
    assert pool.share(digest) == first, "a free block keeps its contents"


def test_the_block_that_was_released_first_is_forgotten_first() -> None:
    pool = BlockPool(2)
    digests = [chained_digest(b"", [n] * BLOCK) for n in range(2)]
    blocks = [pool.take() for _ in digests]
    for block, digest in zip(blocks, digests, strict=True):
        assert block is not None
        pool.publish(block, digest)
    for block in blocks:
        assert block is not None
        pool.release(block)
    assert pool.take() == blocks[0]
    assert pool.share(digests[0]) is None
    assert pool.share(digests[1]) == blocks[1]
    assert pool.take() is None


def test_forgotten_blocks_are_free_and_not_shared() -> None:
    pool = BlockPool(1)
    block, digest = pool.take(), chained_digest(b"", range(BLOCK))
    assert block is not None
    pool.publish(block, digest)
    pool.release(block)
    pool.forget()
    assert pool.num_free == 1 and pool.share(digest) is None


def test_blocks_of_a_sequence_go_round_their_owners() -> None:
    """A first one is of the owner with the most free; any other serves where the next has none."""
    pool, table = BlockPool(7, owners=3), list[int]()
    for _ in range(5):
        block = pool.take(table[-1] if table else None)
        assert block is not None
        table.append(block)
    assert [block % 3 for block in table] == [0, 1, 2, 0, 1]
    assert pool.take() == 6, "only owner 0 has three blocks, and one is left of 0 and of 2"
    assert pool.take(table[-1]) == 5 and pool.take(5) is None
    pool.release(table[1])
    assert pool.take(after=table[3]) == table[1], "of the owner after that of the block"


def test_an_owner_without_a_free_block_is_passed_over() -> None:
    pool = BlockPool(4, owners=2)
    assert [pool.take(after=1), pool.take(after=1)] == [0, 2]
    digest = chained_digest(b"", range(BLOCK))
    pool.publish(2, digest)
    pool.release(2)
    assert pool.take(after=1) == 1, "empty ones first: the contents of others are kept"
    assert pool.take(after=1) == 3 and pool.take(after=1) == 2
    assert pool.share(digest) is None


def test_a_digest_depends_on_all_tokens_before() -> None:
    tokens = list(range(BLOCK))
    alone = chained_digest(b"", tokens)
    assert chained_digest(chained_digest(b"", tokens[::-1]), tokens) != alone
    assert chained_digest(b"", tokens) == alone


def test_a_request_beyond_the_cache_is_refused() -> None:
    scheduler = Scheduler(BlockPool(2), ScheduleLimits(), MAX_SEQ)
    with pytest.raises(FivefoldError, match=r"may need 40 tokens and the cache has room for 32"):
        scheduler.add(Request("a", tuple(range(30)), 10))


requests_st = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12
)


class Model:
    """Stands in for the model: it remembers what each block holds, and looks at what it reads."""

    def __init__(self, blocks: int, window: int = 10**6) -> None:
        self.window = window
        self.pages: list[list[object]] = [[None] * BLOCK for _ in range(blocks)]

    def forward(self, batch: StepBatch, sequences: dict[str, SequenceState]) -> None:
        for chunk in batch.chunks:
            known = sequences[chunk.id].tokens
            for i, token in enumerate(chunk.tokens, chunk.start):
                # What a key depends on: all tokens up to its own.
                self.pages[chunk.table[i // BLOCK]][i % BLOCK] = tuple(known[: i + 1])
                assert token == known[i]
        for chunk in batch.chunks:
            known = sequences[chunk.id].tokens
            for i in range(max(0, chunk.start - self.window + 1), chunk.stop):
                assert self.pages[chunk.table[i // BLOCK]][i % BLOCK] == tuple(known[: i + 1])


@settings(max_examples=150)
@given(
    requests_st,
    st.integers(8, 14),
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from((None, 1, 16, 17, 37)),
)
def test_every_request_ends_and_reads_its_own_tokens(
    asked: list[tuple[int, int, int]],
    blocks: int,
    budget: int,
    most: int,
    seed: int,
    window: int | None,
) -> None:
    pool = BlockPool(blocks, owners=1 + seed % 3)
    scheduler = Scheduler(pool, ScheduleLimits(budget, most), MAX_SEQ, window=window)
    model, dice = Model(blocks, window or 10**6), random.Random(seed)
    sequences = dict[str, SequenceState]()
    for number, (prefix, length, new) in enumerate(asked):  # few prefixes: many are shared
        request = Request(str(number), (prefix,) * length, new)
        sequences[request.id] = scheduler.add(request)
    left = dict(sequences)
    for _ in range(10_000):
        batch = scheduler.schedule()
        if not batch.chunks:
            break
        assert batch.num_tokens <= budget and len(scheduler.running) <= most
        ids = [chunk.id for chunk in batch.chunks]
        assert len(set(ids)) == len(ids) and set(ids) <= left.keys()
        oldest = min(left.values(), key=lambda each: each.number)
        blocked = oldest in scheduler.waiting and len(scheduler.running) > 0
        assert oldest.request.id in ids or blocked
        model.forward(batch, sequences)
        scheduler.computed(batch, [sequences[id] for id in ids])
        for chunk in (chunk for chunk in batch.chunks if chunk.samples):
            ended = sequences[chunk.id].append(dice.randrange(3), 0.0)
            if ended or dice.random() < 0.02:  # some are cancelled
                scheduler.remove(left.pop(chunk.id))
    assert not left
    assert scheduler.pool.num_free == blocks
    assert all(scheduler.pool.users(block) == 0 for block in range(blocks))


def test_a_window_bounds_the_blocks_of_a_sequence_however_long_it_gets() -> None:
    window, budget = 20, 8
    pool = BlockPool(4)  # 64 tokens; without a window 600 are refused
    scheduler = Scheduler(pool, ScheduleLimits(budget), 1000, window=window)
    sequence, model, most = scheduler.add(Request("a", (1,) * 300, 300)), Model(4, window), 0
    while sequence in scheduler.waiting or sequence in scheduler.running:
        batch = scheduler.schedule()
        assert batch.chunks, "it goes on"
        model.forward(batch, {"a": sequence})
        most = max(most, pool.count - pool.num_free)
        scheduler.computed(batch, [sequence])
        if batch.chunks[0].samples and sequence.append(len(sequence.tokens) % 7, 0.0):
            scheduler.remove(sequence)
    assert len(sequence.tokens) == 600 and sequence.preempted == 0
    assert most <= blocks_of(window + budget) + 1 and pool.num_free == 4
    with pytest.raises(FivefoldError, match="may need 64 tokens"):
        Scheduler(BlockPool(3), ScheduleLimits(28), 1000, window=window).add(sequence.request)


@pytest.mark.parametrize("window", [1, 16, 20])
def test_a_block_is_free_as_soon_as_no_later_token_sees_it(window: int) -> None:
    pool = BlockPool(8)
    scheduler = Scheduler(pool, ScheduleLimits(1), 1000, window=window)
    sequence = scheduler.add(Request("a", (1,) * 100, 1))
    for computed in range(1, 101):
        scheduler.computed(scheduler.schedule(), [sequence])
        first_seen = max(0, computed - window + 1)
        assert pool.count - pool.num_free == blocks_of(computed) - first_seen // BLOCK


def test_a_shared_prefix_that_fills_the_cache_leaves_room_within_a_window() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, ScheduleLimits(28), 1000, window=20)
    for name, length, new in (("a", 60, 5), ("b", 70, 30)):  # the first leaves four full blocks
        sequence = scheduler.add(Request(name, (1,) * length, new))
        while sequence in scheduler.waiting or sequence in scheduler.running:
            batch = scheduler.schedule()
            assert batch.chunks, "it goes on"
            scheduler.computed(batch, [sequence])
            if batch.chunks[0].samples and sequence.append(1, 0.0):
                scheduler.remove(sequence)
        assert sequence.reused == (64 if name == "b" else 0)


def test_blocks_that_run_out_are_taken_from_the_youngest() -> None:
    scheduler = Scheduler(BlockPool(4), ScheduleLimits(tokens=64), MAX_SEQ)
    old, young = (scheduler.add(Request(name, (n,) * 30, 32)) for n, name in enumerate("ab"))
    while old in scheduler.waiting or old in scheduler.running:
        batch = scheduler.schedule()
        by_id = {each.request.id: each for each in (old, young)}
        scheduler.computed(batch, [by_id[chunk.id] for chunk in batch.chunks])
        for chunk in batch.chunks:
            if chunk.samples and by_id[chunk.id].append(7, 0.0):
                scheduler.remove(by_id[chunk.id])
    assert (old.preempted, young.preempted) == (0, 1)
    assert blocks_of(old.limit) == 4


@settings(max_examples=100)
@given(requests_st, st.integers(8, 14), st.integers(1, 70), st.integers(2, 4), st.integers(0, 99))
def test_batches_under_way_draw_each_token_once(
    asked: list[tuple[int, int, int]], blocks: int, budget: int, in_flight: int, seed: int
) -> None:
    """Tokens are known only later; stages compute batches in the order in which they begin."""
    scheduler = Scheduler(BlockPool(blocks), ScheduleLimits(budget), MAX_SEQ, in_flight)
    model, dice, sequences = Model(blocks), random.Random(seed), dict[str, SequenceState]()
    for number, (prefix, length, new) in enumerate(asked):
        request = Request(str(number), (prefix,) * length, new)
        sequences[request.id] = scheduler.add(request)
    left, flights = dict(sequences), deque[list[str]]()
    for _ in range(10_000):
        share = -(-len(left) // in_flight)
        batch = scheduler.schedule()
        if batch.chunks:
            assert len(batch.chunks) <= share
            model.forward(batch, sequences)
            scheduler.computed(batch, [sequences[chunk.id] for chunk in batch.chunks])
            flights.append([chunk.id for chunk in batch.chunks if chunk.samples])
            under_way = [id for flight in flights for id in flight]
            assert len(set(under_way)) == len(under_way), "its token is being drawn already"
        elif not flights:
            break
        if len(flights) == in_flight or not batch.chunks:
            for id in (id for id in flights.popleft() if id in left):
                ended = sequences[id].append(dice.randrange(3), 0.0)
                if ended or dice.random() < 0.02:
                    scheduler.remove(left.pop(id))
    assert not left
    assert scheduler.pool.num_free == blocks


def test_a_sequence_whose_draw_is_under_way_is_not_admitted_again() -> None:
    scheduler = Scheduler(BlockPool(2), ScheduleLimits(), MAX_SEQ, in_flight=2)
    sequence = scheduler.add(Request("a", (1, 2, 3), 4))
    scheduler.computed(scheduler.schedule(), [sequence])
    scheduler.restart()  # it loses its blocks
    assert not scheduler.schedule().chunks
    sequence.append(5, 0.0)
    (chunk,) = scheduler.schedule().chunks
    assert chunk.tokens == (1, 2, 3, 5) and chunk.samples


def compute(scheduler: Scheduler, request: Request) -> SequenceState:
    """Compute the prompt of a request, and end it."""
    sequence = scheduler.add(request)
    while sequence.computed < len(request.prompt):
        batch = scheduler.schedule()
        assert [chunk.id for chunk in batch.chunks] == [request.id]
        scheduler.computed(batch, [sequence])
    scheduler.remove(sequence)
    return sequence


def test_new_weights_share_no_old_blocks() -> None:
    scheduler = Scheduler(BlockPool(8), ScheduleLimits(), MAX_SEQ)
    prompt = tuple(range(3 * BLOCK + 1))
    assert compute(scheduler, Request("a", prompt, 1)).reused == 0
    assert compute(scheduler, Request("b", prompt, 1)).reused == 3 * BLOCK
    scheduler.restart()
    assert compute(scheduler, Request("c", prompt, 1)).reused == 0
    assert scheduler.pool.num_free == 8


def test_texts_on_the_two_sides_of_a_rotation_share_no_blocks() -> None:
    scheduler = Scheduler(BlockPool(12), ScheduleLimits(), MAX_SEQ, outgrown_at=36)
    prompt = tuple(range(40))
    assert compute(scheduler, Request("short", prompt[:35], 1)).reused == 0
    assert compute(scheduler, Request("long", prompt, 1)).reused == 0, "its keys are others"
    assert compute(scheduler, Request("short too", prompt[:34], 1)).reused == 2 * BLOCK
    assert compute(scheduler, Request("long too", prompt[:38], 1)).reused == 2 * BLOCK
    fresh = Scheduler(BlockPool(12), ScheduleLimits(), MAX_SEQ, outgrown_at=36)
    compute(fresh, Request("long", prompt, 1))
    assert compute(fresh, Request("short", prompt[:35], 1)).reused == 0


def test_a_sequence_ends_where_the_model_does() -> None:
    scheduler = Scheduler(BlockPool(4), ScheduleLimits(), max_seq=2 * BLOCK)
    sequence = scheduler.add(Request("a", tuple(range(20)), 1000))  # and is not refused
    assert sequence.limit == scheduler.load == 2 * BLOCK
    scheduler.computed(scheduler.schedule(), [sequence])
    reasons = [sequence.append(1, -1.0) for _ in range(12)]
    assert reasons == [None] * 11 + ["length"] and len(sequence.tokens) == 2 * BLOCK


def test_a_gpu_takes_the_steps_that_plans_assume() -> None:
    assert ScheduleLimits.of("cuda").tokens == STEP_TOKENS > ScheduleLimits.of("cpu").tokens
    assert ScheduleLimits.of("cuda", 64, 3) == ScheduleLimits(64, 3)

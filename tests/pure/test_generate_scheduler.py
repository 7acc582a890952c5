"""Blocks and the scheduler of generation, without a model: nothing leaks, nothing is shared that
differs, and every request ends."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.model.kv_pages import BLOCK, STEP_TOKENS, blocks_of
from fivefold.generate import requests
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


def test_a_block_that_is_taken_has_none_of_its_contents() -> None:
    """It may be known as the end of a prompt and as a full block."""
    pool = BlockPool(1)
    block, digests = pool.take(), [chained_digest(b"", range(n)) for n in (5, BLOCK)]
    assert block is not None
    assert [pool.publish(block, digest) for digest in [*digests, digests[0]]] == [True, True, False]
    pool.release(block)
    assert [pool.share(digest) for digest in digests] == [0, 0]
    pool.release(block)
    pool.release(block)
    assert pool.take() == block
    assert [pool.share(digest) for digest in digests] == [None, None]


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
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40), st.integers(1, 4)),
    min_size=1,
    max_size=8,
)
Asked = list[tuple[int, int, int, int]]
"""Of a prompt its one token, its length, the tokens to draw, and how many samples."""


def drawn_requests(asked: Asked) -> list[Request]:
    """Few prefixes: many are shared."""
    rows = [row for row in asked for _ in range(row[-1])]
    return [
        Request(str(number), (prefix,) * length, new)
        for number, (prefix, length, new, _) in enumerate(rows)
    ]


class Model:
    """Stands in for the model: it remembers what each block holds, and looks at what it reads."""

    def __init__(self, blocks: int, window: int = 10**6) -> None:
        self.window = window
        self.pages: list[list[object]] = [[None] * BLOCK for _ in range(blocks)]

    def forward(self, batch: StepBatch, sequences: dict[str, SequenceState]) -> None:
        copied = [(list(self.pages[source]), target) for source, target in batch.copies]
        for page, target in copied:
            self.pages[target] = page
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
    asked: Asked,
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
    for request in drawn_requests(asked):
        sequences[request.id] = scheduler.add(request)
    left = dict(sequences)
    for _ in range(10_000):
        batch = scheduler.schedule()
        if not batch.chunks:
            break
        assert all((source - target) % pool.owners == 0 for source, target in batch.copies)
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
    asked: Asked, blocks: int, budget: int, in_flight: int, seed: int
) -> None:
    """Tokens are known only later; stages compute batches in the order in which they begin."""
    scheduler = Scheduler(BlockPool(blocks), ScheduleLimits(budget), MAX_SEQ, in_flight)
    model, dice, sequences = Model(blocks), random.Random(seed), dict[str, SequenceState]()
    for request in drawn_requests(asked):
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


PROMPT = tuple(range(1000))  # of 62 blocks and 8 tokens
SAMPLES = 8


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [8192, 512, 300, 64])
@pytest.mark.parametrize("length", [1000, 1008, 1009, 5])
def test_samples_of_a_prompt_compute_it_once(length: int, budget: int, in_flight: int) -> None:
    """And one token each, whose logits are needed; they share all but its last block."""
    pool, model = BlockPool(600, owners=3), Model(600)
    scheduler = Scheduler(pool, ScheduleLimits(budget), 1100, in_flight)
    prompt, sequences = (
        PROMPT[:5] * (length // 5) + PROMPT[: length % 5],
        dict[str, SequenceState](),
    )
    for number in range(SAMPLES):
        request = Request(str(number), prompt, 2)
        sequences[request.id] = scheduler.add(request)
    tokens, steps = 0, 0
    while any(sequence.computed < length for sequence in sequences.values()):
        batch = scheduler.schedule()
        model.forward(batch, sequences)
        scheduler.computed(batch, [sequences[chunk.id] for chunk in batch.chunks])
        tokens, steps = tokens + batch.num_tokens, steps + 1
    assert tokens == length + SAMPLES - 1
    assert pool.count - pool.num_free == (length - 1) // BLOCK + SAMPLES
    # They wait for an end within a block; and each batch of two stages has half of the sequences.
    assert steps == -(-length // budget) + ((length - 1) % BLOCK > 0) + (in_flight - 1)
    assert [sequence.reused for sequence in sequences.values()] == [0] + [length - 1] * 7


def test_prompts_of_one_step_share_their_blocks() -> None:
    scheduler, model = Scheduler(BlockPool(20), ScheduleLimits(), MAX_SEQ), Model(20)
    prompt = tuple(range(60))
    ends = {"a": prompt, "b": prompt[:40] + (7,) * 9, "c": prompt[:32]}
    sequences = {id: scheduler.add(Request(id, tokens, 2)) for id, tokens in ends.items()}
    batch = scheduler.schedule()
    model.forward(batch, sequences)
    assert {chunk.id: chunk.start for chunk in batch.chunks} == {"a": 0, "b": 32, "c": 16}


def test_whoever_comes_after_samples_that_wait_is_computed_meanwhile() -> None:
    """These keep their seats, and a block each."""
    scheduler = Scheduler(BlockPool(12), ScheduleLimits(sequences=4), MAX_SEQ)
    asked = {"a": 20, "a1": 20, "a2": 20, "b": 30, "c": 9}
    for number, (id, length) in enumerate(asked.items()):
        scheduler.add(Request(id, (0 if id[0] == "a" else number,) * length, 40))
    batch = scheduler.schedule()
    assert [chunk.id for chunk in batch.chunks] == ["a", "b"], "the other seats are those of a1, a2"
    scheduler.computed(batch, scheduler.running)
    batch = scheduler.schedule()
    assert {chunk.id: chunk.start for chunk in batch.chunks} == {"a1": 19, "a2": 19}
    assert len(batch.copies) == 2
    tight = Scheduler(BlockPool(5), ScheduleLimits(), MAX_SEQ)
    for id, length in {"a": 20, "a1": 20, "a2": 20, "b": 30}.items():
        tight.add(Request(id, (ord(id[0]),) * length, 5))
    assert [chunk.id for chunk in tight.schedule().chunks] == ["a"], "b would take theirs"


def test_a_prompt_that_fills_the_cache_is_not_copied() -> None:
    """There is no block for the copy beside the one that it is copied from."""
    scheduler = Scheduler(BlockPool(3), ScheduleLimits(), MAX_SEQ)
    prompt = tuple(range(2 * BLOCK + 5))
    assert compute(scheduler, Request("a", prompt, 1)).reused == 0
    assert compute(scheduler, Request("b", prompt, 1)).reused == 2 * BLOCK
    roomy = Scheduler(BlockPool(4), ScheduleLimits(), MAX_SEQ)
    assert compute(roomy, Request("a", prompt, 1)).reused == 0
    assert compute(roomy, Request("b", prompt, 1)).reused == 2 * BLOCK + 4


def test_a_copy_stays_with_its_owner() -> None:
    """Of two ranks one has no free block: the end of the prompt is computed again."""
    pool = BlockPool(6, owners=2)
    scheduler = Scheduler(pool, ScheduleLimits(), MAX_SEQ)
    prompt = tuple(range(BLOCK + 5))
    sequences = [scheduler.add(Request(id, prompt, 4)) for id in "ab"]
    scheduler.computed(scheduler.schedule(), sequences[:1])
    owner = sequences[0].table[1] % 2
    while any(block % 2 == owner for block in free_blocks(pool)):
        pool.take(after=owner - 1)
    batch = scheduler.schedule()
    assert [chunk.start for chunk in batch.chunks] == [BLOCK] and not batch.copies
    assert sequences[1].reused == BLOCK
    for sequence in sequences:
        scheduler.remove(sequence)
    assert pool.num_free == len(free_blocks(pool)) == 4, "two were taken by the test"


def test_nobody_takes_a_block_before_it_is_copied() -> None:
    """What another engine has computed is written at once, and copies are made with the step."""
    scheduler, tables = Scheduler(BlockPool(3), ScheduleLimits(), MAX_SEQ), list[list[int]]()
    scheduler.on_landing = lambda sequence: tables.append(list(sequence.table))
    prompt = tuple(range(BLOCK + 5))
    assert compute(scheduler, Request("a", prompt, 1)).reused == 0
    sample = scheduler.add(Request("b", prompt, 1))
    scheduler.add(Request("c", (7, 8, 9), 4), drawn=((1, -1.0),))
    batch = scheduler.schedule()
    assert len(batch.copies) == 1 and not tables, "the block that is left is the one that is copied"
    scheduler.computed(batch, [sample])
    assert [chunk.id for chunk in scheduler.schedule().chunks] == ["c"]
    assert tables == [[batch.copies[0].source]]


def test_what_another_engine_has_computed_needs_no_copy() -> None:
    scheduler, landed = Scheduler(BlockPool(9), ScheduleLimits(), MAX_SEQ), list[int]()
    scheduler.on_landing = lambda sequence: landed.append(sequence.computed)
    prompt = tuple(range(BLOCK + 5))
    sequence = scheduler.add(Request("a", prompt, 4))
    scheduler.add(Request("b", prompt, 4), drawn=((1, -1.0),))
    batch = scheduler.schedule()
    assert {chunk.id: chunk.start for chunk in batch.chunks} == {"a": 0, "b": len(prompt)}
    scheduler.computed(batch, [sequence, scheduler.running[1]])
    scheduler.add(Request("c", prompt, 4), drawn=((1, -1.0),))
    batch = scheduler.schedule()
    assert not batch.copies and landed == [BLOCK, BLOCK]


def test_an_end_is_not_copied_without_the_blocks_before_it() -> None:
    """They have left the window of the sample that has it, and are of another text now."""
    scheduler = Scheduler(BlockPool(3), ScheduleLimits(BLOCK), MAX_SEQ, window=4)
    prompt = tuple(range(BLOCK + 5))
    sequence = scheduler.add(Request("a", prompt, 1))
    for _ in range(2):
        scheduler.computed(scheduler.schedule(), [sequence])
    stranger = scheduler.add(Request("b", prompt[::-1], 1))
    for _ in range(2):
        scheduler.computed(scheduler.schedule(), [stranger])
    scheduler.remove(stranger)
    scheduler.add(Request("c", prompt, 1))
    batch = scheduler.schedule()
    assert not batch.copies and batch.chunks[0].start == 0


def test_a_prompt_whose_scores_are_wanted_is_computed() -> None:
    scheduler = Scheduler(BlockPool(9), ScheduleLimits(), MAX_SEQ)
    for id in "ab":
        scheduler.add(Request(id, (1, 2, 3, 4, 5), 1, prompt_logprobs=0 if id == "b" else None))
    batch = scheduler.schedule()
    assert [chunk.start for chunk in batch.chunks] == [0, 0] and not batch.copies


@pytest.mark.parametrize("length", [6, 20])
def test_a_text_that_outgrows_its_rotation_has_new_digests(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, pool = list[bytes](), BlockPool(9)
    plain = pool.publish

    def publish(block: int, digest: bytes) -> bool:
        published.append(digest)
        return plain(block, digest)

    monkeypatch.setattr(pool, "publish", publish)
    scheduler = Scheduler(pool, ScheduleLimits(), MAX_SEQ, outgrown_at=length)
    sequence = scheduler.add(Request("a", tuple(range(length)), 9))
    scheduler.computed(scheduler.schedule(), [sequence])
    sequence.append(1, 0.0)
    before = set(published)
    published.clear()
    (chunk,) = scheduler.schedule().chunks
    assert chunk.start == 0 and chunk.outgrown
    assert len(published) == len(before) == 1 + length // BLOCK
    assert not before.intersection(published)


def test_a_block_that_leaves_the_window_before_its_last_token_is_known_is_not_shared() -> None:
    scheduler = Scheduler(BlockPool(4), ScheduleLimits(), MAX_SEQ, window=1, ahead=True)
    sequence = scheduler.add(Request("a", (1,) * (BLOCK - 2), 20))
    for number in range(10):
        scheduler.computed(scheduler.schedule(), [sequence])
        if number:
            sequence.append(number, 0.0)
    assert sequence.computed == BLOCK + 7 and sequence.out_of_sight == 1
    prompt = tuple(sequence.tokens[: BLOCK + 2])
    scheduler.remove(sequence)
    assert compute(scheduler, Request("b", prompt, 1)).reused == 0


def free_blocks(pool: BlockPool) -> list[int]:
    return [block for block in range(pool.count) if not pool.users(block)]


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()

    def digest(before: bytes, tokens: Sequence[int]) -> bytes:
        hashed.append(len(tokens))
        return chained_digest(before, tokens)

    monkeypatch.setattr(requests, "chained_digest", digest)
    scheduler = Scheduler(BlockPool(8), ScheduleLimits(), MAX_SEQ)
    prompts = (tuple(range(100)), (*range(3 * BLOCK), *range(99, 99 - 52, -1)))
    sequences = [scheduler.add(Request(str(i), prompt, 8)) for i, prompt in enumerate(prompts)]
    for number in range(8):
        batch = scheduler.schedule()
        assert [chunk.id for chunk in batch.chunks] == ["0"], (
            "of the other, four blocks are missing"
        )
        scheduler.computed(batch, sequences[:1])
        sequences[0].append(number, 0.0)
        assert sum(hashed) == 2 * 99
    scheduler.restart()
    scheduler.schedule()
    assert sum(hashed) > 2 * 99, "contents were forgotten, and digests with them"


def test_what_was_begun_before_contents_were_forgotten_is_not_shared_after() -> None:
    """It may attend to what was wrong with them."""
    scheduler = Scheduler(BlockPool(20), ScheduleLimits(tokens=BLOCK), MAX_SEQ)
    prompt = tuple(range(4 * BLOCK + 3))
    sequence = scheduler.add(Request("a", prompt, 1))
    for number in range(5):
        scheduler.computed(scheduler.schedule(), [sequence])
        if number == 1:
            scheduler.pool.forget()
    assert sequence.computed == len(prompt)
    scheduler.remove(sequence)
    assert compute(scheduler, Request("b", prompt[: BLOCK + 2], 1)).reused == 0
    assert compute(scheduler, Request("c", prompt, 1)).reused == BLOCK, "that of b"


def test_texts_on_the_two_sides_of_a_rotation_share_no_blocks() -> None:
    scheduler = Scheduler(BlockPool(12), ScheduleLimits(), MAX_SEQ, outgrown_at=36)
    prompt = tuple(range(40))
    assert compute(scheduler, Request("short", prompt[:35], 1)).reused == 0
    assert compute(scheduler, Request("long", prompt, 1)).reused == 0, "its keys are others"
    assert compute(scheduler, Request("short too", prompt[:34], 1)).reused == 2 * BLOCK
    assert compute(scheduler, Request("long too", prompt[:38], 1)).reused == 2 * BLOCK
    assert compute(scheduler, Request("short again", prompt[:34], 1)).reused == 33
    assert compute(scheduler, Request("long again", prompt[:38], 1)).reused == 37
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

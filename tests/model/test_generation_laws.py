"""What may not change a completion: the other requests, their order, and how the engine runs them.

Requests at random, greedy and drawn, and the same again under one change. Tokens are equal; a
log-probability differs by what sums in another order round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from fivefold.core.model.kv_pages import BLOCK, blocks_of
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.model.shape import Shape
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.verify.generated import TOLERANCE, GeneratedTrial
from tests.guesses import Guesses
from tests.selection import salt

LATENT = {
    **{"head_dim": "6", "kv_heads": "8", "mla.kv_rank": "12", "mla.nope_dim": "2"},
    **{"mla.rope_dim": "4", "mla.value_dim": "3"},
}
SHAPES = {
    "dense": with_overrides(load("tiny"), {"layers": "2"}),
    "window": with_overrides(load("tiny"), {"layers": "2", "window": "20"}),
    "latent": with_overrides(load("tiny"), {"layers": "2", **LATENT}),
    "experts": with_overrides(load("tiny-moe"), {"layers": "2"}),
}
SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.8, top_k=20, top_p=0.9, seed=4),
)
NUM_REQUESTS = 6
LONGEST = 3 * BLOCK + 20
SMALLEST = blocks_of(LONGEST)
NUM_BLOCKS = 4 * NUM_REQUESTS * SMALLEST
USUAL = ScheduleLimits()


def unchanged(requests: list[Request], dice: random.Random) -> list[Request]:
    return requests


def no_event(completions: Iterable[Completion]) -> bool:
    return True


@dataclass(frozen=True)
class Law:
    """A change that leaves every completion as it is: other requests to run, and the engine.

    `shows` says of the completions whether the change came about at all.
    """

    name: str
    change: Callable[[list[Request], random.Random], list[Request]] = unchanged
    blocks: int = NUM_BLOCKS
    limits: ScheduleLimits = USUAL
    rounds: int = 1
    shows: Callable[[Iterable[Completion]], bool] = no_event
    drafts: bool = False

    def __str__(self) -> str:
        return self.name


def reversed_order(requests: list[Request], dice: random.Random) -> list[Request]:
    return requests[::-1]


def shuffled_order(requests: list[Request], dice: random.Random) -> list[Request]:
    return dice.sample(requests, len(requests))


def among_strangers(requests: list[Request], dice: random.Random) -> list[Request]:
    """Between as many others, some of which begin as they do."""
    strangers = [
        replace(request, id=f"stranger {i}", prompt=(*request.prompt[: i * BLOCK], 7, 8, i))
        for i, request in enumerate(requests)
    ]
    return dice.sample([*requests, *strangers], 2 * len(requests))


def several_samples(requests: list[Request], dice: random.Random) -> list[Request]:
    """Each three times: the others draw by seeds of their own."""
    copies = [
        replace(request, id=f"{request.id} copy {i}", seed_key=f"{request.id}/{i}")
        for request in requests
        for i in range(2)
    ]
    return dice.sample([*requests, *copies], 3 * len(requests))


def lost_blocks(completions: Iterable[Completion]) -> bool:
    return any(completion.preempted for completion in completions)


def shared_blocks(completions: Iterable[Completion]) -> bool:
    return any(completion.reused for completion in completions)


def accepted_drafts(completions: Iterable[Completion]) -> bool:
    return any(completion.accepted for completion in completions)


LAWS = (
    Law("reversed", reversed_order),
    Law("shuffled", shuffled_order),
    Law("one at a time", limits=ScheduleLimits(sequences=1)),
    Law("two at a time, shuffled", shuffled_order, limits=ScheduleLimits(sequences=2)),
    Law("in chunks of 5", limits=ScheduleLimits(tokens=5)),
    Law("in chunks of a block and one", limits=ScheduleLimits(tokens=BLOCK + 1)),
    Law("among strangers", among_strangers),
    Law("several samples", several_samples),
    Law(
        "few blocks",
        blocks=SMALLEST,
        limits=ScheduleLimits(tokens=2 * BLOCK),
        shows=lost_blocks,
    ),
    Law("few blocks, among strangers", among_strangers, blocks=SMALLEST + 2),
    Law("drafts, shuffled", shuffled_order, shows=accepted_drafts, drafts=True),
    Law(
        "drafts, few blocks, several samples",
        several_samples,
        blocks=SMALLEST,
        limits=ScheduleLimits(tokens=2 * BLOCK),
        shows=lost_blocks,
        drafts=True,
    ),
    Law(
        "twice, over shared blocks",
        rounds=2,
        shows=shared_blocks,
    ),
)


def drawn_requests(shape: Shape, dice: random.Random) -> list[Request]:
    """Of many lengths, two of which begin alike; half of them end at some token."""
    beginning = [dice.randrange(shape.vocab) for _ in range(2 * BLOCK + 3)]
    requests: list[Request] = []
    for i in range(NUM_REQUESTS):
        length = dice.choice((1, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 3 * BLOCK))
        prompt = [dice.randrange(shape.vocab) for _ in range(length)]
        if i < 2:
            prompt = beginning + prompt[:BLOCK]
        stops = frozenset(range(0, shape.vocab, 11)) if dice.random() < 0.5 else frozenset[int]()
        count = dice.randint(2, LONGEST - len(prompt)) if len(prompt) > BLOCK else 20
        request = Request(f"r{i}", tuple(prompt), min(count, 20), SAMPLINGS[i % 3], stops)
        requests.append(request)
    return requests


def engine_of(
    trial: GeneratedTrial, law: Law, expected: Mapping[str, Completion] | None = None
) -> Engine:
    """With drafts, most of them are of the expected completions."""
    forward = DecoderForward(trial.decoder(), law.blocks)
    texts = {id: completion.tokens for id, completion in (expected or {}).items()}
    drafter = Guesses(texts, trial.shape.vocab) if law.drafts else None
    return Engine(trial.shape, forward, law.blocks, law.limits, drafter=drafter)


def require_equal(
    before: dict[str, Completion], after: dict[str, Completion], tolerance: float
) -> None:
    for id, completion in before.items():
        other = after[id]
        assert (other.tokens, other.reason) == (completion.tokens, completion.reason), id
        assert other.logprobs == pytest.approx(completion.logprobs, rel=0, abs=tolerance), id


@pytest.mark.sample(2)
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_completion_is_that_of_the_request_alone(shape: Shape, dtype: str, law: Law) -> None:
    dice = random.Random(f"{salt()}: {law}")
    trial = GeneratedTrial(shape, dtype, dice.randrange(1000))
    requests = drawn_requests(shape, dice)
    alone = engine_of(trial, Law("alone", limits=ScheduleLimits(tokens=2 * LONGEST, sequences=1)))
    expected = {request.id: alone.run([request])[request.id] for request in requests}
    engine = engine_of(trial, law, expected)
    for _ in range(law.rounds):
        completions = engine.run(law.change(requests, dice))
    require_equal(expected, completions, TOLERANCE[dtype])
    assert law.shows(completions.values())
    assert not engine.busy and engine.schedulers[0].pool.num_free == law.blocks


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbours_that_are_aborted_change_nothing(shape: Shape) -> None:
    """At random steps: while they wait, in their prompts, or while they draw."""
    dice = random.Random(f"{salt()}: aborted")
    trial, requests = GeneratedTrial(shape, "float64", 1), drawn_requests(shape, dice)
    law = Law("aborted", blocks=SMALLEST + 3, limits=ScheduleLimits(tokens=BLOCK))
    expected = engine_of(trial, law).run(requests)
    engine = engine_of(trial, law)
    crowd = among_strangers(requests, dice)
    ends = {request.id: dice.randrange(12) for request in crowd if "stranger" in request.id}
    for request in crowd:
        engine.add(request)
    aborted, number, complete = 0, 0, set[str]()
    while engine.busy:
        running = [id for id, last in ends.items() if last == number and id not in complete]
        for id in running:
            engine.end(id, "cancelled")
            aborted += 1
        complete |= {token.id for token in engine.step() if token.reason is not None}
        number += 1
    require_equal(expected, {id: engine.collect(id) for id in expected}, TOLERANCE["float64"])
    assert aborted and engine.schedulers[0].pool.num_free == law.blocks


def test_a_draw_by_the_place_in_the_batch_is_seen() -> None:
    """The laws can fail: a request that draws by another seed has other tokens."""
    dice = random.Random("planted")
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    requests = drawn_requests(trial.shape, dice)
    law = Law("plain")
    expected = engine_of(trial, law).run(requests)
    moved = [replace(request, seed_key=str(i)) for i, request in enumerate(requests)]
    completions = engine_of(trial, law).run(moved)
    with pytest.raises(AssertionError, match="r1"):
        require_equal(expected, completions, TOLERANCE["float64"])


def same_beginning(requests: Sequence[Request]) -> int:
    """Tokens that the first two prompts share."""
    first, second = requests[0].prompt, requests[1].prompt
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_the_drawn_requests_share_a_prefix_of_blocks() -> None:
    requests = drawn_requests(SHAPES["dense"], random.Random("shared"))
    assert same_beginning(requests) >= 2 * BLOCK

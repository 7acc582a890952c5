"""Drafts change no completion: the same tokens and log-probabilities, with far fewer steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from small import LLAMA
from torch import Tensor

from fivefold.core.model import Shape
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate import engine as engine_module
from fivefold.generate.drafts import Drafter, DraftOptions, NgramDrafter
from fivefold.generate.engine import Engine, EngineRanks
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.requests import Completion, Request, Sampling, SequenceState, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.generate.text import ByteCodec
from fivefold.generate.writer import TextRequest, TextWriter, WrittenText
from fivefold.verify.generated import GeneratedTrial
from tests.guesses import Guesses
from tests.selection import salt

LONGROPE = {"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "36"}
LONGROPE |= {"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"}
SHAPES = {
    "dense": with_overrides(load("tiny"), {"layers": "2"}),
    "window": with_overrides(load("tiny"), {"layers": "2", "window": "20"}),
    "longrope": with_overrides(load("tiny"), {"layers": "2", **LONGROPE}),
    "experts": with_overrides(load("tiny-moe"), {"layers": "2"}),
}
TIGHT, ROOMY = 6, 200
LIMITS = ScheduleLimits(tokens=40)


def requests_of(shape: Shape, dice: random.Random) -> list[Request]:
    """Greedy and drawn, with shared beginnings, stop tokens, likeliest tokens, and least tokens."""
    start = tuple(dice.randrange(shape.vocab) for _ in range(BLOCK + 5))
    requests: list[Request] = []
    for i in range(8):
        prompt = tuple(dice.randrange(shape.vocab) for _ in range(dice.choice((1, 5, BLOCK, 20))))
        prompt = start + prompt if i % 2 else prompt
        sampling = Sampling(0.0 if i % 4 == 0 else 0.9, seed=i, top_k=30 if i % 4 == 1 else None)
        stops = frozenset(range(0, shape.vocab, 17)) if i % 3 == 0 else frozenset[int]()
        more = {"alternatives": i % 3, "min_tokens": 3 * (i % 3 == 0)}
        more["prompt_logprobs"] = 2 if i == 5 else None
        request = Request(
            f"r{i}", prompt, dice.randint(1, 40), sampling, stops, **cast("Any", more)
        )
        requests.append(request)
    requests.append(replace(requests[1], id="sample", seed_key="1"))
    requests.append(Request("scored", start, 0, targets=tuple(start[-3:])))
    return requests


def run(
    trial: GeneratedTrial,
    requests: list[Request],
    blocks: int = ROOMY,
    drafter: Drafter | None = None,
    on_step: Callable[[Engine], None] = lambda engine: None,
    in_flight: int = 1,
) -> tuple[dict[str, Completion], dict[str, list[Any]], Engine, int]:
    """Completions, what was given out of each request, the engine, and its steps."""
    routes = None
    decoder = trial.decoder()
    if trial.shape.moe is not None:
        routes = RouteStore(decoder, blocks + 1)
    forward = DecoderForward(decoder, blocks, routes=routes)
    ranks = EngineRanks(in_flight=in_flight)
    engine = Engine(
        trial.shape, forward, blocks, LIMITS, ranks=ranks, routes=routes, drafter=drafter
    )
    streams: dict[str, list[Any]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.busy:
        on_step(engine)
        for token in engine.step():
            streams[token.id].append((token.index, token.token, token.reason, token.alternatives))
        steps += 1
    ended = {r.id: engine.collect(r.id) for r in requests if r.id in engine._ended}
    return ended, streams, engine, steps


def guesses_of(trial: GeneratedTrial, requests: list[Request]) -> Guesses:
    completions, *_ = run(trial, requests)
    return Guesses({id: each.tokens for id, each in completions.items()}, trial.shape.vocab)


def require_same(before: dict[str, Completion], after: dict[str, Completion]) -> None:
    for id, completion in before.items():
        other = after[id]
        same = (completion.tokens, completion.reason, completion.routes)
        assert (other.tokens, other.reason, other.routes) == same, id
        assert other.logprobs == pytest.approx(completion.logprobs, rel=0, abs=1e-10), id


@pytest.mark.parametrize("blocks", [ROOMY, TIGHT])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_completions_are_the_same_with_drafts(shape: Shape, blocks: int) -> None:
    dice = random.Random(f"{salt()}: drafts")
    trial = GeneratedTrial(shape, "float64", 0)
    requests = requests_of(trial.shape, dice)
    expected, streams, _, plain = run(trial, requests, blocks)
    guesses = Guesses({id: each.tokens for id, each in expected.items()}, trial.shape.vocab)
    completions, drafted, engine, steps = run(trial, requests, blocks, guesses)
    require_same(expected, completions)
    assert engine.num_accepted > 30 and engine.num_drafted > engine.num_accepted
    assert steps < 0.7 * plain or blocks == TIGHT
    assert engine.num_preempted or blocks == ROOMY or shape.window is not None
    assert engine.schedulers[0].pool.num_free == blocks
    for id, rows in streams.items():
        if id != "scored":  # whose places are given out again where it has lost its blocks
            assert [row[:3] for row in drafted[id]] == [row[:3] for row in rows], "in order, once"
        for (*_, pairs), (*_, others) in zip(rows, drafted[id], strict=id != "scored"):
            assert [token for token, _ in others] == [token for token, _ in pairs]
            assert dict(others) == pytest.approx(dict(pairs), rel=0, abs=1e-10)


def test_sequences_may_lose_their_blocks_while_drafts_are_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two batches are in flight. What was accepted is computed again, and its routes are known."""
    accept, lost = SequenceState.accept, list[str]()

    def counted(self: SequenceState) -> None:
        accept(self)
        lost.extend([self.request.id] * (not self.table))
        assert self.computed == (len(self.tokens) if self.table else 0)

    monkeypatch.setattr(SequenceState, "accept", counted)
    trial = GeneratedTrial(SHAPES["experts"], "float64", 0)
    for seed in range(4):
        dice = random.Random(f"in flight {seed}")
        drawn = requests_of(trial.shape, dice)
        # Short ones end while they have no blocks.
        requests = [replace(each, max_tokens=min(each.max_tokens, 14)) for each in drawn]
        expected, *_ = run(trial, requests)
        texts = {id: completion.tokens for id, completion in expected.items()}
        guesses = Guesses(texts, trial.shape.vocab, right=0.9, least=3)
        completions, _, engine, _ = run(trial, requests, TIGHT, guesses, in_flight=2)
        require_same(expected, completions)
        assert engine.schedulers[0].pool.num_free == TIGHT
    assert len(lost) > 3


def test_aborted_requests_leave_nothing() -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    requests = requests_of(trial.shape, random.Random(f"{salt()}: aborted drafts"))
    expected, *_ = run(trial, requests)
    texts = {id: each.tokens for id, each in expected.items()}
    dice = random.Random(1)

    def abort(engine: Engine) -> None:
        if engine._sequences and dice.random() < 0.2:
            engine.end(dice.choice(sorted(engine._sequences)), "cancelled")

    guesses = Guesses(texts, trial.shape.vocab)
    completions, _, engine, _ = run(trial, requests, TIGHT, guesses, abort)
    cancelled = [id for id, each in completions.items() if each.reason == "cancelled"]
    assert len(cancelled) >= 2 and engine.num_accepted > 10
    for id in cancelled:
        assert completions[id].tokens == expected[id].tokens[: len(completions[id].tokens)]
    require_same({id: e for id, e in expected.items() if id not in cancelled}, completions)
    assert engine.schedulers[0].pool.num_free == TIGHT


def test_texts_that_repeat_are_drafted_from_themselves() -> None:
    """A model that copies: greedy tokens of a loop, all of them proposed after the first round."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    request = Request("loop", (1, 2, 3, 4), 60)
    forward = by_table({token: token % 7 + 1 for token in range(trial.shape.vocab)}, 16)
    engine = Engine(trial.shape, forward, ROOMY, drafter=NgramDrafter(4))
    completion = engine.run([request])["loop"]
    assert completion.tokens == tuple((3 + i) % 7 + 1 for i in range(1, 61))
    assert completion.accepted > 40 and completion.drafted <= completion.accepted + 4


def by_table(following: dict[int, int], vocab: int) -> Callable[[StepBatch], Tensor]:
    """A forward whose next token is decided by the last one."""

    def forward(step: StepBatch) -> Tensor:
        wanted = [
            token
            for chunk in step.chunks
            if chunk.num_wanted
            for token in chunk.tokens[-chunk.num_wanted :]
        ]
        logits = torch.full((len(wanted), vocab), -9.0, dtype=torch.float64)
        for row, token in enumerate(wanted):
            logits[row, following[token]] = 9.0
        return logits

    return forward


# A chain of four states: what follows each, and how often.
CHAIN = torch.tensor(
    [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.05, 0.05, 0.6, 0.3]],
    dtype=torch.float64,
)


def transitions(requests: int) -> tuple[Counter[tuple[int, int]], Engine]:
    """Pairs of tokens that follow one another, of many short texts with drafts."""

    def forward(step: StepBatch) -> Tensor:
        last = [chunk.tokens[-1] for chunk in step.chunks if chunk.samples]
        return CHAIN[torch.tensor(last, dtype=torch.int64)].log()

    shape = with_overrides(load("tiny"), {"vocab": "4"})
    engine = Engine(shape, forward, 4 * requests, ScheduleLimits(4096, 32), drafter=Guesses({}, 4))
    all_of = [Request(f"{i}", (i % 4,), 20, Sampling(1.0, seed=1)) for i in range(requests)]
    pairs: Counter[tuple[int, int]] = Counter()
    for request, done in zip(all_of, engine.run(all_of).values(), strict=True):
        text = (*request.prompt, *done.tokens)
        pairs.update(pairwise(text))
    return pairs, engine


def chi_squared(pairs: Counter[tuple[int, int]]) -> float:
    total = 0.0
    for state, odds in enumerate(CHAIN.tolist()):
        count = sum(pairs[state, following] for following in range(4))
        for following, share in enumerate(odds):
            total += (pairs[state, following] - share * count) ** 2 / (share * count)
    return total


def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """12 degrees of freedom: 0.01% of healthy engines are above 39."""
    pairs, engine = transitions(200)
    assert engine.num_accepted > 300 and pairs.total() == 4000
    assert chi_squared(pairs) < 39


def test_proposals_that_are_always_accepted_change_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if what was proposed were drawn."""
    end_first = Engine._end_first

    def sick(self: Engine) -> Any:
        flight = self._flights[0]
        table = flight.drawn().clone()
        for number, row in enumerate(flight.rows):
            if row.proposal is not None:
                table[number - 1, 0] = row.proposal
        self._flights[0] = replace(flight, drawn=lambda: table)
        return end_first(self)

    monkeypatch.setattr(Engine, "_end_first", sick)
    assert chi_squared(transitions(200)[0]) > 100


def accepts_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a refused proposal counts, where it is the first of its step."""

    def accepts(self: Any) -> bool:
        return self.index == len(self.sequence.logprobs)

    monkeypatch.setattr(engine_module._DrawRow, "accepts", property(accepts))


def counts_refused_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals are in the cache as soon as they are computed."""
    computed = Scheduler.computed

    def all_of_them(self: Scheduler, batch: StepBatch, sequences: Any) -> None:
        computed(self, batch, sequences)
        for chunk, sequence in zip(batch.chunks, sequences, strict=True):
            sequence.advance(int(chunk.draft))

    monkeypatch.setattr(Scheduler, "computed", all_of_them)
    monkeypatch.setattr(SequenceState, "accept", accept_without_count)


def accept_without_count(self: SequenceState) -> None:
    self.awaited += 1


@pytest.mark.parametrize("mistake", [accepts_one_too_many, counts_refused_tokens])
def test_a_planted_mistake_changes_completions(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    requests = requests_of(trial.shape, random.Random("planted"))
    expected, *_ = run(trial, requests)
    guesses = guesses_of(trial, requests)
    mistake(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError, ValueError)):
        completions, *_ = run(trial, requests, drafter=guesses)
        require_same(expected, completions)


def prompts_with_stops() -> list[TextRequest]:
    dice, prompts = random.Random("texts"), list[TextRequest]()
    ends = frozenset(range(2, 96, 3))
    for i in range(40):
        prompt = tuple(dice.randrange(256) for _ in range(4))
        stops = tuple(chr(dice.randrange(97, 123)) for _ in range(12 if i % 2 else 0))
        request = Request(f"{i}", prompt, 40, Sampling(2.0, seed=i), ends)
        prompts.append(TextRequest(request, "", stops))
    return prompts


def texts_of(trial: GeneratedTrial, drafter: Drafter | None) -> list[WrittenText]:
    """Texts that end with a stop text, in the middle of what was accepted."""
    engine = Engine(trial.shape, DecoderForward(trial.decoder(), ROOMY), ROOMY, drafter=drafter)
    writer = TextWriter(engine, ByteCodec())
    for text_request in prompts_with_stops():
        writer.add(text_request)
    written: list[WrittenText] = []
    while writer.busy:
        written += [piece.written for piece in writer.step() if piece.written is not None]
    assert engine.schedulers[0].pool.num_free == ROOMY
    return sorted(written, key=lambda text: int(text.id))


def test_a_stop_text_within_accepted_tokens_ends_a_text_there() -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    expected = texts_of(trial, None)
    longer = run(trial, [request for request, *_ in prompts_with_stops()])[0]
    texts = {id: completion.tokens for id, completion in longer.items()}
    guesses = Guesses(texts, trial.shape.vocab, 1.0, 6, 9)
    drafted = texts_of(trial, guesses)
    both = [len(texts[text.id]) - len(text.tokens) for text in expected]
    assert sum(0 < extra <= 6 for extra in both) > 2, "a stop text, and soon a stop token"
    for text, other in zip(expected, drafted, strict=True):
        same = (text.text, text.tokens, text.reason)
        assert (other.text, other.tokens, other.reason) == same, text.id
        assert len(other.logprobs) == len(other.tokens)
        assert text.drafted is None and (other.drafted or 0) >= (other.accepted or 0)
        assert "drafted" in other.table() and "drafted" not in text.table()
    assert sum(text.accepted or 0 for text in drafted) > 100


def test_batch_invariant_drafts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(LLAMA, max_seq=96)
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh, trial = mesh_of(plan, torch.device("cpu"), True), GeneratedTrial(shape, "float32", 0)
    requests = [Request(f"{i}", tuple(range(i + 1)), 30, Sampling(i / 2)) for i in range(4)]

    def completed(drafts: DraftOptions | None) -> dict[str, Completion]:
        stage = stage_of(plan, mesh, torch.float32, True)
        stage.fill(lambda weight, _: cast("Tensor", trial.full_weight(weight.name)))
        options = {"batch_invariant": True, "drafts": drafts}
        return LayoutEngine(plan, mesh, stage, ROOMY, **options).run(requests)

    expected = completed(None)
    guesses = Guesses({id: each.tokens for id, each in expected.items()}, shape.vocab)
    monkeypatch.setattr(DraftOptions, "drafter", lambda self: guesses)
    completions = completed(DraftOptions(4))
    for id, each in expected.items():
        other = completions[id]
        assert (other.tokens, other.logprobs) == (each.tokens, each.logprobs), id
    assert sum(each.accepted for each in completions.values()) > 30


def test_a_prompt_that_goes_on_shares_the_blocks_of_accepted_tokens() -> None:
    """The last block is full by tokens that were accepted in the last step."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    first = Request("first", (1,), 3 * BLOCK)
    expected, *_ = run(trial, [first])
    texts = {id: completion.tokens for id, completion in expected.items()}
    guesses = Guesses(texts, trial.shape.vocab, right=1.0, least=5)
    completions, _, engine, _ = run(trial, [first], drafter=guesses)
    on = Request("on", (*first.prompt, *completions["first"].tokens, 5), 1)
    assert engine.run([on])["on"].reused == 3 * BLOCK

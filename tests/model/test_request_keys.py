"""Keys of a request on one device: scores of prompts are those of a plain forward however the
engine cuts its steps, and no stop token is drawn before `min_tokens`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.presets import load, with_overrides
from fivefold.generate import scheduler
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion, DrawnToken, Request, Sampling, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.verify.generated import GeneratedTrial, logits_of

SHAPES = {
    "dense": with_overrides(load("tiny"), {"layers": "2"}),
    "window": with_overrides(load("tiny"), {"layers": "2", "window": "20"}),
    "experts": with_overrides(load("tiny-moe"), {"layers": "2"}),
}
ROOMY, TIGHT = 64, 6
COUNT = 3  # likeliest tokens
USUAL = ScheduleLimits()


@dataclass(frozen=True)
class Way:
    """How an engine runs requests."""

    name: str
    limits: ScheduleLimits = USUAL
    blocks: int = ROOMY
    ahead: bool = False

    def engine(self, trial: GeneratedTrial) -> Engine:
        drawn = DrawnTokens(self.limits.tokens, torch.device("cpu")) if self.ahead else None
        forward = DecoderForward(trial.decoder(), self.blocks, drawn=drawn)
        return Engine(trial.shape, forward, self.blocks, self.limits, drawn=drawn)

    def __str__(self) -> str:
        return self.name


WAYS = (
    Way("batched"),
    Way("in chunks of 5", ScheduleLimits(tokens=5)),
    Way("few blocks", ScheduleLimits(tokens=2 * BLOCK), TIGHT),
    Way("ahead of draws", ScheduleLimits(tokens=20), ahead=True),
    Way("few blocks, ahead of draws", ScheduleLimits(tokens=20), TIGHT, ahead=True),
)


def run_steps(
    engine: Engine, requests: Iterable[Request]
) -> tuple[list[DrawnToken], dict[str, Completion]]:
    """All tokens in the order of steps, and the completions."""
    ids: list[str] = []
    for request in requests:
        engine.add(request)
        ids.append(request.id)
    tokens: list[DrawnToken] = []
    while engine.busy:
        tokens += engine.step()
    return tokens, {id: engine.collect(id) for id in ids}


def scored(requests: Sequence[Request]) -> list[Request]:
    """Those of a trial, of which all but the second have their prompts scored."""
    return [
        request if i == 1 else replace(request, prompt_logprobs=COUNT * (i != 2), alternatives=i)
        for i, request in enumerate(requests)
    ]


def require_scores(trial: GeneratedTrial, request: Request, tokens: Sequence[DrawnToken]) -> None:
    """The rows of a request are its prompt, as a plain forward scores it, and then its draws."""
    length = len(request.prompt)
    first = 0 if request.prompt_logprobs is None else 1 - length
    assert [row.index for row in tokens][: 1 - first] == list(range(first, 1))
    assert [row.index for row in tokens] == list(range(first, tokens[-1].index + 1))
    logprobs_TV = logits_of(trial.plain, request.prompt).log_softmax(1)
    for row in tokens[: -first or None] if first else ():
        logprobs_V = logprobs_TV[length - 1 + row.index]
        assert row.token == request.prompt[row.index] and row.reason is None
        assert row.logprob == pytest.approx(logprobs_V[row.token].item(), abs=1e-9)
        assert row.rank == 1 + (logprobs_V > logprobs_V[row.token]).sum().item()
        values, ids = logprobs_V.sort(descending=True, stable=True)
        count = request.prompt_logprobs or 0
        assert [token for token, _ in row.alternatives] == ids[:count].tolist()
        expected = values[:count].tolist()
        assert [value for _, value in row.alternatives] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_are_scored_as_a_plain_forward_does(shape: str, way: Way) -> None:
    trial = GeneratedTrial(SHAPES[shape], "float64", 0)
    expected = way.engine(trial).run(trial.requests)
    engine, requests = way.engine(trial), scored(trial.requests)
    for _ in range(2):  # once more, over blocks that could be shared
        tokens, completions = run_steps(engine, requests)
        for request in requests:
            rows = [row for row in tokens if row.id == request.id]
            require_scores(trial, request, rows)
            done, before = completions[request.id], expected[request.id]
            assert done.tokens == before.tokens and done.reason == before.reason
            assert done.logprobs == pytest.approx(before.logprobs, abs=1e-11)
            if request.prompt_logprobs is not None and not done.preempted:
                assert done.reused == 0, "no block is taken whose logits are wanted"
    assert engine.num_preempted or way.blocks == ROOMY
    assert engine.schedulers[0].pool.num_free == way.blocks


def test_a_step_scores_no_more_tokens_than_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "SCORED_TOKENS", 7)
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    engine, requests = WAYS[0].engine(trial), scored(trial.requests)
    plain, sizes = engine.forward, list[int]()

    def forward(step: StepBatch) -> Tensor:
        sizes.append(sum(chunk.scored for chunk in step.chunks))
        return plain(step)

    engine.forward = forward
    tokens, _ = run_steps(engine, requests)
    assert max(sizes) == 7
    for request in requests:
        require_scores(trial, request, [row for row in tokens if row.id == request.id])


def test_a_token_is_scored_once_though_it_is_computed_twice() -> None:
    """A sequence loses its blocks while tokens of its prompt are on their way."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    engine = WAYS[3].engine(trial)
    request = replace(trial.requests[2], prompt_logprobs=COUNT)
    engine.add(request)
    rows = engine.step() + engine.step()
    engine.schedulers[0].restart()
    while engine.busy:
        rows += engine.step()
    assert engine.num_preempted == 1
    require_scores(trial, request, rows)


def test_logits_of_a_prompt_that_are_not_finite_end_their_request_alone() -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    engine, requests = WAYS[0].engine(trial), scored(trial.requests)
    expected = WAYS[0].engine(trial).run(requests)
    plain, sick = engine.forward, requests[3].id

    def forward(step: StepBatch) -> Tensor:
        logits_NV, row = plain(step).clone(), 0
        for chunk in step.chunks:
            if chunk.id == sick:
                logits_NV[row + chunk.num_wanted // 2] = float("nan")
            row += chunk.num_wanted
        return logits_NV

    engine.forward = forward
    tokens, completions = run_steps(engine, requests)
    assert completions[sick].reason == "error" and completions[sick].tokens == ()
    assert [row.reason for row in tokens if row.id == sick][-1] == "error"
    for request in requests:
        if request.id != sick:
            assert completions[request.id].tokens == expected[request.id].tokens
    assert engine.schedulers[0].pool.num_free == ROOMY


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, seed=5)], ids=str)
def test_no_stop_token_is_drawn_before_min_tokens(way: Way, sampling: Sampling) -> None:
    trial, least = GeneratedTrial(SHAPES["dense"], "float64", 0), 3
    plain = [replace(request, sampling=sampling) for request in trial.requests]
    free = way.engine(trial).run(plain)
    # All that would be drawn ends it; and what no vocabulary has, as in some configs.
    ends = frozenset(token for done in free.values() for token in done.tokens) | {10**6}
    requests = [
        replace(request, stop_tokens=ends, min_tokens=least * (i != 1))
        for i, request in enumerate(plain)
    ]
    completions = way.engine(trial).run(requests)
    for request in requests:
        done = completions[request.id]
        if not request.min_tokens:
            assert len(done.tokens) == 1 and done.reason == "stop"
            continue
        assert not ends.intersection(done.tokens[:least])
        assert len(done.tokens) > least or done.reason == "length"
        logprobs_TV = logits_of(trial.plain, (*request.prompt, *done.tokens)).log_softmax(1)
        for i, token in enumerate(done.tokens):
            logprobs_V = logprobs_TV[len(request.prompt) - 1 + i]
            assert done.logprobs[i] == pytest.approx(logprobs_V[token].item(), abs=1e-9)
            if sampling.greedy:
                known = [t for t in ends if t < trial.shape.vocab and i < least]
                assert token == logprobs_V.index_fill(0, torch.tensor(known).long(), -99).argmax()
    assert any(done.reason == "stop" and len(done.tokens) > least for done in completions.values())


def test_a_completion_that_could_draw_nothing_is_refused() -> None:
    every = frozenset(range(67))
    Request("a", (1,), 3, stop_tokens=every).check(67, 64)
    with pytest.raises(FivefoldError, match="min_tokens = 2, and every token ends the completion"):
        Request("a", (1,), 3, stop_tokens=every, min_tokens=2).check(67, 64)

"""Steps that begin ahead of draws: what they read is what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.model.shape import Shape
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion, Request, Sampling, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.verify.generated import GeneratedTrial

LONGROPE = {"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "36"}
LONGROPE |= {"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"}
SHAPES = {
    "dense": with_overrides(load("tiny"), {"layers": "2"}),
    "window": with_overrides(load("tiny"), {"layers": "2", "window": "20"}),
    "longrope": with_overrides(load("tiny"), {"layers": "2", **LONGROPE}),
    "experts": with_overrides(load("tiny-moe"), {"layers": "2"}),
}
ROOMY, TIGHT = 64, 9


def requests_of(trial: GeneratedTrial) -> list[Request]:
    """Greedy and drawn, some of which end with one of many stop tokens."""
    some = frozenset(range(0, trial.shape.vocab, 7))
    found = list(trial.requests)
    found += [replace(each, id=f"{each.id}-stop", stop_tokens=some) for each in trial.requests]
    warm = Sampling(temperature=1.2, top_k=40, seed=3)
    return found + [replace(each, id=f"{each.id}-warm", sampling=warm) for each in trial.requests]


class CountedForward:
    """How many steps have begun, and how many of them with a token that nobody knew."""

    def __init__(self, forward: DecoderForward) -> None:
        self.forward, self.begun, self.ahead = forward, 0, 0

    def __call__(self, step: StepBatch) -> Tensor:
        self.begun += 1
        self.ahead += any(token < 0 for each in step.chunks for token in each.tokens)
        return self.forward(step)


def completed(
    trial: GeneratedTrial, requests: Sequence[Request], blocks: int, ahead: bool
) -> tuple[dict[str, Completion], CountedForward, Engine]:
    limits = ScheduleLimits(tokens=24, sequences=8)
    drawn = DrawnTokens(limits.sequences, torch.device("cpu")) if ahead else None
    forward = CountedForward(DecoderForward(trial.decoder(), blocks, drawn=drawn))
    engine = Engine(trial.shape, forward, blocks, limits, drawn=drawn)
    return engine.run(requests), forward, engine


@pytest.mark.parametrize("blocks", [ROOMY, TIGHT])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_completions_are_the_same_ahead_of_draws(shape: Shape, blocks: int) -> None:
    trial = GeneratedTrial(shape, "float64", 0)
    requests = requests_of(trial)
    expected, plain, _ = completed(trial, requests, blocks, ahead=False)
    found, counted, engine = completed(trial, requests, blocks, ahead=True)
    assert plain.ahead == 0 and counted.ahead > counted.begun // 2
    assert {each.reason for each in expected.values()} == {"stop", "length"}
    assert engine.num_preempted > 0 or blocks == ROOMY
    for id, each in expected.items():
        assert (found[id].tokens, found[id].reason) == (each.tokens, each.reason), id
        assert found[id].logprobs == pytest.approx(each.logprobs, rel=0, abs=1e-11)


def test_a_step_begins_before_the_last_draw_is_read() -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    drawn = DrawnTokens(4, torch.device("cpu"))
    forward = CountedForward(DecoderForward(trial.decoder(), ROOMY, drawn=drawn))
    engine = Engine(trial.shape, forward, ROOMY, drawn=drawn)
    engine.add(Request("a", (1, 2, 3), 4))
    seen = [(len(engine.step()), forward.begun) for _ in range(5)]
    # The last token needs no step of its own, and nothing begins after it.
    assert seen == [(0, 1), (1, 2), (1, 3), (1, 4), (1, 4)]
    assert not engine.busy


def test_a_token_of_another_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    requests = requests_of(trial)
    expected, _, _ = completed(trial, requests, ROOMY, ahead=False)
    fill = DrawnTokens.fill

    def of_the_next_row(self: DrawnTokens, tokens_1T: Tensor) -> Tensor:
        return fill(self, torch.where(tokens_1T == -1, -2, tokens_1T))

    monkeypatch.setattr(DrawnTokens, "fill", of_the_next_row)
    found, _, _ = completed(trial, requests, ROOMY, ahead=True)
    assert any(found[id].tokens != each.tokens for id, each in expected.items())


def test_a_draw_of_no_sequence_changes_nothing() -> None:
    """Requests that are ended while their token is drawn."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    drawn = DrawnTokens(4, torch.device("cpu"))
    engine = Engine(
        trial.shape, DecoderForward(trial.decoder(), ROOMY, drawn=drawn), ROOMY, drawn=drawn
    )
    for id in "ab":
        engine.add(Request(id, (1, 2, 3), 6))
    engine.step()
    engine.step()
    engine.end("a", "cancelled")
    while engine.busy:
        engine.step()
    alone, _, _ = completed(trial, [Request("b", (1, 2, 3), 6)], ROOMY, ahead=False)
    assert engine.collect("b").tokens == alone["b"].tokens
    assert engine.schedulers[0].pool.num_free == ROOMY


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_that_goes_on_after_a_completion_shares_all_of_its_blocks(ahead: bool) -> None:
    """A block is published under all of its tokens: its last one may still be drawn meanwhile."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    first = Request("first", (1, 2, 3), 3 * BLOCK)
    done, _, engine = completed(trial, [first], ROOMY, ahead)
    text = (*first.prompt, *done["first"].tokens)
    on = engine.run([Request("on", (*text, 5), 1)])["on"]
    assert on.reused == 3 * BLOCK

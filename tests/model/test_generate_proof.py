"""The proof of generation passes for sound engines, and fails for planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE
from torch import Tensor

from fivefold.core.shape import Shape
from fivefold.generate import scheduler
from fivefold.generate.blocks import BLOCK
from fivefold.generate.engine import DecoderForward, Engine, Forward
from fivefold.generate.requests import Request, SequenceChunk, StepBatch
from fivefold.model.decoder import Decoder
from fivefold.verify.generated import GeneratedTrial, MakeForward

ChangeChunk = Callable[[SequenceChunk, StepBatch], SequenceChunk]
LONG = 160
SHAPES = {
    "llama": replace(LLAMA, max_seq=LONG),
    "window": replace(LLAMA, max_seq=LONG, window=7),
    "wide window": replace(LLAMA, max_seq=LONG, window=BLOCK + 3),
    "gpt": replace(GPT, max_seq=LONG),
    "moe": replace(MOE, max_seq=LONG),
    "latent": replace(DEEPSEEK, max_seq=LONG),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_way_gives_the_plain_forward(shape: Shape) -> None:
    verdict = GeneratedTrial(shape, "float64", 0).run()
    assert verdict.passed, verdict
    assert verdict.logit_err < 1e-10 and verdict.tokens > 150
    assert verdict.preempted > 0 and verdict.reused > 0


def changed(change: ChangeChunk) -> MakeForward:
    """A forward that gets other chunks than the scheduler has made."""

    def make(decoder: Decoder, blocks: int) -> Forward:
        forward = DecoderForward(decoder, blocks)

        def run(step: StepBatch) -> Tensor:
            return forward(StepBatch(tuple(change(each, step) for each in step.chunks)))

        return run

    return make


def of_another(chunk: SequenceChunk, step: StepBatch) -> SequenceChunk:
    """The first block of another request, where there is one."""
    others = [each for each in step.chunks if each.id != chunk.id]
    if not others or chunk.start < BLOCK:
        return chunk
    return replace(chunk, table=(others[0].table[0], *chunk.table[1:]))


def one_further(chunk: SequenceChunk, step: StepBatch) -> SequenceChunk:
    """Decode at the next position."""
    if len(chunk.tokens) > 1 or (chunk.start + 1) // BLOCK >= len(chunk.table):
        return chunk
    return replace(chunk, start=chunk.start + 1)


@pytest.mark.parametrize("change", [of_another, one_further])
def test_planted_faults_are_caught(change: ChangeChunk) -> None:
    trial = GeneratedTrial(SHAPES["llama"], "float64", 0)
    verdict = trial.run(changed(change))
    assert not verdict.passed
    assert verdict.logit_err > 1e-6


def test_a_stale_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of equal tokens after different beginnings are taken for equal."""

    def unchained(before: bytes, tokens: list[int]) -> bytes:
        return bytes([len(before) > 0])

    monkeypatch.setattr(scheduler, "chained_digest", unchained)
    verdict = GeneratedTrial(SHAPES["llama"], "float64", 0).run()
    assert not verdict.passed and verdict.logit_err > 1e-6


def tokens_after_new_weights(renew: bool) -> tuple[list[float], list[float]]:
    """Log-probabilities over a cache of old weights, and over an empty one."""
    trial = GeneratedTrial(SHAPES["llama"], "float64", 0)
    decoder = trial.decoder()
    engine = Engine(trial.shape, DecoderForward(decoder, 16), 16)
    prompt = tuple(range(3 * BLOCK + 1))
    engine.run([Request("before", prompt, 1)])
    with torch.no_grad():
        for each in decoder.parameters():
            each.mul_(1.01)
    if renew:
        engine.renew()
    ours = engine.run([Request("after", prompt, 4)])["after"]
    fresh = Engine(trial.shape, DecoderForward(decoder, 16), 16)
    expected = fresh.run([Request("after", prompt, 4)])["after"]
    return list(ours.logprobs), list(expected.logprobs)


def test_new_weights_need_a_new_cache() -> None:
    ours, expected = tokens_after_new_weights(renew=True)
    assert ours == pytest.approx(expected, rel=0, abs=1e-12)
    stale, expected = tokens_after_new_weights(renew=False)
    assert max(abs(a - b) for a, b in zip(stale, expected, strict=True)) > 1e-4

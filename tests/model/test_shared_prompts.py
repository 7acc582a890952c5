"""Samples of a prompt share its computation, whatever else runs: they draw what they draw alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.model.shape import Shape
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.blocks import BlockPool
from fivefold.generate.cache import KvCache
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion, Request, Sampling, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.verify.generated import TOLERANCE, GeneratedTrial
from tests.selection import salt

LONGROPE = {"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "36"}
LONGROPE |= {"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"}
LATENT = {
    **{"head_dim": "6", "kv_heads": "8", "mla.kv_rank": "12", "mla.nope_dim": "2"},
    **{"mla.rope_dim": "4", "mla.value_dim": "3"},
}
SHAPES = {
    "dense": with_overrides(load("tiny"), {"layers": "2"}),
    "window": with_overrides(load("tiny"), {"layers": "2", "window": "20"}),
    "latent": with_overrides(load("tiny"), {"layers": "2", **LATENT}),
    "longrope": with_overrides(load("tiny"), {"layers": "2", **LONGROPE}),
    "experts": with_overrides(load("tiny-moe"), {"layers": "2"}),
}
ROOMY, TIGHT = 200, 9
USUAL = ScheduleLimits(64)


class CountedForward:
    """The tokens of prompts that are computed, and the most blocks that are in use."""

    def __init__(self, forward: DecoderForward, prompt: int = 0) -> None:
        self.forward, self.prompt, self.pool = forward, prompt, BlockPool(0)
        self.tokens = self.blocks = self.copies = 0

    def __call__(self, step: StepBatch) -> Tensor:
        starts = [min(chunk.start, self.prompt) for chunk in step.chunks]
        stops = [min(chunk.stop, self.prompt) for chunk in step.chunks]
        self.tokens += sum(stops) - sum(starts)
        self.blocks = max(self.blocks, self.pool.count - self.pool.num_free)
        self.copies += len(step.copies)
        return self.forward(step)


@dataclass(frozen=True)
class Run:
    """How an engine runs requests."""

    name: str
    limits: ScheduleLimits = USUAL
    blocks: int = ROOMY
    ahead: bool = False

    def engine(self, trial: GeneratedTrial, prompt: int = 0) -> tuple[Engine, CountedForward]:
        drawn = DrawnTokens(self.limits.tokens, torch.device("cpu")) if self.ahead else None
        counted = CountedForward(DecoderForward(trial.decoder(), self.blocks, drawn=drawn), prompt)
        engine = Engine(trial.shape, counted, self.blocks, self.limits, drawn=drawn)
        counted.pool = engine.schedulers[0].pool
        return engine, counted

    def __str__(self) -> str:
        return self.name


RUNS = (
    Run("batched"),
    Run("in chunks of 7", ScheduleLimits(7)),
    Run("three at a time", ScheduleLimits(64, 3)),
    Run("few blocks", ScheduleLimits(40), TIGHT),
    Run("ahead of draws", ahead=True),
    Run("few blocks, ahead of draws", ScheduleLimits(40), TIGHT, ahead=True),
)


def samples_of(request: Request, count: int) -> list[Request]:
    """The first is greedy."""
    warm = [replace(request, id=f"{request.id}/{i}", seed_key=f"sample {i}") for i in range(count)]
    return [
        replace(sample, sampling=Sampling(1.0, seed=7)) if i else sample
        for i, sample in enumerate(warm)
    ]


def alone(trial: GeneratedTrial, requests: Sequence[Request]) -> dict[str, Completion]:
    """Every request by itself, over an empty cache."""
    engine, _ = Run("alone", ScheduleLimits(1000)).engine(trial)
    completions = dict[str, Completion]()
    for request in requests:
        completions |= engine.run([request])
        engine.renew()
    assert not any(completion.reused for completion in completions.values())
    return completions


def require_equal(completion: Completion, expected: Completion, tolerance: float) -> None:
    id = completion.id
    assert (completion.tokens, completion.reason) == (expected.tokens, expected.reason), id
    assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=tolerance), id


@pytest.mark.parametrize("ahead", [False, True])
def test_eight_samples_of_a_thousand_tokens(ahead: bool) -> None:
    """All of them are computed once, and the last one by each sample; 62 blocks are shared."""
    shape = with_overrides(SHAPES["dense"], {"layers": "1", "max_seq": "1100"})
    trial = GeneratedTrial(shape, "float32", 0)
    dice = random.Random(1)
    prompt = tuple(dice.randrange(shape.vocab) for _ in range(1000))
    requests = samples_of(Request("a", prompt, 5), 8)
    engine, counted = Run("samples", ScheduleLimits(512), ahead=ahead).engine(trial, len(prompt))
    completions = engine.run(requests)
    assert (counted.tokens, counted.blocks, counted.copies) == (1007, 70, 7)
    assert [completion.reused for completion in completions.values()] == [0] + [999] * 7
    assert counted.pool.num_free == ROOMY
    for id, expected in alone(trial, requests).items():
        require_equal(completions[id], expected, TOLERANCE["float32"])


def crowd(shape: Shape, dice: random.Random) -> list[Request]:
    """Samples of prompts that begin alike, of lengths beside those of blocks, and with keys that
    share less."""
    text = [dice.randrange(shape.vocab) for _ in range(5 * BLOCK)]
    requests = samples_of(Request("long", tuple(text[:37]), 12), 3)
    for number in range(6):
        length = dice.choice((1, 5, BLOCK, BLOCK + 1, 30, 2 * BLOCK, 35, 3 * BLOCK + 9))
        turn = dice.choice((0, BLOCK, length - 1, length))
        prompt = (*text[:turn], *(dice.randrange(shape.vocab) for _ in range(length)))[:length]
        request = Request(f"{number}", prompt, dice.randint(1, 20))
        if dice.random() < 0.2:
            request = replace(request, stop_tokens=frozenset(range(0, shape.vocab, 5)))
        requests += samples_of(request, dice.randint(1, 4))
        if dice.random() < 0.3:
            requests.append(replace(request, id=f"{number} scored", prompt_logprobs=0))
        if dice.random() < 0.3:
            count = dice.randint(1, length)
            targets = tuple(dice.randrange(shape.vocab) for _ in range(count))
            requests.append(replace(request, id=f"{number} target", max_tokens=0, targets=targets))
    return requests


@pytest.mark.sample(4)
@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_crowd_of_samples_draws_what_each_draws_alone(shape: str, dtype: str, run: Run) -> None:
    """They come at random steps, some are aborted at random ones, and some lose their blocks."""
    dice = random.Random(f"{salt()}: {shape} {dtype} {run}")
    trial = GeneratedTrial(SHAPES[shape], dtype, dice.randrange(100))
    requests = crowd(trial.shape, dice)
    expected = alone(trial, requests)
    engine, counted = run.engine(trial)
    steps = {request.id: dice.choice((0, 0, dice.randrange(20))) for request in requests}
    strangers = [id for id in steps if "long" not in id]
    aborts = {id: steps[id] + dice.randrange(8) for id in strangers if dice.random() < 0.2}
    number, open = 0, set[str]()
    while number < 30 or engine.busy:
        for request in requests:
            if steps[request.id] == number:
                engine.add(request)
                open.add(request.id)
        for id in [id for id in aborts if aborts[id] == number and id in open]:
            engine.end(id, "cancelled")
            open.discard(id)
            del expected[id]
        open -= {token.id for token in engine.step() if token.reason is not None}
        number += 1
    for id, completion in expected.items():
        require_equal(engine.collect(id), completion, TOLERANCE[dtype])
    assert counted.copies > 1 or run.blocks == TIGHT
    assert counted.pool.num_free == run.blocks
    assert not any(counted.pool.users(block) for block in range(run.blocks))


def copied_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are not copied."""
    monkeypatch.setattr(KvCache, "copy_blocks", lambda self, copies: None)


def sources_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample waits for the step that computes the end of its prompt."""
    monkeypatch.setattr(Scheduler, "_awaits_end", lambda self, sequence: False)


def latent_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is forgotten."""
    plain = KvCache.copy_blocks

    def copy_first(self: KvCache, copies: Any) -> None:
        pages, self.pages = self.pages, dict([next(iter(self.pages.items()))])
        plain(self, copies)
        self.pages = pages

    monkeypatch.setattr(KvCache, "copy_blocks", copy_first)


@pytest.mark.parametrize("fault", [copied_after, sources_read_late, latent_values_alone])
@pytest.mark.parametrize("shape", ["dense", "latent"])
def test_wrong_copies_are_seen(
    shape: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = GeneratedTrial(SHAPES[shape], "float64", 0)
    requests = samples_of(Request("a", tuple(range(2 * BLOCK + 9)), 6), 3)
    expected = alone(trial, requests)
    fault(monkeypatch)
    engine, _ = RUNS[0].engine(trial)
    completions = engine.run(requests)
    with pytest.raises(AssertionError):
        for id, completion in completions.items():
            require_equal(completion, expected[id], TOLERANCE["float64"])


def test_samples_have_the_choices_of_their_routers() -> None:
    """Those of a copied block are copied too; the prompt has those of the first sample."""
    trial = GeneratedTrial(SHAPES["experts"], "float64", 0)
    requests = samples_of(Request("a", tuple(range(2 * BLOCK + 9)), 6), 3)

    def completed(sets: Sequence[Sequence[Request]]) -> dict[str, Completion]:
        decoder, completions = trial.decoder(), dict[str, Completion]()
        routes = RouteStore(decoder, ROOMY + 1)
        engine = Engine(
            trial.shape, DecoderForward(decoder, ROOMY, routes=routes), ROOMY, routes=routes
        )
        for members in sets:
            completions |= engine.run(members)
            engine.renew()
        return completions

    together, single = completed([requests]), completed([[request] for request in requests])
    assert [completion.reused for completion in together.values()] == [0, 40, 40]
    for id, expected in single.items():
        assert together[id].tokens == expected.tokens
        assert together[id].routes == expected.routes is not None


def test_a_fault_of_one_sample_is_not_copied() -> None:
    """It ends by an error before the others read what it has computed."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    requests = samples_of(Request("a", tuple(range(2 * BLOCK + 9)), 6), 3)
    expected = alone(trial, requests)
    engine, counted = RUNS[0].engine(trial)
    assert counted.forward.decoder.embed is not None
    weight = counted.forward.decoder.embed.weight
    with torch.no_grad():
        healthy = weight[3].clone()
        weight[3] = torch.nan
    for request in requests:
        engine.add(request)
    (token,) = engine.step()
    assert (token.id, token.reason) == ("a/0", "error")
    with torch.no_grad():
        weight[3] = healthy
    while engine.busy:
        engine.step()
    for id in ("a/1", "a/2"):
        require_equal(engine.collect(id), expected[id], TOLERANCE["float64"])


def test_a_step_that_fails_leaves_nothing_shared() -> None:
    """Blocks are shared when they are scheduled, and nobody has written them."""
    trial = GeneratedTrial(SHAPES["dense"], "float64", 0)
    prompt = tuple(range(2 * BLOCK + 9))
    requests = [*samples_of(Request("a", prompt, 6), 3), Request("b", (*prompt, 5, 6), 6)]
    expected = alone(trial, requests)
    engine, counted = RUNS[0].engine(trial)
    for request in requests:
        engine.add(request)
    engine.forward = fail
    with pytest.raises(MemoryError):
        engine.step()
    engine.forward = counted
    while engine.busy:
        engine.step()
    for id, completion in expected.items():
        require_equal(engine.collect(id), completion, TOLERANCE["float64"])
    assert counted.pool.num_free == ROOMY


def fail(step: StepBatch) -> Tensor:
    raise MemoryError

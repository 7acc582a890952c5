"""Engines whose logits are not finite: the request fails, its neighbours and the engine do not."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small import LLAMA

from fivefold.core.model.kv_pages import BLOCK
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import LayoutEngine
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text import ByteCodec
from fivefold.generate.writer import TextRequest, TextWriter
from fivefold.verify.generated import GeneratedTrial

SHAPE = replace(LLAMA, max_seq=160)
SPOILED = 13  # a token whose embedding is not finite
BLOCKS = 10


def engine_of(value: float) -> Engine:
    """An engine in which one token has an embedding of this value."""
    decoder = GeneratedTrial(SHAPE, "float64", 0).decoder()
    with torch.no_grad():
        decoder.embed.weight[SPOILED] = value
    return Engine(SHAPE, DecoderForward(decoder, BLOCKS), BLOCKS, ScheduleLimits(tokens=40))


def neighbours() -> list[Request]:
    samplings = (Sampling(), Sampling(1.0), Sampling(5e-324), Sampling(0.9, top_k=5, top_p=0.9))
    prompts = ((1, 2, 3), tuple(range(20, 55)), (4,), tuple(range(30, 50)))
    return [
        Request(f"n{i}", prompt, 12, sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def shared(completions: dict[str, Completion]) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {id: (each.tokens, each.reason) for id, each in completions.items() if id[0] == "n"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5e-324])
def test_a_request_fails_alone(value: float, temperature: float) -> None:
    """Also after it: its blocks are used again, and what was not finite is in them."""
    expected = shared(engine_of(0.0).run(neighbours()))
    engine = engine_of(value)
    prompt = (*range(40, 40 + BLOCK), SPOILED, 3)
    bad = [Request(f"bad{i}", prompt, 9, Sampling(temperature, seed=i)) for i in range(5)]
    completions = engine.run([*bad, *neighbours()])
    assert shared(completions) == expected
    failed = [completions[each.id] for each in bad]
    assert all(each.reason == "error" and each.tokens == each.logprobs == () for each in failed)
    assert not engine.busy and engine.schedulers[0].pool.num_free == BLOCKS
    again = [replace(each, id=f"{each.id} again") for each in neighbours()]
    later = {id.removesuffix(" again"): each for id, each in engine.run(again).items()}
    assert {id: each.reason for id, each in later.items()} == {
        id: reason for id, (_, reason) in expected.items()
    }
    assert all(math.isfinite(value) for each in later.values() for value in each.logprobs)


def test_a_fault_that_has_passed_is_not_shared() -> None:
    engine = engine_of(math.nan)
    prompt = (SPOILED, *range(1, 2 * BLOCK))
    assert engine.run([Request("a", prompt, 4)])["a"].reason == "error"
    with torch.no_grad():
        cast("Any", engine.forward).decoder.embed.weight[SPOILED] = 0.5
    repaired = engine.run([Request("b", prompt, 4)])["b"]
    assert repaired.reason == "length" and repaired.reused == 0


def test_targets_of_a_spoiled_prompt_are_an_error() -> None:
    engine = engine_of(math.nan)
    good = Request("n", (1, 2, 3), 0, targets=(2, 3, 4))
    bad = Request("bad", (1, SPOILED, 3), 0, targets=(2, 3, 4))
    completions = engine.run([good, bad])
    assert completions["n"].reason == "length" and len(completions["n"].logprobs) == 3
    assert completions["bad"].reason == "error"


def test_a_text_ends_with_its_error() -> None:
    writer = TextWriter(engine_of(math.nan), ByteCodec())
    writer.add(TextRequest(Request("bad", (SPOILED,), 5), "x"))
    (piece,) = [each for _ in range(3) if writer.busy for each in writer.step()]
    assert piece.written is not None and piece.written.reason == "error"
    assert piece.written.text == "" and piece.written.tpot_s is None and not writer.busy


def test_times_of_a_text_are_those_of_its_tokens() -> None:
    """The time between two tokens is the mean of the steps after the first token."""
    ticks = iter([10.0, 11.0, 13.0, 14.0, 18.0, 19.0])
    writer = TextWriter(engine_of(0.0), ByteCodec(), clock=lambda: next(ticks))
    writer.add(TextRequest(Request("a", (1, 2, 3), 5), "x"))
    *_, last = [piece for _ in range(5) for piece in writer.step()]
    assert last.written is not None and len(last.written.tokens) == 5
    assert last.written.ttft_s == 1.0 and last.written.tpot_s == 2.0


def test_new_weights_leave_no_shared_block() -> None:
    """`load` moves the weights first, and forgets the cache then, on every replica."""
    engine, order = object.__new__(LayoutEngine), list[str]()
    job = cast("Any", object())
    engine._refit = cast("Any", SimpleNamespace(job=job, run=lambda: order.append("weights")))
    forgetting = SimpleNamespace(restart=lambda: order.append("cache"))
    engine.schedulers = cast("Any", [forgetting, forgetting])
    engine._flights, engine._landed = deque(), []
    engine.stage = cast("Any", SimpleNamespace(scales={}))
    engine.load(job)
    assert order == ["weights", "cache", "cache"]

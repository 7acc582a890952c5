"""The proof of generation passes for sound engines, and fails for planted faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.shape import Rope, Shape
from fivefold.generate import cache, requests
from fivefold.generate.engine import Engine, Forward
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Request, SequenceChunk, SequenceState, StepBatch
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.model.batch import AttentionInfo
from fivefold.model.decoder import Decoder
from fivefold.verify.generated import GeneratedTrial, MakeForward

ChangeChunk = Callable[[SequenceChunk, StepBatch], SequenceChunk]
LONG = 160
LOCAL = replace(LLAMA, max_seq=LONG, global_every=2)
# One prompt grows past 36 tokens, two are longer; the first 32 tokens of one of these are its own.
LONGROPE = Rope("longrope", 8.0, 36, short=(1.0, 1.25, 1.5), long=(4.0, 5.0, 6.0))
SHAPES = {
    "llama": replace(LLAMA, max_seq=LONG),
    "window": replace(LLAMA, max_seq=LONG, window=7),
    "wide window": replace(LLAMA, max_seq=LONG, window=BLOCK + 3),
    "gpt": replace(GPT, max_seq=LONG),
    "moe": replace(MOE, max_seq=LONG),
    "latent": replace(DEEPSEEK, max_seq=LONG),
    "latent chunks": replace(DEEPSEEK, max_seq=LONG, window=7, window_kind="chunked"),
    # As Gemma 2, gpt-oss and Llama 4 have them; in all layers, with blocks that are given back; and
    # all of them together.
    "capped": replace(LOCAL, window=9, score_cap=0.3, logit_cap=0.2, global_rotary=True),
    "sinks": replace(LOCAL, window=9, sinks=True, global_rotary=True),
    "chunks": replace(LOCAL, window=7, window_kind="chunked", nope_floor=5),
    "chunks everywhere": replace(LLAMA, max_seq=LONG, window=7, window_kind="chunked"),
    "wide chunks": replace(LLAMA, max_seq=LONG, window=BLOCK + 3, window_kind="chunked"),
    "longrope": replace(LLAMA, max_seq=LONG, rope=LONGROPE),
    "longrope window": replace(LLAMA, max_seq=LONG, rope=LONGROPE, window=BLOCK + 3),
    "everything": replace(LOCAL, window=7, window_kind="chunked", score_cap=0.3, sinks=True),
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


def cap_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "soft_cap", lambda scores, cap: scores)


def sinks_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "with_sinks", lambda out, lse, sinks: (out, lse))


def chunks_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache.hidden_pairs

    def shifted(queries_n: Tensor, keys_L: Tensor, info: AttentionInfo) -> Tensor:
        return plain(queries_n + 1, keys_L + 1, info)

    monkeypatch.setattr(cache, "hidden_pairs", shifted)


def chunks_of_the_first_key_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the first block that is read, and not from the start of the sequence."""
    plain = cache.attend_sequence

    def uncounted(q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo, first: int) -> Tensor:
        return plain(q, k, v, info, 0)

    monkeypatch.setattr(cache, "attend_sequence", uncounted)


def keys_of_both_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that grows keeps its keys, and its next tokens are rotated otherwise."""
    plain = Scheduler._chunk

    def grown(self: Scheduler, sequence: SequenceState, most: int) -> SequenceChunk:
        chunk = plain(self, sequence, most)
        return replace(chunk, outgrown=self._outgrown(sequence.length))

    monkeypatch.setattr(Scheduler, "_lost_rotation", lambda self, sequence: False)
    monkeypatch.setattr(Scheduler, "_chunk", grown)


def rotated_by_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt is rotated as if the prompt ended with it."""
    plain = Scheduler._chunk

    def so_far(self: Scheduler, sequence: SequenceState, most: int) -> SequenceChunk:
        chunk = plain(self, sequence, most)
        return replace(chunk, outgrown=self._outgrown(chunk.stop))

    monkeypatch.setattr(Scheduler, "_chunk", so_far)


def blocks_shared_by_both_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler._contents

    def alike(self: Scheduler, sequence: SequenceState) -> tuple[bool, bytes]:
        outgrown, _ = plain(self, sequence)
        return outgrown, b"0 "

    monkeypatch.setattr(Scheduler, "_contents", alike)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("capped", cap_forgotten),
        ("sinks", sinks_forgotten),
        ("chunks", chunks_off_by_one),
        ("chunks everywhere", chunks_of_the_first_key_read),
        ("longrope", keys_of_both_rotations),
        ("longrope", rotated_by_the_tokens_so_far),
        ("longrope", blocks_shared_by_both_rotations),
    ],
)
def test_what_a_layer_has_cannot_be_forgotten(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    verdict = GeneratedTrial(SHAPES[name], "float64", 0).run()
    assert not verdict.passed and verdict.logit_err > 1e-6


def test_chunks_in_all_layers_give_back_their_blocks() -> None:
    trial = GeneratedTrial(SHAPES["chunks everywhere"], "float64", 0)
    request, limits, found = Request("long", tuple(range(40)), 100), ScheduleLimits(tokens=8), []
    for blocks in (3, 16):
        engine = Engine(trial.shape, DecoderForward(trial.decoder(), blocks), blocks, limits)
        found.append(engine.run([request])["long"].logprobs)
        assert engine.num_preempted == 0 and engine.schedulers[0].pool.num_free == blocks
    assert len(found[0]) == 100
    assert found[0] == pytest.approx(found[1], rel=0, abs=1e-12)


def forward_on_gpu(monkeypatch: pytest.MonkeyPatch) -> MakeForward:
    """That of a GPU, without its kernels: they may not be called."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a kernel has not what this layer has")

    paged, skinny, name = ModuleType("paged"), ModuleType("skinny"), "fivefold.generate.cuda_graphs"
    vars(paged).update(attend_single_tokens=refuse)
    vars(skinny).update(skinny_linear=refuse, takes=lambda x: False)
    monkeypatch.setitem(sys.modules, "fivefold.generate.paged_kernel", paged)
    monkeypatch.setitem(sys.modules, "fivefold.generate.skinny_kernel", skinny)
    monkeypatch.setitem(sys.modules, name, paged)  # what is imported here does not stay
    del sys.modules[name]
    return import_module(name).GraphedForward


@pytest.mark.parametrize("name", ["capped", "sinks", "wide chunks"])
def test_gpus_compute_without_kernels_what_these_have_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = GeneratedTrial(SHAPES[name], "float32", 0).run(forward_on_gpu(monkeypatch))
    assert verdict.passed, verdict


def test_a_stale_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of equal tokens after different beginnings are taken for equal."""

    def unchained(before: bytes, tokens: list[int]) -> bytes:
        return bytes([len(before) > 0])

    monkeypatch.setattr(requests, "chained_digest", unchained)
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

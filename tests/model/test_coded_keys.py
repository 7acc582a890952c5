"""Keys and values in codes of fp8: attention is over what the codes mean, and so are tokens, also
of sequences that lose their blocks, share them, or copy them; wrong scales are seen."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fp8_alone import rounded
from small import DEEPSEEK, GPT, LLAMA, MOE
from torch import Tensor

from fivefold.core.model import BLOCK, Shape
from fivefold.core.plan import PlanOptions
from fivefold.generate import LayoutEngine, ScheduleLimits, cache, mesh_of, plan_of, stage_of
from fivefold.generate.cache import KvCache, LayerPages, attend_pages, attend_sequence
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import blocks_within
from fivefold.generate.requests import Completion, Request, SequenceChunk, StepBatch
from fivefold.generate.step_tensors import BlockTables, step_tensors
from fivefold.model import AttentionInfo
from fivefold.verify.generated import GeneratedTrial
from tests.gpu import random_requests

CPU = torch.device("cpu")
SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "moe": MOE,
    "latent": replace(DEEPSEEK, mtp=0),
    "sinks": replace(LLAMA, score_cap=0.3, sinks=True, window=7),
}
NO_LAYER = torch.empty(0)
LAYERS = {
    "all": AttentionInfo(NO_LAYER, None, None),
    "window": AttentionInfo(NO_LAYER, None, 9),
    "chunks, cap, sinks": AttentionInfo(
        NO_LAYER, None, None, chunk=7, cap=0.5, sinks=torch.linspace(-2, 2, 4)
    ),
}


def pages_of(blocks: int, heads: int, width: int, latent: int = 0) -> LayerPages:
    """Pages without codes, of heads or of latents."""
    codes = [torch.zeros(blocks, BLOCK, heads, width, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks, heads, BLOCK).transpose(1, 2) for _ in range(2)]
    if latent:
        return LayerPages(codes[0], codes[0][..., :latent], scales[0], scales[0])
    return LayerPages(*codes, *scales)


def drawn(*sizes: int, seed: int) -> Tensor:
    """Numbers whose sizes differ from row to row by twelve orders."""
    dice = torch.Generator().manual_seed(seed)
    spread = 10 ** (12 * torch.rand(*sizes[:-1], 1, generator=dice, dtype=torch.float64) - 6)
    return torch.randn(*sizes, generator=dice, dtype=torch.float64) * spread


@pytest.mark.parametrize("info", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("latent", [0, 5], ids=["heads", "latents"])
def test_attention_is_over_what_codes_mean(latent: int, info: AttentionInfo) -> None:
    """Two sequences, whose blocks take turns: the last ones attend to 20 and 50 keys."""
    kv_heads, width, lengths, tokens = 1 if latent else 2, 8, (20, 50), (1, 7)
    pages, tables = pages_of(6, kv_heads, width, latent), ((1, 5), (4, 0, 3, 2))
    keys = [drawn(length, kv_heads, width, seed=length) for length in lengths]
    keys = [key / key.abs().amax(-1, keepdim=True) for key in keys]  # scores near one another
    values = [drawn(length, kv_heads, width, seed=1 + length) for length in lengths]
    values = [key[..., :latent] for key in keys] if latent else values
    for table, k_LKd, v_LKv in zip(tables, keys, values, strict=True):
        slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(k_LKd))])
        order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(2))
        pages.write(slots[order], k_LKd[order], v_LKv[order])
    chunks = tuple(
        SequenceChunk(f"{length}", (1,) * count, length - count, table, samples=True)
        for table, length, count in zip(tables, lengths, tokens, strict=True)
    )
    step = step_tensors(StepBatch(chunks), BlockTables(CPU, 4, 6))
    dice = torch.Generator().manual_seed(3)
    queries = torch.randn(sum(tokens), 4, width, generator=dice, dtype=torch.float64)
    expected = [
        attend_sequence(q_nHd, key, key[..., :latent] if latent else rounded(value), info, 0)
        for q_nHd, key, value in zip(
            torch.split(queries, list(tokens)), map(rounded, keys), values, strict=True
        )
    ]
    exact = torch.cat(expected)
    output = attend_pages(queries, pages, step, info)
    assert ((output - exact).abs() <= 1e-12 * exact.abs().amax((1, 2), keepdim=True)).all()


def completions_of(
    shape: Shape, kv_codes: bool, same: bool = False, blocks: int = 20, alone: bool = False
) -> list[Completion]:
    """Of three prompts and two that begin like the second, in float64."""
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh = mesh_of(plan, CPU, same)
    stage, trial = stage_of(plan, mesh, torch.float64, same), GeneratedTrial(shape, "float64", 0)
    stage.fill(lambda weight, dtype: trial.full_weight(weight.name))  # type: ignore[arg-type, return-value]
    engine = LayoutEngine(
        *(plan, mesh, stage, blocks, ScheduleLimits(40)), batch_invariant=same, kv_codes=kv_codes
    )
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(shape.vocab, (size,), generator=dice).tolist() for size in (9, 23, 3)]
    prompts += [prompts[1], prompts[1][:20]]
    requests = [Request(f"{i}", tuple(prompt), 12) for i, prompt in enumerate(prompts)]
    done: dict[str, Completion] = {}
    for group in [[request] for request in requests] if alone else [requests]:
        done |= engine.run(group)
        engine.renew()
    engine.close()
    return [done[request.id] for request in requests]


def distance(one: list[Completion], other: list[Completion]) -> float:
    pairs = zip(one, other, strict=True)
    return max(
        abs(a - b)
        for first, second in pairs
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    )


def writes_rounded() -> AbstractContextManager[object]:
    """Pages of float64 get keys and values that were rounded to fp8 and back."""
    write = LayerPages.write

    def rounding(self: LayerPages, slots_T: Tensor, k_TKd: Tensor, v_TKv: Tensor) -> None:
        write(self, slots_T, rounded(k_TKd), rounded(v_TKv))

    return patch.object(LayerPages, "write", rounding)


@pytest.mark.parametrize(
    ("name", "same"), [*((name, False) for name in SHAPES), ("llama", True), ("latent", True)]
)
def test_codes_generate_as_the_rounded_keys_do(name: str, same: bool) -> None:
    shape = SHAPES[name]
    coded, plain = completions_of(shape, True, same), completions_of(shape, False, same)
    with writes_rounded():
        expected = completions_of(shape, False, same)
    assert [each.tokens for each in coded] == [each.tokens for each in expected]
    assert distance(coded, expected) < 1e-12
    assert distance(coded, plain) > 1e-3  # what rounding changes
    alone = completions_of(shape, True, same, alone=True)
    assert [each.tokens for each in coded] == [each.tokens for each in alone]
    assert distance(coded, alone) < (1e-300 if same else 1e-12)


def scales_of_neighbours(pages: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    return READ(pages, None if scales is None else scales.roll(1, 1), *rest)


def forgotten_scales(pages: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    return READ(pages, None if scales is None else torch.full_like(scales, 0.01), *rest)


READ = cache._read


@pytest.mark.parametrize("wrong", [scales_of_neighbours, forgotten_scales])
@pytest.mark.parametrize("name", ["llama", "latent", "sinks"])
def test_wrong_scales_are_seen(wrong: Callable[..., Tensor], name: str) -> None:
    right = completions_of(SHAPES[name], True)
    with patch.object(cache, "_read", wrong):
        assert distance(completions_of(SHAPES[name], True), right) > 1e-3


def without_scales() -> AbstractContextManager[object]:
    """Copies of blocks lose their scales."""
    codes = property(lambda self: tuple(t for t in STORED(self) if t.dtype == torch.uint8))
    return patch.object(LayerPages, "stored", codes)


STORED = LayerPages.stored.fget  # type: ignore[attr-defined]


FEW_BLOCKS = 14


def law_of(name: str, count: int) -> tuple[int, int, int]:
    """Requests that lose and share blocks, and those with other tokens than alone. In float64: a
    sum in another order could move a float32 number to another code."""
    decoder, dice = random_requests.decoder_of(name, CPU).double(), random.Random(count)
    requests = random_requests.requests_of(name, count, dice)
    limits, codes = ScheduleLimits(96, 16), partial(KvCache, codes=True)

    def engine_of(blocks: int) -> Engine:
        forward = DecoderForward(copy.deepcopy(decoder), blocks, codes)
        return Engine(decoder.shape, forward, blocks, limits)

    together, single = engine_of(FEW_BLOCKS), engine_of(40)
    done, wrong = random_requests.run(together, requests, dice), 0
    for request in requests:
        single.renew()
        tokens = single.run([request])[request.id].tokens
        drawn_tokens = done[request.id].tokens  # fewer, if it was aborted
        wrong += tokens[: len(drawn_tokens)] != drawn_tokens
    assert together.schedulers[0].pool.num_free == FEW_BLOCKS
    return together.num_preempted, sum(each.reused for each in done.values()), wrong


@pytest.mark.parametrize("name", ["dense", "latents", "window"])
def test_tokens_do_not_depend_on_neighbours(name: str) -> None:
    preempted, reused, wrong = law_of(name, 12)
    assert (preempted or name == "window") and reused and not wrong


def test_copies_without_scales_are_seen() -> None:
    with without_scales():
        assert distance(completions_of(LLAMA, True), completions_of(LLAMA, True, alone=True)) > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_budget_has_room_for_what_pages_take(shape: Shape) -> None:
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh = mesh_of(plan, CPU, False)
    decoder = stage_of(plan, mesh, torch.bfloat16, False).model
    blocks = blocks_within(decoder, mesh, 1e5, True)
    pages = KvCache(decoder, blocks, codes=True).pages.values()
    taken = sum(tensor.nbytes for layer in pages for tensor in layer.stored)
    assert taken <= 1e5 < taken * (blocks + 1) / blocks
    assert blocks > blocks_within(decoder, mesh, 1e5)

"""Greedy tokens beside `generate` of the `transformers` package, for every family: random weights,
prompts of several lengths in one batch, float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from test_hf_parity import CONFIGS, Float64Everywhere, pair

from fivefold.core.model.kv_pages import BLOCK
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Request
from fivefold.generate.scheduler import ScheduleLimits

NEW = 24
# Only the package's Phi-3 computes its cache again where a text has outgrown it: others go on with
# keys of both rotations, which no forward of the text has.
WITHOUT_CACHE = ("llama-longrope",)
LENGTHS = (1, 5, BLOCK, 2 * BLOCK + 3)


def prompts(vocab: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randint(1, vocab, (length,), generator=generator) for length in LENGTHS)
    return [tuple(each.tolist()) for each in drawn]


def their_tokens(
    theirs: Any, prompts: list[tuple[int, ...]], padded: bool, cached: bool = True
) -> list[list[int]]:
    """What the package generates: each prompt alone, or all in one batch with padding before."""
    theirs.generation_config = transformers.GenerationConfig()  # without an end of its own
    longest = max(map(len, prompts))
    groups = [prompts] if padded else [[each] for each in prompts]
    found: list[list[int]] = []
    for group in groups:
        width = longest if padded else len(group[0])
        ids = torch.tensor([[0] * (width - len(each)) + list(each) for each in group])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in group])
        with Float64Everywhere(), torch.no_grad():
            out = theirs.generate(
                ids,
                attention_mask=mask,
                use_cache=cached,
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
                ),
            )
        found += out[:, width:].tolist()
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    models = pair(name)
    given = prompts(models.shape.vocab)
    expected = their_tokens(models.theirs, given, padded=False, cached=name not in WITHOUT_CACHE)
    assert len({tuple(each) for each in expected}) > 1, "the prompts make no difference"
    blocks = 16
    engine = Engine(
        models.shape,
        DecoderForward(copy.deepcopy(models.ours), blocks),
        blocks,
        ScheduleLimits(tokens=7, sequences=3),  # prompts in chunks, beside decodes
    )
    requests = [Request(str(i), each, NEW) for i, each in enumerate(given)]
    completions = engine.run(requests)
    assert [list(completions[each.id].tokens) for each in requests] == expected
    assert {each.reason for each in completions.values()} == {"length"}
    assert engine.schedulers[0].pool.num_free == blocks
    at = models.shape.outgrown_at
    outgrown = [at is not None and len(each) <= at < len(each) + NEW - 1 for each in given]
    again = [completions[each.id].preempted for each in requests]
    assert again == [int(each) for each in outgrown], "computed again where it has outgrown"


def test_greedy_tokens_of_padded_batches() -> None:
    models = pair("llama")
    given = prompts(models.shape.vocab)
    engine = Engine(models.shape, DecoderForward(models.ours, 16), 16)
    completions = engine.run(Request(str(i), each, NEW) for i, each in enumerate(given))
    expected = their_tokens(models.theirs, given, padded=True)
    assert [list(each.tokens) for each in completions.values()] == expected

"""The cache of context ranks: attention over parts of the keys, merged, and who owns a block."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small import DEEPSEEK, LLAMA
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.shape import Shape
from fivefold.generate.cache import attend_sequence, hidden_pairs
from fivefold.generate.context_cache import ContextCache, attend_part, merge_parts
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.step_tensors import BlockTables, step_tensors
from fivefold.model.batch import AttentionInfo
from fivefold.model.decoder import Decoder, from_config


def layer(window: int | None = None, **traits: Any) -> AttentionInfo:
    return AttentionInfo(torch.empty(0), None, window, **traits)


LAYERS = {
    "all": layer(),
    "window of 1": layer(1),
    "window of 9": layer(9),
    "wide window": layer(BLOCK + 3),
    "chunks of 7": layer(chunk=7),
    "wide chunks": layer(chunk=BLOCK + 3),
    "cap": layer(cap=0.5),
    "sinks": layer(sinks=torch.linspace(-2, 2, 6)),
    "everything": layer(chunk=7, cap=0.5, sinks=torch.linspace(-2, 2, 6)),
}


def parts_of(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, info: AttentionInfo
) -> tuple[Tensor, list[bool]]:
    """What each of some ranks finds, which own blocks in turn; and whether a query sees no key."""
    positions, queries = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))
    found: list[Tensor] = []
    for rank in range(ranks):
        mine = positions[positions // BLOCK % ranks == rank]
        hidden = hidden_pairs(queries, mine, info)
        found.append(attend_part(q, k[mine], v[mine], hidden, info))
    parts = torch.stack(found)
    return parts, [bool(each.isneginf().any()) for each in parts]


@pytest.mark.parametrize("info", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (7, 7), (20, 50), (64, 64)])
def test_merged_parts_are_attention_over_all_keys(
    queries: int, keys: int, info: AttentionInfo
) -> None:
    torch.manual_seed(0)
    sizes = ((queries, 6, 8), (keys, 2, 8), (keys, 2, 5))
    q, k, v = (torch.randn(*size, dtype=torch.float64) for size in sizes)
    parts, sees_nothing = parts_of(q, k, v, 3, info)
    expected = attend_sequence(q, k, v, info, 0)
    assert (merge_parts(parts, info.sinks) - expected).abs().max() < 1e-14
    if keys <= BLOCK or (info.window or info.chunk or keys) < BLOCK:
        assert any(sees_nothing), "a rank without a key is part of this test"


def rank_of(coord: int, ranks: int, decoder: Decoder, blocks: int) -> ContextCache:
    mesh = SimpleNamespace(size=lambda role: ranks, coord=lambda role: coord)
    return ContextCache(decoder, blocks, cast(Any, mesh))


def num_pages(decoder: Decoder) -> int:
    attention = cast(Any, decoder.blocks["0"]).attention
    kernel = getattr(attention, "latent_kernel", None) or attention.kernel
    return len(kernel.pages.keys)


@pytest.mark.parametrize("shape", [LLAMA, replace(DEEPSEEK, mtp=0)], ids=["heads", "latent"])
def test_a_rank_has_its_share_of_blocks_and_writes_them_once(shape: Shape) -> None:
    ranks, blocks, decoder = 3, 12, from_config(shape)
    table = (4, 8, 9, 1)
    step = StepBatch((SequenceChunk("a", (0,) * 40, 13, table, samples=True),))
    written: list[int] = []
    tables = BlockTables(torch.device("cpu"), 4, blocks)
    for coord in range(ranks):
        cache = rank_of(coord, ranks, decoder, blocks)
        assert num_pages(decoder) == 4, "a third"
        cache.begin(step_tensors(step, tables))
        written += cache.written.tolist()
        owned = [block // ranks for block in table if block % ranks == coord]
        assert {slot // BLOCK for slot in cache.slots.tolist()} == set(owned)
    assert sorted(written) == list(range(40)), "each token on one rank"

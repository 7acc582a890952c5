"""Generation in layouts: a few of the table; and planted faults are caught in a layout too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import pytest
from generations import (
    ATTENTION,
    GenerationCase,
    cases,
    context_cases,
    is_good,
    like_cases,
    prove,
)
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate import cache, context_cache, requests
from fivefold.generate.cache import KvCache
from fivefold.generate.context_cache import ContextCache
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import RankEnds, forward_plan
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.step_tensors import StepTensors
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.decoder import Decoder
from fivefold.verify.generated import GeneratedVerdict, Observed
from fivefold.verify.generated_ranks import GeneratedSettings, generate_rank, judge_rank

LAYOUT = "tp=2 pp=2"
Patch = Callable[[], AbstractContextManager[object]]


@pytest.mark.sample(0.5, table=True)
@pytest.mark.parametrize(
    "case", [each for each in cases() if "cp=" not in each.layout and not each.like], ids=str
)
def test_a_layout_that_generates(pool: Pool, case: GenerationCase) -> None:
    verdict = prove(pool, case)
    assert is_good(verdict), verdict
    assert verdict.trained_layout is not None


@pytest.mark.sample(0.5, table=True)
@pytest.mark.parametrize(
    "case", [each for each in context_cases() if "tiny" in each.model], ids=str
)
def test_a_layout_with_context_ranks(pool: Pool, case: GenerationCase) -> None:
    test_a_layout_that_generates(pool, case)


@pytest.mark.sample(0.5, table=True)
@pytest.mark.parametrize("case", list(like_cases()), ids=str)
def test_a_layout_with_attention_of_another_family(pool: Pool, case: GenerationCase) -> None:
    test_a_layout_that_generates(pool, case)


def test_the_table_has_layouts_of_many_kinds() -> None:
    everything = [each for each in cases() if each.layout != "dp=1"]
    assert len(everything) == len(set(everything)) >= 24
    assert {each.model for each in everything} >= {"tiny", "tiny-moe", "qwen3-8b", "deepseek-v3"}
    assert sum("cp=" in each.layout for each in everything) >= 12


# Planted faults: a rank patches its own engine.


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


def chunks_changed(
    change: Callable[[SequenceChunk, StepBatch], SequenceChunk],
) -> AbstractContextManager[object]:
    plain = DecoderForward.__call__

    def call(self: DecoderForward, step: StepBatch) -> Tensor:
        return plain(self, StepBatch(tuple(change(each, step) for each in step.chunks)))

    return patch.object(DecoderForward, "__call__", call)


def block_of_another_request() -> AbstractContextManager[object]:
    return chunks_changed(of_another)


def position_off_by_one() -> AbstractContextManager[object]:
    return chunks_changed(one_further)


def stale_prefix() -> AbstractContextManager[object]:
    """Blocks of equal places are taken for equal, whatever is in them."""

    def unchained(before: bytes, tokens: Sequence[int]) -> bytes:
        return bytes([len(before) > 0])

    return patch.object(requests, "chained_digest", unchained)


def cache_of_the_wrong_stage() -> AbstractContextManager[object]:
    """The second stage writes and reads the pages of a batch that another stage works on."""
    plain, kept = KvCache.begin, dict[tuple[int, int], StepTensors]()

    def begin(self: KvCache, step: StepTensors) -> None:
        key = id(self), len(step.slots)
        last, kept[key] = kept.get(key), step
        plain(self, step if last is None or self.first else last)

    def init(self: KvCache, decoder: Decoder, *rest: object, **options: object) -> None:
        self.first = decoder.embed is not None
        make(self, decoder, *rest, **options)

    make = KvCache.__init__
    return patch.multiple(KvCache, begin=begin, __init__=init, first=True, create=True)


def hidden_states_of_the_batch_before() -> AbstractContextManager[object]:
    """A stage that is one batch late, as if its messages were taken in another order."""
    plain, kept = RankEnds.receive, dict[tuple[int, int], Tensor]()

    def receive(self: RankEnds, num_tokens: int) -> Tensor:
        came, key = plain(self, num_tokens), (id(self), num_tokens)
        last, kept[key] = kept.get(key), came
        return came if last is None else last

    return patch.object(RankEnds, "receive", receive)


def log_sum_exp_of_a_rank_forgotten() -> AbstractContextManager[object]:
    """What rank 1 has found counts as if its keys summed to 1."""
    plain = context_cache.merge_parts

    def merge(parts_CMHw: Tensor, sinks_H: Tensor | None) -> Tensor:
        parts_CMHw[1, ..., -1] = 0
        return plain(parts_CMHw, sinks_H)

    return patch.object(context_cache, "merge_parts", merge)


def block_of_the_wrong_owner() -> AbstractContextManager[object]:
    """Rank 1 takes the first block for its own as well."""

    def owns(self: ContextCache, block: int) -> bool:
        return block % self.size == self.coord or (block == 0 and self.coord == 1)

    return patch.object(ContextCache, "owns", owns)


def sinks_of_other_heads() -> AbstractContextManager[object]:
    plain = cache.with_sinks
    return patch.object(cache, "with_sinks", lambda o, lse, sinks: plain(o, lse, sinks.flip(0)))


def sinks_of_every_rank() -> AbstractContextManager[object]:
    """Each of two context ranks lets the sinks take a share."""
    plain, twice = context_cache.merge_parts, math.log(2)
    return patch.object(context_cache, "merge_parts", lambda parts, s: plain(parts, s + twice))


def chunks_off_by_one() -> AbstractContextManager[object]:
    plain = context_cache.hidden_pairs
    return patch.object(context_cache, "hidden_pairs", lambda q, k, i: plain(q + 1, k + 1, i))


FAMILY_FAULTS = (
    (sinks_of_other_heads, "tp=2", "gpt-oss"),
    (sinks_of_every_rank, "cp=2", "gpt-oss"),
    (chunks_off_by_one, "cp=2", "llama-4"),
)
CONTEXT_FAULTS = (log_sum_exp_of_a_rank_forgotten, block_of_the_wrong_owner)
FAULTS = (
    *(block_of_another_request, position_off_by_one, stale_prefix, cache_of_the_wrong_stage),
    hidden_states_of_the_batch_before,
)


def sick_rank(worker: Worker, plan: Plan, fault: Patch) -> Observed:
    with fault():
        return generate_rank(worker, plan, GeneratedSettings())


def healthy_plan(layout: str, like: str = "") -> Plan:
    changes = {"layers": "2", "max_seq": "160"} | ATTENTION.get(like, {})
    options = PlanOptions("tiny", layout=layout, set=changes)
    return forward_plan(resolve(options, small=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_in_a_layout(pool: Pool, fault: Patch) -> None:
    expect_caught(pool, healthy_plan(LAYOUT), fault)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("fault", CONTEXT_FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_over_context_ranks(pool: Pool, fault: Patch) -> None:
    expect_caught(pool, healthy_plan("cp=2"), fault)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("fault", "layout", "like"), FAMILY_FAULTS)
def test_a_planted_fault_in_attention_of_another_family(
    pool: Pool, fault: Patch, layout: str, like: str
) -> None:
    expect_caught(pool, healthy_plan(layout, like), fault)


def expect_caught(pool: Pool, plan: Plan, fault: Patch) -> None:
    ranks = pool.run_each([(sick_rank, (plan, fault))] * plan.layout.world)
    verdict: GeneratedVerdict
    (verdict,) = pool.run_each([(judge_rank, (plan, GeneratedSettings(), ranks))])
    assert not verdict.passed
    assert verdict.logit_err > 1e-6

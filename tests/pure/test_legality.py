"""Which layouts a model, a sequence and a batch allow, and what is offered instead."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout.layout import DEGREES, Layout
from fivefold.core.layout.rules import LayoutRequest, check, nearest, problems, smallest_seq
from fivefold.core.layout.splits import ContextKind, padded_vocab
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Moe, Shape
from fivefold.core.schedule import catalog
from tests.selection import within

TINY, TINY_MOE = models.load("tiny"), models.load("tiny-moe")
LLAMA_405B, DEEPSEEK_V3 = models.load("llama-3.1-405b"), models.load("deepseek-v3")


# ---- one rule at a time


@pytest.mark.parametrize(
    ("text", "shape", "seq", "gpus"),
    [
        ("tp=8 pp=16 dp=128", LLAMA_405B, 8192, 16_384),
        ("tp=8 cp=16 pp=16 dp=8", LLAMA_405B, 131_072, 16_384),
        ("pp=16 dp=128 ep=64", DEEPSEEK_V3, 4096, 2048),
        ("dp=4 tp=2 pp=2 cp=2 ep=2", TINY_MOE, 32, 32),
        ("dp=2 tp=2 pp=2 cp=2 ep=2", TINY_MOE, 32, 16),
        ("tp=2 ep=8 dp=4 etp=1", TINY_MOE, 32, 8),
        ("tp=16", LLAMA_405B, 8192, 16),  # 8 KV heads, each on two ranks
        ("pp=5", TINY, 32, 5),  # 8 layers in uneven stages
        ("dp=2x2", TINY, 33, 4),
    ],
)
def test_legal_layouts_pass(text: str, shape: Shape, seq: int, gpus: int) -> None:
    layout = Layout.parse(text)
    assert problems(layout, shape, seq=seq, gpus=gpus) == []
    check(layout, shape, seq=seq, gpus=gpus)


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("tp=16", replace(TINY, ffn=64), "tp=16 does not divide heads 8: use tp=8"),
        ("tp=4", replace(TINY, ffn=66), "tp=4 does not divide MLP width 66: use tp=3 or tp=6"),
        (
            "tp=4",
            replace(TINY, heads=12, kv_heads=6),
            "tp=4 neither divides the 6 KV heads nor is a multiple of them (they are replicated "
            "where fewer than tp): use tp=3",
        ),
        ("pp=9", TINY, "pp 9 · chunks 1 = 9 stages for 8 layers: every stage needs a layer"),
        ("dp=2 ep=2", TINY, "ep=2 etp=1 need experts and the model has none: set both to 1"),
        (
            "dp=2 tp=2 ep=8",
            TINY_MOE,
            "ep 8 · etp 1 = 8 must divide dp 2 · cp 1 · tp 2 = 4",
        ),
        ("dp=3 ep=3", TINY_MOE, "ep=3 does not divide experts 8: use ep=2 or ep=4"),
        ("dp=3 etp=3", TINY_MOE, "etp=3 does not divide expert width 64: use etp=2 or etp=4"),
        (
            "tp=8",
            replace(TINY_MOE, moe=Moe(experts=8, top_k=2, ffn=64, shared=1, shared_ffn=60)),
            "tp=8 does not divide shared experts' width 60: use tp=6 or tp=10",
        ),
    ],
)
def test_what_the_model_forbids(text: str, shape: Shape, reason: str) -> None:
    (only,) = problems(Layout.parse(text), shape, seq=720)
    assert only.startswith(reason)


def test_a_model_with_experts_in_every_layer_has_no_dense_mlp_to_split() -> None:
    moe = Moe(experts=8, top_k=2, ffn=64)
    assert problems(Layout(tp=4), replace(TINY, ffn=66, moe=moe), seq=32) == []


def test_latent_attention_has_no_rule_for_kv_heads() -> None:
    reasons = problems(Layout(tp=24), DEEPSEEK_V3, seq=4800)
    assert [reason.split(":")[0] for reason in reasons] == [
        "tp=24 does not divide heads 128",
        "tp=24 does not divide shared experts' width 2048",
    ]


def test_chunks_need_a_pipeline_and_a_layer_each() -> None:
    assert problems(Layout(pp=2, chunks=4), TINY, seq=32) == []
    (alone,) = problems(Layout(chunks=4), TINY, seq=32)
    assert alone == "chunks=4 needs a pipeline: raise pp above 1 or set chunks=1"
    (many,) = problems(Layout(pp=4, chunks=3), TINY, seq=32)
    assert many.startswith("pp 4 · chunks 3 = 12 stages for 8 layers")


def test_tp_inside_ep_requires_sequence_parallelism() -> None:
    (only,) = problems(Layout(tp=2, shard=2, ep=2, sp=False), TINY_MOE, seq=32)
    assert "turn sp on, or set etp=2" in only
    assert problems(Layout(tp=2, shard=2, ep=2, sp=True), TINY_MOE, seq=32) == []
    assert problems(Layout(tp=2, shard=2, ep=2, etp=2, sp=False), TINY_MOE, seq=32) == []
    # Nor are tokens of other ranks gathered.
    (only,) = problems(Layout(tp=2, shard=2, etp=4, sp=False), TINY_MOE, seq=32)
    assert "turn sp on, or set etp to a divisor of 2" in only
    assert problems(Layout(tp=2, shard=2, etp=4), TINY_MOE, seq=32) == []
    assert problems(Layout(tp=4, etp=2, sp=False), TINY_MOE, seq=32) == []
    assert problems(Layout(tp=2, shard=2, sp=False), TINY_MOE, seq=32) == []


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        (Layout(cp=4, context="ring"), 4),
        (Layout(cp=4, context="zigzag"), 8),
        (Layout(cp=4, context="allgather"), 8),
        (Layout(cp=4, context="ulysses"), 4),
        (Layout(cp=4, context="hybrid"), 8),
        (Layout(cp=4, tp=2, context="zigzag"), 8),
        (Layout(cp=4, tp=4, context="zigzag"), 16),
        (Layout(cp=4, tp=2, context="ring"), 8),
        (Layout(cp=4, tp=2, context="ring", sp=False), 4),
        (Layout(tp=4), 4),
        (Layout(tp=4, sp=False), 1),
        (Layout(context="zigzag"), 1),
    ],
)
def test_a_sequence_is_split_by_cp_and_then_by_tp(layout: Layout, unit: int) -> None:
    legal = [seq for seq in range(1, 65) if not problems(layout, TINY, seq=seq)]
    assert legal == list(range(unit, 65))  # what is longer is padded to a multiple
    assert smallest_seq(layout, TINY, 32) == 32
    assert smallest_seq(layout, TINY, 33) == -(-33 // unit) * unit


def test_a_refused_sequence_names_the_shortest_and_the_most_ranks() -> None:
    (only,) = problems(Layout(cp=4, tp=4), TINY, seq=15)
    assert only == (
        "seq=15 is split by cp=4 (zigzag) and then by tp=4 (sequence parallelism), which takes at "
        "least 16 tokens: use seq=16 or more, or cp=3"
    )


def test_only_learned_positions_bound_the_sequence() -> None:
    assert problems(Layout(), TINY, seq=4096) == []
    learned = replace(TINY, positions="learned")
    (only,) = problems(Layout(), learned, seq=4096)
    assert only.endswith("use seq=2048 or less")
    assert nearest(Layout(), learned, seq=4096) == []
    with pytest.raises(FivefoldError, match="lower cp or tp"):
        smallest_seq(Layout(cp=1000), learned, 2001)


def test_ulysses_needs_whole_heads_and_hybrid_never_refuses() -> None:
    assert problems(Layout(cp=4, tp=2, context="ulysses"), TINY, seq=32) == []
    (only,) = problems(Layout(cp=8, tp=2, context="ulysses"), TINY, seq=32)
    assert "cp=8 does not divide the 4 heads of a tp rank: use cp=4 or context=hybrid" in only
    assert problems(Layout(cp=8, tp=2, context="hybrid"), TINY, seq=32) == []


def test_the_batch_is_shared_by_the_data_ranks() -> None:
    layout = Layout.parse("dp=2x2")
    assert problems(layout, TINY, seq=32, batch=8, microbatch_size=2) == []
    (only,) = problems(layout, TINY, seq=32, batch=10, microbatch_size=2)
    assert only.endswith("not a multiple of microbatch 2 · dp 4 = 8: use 8 or 16")


@given(st.integers(1, 200_000), st.integers(1, 64))
def test_any_vocabulary_is_padded_to_the_next_multiple(vocab: int, tp: int) -> None:
    padded = padded_vocab(vocab, tp)
    assert padded % tp == 0
    assert vocab <= padded < vocab + tp


def test_gpt2_vocabulary_on_eight_ranks() -> None:
    assert padded_vocab(50_257, 8) == 50_264


# ---- every reason at once, and what is offered instead


def test_every_reason_and_the_three_nearest_come_together() -> None:
    layout, shape = Layout.parse("dp=2 tp=3 pp=16"), replace(TINY, positions="learned", max_seq=32)
    with pytest.raises(IllegalLayout) as refusal:
        check(layout, shape, seq=32, batch=7, gpus=64)
    assert len(refusal.value.reasons) == 7
    for word in ("64 GPUs", "heads 8", "KV heads", "MLP width", "8 layers", "seq=32", "batch 7"):
        assert sum(word in reason for reason in refusal.value.reasons) == 1
    # batch 7 forces dp=1 on 64 ranks; tp·cp·pp = 64 with tp near 3 and pp at most 8
    assert refusal.value.nearest[0] == "tp=4 pp=8 cp=2"
    assert len(refusal.value.nearest) == 3


def test_too_many_heads_for_tp_moves_ranks_to_data() -> None:
    near = nearest(Layout.parse("tp=16 dp=2"), TINY, seq=32)
    assert [str(one) for one in near] == ["dp=4 tp=8", "dp=2 tp=8 cp=2", "dp=2 tp=8 pp=2"]


def test_a_neighbour_keeps_everything_but_its_degrees() -> None:
    layout = Layout.parse("dp=2x4 tp=16 order=tp-cp-pp-dp", zero=2, sp=False, context="ring")
    near = nearest(layout, TINY, seq=32)
    assert str(near[0]) == "dp=2x8 tp=8 order=tp-cp-pp-dp"
    for one in near:
        assert replace(one, **{name: getattr(layout, name) for name in DEGREES}) == layout


def test_a_world_without_a_legal_layout_offers_its_neighbours() -> None:
    # One sequence, 8 layers, 8 heads, at most 16 for cp: 17 ranks fit nothing. 16 and 20 do, and
    # 18 only with a cp that does not divide the sequence, which is not offered instead of dp.
    with pytest.raises(IllegalLayout) as refusal:
        check(Layout.parse("dp=17"), TINY, seq=32, batch=1)
    assert [one.split("(")[1] for one in refusal.value.nearest] == [
        "16 ranks)",
        "20 ranks)",
        "16 ranks)",
    ]


def test_a_job_that_no_layout_can_serve_offers_nothing() -> None:
    with pytest.raises(IllegalLayout) as refusal:
        check(Layout(), TINY, seq=0, batch=-1, microbatch_size=0, gpus=1 << 21)
    assert [reason.split("=")[0] for reason in refusal.value.reasons[:4]] == [
        "seq",
        "batch",
        "gpus",
        "microbatch_size",
    ]
    assert refusal.value.nearest == []
    assert nearest(Layout(), TINY, seq=32, batch=7, microbatch_size=2) == []
    assert nearest(Layout(chunks=5), TINY, seq=32) == []


def every_layout(world: int) -> Iterator[Layout]:
    """All layouts of one world whose experts fold, by trying every number."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for tp in divisors:
        for pp in divisors:
            for cp in divisors:
                for replicate in divisors:
                    shard, rest = divmod(world, tp * pp * cp * replicate)
                    if rest or not shard:
                        continue
                    size = world // pp
                    for ep in (d for d in divisors if size % d == 0):
                        for etp in (d for d in divisors if size % (ep * d) == 0):
                            yield Layout(replicate, shard, tp, pp, cp, ep, etp)


def distance(one: Layout, other: Layout) -> float:
    ratios = [getattr(one, name) / getattr(other, name) for name in DEGREES]
    return sum(abs(math.log2(ratio)) for ratio in ratios)


DEGREE = st.sampled_from([1, 1, 1, 2, 2, 3, 4])


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(dict.fromkeys(DEGREES, DEGREE)),
    st.sampled_from([6, 8, 12, 18]),
    st.sampled_from([TINY, TINY_MOE, replace(TINY_MOE, heads=6, kv_heads=2, ffn=36)]),
    st.sampled_from([None, 6, 8]),
    st.sampled_from(get_args(ContextKind)),
    st.booleans(),
)
def test_nearest_agrees_with_trying_everything(
    degrees: dict[str, int], gpus: int, shape: Shape, batch: int | None, context: str, sp: bool
) -> None:
    layout = Layout(**degrees, context=context, sp=sp)
    best: dict[tuple[int, ...], float] = {}  # by everything but the split of dp
    for one in every_layout(gpus):
        candidate = replace(one, context=context, sp=sp)
        if not problems(candidate, shape, seq=48, batch=batch, gpus=gpus):
            key = (one.dp, one.tp, one.pp, one.cp, one.ep, one.etp)
            best[key] = min(best.get(key, math.inf), distance(layout, one))
    found = nearest(layout, shape, seq=48, batch=batch, gpus=gpus)
    if not best:
        assert gpus not in {one.world for one in found}
        return
    assert [distance(layout, one) for one in found] == pytest.approx(sorted(best.values())[:3])
    for one in found:
        assert problems(one, shape, seq=48, batch=batch, gpus=gpus) == []


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_neighbouring_worlds_are_the_nearest_that_work(chunks: int) -> None:
    """Other worlds are looked for among the context degrees that divide the sequence."""
    shape = replace(TINY, layers=6)
    legal = {
        world: [
            one.cp
            for one in every_layout(world)
            if one.ep == one.etp == 1
            and not problems(replace(one, chunks=chunks), shape, seq=24, batch=3)
        ]
        for world in range(1, 65)
    }
    works = {world for world, cps in legal.items() if any(24 % cp == 0 for cp in cps)}
    empty = [world for world in range(2, 49) if not legal[world]]
    assert empty
    for world in empty:
        near = nearest(Layout(shard=world, chunks=chunks), shape, seq=24, batch=3)
        below = max((one for one in works if one < world), default=None)
        above = min(one for one in works if one > world)
        assert {one.world for one in near} <= {below, above}
        assert near[0].world == (below or above)


@settings(max_examples=40)
@given(
    st.sampled_from(["1f1b", "interleaved", "dualpipe", "zb-v", "dualpipe-v"]),
    st.sampled_from([6, 8, 12, 18]),
    st.tuples(DEGREE, DEGREE, DEGREE),
    st.sampled_from([None, 6, 8, 24]),
    st.sampled_from([None, 4, 6]),
)
def test_neighbours_obey_the_schedule(
    name: str, gpus: int, degrees: tuple[int, int, int], batch: int | None, count: int | None
) -> None:
    family = catalog.family(name)
    shard, tp, pp = degrees

    def placed(one: Layout) -> Layout:
        return replace(one, chunks=family.chunks_on(one.pp, None))

    layout = placed(Layout(shard=shard, tp=tp, pp=pp))
    job = LayoutRequest(seq=48, batch=batch, microbatches=count, gpus=gpus, schedule=family)
    legal = [
        distance(layout, one)
        for one in map(placed, every_layout(gpus))
        if one.replicate == one.ep == one.etp == 1 and not problems(one, TINY, **job)
    ]
    found = nearest(layout, TINY, **job)
    for one in found:
        assert problems(one, TINY, **{**job, "gpus": one.world}) == []
    inside = [distance(layout, one) for one in found if one.world == gpus]
    assert inside == pytest.approx(sorted(legal)[:3])


@pytest.mark.parametrize("batch", [None, 735_134_400])
def test_a_model_of_ten_thousand_layers_is_refused_in_time(batch: int | None) -> None:
    shape, family = replace(TINY, layers=10_000), catalog.family("dualpipe")
    with within(3, time.process_time):
        assert nearest(Layout(tp=3), shape, seq=2048, batch=batch, gpus=13_117, schedule=family)


@pytest.mark.parametrize("name", ["interleaved", "dualpipe"])
@pytest.mark.parametrize("batch", [None, 720_720])
def test_refusal_under_a_schedule_is_quick(name: str, batch: int | None) -> None:
    family = catalog.family(name)
    layout = replace(Layout.parse("tp=3 pp=16 dp=341"), chunks=family.min_chunks)
    with within(1.5, time.process_time):
        assert nearest(layout, LLAMA_405B, seq=8192, batch=batch, gpus=16_381, schedule=family)


@pytest.mark.parametrize(
    ("text", "shape", "batch"),
    [
        ("tp=3 pp=16 dp=341", LLAMA_405B, None),
        ("tp=16 pp=256 dp=4", LLAMA_405B, 100),
        ("tp=8 pp=16 dp=128 ep=1000 etp=3", DEEPSEEK_V3, None),
        ("dp=16384 ep=7", DEEPSEEK_V3, 1),
    ],
)
def test_refusal_is_quick_at_16384_ranks(text: str, shape: Shape, batch: int | None) -> None:
    layout = Layout.parse(text)
    with within(1.5, time.process_time):
        near = nearest(layout, shape, seq=8192, batch=batch, gpus=16_384)
    assert len(near) == 3
    assert all(not problems(one, shape, seq=8192, batch=batch, gpus=16_384) for one in near)

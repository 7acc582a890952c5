"""Traffic of the context dimension, by hand for each kind and as laws over all of them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.layout.splits import ContextKind
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic.collectives import TrafficEntry, predict_traffic, traffic_json

KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
LAYERS, SEQ = 32, 8192  # of llama-3.1-8b: 32 heads and 8 KV heads of 128 numbers
Q = SEQ * 32 * 128 * 2  # bytes of the queries of a row in bf16; outputs are as large
KV = 2 * SEQ * 8 * 128 * 2  # bytes of its keys and values together


def plan_of(layout: str, context: str, model: str = "llama-3.1-8b", **options: object) -> Plan:
    said = {"seq": SEQ, "microbatches": 1, **options}
    return resolve(PlanOptions(model, layout=layout, context=context, **said))  # pyright: ignore


def traffic(plan: Plan, rank: int = 0, *axes: str) -> list[TrafficEntry]:
    """The entries of some axes, those of attention if none is named, in bf16."""
    found = predict_traffic(plan, rank, itemsize=2)
    return [each for each in found if each.axis in (axes or ("ring", "ulysses"))]


def bytes_of(entries: list[TrafficEntry]) -> int:
    return sum(each.count * each.bytes for each in entries)


@pytest.mark.parametrize("context", ["ring", "zigzag", "hybrid"])
def test_a_ring_of_two(context: str) -> None:
    """One hop forward and one backward; gradients, in float32, two hops: there and home."""
    assert traffic(plan_of("cp=2", context)) == [
        TrafficEntry("ring", "recv", 2 * LAYERS, KV // 2, 2),
        TrafficEntry("ring", "recv", 2 * LAYERS, 2 * KV // 2, 2),
        TrafficEntry("ring", "send", 2 * LAYERS, KV // 2, 2),
        TrafficEntry("ring", "send", 2 * LAYERS, 2 * KV // 2, 2),
    ]


def test_all_gather_on_two() -> None:
    assert traffic(plan_of("cp=2", "allgather")) == [
        TrafficEntry("ring", "all_gather", 2 * LAYERS, KV // 2, 2),
        TrafficEntry("ring", "reduce_scatter", LAYERS, 2 * KV, 2),  # in float32
    ]


def test_ulysses_on_two() -> None:
    """Keys and values, queries and outputs; backward the same."""
    assert traffic(plan_of("cp=2", "ulysses")) == [
        TrafficEntry("ulysses", "all_to_all", 4 * LAYERS, KV // 2 // 2, 2),
        TrafficEntry("ulysses", "all_to_all", 4 * LAYERS, Q // 2, 2),
    ]


@pytest.mark.parametrize(
    ("context", "forward", "home"), [("ring", 3, 4), ("zigzag", 3, 4), ("hybrid", 1, 2)]
)
def test_rings_on_four(context: str, forward: int, home: int) -> None:
    """Hybrid: two places of two ranks, each with half of the heads of twice the tokens."""
    plan = plan_of("cp=4", context)
    group, block = forward + 1, KV // 4
    sent = [
        TrafficEntry("ring", "send", 2 * forward * LAYERS, block, group),
        TrafficEntry("ring", "send", home * LAYERS, 2 * block, group),
    ]
    assert [each for each in traffic(plan, 0, "ring") if each.kind == "send"] == sent
    inside = [
        TrafficEntry("ulysses", "all_to_all", 4 * LAYERS, KV // 4 // 2, 2),
        TrafficEntry("ulysses", "all_to_all", 4 * LAYERS, Q // 4, 2),
    ]
    assert traffic(plan, 0, "ulysses") == (inside if context == "hybrid" else [])


def test_in_float64_gradients_are_not_wider() -> None:
    found = predict_traffic(plan_of("cp=2", "zigzag"), 0, itemsize=8)
    sent = [each for each in found if (each.axis, each.kind) == ("ring", "send")]
    assert sent == [TrafficEntry("ring", "send", 4 * LAYERS, 4 * KV // 2, 2)]


@pytest.mark.parametrize(
    ("recompute", "forwards"), [("none", 1), ("selective", 1), ("full", 2), ("full:5", 2)]
)
@pytest.mark.parametrize("context", KINDS)
def test_only_full_recomputation_repeats_the_forward(
    context: str, recompute: str, forwards: int
) -> None:
    """Of the transfers of keys and values the share of the forward, never the way home."""
    none = bytes_of(traffic(plan_of("cp=4", context)))
    again = bytes_of(traffic(plan_of("cp=4", context, recompute=recompute)))
    block, hops = KV // 4, 3
    extra = {
        "ring": 2 * hops * block,
        "zigzag": 2 * hops * block,
        "allgather": block,
        "ulysses": 2 * Q // 4 + KV // 4,
        "hybrid": 2 * block + 2 * Q // 4 + KV // 4,
    }
    assert again - none == (forwards - 1) * LAYERS * extra[context]


def test_messages_do_not_grow_with_the_heads_of_queries_in_a_ring() -> None:
    one = {"kv_heads": "1"}
    for context in ("ring", "zigzag", "allgather"):
        shared = bytes_of(traffic(plan_of("cp=4", context, set=one)))
        assert shared * 8 == bytes_of(traffic(plan_of("cp=4", context)))


@pytest.mark.parametrize(("kv_heads", "sent"), [(32, 32), (8, 8), (4, 8), (2, 8), (1, 8)])
def test_ulysses_repeats_heads_of_keys_until_every_rank_has_one(kv_heads: int, sent: int) -> None:
    plan = plan_of("cp=8", "ulysses", set={"kv_heads": str(kv_heads)})
    keys = SEQ // 8 * sent * 128 * 2
    expected = {keys: 4 * LAYERS, Q // 8: 4 * LAYERS}
    if keys == Q // 8:
        expected = {keys: 8 * LAYERS}
    assert {each.bytes: each.count for each in traffic(plan)} == expected


@pytest.mark.parametrize("context", KINDS)
def test_tensor_ranks_share_the_heads_and_the_tokens_between_the_layers(context: str) -> None:
    alone, both = plan_of("cp=4", context), plan_of("tp=2 cp=4", context)
    mine = [(each.count, each.bytes) for each in traffic(alone)]
    assert [(each.count, each.bytes * 2) for each in traffic(both)] == mine
    activations = SEQ // 4 * 4096 * 2
    whole = [each for each in traffic(both, 0, "tp") if each.kind == "reduce_scatter"]
    assert whole == [TrafficEntry("tp", "reduce_scatter", 4 * LAYERS + 2, activations, 2)]


def test_context_ranks_are_data_ranks_to_the_weights() -> None:
    """Gradients are summed over dp · cp, and slices lie on all of them."""
    both = plan_of("dp=2 cp=4", "zigzag", zero=3)
    data = plan_of("dp=8", "zigzag", zero=3)
    assert traffic(both, 0, "fsdp", "dp-cp", "world") == traffic(data, 0, "fsdp", "dp-cp", "world")


def test_each_stage_moves_what_its_layers_need() -> None:
    layers = (9, 9, 8, 6)
    plan = plan_of("pp=4 cp=2", "allgather", stage_layers="9,9,8,6", microbatches=8)
    for stage, count in enumerate(layers):
        rank = plan.layout.rank(pp=stage)
        assert traffic(plan, rank) == [
            TrafficEntry("ring", "all_gather", 8 * 2 * count, KV // 2, 2),
            TrafficEntry("ring", "reduce_scatter", 8 * count, 2 * KV, 2),
        ]
        messages = traffic(plan, rank, "pp")
        assert {each.bytes for each in messages} == {SEQ // 2 * 4096 * 2}


@pytest.mark.parametrize("context", KINDS)
def test_padding_travels_too(context: str) -> None:
    """37 tokens on two ranks are 38 for ring and Ulysses, 40 for what is dealt in zigzag."""
    short = traffic(plan_of("cp=2", context, "tiny", seq=37))
    length = 38 if context in ("ring", "ulysses") else 40
    assert short == traffic(plan_of("cp=2", context, "tiny", seq=length))


def sent(entry: TrafficEntry) -> Fraction:
    """Bytes that leave a rank; its own share of a collective stays."""
    others = Fraction(entry.group - 1, entry.group)
    shares = {
        "send": Fraction(1),
        "recv": Fraction(0),
        "all_gather": Fraction(entry.group - 1),
        "reduce_scatter": others,
        "all_to_all": others,
    }
    return entry.count * entry.bytes * shares[entry.kind]


def formula(kind: str, n: int, a: int) -> Fraction:
    """Of docs/context.md, forward and backward; `a` ranks share a place of the ring."""
    o, wide = n // a, 2 * KV
    exchanged = Fraction((2 * Q + KV) * (a - 1), a * n)
    passed = Fraction(KV * (o - 1), n)
    gradients = {"allgather": Fraction(wide * (o - 1), n), "ulysses": Fraction(0)}
    return 2 * exchanged + 2 * passed + gradients.get(kind, Fraction(wide * o, n))


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formulas_of_the_docs(kind: str, cp: int) -> None:
    plan = plan_of(f"cp={cp}", kind)
    inner = {"ulysses": cp, "hybrid": {2: 1, 4: 2, 8: 2}[cp]}.get(kind, 1)
    assert sum(map(sent, traffic(plan))) == LAYERS * formula(kind, cp, inner)


def test_the_table_of_the_docs() -> None:
    """MB that a rank sends in a layer, by kind and degree."""
    page = Path(__file__).parents[2] / "docs" / "context.md"
    table = page.read_text("utf-8").partition("| kind | cp=2 | cp=4 | cp=8 |")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2 : 2 + len(KINDS)]]
    assert [kind.strip(" `") for kind, *_ in rows] == list(KINDS)
    for kind, *numbers in rows:
        for cp, number in zip((2, 4, 8), numbers, strict=True):
            plan = plan_of(f"cp={cp}", kind.strip(" `"), seq=131_072)
            mine = sum(map(sent, traffic(plan))) / LAYERS / 10**6
            assert number.strip() == f"{float(mine):,.1f}"


def test_the_list_is_in_the_plan() -> None:
    found = traffic_json(plan_of("cp=2", "zigzag", "tiny"))
    assert found is not None
    assert {each["axis"] for each in found} == {"dp-cp", "fsdp", "ring", "world"}


@settings(max_examples=60)
@given(
    context=st.sampled_from(KINDS),
    layout=st.sampled_from(["cp=2", "cp=4", "cp=8", "dp=2 cp=4", "tp=2 cp=4", "pp=2 cp=4"]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    seq=st.integers(32, 70),
    recompute=st.sampled_from(["none", "selective", "full:2"]),
)
def test_ranks_of_a_group_agree(
    context: ContextKind, layout: str, kv_heads: int, seq: int, recompute: str
) -> None:
    plan = plan_of(
        layout, context, "tiny", seq=seq, recompute=recompute, set={"kv_heads": str(kv_heads)}
    )
    for group in plan.layout.groups("cp"):
        mine = [traffic(plan, rank, "ring", "ulysses") for rank in group]
        assert mine[0] and all(each == mine[0] for each in mine)
        sides = {
            kind: sum(each.count for each in mine[0] if each.kind == kind)
            for kind in ("send", "recv")
        }
        assert sides["send"] == sides["recv"]

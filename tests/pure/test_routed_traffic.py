"""What experts and their balancing send, by hand, and the range in which it may lie."""

from __future__ import annotations

import pytest

from fivefold.core.model.recompute import Recompute
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic.collectives import TrafficEntry, least_traffic_share, predict_traffic
from fivefold.cost.traffic.layers import LayerJob

# tiny-moe: 7 layers with 8 experts, 2 for each token, of 64 numbers. A row of 32 tokens in bf16.
LAYERS, EXPERTS, TOP_K, SEQ = 7, 8, 2, 32
ROW = 64 * 2  # bytes of a token
COUNT = 8  # bytes of a whole number
WEIGHT = 4  # bytes of the weight of a slot, in float32


def plan_of(layout: str, **options: object) -> Plan:
    said = {"model": "tiny-moe", "seq": SEQ, "microbatches": 1, **options}
    return resolve(PlanOptions(layout=layout, **said))  # pyright: ignore


def capacity_of(plan: Plan) -> int | None:
    return LayerJob.of(plan, Recompute(), itemsize=2).capacity


def traffic(plan: Plan, *axes: str) -> list[TrafficEntry]:
    found = predict_traffic(plan, 0, itemsize=2)
    return [each for each in found if each.axis in axes]


@pytest.mark.parametrize(
    ("recompute", "forwards"), [("none", 1), ("selective", 1), ("full", 2), ("full:3", 2)]
)
def test_counts_and_rows_of_all_slots(recompute: str, forwards: int) -> None:
    """Counts once, however often the forward runs; rows there and back, forward and backward; their
    weights one way."""
    assert traffic(plan_of("dp=4 ep=4", recompute=recompute), "ep") == [
        TrafficEntry("ep", "all_to_all", LAYERS, EXPERTS * COUNT, 4),
        TrafficEntry("ep", "all_to_all", (forwards + 1) * LAYERS, SEQ * TOP_K * WEIGHT, 4),
        TrafficEntry("ep", "all_to_all", 2 * (forwards + 1) * LAYERS, SEQ * TOP_K * ROW, 4),
    ]


def test_over_nodes_a_token_crosses_once() -> None:
    """32 tokens to at most two nodes each, with their choices and the weights of these. Before, how
    many go to each node, and how many slots they bring to each of its experts."""
    rows = 2 * SEQ
    far = [
        TrafficEntry("ep-far", "all_to_all", LAYERS, (2 + EXPERTS) * COUNT, 2),
        TrafficEntry("ep-far", "all_to_all", 2 * LAYERS, rows * TOP_K * WEIGHT, 2),
        TrafficEntry("ep-far", "all_to_all", LAYERS, rows * TOP_K * COUNT, 2),
        TrafficEntry("ep-far", "all_to_all", 4 * LAYERS, rows * ROW, 2),
    ]
    near = [
        TrafficEntry("ep-near", "all_to_all", LAYERS, EXPERTS // 2 * COUNT, 2),
        TrafficEntry("ep-near", "all_to_all", 2 * LAYERS, SEQ * TOP_K * WEIGHT, 2),
        TrafficEntry("ep-near", "all_to_all", 4 * LAYERS, SEQ * TOP_K * ROW, 2),
    ]
    plan = plan_of("dp=4 ep=4", ep_nodes=2)
    assert traffic(plan, "ep", "ep-far", "ep-near") == [*far, *near]
    # One rank to a node has nobody near.
    alone = traffic(plan_of("dp=2 ep=2", ep_nodes=2), "ep", "ep-far", "ep-near")
    assert alone == far


def test_rooms_are_even_and_nobody_counts() -> None:
    """⌈1.25·2·32/8⌉ = 10 slots of each expert, of which a rank with 16 tokens may have all."""
    plan = plan_of("tp=2 ep=2", balance="capacity-pad:1.25")
    assert capacity_of(plan) == 10
    assert traffic(plan, "ep") == [
        TrafficEntry("ep", "all_to_all", 2 * LAYERS, 10 * EXPERTS * WEIGHT, 2),
        TrafficEntry("ep", "all_to_all", 4 * LAYERS, 10 * EXPERTS * ROW, 2),
    ]
    # No more than its tokens, in each of two rows; gathered over etp from both.
    assert capacity_of(plan_of("tp=2 ep=2", balance="capacity-pad:4", microbatch_size=2)) == 2 * 16
    gathered = plan_of("tp=2 dp=2 ep=2 etp=2", balance="capacity-pad:1.25")
    assert capacity_of(gathered) == 2 * 10
    assert capacity_of(plan_of("tp=2 ep=2", balance="capacity:1.25")) is None


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_ranks_that_share_a_row_sum_its_load_and_gather_its_choices(
    recompute: str, forwards: int
) -> None:
    options = {"balance": "aux+aux-seq+capacity:1", "recompute": recompute, "microbatch_size": 3}
    times, tokens = forwards * LAYERS, 3 * SEQ // 4
    assert traffic(plan_of("tp=2 cp=2", **options), "row") == [
        TrafficEntry("row", "all_gather", times, tokens * TOP_K * 4, 4),  # scores, in float32
        TrafficEntry("row", "all_gather", times, tokens * TOP_K * COUNT, 4),
        TrafficEntry("row", "all_reduce", times, 3 * EXPERTS * COUNT, 4),
    ]
    # Without sequence parallelism tp ranks have the same tokens.
    without = traffic(plan_of("tp=2 cp=2", sp=False, **options), "row")
    assert {each.group for each in without} == {2}
    assert {each.bytes for each in without} == {
        2 * tokens * TOP_K * 4, 2 * tokens * TOP_K * COUNT, 3 * EXPERTS * COUNT,
    }  # fmt: skip


@pytest.mark.parametrize("rules", ["z", "aux-global", "bias", "none"])
def test_rules_that_need_no_row_are_silent_there(rules: str) -> None:
    plan = plan_of("tp=2 cp=2", balance=rules, set={"moe.bias": "true"})
    assert traffic(plan, "row") == []


@pytest.mark.parametrize("rules", ["aux", "capacity:1"])
@pytest.mark.parametrize("options", [{"layout": "dp=2"}, {"layout": "tp=2", "sp": False}], ids=str)
def test_whole_rows_need_no_others(rules: str, options: dict[str, object]) -> None:
    assert traffic(plan_of(balance=rules, **options), "row") == []  # pyright: ignore


@pytest.mark.parametrize(("rules", "losses"), [("none", 0), ("aux+z+capacity:1", 2)])
def test_the_records_of_experts_travel_with_the_loss(rules: str, losses: int) -> None:
    (found,) = traffic(plan_of("dp=2", balance=rules), "world")
    assert found.bytes == 40 + 8 * LAYERS * (EXPERTS + losses)
    ahead = plan_of("dp=2", model="deepseek-v3", seq=64)
    (found,) = traffic(ahead, "world")
    assert found.bytes == 40 + 8 * (61 - 3 + 1) * 256, "58 layers, and the one that looks ahead"


def test_the_least_that_may_be_sent() -> None:
    plain = plan_of("dp=4 ep=4")
    assert least_traffic_share(plain, "ep") == 1
    # All on the same two experts: ⌈0.5·2·32/8⌉ = 4 of 32 slots of each stay.
    dropped = plan_of("dp=4 ep=4", balance="capacity:0.5")
    assert least_traffic_share(dropped, "ep") == pytest.approx(4 / 32)
    assert least_traffic_share(plan_of("dp=4 ep=4", balance="capacity:9"), "ep") == 1
    assert least_traffic_share(plan_of("dp=4 ep=4", balance="capacity-pad:0.5"), "ep") == 1
    # Both choices of all tokens on one node: one row of two.
    over_nodes = plan_of("dp=4 ep=4", ep_nodes=2)
    assert least_traffic_share(over_nodes, "ep-near") == 1
    assert least_traffic_share(over_nodes, "ep-far") == pytest.approx(1 / 2)
    # DeepSeek-V3: at most 4 of 8 nodes, and at the least one.
    deepseek = plan_of("dp=64 ep=64", model="deepseek-v3", seq=64, ep_nodes=8)
    assert least_traffic_share(deepseek, "ep-far") == pytest.approx(1 / 4)
    rows = {each.bytes for each in traffic(deepseek, "ep-far")}
    assert 64 * 4 * 7168 * 2 in rows


def test_padding_is_not_sent_where_slots_are_dropped() -> None:
    """17 of 18 tokens: all of them may find room, and the last never does."""
    plan = plan_of("tp=2 cp=3 ep=3", balance="capacity:9", seq=17, set={"moe.experts": "9"})
    assert plan.padded_seq == 18
    assert least_traffic_share(plan, "ep") == pytest.approx(17 / 18)
    dropless = plan_of("tp=2 cp=3 ep=3", balance="aux", seq=17, set={"moe.experts": "9"})
    assert least_traffic_share(dropless, "ep") == 1

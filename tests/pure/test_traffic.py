"""Collectives and standing bytes of a step, against published volumes and hand computations."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.memory.static import StaticMemory, static_bytes
from fivefold.cost.traffic.collectives import (
    TrafficEntry,
    predict_traffic,
    traffic_entries,
    traffic_json,
)

LLAMA_8B = 8_030_261_248  # parameters, as its model card counts them
VOCABULARY = 128_256 * 4096  # its embedding; its head is as large


def plan_of(model: str, layout: str, **options: object) -> Plan:
    """Gradients are summed in bf16, as in the paper of ZeRO, unless something else is said."""
    said = {"grad_dtype": "bf16", **options}
    return resolve(PlanOptions(model, layout=layout, **said))  # pyright: ignore


def bf16_traffic(plan: Plan, rank: int = 0) -> tuple[TrafficEntry, ...]:
    return predict_traffic(plan, rank, itemsize=2)


def moved(found: tuple[TrafficEntry, ...]) -> int:
    """Bytes by the count of the ZeRO paper: Ψ for a gather or a reduce-scatter, 2Ψ for both."""
    whole = {"all_gather": lambda e: e.bytes * e.group, "reduce_scatter": lambda e: e.bytes}
    whole["all_reduce"] = lambda e: 2 * e.bytes
    return sum(e.count * whole[e.kind](e) for e in found if e.bytes > 40)


@pytest.mark.parametrize(
    ("zero", "microbatches", "volume"),
    [
        (0, 1, 2 * LLAMA_8B),
        (0, 4, 2 * LLAMA_8B),
        (1, 4, 2 * LLAMA_8B),
        (2, 1, 2 * LLAMA_8B),
        (2, 4, 5 * LLAMA_8B),
        # Backward gathers neither the head, which is still there, nor the embedding, nor the final
        # norm, which travels with the head.
        (3, 1, 3 * LLAMA_8B - 2 * VOCABULARY - 4096),
        (3, 4, 4 * (3 * LLAMA_8B - 2 * VOCABULARY - 4096)),
    ],
)
def test_volumes_of_the_zero_paper(zero: int, microbatches: int, volume: int) -> None:
    plan = plan_of("llama-3.1-8b", "dp=8", zero=zero, microbatches=microbatches)
    assert moved(bf16_traffic(plan)) == 2 * volume


def test_a_tensor_parallel_layer_by_hand() -> None:
    """Four gathers and scatters a layer (Korthikanti et al. 2022, fig. 5), two at the ends; and two
    gathers more a layer where products keep shards of their inputs."""
    said = {"microbatches": 3, "microbatch_size": 2, "seq": 1024}
    plan = plan_of("llama-3.1-8b", "tp=4", **said, tp_keep="gathered")
    assert {e.count for e in bf16_traffic(plan) if e.kind == "all_gather"} == {3 * (4 * 32 + 2)}
    plan = plan_of("llama-3.1-8b", "tp=4", **said)
    activations = 2 * 1024 * 4096 * 2
    assert bf16_traffic(plan) == (
        TrafficEntry("tp", "all_gather", 3 * (6 * 32 + 2), activations // 4, 4),
        TrafficEntry("tp", "all_reduce", 3, 2 * 1024 * 4, 4),
        TrafficEntry("tp", "all_reduce", 3, 2 * 2 * 1024 * 4, 4),
        TrafficEntry("tp", "all_reduce", 1, (2 * 32 + 1) * 4096 * 4, 4),  # the norms, in float32
        TrafficEntry("tp", "reduce_scatter", 3 * (4 * 32 + 2), activations, 4),
        TrafficEntry("world", "all_reduce", 1, 40, 4),
    )


@pytest.mark.parametrize(
    ("recompute", "gathers", "sums"),
    [
        ("none", 6 * 32 + 2, 4 * 32 + 2),
        ("selective", 6 * 32 + 2, 4 * 32 + 2),
        ("attention", 6 * 32 + 2, 4 * 32 + 2),
        ("full", 6 * 32 + 2, 6 * 32 + 2 - 32),
        ("full:8", 6 * 32 + 2, 6 * 32 + 2 - 4),
        ("full:5", 6 * 32 + 2, 6 * 32 + 2 - 7),
    ],
)
def test_full_recomputation_repeats_all_but_the_last_sum_of_a_segment(
    recompute: str, gathers: int, sums: int
) -> None:
    plan = plan_of("llama-3.1-8b", "tp=2", microbatches=1, recompute=recompute)
    counts = {each.kind: each.count for each in bf16_traffic(plan) if each.kind != "all_reduce"}
    assert counts == {"all_gather": gathers, "reduce_scatter": sums}


def test_shared_kv_heads_are_summed_by_the_ranks_that_share_them() -> None:
    plan = plan_of("tiny", "tp=8", sp=False, microbatches=1)
    of_replicas = [each for each in bf16_traffic(plan) if each.axis == "replica"]
    # 4 KV heads of 8 numbers over 8 ranks: two ranks share one; keys and values, 8 layers.
    assert of_replicas == [TrafficEntry("replica", "all_reduce", 1, 8 * 2 * (8 * 64) * 4, 2)]


def test_partial_gradients_follow_the_slice_a_rank_owns() -> None:
    plan = plan_of("llama-3.1-8b", "dp=8 tp=2", zero=3, microbatches=1)
    sizes = [
        sum(e.bytes for e in bf16_traffic(plan, 2 * place) if e.axis == "tp" and e.count == 1)
        for place in range(8)
    ]
    loss = 3 * plan.batch.seq * 4
    # A block has 109.1 M weights on a tp rank, 13.6 M a slice. Its first norm begins the first
    # slice, as the final norm does in the head's unit; its second follows 21.0 M of attention.
    norms = [33, 32, 0, 0, 0, 0, 0, 0]
    assert sizes == [loss + number * 4096 * 4 for number in norms]


def test_one_rank_is_silent() -> None:
    assert bf16_traffic(plan_of("tiny", "dp=1")) == ()


def test_what_is_recorded_is_listed_alike() -> None:
    predicted = bf16_traffic(plan_of("tiny", "dp=2 tp=2"))
    recorded = {(e.axis, e.kind, e.bytes, e.group): e.count for e in reversed(predicted)}
    assert traffic_entries(recorded.items()) == predicted


def test_the_list_is_json_where_there_is_one() -> None:
    plan = plan_of("tiny", "dp=2 tp=2")
    listed = [asdict(each) for each in bf16_traffic(plan)]
    assert json.loads(json.dumps(traffic_json(plan))) == listed
    assert traffic_json(plan_of("bloom-176b", "dp=2"))  # which can only be planned
    assert traffic_json(plan_of("tiny", "pp=2", schedule="pipedream")) is None
    with pytest.raises(FivefoldError, match="is asynchronous"):
        bf16_traffic(plan_of("tiny", "pp=2", schedule="pipedream-2bw"))


def static(plan: Plan, rank: int = 0, *, offload: bool = False) -> StaticMemory:
    return static_bytes(plan, rank, itemsize=2, optimizer="adamw", offload=offload)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "moments"),
    [(0, 2, 2, 4), (1, 2, 2 / 8, 4 / 8), (2, 2, 2 / 8, 4 / 8), (3, 2 / 8, 2 / 8, 4 / 8)],
)
def test_memory_of_the_zero_paper(
    zero: int, weights: float, gradients: float, moments: float
) -> None:
    """Eight ranks, bf16 throughout, after the gradients were summed: no sum is held whole."""
    plan = plan_of("llama-3.1-8b", "dp=8", zero=zero)
    ranks = [static(plan, rank) for rank in range(8)]
    assert sum(each.weights for each in ranks) == 8 * weights * LLAMA_8B
    assert sum(each.gradients for each in ranks) == 8 * gradients * LLAMA_8B
    assert sum(each.optimizer for each in ranks) == 8 * moments * LLAMA_8B
    assert all(each.padding == each.host == 0 for each in ranks)


def test_offload_takes_states_and_sliced_weights_from_the_device() -> None:
    scalars = 4 * (32 * 9 + 3)
    alone = static(plan_of("llama-3.1-8b", "dp=1"), offload=True)
    assert (alone.device, alone.host) == ((2 + 2) * LLAMA_8B, 4 * LLAMA_8B + scalars)
    plan = plan_of("llama-3.1-8b", "dp=8", zero=3)
    ranks = [static(plan, rank, offload=True) for rank in range(8)]
    assert sum(each.device for each in ranks) == 2 * LLAMA_8B
    wide = plan_of("llama-3.1-8b", "dp=8", zero=3, grad_dtype="fp32")
    ranks = [static(wide, rank, offload=True) for rank in range(8)]
    assert sum(each.device for each in ranks) == 4 * LLAMA_8B
    scalars = sum(static(plan, rank).scalars for rank in range(8))
    assert sum(each.host for each in ranks) == (2 + 4) * LLAMA_8B + scalars


@settings(max_examples=40)
@given(
    replicate=st.integers(1, 3),
    shard=st.integers(1, 5),
    zero=st.integers(0, 3),
    tied=st.booleans(),
    size=st.one_of(st.none(), st.floats(1e-6, 0.3)),
)
def test_every_weight_is_owned_once_in_each_replica(
    replicate: int, shard: int, zero: int, tied: bool, size: float | None
) -> None:
    layout = f"dp={replicate}x{shard}"
    changes = {"tied": str(tied).lower(), "vocab": "251"}
    plan = plan_of("tiny", layout, zero=zero, unit_size=size, set=changes)
    alone = static(plan_of("tiny", "dp=1", set=plan.options.set))
    ranks = [
        static_bytes(plan, rank, itemsize=2, optimizer="adamw") for rank in range(plan.layout.world)
    ]
    owners = replicate if zero else replicate * shard
    assert sum(each.optimizer for each in ranks) == owners * alone.optimizer
    assert all(each.padding >= 0 and each.device <= alone.device + each.padding for each in ranks)

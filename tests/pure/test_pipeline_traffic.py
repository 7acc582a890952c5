"""Traffic and bytes of pipelines, by hand and as laws over the ranks of a job."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import boundary_bytes, gathered_bytes, in_flight

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import peak_activations
from fivefold.cost.memory.static import static_bytes
from fivefold.cost.traffic.collectives import TrafficEntry, chunks_of, predict_traffic

LAYER = 218_112_000  # parameters of a layer of llama-3.1-8b, its two norms included
VOCABULARY = 128_256 * 4096  # its embedding; its head is as large
SYNCHRONOUS = [family.name for family in catalog.FAMILIES if not family.asynchronous]
A = 1024 * 4096 * 2  # bytes of its activations: one sequence of 1,024 tokens in bf16


def plan_of(layout: str, model: str = "llama-3.1-8b", **options: object) -> Plan:
    said = {"seq": 1024, "grad_dtype": "bf16", **options}
    return resolve(PlanOptions(model, layout=layout, **said))  # pyright: ignore


def tiny(layout: str, **options: object) -> Plan:
    return resolve(PlanOptions("tiny", layout=layout, **options), small=True)  # pyright: ignore


def traffic(plan: Plan, rank: int, *axes: str) -> list[TrafficEntry]:
    """The entries of some axes (all of them if none is named), in bf16."""
    found = predict_traffic(plan, rank, itemsize=2)
    return [each for each in found if not axes or each.axis in axes]


def counts(plan: Plan, rank: int, axis: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in traffic(plan, rank, axis):
        found[each.kind] += each.count
    return dict(found)


def test_one_forward_one_backward_on_four_ranks() -> None:
    plan = plan_of("pp=4", microbatches=8)
    assert [counts(plan, rank, "pp") for rank in range(4)] == [
        {"send": 8, "recv": 8},
        {"send": 16, "recv": 16},
        {"send": 16, "recv": 16},
        {"send": 8, "recv": 8},
    ]
    assert traffic(plan, 0) == [
        TrafficEntry("pp", "recv", 8, A, 2),
        TrafficEntry("pp", "send", 8, A, 2),
        TrafficEntry("world", "all_reduce", 1, 40, 4),
    ]


@pytest.mark.parametrize(("sp", "size"), [(True, A // 4), (False, A)])
def test_messages_are_what_a_tensor_rank_holds(sp: bool, size: int) -> None:
    plan = plan_of("tp=4 pp=2", microbatches=4, microbatch_size=3, sp=sp)
    for rank in range(8):
        assert traffic(plan, rank, "pp") == [
            TrafficEntry("pp", "recv", 4, 3 * size, 2),
            TrafficEntry("pp", "send", 4, 3 * size, 2),
        ]


def test_the_tensor_axis_of_each_stage() -> None:
    """Llama-3.1-8B, 32 layers: the head costs about 2.3 of them, and the embedding nothing."""
    plan = plan_of("tp=2 pp=4", microbatches=8, stage_layers="9,9,8,6")
    for place, layers in enumerate((9, 9, 8, 6)):
        end = place in (0, 3)  # the embedding here, the head there: one gather and one sum more
        loss = [
            TrafficEntry("tp", "all_reduce", 8, 1024 * 4, 2),
            TrafficEntry("tp", "all_reduce", 8, 2 * 1024 * 4, 2),
        ]
        norms = TrafficEntry("tp", "all_reduce", 1, (2 * layers + (place == 3)) * 4096 * 4, 2)
        assert traffic(plan, 2 * place, "tp") == sorted(
            [
                TrafficEntry("tp", "all_gather", 8 * (6 * layers + end), A // 2, 2),
                *(loss if place == 3 else []),
                norms,
                TrafficEntry("tp", "reduce_scatter", 8 * (4 * layers + end), A, 2),
            ],
            key=lambda e: (e.axis, e.kind, e.bytes),
        )


@pytest.mark.parametrize(("recompute", "segments"), [("full", (5, 3)), ("full:2", (3, 2))])
def test_segments_of_recomputation_end_with_their_stage(
    recompute: str, segments: tuple[int, int]
) -> None:
    plan = tiny("tp=2 pp=2", stage_layers="5,3", recompute=recompute, microbatches=4)
    for place, (layers, pieces) in enumerate(zip((5, 3), segments, strict=True)):
        found = counts(plan, 2 * place, "tp")
        assert found["all_gather"] == 4 * (6 * layers + 1)
        assert found["reduce_scatter"] == 4 * (6 * layers + 1 - pieces)


def test_two_directions_share_the_microbatches_and_all_weights() -> None:
    plan = plan_of("tp=2 pp=4", schedule="dualpipe", microbatches=8, stage_layers="9,9,8,6")
    assert [counts(plan, 2 * place, "pp")["send"] for place in range(4)] == [8, 16, 16, 8]
    for place in range(4):
        # Both copies of a stage see half of the microbatches: ranks 0 and 3 hold 9 and 6 layers.
        outer = place in (0, 3)
        layers, ends = (15, 2) if outer else (17, 0)
        assert counts(plan, 2 * place, "tp")["all_gather"] == 4 * (6 * layers + ends)
        chunks = chunks_of(plan, 2 * place, 2)
        assert [chunk.num_microbatches for chunk in chunks] == [4, 4]
        # Matrices are halved by tp, norms are not; the embedding and the head are in the outer.
        numel = layers * ((LAYER - 2 * 4096) // 2 + 2 * 4096) + outer * (VOCABULARY + 4096)
        assert traffic(plan, 2 * place, "twin") == [
            TrafficEntry("twin", "all_reduce", 1, 4 * numel, 2)
        ]


TIED = {"tied": "true"}


def test_a_tied_embedding_is_summed_by_the_ranks_of_both_ends() -> None:
    plan = plan_of("pp=4", set=TIED)
    found = [traffic(plan, rank, "twin") for rank in range(4)]
    call = [TrafficEntry("twin", "all_reduce", 1, 4 * VOCABULARY, 2)]
    assert found == [call, [], [], call]
    assert all(not traffic(plan_of("pp=4"), rank, "twin") for rank in range(4))
    loop = plan_of("pp=4", schedule="interleaved", set=TIED)
    assert [traffic(loop, rank, "twin") for rank in range(4)] == [call, [], [], call]
    vee = plan_of("pp=4", schedule="zb-v", set=TIED)
    assert all(not traffic(vee, rank, "twin") for rank in range(4))


def test_data_ranks_sum_the_slice_they_own_of_a_tied_embedding() -> None:
    # 13 rows of 64 on 3 ranks: slices of 280 elements, of which the last has 8 of padding.
    plan = tiny("dp=3 pp=2", set={**TIED, "vocab": "13"}, zero=1)
    for place in range(2):
        sizes = [traffic(plan, 3 * place + shard, "twin")[0].bytes for shard in range(3)]
        assert sizes == [4 * 280, 4 * 280, 4 * 272]


def test_a_rank_that_owns_none_of_a_shared_weight_has_no_call() -> None:
    # One row of 16 numbers, in slices of 8 (16 bytes in bf16): the third and fourth own nothing.
    small = {"vocab": "1", "width": "16", **TIED}
    plan = tiny("dp=4 pp=2", set=small, zero=1)
    sizes = [sum(e.bytes for e in traffic(plan, rank, "twin")) for rank in range(4)]
    assert sizes == [32, 32, 0, 0]


def moved(plan: Plan, rank: int) -> tuple[float, float]:
    """Bytes gathered and scattered over fsdp, in units of 2 bytes a weight."""
    found = traffic(plan, rank, "fsdp")
    gathered = sum(e.count * e.bytes * e.group for e in found if e.kind == "all_gather")
    scattered = sum(e.count * e.bytes for e in found if e.kind == "reduce_scatter")
    return gathered / 2, scattered / 2


@pytest.mark.parametrize(
    ("zero", "gather", "gathers", "scatters"),
    [(1, "step", 1, 1), (2, "step", 1, 6), (3, "step", 1, 6), (3, "microbatch", 12, 6)],
)
def test_volumes_of_zero_in_a_pipeline(zero: int, gather: str, gathers: int, scatters: int) -> None:
    plan = plan_of("dp=2 pp=4", zero=zero, gather=gather, microbatches=6, stage_layers="9,9,8,6")
    for place, layers in enumerate((9, 9, 8, 6)):
        both, head = layers * LAYER, VOCABULARY + 4096
        assert moved(plan, 2 * place) == (
            # The head does not wait for its backward here, and the embedding needs none.
            gathers * both
            + {0: max(1, gathers // 2) * VOCABULARY, 3: gathers * head}.get(place, 0),
            scatters * (both + {0: VOCABULARY, 3: head}.get(place, 0)),
        )


def test_each_direction_reduces_its_own_microbatches() -> None:
    plan = plan_of("dp=2 pp=2", schedule="dualpipe", zero=2, microbatches=6, stage_layers="16,16")
    whole = 32 * LAYER + 2 * VOCABULARY + 4096
    assert [moved(plan, rank) for rank in range(4)] == [(whole, 3 * whole)] * 4


jobs = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(SYNCHRONOUS),
        "pp": st.sampled_from([2, 4]),
        "dp": st.sampled_from(["dp=1", "dp=2", "dp=2x3"]),
        "tp": st.sampled_from([1, 2]),
        "zero": st.integers(0, 3),
        "gather": st.sampled_from(["step", "microbatch"]),
        "tied": st.sampled_from(["true", "false"]),
        "unit_size": st.none() | st.sampled_from([1e-6, 0.03]),
    }
)


@settings(max_examples=60)
@given(job=jobs)
def test_ranks_agree_on_what_they_do_together(job: dict[str, object]) -> None:
    plan = tiny(
        f"{job['dp']} tp={job['tp']} pp={job['pp']}",
        schedule=job["schedule"],
        zero=job["zero"],
        gather=job["gather"],
        unit_size=job["unit_size"],
        set={"tied": job["tied"], "vocab": "251"},
    )
    layout = plan.layout
    found = [predict_traffic(plan, rank, itemsize=2) for rank in range(layout.world)]
    for axis in ("tp", "fsdp", "replicate", "dp-cp"):
        for group in layout.groups(axis):
            mine = [[each for each in found[rank] if each.axis == axis] for rank in group]
            assert all(one == mine[0] for one in mine), axis
    for group in layout.groups("pp"):
        sides: Counter[str] = Counter()
        for each in (each for rank in group for each in found[rank] if each.axis == "pp"):
            sides[each.kind] += each.count
        assert sides["send"] == sides["recv"] > 0
        twin = [sum(e.bytes for e in found[rank] if e.axis == "twin") for rank in group]
        assert twin == twin[::-1]


def test_bytes_of_a_pipeline_are_those_of_one_device_and_its_copies() -> None:
    def weights(plan: Plan) -> list[int]:
        ranks = range(plan.layout.world)
        how = {"itemsize": 2, "optimizer": "adamw"}
        return [static_bytes(plan, rank, **how).weights for rank in ranks]  # pyright: ignore

    layers = "9,9,8,6"
    head = VOCABULARY + 4096
    plain = [9 * LAYER + VOCABULARY, 9 * LAYER, 8 * LAYER, 6 * LAYER + head]
    assert weights(plan_of("pp=4", stage_layers=layers)) == [2 * each for each in plain]
    # Tied: the last stage has the embedding in the place of a head, as large.
    assert weights(plan_of("pp=4", stage_layers=layers, set=TIED)) == [2 * each for each in plain]
    both = plan_of("pp=4", stage_layers=layers, schedule="dualpipe")
    outer, inner = plain[0] + plain[3], plain[1] + plain[2]
    assert weights(both) == [2 * outer, 2 * inner, 2 * inner, 2 * outer]
    vee = plan_of("pp=2", stage_layers=layers, schedule="zb-v")
    assert weights(vee) == [2 * outer, 2 * inner]
    with pytest.raises(FivefoldError, match="asynchronous"):
        weights(plan_of("pp=4", schedule="pipedream"))


def test_gathered_weights_stay_only_where_they_are_kept() -> None:
    kept = plan_of("dp=8 pp=4", zero=3, stage_layers="9,9,8,6")
    assert gathered_bytes(kept, 8, 2) == 2 * 9 * LAYER
    assert gathered_bytes(kept, 24, 2) == 2 * (6 * LAYER + VOCABULARY + 4096)
    # Each time: the unit in use and the one ahead, two layers here, or the embedding and a layer.
    passing = plan_of("dp=8 pp=4", zero=3, gather="microbatch")
    assert gathered_bytes(passing, 8, 2) == 2 * 2 * LAYER
    assert gathered_bytes(passing, 0, 2) == 2 * (VOCABULARY + LAYER)
    assert gathered_bytes(plan_of("dp=8 pp=4", zero=2), 0, 2) == 0  # they never leave
    assert gathered_bytes(plan_of("dp=8x1 pp=4", zero=3), 0, 2) == 0


@pytest.mark.parametrize(
    ("schedule", "live", "inputs"),
    [
        ("gpipe", [8, 8, 8, 8], [0, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1], [0, 3, 2, 1]),
        # Two directions: rank 0 has stages 0 and 3, and at most p + 1 microbatches in all.
        ("dualpipe", [5, 5, 5, 5], None),
        ("v-min", [4, 4, 4, 4], None),
    ],
)
def test_microbatches_in_flight(schedule: str, live: list[int], inputs: list[int] | None) -> None:
    plan = plan_of("pp=4", schedule=schedule, microbatches=8)
    assert [in_flight(plan, rank) for rank in range(4)] == live
    if inputs is not None:
        assert [boundary_bytes(plan, rank, 2) for rank in range(4)] == [A * each for each in inputs]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_microbatches_in_flight_are_the_peak_of_the_clock(name: str) -> None:
    plan = plan_of("tp=2 pp=4", schedule=name)
    unit = plan.schedule.num_ranks / plan.schedule.num_stages
    for place, peak in enumerate(peak_activations(plan.schedule)):
        live = in_flight(plan, 2 * place)
        assert live * unit == peak
        held = boundary_bytes(plan, 2 * place, 2)
        assert held % (A // 2) == 0 and held // (A // 2) <= live
        if 0 not in plan.schedule.placement.stages_of(place):
            assert held == live * A // 2

"""Memory of real stages: uneven ones, how far ranks run ahead, and states on disks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_layout import H100, grid_of, memory_of

from fivefold.core import hardware as machines
from fivefold.core.layout.groups import Topology, communicators
from fivefold.core.model import presets as models
from fivefold.core.model.shape import layer_parameters, parameters
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.catalog import alternate
from fivefold.core.schedule.clock import Costs, peak_activations, play
from fivefold.core.schedule.schedule import LoopOrder, Schedule, loop_placement
from fivefold.cost.grid import OFFLOADS, LayoutGrid
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.memory.categories import communicator_memory, least_memory, peak_memory
from fivefold.cost.memory.communicators import (
    CHANNEL,
    MADE,
    PEER,
    Channels,
    communicator_bytes,
    nccl_bytes,
)
from fivefold.cost.stages.ranks import in_flight, rank_stages
from fivefold.cost.step.time import step_time
from fivefold.planner import planning as planner
from fivefold.planner.estimate import (
    Estimate,
    PlanMemory,
    estimate_plan,
    fullest_memory,
    memory_by_pipeline_rank,
)
from fivefold.planner.planning import NothingFits, best_plans, estimate_on_machine, plan_request
from fivefold.planner.search import search_layouts
from fivefold.planner.setting import EstimateSetting, estimate_setting, plan_arguments
from fivefold.planner.space import SearchSpace, layout_blocks
from fivefold.render.plan import detail, estimate_json
from fivefold_score.outcome import score_row
from fivefold_score.scoring import compare_with_peers

LLAMA_405B = models.load("llama-3.1-405b")
OWN = EstimateSetting(H100, stacks.FIVEFOLD, "bf16")


def interleaved(ranks: int, microbatches: int, chunks: int, hop_forwards: int) -> Schedule:
    """Interleaved 1F1B that runs so many forwards ahead for each hop to the last rank."""

    def loops(rank: int) -> Any:
        ahead = (chunks - 1) * ranks + hop_forwards * (ranks - 1 - rank) + 1
        return alternate(rank, ranks, microbatches, chunks, ahead)

    order = LoopOrder(loops(rank) for rank in range(ranks))
    return Schedule("interleaved", loop_placement(ranks, chunks), microbatches, order)


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (4, 3), (8, 4), (16, 8)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.0, 0.1)])
def test_one_forward_ahead_a_hop_is_as_fast_and_keeps_less(
    ranks: int, chunks: int, times: tuple[float, float, float]
) -> None:
    m = 2 * ranks
    lean, usual = (interleaved(ranks, m, chunks, hops) for hops in (1, 2))
    costs = Costs.uniform(lean.placement, times)
    assert play(lean, costs).makespan == pytest.approx(play(usual, costs).makespan)
    grid = grid_of(pp=ranks, microbatches=m, chunks=chunks, schedule="interleaved")
    for hops, schedule in ((1, lean), (2, usual)):
        peaks = peak_activations(schedule)
        assert in_flight(grid, "first", hops).item() == pytest.approx(peaks[0])
        assert in_flight(grid, "inner", hops).item() == pytest.approx(max(peaks[1:-1]))
        assert in_flight(grid, "last", hops).item() == pytest.approx(peaks[-1])
    assert peak_activations(lean)[0] == ranks < peak_activations(usual)[0]


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (8, 4), (16, 8)])
def test_messages_show_where_one_forward_runs_ahead(ranks: int, chunks: int) -> None:
    """By no more than every message of a rank: what `transfers_hidden=False` adds to a step."""
    m, message = 2 * ranks, 0.01 / chunks
    lean, usual = (interleaved(ranks, m, chunks, hops) for hops in (1, 2))
    costs = Costs.uniform(lean.placement, transfer=message)
    extra = play(lean, costs).makespan - play(usual, costs).makespan
    assert 0 < extra <= 2 * m * chunks * message


def test_stages_that_a_plan_gives_are_those_of_its_ledger() -> None:
    """A layer more on an inner rank: its weights, its states, and what it keeps."""
    base = PlanOptions(model="llama-3.1-8b", layout="pp=4", seq=4096, microbatches=8)
    setting = EstimateSetting(H100, stacks.FIVEFOLD, "bf16")
    even, uneven = (
        estimate_plan(resolve(replace(base, stage_layers=given)), setting)
        for given in ("8,8,8,8", "6,12,8,6")
    )
    layer = layer_parameters(models.load("llama-3.1-8b"), 0).total
    ends = 128_256 * 4096
    assert even.memory["weights"] == 2 * (8 * layer + ends)  # the first rank, with the embedding
    assert uneven.memory["weights"] == 2 * 12 * layer
    kept = even.memory["activations"] / 32  # 4 microbatches of 8 layers
    assert uneven.memory["activations"] == pytest.approx(36 * kept, rel=0.02)  # 3 of 12
    assert uneven.total > even.total


def test_a_layer_is_spared_at_either_end() -> None:
    """Llama-3.1-405B: 126 layers on 16 ranks of 8, but 7 on the first and on the last."""
    for chunks in (2, 4, 8):
        grid = grid_of(pp=16, chunks=chunks, microbatches=32, schedule="interleaved")
        found = [*rank_stages(LLAMA_405B, "short-ends", grid, 8192)]
        assert [stage.layers.all.item() for stage in found] == [7, 8, 7]
        assert [stage.embedding.item() for stage in found] == [1, 0, 0]
        assert [stage.head.item() for stage in found] == [0, 0, 1]
    (whole, _) = rank_stages(LLAMA_405B, "short-ends", grid_of(), 8192)
    assert whole.layers.all.item() == 126


def meta(gpus: int, tflops: float) -> dict[str, Any]:
    """Llama-3.1-405B in rows of 8,192 as arXiv 2407.21783, table 4, prints it."""
    shape = LLAMA_405B
    return {
        "id": f"llama3-405b-{gpus}g-s8192",
        "model": "Llama 3.1 405B",
        "layers": shape.layers,
        "hidden": shape.width,
        "ffn_hidden": shape.ffn,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "vocab": shape.vocab,
        "seq_len": 8192,
        "gpu": "h100-sxm",
        "gpus": gpus,
        "dp": gpus // 128,
        "zero": 2,
        "tp": 8,
        "sp": True,
        "pp": 16,
        "schedule": "interleaved-1f1b",
        "micro_batch": None,
        "global_batch": 2048,
        "recompute": "none",
        "achieved": {"tflops_per_gpu": tflops},
    }


def test_llama_405b_fits_where_meta_ran_it() -> None:
    """With one layer a chunk, which the paper implies: a first chunk with the embedding alone."""
    small, large = score_row(meta(8192, 430.0)), score_row(meta(16_384, 400.0))
    assert small.measured_seconds == pytest.approx(12.02, rel=0.01)
    assert large.measured_seconds == pytest.approx(6.46, rel=0.01)
    assert small.time_error == large.time_error == 0.0
    assert small.fitting == ("rows=1 chunks=8 recompute=none ahead=1",)
    assert large.fitting == tuple(f"rows=1 chunks=8 recompute=none ahead={n}" for n in (2, 1))
    told = [each["detail"] for each in compare_with_peers([small, large])]
    assert "fits in 1 of 20 cases: rows=1 chunks=8 recompute=none ahead=1" in told[0]


# --- Disks

LLAMA_70B = models.load("llama-3.1-70b")


def states_on(offload: str, **degrees: int) -> LayoutGrid:
    return replace(grid_of(**degrees), offload=np.array([float(OFFLOADS.index(offload))]))


def test_states_lie_on_disks_and_two_layers_of_them_in_host_memory() -> None:
    number = parameters(LLAMA_70B).total / 8
    here, cpu, nvme = (
        memory_of(LLAMA_70B, states_on(name, shard=8, zero=3), seq=8192) for name in OFFLOADS
    )
    assert nvme.disk.item() == pytest.approx(12 * number)
    assert nvme.host.item() == pytest.approx((2 + 12 * 2 / 80) * number)
    assert cpu.host.item() == pytest.approx(14 * number)
    assert here.disk == cpu.disk == here.host == 0
    assert nvme.total == cpu.total < here.total


def test_disks_are_shared_by_a_node_and_hide_behind_the_update() -> None:
    """24 bytes of a parameter there and back, at 50 GB/s for 8 GPUs; one layer of 80 shows."""
    here, cpu, nvme = (
        step_time(LLAMA_70B, H100, stacks.FIVEFOLD, states_on(name, shard=8, zero=3), 8192, "bf16")
        for name in OFFLOADS
    )
    number = parameters(LLAMA_70B).total / 8
    disk = 24 * number / (50e9 / 8)
    assert nvme.parts["offload"].item() == pytest.approx(disk * (1 + 1 / 80), rel=1e-3)
    assert 0 < cpu.parts["offload"].item() < disk
    assert nvme.parts["optimizer"] == cpu.parts["optimizer"] == 0 < here.parts["optimizer"]
    fast = replace(H100, host=replace(H100.host, nvme_bandwidth=1e15))
    asked = (stacks.FIVEFOLD, states_on("nvme", shard=8, zero=3), 8192, "bf16")
    quick = step_time(LLAMA_70B, fast, *asked).parts["offload"].item()
    assert quick == pytest.approx(cpu.parts["offload"].item(), rel=1e-3)


@pytest.mark.parametrize(
    ("host", "disks", "offload"),
    [(2e12, 30e12, "cpu"), (0.4e12, 30e12, "nvme"), (0.4e12, 0.5e12, None), (0.4e12, None, None)],
)
def test_disks_are_asked_where_the_host_is_full(
    host: float, disks: float | None, offload: str | None
) -> None:
    node = replace(H100.host, memory=host, nvme_bytes=disks)
    machine = replace(H100, memory=70e9, host=node)
    question = SearchSpace(LLAMA_70B, 8, 4096, 8, (8,), {"schedule": "1f1b", "cp": 1})
    found = search_layouts(question, EstimateSetting(machine, stacks.FIVEFOLD, "bf16"), 1).best
    assert [OFFLOADS[int(one.grid.offload.item())] for one in found] == (
        [offload] if offload else []
    )


@pytest.mark.parametrize(
    ("model", "gpus", "offload"),
    [
        ("llama-3.1-8b", 16, "none"),
        ("llama-3.1-8b", 16, "cpu"),
        ("mixtral-8x22b", 32, "none"),
        ("deepseek-v3", 64, "none"),
    ],
)
def test_what_a_search_passes_over_unseen_does_not_fit(model: str, gpus: int, offload: str) -> None:
    """The lower bound of the memory is below the peak of every layout of a space, and not by far
    for all of them."""
    setting = EstimateSetting(H100, stacks.FIVEFOLD, "bf16")
    space = SearchSpace(models.load(model), gpus, 4096, 64, (8,), {"offload": offload})
    closest = 0.0
    for block in layout_blocks(space):
        job = setting.arguments(space.shape, block.grid, space.seq)
        share = least_memory(*job) / peak_memory(*job).total
        assert (share <= 1).all()
        closest = max(closest, float(share.max()))
    assert closest > 0.7


def test_keys_of_flat_units_change_the_estimate() -> None:
    """Gradients in bf16 take half of the bytes and of the wire; offloaded ones are on the host."""

    def estimate(**keys: object) -> Estimate:
        options = PlanOptions("llama-3.1-8b", layout="dp=8", machine="h100", microbatches=2)
        plan = resolve(replace(options, zero=3, **keys))  # pyright: ignore
        assert plan.machine is not None
        return estimate_on_machine(plan, plan.machine, precision="bf16", headroom=0.0)

    usual, narrow = estimate(), estimate(grad_dtype="bf16")
    assert narrow.memory["gradients"] == pytest.approx(usual.memory["gradients"] / 2)
    assert narrow.parts["dp"] < usual.parts["dp"] and narrow.host == 0
    for where in ("cpu", "nvme:states"):
        away = estimate(train=Recipe(offload_grads=where))
        assert away.memory["gradients"] == 0 < away.memory["prefetch"]
        assert away.host + away.disk == pytest.approx(usual.memory["master"])  # as wide
        assert (away.disk > 0) == (where != "cpu") and away.parts["offload"] > 0
    ahead = [estimate(prefetch=depth).memory["prefetch"] for depth in (0, 1, 2)]
    assert ahead[0] < ahead[1] < ahead[2]
    assert estimate(prefetch=0).parts["dp"] > usual.parts["dp"]
    assert estimate(unit_size=2000.0).total > usual.total > estimate(unit_size=150.0).total


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_fullest_rank_is_among_those_that_are_followed(schedule: str, recompute: str) -> None:
    """Only the ranks that closed forms find fullest are followed, and none of the others has
    more."""
    keys = {"layout": "dp=4 tp=8 pp=8", "schedule": schedule, "recompute": recompute}
    plan = resolve(PlanOptions("llama-3.1-70b", **keys, microbatches=32, seq=4096))
    setting, _ = estimate_setting(H100, "bf16", 0.0, "compiled", 1.0)
    most = max(sum(each.values()) for each in memory_by_pipeline_rank(plan, setting))
    assert sum(fullest_memory(plan, setting).values()) == pytest.approx(most)


def test_multi_token_prediction_keeps_all_weights_of_its_stage_gathered() -> None:
    """A search would otherwise pass ZeRO-3 without a pipeline as fitting, at half of its memory."""
    changes = {"layers": "8"}
    options = PlanOptions("deepseek-v3", layout="dp=256 ep=16", zero=3, recompute="full", seq=4096)
    plan = resolve(replace(options, set=changes))
    setting, _ = estimate_setting(H100, "bf16", 0.0, "compiled", 1.0)
    closed = peak_memory(*plan_arguments(plan, setting)).total.item()
    assert closed == pytest.approx(sum(fullest_memory(plan, setting).values()), rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "model", "layout"),
    [
        ("dualpipe", "llama-3.1-70b", "tp=8 pp=8"),
        ("zb-h1", "deepseek-v3", "dp=32 tp=8 pp=16 etp=8"),  # the last rank has one layer of four
    ],
)
def test_a_search_counts_the_rank_that_defers_most(schedule: str, model: str, layout: str) -> None:
    """Deferred weight gradients grow towards the last rank, or towards the middle: the second rank
    may have half of the memory."""
    keys: dict[str, Any] = {"schedule": schedule, "recompute": "full", "microbatches": 32}
    plan = resolve(PlanOptions(model, layout=layout, **keys, zero=0, seq=4096))
    closed = peak_memory(*plan_arguments(plan, OWN)).total.item()
    followed = fullest_memory(plan, OWN)
    assert sum(followed.values()) == pytest.approx(closed, rel=0.05)


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_every_chunk_has_units_that_are_being_reduced(chunks: int) -> None:
    """They stay until its next backward, so with eight chunks almost all gradients are there."""
    keys: dict[str, Any] = {"zero": 3, "gather": "step", "recompute": "full", "microbatches": 16}
    keys |= {"schedule": "interleaved", "chunks": chunks, "seq": 8192}
    plan = resolve(PlanOptions("llama-3.1-405b", layout="dp=32 tp=8 pp=4", **keys))
    closed = peak_memory(*plan_arguments(plan, OWN)).total.item()
    assert sum(fullest_memory(plan, OWN).values()) == pytest.approx(closed, rel=0.15)


def test_the_ends_of_a_pipeline_are_always_followed() -> None:
    """Of many forwards before the first backward all losses wait on the last rank, and closed forms
    find it as full as any other."""
    keys: dict[str, Any] = {"schedule": "bfs", "chunks": 7, "recompute": "full", "zero": 1}
    options = PlanOptions("llama-3.1-405b", layout="dp=8 tp=8 pp=16", seq=4096, batch=1024, **keys)
    plan = resolve(options)
    most = max(sum(each.values()) for each in memory_by_pipeline_rank(plan, OWN))
    assert sum(fullest_memory(plan, OWN).values()) == most


def test_what_fits_by_closed_forms_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far they are off: the answer names the leanest layout and a way out."""
    options = PlanOptions("llama-3.1-8b", gpus=8, seq=4096, batch=64)
    fixed = {"tp": 1, "pp": 1, "cp": 1, "zero": 3}
    request = plan_request(options, H100, fixed, precision="bf16", headroom=0.05)
    assert best_plans(request, 1).plans
    inner = planner.plan_memory

    def fuller(*given: Any) -> PlanMemory:
        found = inner(*given)
        return PlanMemory({name: 100 * each for name, each in found.device.items()})

    monkeypatch.setattr(planner, "plan_memory", fuller)
    with pytest.raises(NothingFits, match=r"the leanest layout, dp=8, needs .* a GPU; lower the"):
        best_plans(request, 1)


def test_a_stage_that_stays_gathered_is_refused() -> None:
    """All weights of a stage with multi-token prediction are gathered at once."""
    fixed = {"pp": 1, "ep": 1, "etp": 1, "zero": 3, "tp": 32, "cp": 1, "recompute": "full"}
    job = (PlanOptions("deepseek-v3", gpus=2048, seq=4096), machines.load("h800"), fixed)
    with pytest.raises(NothingFits, match=r"dp=64 tp=32, needs 1,3\d\d\.\d GiB of 79\.1 a GPU"):
        best_plans(plan_request(*job, precision="bf16", headroom=0.05), 1)


def test_the_verdict_counts_communicators() -> None:
    """Of DeepSeek-V3 on 2,048 H800, in the table of memory and in its sum."""
    keys: dict[str, Any] = {"layout": "dp=128 pp=16 ep=64", "microbatches": 32, "seq": 4096}
    plan = resolve(PlanOptions("deepseek-v3", machine="h800", recompute="full", **keys))
    setting, _ = estimate_setting(machines.load("h800"), "bf16", 0.05, "compiled", 1.0)
    one = estimate_plan(plan, setting)
    held = nccl_bytes(plan, setting.machine)
    assert one.memory["nccl"] == held > 2 * 2**30
    for total, verdict in (
        (setting.capacity, "fits"),
        (setting.machine.memory - held / 2, "tight"),
        (setting.machine.memory + 1, "does not fit"),
    ):
        sized = replace(one, memory={**one.memory, "activations": 0.0})
        rest = total - sized.total
        sized = replace(sized, memory={**sized.memory, "activations": rest})
        assert sized.verdict == verdict == estimate_json(sized, [])["fits"]
        assert any(line.split()[:2] == ["nccl", f"{held / 2**30:.1f}"] for line in detail(sized))
    laptop = resolve(PlanOptions("tiny", layout="dp=2", machine="laptop"))
    assert nccl_bytes(laptop, machines.load("laptop")) == 0, "its ranks talk through gloo"


COMMUNICATORS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3.1-405b", "dp=256 tp=8 pp=8", {"zero": 1, "schedule": "interleaved", "chunks": 2}),
    ("llama-3.1-405b", "dp=64x2 tp=8 pp=8", {"zero": 2}),
    ("llama-3.1-8b", "dp=8", {"zero": 0}),
    ("llama-3.1-8b", "dp=2 tp=2 cp=4", {"context": "hybrid"}),
    ("llama-3.1-8b", "dp=2 tp=2 cp=4", {"context": "ulysses", "sp": False}),
    ("mixtral-8x7b", "dp=32 tp=4 pp=2 ep=8", {}),
    ("mixtral-8x7b", "dp=32 tp=4 pp=2 ep=8 etp=2", {"balance": "aux"}),
    ("deepseek-v3", "dp=128 pp=16 ep=64", {"schedule": "dualpipe", "microbatches": 32}),
    ("deepseek-v3", "dp=128 tp=2 pp=8 ep=32", {"schedule": "dualpipe-v", "microbatches": 16}),
]


@pytest.mark.parametrize(("model", "layout", "keys"), COMMUNICATORS, ids=str)
def test_a_search_counts_the_communicators_that_ranks_make(
    model: str, layout: str, keys: dict[str, Any]
) -> None:
    """Every layout of a grid by its degrees, and a plan by the table from which a mesh is made."""
    for machine in ("h100", "h800"):
        plan = resolve(PlanOptions(model, layout=layout, machine=machine, seq=4096, **keys))
        setting, _ = estimate_setting(machines.load(machine), "bf16", 0.05, "compiled", 1.0)
        shape, setting_machine, stack, grid, *_ = plan_arguments(plan, setting)
        found = communicator_memory(shape, setting_machine, stack, grid).item()
        assert found == nccl_bytes(plan, setting_machine), plan.layout
        # The ends of a pipeline may have fewer neighbours, and ranks inside no copy of a weight.
        topology, channels = Topology.of(plan), Channels.of(setting_machine)
        most = max(
            sum(
                communicator_bytes(topology, group, channels)
                for group in communicators(topology)
                if group.includes(topology, rank)
            )
            for rank in range(plan.layout.pp)
        )
        assert most <= found <= most + 2 * 40 * 2**20


@pytest.mark.parametrize(
    ("channels", "made", "used"), [(64, 388, 1156), (4, 28, 40), (1, 10, 22)], ids=str
)
def test_bytes_of_a_communicator_are_those_that_were_measured(
    channels: int, made: int, used: int
) -> None:
    """On an H200 that ranks shared, in MiB, before and after the first use: of a collective with
    64 channels, of a message with 4 and 1."""
    peers = 64 if channels == 64 else 1
    assert MADE + channels * CHANNEL == made * 2**20
    assert MADE + channels * CHANNEL + peers * PEER == used * 2**20

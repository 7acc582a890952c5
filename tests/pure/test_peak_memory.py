"""The planner's memory: against the clock, the runtime's own count, textbooks and papers."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from one_layout import H100, LARGE, activations_of, grid_of, memory_of

from fivefold.core.model import presets as models
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import mtp_parameters, parameters
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.clock import peak_activations
from fivefold.core.schedule.definition import Family
from fivefold.cost.grid import CONTEXTS, RECOMPUTE, grid_of_plan
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.stack import SoftwareStack
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.memory.categories import (
    CATEGORIES,
    MemoryParts,
    PeakMemory,
    fits,
    peak_memory,
    verdict,
)
from fivefold.cost.memory.static import static_bytes
from fivefold.cost.stages.ranks import in_flight, rank_stages
from fivefold.planner.space import SearchSpace, layout_blocks

SELECTIVE = Recompute.parse("selective")
GPT3 = models.load("gpt3-175b")
MEGATRON_2021 = load_stack("megatron-2021")


def with_chunks(stack: SoftwareStack, chunks_loss: bool) -> SoftwareStack:
    return replace(stack, memory=replace(stack.memory, chunks_loss=chunks_loss))


def states(peak: PeakMemory) -> float:
    return sum(float(peak.parts[name].item()) for name in CATEGORIES[:4])


# --- In flight

BOUNDED = ("v-half", "v-min")  # their papers give the steady state: the first rank may have less


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if not each.asynchronous], ids=lambda each: each.name
)
def test_microbatches_in_flight_are_the_clocks(family: Family) -> None:
    played = 0
    for ranks in (2, 3, 4, 5, 8):
        for m in (1, 2, 3, 4, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks):
            for chunks in (family.min_chunks,) if family.max_chunks else (2, 3, 4):
                if family.problems(ranks, m, chunks):
                    continue
                played += 1
                peaks = peak_activations(family.make(ranks, m, chunks))
                grid = grid_of(pp=ranks, microbatches=m, chunks=chunks, schedule=family.name)
                first, last = (in_flight(grid, place).item() for place in ("first", "last"))
                where = (ranks, m, chunks)
                for rank in range(1, ranks - 1):
                    inner = in_flight(grid, "inner", rank=float(rank)).item()
                    assert inner >= peaks[rank] - 1e-9, where
                if family.name in BOUNDED:
                    assert first >= peaks[0] and last >= peaks[-1], where
                    assert max(first, last) - max(peaks) <= 1, where
                else:
                    assert (first, last) == pytest.approx((peaks[0], peaks[-1])), where
    assert played >= 8


def test_without_a_pipeline_one_microbatch_is_in_flight() -> None:
    for name in ("1f1b", "gpipe"):
        assert in_flight(grid_of(microbatches=8, schedule=name), "first") == 1


def at_loss(peak: PeakMemory) -> MemoryParts:
    """The rank of the head, where the loss has its gradient."""
    return peak.ranks[-1][-1]


def test_losses_of_all_microbatches_wait_where_no_backward_comes_between() -> None:
    def waiting(stack: SoftwareStack) -> float:
        plain, all_of_them = (
            at_loss(memory_of(LARGE, grid_of(pp=4, microbatches=8, schedule=name), stack))
            for name in ("1f1b", "gpipe")
        )
        return (all_of_them["logits"] - plain["logits"]).item()

    words = 4096 * LARGE.vocab
    # Logits as they were computed, in 16 bits; or the gradients that were computed with them.
    assert waiting(with_chunks(stacks.FIVEFOLD, False)) == 7 * 2 * words
    assert waiting(stacks.FIVEFOLD) == 7 * 2 * (4096 + LARGE.vocab) * LARGE.width
    assert memory_of(LARGE, grid_of(pp=4, microbatches=8)).first["logits"] == 0


def test_a_folded_pipeline_has_both_ends_on_its_first_rank() -> None:
    first, last = rank_stages(LARGE, "even", grid_of(pp=4, chunks=2, schedule="zb-v"), 4096)
    assert (first.embedding, first.head, last.embedding, last.head) == (1, 1, 0, 0)
    for stage in rank_stages(LARGE, "even", grid_of(pp=4, schedule="dualpipe"), 4096):
        assert (stage.copies, stage.layers.all, stage.embedding, stage.head) == (2, 8, 1, 1)


# --- States


@pytest.mark.parametrize(
    ("model", "layout", "schedule"),
    [
        ("llama-3.1-8b", "dp=8", "1f1b"),
        ("llama-3.1-8b", "dp=2x4 tp=2", "1f1b"),
        ("llama-3.1-8b", "dp=2 tp=16", "1f1b"),  # more tp ranks than KV heads
        ("llama-3.1-8b", "dp=2 cp=2 pp=2", "1f1b"),
        ("llama-3.2-1b", "dp=2 tp=2", "1f1b"),
        ("llama-3.2-1b", "dp=2 pp=2", "1f1b"),
        ("llama-3.1-8b", "dp=2 pp=4", "dualpipe"),
        ("llama-3.1-8b", "dp=2 pp=4", "zb-v"),
        ("mixtral-8x7b", "dp=8 ep=4", "1f1b"),
        ("mixtral-8x7b", "dp=4 tp=2 ep=4 etp=2", "1f1b"),
        ("deepseek-v2-lite", "dp=4 tp=2 ep=4", "1f1b"),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_what_the_runtime_counts(
    model: str, layout: str, schedule: str, zero: int
) -> None:
    """In float32; the runtime counts behind the last sum, where no gradient is whole any more."""
    options = PlanOptions(model, layout=layout, zero=zero, schedule=schedule, microbatches=8)
    plan = resolve(replace(options, precision="fp32"))
    found = peak_memory(
        plan.shape, H100, stacks.FIVEFOLD, grid_of_plan(plan), plan.batch.seq, "fp32"
    )
    per_stage = plan.layout.world // plan.layout.pp
    stages = [range(pp * per_stage, (pp + 1) * per_stage) for pp in range(plan.layout.pp)]
    counted = [
        [static_bytes(plan, rank, itemsize=4, optimizer="adamw") for rank in ranks]
        for ranks in (stages[0], stages[-1])
    ]
    for parts, ranks in zip((found.first, found.last), counted, strict=True):
        for name in ("weights", "gradients", "optimizer"):
            if name == "gradients" and zero == 1:
                continue
            whole = sum(getattr(each, name) for each in ranks) / len(ranks)
            assert parts[name].item() == pytest.approx(whole, rel=2e-3), name
        assert parts["master"] == 0


def test_sixteen_bytes_a_parameter() -> None:
    """70 B: 1,120 GB, 14 GPUs of 80 GB; 7 B: 112 GB; a 64th of 70 B under ZeRO-3: 17.5 GB."""
    for model in ("llama-2-7b", "llama-2-70b"):
        shape = models.load(model)
        number = parameters(shape).total
        whole = states(memory_of(shape, grid_of(), MEGATRON_2021)) / number
        assert whole == pytest.approx(16, rel=1e-6)
        sliced = states(memory_of(shape, grid_of(shard=64, zero=3), MEGATRON_2021)) / number
        assert sliced * 70e9 == pytest.approx(17.5e9, rel=1e-6)
    assert (16 * 70e9, ceil(16 * 70e9 / 80e9), 16 * 7e9) == (1120e9, 14, 112e9)


def test_zero_saves_four_eight_and_n_times() -> None:
    shape, ranks = models.load("llama-2-7b"), 1024
    whole = states(memory_of(shape, grid_of(shard=ranks), MEGATRON_2021))
    saved = [
        whole / states(memory_of(shape, grid_of(shard=ranks, zero=zero), MEGATRON_2021))
        for zero in (1, 2, 3)
    ]
    assert saved == pytest.approx([16 / (4 + 12 / ranks), 16 / (2 + 14 / ranks), ranks])
    assert [round(each) for each in saved] == [4, 8, ranks]


def test_hybrid_sharding_slices_over_its_shard_group_only() -> None:
    shape = models.load("llama-3.1-8b")
    hybrid, plain = (
        memory_of(shape, grid_of(replicate=replicas, shard=8, zero=3)) for replicas in (8, 1)
    )
    assert states(hybrid) == states(plain)
    assert states(hybrid) == 8 * states(memory_of(shape, grid_of(shard=64, zero=3)))


def test_offload_moves_states_and_slices_to_the_host() -> None:
    shape = models.load("llama-3.1-8b")
    here, there = (memory_of(shape, grid_of(shard=8, zero=3, offload=off)) for off in (False, True))
    number = parameters(shape).total
    assert there.host.item() == pytest.approx((2 + 4 + 8) * number / 8)
    assert states(here) - states(there) == pytest.approx(there.host.item())
    assert there.parts["prefetch"] == here.parts["prefetch"] > 0
    assert here.host == 0


def test_zero3_has_two_layers_whole_and_a_pipeline_all_of_its_own() -> None:
    shape = models.load("llama-2-70b")
    layer = (parameters(shape).total - 2 * shape.vocab * shape.width) / shape.layers
    _, behind, *_ = memory_of(shape, grid_of(shard=8, zero=3)).ranks[0]
    assert behind["prefetch"].item() == pytest.approx(2 * layer * 2 + 3 * layer * 4, rel=1e-3)
    staged = memory_of(shape, grid_of(shard=8, zero=3, pp=4, microbatches=8)).first
    assert staged["prefetch"].item() > shape.layers / 4 * layer * 2
    assert memory_of(shape, grid_of(shard=8, zero=0)).parts["prefetch"] == 0


# --- Activations


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_layers_are_those_of_korthikanti(tp: int, sp: bool) -> None:
    """arXiv:2205.05198, table 2: sbh(34 + 5as/h), split by tensor and sequence parallelism."""
    s, h, a = 2048, GPT3.width, GPT3.heads
    layer = activations_of(GPT3, MEGATRON_2021, grid_of(tp=tp, sp=sp), s)
    scores = 5 * a * s / (h * tp)
    body = 34 / tp if sp else 10 + 24 / tp
    assert layer.saved(routed=False).item() / h == pytest.approx(body + scores, rel=1e-12)
    assert layer.saved(False, SELECTIVE).item() / h == pytest.approx(body, rel=1e-12)
    assert layer.inputs().item() / h == pytest.approx(2 / tp if sp else 2, rel=1e-12)


def test_selective_recomputation_takes_seventy_percent_of_gpt3() -> None:
    layer = activations_of(GPT3, MEGATRON_2021, grid_of(tp=8), 2048)
    left = layer.saved(False, SELECTIVE) / layer.saved(routed=False)
    assert 1 - left.item() == pytest.approx(0.70, abs=0.005)


def test_layers_of_the_runtime_tensor_by_tensor() -> None:
    """Two residuals, two inputs of products, queries, keys, values, what attention returns with a
    sum a head, and gate, up and their product of the MLP's width."""
    shape = models.load("llama-3.1-8b")
    h, f, keys, heads = 4096, 14336, 1024, 32
    layer = activations_of(shape, stacks.FIVEFOLD, grid_of(), 8192)
    inside = 2 * h + 4 * keys + 2 * h + 4 * heads + 2 * 3 * f
    assert layer.saved(routed=False) == 2 * 2 * h + 2 * 2 * h + inside
    # A rank keeps its own tokens of what products take, and gathers them again.
    split = activations_of(shape, stacks.FIVEFOLD, grid_of(tp=8), 8192)
    assert split.saved(routed=False) == layer.saved(routed=False) / 8
    # Without the outputs of norms and of the activation.
    remade = 2 * 2 * h + 2 * f
    assert layer.saved(False, SELECTIVE) == layer.saved(routed=False) - remade
    assert split.saved(False, SELECTIVE) == layer.saved(False, SELECTIVE) / 8


def test_latents_are_whole_on_every_tensor_rank() -> None:
    shape = models.load("deepseek-v3")
    mla = shape.mla
    assert mla is not None and mla.q_rank is not None
    one, two = (
        activations_of(shape, stacks.FIVEFOLD, grid_of(tp=tp, sp=False), 4096) for tp in (1, 2)
    )
    heads = 2 * shape.head_dim + 2 * mla.value_dim
    split = shape.heads * (2 * heads + 4) + 2 * 3 * shape.ffn
    saved = one.saved(routed=False) - two.saved(routed=False)
    assert saved.item() == pytest.approx(split / 2)


def test_imbalance_lengthens_slots_alone() -> None:
    shape = models.load("mixtral-8x7b")
    moe, grid = shape.moe, grid_of(shard=8, ep=8)
    assert moe is not None
    even, crowded = (
        peak_memory(shape, H100, stacks.FIVEFOLD, grid, 4096, "bf16", factor)
        for factor in (1.0, 1.5)
    )
    more = at_loss(crowded)["activations"] - at_loss(even)["activations"]
    slots = 4096 * moe.top_k * 0.5
    weight = 4  # bytes, in float32
    assert more == slots * shape.layers * (2 * (shape.width + 3 * moe.ffn) + weight)
    for name in ("weights", "optimizer", "logits"):
        assert at_loss(crowded)[name] == at_loss(even)[name]


def test_multi_token_prediction_has_a_layer_and_a_loss_of_its_own() -> None:
    shape = models.load("deepseek-v3")
    grid = grid_of(shard=8, ep=8)
    with_it, without = (at_loss(memory_of(replace(shape, mtp=mtp), grid)) for mtp in (1, 0))
    layer = activations_of(shape, stacks.FIVEFOLD, grid, 4096)
    more = layer.saved(routed=True) + layer.at_head()
    assert with_it["activations"] - without["activations"] == pytest.approx(4096 * more)
    assert with_it["logits"] - without["logits"] == 2 * 4096 * shape.vocab
    extra = mtp_parameters(shape)
    held = extra.total - extra.experts + extra.experts / 8
    assert with_it["weights"] - without["weights"] == pytest.approx(2 * held)


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    """On the first of two stages, which has 17 of 32 layers; the head weighs as much as two."""
    shape = models.load("llama-3.1-8b")
    found = {
        kind: memory_of(shape, grid_of(pp=2, microbatches=4, recompute=number)).first["activations"]
        for number, kind in enumerate(RECOMPUTE)
    }
    layer = activations_of(shape, stacks.FIVEFOLD, grid_of(), 4096)
    inside, once = layer.backward_gradients().item() * 4096, layer.saved(routed=False).item() * 4096
    inside += 2 * 4096 * layer.rotary_tables()
    assert found["none"] == 2 * 17 * once + inside
    inputs = 4096 * 2 * shape.width
    assert found["full"] == 2 * 17 * inputs + (once - inputs) + inside
    assert found["full"] < found["selective"] < found["none"]


def test_layers_run_again_where_logits_were() -> None:
    shape = models.load("llama-3.1-8b")
    again, *_, loss = memory_of(shape, grid_of(recompute=2, microbatches=2)).ranks[0]
    layer = activations_of(shape, stacks.FIVEFOLD, grid_of(), 4096)
    inputs = 4096 * (32 * 2 * shape.width + layer.rotary_tables())
    assert loss["activations"] == inputs + layer.at_head().item() * 4096
    assert again["logits"] == 0 < loss["logits"]
    once = layer.saved(routed=False) - layer.inputs() + layer.backward_gradients()
    assert again["activations"] == inputs + once * 4096


def test_gathered_keys_are_those_of_all_context_ranks() -> None:
    shape, grid = models.load("llama-3.1-8b"), grid_of(cp=8)
    ring, gathered = (
        memory_of(shape, replace(grid, context=np.array([float(CONTEXTS.index(kind))]))).ranks[0][0]
        for kind in ("zigzag", "allgather")
    )
    block = 4096 / 8 * 2 * shape.kv_heads * shape.head_dim
    more = gathered["buffers"] - ring["buffers"]
    assert more == block * (8 * (2 + 4) - (2 * 2 + 4))
    assert gathered["activations"] == ring["activations"]


# --- The whole


def test_a_lattice_is_its_layouts_one_by_one() -> None:
    shape = models.load("mixtral-8x7b")
    question = SearchSpace(shape, 64, 4096, 64, (8,))
    block = max(layout_blocks(question), key=lambda each: each.size)
    for stack in (stacks.FIVEFOLD, load_stack("nanotron")):
        whole = memory_of(shape, block.grid, stack)
        spread = np.broadcast_to(whole.total, block.shape)
        numbers = np.arange(spread.size).reshape(spread.shape)
        for place in np.random.default_rng(0).integers(0, spread.size, 20):
            where = tuple(int(each) for each in np.argwhere(numbers == place)[0])
            one = memory_of(shape, block.grid.at(where), stack)
            assert spread[where] == pytest.approx(one.total.item())
            assert sum(one.parts.values()) == pytest.approx(one.total)
            assert tuple(one.parts) == CATEGORIES


def test_tight_is_above_the_usable_share_and_never_more_than_there_is() -> None:
    peak = memory_of(models.load("llama-3.1-8b"), grid_of(shard=8, zero=3))
    need = peak.total.item()
    said = [
        verdict(peak.total, 0.95 * memory, replace(H100, memory=memory)).item()
        for memory in (2 * need, 1.001 * need / 0.95, 0.999 * need / 0.95, need, 0.999 * need)
    ]
    assert said == ["fits", "fits", "tight", "tight", "does not fit"]
    assert verdict(peak.total, 2 * need, replace(H100, memory=0.5 * need)).item() == "does not fit"
    assert fits(peak, replace(H100, memory=need)) and not fits(
        peak, replace(H100, memory=need * 0.999)
    )

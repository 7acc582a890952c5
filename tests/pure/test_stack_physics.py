"""Frozen weights, adapters, offloaded activations, narrow formats, straddled domains, HFU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_layout import grid_of
from timelines import bubble

from fivefold.core import hardware as machines
from fivefold.core.hardware import Machine
from fivefold.core.model import presets as models
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import Shape, repeated_flops, training_flops
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.precision import matmul_bytes
from fivefold.cost.grid import CONTEXTS
from fivefold.cost.hardware.links import Links
from fivefold.cost.hardware.stack import FIVEFOLD, SoftwareStack
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.layer.time import LayerTimer, total_seconds, trainable_share
from fivefold.cost.memory.categories import fits, peak_memory
from fivefold.cost.step.time import StepTime, step_time
from fivefold.planner.estimate import estimate_plan
from fivefold.planner.setting import EstimateSetting
from fivefold.render.plan import estimate_json
from fivefold_score.published import cases

SHAPE = models.load("llama-3.1-8b")
H100, GB200, GB300 = (machines.load(name) for name in ("h100", "gb200", "gb300"))
MEGATRON = load_stack("megatron")
GRID = grid_of(shard=8, zero=1, microbatches=8)


def step(
    stack: SoftwareStack = MEGATRON,
    machine: Machine = H100,
    precision: str = "bf16",
    shape: Shape = SHAPE,
    **degrees: Any,
) -> StepTime:
    grid = grid_of(**degrees) if degrees else GRID
    return step_time(shape, machine, stack, grid, 8192, precision)


def memory(stack: SoftwareStack, precision: str = "bf16", **degrees: Any) -> dict[str, float]:
    grid = grid_of(**degrees) if degrees else GRID
    found = peak_memory(SHAPE, H100, stack, grid, 8192, precision).parts
    return {name: size.item() for name, size in found.items()}


# --- A head in chunks


def test_a_head_in_chunks_works_in_its_forward() -> None:
    """Its backward only multiplies gradients; a split backward has it there as before."""

    def seconds(chunks_loss: bool, **degrees: Any) -> list[float]:
        memory = replace(FIVEFOLD.memory, chunks_loss=chunks_loss)
        stack, grid = replace(FIVEFOLD, memory=memory), grid_of(**degrees)
        head = LayerTimer(SHAPE, H100, stack, grid, 8192, "bf16").head()
        return [each["head"].item() for each in (head.forward, head.inputs, head.weights)]

    forward, inputs, weights = seconds(True)
    plain = seconds(False)
    weight, words = 2 * SHAPE.width * SHAPE.vocab, 8192 * SHAPE.vocab
    # The sum of 2 chunks is read and written by all but the first, and scaled with the input's.
    moved = 2 * weight + 2 * (weight + 2 * 8192 * SHAPE.width)
    moved += (FIVEFOLD.chunk_loss_bytes - FIVEFOLD.loss_bytes) * words
    speed = H100.memory_bandwidth * H100.efficiency.memory
    assert forward + inputs + weights - sum(plain) == pytest.approx(moved / speed, rel=1e-6)
    assert inputs < 0.1 * plain[1] and weights < 0.2 * plain[2]
    late = {"pp": 4, "microbatches": 8, "schedule": "zb-h1"}
    assert seconds(True, **late) == seconds(False, **late)


# --- Frozen weights and adapters


def test_frozen_weights_have_no_third_pass_and_no_states() -> None:
    lora = replace(MEGATRON, frozen=True, lora_rank=16)
    learned = trainable_share(SHAPE, lora)
    assert learned == pytest.approx(41.9e6 / 8.03e9, rel=0.05)  # rank 16 on all linears: 42M of 8B
    ratio = (step(lora).step / step().step).item()
    assert 0.6 < ratio < 0.75  # two of three passes
    whole, few = memory(MEGATRON), memory(lora)
    assert few["weights"] == whole["weights"] and few["activations"] == whole["activations"]
    for name in ("gradients", "master", "optimizer"):
        assert few[name] == pytest.approx(learned * whole[name])
    assert step(lora).parts["dp"] < 0.05 * step().parts["dp"]
    wider = replace(lora, lora_rank=64)
    assert step(wider).step > step(lora).step


def test_rows_say_what_is_frozen() -> None:
    row = {
        "id": "x-1", "model": "Llama 3 8B", "layers": 32, "hidden": 4096, "ffn_hidden": 14336,
        "heads": 32, "kv_heads": 8, "vocab": 128256, "seq_len": 8192, "gpu": "h100-sxm",
        "gpus": 8, "precision": "bf16", "dp": 8, "zero": 1, "tp": 1, "pp": 1, "micro_batch": 1,
        "global_batch": 64, "recompute": "none", "achieved": {"step_time_s": 1.0},
        "lora_rank": 16, "offload_activations": 0.5,
    }  # fmt: skip
    stack = cases(row)[0].stack
    assert stack.frozen and stack.lora_rank == 16 and stack.memory.offloaded == 0.5
    assert not cases({**row, "lora_rank": None})[0].stack.frozen


# --- Offloaded activations


def test_offloaded_activations_leave_the_gpu_and_take_the_link() -> None:
    half = replace(MEGATRON, memory=replace(MEGATRON.memory, offloaded=0.5))
    assert memory(half)["activations"] < 0.6 * memory(MEGATRON)["activations"]
    taken = step(half).parts["offload"].item()
    slow = replace(H100, host=replace(H100.host, link=machines.links()["pcie3"]))
    assert 0 < taken < 0.1 * step().step.item()
    assert step(half, slow).parts["offload"].item() > 3 * taken


# --- Narrow formats


def test_narrow_matmuls_are_faster_and_save_less() -> None:
    wide, narrow = step(machine=GB200).step, step(machine=GB200, precision="mxfp8").step
    assert step(machine=GB200, precision="nvfp4").step < narrow < wide
    assert step(machine=GB200, precision="fp8").step == narrow
    assert matmul_bytes("nvfp4") < matmul_bytes("fp8") < matmul_bytes("mxfp8") < 2
    kept = [memory(FIVEFOLD, each)["activations"] for each in ("nvfp4", "fp8", "mxfp8", "bf16")]
    assert kept == sorted(kept) and kept[1] < 0.85 * kept[3]


def test_weights_may_be_gathered_in_fewer_bits() -> None:
    grid = {"shard": 64, "zero": 3, "microbatch_size": 1}
    apart = replace(MEGATRON, prefetch=0)
    wide, narrow = (
        step(each, precision="fp8", **grid).parts["dp"].item()
        for each in (apart, replace(apart, narrow_gathers=True))
    )
    assert 0.4 < narrow / wide < 0.7


def test_every_blackwell_has_nvfp4_and_gb300_its_own_figures() -> None:
    for name in ("b200", "b300", "gb200", "gb300"):
        machine = machines.load(name)
        assert machine.peak("nvfp4") > machine.peak("mxfp8") == machine.peak("fp8")
    assert GB300.peak("nvfp4") == 1.5 * GB200.peak("nvfp4")
    assert GB300.efficiency.matmul_fp8 > GB200.efficiency.matmul_fp8
    assert step(machine=GB300).step < step(machine=GB200).step


def test_ungated_mlps_cost_less() -> None:
    """Two matrices in place of three of the same width; their activation reads one input."""
    plain = replace(SHAPE, activation="gelu")
    gated, ungated = step().parts, step(shape=plain).parts
    assert ungated["products"] < 0.8 * gated["products"]
    assert ungated["elementwise"] < gated["elementwise"]


# --- Domains


def test_groups_straddle_domains_that_a_job_fills() -> None:
    """64 ranks fit into one NVL72; of 144 ranks in two full ones, the second group straddles."""
    size, ranks, stride = np.array([1e8]), np.array([64.0]), np.ones(1)

    def seconds(world: int) -> float:
        links = Links(GB200, np.array([float(world)]))
        return links.all_to_all(size, ranks, stride).item()

    assert seconds(64) == seconds(128) == seconds(256) == seconds(1024)
    assert seconds(576) > 5 * seconds(512)
    assert Links(GB200, np.array([144.0])).all_to_all(size, np.array([72.0]), stride) < seconds(576)


# --- HFU


def test_recomputation_counts_as_work_of_the_hardware() -> None:
    """Full recomputation repeats all layers: a third more than their training FLOPs."""
    layers = range(SHAPE.layers)
    model = training_flops(SHAPE, 8192)
    full = repeated_flops(SHAPE, 8192, [(layers, Recompute.parse("full"))])
    assert full == pytest.approx((model.total - model.head - model.norms) / 3, rel=1e-3)
    assert repeated_flops(SHAPE, 8192, [(layers, Recompute())]) == 0
    some = repeated_flops(SHAPE, 8192, [(layers, Recompute.parse("attention"))])
    assert some == pytest.approx((model.attention + model.scores) / 3)
    kept = repeated_flops(SHAPE, 8192, [(layers, Recompute.parse("full-but-attention"))])
    assert full - kept == pytest.approx(model.scores / 3)


def test_estimates_have_both_utilisations() -> None:
    setting = EstimateSetting(H100, FIVEFOLD, "bf16")
    options = PlanOptions("llama-3.1-8b", layout="dp=8", seq=8192, microbatches=2)
    plain, again = (
        estimate_plan(resolve(replace(options, recompute=rule)), setting)
        for rule in ("none", "full")
    )
    assert plain.hfu == plain.mfu
    assert 1.25 < again.hfu / again.mfu < 4 / 3 and again.mfu < plain.mfu
    assert estimate_json(again, [])["hfu"] == again.hfu


# --- Llama-3.1-405B, as published: 16,384 H100 at 400 and 380 TFLOP/s a GPU


@pytest.mark.parametrize(
    ("seq", "dp", "cp", "published"), [(8192, 128, 1, 6.46), (131072, 8, 16, 10.9)]
)
def test_llama_405b_fits_and_takes_as_long_as_published(
    seq: int, dp: int, cp: int, published: float
) -> None:
    """Chunks of one layer, and the least that keeps the pipeline full."""
    shape, stack = models.load("llama-3.1-405b"), load_stack("meta-2024-lean")
    grid = grid_of(
        tp=8,
        pp=16,
        cp=cp,
        shard=dp,
        zero=2,
        chunks=8,
        microbatches=16,
        schedule="interleaved",
    )
    gathered = np.array([float(CONTEXTS.index("allgather"))])
    job = (shape, H100, stack, replace(grid, context=gathered), seq, "bf16")
    assert step_time(*job).step.item() == pytest.approx(published, rel=0.1)
    assert fits(peak_memory(*job), H100).item()


# --- ZeRO-3 in a pipeline: torch's pipelining keeps weights gathered and reduces gradients once


def test_a_pipeline_gathers_and_reduces_once_a_step() -> None:
    """Four times the microbatches move as much; without a pipeline, four times as much."""
    titan = replace(load_stack("torchtitan"), gathers_hidden=0.0)

    def moved(pp: int, microbatches: int) -> float:
        return step(titan, shard=8, zero=3, pp=pp, microbatches=microbatches).parts["dp"].item()

    assert moved(4, 32) == pytest.approx(moved(4, 8))
    assert moved(1, 32) == pytest.approx(4 * moved(1, 8), rel=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_bubbles_of_another_stack_are_those_of_the_clock(schedule: str) -> None:
    """With equal stages, a head of no weight, and a host that is never late."""
    stack, shape = replace(MEGATRON, launch=0.0), replace(SHAPE, vocab=8)
    grid = grid_of(pp=4, microbatches=8, schedule=schedule)
    layer = LayerTimer(shape, H100, stack, grid, 8192, "bf16").layer(0)
    passes = ((layer.forward,), (layer.inputs, layer.again), (layer.weights,))
    forward, inputs, weights = (
        shape.layers / 4 * sum(total_seconds(seconds).item() for seconds in parts)
        for parts in passes
    )
    played = bubble(schedule, 4, 8, times=(forward, inputs, weights))
    found = step(stack, shape=shape, pp=4, microbatches=8, schedule=schedule).parts["bubble"]
    assert found.item() == pytest.approx(played, rel=1e-3)


@pytest.mark.parametrize(
    ("chunks", "seconds", "peak"), [(1, 40.96, 82.5), (2, 32.0, 72.7)], ids=["1f1b", "interleaved"]
)
def test_torchtitan_405b_takes_what_was_published(chunks: int, seconds: float, peak: float) -> None:
    """512 H100 of 500 W (TorchTitan, December 2024, table 5), 100 and 128 tokens/s a GPU; with as
    many microbatches as pipeline ranks, the default then."""
    grid = grid_of(
        shard=8,
        tp=8,
        pp=8,
        zero=3,
        chunks=chunks,
        microbatch_size=4,
        microbatches=8,
        recompute=2,
        schedule="1f1b" if chunks == 1 else "interleaved",
    )
    shape, stack = models.load("llama-3.1-405b"), load_stack("torchtitan")
    job = (shape, machines.load("h100-500w"), stack, grid, 8192, "fp8")
    assert step_time(*job).step.item() == pytest.approx(seconds, rel=0.05)
    assert peak_memory(*job).reserved.item() / 2**30 == pytest.approx(peak, rel=0.2)


# --- Tensor parallelism in fp8


def test_transformer_engine_gathers_rounded_inputs() -> None:
    """All-gathers of half the bytes beside reduce-scatters of 16 bits."""
    degrees: dict[str, Any] = {"tp": 8, "shard": 8, "zero": 1, "microbatches": 8}
    wide, narrow = (step(precision=each, **degrees).parts["tp"].item() for each in ("bf16", "fp8"))
    assert 0.7 < narrow / wide < 0.85

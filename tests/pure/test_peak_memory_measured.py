"""The planner's memory against what was measured: layers on an H200, and a sweep of nanotron."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from one_layout import H100, LARGE, SMALL, activations_of, grid_of, memory_of

from benchmarks.nanotron_replay import RankReplay
from fivefold.core import hardware as machine
from fivefold.core.model import presets as models
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import Shape
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.stack import EAGER_MEMORY, StackMemory
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.memory.categories import fits
from fivefold.cost.stages.ranks import rank_stages
from fivefold.planner.estimate import rank_memory
from fivefold.planner.setting import estimate_setting

GIB = 2**30
NANOTRON = load_stack("nanotron")

# Bytes of a token in one layer between forward and backward, on one H200 with torch 2.11 in bf16,
# 2026-11-16: none, selective and full recomputation; how, in docs/planner.md.
LAYERS = {"llama-3.1-8b": (139_392, 94_336, 8_192), "llama-3.2-1b": (75_904, 51_328, 4_096)}
# One rank of 22 jobs, compiled, on the same day: torch's max_memory_allocated.
RANKS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200-compiled.jsonl"

# Every 23rd of its runs, by a hash of their names: dp, tp, pp, microbatches, rows of each, ZeRO
# stage; on the first rank, GiB that stay over a step, and what torch reserved at the most.
RUNS = (
    (SMALL, 16, 1, 1, 16, 1, 0, 25.07, 36.66),
    (SMALL, 2, 1, 4, 128, 1, 0, 11.32, 20.84),
    (SMALL, 8, 2, 1, 32, 1, 1, 7.45, 12.26),
    (SMALL, 1, 8, 1, 16, 16, 0, 3.39, 38.27),
    (SMALL, 1, 4, 4, 16, 16, 0, 3.1, 49.89),
    (SMALL, 2, 8, 1, 16, 8, 0, 3.45, 21.02),
    (SMALL, 4, 8, 1, 4, 16, 0, 3.7, 25.67),
    (SMALL, 2, 8, 2, 8, 16, 1, 2.43, 21.03),
    (SMALL, 1, 8, 8, 8, 32, 0, 2.05, 63.87),
    (SMALL, 4, 8, 1, 64, 1, 1, 2.23, 3.78),
    (LARGE, 2, 2, 2, 128, 1, 0, 45.93, 63.61),
    (LARGE, 1, 2, 8, 256, 1, 0, 14.83, 33.55),
    (LARGE, 4, 8, 2, 8, 8, 1, 8.32, 46.46),
    (SMALL, 2, 8, 2, 32, 4, 1, 2.05, 5.97),
    (LARGE, 2, 16, 1, 8, 16, 1, 9.87, 36.46),
    (SMALL, 2, 16, 1, 128, 1, 1, 1.43, 2.71),
    (LARGE, 2, 8, 1, 128, 1, 1, 17.69, 17.83),
    (LARGE, 4, 4, 4, 32, 2, 1, 8.77, 23.44),
)


@pytest.mark.parametrize(
    "memory", [stacks.FIVEFOLD.memory, EAGER_MEMORY], ids=["compiled", "eager"]
)
@pytest.mark.parametrize(("model", "measured"), LAYERS.items(), ids=list(LAYERS))
def test_a_layer_keeps_what_an_h200_kept(
    memory: StackMemory, model: str, measured: tuple[int, int, int]
) -> None:
    shape = models.load(model)
    layer, routed = (
        activations_of(shape, stacks.FIVEFOLD, grid_of(), 8192, memory),
        shape.moe is not None,
    )
    found = (layer.saved(routed), layer.saved(routed, Recompute.parse("selective")), layer.inputs())
    assert [each.item() for each in found] == pytest.approx(measured, rel=2e-3)


def test_compiled_ranks_take_what_an_h200_took() -> None:
    """Bytes of tensors: the mean within 1%, each within 3%. They held all logits at once; one that
    copied all tokens around tensor collectives, which no rank does now, is left out."""
    setting, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, "compiled", 1.0)
    memory = replace(setting.stack.memory, chunks_loss=False)
    setting = replace(setting, stack=replace(setting.stack, memory=memory))
    errors: list[float] = []
    for job in map(json.loads, RANKS.read_text("utf-8").splitlines()):
        if "tp=" in job["layout"] and "microbatch_size" in job["said"]:
            continue
        words = ({} if "pp=" in job["layout"] else {"microbatches": 1}) | job["said"]
        layout = {"layout": job["layout"], "machine": "h200", "ep_nodes": 1}
        plan = resolve(PlanOptions(job["model"], **layout, **words))
        parts = rank_memory(plan, setting, job["rank"])
        found = sum(
            size for name, size in parts.items() if name not in ("context", "nccl", "margin")
        )
        errors.append(abs(found / job["measured"][0] - 1))
    assert len(errors) == 21
    assert max(errors) < 0.03 and sum(errors) / len(errors) < 0.01


def test_what_nanotron_reserved() -> None:
    """The median: runs of one shape may lie far apart, by what their inputs do not tell."""
    errors: list[float] = []
    for shape, dp, tp, pp, m, rows, zero, _, measured in RUNS:
        grid = grid_of(
            shard=dp, tp=tp, pp=pp, microbatches=m, microbatch_size=rows, zero=zero, sp=tp > 1
        )
        found = memory_of(shape, grid, NANOTRON)
        errors.append(abs(found.reserved.item() / GIB / measured - 1))
        assert fits(found, H100), (dp, tp, pp)
    assert float(np.median(errors)) <= 0.08


def test_what_stays_of_nanotron() -> None:
    """States, buckets, gather buffers, and the flattened weights of a ZeRO-1 step, to 0.1 GiB."""
    for shape, dp, tp, pp, m, rows, zero, measured, _ in RUNS:
        grid = grid_of(
            shard=dp, tp=tp, pp=pp, microbatches=m, microbatch_size=rows, zero=zero, sp=tp > 1
        )
        first = memory_of(shape, grid, NANOTRON).first
        number = first["weights"].item() / 2
        summed = 4 + (2 if zero == 0 and dp > 1 else 0)
        flat = 4 + 2 / dp if zero == 1 and dp > 1 else 0
        gathered = 2 * 2 * rows * 4096 * shape.width if tp > 1 else 0
        owned = first["weights"] + first["master"] + first["optimizer"]
        found = owned.item() + (summed + flat) * number + gathered + NANOTRON.memory.pool_bytes
        assert found / GIB == pytest.approx(measured, abs=0.1), (dp, tp, pp)


def test_nanotron_splits_layers_by_cost() -> None:
    """A head of four layers on sixteen: twenty in all, so five for each of four stages."""
    first, last = rank_stages(SMALL, "greedy", grid_of(pp=4, microbatches=8), 4096)
    assert (first.layers.all, last.layers.all, first.flight, last.flight) == (5, 1, 4, 1)


# --- What nanotron's allocator caches

# dp, ZeRO stage, rows of a microbatch, and what torch reserved, with tp 1 and pp 1: GiB.
ALONE = ((16, 0, 1, 36.66), (8, 0, 2, 50.18), (8, 1, 1, 24.24), (16, 1, 2, 35.03))


def test_nanotron_replayed_through_the_allocator_takes_what_it_took() -> None:
    """Tensors from its source and torch's rules alone, to 0.05 GiB."""
    sizes = {"layers": 16, "hidden": 2048, "ffn_hidden": 8192, "heads": 32, "vocab": 131072}
    for dp, zero, rows, measured in ALONE:
        layout = {"dp": dp, "tp": 1, "pp": 1, "zero": zero, "micro_batch": rows}
        row = sizes | layout | {"seq_len": 4096, "params_b": 1.342, "global_batch": 256}
        assert RankReplay(row, ahead=True).run() == pytest.approx(measured, abs=0.05)


COUNTED = load_stack("nanotron", "hugging-face")  # without what was fitted to the sweep
assert COUNTED.memory.cache is not None
FORWARD = int(COUNTED.memory.cache.forward_launches)
BACKWARD = int(COUNTED.memory.cache.backward_launches)


def cached_blocks(shape: Shape, **said: int) -> float:
    """What the first rank needs beside live tensors, in blocks of all tokens of a microbatch."""
    first = memory_of(shape, grid_of(**said), COUNTED).first
    beside = first["margin"] - COUNTED.memory.fragments * first["activations"]
    return beside.item() / (2 * said.get("microbatch_size", 1) * 4096 * shape.width)


def queued_blocks(layers: int, tp: int, *, alone: bool) -> float:
    """Blocks that the last kernels of a full launch queue have read when a forward ends: two a
    layer with their shards, spread over its kernels; before it, unless alone, another backward."""
    backward = [2 * (1 + 2.5 / tp) / BACKWARD] * BACKWARD * layers
    forward = [2 * (1 + 1 / tp) / FORWARD] * FORWARD * layers
    return sum((forward if alone else backward + forward)[-stacks.LAUNCH_QUEUE :])


@pytest.mark.parametrize("tp", [2, 8, 32])
def test_blocks_that_wait_for_the_gpu_are_those_of_a_full_launch_queue(tp: int) -> None:
    for shape in (SMALL, LARGE):
        found = cached_blocks(shape, tp=tp, microbatches=8)
        assert found == pytest.approx(queued_blocks(shape.layers, tp, alone=False))
        first = cached_blocks(shape, tp=tp, microbatches=1)
        assert first == pytest.approx(queued_blocks(shape.layers, tp, alone=True))
    assert cached_blocks(SMALL, tp=tp, microbatches=1) < cached_blocks(SMALL, tp=tp, microbatches=8)
    assert cached_blocks(SMALL, tp=1, microbatches=8) == pytest.approx(0.0)


def test_in_a_pipeline_of_two_the_host_is_ahead_of_a_gpu_with_much_work() -> None:
    said = {"tp": 8, "pp": 2, "microbatches": 8}
    rows = [cached_blocks(SMALL, microbatch_size=each, **said) for each in (1, 16, 256)]
    ten = queued_blocks(2 * 10, 8, alone=True)  # ten layers, two microbatches in flight
    assert rows[0] < 0.05 * ten < 0.5 * ten < rows[1] < rows[2] == pytest.approx(ten, rel=0.02)


def test_a_step_fills_the_queue_by_its_kernels() -> None:
    """It is half full in a step with twice as many kernels as it holds, and fuller in longer ones;
    in a pipeline every message starts it anew."""

    def fullness(**said: int) -> float:
        """What is reserved beside live tensors, of what is needed for a full queue."""
        memory = memory_of(SMALL, grid_of(tp=8, microbatch_size=2, **said), COUNTED)
        live = sum(size.item() for name, size in memory.first.items() if name != "margin")
        beside = memory.reserved.item() + COUNTED.memory.context_bytes - live
        fragments = COUNTED.memory.fragments * memory.first["activations"].item()
        return beside / (memory.first["margin"].item() - fragments)

    microbatches = 2 * stacks.LAUNCH_QUEUE / ((FORWARD + BACKWARD) * SMALL.layers)
    for count in (2, 4, 64):
        assert fullness(microbatches=count) == pytest.approx(count / (count + microbatches))
    assert fullness(microbatches=8, pp=4) == pytest.approx(1.0)


def test_a_pool_that_met_the_limit_is_halfway_between_its_need_and_the_limit() -> None:
    grid = grid_of(tp=32, microbatches=64, microbatch_size=64)
    found, limit = memory_of(SMALL, grid, COUNTED), H100.memory - COUNTED.memory.context_bytes
    live = sum(each.item() for name, each in found.first.items() if name != "margin")
    need = live - COUNTED.memory.context_bytes
    assert found.reserved.item() == pytest.approx((need + limit) / 2)


def test_zero_1_keeps_the_flat_weights_of_its_update() -> None:
    """Two copies of all weights in 2 bytes and one of its own, less its moments in 8."""
    for dp in (2, 4, 16):
        found = memory_of(LARGE, grid_of(shard=dp, zero=1, pp=8, microbatches=8), COUNTED).first
        number = found["weights"].item() / 2
        beside = found["margin"] - COUNTED.memory.fragments * found["activations"]
        assert beside.item() == pytest.approx((2 * 2 + 2 / dp - 8 / dp) * number)

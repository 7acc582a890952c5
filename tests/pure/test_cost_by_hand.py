"""Parts of the cost model beside values computed by hand: exposed data time, overlap, loss memory,
checkpoint time and failure rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_layout import H100, LARGE, activations_of, grid_of

from fivefold.core.plan.failures import FailureDomain, FailureRates
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.grid import Array
from fivefold.cost.hardware.stack import EAGER_MEMORY, FIVEFOLD, SoftwareStack
from fivefold.cost.layer.time import LayerTimer
from fivefold.cost.memory.stage_gradients import LossMemory
from fivefold.cost.step.checkpoint_time import save_cost
from fivefold.cost.step.overlap import SplitGemms, hide_exchange, shown_seconds, tensor_seconds
from fivefold.cost.step.time import data_seconds

NVLINK = 0.80 * 450e9  # bytes/s of a GPU, by H100's share
# Links without latency, so that a collective is its bytes.
PLAIN = replace(
    H100,
    tiers=tuple(replace(tier, link=replace(tier.link, latency=0.0)) for tier in H100.tiers),
)


def of(*values: float) -> Array:
    return np.array(values)


def exposed(window: float, compute: float = 0.0, **said: Any) -> float:
    """What shows of the data axis of LARGE over 8 ranks, in software that reduces in 2 bytes."""
    stack = SoftwareStack("by hand", gradient_bytes=2, **said.pop("stack", {}))
    grid = grid_of(shard=8, **said)
    work = LayerTimer(LARGE, PLAIN, stack, grid, 4096, "bf16")
    return data_seconds(work, None, of(window), of(compute)).item()


# 2 bytes of each gradient scattered and 2 of each weight gathered, 7 of 8 from other ranks.
LAYER = 4 * 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
WEIGHTS = 32 * LAYER + 2 * 131072 * 4096
ONE_WAY = 2 * WEIGHTS * 7 / 8 / NVLINK


def test_data_time_shows_where_no_backward_is_left_to_hide_it() -> None:
    assert exposed(0.0, zero=1) == pytest.approx(2 * ONE_WAY)
    # A long backward hides all but the collectives of one layer, and is 15% of the rest longer.
    last = 2 * ONE_WAY / 32
    assert exposed(10.0, zero=1) == pytest.approx(last + 0.15 * (2 * ONE_WAY - last))
    half = ONE_WAY
    assert exposed(half, zero=1) == pytest.approx(half + 0.15 * half)
    bare = {"gradients_hidden": False}
    assert exposed(10.0, zero=1, stack=bare) == pytest.approx(2 * ONE_WAY)
    # ZeRO-2 reduces in the backward of each of 4 microbatches, which hide four times as much.
    moved = 5 * ONE_WAY
    shown = moved - 4 * 0.01
    assert exposed(0.01, zero=2, microbatches=4) == pytest.approx(shown + 0.15 * 0.04)
    # ZeRO-3 gathers twice and reduces once for a microbatch, beside all of its compute.
    moved = 2 * 3 * ONE_WAY
    shown = moved - 2 * 0.02
    assert exposed(0.0, 0.02, zero=3, microbatches=2) == pytest.approx(shown + 0.15 * 0.04)


def test_overlap_hides_a_window_and_slows_it_down() -> None:
    found = shown_seconds(of(10.0, 3.0, 3.0), of(4.0, 4.0, 4.0), of(0.0, 0.0, 1.0))
    assert found == pytest.approx([6 + 0.15 * 4, 0.15 * 3, 1 + 0.15 * 2])
    assert shown_seconds(of(10.0), of(4.0), slowdown=0.0) == pytest.approx([6.0])
    gemms = SplitGemms(columns=of(2.0), rows=of(1.0), weights=of(4.0))
    reduced = tensor_seconds("reduce_scatter", of(3.0), of(0.0), 1, gemms)
    assert reduced.forward == pytest.approx([3.0]), "one chunk overlaps with nothing"
    assert reduced.backward == pytest.approx([0.15 * 3]), "beside the weight gradients"
    assert reduced.late == pytest.approx([3 - 0.15 * 3]), "which a schedule may defer"
    chunked = tensor_seconds("all_gather", of(3.0), of(1.0), 2, gemms)
    assert chunked.forward == pytest.approx([2 + 0.15 * 1]), "of two chunks, one beside a matmul"
    assert chunked.backward == pytest.approx([2.5 + 0.15 * 0.5 + 1 + 0.15 * 2])


def test_an_exchange_hides_behind_compute_and_behind_the_host() -> None:
    def left(host: float, stack: SoftwareStack, shared: float = 0.0) -> list[float]:
        passes = tuple({"ep": of(2.0), "products": of(1.0)} for _ in range(3))
        weights = {"products": of(1.0)}
        hide_exchange(passes, weights, shared, grid_of(ep=8), stack, of(host))
        return [each["ep"].item() for each in passes]

    apart = SoftwareStack("by hand")
    assert left(0.0, apart) == [2.0] * 3
    paired = replace(apart, paired_layers=True)
    assert left(0.0, paired) == pytest.approx([(2 + 0.15 * 4) / 3] * 3), "6 beside 4 of compute"
    assert left(5.0, paired) == pytest.approx([(1 + 0.15 * 5) / 3] * 3), "or beside 5 of the host"
    # Dispatch, a half, beside shared experts, whose backward is twice as long.
    beside = replace(apart, shared_overlap=True)
    forward, backward, again = left(0.0, beside, shared=0.4)
    assert forward == again == pytest.approx(1 + 0.6 + 0.15 * 0.4)
    assert backward == pytest.approx(1 + 0.2 + 0.15 * 0.8)


def test_loss_memory() -> None:
    words = 1024 * 131072  # few enough for one chunk

    def memory(shape: Any = LARGE, said: Any = FIVEFOLD.memory, **keys: Any) -> LossMemory:
        grid = grid_of(**keys)
        return LossMemory(activations_of(shape, FIVEFOLD, grid, 1024, said), of(1024.0))

    assert memory().chunks == 1
    assert memory().computed() == pytest.approx([4 * words]), "logits and their gradient"
    assert memory(tp=4, sp=False).computed() == pytest.approx([4 * words / 4])
    assert memory(said=EAGER_MEMORY).computed() == pytest.approx([14 * words])
    assert memory(said=EAGER_MEMORY, tp=4).computed() == pytest.approx([19 * words / 4])
    capped = replace(LARGE, logit_cap=30.0)
    assert memory(capped).computed() == pytest.approx([6 * words]), "what the cap reads"
    assert memory().other_losses() == [0.0] and memory().other_inputs() == [0.0]
    ahead = memory(replace(LARGE, mtp=2))
    assert ahead.other_losses() == pytest.approx([2 * 2 * words]), "two more losses in 2 bytes"
    assert ahead.other_inputs() == pytest.approx(2 * ahead.input())
    every = memory(pp=4, microbatches=8, schedule="gpipe")
    assert every.other_losses() == pytest.approx([7 * 2 * words]), (
        "no backward before the last forward"
    )
    assert memory().gradients() == pytest.approx([2 * 4096 * (1024 + 131072)])


def test_checkpoint_time() -> None:
    plan = resolve(PlanOptions("llama-3.1-8b", layout="dp=16", zero=1, machine="h100"))
    size = 12 * 8_030_261_248  # masters and two moments in float32
    link = 0.85 * H100.host.link.bandwidth
    found = save_cost(plan, H100, "disk")
    assert found.bytes == size
    assert found.stall == pytest.approx(size / 16 / link), "each rank copies its shard"
    assert found.write == pytest.approx(size / 2e9), "1 GB/s for each of 2 hosts"
    assert found.slowed == pytest.approx(0.038 * size / 2e9), "steps meanwhile are 3.8% longer"
    assert save_cost(plan, H100, "disk", storage=5e9).write == pytest.approx(size / 5e9)
    assert save_cost(plan, H100, "memory").write == pytest.approx(size / (16 * 50e9))
    assert save_cost(plan, H100, "disk", gpus=32_768).write == pytest.approx(size / 2e12)
    whole = resolve(PlanOptions("llama-3.1-8b", layout="dp=4 tp=2 pp=2", zero=0, machine="h100"))
    assert save_cost(whole, H100, "disk").stall == pytest.approx(size / 4 / link), "one replica"


def test_failure_rates() -> None:
    domain = FailureDomain(gpus=100, gpus_per_host=8)
    assert (domain.hosts, domain.switches) == (13, 4)
    rates = FailureRates(gpu=50_000.0, host=20_000.0, switch=100_000.0).per_second(domain)
    assert rates == pytest.approx(
        {"gpu": 100 / 50_000 / 3600, "host": 13 / 20_000 / 3600, "switch": 4 / 100_000 / 3600}
    )
    assert FailureRates(gpu=1.0).per_second(domain) == {"gpu": pytest.approx(100 / 3600)}
    assert domain.hosts_lost("switch") == 4 and domain.hosts_lost("gpu") == 1
    assert FailureDomain(8, 8).hosts_lost("switch") == 1

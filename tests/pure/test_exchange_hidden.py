"""Exchange with experts that compute hides, and DeepSeek-V3 as it was trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from one_layout import grid_of

from fivefold.core import hardware as machines
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import named_schedule
from fivefold.core.schedule.schedule import FORWARD, Overlap, actions_of
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.stack import SoftwareStack
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.layer.time import LayerTimer
from fivefold.cost.memory.categories import fits, peak_memory
from fivefold.cost.step.overlap import paired_share, shown_seconds
from fivefold.cost.step.time import step_time
from fivefold_score.outcome import score_row
from fivefold_score.published import cases

V3, H800 = models.load("deepseek-v3"), machines.load("h800")
DEEPSEEK = load_stack("deepseek")
MOE = 4  # a layer with experts


def exchange(stack: SoftwareStack, schedule: str = "1f1b", precision: str = "bf16") -> float:
    """Seconds of exchange that one layer shows, forward and backward."""
    chunks = 2 if schedule == "dualpipe-v" else 1
    grid = grid_of(pp=8, shard=64, ep=64, zero=1, microbatches=64, chunks=chunks, schedule=schedule)
    layer = LayerTimer(V3, H800, stack, grid, 4096, precision).layer(MOE)
    return (layer.forward["ep"] + layer.inputs["ep"]).item()


@pytest.mark.parametrize(("schedule", "chunks"), [("dualpipe", 1), ("dualpipe-v", 2)])
def test_the_share_of_pairs_is_that_of_the_schedule(schedule: str, chunks: int) -> None:
    for ranks, count in ((4, 16), (8, 32), (16, 120)):
        order = named_schedule(schedule, ranks, count, chunks).order
        steps = [step for mine in order for step in mine]
        forwards = sum(a.kind == FORWARD for step in steps for a in actions_of(step))
        pairs = sum(isinstance(step, Overlap) for step in steps)
        grid = grid_of(pp=ranks, microbatches=count, chunks=chunks, schedule=schedule)
        assert paired_share(grid).item() == pytest.approx(pairs / forwards, abs=0.04)
    assert paired_share(grid_of(pp=8, microbatches=64)).item() == 0


def test_pairs_and_shared_experts_hide_the_exchange() -> None:
    """DualPipe hides what its pairs cover, other schedules what shared experts do."""
    plain = replace(stacks.FIVEFOLD, shared_overlap=False)
    alone = exchange(plain)
    assert exchange(stacks.FIVEFOLD) < alone
    for schedule in ("dualpipe", "dualpipe-v"):
        assert exchange(plain, schedule) < 0.4 * alone
    assert exchange(replace(plain, paired_layers=True)) < exchange(plain, "dualpipe")
    assert exchange(replace(plain, narrow_dispatch=True), precision="fp8") == pytest.approx(
        0.75 * exchange(plain, precision="fp8"), rel=0.01
    )


def test_what_is_longer_than_its_window_shows() -> None:
    long, short = np.array([3.0]), np.array([1.0])
    assert shown_seconds(long, short, slowdown=0.0).item() == 2
    assert shown_seconds(short, long, slowdown=0.1).item() == pytest.approx(0.1)
    assert shown_seconds(short, long, 0.5, slowdown=0.0).item() == 0.5


# DeepSeek-V3 technical report: 2.664M H800 hours for 14.8T tokens, 62.9M tokens a step.
V3_RUN: dict[str, Any] = {
    "id": "deepseek-v3-2048",
    "model": "DeepSeek-V3 (w/ MTP)",
    "layers": 61,
    "hidden": 7168,
    "heads": 128,
    "vocab": 129280,
    "experts": 256,
    "topk": 8,
    "seq_len": 4096,
    "gpu": "h800",
    "gpus": 2048,
    "precision": "fp8",
    "dp": 128,
    "zero": 1,
    "tp": 1,
    "pp": 16,
    "schedule": "dualpipe",
    "ep": 64,
    "micro_batch": 1,
    "global_batch": 15360,
    "recompute": "selective",
    "achieved": {"step_time_s": 2.664e6 * 3600 / 14.8e12 * 62.9e6 / 2048},
}


@pytest.mark.parametrize("chunks", [None, 1, 2])
def test_deepseek_v3_fits_and_takes_as_long_as_published(chunks: int | None) -> None:
    """Sources count DualPipe's two stages of a rank as two chunks or not; neither takes no time."""
    found = score_row({**V3_RUN, "vpp": chunks})
    assert found.fits and found.time_error < 0.15
    assert found.seconds.low == pytest.approx(19.3, abs=0.5)


def test_an_open_microbatch_is_one_that_the_schedule_can_run() -> None:
    found = cases({**V3_RUN, "micro_batch": None})
    assert [case.grid.microbatch_size.item() for case in found] == [1, 2]


def test_every_part_of_deepseeks_stack_counts() -> None:
    """Without what its report describes, V3 takes longer or does not fit."""
    case = cases(V3_RUN)[0]
    shape, machine, stack, grid, seq, precision = case.arguments

    def seconds(**changed: Any) -> float:
        other = replace(stack, **changed)
        return step_time(shape, machine, other, grid, seq, precision).step.item()

    whole = seconds()
    assert seconds(compute_share=1.0) < 0.97 * whole
    assert seconds(weight_gradient_share=1.0) < 0.9 * whole
    assert seconds(narrow_dispatch=False) > whole
    for name, value in (("narrow_inputs", False), ("remakes_heads", False), ("moment_bytes", 12)):
        other = replace(stack, memory=replace(stack.memory, **{name: value}))
        peak = peak_memory(shape, machine, other, grid, seq, precision)
        assert peak.total > peak_memory(*case.arguments).total
        assert name == "moment_bytes" or not fits(peak, machine).item()

"""Closed forms held against the clock, and the space of layouts against the rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.definition import Family
from fivefold.cost.grid import LayoutGrid, grid_of_plan
from fivefold.cost.hardware.stack import FIVEFOLD
from fivefold.cost.memory.categories import peak_memory
from fivefold.cost.step.time import step_time
from fivefold.planner.estimate import (
    estimate_plan,
    rank_memory,
    rank_timeline,
    simulate_step,
)
from fivefold.planner.search import search_layouts
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import (
    Degrees,
    SearchSpace,
    all_degrees,
    layout_blocks,
    layout_of,
    options_of,
)
from tests.selection import all_cases, shuffled

H100 = EstimateSetting(machine.load("h100"), FIVEFOLD, "bf16")
MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3",
)  # fmt: skip
SYNCHRONOUS = [family for family in FAMILIES if not family.asynchronous]
CASES = 500
NEAR = 0.02  # of the played step
EXACT = 1e-9
EXCESS = 1e-3  # chains of DualPipeV may have a few messages too many
SPACES = (("llama-3.1-8b", 64, 128), ("tiny", 24, 48), ("mixtral-8x7b", 32, 64))


def plans(family: Family, count: int) -> Iterator[Plan]:
    """Random legal plans under one schedule, the same every time."""
    rng = random.Random(family.name)
    while count:
        pp = rng.choice((2, 3, 4, 6, 8, 12, 16))
        chunks = family.min_chunks if family.max_chunks else rng.choice((2, 3, 4, 8))
        degrees = f"dp={rng.choice((1, 2, 8))} tp={rng.choice((1, 2, 8))} pp={pp}"
        options = PlanOptions(
            model=rng.choice(MODELS),
            layout=f"{degrees} cp={rng.choice((1, 2))}",
            zero=rng.choice((0, 1)),
            schedule=family.name,
            chunks=chunks,
            microbatches=pp * rng.choice((1, 2, 4, 8)),
            microbatch_size=rng.choice((1, 2)),
            seq=rng.choice((2048, 4096)),
            recompute=rng.choice(("none", "selective", "full")),
        )
        try:
            yield resolve(options)
        except FivefoldError:
            continue
        count -= 1


def ranked(plan: Plan, *, simulated: bool) -> float:
    """The step by which a search ranks: first by its bound, then simulated with all others."""
    asked = (plan.shape, H100.machine, FIVEFOLD, grid_of_plan(plan), plan.batch.seq, H100.precision)
    return step_time(*asked, simulated=simulated).step.item()


@pytest.mark.parametrize("family", SYNCHRONOUS, ids=lambda family: family.name)
def test_what_ranks_is_what_the_clock_says(family: Family) -> None:
    """500 plans over all schedules: the bound is never above the clock, and played it is the same.

    Bounds decide what is played at all. One above the clock could hide the best layout.
    """
    of_family = -(-CASES // len(SYNCHRONOUS))
    taken = shuffled(range(of_family))[: None if all_cases() else of_family // 3]
    for number, plan in enumerate(plans(family, of_family)):
        if number not in taken:
            continue
        step = simulate_step(plan, H100).step
        words = f"{number} {plan.shape.name} {plan.layout} m={plan.batch.microbatches}"
        assert ranked(plan, simulated=True) == pytest.approx(step, rel=EXACT), words
        assert ranked(plan, simulated=False) <= step * (1 + EXCESS), words


@pytest.mark.parametrize("family", SYNCHRONOUS, ids=lambda family: family.name)
def test_long_schedules_are_told_from_shorter_ones(family: Family) -> None:
    """Beyond 8 microbatches a rank a search does not walk to the end."""
    for model, pp, rounds in product(("llama-3.1-8b", "deepseek-v3"), (2, 4), (9, 24, 64)):
        options = PlanOptions(
            model=model,
            layout=f"pp={pp}",
            schedule=family.name,
            chunks=family.min_chunks if family.max_chunks else 3,
            microbatches=pp * rounds,
            seq=2048,
        )
        plan = resolve(options)
        error = ranked(plan, simulated=True) / simulate_step(plan, H100).step - 1
        assert abs(error) <= NEAR, f"{model} pp={pp} m={pp * rounds}: {error:+.2%}"


def test_a_search_finds_what_playing_everything_finds() -> None:
    """The best layouts of a small space, all of it simulated: none is lost to its bound."""
    fixed = {"tp": 2, "cp": 1, "zero": 1, "recompute": "none", "offload": "none"}
    space = SearchSpace(models.load("llama-3.1-8b"), 16, 2048, 64, (8,), fixed)
    steps: list[float] = []
    for block in layout_blocks(space):
        legal = np.broadcast_to(block.legal, block.shape)
        columns = (np.broadcast_to(each, block.shape)[legal] for each in block.grid.columns())
        grid = LayoutGrid(*columns)
        job = H100.arguments(space.shape, grid, space.seq)
        fits = peak_memory(*job).total <= H100.capacity
        steps += np.broadcast_to(step_time(*job, simulated=True).step, fits.shape)[fits].tolist()
    assert len(steps) > 200
    found = search_layouts(space, H100, 48).best[:12]
    assert [one.seconds for one in found] == pytest.approx(sorted(steps)[:12], rel=EXACT)


def test_without_a_pipeline_both_are_the_same() -> None:
    for layout in ("dp=8", "dp=2 tp=4", "tp=8 cp=2"):
        plan = resolve(PlanOptions(model="llama-3.1-8b", layout=layout, microbatches=4, zero=1))
        asked = (
            plan.shape,
            H100.machine,
            FIVEFOLD,
            grid_of_plan(plan),
            plan.batch.seq,
            H100.precision,
        )
        closed, played = step_time(*asked), simulate_step(plan, H100)
        assert played.step == pytest.approx(closed.step.item(), rel=1e-12)
        assert played.bubble == 0
        for name, seconds in played.parts.items():
            assert seconds == pytest.approx(closed.parts[name].item(), rel=1e-9, abs=1e-12)


def test_parts_are_the_whole() -> None:
    plan = resolve(PlanOptions(model="mixtral-8x7b", layout="dp=4 tp=2 pp=4 ep=4", schedule="zb-v"))
    found = estimate_plan(plan, H100)
    assert sum(found.parts.values()) == pytest.approx(found.step)
    assert sum(found.breakdown().values()) == pytest.approx(found.step)
    assert found.bubble * found.step == pytest.approx(found.parts["bubble"])
    busiest = simulate_step(plan, H100).timeline
    inside = found.step - sum(found.parts[name] for name in ("dp", "optimizer", "fixed"))
    assert inside == pytest.approx(busiest.makespan * FIVEFOLD.factor)


@pytest.mark.parametrize("pp_rank", [0, 1, 2])
def test_activations_of_a_timeline_are_those_of_its_own_rank(pp_rank: int) -> None:
    """Under 1F1B a rank holds as many microbatches as there are ranks from it to the last."""
    plan = resolve(PlanOptions("llama-3.1-8b", layout="pp=3", microbatches=6, seq=4096))
    rows = rank_timeline(plan, H100, plan.layout.rank(pp=pp_rank))
    parts = rank_memory(plan, H100, plan.layout.rank(pp=pp_rank))
    stays = max(row.bytes for row in rows) - parts["activations"]
    shares = [round((row.bytes - stays) / parts["activations"] * (3 - pp_rank), 6) for row in rows]
    started, ended, counts = 0, 0, list[int]()
    for row in rows:
        started += "F" in row.action
        counts.append(started - ended)
        ended += "B" in row.action
    assert shares == counts and max(counts) == 3 - pp_rank


def test_a_step_of_1f1b_is_played_as_the_textbook_says() -> None:
    """Even stages without a head that weighs: (m + p - 1) times one microbatch in one stage."""
    options = PlanOptions(model="llama-3.1-8b", layout="pp=4", microbatches=8, set={"vocab": "64"})
    plan = resolve(options)
    busy = simulate_step(plan, H100)
    assert [len(layers) for layers in plan.stages] == [8] * 4
    assert busy.bubble * busy.step == pytest.approx(
        3 / 8 * sum(v for k, v in busy.parts.items() if k not in _AROUND), rel=0.01
    )


_AROUND = ("bubble", "pp", "dp", "optimizer", "fixed")


def test_mfu_is_model_flops_over_the_peak() -> None:
    plan = resolve(PlanOptions(model="llama-3.1-8b", layout="dp=8", microbatches=4, zero=3))
    found = estimate_plan(plan, H100)
    speed = plan.batch.tokens / found.step / 8
    assert found.tokens_per_s_per_gpu == pytest.approx(speed)
    assert found.mfu == pytest.approx(5.147e10 * speed / H100.machine.peak("bf16"), rel=1e-3)
    assert found.gpu_hours(1e12) == pytest.approx(1e12 / speed / 3600)
    assert found.days(1e12) == pytest.approx(1e12 / speed / 8 / 86_400)


@pytest.mark.parametrize(("model", "gpus", "batch"), SPACES, ids=lambda each: str(each))
def test_every_layout_of_the_space_is_legal(model: str, gpus: int, batch: int) -> None:
    """100 candidates of each model: resolve takes them, and they come back the same."""
    rng = random.Random(model)
    space = SearchSpace(models.load(model), gpus, 2048, batch, (8,))
    spaces = list(layout_blocks(space))
    for _ in range(100):
        block = rng.choice(spaces)
        legal = np.flatnonzero(np.broadcast_to(block.legal, block.shape))
        where = np.unravel_index(rng.choice(legal), block.shape)
        grid = block.grid.at(tuple(int(each) for each in where))
        options = options_of(grid, PlanOptions(model=model, seq=2048))
        plan = resolve(options)
        assert plan.layout == layout_of(grid)
        assert plan.layout.world == gpus and plan.batch.sequences == batch
        again = replace(grid_of_plan(plan), offload=grid.offload, ep_nodes=grid.ep_nodes)
        assert all(
            a.item() == b.item() for a, b in zip(again.columns(), grid.columns(), strict=True)
        )


@pytest.mark.parametrize(("model", "gpus", "batch"), SPACES, ids=lambda each: str(each))
def test_every_legal_plan_is_in_the_space(model: str, gpus: int, batch: int) -> None:
    """Degrees that resolve takes are offered, as far as experts' tensor ranks are tp ranks."""
    rng = random.Random(model)
    shape = models.load(model)
    offered = set(all_degrees(SearchSpace(shape, gpus, 2048, batch, (8,))))
    seen = 0
    for _ in range(2000):
        tp, cp, pp = (rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(3))
        ep, etp = (rng.choice((1, 2, 4)), rng.choice((1, 2))) if shape.moe else (1, 1)
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or tp % etp:
            continue
        layout = f"dp={dp} tp={tp} cp={cp} pp={pp} ep={ep} etp={etp}"
        try:
            resolve(PlanOptions(model=model, layout=layout, batch=batch, seq=2048, gpus=gpus))
        except FivefoldError:
            continue
        seen += 1
        assert Degrees(tp, cp, "zigzag", pp, dp, ep, etp) in offered
    assert seen > 20

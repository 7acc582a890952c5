"""Faster hardware is never slower: not for a layout, nor for the best layout of a search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fivefold.core import hardware as machines
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import Machine, Rates
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.planner.estimate import simulate_step
from fivefold.planner.planning import best_plans, plan_request
from fivefold.planner.setting import estimate_setting

ROUNDING = 1e-9


def scaled(rates: Rates, factor: float) -> Rates:
    return replace(rates, **{name: rate * factor for name, rate in rates.known().items()})


def faster(machine: Machine, factor: float) -> Iterator[tuple[str, Machine]]:
    """The machine with one of its numbers better, and with all of them."""
    tiers = tuple(
        replace(tier, link=replace(tier.link, bandwidth=factor * tier.link.bandwidth))
        for tier in machine.tiers
    )
    near = tuple(
        replace(tier, link=replace(tier.link, latency=tier.link.latency / factor))
        for tier in machine.tiers
    )
    start = replace(machine.efficiency, start=machine.efficiency.start / factor)
    peaks, bandwidth = scaled(machine.peaks, factor), factor * machine.memory_bandwidth
    yield "flops", replace(machine, peaks=peaks)
    yield "bandwidth", replace(machine, memory_bandwidth=bandwidth)
    yield "links", replace(machine, tiers=tiers)
    yield "latency", replace(machine, tiers=near)
    yield "start", replace(machine, efficiency=start)
    yield "memory", replace(machine, memory=factor * machine.memory)
    yield "all", replace(machine, peaks=peaks, memory_bandwidth=bandwidth, tiers=tiers)


# Plans that were slower on faster hardware: host-bound passes beside exposed data traffic, and
# weight gradients that fill a pipeline's bubbles.
KNOWN = [
    PlanOptions(
        "qwen3-next-80b-a3b",
        **{"layout": "dp=2 tp=2 pp=8 ep=4", "schedule": "zb-v", "microbatches": 2, "seq": 512},
        **{"microbatch_size": 2, "recompute": "selective", "zero": 1},
    ),
    PlanOptions(
        "qwen3-30b-a3b",
        **{"layout": "dp=8 pp=2 cp=8", "microbatches": 8, "microbatch_size": 2, "seq": 8192},
        **{"recompute": "selective", "zero": 2},
    ),
    PlanOptions("llama-3.2-1b", layout="dp=8 tp=4", zero=3, microbatches=2, seq=512),
    PlanOptions(
        "deepseek-v3",
        **{"layout": "dp=8 pp=4 ep=8", "schedule": "dualpipe", "microbatches": 16, "seq": 512},
    ),
]


def drawn(salt: int, number: int) -> Iterator[Plan]:
    """Plans at random."""
    draw, found = random.Random(salt), 0
    names = ("llama-3.2-1b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2")
    while found < number:
        model = draw.choice(names)
        degrees = {axis: draw.choice((1, 2, 4, 8)) for axis in ("dp", "tp", "pp")}
        if models.load(model).moe is not None:
            degrees["ep"] = draw.choice((1, 2, 4))
        keys = {
            "layout": " ".join(f"{axis}={degree}" for axis, degree in degrees.items()),
            "zero": draw.choice((0, 1, 2, 3)),
            "microbatches": draw.choice((1, 4, 8)),
            "seq": draw.choice((128, 512, 2048)),
            "recompute": draw.choice(("none", "full")),
        }
        if degrees["pp"] > 1:
            keys["schedule"] = draw.choice(("1f1b", "zb-h1", "zb-v", "gpipe"))
        try:
            plan = resolve(PlanOptions(model, **keys))
        except FivefoldError:
            continue
        found += 1
        yield plan


def slower(plan: Plan, name: str, stack: str | None, factor: float) -> list[str]:
    """The changes of the machine after which a step of the plan is longer."""
    machine = machines.load(name)
    setting, _ = estimate_setting(machine, "bf16", 0.05, "compiled", 1.0, stack)
    before = simulate_step(plan, setting).step
    return [
        f"{plan.shape.name} {plan.layout} {plan.options} on {name}, {change}: {after / before - 1}"
        for change, better in faster(machine, factor)
        for after in [simulate_step(plan, replace(setting, machine=better)).step]
        if after > before * (1 + ROUNDING)
    ]


@pytest.mark.parametrize("options", KNOWN, ids=lambda one: one.model)
def test_a_layout_is_never_slower_on_faster_hardware(options: PlanOptions) -> None:
    for factor in (1.5, 4.0):
        assert not slower(resolve(options), "h100", None, factor)


@pytest.mark.parametrize("stack", [None, "megatron", "torchtitan", "nanotron"])
def test_no_layout_at_random_is_slower_on_faster_hardware(stack: str | None) -> None:
    for plan in drawn(salt=45, number=3):
        assert not slower(plan, "a100", stack, 2.0)


@pytest.mark.nightly
@pytest.mark.parametrize("salt", range(8))
def test_many_layouts_are_never_slower_on_faster_hardware(salt: int) -> None:
    draw = random.Random(salt)
    for plan in drawn(salt, number=12):
        stack = draw.choice((None, None, "megatron", "torchtitan", "eager", "deepseek"))
        assert not slower(plan, draw.choice(("h100", "a100", "b200")), stack, draw.choice((1.2, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", [8, 32])
def test_the_best_layout_is_never_slower_on_faster_hardware(gpus: int) -> None:
    """A search ranks by bounds and simulates what is left, so equal layouts may change places."""
    h100 = machines.load("h100")

    def best(machine: Machine) -> float:
        options = PlanOptions("llama-3.1-8b", gpus=gpus, batch=64, seq=2048)
        asked = plan_request(options, machine, {}, precision="bf16", headroom=0.05)
        return best_plans(asked, 1).fastest.step

    before = best(h100)
    for change, better in faster(h100, 2.0):
        assert best(better) <= before * 1.005, change

"""Laws of the planner that need no measurement: units, more memory, accumulation, and the order of
keys. Faster hardware is in `test_faster_hardware.py`."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_faster_hardware import KNOWN, ROUNDING, drawn, faster, scaled

from fivefold.commands.plan import plan
from fivefold.core import hardware as machines
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import Host, Link, Machine
from fivefold.core.model import presets as models
from fivefold.core.plan import plan as plan_module
from fivefold.core.plan.plan import PlanOptions, options_from, resolve
from fivefold.core.tables import to_toml
from fivefold.cost.hardware.stack import SoftwareStack
from fivefold.cost.layer import time
from fivefold.planner.error_bars import accuracy
from fivefold.planner.estimate import simulate_step
from fivefold.planner.planning import best_plans, plan_request
from fivefold.planner.serving.fit import ServingRequest
from fivefold.planner.serving.plans import plan_serving
from fivefold.planner.setting import estimate_setting
from tests.selection import salt

SECONDS = (
    *("launch", "expert_launch", "dispatch_launch", "crowding", "node_wait", "expert_wait"),
    *("message_launch", "owner_wait", "fixed"),
)
STACKS = (None, "eager", "megatron", "torchtitan", "nanotron", "deepseek", "megatron-2021")


def faster_link(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor, latency=link.latency / factor)


def in_other_seconds(machine: Machine, factor: float) -> Machine:
    """The machine by a clock that is so many times slower."""
    times = {name: getattr(machine.efficiency, name) / factor for name in HOST_TIMES}
    bandwidth = machine.host.nvme_bandwidth
    host: Host = replace(
        machine.host,
        link=faster_link(machine.host.link, factor),
        nvme_bandwidth=None if bandwidth is None else bandwidth * factor,
    )
    tiers = tuple(replace(tier, link=faster_link(tier.link, factor)) for tier in machine.tiers)
    return replace(
        machine,
        peaks=scaled(machine.peaks, factor),
        matmul_measured=scaled(machine.matmul_measured, factor),
        memory_bandwidth=machine.memory_bandwidth * factor,
        tiers=tiers,
        host=host,
        efficiency=replace(machine.efficiency, **times),
    )


HOST_TIMES = ("start", "forward_host", "backward_host")


def stack_in_other_seconds(stack: SoftwareStack, factor: float) -> SoftwareStack:
    return replace(stack, **{name: getattr(stack, name) / factor for name in SECONDS})


@pytest.mark.sample(3)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["h100", "a100", "b200", "gb200", "v100", "tpu-v5p"])
def test_a_clock_of_half_the_speed_shows_half_the_time(
    monkeypatch: pytest.MonkeyPatch, name: str, stack: str | None
) -> None:
    """Nothing else in an estimate has seconds: no threshold, no constant of a formula."""
    machine = machines.load(name)
    setting, _ = estimate_setting(machine, "bf16", 0.05, "compiled", 1.0, stack)
    plans = [*map(resolve, KNOWN), *drawn(int.from_bytes(salt().encode()) % 997, 3)]
    fast = replace(
        setting,
        machine=in_other_seconds(machine, 2.0),
        stack=stack_in_other_seconds(setting.stack, 2.0),
    )
    before = [simulate_step(job, setting).step for job in plans]
    monkeypatch.setattr(time, "KERNEL_LAUNCH", time.KERNEL_LAUNCH / 2)
    after = [simulate_step(job, fast).step for job in plans]
    assert after == pytest.approx([step / 2 for step in before], rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stack", STACKS)
def test_more_accumulation_is_never_slower_for_a_token(stack: str | None) -> None:
    """Twice the microbatches take at most twice the time: what a step pays once is paid once."""
    setting, _ = estimate_setting(machines.load("h100"), "bf16", 0.05, "compiled", 1.0, stack)
    for job in [*map(resolve, KNOWN), *drawn(int.from_bytes(salt().encode()) % 991, 6)]:
        options = job.options
        assert options.microbatches is not None
        twice = resolve(replace(options, microbatches=2 * options.microbatches))
        before, after = (simulate_step(each, setting).step for each in (job, twice))
        assert after <= 2 * before * (1 + ROUNDING), (job.shape.name, str(job.layout), options)


JOBS: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.2-1b", "gpus": 4, "batch": 32, "seq": 4096},
    {"model": "llama-3.1-8b", "gpus": 8, "batch": 32, "seq": 8192},
    {"model": "olmoe-1b-7b", "gpus": 8, "batch": 64, "seq": 4096},
    {"model": "mixtral-8x7b", "gpus": 16, "batch": 32, "seq": 4096},
    {"model": "qwen3-30b-a3b", "gpus": 16, "batch": 32, "seq": 4096},
)


def best_step(job: Mapping[str, Any], machine: Machine) -> float | None:
    """Of a search; nothing where no layout fits."""
    request = plan_request(PlanOptions(**job), machine, {}, precision="bf16", headroom=0.05)
    try:
        return best_plans(request, 1).fastest.step
    except FivefoldError:
        return None


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job['model']}-{job['gpus']}")
def test_more_memory_excludes_nothing_and_slows_nothing(job: dict[str, Any]) -> None:
    """From a memory in which nothing fits to one in which everything does."""
    h100 = machines.load("h100")
    steps = [
        best_step(job, replace(h100, memory=share * h100.memory))
        for share in (0.02, 0.3, 0.5, 0.8, 1.0, 2.0, 8.0)
    ]
    assert steps[0] is None and steps[-1] is not None
    fitting = [step for step in steps if step is not None]
    assert steps == [None] * (len(steps) - len(fitting)) + fitting
    for before, after in pairwise(fitting):
        # A search ranks by bounds, and equal layouts may change places.
        assert after <= before * 1.005


SERVED: tuple[dict[str, Any], ...] = (
    {"shape": models.load("llama-3.1-8b"), "gpus": 2},
    {"shape": models.load("llama-3.1-8b"), "gpus": 4, "concurrency": 64},
    {"shape": models.load("qwen3-30b-a3b"), "gpus": 4},
    {"shape": models.load("qwen3-30b-a3b"), "gpus": 8, "concurrency": 32},
    {"shape": models.load("llama-3.1-70b"), "gpus": 8, "ttft": 2.0, "tpot": 0.05},
)


def served(job: Mapping[str, Any], machine: Machine) -> tuple[float, float] | None:
    """Most tokens a second, and least latency as far as estimates tell; nothing where none fits."""
    try:
        choice = plan_serving(ServingRequest(machine=machine, prompt=1024, output=256, **job))
    except FivefoldError:
        return None
    return max(entry.tokens_per_s for entry in choice.plans), choice.latency.latency


@pytest.mark.sample(2)
@pytest.mark.parametrize("job", SERVED, ids=lambda job: f"{job['shape'].name}-{job['gpus']}")
def test_a_served_model_is_never_slower_on_faster_hardware(job: dict[str, Any]) -> None:
    h100 = machines.load("h100")
    before = served(job, h100)
    assert before is not None
    equal = 1 + accuracy().equal + ROUNDING
    for change, machine in faster(h100, 2.0):
        after = served(job, machine)
        assert after is not None, change
        assert after[0] >= before[0] * (1 - ROUNDING), change
        assert after[1] <= before[1] * equal, change


@pytest.mark.parametrize("job", SERVED[:3], ids=lambda job: f"{job['shape'].name}-{job['gpus']}")
def test_more_memory_serves_what_less_does(job: dict[str, Any]) -> None:
    h100 = machines.load("h100")
    shares = (0.02, 0.3, 0.6, 1.0, 2.0, 4.0)
    answers = [served(job, replace(h100, memory=share * h100.memory)) for share in shares]
    rates = [0.0 if answer is None else answer[0] for answer in answers]
    assert rates[0] == 0.0 < rates[-1]
    assert rates == sorted(rates)


KEYS: dict[str, Any] = {
    "layers": 6,
    "vocab": 32000,
    "lr": 1e-4,
    "packed": True,
    "prefetch": 2,
    "grad_dtype": "bf16",
    "qk_norm": "head",
}
JOB: dict[str, Any] = {
    "layout": "dp=2 tp=2 pp=2",
    "machine": "h100",
    "seq": 2048,
    "microbatches": 8,
}


def answer_of(target: str | Path, **keys: Any) -> dict[str, Any]:
    """What `plan` answers, without the seconds that it took."""
    answer = plan(target, **keys).to_json()
    assert answer.pop("seconds") > 0
    return answer


def orders(items: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same items in other orders."""
    dice = random.Random(salt())
    yield dict(reversed(items.items()))
    for _ in range(3):
        yield dict(dice.sample(list(items.items()), len(items)))


def test_the_order_of_keys_says_nothing() -> None:
    expected = answer_of("llama-3.2-1b", **JOB, set=KEYS)
    for keys in orders(KEYS):
        assert answer_of("llama-3.2-1b", **JOB, set=keys) == expected
    for job in orders(JOB):
        assert answer_of("llama-3.2-1b", set=KEYS, **job) == expected


def test_a_written_plan_gives_the_answer_again_in_any_order_of_its_lines(tmp_path: Path) -> None:
    first = answer_of("llama-3.2-1b", **JOB, set={"layers": 6, "vocab": 32000})
    options = options_from("llama-3.2-1b", {**JOB, "set": {"layers": "6", "vocab": "32000"}})
    text = resolve(options).to_toml(tmp_path)
    table = tomllib.loads(text)
    file = tmp_path / "plan.toml"
    answers: list[dict[str, Any]] = []
    for entries in (table, *orders(table)):
        shuffled = {
            key: next(orders(value)) if isinstance(value, dict) and value else value
            for key, value in entries.items()
        }
        file.write_text(to_toml(shuffled))
        assert plan_module.read(file) == resolve(options).options
        answers.append(answer_of(file))
    assert all(answer == first for answer in answers)


@pytest.mark.parametrize("options", KNOWN, ids=lambda options: options.model)
def test_a_resolved_plan_is_resolved_to_itself(options: PlanOptions, tmp_path: Path) -> None:
    job = resolve(replace(options, machine="h100"))
    file = tmp_path / "plan.toml"
    file.write_text(job.to_toml(tmp_path))
    again = resolve(plan_module.read(file))
    assert again.options == job.options
    setting, _ = estimate_setting(machines.load("h100"), "bf16", 0.05, "compiled", 1.0)
    assert simulate_step(again, setting).step == simulate_step(job, setting).step

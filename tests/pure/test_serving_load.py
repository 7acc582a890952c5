"""Serving plans under load: the simulation of continuous batching, and what plans make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.commands.plan import plan_serving
from fivefold.core import hardware as machine
from fivefold.core.layout.layout import Layout
from fivefold.core.model import presets as models
from fivefold.cost.step.serving import serving_rates
from fivefold.planner.serving import plans as serving
from fivefold.planner.serving.fit import ServingFit, ServingRequest
from fivefold.planner.serving.load import LoadOutcome, ReplicaLoad, ReplicaSpeed, simulate
from fivefold.planner.serving.plans import LayoutLoad

H200 = machine.load("h200")


def speed(step: float = 0.01, slots: int = 64) -> ReplicaSpeed:
    return ReplicaSpeed(lambda n: step + 1e-4 * n, 0.05, 0.0, 0.005, slots, 8192, ahead=False)


def test_an_idle_server_answers_as_alone() -> None:
    found = simulate(ReplicaLoad(1024, 64, rate=0.01), speed())
    assert found.ttft == pytest.approx(0.05) and found.tpot == pytest.approx(0.0101)
    assert not found.grows


def test_waits_grow_with_the_rate() -> None:
    rates = (0.5, 5.0, 15.0)
    found = [simulate(ReplicaLoad(1024, 64, rate=rate), speed()) for rate in rates]
    assert found[0].ttft_p99 < found[1].ttft_p99 < found[2].ttft_p99
    assert found[0].tpot < found[1].tpot < found[2].tpot
    assert simulate(ReplicaLoad(1024, 64, rate=15.0), speed()) == found[2]  # a fixed seed
    assert simulate(ReplicaLoad(1024, 64, rate=100.0), speed()).grows


def test_the_99th_percentile_is_not_the_90th() -> None:
    """One in 25 requests comes right after another: it waits for that prompt, and slows it."""
    times = [10.0 * number - (9.999 if number % 25 == 0 else 0.0) for number in range(1, 401)]
    found = simulate(ReplicaLoad(1024, 64, rate=0.1, arrivals=tuple(times)), speed())
    assert found.ttft == pytest.approx(0.05) and found.tpot == pytest.approx(0.0101)
    assert found.ttft_p99 == pytest.approx(0.099 + 0.0051, rel=0.1)
    assert found.tpot_p99 > 1.05 * found.tpot


def test_clients_fill_the_server() -> None:
    found = simulate(ReplicaLoad(1024, 64, clients=16), speed())
    assert found.sequences == pytest.approx(16, rel=0.05)
    # Each cycle has 64 steps, and 16 prompts beside them.
    assert found.tokens_per_s == pytest.approx(16 * 64 / (63 * 0.0116 + 16 * 0.0465), rel=0.15)


def test_a_full_cache_makes_requests_wait() -> None:
    few, many = (
        simulate(ReplicaLoad(1024, 64, clients=16), speed(slots=slots)) for slots in (4, 64)
    )
    assert few.ttft > 5 * many.ttft and few.sequences <= 4


@pytest.mark.parametrize("clients", [1, 8, 64, 256])
def test_the_simulation_agrees_with_means(clients: int) -> None:
    """Two ways to the same load: step by step, and as the mean of one cycle."""
    request = ServingRequest(models.load("llama-3.1-8b"), H200, 1, 2048, 256, concurrency=clients)
    load = LayoutLoad(ServingFit(request, Layout(sp=False, zero=0)))
    mean, found = load.steady(clients), load.loaded()
    assert found is not None
    assert found.tokens_per_s == pytest.approx(mean.tokens_per_s, rel=0.05)
    assert found.tpot == pytest.approx(mean.tpot, rel=0.05)


@pytest.mark.parametrize(("tp", "ahead"), [(1, True), (2, False)])
def test_a_plan_knows_whether_the_engine_works_ahead(
    tp: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `LayoutEngine` does: on one GPU. The simulation itself is held to the engine elsewhere."""
    seen: list[bool] = []

    def watched(load: ReplicaLoad, speed: ReplicaSpeed) -> LoadOutcome:
        seen.append(speed.ahead)
        return simulate(load, speed)

    monkeypatch.setattr(serving, "simulate", watched)
    request = ServingRequest(models.load("llama-3.1-8b"), H200, tp, 1024, 128, rate=8.0)
    fit = ServingFit(request, Layout(tp=tp, sp=False, zero=0))
    assert LayoutLoad(fit).loaded() is not None
    assert seen == [ahead]


@pytest.mark.parametrize("concurrency", [2, 3, 17, 18])
def test_clients_are_shared_out_over_replicas(concurrency: int) -> None:
    """17 over three replicas are two with 6 and one with 5; two leave one replica idle."""
    asked = {"machine": "h200", "layout": "dp=3", "prompt": 512, "output": 512}
    plan = plan_serving("llama-3.1-8b", concurrency=concurrency, **asked).choice.chosen
    assert plan.sequences == pytest.approx(concurrency, rel=0.02)


def test_tokens_of_all_replicas_count() -> None:
    """17 clients over three replicas get what 6, 6 and 5 get of one each."""
    asked = {"machine": "h200", "prompt": 512, "output": 512}
    three, six, five = (
        plan_serving("llama-3.1-8b", layout=layout, concurrency=clients, **asked).choice.chosen
        for layout, clients in (("dp=3", 17), ("dp=1", 6), ("dp=1", 5))
    )
    assert three.tokens_per_s == pytest.approx(2 * six.tokens_per_s + five.tokens_per_s)


def test_requests_may_come_at_given_times() -> None:
    """Three at once are one step of three prompts, and others wait for nobody."""
    apart, near = (
        simulate(ReplicaLoad(1024, 64, rate=1.0, arrivals=times), speed())
        for times in ((0.0, 9.0, 18.0, 27.0), (0.0, 9.0, 9.0, 9.0))
    )
    assert apart.ttft == apart.ttft_p99 == pytest.approx(0.05)
    assert near.ttft == near.ttft_p99 == pytest.approx(3 * 0.05)


def test_a_quarter_of_the_requests_warms_up() -> None:
    """Of four the second counts: it comes with the first, and waits for both prompts."""
    times = (9.0, 9.0, 20.0, 30.0)
    found = simulate(ReplicaLoad(1024, 64, rate=0.1, arrivals=times), speed())
    assert found.ttft == pytest.approx(0.05) and found.ttft_p99 == pytest.approx(2 * 0.05)


def test_one_that_waits_is_no_queue_that_grows() -> None:
    """The mean of the later half decides, and its first request waits for nobody."""
    times, slots = (0.0, 9.0, 20.0, 20.0), 1
    found = simulate(ReplicaLoad(1024, 46, rate=0.1, arrivals=times), speed(slots=slots))
    waits = (0.05, 0.05 + 0.05 + 45 * 0.0101)
    assert found.ttft_p99 == pytest.approx(waits[1])
    assert sum(waits) / 2 < 1.5 * 0.05 + 5 * 0.05 < waits[1] and not found.grows


def test_tokens_come_as_fast_as_they_are_asked() -> None:
    """Neither the time until the first answers nor that after the last request counts."""
    found = simulate(ReplicaLoad(1024, 64, rate=12.0), speed())
    assert found.tokens_per_s == pytest.approx(12 * 64, rel=0.05) and not found.grows
    # Answers take 0.6863 s: of ten, the third ends at 2.6863, and six more before the last comes.
    times = tuple(float(each) for each in range(10))
    alone = simulate(ReplicaLoad(1024, 64, rate=1.0, arrivals=times), speed())
    assert alone.tokens_per_s == pytest.approx(64 * 6 / (9 - 2.6863))


def test_a_first_token_comes_through_the_door() -> None:
    """Of a lone request: its prompt, and its way to the engine and back."""
    asked = {"machine": "h200", "layout": "dp=1", "prompt": 1024, "output": 128}
    plan = plan_serving("llama-3.1-8b", rate=0.01, **asked).choice.chosen
    through, _ = plan.fit.served.prompt(1024)
    door = serving_rates().decode.door
    assert door > 0 and plan.ttft - through == pytest.approx(door)


def test_long_prompts_are_no_queue() -> None:
    """Of a million tokens each takes 123 steps, and 2,000 of them more than are simulated."""
    long = replace(speed(), busy=60.0)
    assert not simulate(ReplicaLoad(1_000_000, 64, rate=0.002), long).grows


@pytest.mark.parametrize("load", [{"rate": 0.01}, {"clients": 1}], ids=["rate", "client"])
def test_tokens_that_come_late_come_as_fast(load: dict[str, Any]) -> None:
    """The way of an answer to its client counts for the first token, and not between tokens; a
    client asks again when it has the last one."""
    found = simulate(ReplicaLoad(1024, 4, **load), replace(speed(), late=0.1))
    assert found.ttft == pytest.approx(0.15) and found.tpot == pytest.approx(0.0101)
    if "clients" in load:
        assert found.tokens_per_s == pytest.approx(4 / (0.15 + 3 * 0.0101), rel=0.01)


@pytest.mark.parametrize(
    ("model", "prompt", "layout"), [("tiny", 16, "dp=1"), ("llama-3.1-8b", 100_000, "pp=8")]
)
def test_no_token_comes_before_the_first(model: str, prompt: int, layout: str) -> None:
    """Not where steps take less than the way to the engine, or a prompt has many stages to go."""
    asked = {"machine": "h200", "layout": layout, "gpus": Layout.parse(layout).world}
    plan = plan_serving(model, prompt=prompt, output=8, rate=0.01, **asked).choice.chosen
    assert plan.tpot == pytest.approx(LayoutLoad(plan.fit).steady(1).tpot, rel=0.05)


def test_clients_beyond_the_room_wait_their_turn() -> None:
    """Twice as many as fit wait for about one whole answer more."""
    asked = {"machine": "h200", "gpus": 1}
    most = plan_serving("llama-3.1-8b", concurrency=405, **asked).choice.chosen
    late = plan_serving("llama-3.1-8b", concurrency=810, **asked).choice.chosen
    assert late.tokens_per_s == pytest.approx(most.tokens_per_s)
    assert late.ttft - most.ttft == pytest.approx(most.latency, rel=0.15)


def test_small_devices_have_small_engines() -> None:
    asked = {"machine": "laptop", "gpus": 2, "prompt": 64, "output": 16}
    assert plan_serving("tiny", **asked).choice.chosen.max_sequences > 100

"""Loads of serving plans are those of the engine: its own scheduler, on a clock that we turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import blocks_of
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine, EngineRanks
from fivefold.generate.requests import Request, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.planner.serving.load import SEED, ReplicaLoad, ReplicaSpeed, arrival_times, simulate
from tests.model.small import LLAMA

PROMPT, OUTPUT, REQUESTS = 512, 32, 120
SHAPE = replace(LLAMA, max_seq=PROMPT + OUTPUT)
SPEED = ReplicaSpeed(lambda n: 0.005 + 5e-5 * n, 0.02, 0.0, 0.004, 64, 2048, ahead=True)
LOADS = {
    **{f"{rate:g} a second": ReplicaLoad(PROMPT, OUTPUT, rate) for rate in (1.0, 8.0, 16.0, 24.0)},
    "16 clients": ReplicaLoad(PROMPT, OUTPUT, clients=16),
}


class Clock:
    """The time of a host that takes none itself, and of its device, which runs step after step."""

    def __init__(self, speed: ReplicaSpeed) -> None:
        self.speed, self.now, self.free = speed, 0.0, 0.0

    def forward(self, step: StepBatch) -> Tensor:
        """Begin a step as soon as the device is free."""
        singles = sum(len(each.tokens) == 1 for each in step.chunks)
        prompts = step.num_tokens - singles
        seconds = self.speed.busy * prompts / PROMPT
        if singles:
            decode = self.speed.step(singles)
            seconds = max(seconds + decode - (self.speed.reading if prompts else 0.0), decode)
        self.free = max(self.free, self.now) + seconds
        return torch.zeros(sum(each.num_wanted for each in step.chunks), 2)

    def share(self, table: Tensor) -> Callable[[], Tensor]:
        """What was drawn is known when its step has ended, from all ranks or from this one."""
        ends = self.free

        def wait() -> Tensor:
            self.now = max(self.now, ends)
            return table

        return wait


def served(load: ReplicaLoad, speed: ReplicaSpeed) -> tuple[float, float]:
    """The medians of TTFT and TPOT of the engine, of all but the first quarter of requests."""
    clock, chance, device = Clock(speed), random.Random(SEED), torch.device("cpu")
    drawn = DrawnTokens(speed.budget, device) if speed.ahead else None
    limits = ScheduleLimits(speed.budget, speed.slots)
    blocks = speed.slots * blocks_of(SHAPE.max_seq)
    ranks = EngineRanks(share=clock.share)
    engine = Engine(SHAPE, clock.forward, blocks, limits, ranks=ranks, drawn=drawn)
    due = [0.0] * load.clients if load.rate is None else list(arrival_times(load.rate, REQUESTS))
    fresh = load.clients if load.rate is None else 0  # are found somewhere in their answers
    words = random.Random("prompts that share no beginning")
    asked, first, last = dict[str, float](), dict[str, float](), dict[str, float]()
    while len(last) < REQUESTS + fresh:
        if not engine.busy:
            clock.now = max(clock.now, due[0])
        while due and due[0] <= clock.now:
            id = f"{len(asked)}"
            asked[id] = due.pop(0)
            prompt, output = PROMPT, OUTPUT
            if len(asked) <= fresh:
                prompt, output = 1, chance.randint(1, OUTPUT)
            tokens = tuple(words.randrange(SHAPE.vocab) for _ in range(prompt))
            engine.add(Request(id, tokens, output))
        with patch("fivefold.generate.engine.alone", clock.share):
            rows = engine.step()
        for each in rows:
            first.setdefault(each.id, clock.now)
            if each.reason is not None:
                engine.collect(each.id)
                last[each.id] = clock.now
                due += [clock.now] if load.rate is None else []
    warm = list(last)[fresh + REQUESTS // 4 :]
    waits = [first[id] - asked[id] for id in warm]
    return median(waits), median((last[id] - first[id]) / (OUTPUT - 1) for id in warm)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead of draws", "after draws"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_plan_waits_as_the_engine_does(load: ReplicaLoad, ahead: bool) -> None:
    speed = replace(SPEED, ahead=ahead)
    found = simulate(load, speed, REQUESTS)
    assert (found.ttft, found.tpot) == pytest.approx(served(load, speed), rel=0.015)

"""Routers' choices: a generator records them in any layout, and training in any other replays them.

One rank generates and trains with one set of weights. Routers that are changed in between choose
other experts, unless they are told the recorded ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.layout import LayoutEngine, forward_plan
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.routes import RecordedRoutes
from fivefold.generate.routing import replay
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.composition import Job, compose, compose_forward, positions_of
from fivefold.parallel.mesh import Mesh
from fivefold.step import logprobs, step
from fivefold.verify.generated import GeneratedTrial
from fivefold.verify.generated_ranks import give_weights

SEQ, TEXTS = 40, 8
SHAPE = {"layers": "2", "max_seq": "64", "vocab": "64", "width": "32", "moe.ffn": "16"}
NOISE = 0.05  # on every weight of a router
Choices = dict[tuple[int, int, int], tuple[int, ...]]
"""By text, position and layer."""


class ReplayLayouts(NamedTuple):
    """Where to generate and where to train."""

    generates: str
    trains: str
    recompute: str = "none"


CASES = [
    ReplayLayouts("dp=2 ep=2", "tp=2 ep=2"),
    ReplayLayouts("cp=2 ep=2", "pp=2", "full"),
    ReplayLayouts("pp=2", "cp=2 ep=2"),
    ReplayLayouts("tp=2", "dp=2 ep=2", "experts"),
    ReplayLayouts("tp=2 cp=2 ep=4", "dp=2 pp=2"),
    ReplayLayouts("dp=2 pp=2", "tp=2 cp=2 ep=2"),
]


@dataclass(frozen=True)
class ReplaySeen:
    """What a rank has seen; of training, with the weights of the generator, and with other routers
    without and with replay: log-probabilities of texts, loss and norm, and what routers chose."""

    drawn: list[Completion]
    same: list[float]
    free: list[float]
    told: list[float]
    outcome: tuple[float, float]
    own: Choices
    replayed: Choices


def plans(layouts: ReplayLayouts) -> tuple[Plan, Plan]:
    options = PlanOptions("tiny-moe", set=SHAPE, seq=SEQ, batch=TEXTS, microbatch_size=1)
    training = resolve(replace(options, layout=layouts.trains, recompute=layouts.recompute))
    generating = resolve(replace(options, layout=layouts.generates, zero=0, batch=None))
    return training, forward_plan(generating)


def requests() -> list[Request]:
    """Two begin alike, with more than a block; some go on into another."""
    dice = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (TEXTS, SEQ), generator=dice).tolist()
    rows[1][: BLOCK + 4] = rows[0][: BLOCK + 4]
    lengths = [BLOCK + 6, BLOCK + 5, *range(9, TEXTS + 7)]
    return [
        Request(str(number), tuple(row[:length]), 6, Sampling(1.0, seed=number))
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def row_of(request: Request, done: Completion) -> TokenBatch:
    """A text as a padded row."""
    text = torch.tensor([*request.prompt, *done.tokens])
    tokens, labels = torch.zeros(1, SEQ, dtype=torch.int64), torch.full((1, SEQ), NOT_COUNTED)
    tokens[0, : len(text) - 1] = text[:-1]
    labels[0, len(request.prompt) - 1 : len(text) - 1] = text[len(request.prompt) :]
    return TokenBatch(tokens, labels, torch.arange(SEQ)[None])


def change_routers(trial: GeneratedTrial) -> None:
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in trial.plain.named_parameters():
            if name.endswith("router.weight"):
                weight += NOISE * torch.randn(weight.shape, generator=dice, dtype=weight.dtype)


def generate(plan: Plan, trial: GeneratedTrial) -> list[Completion]:
    """With few blocks: some lose theirs, and some are shared."""
    mesh = Mesh.of(plan, torch.device("cpu"))
    stage = compose_forward(plan, mesh, torch.float64)
    stage.fill(lambda weight, dtype: _full(trial, weight.name))
    limits = ScheduleLimits(tokens=BLOCK + 3)
    engine = LayoutEngine(plan, mesh, stage, 3, limits, records_routes=True)
    found = engine.run(requests())
    engine.close()
    mesh.close_groups()
    return list(found.values())


def _full(trial: GeneratedTrial, name: str) -> Tensor:
    full = trial.full_weight(name)
    assert full is not None
    return full


def choices_of(job: Job, first: int) -> Choices:
    """What routers have chosen since the last call, by text."""
    places = positions_of(job.plan, job.mesh.rank)
    found = {
        (first + each.microbatch, place, each.layer): tuple(each.experts[0, i].tolist())
        for each in job.balancing.routes
        for i, place in enumerate(places)
    }
    job.balancing.routes.clear()
    return found


def replay_rank(worker: Worker, training: Plan, generating: Plan) -> ReplaySeen:
    with worker.joined(training.layout.world):
        trial = GeneratedTrial(generating.shape, "float64", 3)
        drawn = generate(generating, trial)
        mesh = Mesh.of(training, torch.device("cpu"))
        job = compose(training, mesh, seed=0, dtype=torch.float64)
        give_weights(job, trial)
        coord, count = training.layout.coord(mesh.rank).dp, training.batch.microbatches
        mine = range(coord * count, (coord + 1) * count)
        rows = [row_of(requests()[i], drawn[i]) for i in mine]
        shape = training.shape
        told = [replay(row, [drawn[i].routes], shape) for row, i in zip(rows, mine, strict=True)]
        same = logprobs(job, told).flatten().tolist()
        change_routers(trial)
        give_weights(job, trial)
        job.balancing.watch()
        free = logprobs(job, rows).flatten().tolist()
        own = choices_of(job, mine.start)
        with_replay = logprobs(job, told).flatten().tolist()
        replayed = choices_of(job, mine.start)
        owned = [(True, each.tensor) for each in job.owned]
        optimizer = make_optimizer("sgd", owned, lr=0.1, weight_decay=0.0)
        done = step(job, optimizer, told, max_norm=1e9)
        mesh.close_groups()
    outcome = done.loss.item(), done.norm.item()
    return ReplaySeen(drawn, same, free, with_replay, outcome, own, replayed)


def expect(ranks: list[ReplaySeen], alone: ReplaySeen) -> None:
    """One rank is the reference, and has recorded the same."""
    first = ranks[0]
    assert all(each.drawn == first.drawn for each in ranks)
    recorded = [each.routes for each in first.drawn]
    assert recorded == [each.routes for each in alone.drawn]
    sums = [sum(each.logprobs) for each in first.drawn]
    assert first.same == pytest.approx(sums, rel=0, abs=1e-10)
    assert first.told == pytest.approx(alone.told, rel=0, abs=1e-10)
    assert first.free == pytest.approx(alone.free, rel=0, abs=1e-10)
    assert first.outcome == pytest.approx(alone.outcome, rel=1e-10)
    own, replayed = Choices(), Choices()
    for each in ranks:
        own |= each.own
        replayed |= each.replayed
    expected: Choices = {
        (text, position, layer): one
        for text, routes in enumerate(recorded)
        if routes is not None
        for position, token in enumerate(routes.chosen)
        for layer, one in zip(routes.layers, token, strict=True)
    }
    assert {key: replayed[key] for key in expected} == expected
    differ = sum(own[key] != one for key, one in expected.items())
    assert differ > 0.05 * len(expected), "routers that were changed choose others"


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("layouts", CASES, ids=str)
def test_training_replays_what_a_generator_has_recorded(pool: Pool, layouts: ReplayLayouts) -> None:
    (alone,) = pool.run_each([(replay_rank, plans(ReplayLayouts("dp=1", "dp=1")))])
    both = plans(layouts)
    expect(pool.run_each([(replay_rank, both)] * both[0].layout.world), alone)
    routes = alone.drawn[0].routes
    assert any(each.preempted for each in alone.drawn) and any(each.reused for each in alone.drawn)
    assert isinstance(routes, RecordedRoutes)
    assert len(routes.chosen) == len(requests()[0].prompt) + 6 - 1

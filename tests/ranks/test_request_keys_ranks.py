"""Keys of a request in layouts: all ranks see the tokens and scores of one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.engine import Engine
from fivefold.generate.layout import forward_plan
from fivefold.generate.requests import DrawnToken, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify import generated_ranks
from fivefold.verify.generated import GeneratedTrial, logits_of

LAYOUTS = ("tp=2", "pp=2", "dp=2", "cp=2", "dp=2 ep=2", "tp=2 pp=2")
LIMITS = ScheduleLimits(tokens=BLOCK + 2)


def requests_of(trial: GeneratedTrial) -> list[Request]:
    """With all keys, beside one without any."""
    stops = frozenset(range(0, trial.shape.vocab, 3))
    requests = trial.requests[:5]
    samplings = (Sampling(), Sampling(1.2, seed=3, min_p=0.02), Sampling())
    return [
        request
        if i == 2
        else replace(
            request,
            sampling=samplings[i % 3],
            stop_tokens=stops,
            min_tokens=i,
            prompt_logprobs=i,
            alternatives=4 - i,
        )
        for i, request in enumerate(requests)
    ]


def drawn_by(engine: Engine, requests: list[Request]) -> dict[str, list[DrawnToken]]:
    rows: dict[str, list[DrawnToken]] = {}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for row in engine.step():
            rows.setdefault(row.id, []).append(row)
    return rows


def drawn_on_rank(worker: Worker, plan: Plan) -> dict[str, list[DrawnToken]]:
    world = plan.layout.world
    rank = forked_device("cpu", "gloo", worker.rank, world)
    with worker.joined(world, rank):
        trial = GeneratedTrial(plan.shape, "float64", 0)
        with generated_ranks._engines(plan, rank.device, trial, False) as engine:
            return drawn_by(engine(64, LIMITS, lambda *_: None), requests_of(trial))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_scores_are_those_of_one_device(pool: Pool, layout: str) -> None:
    model = "tiny-moe" if "ep" in layout else "tiny"

    def drawn(text: str) -> list[dict[str, list[DrawnToken]]]:
        options = PlanOptions(model, layout=text, set={"layers": "2"})
        plan = forward_plan(resolve(options))
        return pool.run_each([(drawn_on_rank, (plan,))] * plan.layout.world)

    (alone,), ranks = drawn("dp=1"), drawn(layout)
    trial = GeneratedTrial(resolve(PlanOptions(model, set={"layers": "2"})).shape, "float64", 0)
    for request in requests_of(trial):
        expected = alone[request.id]
        for rank in ranks:
            rows = rank[request.id]
            for row, other in zip(rows, expected, strict=True):
                pair = [replace(token, logprob=0.0, alternatives=()) for token in (row, other)]
                assert pair[0] == pair[1]
                assert row.logprob == pytest.approx(other.logprob, abs=1e-9)
                assert [token for token, _ in row.alternatives] == [
                    token for token, _ in other.alternatives
                ]
        scored = [row for row in expected if row.index < 0]
        assert len(scored) == (request.prompt_logprobs is not None) * (len(request.prompt) - 1)
        logprobs_TV = logits_of(trial.plain, request.prompt).log_softmax(1)
        for row in scored:
            value = logprobs_TV[len(request.prompt) - 1 + row.index, row.token].item()
            assert row.logprob == pytest.approx(value, abs=1e-9)
        drawn_tokens = [row.token for row in expected if row.index >= 0]
        assert not request.stop_tokens.intersection(drawn_tokens[: request.min_tokens])
    assert any(row.reason == "stop" for rows in alone.values() for row in rows)

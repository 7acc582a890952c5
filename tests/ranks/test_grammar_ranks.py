"""Grammars in layouts: all ranks see the tokens of one device, and only those that draw follow."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("llguidance", reason="pip install 'fivefold[grammar]', which make setup does")

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.grammar import Grammars
from fivefold.generate.layout import forward_plan
from fivefold.generate.requests import NO_TOKEN, DrawnToken, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text import ByteCodec
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify import generated_ranks
from fivefold.verify.generated import GeneratedTrial

LAYOUTS = ("tp=2", "pp=2", "dp=2", "cp=2", "dp=2 ep=2", "tp=2 pp=2")
LIMITS = ScheduleLimits(tokens=BLOCK + 2)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, "é", None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
BAD = '{"type": "nothing"}'  # which the API would have refused


def requests_of(trial: GeneratedTrial) -> list[Request]:
    """Greedy and not, beside one without a grammar and one whose grammar fails."""
    grammars = (SCHEMA, SCHEMA, "", BAD, SCHEMA)
    samplings = (Sampling(), Sampling(1.0, seed=3), Sampling())
    return [
        replace(
            request, sampling=samplings[i % 3], grammar=grammars[i], max_tokens=70, alternatives=i
        )
        for i, request in enumerate(trial.requests[:5])
    ]


def drawn_on_rank(worker: Worker, plan: Plan) -> tuple[dict[str, list[DrawnToken]], bool]:
    """What this rank sees, and whether it follows grammars."""
    world = plan.layout.world
    rank = forked_device("cpu", "gloo", worker.rank, world)
    with worker.joined(world, rank):
        trial = GeneratedTrial(plan.shape, "float64", 0)
        with generated_ranks._engines(plan, rank.device, trial, False) as make:
            engine = make(10, LIMITS, lambda *_: None)
            engine.grammars = grammars = Grammars(ByteCodec(), plan.shape.vocab)
            rows: dict[str, list[DrawnToken]] = {}
            for request in requests_of(trial):
                engine.add(request)
            while engine.busy:
                for row in engine.step():
                    rows.setdefault(row.id, []).append(row)
            return rows, "_tokenizer" in vars(grammars)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_completions_are_those_of_one_device(pool: Pool, layout: str) -> None:
    model = "tiny-moe" if "ep" in layout else "tiny"
    options = PlanOptions(model, set={"layers": "2", "max_seq": "256"})

    def drawn(text: str) -> list[tuple[dict[str, list[DrawnToken]], bool]]:
        plan = forward_plan(resolve(replace(options, layout=text)))
        return pool.run_each([(drawn_on_rank, (plan,))] * plan.layout.world)

    ((alone, _),), ranks = drawn("dp=1"), drawn(layout)
    assert sum(follows for _, follows in ranks) == (2 if "dp=2" in layout else 1)
    for request in requests_of(GeneratedTrial(resolve(options).shape, "float64", 0)):
        expected = alone[request.id]
        for rows, _ in ranks:
            pairs = list(zip(rows[request.id], expected, strict=True))
            assert all(row.token == other.token for row, other in pairs)
            assert all(row.reason == other.reason for row, other in pairs)
        last = expected[-1]
        if request.grammar == BAD:
            assert (last.token, last.reason, len(expected)) == (NO_TOKEN, "error", 1)
        elif request.grammar:
            text = bytes(row.token for row in expected if row.token != NO_TOKEN)
            table = json.loads(text)
            assert (last.token, last.reason) == (NO_TOKEN, "stop")
            assert list(table) == ["a", "b"] and len(table["a"]) <= 3
        else:
            assert last.reason == "length" and len(expected) == 70

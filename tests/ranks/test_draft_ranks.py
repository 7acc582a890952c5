"""Drafts in layouts: all ranks propose and accept alike, and completions are those of one rank
without drafts."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.layout import LayoutEngine, forward_plan, mesh_of, stage_of
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.generated import GeneratedTrial
from tests.guesses import Guesses

BLOCKS, LIMITS = 9, ScheduleLimits(tokens=3 * BLOCK)


@dataclass(frozen=True)
class DraftCase:
    """A layout to draft in."""

    layout: str
    model: str = "tiny"

    def plan(self, layout: str) -> Plan:
        changes = {"layers": "2", "max_seq": "160"}
        return forward_plan(
            resolve(PlanOptions(self.model, layout=layout, set=changes), small=True)
        )

    def __str__(self) -> str:
        return f"{self.model} {self.layout}"


CASES = (
    *(DraftCase(layout) for layout in ("dp=2 tp=2", "pp=2", "cp=2", "cp=2 pp=2")),
    *(DraftCase(layout, "tiny-moe") for layout in ("dp=2 ep=2", "pp=2 tp=2 ep=2", "cp=2 ep=2")),
)


@dataclass(frozen=True)
class Drafted:
    """What a rank has seen."""

    completions: dict[str, Completion]
    preempted: int
    free: int


def requests_of(vocab: int) -> list[Request]:
    """Greedy and drawn, two of which begin alike."""
    dice = torch.Generator().manual_seed(5)
    prompt = tuple(torch.randint(0, vocab, (2 * BLOCK,), generator=dice).tolist())
    requests = [
        Request(f"{i}", prompt[: 5 + 7 * i], 30, Sampling(1.0, seed=i) if i % 2 else Sampling())
        for i in range(4)
    ]
    stops = frozenset(range(0, vocab, 9))
    return [*requests, Request("stop", (*prompt[: BLOCK + 3], 1), 30, Sampling(1.0), stops)]


def on_rank(worker: Worker, plan: Plan, texts: dict[str, tuple[int, ...]] | None) -> Drafted:
    """Completions of a rank, with drafts of these texts if there are any."""
    rank = forked_device("cpu", "gloo", worker.rank, plan.layout.world)
    vocab, drafts = plan.shape.vocab, None if texts is None else DraftOptions(4)
    guesses = Guesses(texts or {}, vocab)
    with (
        worker.joined(plan.layout.world, rank),
        patch.object(DraftOptions, "drafter", lambda self: guesses),
    ):
        trial = GeneratedTrial(plan.shape, "float64", 0)
        mesh = mesh_of(plan, rank.device, False)
        stage = stage_of(plan, mesh, torch.float64, False)
        stage.fill(lambda weight, dtype: full(trial, weight.name))
        records = plan.shape.moe is not None
        engine = LayoutEngine(
            *(plan, mesh, stage, BLOCKS, LIMITS), records_routes=records, drafts=drafts
        )
        completions = engine.run(requests_of(vocab))
        engine.close()
        free = sum(scheduler.pool.num_free for scheduler in engine.schedulers)
        if plan.layout.world > 1:
            torch.distributed.barrier()
        mesh.close_groups()
        return Drafted(completions, engine.num_preempted, free)


def full(trial: GeneratedTrial, name: str) -> Tensor:
    weight = trial.full_weight(name)
    assert weight is not None, name
    return weight


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_completions_of_a_layout_are_the_same_with_drafts(pool: Pool, case: DraftCase) -> None:
    plain: Drafted
    (plain,) = pool.run_each([(on_rank, (case.plan("dp=1"), None))])
    texts = {id: completion.tokens for id, completion in plain.completions.items()}
    plan = case.plan(case.layout)
    ranks: list[Drafted] = pool.run_each([(on_rank, (plan, texts))] * plan.layout.world)
    for rank in ranks:
        assert rank.free == BLOCKS * plan.layout.dp
        assert rank.completions == ranks[0].completions, "all ranks decide alike"
        for id, expected in plain.completions.items():
            completion = rank.completions[id]
            assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-10), id
            same = (expected.tokens, expected.reason, expected.routes)
            assert (completion.tokens, completion.reason, completion.routes) == same, id
    first = ranks[0].completions.values()
    assert sum(completion.accepted for completion in first) > 20
    assert plan.layout.dp > 1 or ranks[0].preempted

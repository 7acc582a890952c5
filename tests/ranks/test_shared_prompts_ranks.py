"""Samples of a prompt share its computation in layouts too: blocks are copied by all ranks that
have something of them, and so are the choices of routers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.cache import KvCache
from fivefold.generate.context_cache import ContextCache
from fivefold.generate.layout import LayoutEngine, forward_plan, mesh_of, stage_of
from fivefold.generate.requests import Completion, Request, Sampling, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.verify.generated import GeneratedTrial

PROMPT, SAMPLES, BLOCKS = 2 * BLOCK + 9, 4, 40
LIMITS = ScheduleLimits(tokens=3 * BLOCK)


@dataclass(frozen=True)
class SharedCase:
    """One layout to run samples in."""

    layout: str
    model: str = "tiny"
    batch_invariant: bool = False

    def plan(self, layout: str | None = None) -> Plan:
        changes = {"layers": "2", "max_seq": "160"}
        options = PlanOptions(self.model, layout=layout or self.layout, set=changes)
        return forward_plan(resolve(options, small=True))

    def __str__(self) -> str:
        return f"{self.model} {self.layout}" + " invariant" * self.batch_invariant


CASES = (
    *(SharedCase(layout) for layout in ("tp=2", "pp=2", "dp=2", "cp=2", "cp=3", "cp=2 pp=2")),
    *(SharedCase(layout, "tiny-moe") for layout in ("tp=2 ep=2", "cp=2 ep=2", "dp=2 ep=2")),
    SharedCase("tp=2 pp=2", "tiny-moe"),
    SharedCase("tp=2 pp=2", batch_invariant=True),
)


@dataclass(frozen=True)
class Shared:
    """What a rank has seen: completions, and how many tokens of the prompt it has computed."""

    completions: dict[str, Completion]
    tokens: int
    free: int


def requests_of(vocab: int) -> list[Request]:
    """Samples of one prompt, and a stranger who begins as they do."""
    dice = torch.Generator().manual_seed(5)
    prompt = tuple(torch.randint(0, vocab, (PROMPT,), generator=dice).tolist())
    samples = [
        Request(f"{i}", prompt, 9, Sampling(1.0, seed=i) if i else Sampling())
        for i in range(SAMPLES)
    ]
    return [*samples, Request("stranger", (*prompt[: BLOCK + 3], 1, 2), 9)]


def shared_on_rank(worker: Worker, case: SharedCase, plan: Plan, fault: str = "") -> Shared:
    rank = forked_device("cpu", "gloo", worker.rank, plan.layout.world)
    with worker.joined(plan.layout.world, rank), FAULTS[fault]():
        trial = GeneratedTrial(plan.shape, "float64", 0)
        mesh = mesh_of(plan, rank.device, case.batch_invariant)
        stage = stage_of(plan, mesh, torch.float64, case.batch_invariant)
        stage.fill(lambda weight, dtype: full(trial, weight.name))
        records = plan.shape.moe is not None
        engine = LayoutEngine(
            *(plan, mesh, stage, BLOCKS, LIMITS),
            records_routes=records,
            batch_invariant=case.batch_invariant,
        )
        forward, tokens = engine.forward, list[int]()

        def counted(step: StepBatch) -> Tensor:
            samples = [chunk for chunk in step.chunks if chunk.id != "stranger"]
            spans = [(chunk.start, min(chunk.stop, PROMPT)) for chunk in samples]
            tokens.extend(stop - start for start, stop in spans if start < stop)
            return forward(step)

        with patch.object(engine, "forward", counted):
            completions = engine.run(requests_of(plan.shape.vocab))
        engine.close()
        free = sum(scheduler.pool.num_free for scheduler in engine.schedulers)
        if plan.layout.world > 1:
            torch.distributed.barrier()
        mesh.close_groups()
        return Shared(completions, sum(tokens), free)


def full(trial: GeneratedTrial, name: str) -> Tensor:
    weight = trial.full_weight(name)
    assert weight is not None, name
    return weight


def no_copies() -> AbstractContextManager[object]:
    return patch.object(KvCache, "copy_blocks", lambda self, copies: None)


def copies_of_one_owner() -> AbstractContextManager[object]:
    """As if every rank of cp had the block, under the number that all know it by."""
    return patch.object(ContextCache, "copy_blocks", KvCache.copy_blocks)


def choices_left_behind() -> AbstractContextManager[object]:
    return patch.object(RouteStore, "copy_blocks", lambda self, copies: None)


FAULTS = {
    "": nullcontext,
    "no copies": no_copies,
    "copies of one owner": copies_of_one_owner,
    "choices left behind": choices_left_behind,
}


def run(
    pool: Pool, case: SharedCase, fault: str = ""
) -> tuple[dict[str, Completion], list[Shared]]:
    """What each request draws alone on one rank; and what ranks have seen."""
    plan = case.plan()
    (alone,) = pool.run_each([(alone_on_rank, (case,))])
    return alone, pool.run_each([(shared_on_rank, (case, plan, fault))] * plan.layout.world)


def alone_on_rank(worker: Worker, case: SharedCase) -> dict[str, Completion]:
    plan = case.plan("dp=1")
    with worker.joined(1):
        trial = GeneratedTrial(plan.shape, "float64", 0)
        mesh = mesh_of(plan, torch.device("cpu"), False)
        stage = stage_of(plan, mesh, torch.float64, False)
        stage.fill(lambda weight, dtype: full(trial, weight.name))
        records = plan.shape.moe is not None
        engine = LayoutEngine(plan, mesh, stage, BLOCKS, LIMITS, records_routes=records)
        completions = dict[str, Completion]()
        for request in requests_of(plan.shape.vocab):
            completions |= engine.run([request])
            engine.renew()
        engine.close()
        return completions


def require_alone(alone: dict[str, Completion], rank: Shared) -> None:
    for id, expected in alone.items():
        completion = rank.completions[id]
        assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-10), id
        same = replace(expected, logprobs=completion.logprobs, reused=completion.reused)
        assert completion == same, id


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_in_a_layout_draw_what_they_draw_alone(pool: Pool, case: SharedCase) -> None:
    alone, ranks = run(pool, case)
    layout = case.plan().layout
    for rank in ranks:
        require_alone(alone, rank)
        assert rank.free == BLOCKS * layout.dp
    # Each replica computes it once, and the last token for each of its samples.
    samples = SAMPLES // layout.dp
    assert [rank.tokens for rank in ranks] == [PROMPT - 1 + samples] * layout.world


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (SharedCase("tp=2"), "no copies"),
        (SharedCase("pp=2"), "no copies"),
        (SharedCase("cp=2"), "no copies"),
        (SharedCase("cp=2"), "copies of one owner"),
        (SharedCase("tp=2 ep=2", "tiny-moe"), "choices left behind"),
        (SharedCase("cp=2 ep=2", "tiny-moe"), "choices left behind"),
    ],
    ids=str,
)
def test_wrong_copies_in_a_layout_are_seen(pool: Pool, case: SharedCase, fault: str) -> None:
    alone, ranks = run(pool, case, fault)
    with pytest.raises(AssertionError):
        for rank in ranks:
            require_alone(alone, rank)

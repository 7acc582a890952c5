"""Drafts by multi-token prediction in layouts: all ranks propose and accept alike, proposals are
those of one rank, and completions those of one rank without drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.init import normal_

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import Weight, buffers, weights
from fivefold.core.model import Shape
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.layout import LayoutEngine, forward_plan, mesh_of, stage_of
from fivefold.generate.mtp_drafts import MtpDrafter
from fivefold.generate.requests import Completion, Request, Sampling, SequenceState
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker

BLOCKS, LIMITS = 9, ScheduleLimits(tokens=3 * BLOCK)
LATENT = {"head_dim": "24", "kv_heads": "8", "mla.kv_rank": "32", "mla.nope_dim": "16"}
LATENT |= {"mla.rope_dim": "8", "mla.value_dim": "16"}
MODELS = {
    "dense": ("tiny", {"mtp": "1"}),
    "two ahead": ("tiny", {"mtp": "2", "tied": "true"}),
    "experts": ("tiny-moe", {"mtp": "2"}),
    "latents": ("tiny-moe", {"mtp": "1", **LATENT}),
}
CASES = (
    ("dense", "tp=2"),
    ("two ahead", "dp=2 tp=2"),
    ("experts", "dp=2 ep=2"),
    ("experts", "tp=2 ep=2"),
    ("latents", "dp=2 tp=2 ep=4"),
)


def plan_of(model: str, layout: str) -> Plan:
    """Without what generation drops."""
    name, changes = MODELS[model]
    options = {"layers": "2", "max_seq": "120", **changes}
    return resolve(PlanOptions(name, layout=layout, set=options), small=True)


@dataclass
class Seen:
    """What a rank has seen."""

    completions: dict[str, Completion] = field(default_factory=dict)
    proposed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    preempted: int = 0
    free: int = 0


def full_weights(shape: Shape) -> dict[str, Tensor]:
    """By names, whoever reads them and in whatever order."""
    drawn: dict[str, Tensor] = {}
    for number, weight in enumerate([*weights(shape), *buffers(shape)]):
        dice = torch.Generator().manual_seed(number)
        size = torch.empty(weight.shape, dtype=torch.float64)
        spread = 0.3 if len(weight.shape) > 1 else 1.0
        drawn[weight.name] = normal_(size, 0, spread, generator=dice)
    return drawn


def requests_of(vocab: int) -> list[Request]:
    """Greedy and drawn, some of which begin alike, and two samples of one prompt."""
    dice = torch.Generator().manual_seed(5)
    prompt = tuple(torch.randint(0, vocab, (2 * BLOCK,), generator=dice).tolist())
    requests = [
        Request(f"{i}", prompt[: 5 + 7 * i], 24, Sampling(0.7, seed=i) if i % 2 else Sampling())
        for i in range(4)
    ]
    requests += [Request(f"on {i}", (*prompt, i), 12, Sampling()) for i in range(2)]
    stops = frozenset(range(0, vocab, 9))
    return [*requests, Request("stop", (*prompt[: BLOCK + 3], 1), 24, Sampling(1.0), stops)]


def on_rank(worker: Worker, plan: Plan, drafts: DraftOptions | None) -> Seen:
    """Completions of a rank, and its proposals if there are any."""
    training, plan = plan, forward_plan(plan, drafts)
    rank, seen = forked_device("cpu", "gloo", worker.rank, plan.layout.world), Seen()
    put, full = MtpDrafter.put, full_weights(training.shape)

    def record(self: MtpDrafter, sequence: SequenceState, proposals: list[int]) -> None:
        put(self, sequence, proposals)
        seen.proposed[tuple(sequence.tokens)] = proposals

    def read(weight: Weight, dtype: torch.dtype) -> Tensor:
        return full[weight.name]

    with worker.joined(plan.layout.world, rank), patch.object(MtpDrafter, "put", record):
        mesh = mesh_of(plan, rank.device, False)
        stage = stage_of(plan, mesh, torch.float64, False)
        stage.fill(read)
        engine = LayoutEngine(*(plan, mesh, stage, BLOCKS, LIMITS), drafts=drafts)
        seen.completions = engine.run(requests_of(plan.shape.vocab))
        engine.close()
        seen.preempted = engine.num_preempted
        seen.free = sum(scheduler.pool.num_free for scheduler in engine.schedulers)
        if plan.layout.world > 1:
            torch.distributed.barrier()
        mesh.close_groups()
        return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_layouts_propose_what_one_rank_does(pool: Pool, model: str, layout: str) -> None:
    alone, plan = plan_of(model, "dp=1"), plan_of(model, layout)
    drafts = DraftOptions(plan.shape.mtp, "mtp")
    plain: Seen
    drafted: Seen
    (plain,) = pool.run_each([(on_rank, (alone, None))])
    (drafted,) = pool.run_each([(on_rank, (alone, drafts))])
    ranks: list[Seen] = pool.run_each([(on_rank, (plan, drafts))] * plan.layout.world)
    for rank in ranks:
        assert rank.free == BLOCKS * plan.layout.dp
        assert (rank.completions, rank.proposed) == (ranks[0].completions, ranks[0].proposed)
    same = set(drafted.proposed) & set(ranks[0].proposed)
    assert len(same) > 60 and len(same) > 0.5 * len(drafted.proposed)
    for text in same:
        assert ranks[0].proposed[text] == drafted.proposed[text], len(text)
    for id, expected in plain.completions.items():
        completion = ranks[0].completions[id]
        assert completion.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-10), id
        assert (completion.tokens, completion.reason) == (expected.tokens, expected.reason), id
    assert plan.layout.dp > 1 or ranks[0].preempted


@pytest.mark.parametrize("layout", ["pp=2", "cp=2"])
def test_layouts_without_all_states_are_refused(layout: str) -> None:
    with pytest.raises(FivefoldError, match="use tp, dp or ep, or ngram:1"):
        forward_plan(plan_of("dense", layout), DraftOptions(1, "mtp"))

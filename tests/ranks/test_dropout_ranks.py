"""Dropout in every layout: each rank drops what one device drops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.data import batches as data_batches
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.decoder import Block
from fivefold.model.dropout import Part, keeps, site_keys, site_of, token_keys
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step
from fivefold.verify.runs import VerifySettings, run_rank, run_reference
from fivefold.verify.trial import judge, run_trial

RATES = {"dropout": "0.25", "attention_dropout": "0.2"}
RATE = 0.25
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny", "dp=2", {"zero": 3, "microbatches": 2}),
    ("tiny", "tp=2", {"recompute": "selective"}),
    ("tiny", "tp=2", {"sp": False, "microbatches": 2}),
    ("tiny", "pp=2", {"schedule": "zb-h1", "microbatches": 4}),
    ("tiny", "cp=2", {"packed": True}),
    ("tiny", "cp=4", {"context": "hybrid"}),
    ("tiny", "cp=2", {"context": "ulysses", "seq": 31}),
    ("gpt2", "tp=2 pp=2", {"schedule": "interleaved", "microbatches": 2, "recompute": "full"}),
    ("tiny-moe", "dp=2 ep=2", {"balance": "aux", "microbatches": 2}),
    ("tiny-moe", "dp=2 tp=2 cp=2 ep=4", {"recompute": "attention+experts"}),
    ("deepseek-v3", "tp=2 cp=2", {"recompute": "norm+act"}),
    ("tiny-moe", "dp=2 tp=2 pp=2 ep=2", {"schedule": "dualpipe-v", "microbatches": 8, "zero": 2}),
]
Site = tuple[int, Part]
Masks = dict[Site, set[bytes]]
"""The masks of tokens at each residual site of a rank: bytes, one of each feature."""


def plan_of(model: str, layout: str, options: dict[str, Any]) -> Plan:
    sizes = {} if model in ("gpt2", "deepseek-v3") else {"layers": "4"}
    return runnable(PlanOptions(model, layout=layout, set=RATES | sizes, **options))


def name_of(case: tuple[str, str, dict[str, Any]]) -> str:
    model, layout, options = case
    return " ".join([model, layout, *(f"{key}={value}" for key, value in options.items())])


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_and_weights_are_those_of_one_device(
    pool: Pool, case: tuple[str, str, dict[str, Any]]
) -> None:
    verdict = run_trial(pool, plan_of(*case), VerifySettings(steps=2), lambda: None)
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rank_draws_the_masks_of_its_tokens(
    pool: Pool, case: tuple[str, str, dict[str, Any]]
) -> None:
    plan = plan_of(*case)
    found = pool.run_each([(masks_of_rank, (plan,))] * plan.layout.world)
    for rank, masks in enumerate(found):
        most = plan.batch.microbatches * plan.batch.microbatch_size * plan.padded_seq
        for (block, part), seen in masks.items():
            wanted = expected(plan, rank, site_of(block, part))
            assert wanted <= seen and len(seen) <= most, (rank, block, part)
    blocks = {block for masks in found for block, _ in masks}
    assert blocks == set(range(plan.shape.layers + plan.shape.mtp))


def masks_of_rank(worker: Worker, plan: Plan) -> Masks:
    """One step, in which every residual dropout is watched."""
    found: Masks = {}
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float64)
        for block in (each for chunk in job.chunks for each in chunk.model.all_blocks()):
            watch(block, found)
        drawn = samples(plan.batch, plan.shape.vocab, 0, 0, packed=plan.packed, drops=True)
        owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
        optimizer = make_optimizer("adamw", owned, 1e-3, 0.0)
        step(job, optimizer, drawn.of(plan.layout.coord(mesh.rank).dp), 1.0)
        mesh.close_groups()
    return found


def watch(block: Block, found: Masks) -> None:
    real = block._drop

    def watched(part: Part, x_BSD: Tensor, context: Any) -> Tensor:
        dropped = real(part, x_BSD, context)
        rows = (dropped.detach() != 0).flatten(0, 1)
        found.setdefault((block.number, part), set()).update(map(bytes, rows.byte().numpy()))
        return dropped

    block._drop = watched


def expected(plan: Plan, rank: int, site: int) -> set[bytes]:
    """The masks of this rank's tokens, by the definition: no padding is asked for."""
    coord, batch = plan.layout.coord(rank), plan.batch
    numbers = torch.tensor(batch.rows_of(coord.dp))
    keys = site_keys(token_keys(0, numbers, batch.seq), site, site + 1)[0]
    kept = keeps(keys, torch.arange(plan.shape.width), RATE)
    ranges = plan.split.rank_tokens(plan.padded_seq, coord.cp)
    places = [each for one in ranges for each in one]
    if plan.layout.sp and plan.layout.tp > 1:
        size = len(places) // plan.layout.tp
        places = places[coord.tp * size : (coord.tp + 1) * size]
    real = [place for place in places if place < batch.seq]
    return {bytes(row) for row in kept[:, real].flatten(0, 1).byte().numpy()}


def test_a_rank_that_draws_with_another_seed_is_found(pool: Pool) -> None:
    plan, settings = plan_of("tiny", "dp=2", {}), VerifySettings(steps=1)
    tasks = [(rank_with_another_seed, (plan, settings)), (run_rank, (plan, settings))]
    *ranks, truths = pool.run_each([*tasks, (run_reference, (plan, settings))])
    assert not judge(plan, settings, ranks, truths).passed


def rank_with_another_seed(worker: Worker, plan: Plan, settings: VerifySettings) -> Any:
    real = data_batches.token_keys
    data_batches.token_keys = lambda seed, *rest: real(seed + 1, *rest)
    try:
        return run_rank(worker, plan, settings)
    finally:
        data_batches.token_keys = real

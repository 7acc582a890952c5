"""Sums in rank order do not depend on where a row lies, and batches change no bit in a layout."""

from __future__ import annotations

import pytest
import torch
from generations import GenerationCase
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import Plan, resolve
from fivefold.generate.layout import mesh_of
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.rank_order import in_order
from fivefold.verify.generated_ranks import GeneratedSettings, run_generated

RANKS, ROWS, WIDTH = 4, 16, 24
LAYOUTS = (
    *(GenerationCase("tiny", "tp=2", sp=False), GenerationCase("tiny", "pp=2")),
    *(GenerationCase("tiny-moe", "dp=2 ep=2"), GenerationCase("tiny-moe", "tp=2 ep=2")),
    GenerationCase("tiny-moe", "tp=2 etp=2"),
)


def term(rank: int) -> Tensor:
    """Terms of very different sizes, the same in all rows."""
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)
    return row.expand(ROWS, WIDTH).contiguous()


def sums_of_rank(worker: Worker, plan: Plan, ordered: bool) -> tuple[list[Tensor], list[str]]:
    """All-reduce and reduce-scatter of equal rows, by both calls of each."""
    rank = forked_device("cpu", "gloo", worker.rank, RANKS)
    with worker.joined(RANKS, rank):
        mesh = mesh_of(plan, rank.device, ordered)
        boundary = AxisBoundary(mesh, "tp", True, dim=0)
        x = term(worker.rank)
        total, scattered = boundary.total(x), boundary.scatter(x)
        into, mine = x.clone(), torch.empty(ROWS // RANKS, WIDTH)
        boundary.start_total(into).wait()
        boundary.start_scatter(x, mine).wait()
        kinds = sorted({record.kind for record in mesh.records})
        highest = boundary.total(x, "max")
        mesh.close_groups()
    return [total, into, scattered, mine, highest], kinds


def test_sums_are_added_in_rank_order(pool: Pool) -> None:
    plan = resolve(GenerationCase("tiny", f"tp={RANKS}").options, small=True)
    terms = torch.stack([term(rank) for rank in range(RANKS)])
    expected = in_order(terms)
    ranks = pool.run_each([(sums_of_rank, (plan, True))] * RANKS)
    for (total, into, scattered, mine, highest), kinds in ranks:
        assert torch.equal(total, expected) and torch.equal(into, expected)
        few = expected[: ROWS // RANKS]
        assert torch.equal(scattered, few) and torch.equal(mine, few)
        assert torch.equal(highest, terms.amax(0))
        assert kinds == ["all_gather", "all_to_all"]
    # A ring adds the rows of each part in another order.
    plain = pool.run_each([(sums_of_rank, (plan, False))] * RANKS)
    total = plain[0][0][0]
    assert torch.allclose(total, expected, atol=1e-3)
    assert not torch.equal(total, total[:1].expand_as(total))


@pytest.mark.sample(0.25)
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_batches_change_no_bit_in_a_layout(pool: Pool, case: GenerationCase) -> None:
    settings = GeneratedSettings(dtype="float32", batch_invariant=True)
    verdict = run_generated(pool, runnable(case.options, trains=False), settings)
    assert verdict.passed and verdict.tokens_equal, verdict
    assert verdict.batch_diff == verdict.batch_bound == 0.0

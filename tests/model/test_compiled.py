"""Compiled regions under the real step: each one graph, none broken, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils as dynamo
from torch import Tensor

from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.model.regions import Compute, Fuse, eager
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.compose import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step

MADE: dict[Compute, Compute] = {}


def traced(compute: Compute, varies: bool = False) -> Compute:
    """As `compiled`, with kernels that need no compiler."""
    if compute not in MADE:
        MADE[compute] = torch.compile(compute, fullgraph=True, dynamic=varies, backend="eager")
    return MADE[compute]


def losses(plan: Plan, fuse: Fuse) -> list[Tensor]:
    mesh = Mesh.of(plan, torch.device("cpu"))
    job = compose(plan, mesh, seed=0, dtype=torch.float32, fuse=fuse)
    pairs = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
    optimizer = make_optimizer("adamw", pairs, lr=1e-3, weight_decay=0.1)
    drawn = [samples(plan.batch, plan.shape.vocab, 0, number).of(0) for number in range(3)]
    return [step(job, optimizer, batches, 1.0).loss for batches in drawn]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_every_region_is_one_graph_that_all_layers_share(model: str, rule: str) -> None:
    plan = resolve(PlanOptions(model, set={"layers": "3"}, recompute=rule), small=True)
    torch._dynamo.reset()
    MADE.clear()
    dynamo.counters.clear()
    found = losses(plan, traced)
    assert not dynamo.counters["graph_break"]
    graphs = dynamo.counters["stats"]["unique_graphs"]
    deeper = resolve(PlanOptions(model, set={"layers": "5"}, recompute=rule), small=True)
    losses(deeper, traced)
    assert dynamo.counters["stats"]["unique_graphs"] == graphs
    torch.testing.assert_close(torch.stack(found), torch.stack(losses(plan, eager)))

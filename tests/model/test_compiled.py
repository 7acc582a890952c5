"""Compiled blocks under the real step: one graph a block, none broken, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils as dynamo
from torch import Tensor

from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.model.blocks import compile_blocks
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.compose import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step


def losses(plan: Plan, compiled: bool) -> list[Tensor]:
    mesh = Mesh.of(plan, torch.device("cpu"))
    job = compose(plan, mesh, seed=0, dtype=torch.float32)
    if compiled:
        compile_blocks(job.chunks[0].model, backend="eager")
    pairs = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
    optimizer = make_optimizer("adamw", pairs, lr=1e-3, weight_decay=0.1)
    drawn = [samples(plan.batch, plan.shape.vocab, 0, number).of(0) for number in range(3)]
    return [step(job, optimizer, batches, 1.0).loss for batches in drawn]


# torch's own tracer looks at the gradient of every input, and warns about itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_one_graph_for_all_blocks_and_one_for_the_loss() -> None:
    plan = resolve(PlanOptions("tiny", set={"layers": "3"}), small=True)
    torch._dynamo.reset()
    dynamo.counters.clear()
    found = losses(plan, compiled=True)
    assert dynamo.counters["stats"]["unique_graphs"] == 2
    assert not dynamo.counters["graph_break"]
    torch.testing.assert_close(torch.stack(found), torch.stack(losses(plan, compiled=False)))

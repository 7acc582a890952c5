"""What split products keep for backward: a rank's own tokens, or those of all tp ranks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Issued, Mesh

LAYERS = 3


def gathered(worker: Worker, plan: Plan) -> tuple[int, int]:
    """How many gathered tensors live on between forward and backward, and of how many."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float64)
        made: list[StorageWeakRef] = []
        at_ends, of_layers = AxisBoundary.gather, AxisBoundary.start_gather

        def noted(self: AxisBoundary, x: Tensor) -> Tensor:
            whole = at_ends(self, x) + 0  # wait for it, as plain memory
            made.append(StorageWeakRef(whole.untyped_storage()))
            return whole

        def begun(self: AxisBoundary, x: Tensor, into: Tensor) -> Issued:
            made.append(StorageWeakRef(into.untyped_storage()))
            return of_layers(self, x, into)

        drawn = samples(plan.batch, plan.shape.vocab, 0, 0)
        batch = job.local(drawn.of(0)[0])
        with (
            patch.object(AxisBoundary, "gather", noted),
            patch.object(AxisBoundary, "start_gather", begun),
        ):
            loss = job.chunks[0].model(batch.tokens, batch)
            alive, num_made = sum(not each.expired() for each in made), len(made)
            loss.backward()
        again = len(made) - num_made
        mesh.groups.clear()
        return alive, again


@pytest.mark.parametrize(
    ("keep", "alive", "again"), [("shard", 1, 2 * LAYERS), ("gathered", 2 * LAYERS + 1, 0)]
)
def test_products_keep_what_is_asked(pool: Pool, keep: str, alive: int, again: int) -> None:
    """The head keeps what was gathered for it either way: its backward comes next."""
    plan = runnable(PlanOptions("tiny", layout="tp=2", tp_keep=keep, set={"layers": str(LAYERS)}))
    found = pool.run_each([(gathered, (plan,))] * 2)
    mirrors = 2 * LAYERS + 1  # gradients of what leaves: attention and MLP, and the embedding
    assert found == [(alive, again + mirrors)] * 2

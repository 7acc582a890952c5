"""Weights of a training job, in any layout, become those of a generator in any other, in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.weight_table import Weight
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.layout import LayoutEngine, forward_plan
from fivefold.generate.refit import Refit, WeightMove, moves_of
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.composition import compose, compose_forward
from fivefold.parallel.mesh import Mesh
from fivefold.verify.generated import GeneratedTrial
from fivefold.verify.generated_ranks import give_weights

TIED = {"tied": "true", "vocab": "251"}
CASES = [
    ("tiny", "dp=1", "dp=1", {}),
    ("tiny", "dp=2", "tp=2", TIED),
    ("tiny", "pp=2", "tp=2", TIED),
    ("tiny", "tp=2", "pp=2", TIED),
    ("tiny", "dp=2 tp=2", "tp=4", {"kv_heads": "2"}),
    ("tiny", "tp=4", "dp=2 pp=2", {"kv_heads": "2", "qkv_bias": "true"}),
    ("tiny", "cp=2 pp=2", "tp=2 cp=2", {}),
    ("tiny-moe", "dp=4 ep=2", "tp=2 pp=2 ep=2", {}),
    ("tiny-moe", "tp=2 pp=2 ep=2", "dp=4 ep=4", {"moe.bias": "true"}),
    ("tiny-moe", "dp=2 cp=2 ep=4", "tp=2 etp=2 dp=2 ep=2", {"mtp": "1"}),
    ("tiny", "pp=2", "tp=2", {"mtp": "2"}),
]


def plan_for(model: str, layout: str, changes: dict[str, str]) -> Plan:
    return resolve(PlanOptions(model, layout=layout, set={"layers": "2", **changes}), small=True)


def refit_rank(worker: Worker, training: Plan, generating: Plan) -> dict[str, bool]:
    """Of every shard of this rank, whether it is what is cut from the full weight, after two
    updates of the job."""
    with worker.joined(training.layout.world):
        mesh = Mesh.of(training, torch.device("cpu"))
        job = compose(training, mesh, seed=0, dtype=torch.float32)
        other = Mesh.of(generating, torch.device("cpu"))
        stage, wanted = (compose_forward(generating, other, torch.float32) for _ in range(2))
        engine = LayoutEngine(generating, other, stage, 4)
        for seed in (1, 2):
            trial = GeneratedTrial(training.shape, "float32", seed)
            trial.shape = training.shape  # with its layers ahead
            trial.plain = trial.decoder()
            with torch.no_grad():
                for buffer in trial.plain.buffers():
                    buffer.normal_(generator=torch.Generator().manual_seed(seed))
            give_weights(job, trial)
            engine.load(job)

        def read(weight: Weight, dtype: torch.dtype) -> Tensor:
            full = trial.full_weight(weight.name)
            assert full is not None
            return full

        wanted.fill(read)
        expected = wanted.model.state_dict()
        found = {n: torch.equal(t, expected[n]) for n, t in stage.model.state_dict().items()}
        for each in (mesh, other):
            each.close_groups()
        return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " to ".join(case[:3]))
def test_weights_move_between_layouts(
    pool: Pool, case: tuple[str, str, str, dict[str, str]]
) -> None:
    model, theirs, ours, changes = case
    drafts = DraftOptions(int(changes["mtp"]), "mtp") if "mtp" in changes else None
    training, generating = plan_for(model, theirs, changes), plan_for(model, ours, changes)
    generating = forward_plan(generating, drafts)
    task = (refit_rank, (training, generating))
    for found in pool.run_each([task] * training.layout.world):
        assert found and all(found.values()), [name for name, good in found.items() if not good]


def test_a_box_comes_from_the_rank_itself_or_from_an_owner() -> None:
    """Rows 0 to 3 on ranks 0 and 2, rows 4 to 7 on ranks 1 and 3; rank 3 wants rows 2 to 6."""
    low, high, wanted = ((0, 0), (4, 5)), ((4, 0), (4, 5)), ((2, 0), (5, 5))
    ranks = [({"w": [low]}, {}), ({"w": [high]}, {}), ({"w": [low]}, {})]
    (moves,) = moves_of(["w"], [*ranks, ({"w": [high]}, {"w": [wanted]})])
    assert moves == [
        WeightMove("w", 2, 3, low, ((2, 0), (2, 5))),
        WeightMove("w", 3, 3, high, ((4, 0), (3, 5))),
    ]


def test_a_weight_that_nobody_owns_is_no_refit() -> None:
    half, whole = ((0,), (4,)), ((0,), (8,))
    with pytest.raises(AssertionError, match="w has holes"):
        list(moves_of(["w"], [({"w": [half]}, {"w": [whole]})]))


def test_a_job_without_the_layers_that_propose_is_refused() -> None:
    """On one rank: nothing is sent."""
    training, generating = (plan_for("tiny", "dp=1", {"mtp": mtp}) for mtp in ("1", "2"))
    generating = forward_plan(generating, DraftOptions(2, "mtp"))
    mesh = Mesh.of(training, torch.device("cpu"))
    job = compose(training, mesh, seed=0, dtype=torch.float32)
    stage = compose_forward(generating, mesh, torch.float32)
    with pytest.raises(FivefoldError, match=r"the job has no mtp\.1\..*no more layers than"):
        LayoutEngine(generating, mesh, stage, 4).load(job)


def test_other_numbers_of_ranks_are_refused() -> None:
    job, mesh = (
        SimpleNamespace(mesh=SimpleNamespace(layout=Layout(tp=2))),
        SimpleNamespace(layout=Layout(tp=4)),
    )
    with pytest.raises(FivefoldError, match="the job has 2 ranks and the generator 4"):
        Refit(cast("Any", job), cast("Any", None), cast("Any", mesh))

"""Tensor collectives beside matmuls: the same numbers in every mode, and what begins when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fivefold.commands.verify import runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import tensor as columns
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import SplitMatmuls
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial

EXACT = 1e-10
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tiny", "tp=2", {"tp_overlap": 0}),
    ("tiny", "tp=2", {"tp_overlap": 1, "microbatch_size": 3}),
    ("tiny", "tp=2", {"tp_overlap": 2, "microbatch_size": 2, "tp_keep": "gathered"}),
    ("tiny", "tp=4", {"tp_overlap": 4, "recompute": "full", "microbatch_size": 3}),
    ("tiny", "tp=2", {"tp_overlap": 2, "sp": False}),
    ("tiny", "tp=2 cp=2", {"tp_overlap": 2, "recompute": "norm+attention", "packed": True}),
    ("tiny", "tp=2 pp=2", {"tp_overlap": 2, "schedule": "zb-h1", "microbatch_size": 2}),
    ("tiny", "tp=2 pp=2", {"tp_overlap": 2, "schedule": "dualpipe", "microbatches": 4}),
    ("tiny", "tp=2 dp=2", {"tp_overlap": 2, "zero": 3, "recompute": "selective"}),
    ("tiny-moe", "tp=2 dp=2 ep=2", {"tp_overlap": 2, "microbatch_size": 2}),
    ("tiny", "tp=2", {"tp_overlap": 2, "set": {"qkv_bias": "true", "mlp_bias": "true"}}),
    ("tiny", "tp=2 pp=2", {"schedule": "zb-v", "set": {"qkv_bias": "true", "out_bias": "true"}}),
    ("deepseek-v3", "tp=2 pp=2", {"tp_overlap": 2, "set": {"layers": "4"}}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout", "said"), CASES)
def test_every_mode_computes_what_one_device_does(
    pool: Pool, model: str, layout: str, said: dict[str, Any]
) -> None:
    plan = runnable(PlanOptions(model, layout=layout, **said))
    verdict = run_trial(pool, plan, VerifySettings(steps=2))
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert max(verdict.errors.values()) <= EXACT


def begun_in_backward(worker: Worker, plan: Plan) -> list[str]:
    """What the backward of the last MLP's projections does, in order."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float64)
        batch = job.local(samples(plan.batch, plan.shape.vocab, 0, 0).of(0)[0])
        loss = job.chunks[0].model(batch.tokens, batch)
        said: list[str] = []
        with (
            patch.object(AxisBoundary, "start_gather", _saying(said, "gather", waits=True)),
            patch.object(AxisBoundary, "start_scatter", _saying(said, "scatter", waits=True)),
            patch.object(columns, "_input_gradient", _saying(said, "input gradient")),
            patch.object(columns, "_weight_gradients", _saying(said, "weight gradients")),
        ):
            loss.backward()
        mesh.groups.clear()
        return said


def _saying(said: list[str], name: str, waits: bool = False) -> Callable[..., Any]:
    """The same function, which says that it begins, and when its result was waited for."""
    owner: Any = AxisBoundary if waits else columns
    inner = getattr(owner, f"start_{name}" if waits else f"_{name.replace(' ', '_')}")

    def run(*given: Any) -> Any:
        said.append(name)
        found = inner(*given)
        if not waits:
            return found

        def wait() -> object:
            said.append(f"{name} is over")
            return found.wait()

        return SimpleNamespace(wait=wait)

    return run


@pytest.mark.parametrize(
    ("overlap", "wanted"),
    [
        (
            0,
            [
                *("gather", "gather is over", "input gradient", "scatter", "scatter is over"),
                "weight gradients",
            ],
        ),
        (
            1,
            [
                *("gather", "input gradient", "scatter", "gather is over"),
                *("weight gradients", "scatter is over"),
            ],
        ),
        (
            2,
            [
                *("gather", "gather", "input gradient", "scatter", "input gradient", "scatter"),
                *("gather is over", "gather is over", "weight gradients"),
                *("scatter is over", "scatter is over"),
            ],
        ),
    ],
)
def test_collectives_of_a_backward_begin_before_the_matmuls_beside_them(
    pool: Pool, overlap: int, wanted: list[str]
) -> None:
    plan = runnable(PlanOptions("tiny", layout="tp=2", tp_overlap=overlap, set={"layers": "1"}))
    rows = ["gather"] * max(1, overlap) + ["gather is over"] * max(1, overlap)
    for said in pool.run_each([(begun_in_backward, (plan,))] * 2):
        assert said == 2 * [*rows, "weight gradients", *wanted]


def order_of(size: int, chunks: int) -> SplitMatmuls:
    boundary: Any = SimpleNamespace(size=size, sp=True)
    return SplitMatmuls(boundary, None, chunks)


@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (2, 1), (3, 2), (1, 3), (2, 6)])
def test_tokens_come_in_the_order_of_gathers_and_go_back(rows: int, chunks: int) -> None:
    size, seq = 4, 24
    matmuls = order_of(size, chunks)
    x_BSO = torch.arange(rows * seq * 5).view(rows, seq, 5)
    mine = [part.flatten(0, 1).chunk(chunks) for part in x_BSO.chunk(size, dim=1)]
    gathered = torch.cat([mine[rank][chunk] for chunk in range(chunks) for rank in range(size)])
    assert matmuls._from_rows(x_BSO).equal(gathered)
    assert matmuls._to_rows(gathered, rows).equal(x_BSO)


def test_one_row_in_one_chunk_is_not_copied() -> None:
    matmuls, x_BSO = order_of(4, 1), torch.zeros(1, 24, 5)
    there = matmuls._from_rows(x_BSO)
    assert there.data_ptr() == x_BSO.data_ptr()
    assert matmuls._to_rows(there, 1).data_ptr() == x_BSO.data_ptr()


def test_chunks_cut_the_tokens_of_a_rank_evenly() -> None:
    options = PlanOptions("tiny", layout="tp=2", seq=64, tp_overlap=5)
    with pytest.raises(FivefoldError, match=r"32 tokens .* that does is 4"):
        resolve(options)
    with pytest.raises(FivefoldError, match="tp_overlap -1: choose 0"):
        resolve(PlanOptions("tiny", layout="tp=2", tp_overlap=-1))
    assert resolve(PlanOptions("tiny", layout="dp=2", seq=64, tp_overlap=5))

"""Compiled regions under the real step: each one graph, none broken, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo
import torch._inductor.config
from torch import Tensor
from torch._inductor.triton_bundler import TritonBundler

from fivefold.core.model import presets as models
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.requests import Request
from fivefold.model.kernels import regions
from fivefold.model.kernels.regions import Compute, Fuse, eager, with_any_rows
from fivefold.model.layers import Activate, rms_norm
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step

MADE: dict[Compute, Compute] = {}


def traced(compute: Compute, varies: bool = False) -> Compute:
    """As `compiled`, with kernels that need no compiler."""
    if compute not in MADE:
        how = None if varies else False
        made = torch.compile(compute, fullgraph=True, dynamic=how, backend="eager")
        MADE[compute] = partial(with_any_rows, made) if varies else made
    return MADE[compute]


def losses(plan: Plan, fuse: Fuse) -> list[Tensor]:
    mesh = Mesh.of(plan, torch.device("cpu"))
    job = compose(plan, mesh, seed=0, dtype=torch.float32, fuse=fuse)
    pairs = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
    optimizer = make_optimizer("adamw", pairs, lr=1e-3, weight_decay=0.1)
    drawn = [samples(plan.batch, plan.shape.vocab, 0, number).of(0) for number in range(3)]
    return [step(job, optimizer, batches, 1.0).loss for batches in drawn]


@pytest.mark.sample(0.34)
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


def test_a_region_of_experts_is_one_graph_for_any_number_of_rows() -> None:
    torch._dynamo.reset()
    MADE.clear()
    dynamo.counters.clear()
    activate = Activate(models.load("tiny-moe"), traced, varies=True)
    for rows in (12, 7, 30):
        gate, up = (torch.randn(rows, 16, requires_grad=True) for _ in range(2))
        weights = torch.rand(rows, 1, requires_grad=True)
        found = activate(gate, up, weights)
        expected = torch.nn.functional.silu(gate) * up * weights
        torch.testing.assert_close(found, expected)
        leaves, slope = (gate, up, weights), torch.randn(rows, 16)
        wanted = torch.autograd.grad(expected, leaves, slope)
        for mine, theirs in zip(torch.autograd.grad(found, leaves, slope), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert dynamo.counters["stats"]["unique_graphs"] == 2  # forward and backward


def test_steps_of_a_generator_are_compiled_once_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server compiled norms anew for each length of a prompt, until the compiler refused."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(regions, "_compiled_for_steps", regions._compiled_for_steps.__wrapped__)
    shape = models.load("tiny")
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh = mesh_of(plan, torch.device("cpu"), False)
    stage = stage_of(plan, mesh, torch.float32, False, regions.compiled_for_steps)
    stage.fill(lambda weight, _: torch.ones(weight.shape) / 64)
    engine = LayoutEngine(plan, mesh, stage, 64)

    def graphs(lengths: range) -> int:
        dynamo.counters["stats"]["unique_graphs"] = 0
        requests = [Request(str(length), (1,) * length, 2) for length in lengths]
        for each in requests:
            engine.run([each])
        engine.run(requests[:5])
        return dynamo.counters["stats"]["unique_graphs"]

    assert graphs(range(1, 9)) == 0, "few tokens run by operators"
    monkeypatch.setattr(import_module("fivefold.generate.forward"), "_MANY_TOKENS", 0)
    assert graphs(range(1, 3)) > 0, "one token, and several"
    assert graphs(range(3, 90)) == 0


def test_the_first_size_of_a_step_is_compiled_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    dynamo.counters.clear()
    normed = regions._compiled_for_steps.__wrapped__(rms_norm)
    for tokens in (5, 7, 4096):
        normed(torch.randn(1, tokens, 8), torch.rand(8), None, 1e-6)
    assert dynamo.counters["stats"]["unique_graphs"] == 1


def test_no_size_ends_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ended with FailOnRecompileLimitHit. Here every width is compiled anew."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(regions, "_MOST_SIZES", 2)
    dynamo.counters.clear()
    normed = regions._compiled_for_steps.__wrapped__(rms_norm)
    with dynamo_config.patch(recompile_limit=2), torch.inference_mode():
        for width in range(8, 13):
            for tokens in (1, 5, 7):
                x, weight = torch.randn(1, tokens, width), torch.rand(width)
                found = normed(x, weight, None, 1e-6)
                torch.testing.assert_close(found, rms_norm(x, weight, None, 1e-6))
    assert dynamo.counters["stats"]["unique_graphs"] == 2, "the limit was hit"
    torch._dynamo.reset()


def test_ranks_may_share_the_cache_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached graphs that bring their kernels need it for themselves: ranks printed tracebacks."""
    monkeypatch.setattr(torch._inductor.config, "bundle_triton_into_fx_graph_cache", True)
    for fuse in (regions.compiled.__wrapped__, regions._compiled_for_steps.__wrapped__):
        assert TritonBundler.is_enabled()
        fuse(rms_norm)
        assert not TritonBundler.is_enabled()
        torch._inductor.config.bundle_triton_into_fx_graph_cache = True

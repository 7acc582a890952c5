"""An engine with weights in codes of fp8 generates as one whose weights were rounded to fp8 and
back; wrong scales are seen, and what is no code stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fp8_alone import rounded
from small import DEEPSEEK, GPT, LLAMA, MOE
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core import hardware as machines
from fivefold.core.layout import Layout, Weight, stores_codes
from fivefold.core.model import Shape
from fivefold.core.plan import PlanOptions
from fivefold.generate import (
    LayoutEngine,
    ModelOptions,
    ScheduleLimits,
    TextModel,
    coded_weights,
    mesh_of,
    plan_of,
    set_up,
    stage_of,
)
from fivefold.generate.requests import Completion, Request
from fivefold.model import Linear
from fivefold.parallel import ForwardStage
from fivefold.planner.serving.fit import ServingFit, ServingRequest
from fivefold.verify.generated import GeneratedTrial

SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "moe": MOE,
    "latent": replace(DEEPSEEK, mtp=0),
    "sinks": replace(LLAMA, score_cap=0.3, sinks=True, window=7),
}
CPU = torch.device("cpu")


def stage_for(shape: Shape, dtype: torch.dtype, codes: bool, same: bool = False) -> Any:
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    mesh = mesh_of(plan, CPU, same)
    return plan, mesh, stage_of(plan, mesh, dtype, same, codes=codes)


def read_of(shape: Shape, dtype: str, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    trial = GeneratedTrial(shape, dtype, 0)

    def read(weight: Weight, dtype: torch.dtype) -> Tensor:
        full = trial.full_weight(weight.name)
        assert full is not None
        return change(full) if change and stores_codes(weight.name) else full

    return read


def completions_of(
    shape: Shape, codes: bool, same: bool = False, change: Callable[[Tensor], Tensor] | None = None
) -> list[Completion]:
    plan, mesh, stage = stage_for(shape, torch.float64, codes, same)
    stage.fill(read_of(shape, "float64", change))
    engine = LayoutEngine(plan, mesh, stage, 20, ScheduleLimits(40), batch_invariant=same)
    assert (engine.decode_steps.codes, engine.decode_steps.fixed_tiles) == (codes, same)
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(shape.vocab, (length,), generator=dice) for length in (9, 20, 3)]
    requests = [Request(f"{i}", tuple(map(int, prompt)), 8) for i, prompt in enumerate(prompts)]
    completions = engine.run(requests)
    engine.close()
    return [completions[request.id] for request in requests]


def distance(one: list[Completion], other: list[Completion]) -> float:
    pairs = zip(one, other, strict=True)
    return max(
        abs(a - b)
        for first, second in pairs
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    )


@pytest.mark.parametrize("same", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_codes_generate_as_the_rounded_weights_do(shape: Shape, same: bool) -> None:
    coded, expected = completions_of(shape, True, same), completions_of(shape, False, same, rounded)
    assert [each.tokens for each in coded] == [each.tokens for each in expected]
    assert distance(coded, expected) < 1e-12
    assert distance(coded, completions_of(shape, False, same)) > 1e-3  # what rounding changes


def forgotten(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * scale.amax().to(dtype)


def of_neighbours(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * scale.to(dtype).roll(1, -2)


@pytest.mark.parametrize("wrong", [forgotten, of_neighbours], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ["llama", "moe", "latent"])
def test_wrong_scales_are_seen(wrong: Any, name: str) -> None:
    expected = completions_of(SHAPES[name], False, False, rounded)
    with patch.object(coded_weights, "weight_values", wrong):
        coded = completions_of(SHAPES[name], True)
    assert distance(coded, expected) > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_stage_holds_what_the_planner_counts(shape: Shape) -> None:
    """To the byte, but for scales: a layer that was left in bf16 would show."""
    _, _, stage = stage_for(shape, torch.bfloat16, True)
    held = sum(weight.nbytes for weight in stage.model.parameters())
    request = ServingRequest(shape, machines.load("h200"), 1, 8, 8, precision="fp8")
    assert held == ServingFit(request, Layout()).weights
    assert {name for name in stage.shards if stores_codes(name)} == set(stage.scales)
    scales = sum(scale.numel() for scale in stage.scales.values())
    coded = [weight for name, weight in stage.table.items() if stores_codes(name)]
    assert scales == sum(weight.numel // weight.shape[-1] for weight in coded)
    for name, weight in stage.model.named_parameters():
        assert (weight.dtype == torch.float8_e4m3fn) == stores_codes(name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_rounded_values(dtype: torch.dtype) -> None:
    """Scales reach from the smallest weights to rows of zeros."""
    _, _, stage = stage_for(LLAMA, dtype, True)
    stage.fill(read_of(LLAMA, str(dtype)[6:], enlarged))
    read = read_of(LLAMA, str(dtype)[6:], enlarged)
    for name, linear in stage.model.named_modules():
        if isinstance(linear, Linear) and linear.row_scale is not None:
            full = read(stage.table[f"{name}.weight"], dtype)
            values = linear.weight.double() * linear.row_scale.double()
            assert torch.equal(values, rounded(full)), name


def enlarged(full: Tensor) -> Tensor:
    rows = torch.logspace(-30, 30, len(full), dtype=torch.float64)[:, None]
    rows[0] = 0
    return (full.double() * rows).to(full.dtype)


def test_the_memory_of_wide_weights_is_never_taken() -> None:
    """While a stage is filled, one full weight at a time is there in its wide type."""
    _, _, stage = stage_for(LLAMA, torch.float32, True)
    assert all(
        weight.element_size() == 1
        for name, weight in stage.model.named_parameters()
        if stores_codes(name)
    )
    before = {name: weight.data_ptr() for name, weight in stage.model.named_parameters()}
    stage.fill(read_of(LLAMA, "float32"))
    assert before == {name: weight.data_ptr() for name, weight in stage.model.named_parameters()}


def test_weights_of_a_running_job_are_refused() -> None:
    plan, mesh, stage = stage_for(LLAMA, torch.float32, True)
    assert isinstance(stage, ForwardStage)
    engine = LayoutEngine(plan, mesh, stage, 4, ScheduleLimits(40))
    with pytest.raises(FivefoldError, match=r"--precision fp8.*load a checkpoint"):
        engine.load(None)  # type: ignore[arg-type]
    engine.close()


def test_adapters_are_refused() -> None:
    lora = PlanOptions("tiny", train=replace(PlanOptions("tiny").train, lora=4))
    model = TextModel(LLAMA, lora, Path(), Path(), True)
    with pytest.raises(FivefoldError, match="merge them with `fivefold export`"):
        set_up(model, ModelOptions(device="cpu", precision="fp8"), lambda tell: None)  # type: ignore[arg-type, return-value]

"""Codes in fp8 over ranks: tokens of a layout are those of one rank, and every rank has its part of
the same codes and scales; of weights, and of keys and values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.layout import local_shape, origin_of
from fivefold.core.model import BLOCK
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.generate import cache
from fivefold.generate.layout import LayoutEngine, forward_plan, mesh_of, stage_of
from fivefold.generate.requests import Completion, Request
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import ForwardStage, composition, tensor
from fivefold.verify.generated import GeneratedTrial

CASES = (
    *(("tiny", layout) for layout in ("tp=2", "pp=2", "tp=2 pp=2", "cp=2")),
    *(("tiny-moe", layout) for layout in ("tp=2 ep=2", "dp=2 ep=2", "tp=2 etp=2", "pp=2")),
    *((model, "tp=2") for model in ("deepseek-v3", "gpt2")),
)
WITH_KEYS = (
    *(("tiny", layout) for layout in ("tp=2", "tp=2 pp=2", "cp=2")),
    *(("tiny-moe", "tp=2 ep=2"), ("deepseek-v3", "tp=2"), ("deepseek-v3", "cp=2")),
)


@dataclass(frozen=True)
class Coded:
    """What a rank drew, and its scales: of each weight by the first row and the number of rows."""

    completions: dict[str, Completion]
    scales: dict[tuple[str, int, int], list[float]]


def plan_for(model: str, layout: str) -> Plan:
    changes = {"layers": "2", "max_seq": "160"} if model.startswith("tiny") else {}
    return forward_plan(runnable(PlanOptions(model, layout=layout, set=changes), trains=False))


def scale_of_all_heads() -> AbstractContextManager[object]:
    """The heads of a token share a scale, and a rank knows its own heads alone."""

    def write(pages: Tensor, scales: Tensor, slots_T: Tensor, x_TKd: Tensor) -> None:
        rows = composition.round_rows([x_TKd.flatten(1)], None)
        scales[slots_T // BLOCK, slots_T % BLOCK] = rows.scale[:, None]
        codes = rows.codes.view(torch.uint8).view(x_TKd.shape)
        pages.flatten(0, 1).index_copy_(0, slots_T, codes)

    return patch.object(cache, "_write", write)


def scale_of_shard() -> AbstractContextManager[object]:
    """A weight is cut before it is rounded: its rows have the scales of their shards."""

    def fill(stage: ForwardStage, read: object) -> None:
        assert callable(read)
        scales, dtype = stage.scales, stage.model.dtype
        for name, parameter in (*stage.model.named_parameters(), *stage.model.named_buffers()):
            full = read(stage.table[name], dtype)
            local = tensor.cut(full, stage.shards[name])
            if name not in scales:
                parameter.copy_(local)
                continue
            rows = composition.round_rows([local.flatten(0, -2)], None)
            parameter.copy_(rows.codes.view_as(local))
            scales[name].copy_(rows.scale.view_as(scales[name]))

    return patch.object(ForwardStage, "fill", torch.no_grad()(fill))


FAULTS = {
    "": nullcontext,
    "scales of shards": scale_of_shard,
    "scales of all heads": scale_of_all_heads,
}


def rank_of(worker: Worker, plan: Plan, fault: str = "", kv_codes: bool = False) -> Coded:
    rank = forked_device("cpu", "gloo", worker.rank, plan.layout.world)
    with worker.joined(plan.layout.world, rank), FAULTS[fault]():
        trial = GeneratedTrial(plan.shape, "float64", 0)
        mesh = mesh_of(plan, rank.device, False)
        stage = stage_of(plan, mesh, torch.float64, False, codes=not kv_codes)
        stage.fill(lambda weight, dtype: full(trial, weight.name))
        engine = LayoutEngine(plan, mesh, stage, 40, ScheduleLimits(48), kv_codes=kv_codes)
        dice = torch.Generator().manual_seed(5)
        prompts = [torch.randint(plan.shape.vocab, (size,), generator=dice) for size in (9, 60, 3)]
        requests = [Request(f"{i}", tuple(map(int, row)), 8) for i, row in enumerate(prompts)]
        completions = engine.run(requests)
        engine.close()
        if plan.layout.world > 1:
            torch.distributed.barrier()
        mesh.close_groups()
        return Coded(completions, dict(scales_of(stage)))


def scales_of(stage: ForwardStage) -> list[tuple[tuple[str, int, int], list[float]]]:
    found: list[tuple[tuple[str, int, int], list[float]]] = []
    for name, scale in stage.scales.items():
        weight, shard = stage.table[name], stage.shards[name]
        if weight.expert:
            continue
        size, origin = local_shape(weight, shard), origin_of(weight.shape, shard)
        found.append(((name, origin[0], size[0]), scale.flatten().tolist()))
    return found


def full(trial: GeneratedTrial, name: str) -> Tensor:
    weight = trial.full_weight(name)
    assert weight is not None, name
    return weight


def differences(alone: Coded, ranks: list[Coded]) -> list[str]:
    """What is not as on one rank."""
    scales = {name: values for (name, _, _), values in alone.scales.items()}
    wrong: list[str] = []
    for rank in ranks:
        for id, expected in alone.completions.items():
            drawn = rank.completions[id]
            near = drawn.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-10)
            wrong += [] if near and drawn.tokens == expected.tokens else [f"tokens of {id}"]
        for (name, first, rows), values in rank.scales.items():
            same = values == scales[name][first : first + rows]
            wrong += [] if same else [f"scales of {name}"]
    return wrong


def run(pool: Pool, model: str, layout: str, fault: str = "", kv_codes: bool = False) -> list[str]:
    (alone,) = pool.run_each(
        [(rank_of, (plan_for(model, "dp=1"), fault if kv_codes else "", kv_codes))]
    )
    plan = plan_for(model, layout)
    ranks = pool.run_each([(rank_of, (plan, fault, kv_codes))] * plan.layout.world)
    return differences(alone, ranks)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_layout_draws_from_codes_what_one_rank_does(pool: Pool, model: str, layout: str) -> None:
    assert not run(pool, model, layout)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout"), [("tiny", "tp=2"), ("tiny-moe", "tp=2 etp=2")])
def test_scales_of_shards_are_seen(pool: Pool, model: str, layout: str) -> None:
    assert run(pool, model, layout, "scales of shards")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "layout"), WITH_KEYS)
def test_a_layout_draws_from_coded_keys_what_one_rank_does(
    pool: Pool, model: str, layout: str
) -> None:
    assert not run(pool, model, layout, kv_codes=True)


@pytest.mark.sample(1)
def test_scales_of_all_heads_are_seen(pool: Pool) -> None:
    """One scale for the heads of a token would depend on which of them a rank has."""
    assert run(pool, "tiny", "tp=2", "scales of all heads", kv_codes=True)

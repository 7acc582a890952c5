"""A search and a plan share one rule of legality: what a space offers, `resolve` accepts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.cost.grid import LayoutGrid
from fivefold.planner.estimate import estimate_plan
from fivefold.planner.neighbours import compare_neighbours
from fivefold.planner.planning import plan_request
from fivefold.planner.space import LayoutBlock, SearchSpace, layout_blocks, layout_of, options_of

MODELS = ("llama-3.1-405b", "deepseek-v3", "llama-3.2-1b", "qwen3-30b-a3b", "gpt2")
GPUS = (72, 144, 216, 36, 24, 12, 7, 3)
MACHINES = {"gb200": "mxfp8", "h100": "fp8", "h800": "bf16", "b300": "nvfp4"}


def space_of(model: str, name: str, gpus: int, planned: str, **keys: Any) -> SearchSpace:
    train = Recipe(**keys.pop("train", {}))
    options = PlanOptions(model=model, machine=name, gpus=gpus, train=train, **keys)
    return plan_request(options, machine.load(name), {}, precision=planned, headroom=0.05).space


def drawn(blocks: list[LayoutBlock], rng: random.Random, number: int) -> list[LayoutGrid]:
    """Some legal layouts of a space."""
    grids: list[LayoutGrid] = []
    for _ in range(number):
        block = rng.choice(blocks)
        legal = np.flatnonzero(np.broadcast_to(block.legal, block.shape))
        if len(legal):
            place = np.unravel_index(rng.choice(legal), block.shape)
            grids.append(block.grid.at(tuple(int(i) for i in place)))
    return grids


def require_resolved(space: SearchSpace, rng: random.Random, number: int) -> int:
    """Resolve some layouts of the space; how many there were."""
    assert space.options is not None
    grids = drawn(list(layout_blocks(space)), rng, number)
    for grid in grids:
        plan = resolve(options_of(grid, space.options))
        assert plan.layout == layout_of(grid) and plan.layout.world == space.gpus
    return len(grids)


@pytest.mark.parametrize("gpus", GPUS)
def test_what_a_search_offers_is_legal(gpus: int) -> None:
    rng = random.Random(gpus)
    for model in MODELS:
        name, precision = rng.choice([*MACHINES.items()])
        job = (
            (model, "gb200", gpus, "mxfp8")
            if model == MODELS[0]
            else (model, name, gpus, precision)
        )
        assert require_resolved(space_of(*job), rng, 25) > 0


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama-3.1-8b", {"train": {"offload_grads": "cpu"}}),
        ("mixtral-8x7b", {"train": {"offload_grads": "cpu"}}),
        ("llama-3.1-8b", {"tp_overlap": 3, "seq": 512}),
        ("llama-3.1-8b", {"tp_overlap": 4, "seq": 2048, "precision": "fp8", "fp8": "blockwise"}),
        ("qwen3-30b-a3b", {"balance": "capacity-pad:1.5"}),
        ("mixtral-8x7b", {"ep_nodes": 2}),
        ("llama-3.1-8b", {"train": {"copy_every": 5}}),
        ("llama-3.1-8b", {"train": {"optimizer": "muon"}}),
    ],
    ids=str,
)
def test_keys_bound_a_search(model: str, keys: dict[str, Any]) -> None:
    """Keys that some layouts cannot have leave those out, and leave others."""
    space = space_of(model, "h100", 32, keys.get("precision", "bf16"), **keys)
    assert require_resolved(space, random.Random(0), 60) > 30
    free = replace(space, options=None)
    refused = 0
    for grid in drawn(list(layout_blocks(free)), random.Random(0), 60):
        try:
            resolve(options_of(grid, space.options))  # type: ignore[arg-type]
        except FivefoldError:
            refused += 1
    assert refused, "the key refuses no layout: this case shows nothing"


def test_neighbours_are_legal() -> None:
    """Gradients that leave the device need shards: neighbours without them are refused in words."""
    train = Recipe(offload_grads="cpu")
    options = PlanOptions(
        "llama-3.2-1b", layout="dp=8", zero=3, seq=2048, machine="h100", train=train
    )
    request = plan_request(
        replace(options, gpus=8), machine.load("h100"), {}, precision="bf16", headroom=0.05
    )
    chosen = estimate_plan(resolve(options), request.setting)
    zero = next(one for one in compare_neighbours(chosen) if one.axis == "zero")
    refused = {one.value for one in zero.neighbours if one.refused}
    assert refused == {0, 1}
    options = replace(options, zero=2, train=Recipe(), precision="fp8", fp8="mxfp8", seq=1536)
    assert compare_neighbours(estimate_plan(resolve(options), request.setting))


@pytest.mark.parametrize(("layout", "shards"), [("dp=1", False), ("dp=2", True), ("cp=2", True)])
def test_a_rank_alone_has_nothing_to_shard(layout: str, shards: bool) -> None:
    options = PlanOptions("llama-3.2-1b", layout=layout, seq=2048, microbatches=2, machine="h100")
    request = plan_request(
        replace(options, gpus=1 + shards), machine.load("h100"), {}, precision="bf16", headroom=0.05
    )
    axes = [
        one.axis for one in compare_neighbours(estimate_plan(resolve(options), request.setting))
    ]
    assert ("zero" in axes) == shards and "recompute" in axes

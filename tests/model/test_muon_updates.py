"""Muon on one device: what it takes, how it turns, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_updaters import ROLES, SHAPES, Weight, of, some_weights
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.units import LocalWeight, local_weights
from fivefold.core.model import presets as models
from fivefold.core.plan.recipe import Recipe
from fivefold.cost.traffic.collectives import is_muon_weight
from fivefold.optim.muon import orthogonalize
from fivefold.parallel.units.matrix_gather import GatheredMatrices, _Cut


@pytest.mark.parametrize("sizes", [(24, 24), (10, 50), (50, 10), (3, 12, 40), (1, 30)], ids=str)
def test_newton_schulz_makes_matrices_orthogonal(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(sizes, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize(matrices)
    turned = left.mT @ found @ right.mT
    values = torch.diagonal(turned, dim1=-2, dim2=-1)
    assert float((turned - torch.diag_embed(values)).abs().max()) < 1e-9
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    if len(sizes) == 3:
        assert torch.allclose(found[1], orthogonalize(matrices[1]), atol=1e-12)
    assert torch.equal(orthogonalize(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_muon_takes_the_matrices_between_the_ends() -> None:
    taken = {
        "blocks.0.attention.q.weight": True,
        "blocks.1.mlp.experts.up.weight": True,
        "blocks.1.mlp.router.weight": True,
        "mtp.0.join.weight": True,
        "blocks.0.attention.q.bias": False,
        "blocks.1.mlp.experts.up.bias": False,
        "blocks.1.mlp.experts.down.bias": False,
        "blocks.1.mlp.router.shift": False,
        "blocks.0.attention_norm.weight": False,
        "embed.weight": False,
        "head.weight": False,
        "mtp.embed.weight": False,
    }
    shape = models.load("tiny-moe")
    assert shape.moe is not None
    shape = replace(shape, mtp=1, qkv_bias=True, moe=replace(shape.moe, biases=True))
    for rows in (
        local_weights(shape, Layout(), range(shape.layers)),
        local_weights(shape, Layout(pp=2), range(1, shape.layers)),
        local_weights(shape, Layout(shard=2, ep=2, tp=2), range(shape.layers)),
    ):
        found = {row.name: is_muon_weight(row) for row in rows if row.name in taken}
        assert found == {name: taken[name] for name in found} and len(found) > 7
    gpt2 = models.load("gpt2")
    learned = local_weights(gpt2, Layout(), range(gpt2.layers))
    assert not any(is_muon_weight(row) for row in learned if row.block in ("embed", "head"))


def test_muon_is_torchs_own_up_to_bfloat16() -> None:
    """torch multiplies in bfloat16 whatever the weights are; ours are float32."""
    row = LocalWeight("w", "blocks.0", (40, 60))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(row.shape, generator=generator)
    ours = Weight(row, start.clone(), torch.zeros(row.shape))
    theirs = torch.nn.Parameter(start.clone())
    updater = of(Recipe(optimizer="muon", lr=1e-2), [ours])
    adjusted = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95, "nesterov": True}
    optimizer = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, **adjusted)
    for _ in range(3):
        ours.grad = torch.randn(row.shape, generator=generator)
        theirs.grad = ours.grad.clone()
        updater.step()
        optimizer.step()
    moved, wanted = ours.tensor - start, theirs.detach() - start
    assert float((moved - wanted).norm() / wanted.norm()) < 0.02
    rms = float((moved + 3e-3 * start).square().mean().sqrt()) / 3  # of a step, without the decay
    assert rms == pytest.approx(0.2 * 1e-2, rel=0.5)


def test_muon_and_offload_are_refused_together(tmp_path: Path) -> None:
    for changes in ({"offload": "cpu"}, {"offload": f"nvme:{tmp_path}"}, {"states": "bf16"}):
        with pytest.raises(FivefoldError, match="muon keeps its"):
            of(Recipe(optimizer="muon", **changes), some_weights())  # type: ignore[arg-type]


def test_the_ends_of_a_muon_run_have_adamws_states() -> None:
    weights = some_weights()
    weights[0].row = LocalWeight("embed.weight", "embed", SHAPES[0], role="embedding")
    states = of(Recipe(optimizer="muon"), weights).states()
    there = {key: [one is not None for one in kept] for key, kept in states.items()}
    matrices = [role == "matrix" for role in ROLES]
    matrices[0] = False
    assert there == {
        "momentum": matrices,
        "exp_avg": [not one for one in matrices],
        "exp_avg_sq": [not one for one in matrices],
    }


@pytest.mark.parametrize(("dim", "copies"), [(0, 1), (0, 2), (0, 4), (1, 1)])
def test_a_matrix_is_joined_from_one_copy_of_each_shard(dim: int, copies: int) -> None:
    """Ranks of tp hold the same KV heads, where there are fewer heads than ranks."""
    ranks, full = 4, torch.arange(32.0).view(8, 4)
    chunks = full.chunk(ranks // copies, dim)
    other = torch.arange(12.0).view(4, 3)  # a matrix that is cut without copies, in the same call
    held = [(chunks[rank // copies], other[rank : rank + 1]) for rank in range(ranks)]

    def all_gather(whole: Tensor, part: Tensor, axis: str) -> Any:
        assert axis == "tp"
        whole.copy_(torch.cat([torch.cat([one.reshape(-1) for one in each]) for each in held]))
        return SimpleNamespace(wait=lambda: None)

    own: Any = SimpleNamespace(mesh=SimpleNamespace(size=lambda _: ranks, all_gather=all_gather))
    cuts = {3: _Cut(dim, 0, chunks[0].shape[dim], copies), 5: _Cut(0, 0, 1, 1)}
    found = dict(GatheredMatrices._joined(own, dict(zip(cuts, held[0], strict=True)), cuts, "tp"))
    assert found[3].equal(full) and found[5].equal(other)
